"""A damaged membership file of a host is read in bounded time, and then ignored or refused with a readable error."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from evener.core.base.errors import EvenerError
from evener.core.base.json_files import read_json
from evener.core.run.membership_epoch import (
    AgentSpec,
    HostEntry,
    MembershipEpoch,
    RankStatus,
    Rendezvous,
    read_rendezvous,
)
from evener.core.run.roster import Member, Roster, parse_sync
from evener.core.run.run_plan import read_launcher_roster
from evener.node.agent.__main__ import HostAgent
from evener.node.agent.consensus import AcceptorState, ConsensusState
from evener.node.agent.rank_processes import RankProcesses
from evener.worker.membership.memory_limits import KilledRanks, RankMemoryLimit, SupervisorOomState, read_host_file
from tests.in_process import time_limit
from tests.unit.test_damaged_files import damage, remove

NUM, SEED, HANGS_S = 2000, 20261124, 60
PARTS = {name: HostEntry(address="127.0.0.1", num_ranks=1) for name in "abc"}
WORLD = MembershipEpoch(
    number=3, hosts=["b", "a"], standby_hosts=["c"], is_cold_start=False, why="c is out of reach", step=17
)
MEMBERS = [Member(rank=rank, host=host, device="cpu", dtype="fp32", share=4, micro_batch=4)
           for rank, host in enumerate("abc")]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder on host a."""
    spec = AgentSpec(run="r", host="a", hosts=PARTS, first=["a", "b"], port=1,
                     program=["-m", "evener.worker"], is_elastic=True)  # fmt: skip
    files = {
        "host/agent.json": spec,
        "host/kept.json": ConsensusState(WORLD, AcceptorState((2, "b"), (1, "a"), WORLD), incarnation=2),
        "host/world.json": Rendezvous(epoch=WORLD, address="127.0.0.1", port=2, first_rank=1, world_size=2),
        "host/sayings/0": RankStatus(pid=7, epoch_number=3, step=17),
        "host/killed.json": KilledRanks({0: 12.5}),
        "host/memory-0.json": RankMemoryLimit(8, 4, 12.5),
        "host/state.json": SupervisorOomState(12.0),
        "roster.json": Roster(members=MEMBERS, sync=parse_sync("ddp"), backend="gloo"),
    }
    (tmp_path / "host" / "sayings").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / name).write_bytes(msgspec.json.encode(content))
    monkeypatch.setenv("EVENER_WORLD", str(tmp_path / "host" / "world.json"))
    monkeypatch.setenv("EVENER_ROSTER", str(tmp_path / "roster.json"))
    return tmp_path


def read_all(folder: Path) -> None:
    """As agent and ranks do."""
    agent = HostAgent(read_json(folder / "host" / "agent.json", AgentSpec), folder)
    agent._reload_spec()
    read_rendezvous()
    read_launcher_roster()
    for name, kind in (
        ("killed.json", KilledRanks),
        ("memory-0.json", RankMemoryLimit),
        ("state.json", SupervisorOomState),
    ):
        read_host_file(name, kind)
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._status_folder = folder / "host" / "sayings"
    ranks.rank_statuses()


def error_of(folder: Path) -> EvenerError | None:
    try:
        read_all(folder)
    except EvenerError as error:
        return error
    return None


def test_undamaged_membership_files_are_read(folder: Path) -> None:
    read_all(folder)
    assert read_rendezvous().epoch == WORLD
    assert read_host_file("killed.json", KilledRanks) == KilledRanks({0: 12.5})


def test_damaged_membership_file_is_a_readable_error_or_ignored(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dice, counts, outside = random.Random(SEED), Counter[str](), tmp_path_factory.mktemp("outside")
    (outside / "file").write_bytes(b"{}")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in paths}
    with time_limit(HANGS_S):  # a pipe that nobody writes to, a device without an end
        for _ in range(NUM):
            path = dice.choice(paths)
            damage(path, dice, outside)
            error = error_of(folder)
            assert error is None or path.name in str(error)
            counts["read" if error is None else "refused"] += 1
            remove(path)
            path.write_bytes(whole[path])
    assert min(counts["read"], counts["refused"]) > NUM // 10, counts


def test_damaged_consensus_promises_are_refused(folder: Path) -> None:
    """Paxos holds as long as nobody forgets what it promised: an agent whose file is damaged does not begin."""
    (folder / "host" / "kept.json").write_text(json.dumps({"epoch": {"number": 3, "hosts": ["a", "d"]}}))
    with pytest.raises(EvenerError, match=r"kept\.json names d, but .*agent\.json does not"):
        read_all(folder)
    os.truncate(folder / "host" / "kept.json", 20)
    with pytest.raises(EvenerError, match=r"kept\.json: damaged"):
        read_all(folder)
