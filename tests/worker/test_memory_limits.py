"""A rank that the kernel kills for lack of memory halves its micro-batch, once per kill."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch

from evener.core.cluster.host_info import local_host_info
from evener.core.run.roster import Member, Roster, parse_sync
from evener.core.run.runwriter import RunWriter
from evener.worker.membership.memory_limits import detect_previous_oom, limit_micro_batches, record_oom

HERE = local_host_info().host
MEMBERS = [Member(rank=rank, host=host, device="cpu", dtype="fp32", share=share, micro_batch=16)
           for rank, (host, share) in enumerate((("elsewhere", 6), (HERE, 8), (HERE, 5)))]  # fmt: skip
ROSTER = Roster(members=MEMBERS, sync=parse_sync("ddp"), backend="gloo")


def group(local_rank: int = 0) -> types.SimpleNamespace:
    """The others have had no trouble."""
    return types.SimpleNamespace(
        local_rank=local_rank,
        all_gather=lambda mine, kind: [mine if rank == 1 + local_rank else 0 for rank in range(3)],
    )


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWriter:
    (tmp_path / "host").mkdir()
    monkeypatch.setenv("EVENER_WORLD", str(tmp_path / "host" / "world.json"))
    return RunWriter(tmp_path)


def killed(rundir: RunWriter, at: float, oom_at: float | None, local_rank: int = 0) -> None:
    (rundir.path / "host" / "killed.json").write_text(json.dumps({"at": {local_rank: at}}))
    (rundir.path / "host" / "state.json").write_text(json.dumps({"state": "running", "oom_at": oom_at}))


def micro_batches(local_rank: int = 0) -> list[list[int]]:
    return [member.micro_batch_sizes for member in limit_micro_batches(ROSTER, group(local_rank)).members]


def test_micro_batch_halves_once_per_out_of_memory_kill(rundir: RunWriter) -> None:
    assert micro_batches() == [[6], [8], [5]]
    for at, expected in ((100.0, [4, 4]), (100.0, [4, 4]), (300.0, [2, 2, 2, 2]), (500.0, [1] * 8), (700.0, [1] * 8)):
        killed(rundir, at, at + 1.5)
        detect_previous_oom(rundir, ROSTER, group())
        assert micro_batches() == [[6], expected, [5]]
    assert [event["rank"] for event in rundir.events()] == [1] * 4


def test_other_ranks_of_host_keep_micro_batch(rundir: RunWriter) -> None:
    killed(rundir, 100.0, 100.0, local_rank=1)
    detect_previous_oom(rundir, ROSTER, group(0))
    assert micro_batches(0) == [[6], [8], [5]]
    assert micro_batches(1) == [[6], [8], [5]]
    detect_previous_oom(rundir, ROSTER, group(1))
    assert micro_batches(1) == [[6], [8], [2, 2, 1]]
    assert [event["rank"] for event in rundir.events()] == [2]


def test_memory_limit_holds_for_larger_share(rundir: RunWriter) -> None:
    """One of the others is gone."""
    assert micro_batches() == [[6], [8], [5]]
    killed(rundir, 100.0, 100.0)
    detect_previous_oom(rundir, ROSTER, group())
    larger = limit_micro_batches(ROSTER.with_shares([0, 14, 5], 7, None, why="", is_trial=False), group()).members
    assert [member.micro_batch_sizes for member in larger] == [[], [4, 4, 3, 3], [5]]


@pytest.mark.parametrize("oom_at", [None, 50.0, 200.0])
def test_rank_killed_for_other_reason_keeps_micro_batch(rundir: RunWriter, oom_at: float | None) -> None:
    killed(rundir, 100.0, oom_at)
    detect_previous_oom(rundir, ROSTER, group())
    assert micro_batches() == [[6], [8], [5]]
    assert rundir.events() == []


def test_gpu_out_of_memory_halves_micro_batch(rundir: RunWriter) -> None:
    record_oom(RuntimeError("another"), 0)
    assert micro_batches() == [[6], [8], [5]]
    record_oom(torch.OutOfMemoryError("CUDA out of memory"), 0)
    assert micro_batches() == [[6], [4, 4], [5]]
