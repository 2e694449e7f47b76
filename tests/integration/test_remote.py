"""Collect the facts of this machine, and test connections over its loopback interface."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from evener.core.cluster.fleet_file import HostConfig
from evener.core.cluster.host_info import usable_cores
from evener.core.run.membership_epoch import RUN_KEY_BYTES
from evener.core.run.rundir import code_hash
from evener.doctor.facts import HostFacts, decode_facts
from evener.node.remote import REMOTE_DIR, connectivity, rpc_server
from evener.node.remote import facts as collector
from evener.node.remote.sockets import agent_ports, find_free_port
from evener.ssh.session import Session, open_session
from tests.ranks import free_port

SECRET, IDENTITY, OTHER = "s" * 32, "i" * 32, "o" * 32
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux: network namespaces, /proc")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    opened = open_session("here", HostConfig(address="local"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def facts(session: Session) -> HostFacts:
    return decode_facts(session.call("facts", "collect", workdir="/nowhere/yet"), session.clock_offset_s())


def test_host_facts_match_this_machine(facts):
    assert facts.hostname == socket.gethostname()
    assert facts.python == sys.executable
    assert facts.python_version == ".".join(map(str, sys.version_info[:3]))
    assert facts.evener_hash == code_hash()
    assert facts.torch_version is not None
    assert facts.cores == usable_cores()
    assert facts.memory_bytes is not None
    assert facts.memory_free_bytes is not None
    assert 0 < facts.memory_free_bytes <= facts.memory_bytes
    assert facts.workdir == "/nowhere/yet"
    assert facts.disk_free_bytes is not None
    assert abs(facts.clock_offset_s or 0.0) <= (facts.clock_error_s or 0.0) + 0.05


@pytest.mark.parametrize(
    ("cards", "capabilities", "have_bf16"),
    [
        (["NVIDIA H200, 570.1, 9.0", "NVIDIA H200, 570.1, 9.0"], [9.0, 9.0], True),
        (["NVIDIA A100-SXM4-40GB, 570.1, 8.0", "Tesla T4, 570.1, 7.5"], [8.0, 7.5], False),
        (["NVIDIA H200, 570.1, 9.0", "Quadro, 570.1, [N/A]"], [9.0], False),
    ],
)
def test_bf16_support_follows_compute_capability(facts, cards, capabilities, have_bf16, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"echo '{card}'\n" for card in cards)
    tool.write_text(f"#!/bin/sh\n[ $1 = --query-gpu=name,driver_version,compute_cap ] || exit 2\n{lines}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = collector._collect_gpus()
    assert found["gpus"] == [card.partition(",")[0] for card in cards]
    assert found["gpu_capabilities"] == capabilities
    assert msgspec.structs.replace(facts, **found).gpus_have_bf16 == have_bf16


def test_host_facts_list_every_interface(facts):
    loopback = next(one for one in facts.interfaces if one.kind == "loopback")
    assert loopback.first_address is not None
    assert loopback.first_address.address == "127.0.0.1"
    assert loopback.first_address.prefix == 8
    assert {one.name for one in facts.interfaces} == {name for _, name in socket.if_nameindex()}


def test_gloo_address_is_first_bindable_candidate_or_loopback(facts):
    binding = [one.address for one in facts.gloo.candidates if one.binds]
    assert facts.gloo.address == (binding or ["127.0.0.1"])[0]


def test_process_holding_port_is_named(session):
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = decode_facts(session.call("facts", "collect", port=server.getsockname()[1]))
    assert told.port_holder is not None
    assert told.port_holder.pid == os.getpid()
    assert told.port_holder.command is not None


@pytest.mark.parametrize("has_agent", [True, False])
def test_ports_of_live_runs_are_facts(session, tmp_path, has_agent):
    """Also of a run whose program restarts, and does not listen; but not of one that has ended or is damaged."""
    for name, text in (("live", ""), ("ended", ""), ("damaged", "x")):
        folder = tmp_path / "runs" / name / "host"
        folder.mkdir(parents=True)
        argv = ["python", "--rdzv-endpoint=[fd00::1]:29511", "train.py"] if not has_agent else ["python"]
        (folder / "spec.json").write_text(json.dumps({"has_agent": has_agent, "argv": argv}) + text)
        (folder / "agent.json").write_text('{"port": 29512}')
        (folder / "key").write_text("5e" * RUN_KEY_BYTES)
        (folder / "lock").write_text("")
    with contextlib.ExitStack() as held:
        for name in ("live", "damaged"):
            lock = held.enter_context((tmp_path / "runs" / name / "host" / "lock").open())
            fcntl.flock(lock, fcntl.LOCK_EX)
        told = decode_facts(session.call("facts", "collect", workdir=str(tmp_path)))
    assert told.run_ports == (sorted(agent_ports(29512, b"\x5e" * RUN_KEY_BYTES)) if has_agent else [29511])
    assert decode_facts(session.call("facts", "collect", workdir=str(tmp_path))).run_ports == []


class ContainsFirst(list[int]):
    """Contains what it is asked for first, whatever that is."""

    is_asked = False

    def __contains__(self, port: object) -> bool:
        was_asked, self.is_asked = self.is_asked, True
        return not was_asked


def test_survey_takes_no_port_of_a_live_run():
    """Its agent may be restarting at this moment."""
    needed = free_port()
    try:
        ports = connectivity.listen(["127.0.0.1"], SECRET, IDENTITY, needed, more=1, low=needed, high=needed + 1,
                                    avoid=[needed])["127.0.0.1"]  # fmt: skip
        assert ports["rendezvous"] is None
        assert needed not in ports["more"]
        socket.create_server(("127.0.0.1", needed)).close()
        ports = connectivity.listen(["127.0.0.1"], SECRET, IDENTITY, avoid=ContainsFirst())["127.0.0.1"]
        assert [one.getsockname()[1] for one in connectivity._listeners] == [ports["ephemeral"], ports["udp"]]
    finally:
        connectivity.close()


def test_free_port_of_a_live_run_is_not_chosen():
    needed = free_port()
    assert find_free_port("127.0.0.1", needed, needed, needed + 1000) == needed
    assert find_free_port("127.0.0.1", needed, needed, needed + 1000, avoid=[needed]) not in (needed, None)


def test_secret_variables_are_not_reported():
    code = "import runpy, sys, json; print(json.dumps(runpy.run_path(sys.argv[1])['collect_environment']()))"
    env = os.environ | {"MASTER_ADDR": "attic", "TORCH_API_KEY": "sesame", "HOME_SWEET": "x"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(REMOTE_DIR / "facts.py")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert '"MASTER_ADDR": "attic"' in done.stdout
    assert "TORCH_API_KEY" in done.stdout
    assert "sesame" not in done.stdout
    assert "HOME_SWEET" not in done.stdout


@linux
def test_orphaned_rank_is_stale_and_own_rank_is_not(session, tmp_path):
    """An orphan's parent is the first process: seen by a session that shares its process table."""
    script = tmp_path / "train.py"
    script.write_text("import sys, time; print(1, flush=True); sys.stdin.read()")
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "attic"}
    with subprocess.Popen(
        [sys.executable, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline()
        told = decode_facts(session.call("facts", "collect"))
        assert rank.pid not in [one.pid for one in told.stale]  # we, its parent, are alive
        assert rank.stdin is not None
        rank.stdin.close()


# --- connections -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ports() -> Iterator[dict]:
    yield connectivity.listen(["127.0.0.1"], SECRET, IDENTITY, more=2)["127.0.0.1"]
    connectivity.close()


def target(
    port: int, *, identity: str | None = IDENTITY, peer: str = "b", rank: int = 0, address: str = "127.0.0.1"
) -> dict:
    return {"peer": peer, "address": address, "port": port, "identity": identity, "rank": rank}


def test_listening_ports_answer_with_identity(ports):
    numbers = [ports["ephemeral"], *ports["more"]]
    assert len(set(numbers)) == 3
    found = connectivity.connect([target(number) for number in numbers], SECRET, 30.0)
    assert [one["result"] for one in found] == ["ok"] * 3
    assert found[0]["source"] == "127.0.0.1"


def test_refused_timed_out_and_foreign_ports_are_distinguished(ports):
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))
        found = connectivity.connect(
            [
                target(closed.getsockname()[1]),
                target(silent.getsockname()[1]),
                target(ports["ephemeral"], identity=OTHER),
                target(silent.getsockname()[1], identity=None),
            ],
            SECRET,
            2.0,
        )
    assert [one["result"] for one in found] == ["refused", "timeout", "stranger", "ok"]


def test_full_accept_queue_times_out():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert (
            connectivity.connect([target(full.getsockname()[1], identity=None)], SECRET, 0.3)[0]["result"] == "timeout"
        )
        for one in waiting:
            one.close()


def test_wrong_secret_gets_no_answer(ports):
    assert connectivity.connect([target(ports["ephemeral"])], "x" * 32, 30.0)[0]["result"] == "stranger"


def test_lower_ranked_paths_are_not_awaited_after_best_one_answers(ports):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = connectivity.connect(
            [target(ports["ephemeral"], rank=0), target(silent.getsockname()[1], rank=1)], SECRET, 10.0
        )
    assert [one["result"] for one in found] == ["ok", "untried"]


def test_higher_ranked_path_is_awaited_after_lower_one_answers(ports):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = connectivity.connect(
            [target(ports["ephemeral"], rank=1), target(silent.getsockname()[1], rank=0)], SECRET, 2.0
        )
    assert [one["result"] for one in found] == ["ok", "timeout"]


def test_round_trip_and_goodput_are_measured_on_loopback(ports):
    way = target(ports["ephemeral"]) | {"udp": ports["udp"], "mtu": 1500}
    (trips,) = connectivity.round_trips([way], SECRET, repeats=12)
    assert len(trips) == 10
    assert all(0 < trip < 1 for trip in trips)
    (large,) = connectivity.probe_mtu([way], SECRET)
    assert large["large"] == "ok"
    assert large["path_mtu"] in (1500, None if sys.platform != "linux" else 1500)
    found = connectivity.measure_goodput(way, SECRET, 0.05, 0.02)
    assert found["goodput_Bps"] > 1e6
    if sys.platform == "linux":
        assert found["segments"] > 0


@linux
def test_the_path_mtu_is_the_largest_datagram_that_arrives(monkeypatch):
    """A server that takes no datagram above a size stands for a narrow link."""
    narrow = 1234
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(5)

        def answer() -> None:
            while True:
                try:
                    data, sender = server.recvfrom(1 << 16)
                except OSError:
                    return
                if len(data) + connectivity.HEADER_BYTES[socket.AF_INET] <= narrow:
                    server.sendto(data[32:40], sender)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        way = {"address": "127.0.0.1", "udp": server.getsockname()[1], "mtu": 1500}
        assert connectivity._find_path_mtu(way, SECRET) == narrow


def test_stalled_large_message_is_reported(monkeypatch):
    monkeypatch.setattr(connectivity, "STALL_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert connectivity._send_large_message(target(silent.getsockname()[1]), SECRET, 1 << 24) == "stalled"


def test_unknown_host_names_resolve_to_none():
    found = connectivity.resolve(["localhost", "no-such-host.invalid"])
    assert "127.0.0.1" in found["localhost"] or "::1" in found["localhost"]
    assert found["no-such-host.invalid"] is None


def test_cancelling_a_request_that_just_ended_is_no_error(monkeypatch):
    """Whoever asks twice, whether it runs and then for it, finds nothing the second time."""

    class Ending(dict):
        def __contains__(self, key: object) -> bool:
            return self.pop(key, None) is not None

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(rpc_server, "_request_pipe", io.BytesIO(b'{"cancel": 7}\n'))
    monkeypatch.setattr(rpc_server, "_reply_pipe", io.BytesIO())
    monkeypatch.setattr(rpc_server, "_cancel_events", Ending({7: threading.Event()}))
    monkeypatch.setattr(os, "dup2", lambda source, target: None)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="0"):
        rpc_server._serve_requests()
