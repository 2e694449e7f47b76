"""What a run that is followed tells of its speed."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from evener.cli.fleets import Lines
from evener.cli.follow import bar
from evener.core.rundir import RunDir
from evener.core.spec import parse_args
from evener.core.step import StepCost, StepRecord


def record(step, wall_s):
    cost = StepCost(data_s=0.0, compute_s=1.0, wait_s=0.0, exposed_sync_s=wall_s - 1.0, optimizer_s=0.0)
    return StepRecord(step=step, epoch=0, tokens=512.0, loss=2.0, wall_s=wall_s, cost=cost, sync_s=0.0, cpu_s=1.0,
                      bytes=0, members=2, lr=0.1, grad_norm=None, ended=step * 2.0)  # fmt: skip


def told(sync):
    """The last line of 40 steps of 1 s, of which each tenth takes 11 s: 2 s in the mean."""
    spec, written = parse_args(["--steps", "40", "--batch", "16", "--sync", "auto"]), io.StringIO()
    resolved = SimpleNamespace(spec=spec, shape=SimpleNamespace(block_size=64))
    with bar(resolved, Console(file=written, width=200)) as observe:
        observe({"event": "start", "step": 0, "ranks": 2, "sync": sync})
        for step in range(40):
            observe(record(step, 11.0 if step % 10 == 9 else 1.0))
    return written.getvalue().splitlines()[-1]


def test_the_rate_of_replicas_that_agree_now_and_then_is_that_of_whole_rounds():
    """--sync auto chose it: what was asked for does not say so, the run's first event does."""
    assert "step 40/40  loss 2.0000  512 tokens/s  communication 50%" in told("diloco:10")
    assert "  1.0k tokens/s" in told("ddp")  # else the usual step's: a hiccup is none of it


def test_a_host_that_is_added_is_heard_and_nothing_is_told_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "logs").mkdir()
    a, friend = (SimpleNamespace(name=name, first_rank=rank, num_ranks=1) for rank, name in enumerate(("a", "friend")))
    for host in (a, friend):
        run.log_path(host.name, host.first_rank).write_text(f"12:00:0{host.first_rank} O I am {host.name}\n")
    lines = Lines(run, SimpleNamespace(hosts=[a]))
    lines.print_new()
    for _ in range(2):
        lines.add(SimpleNamespace(hosts=[a, friend]))
        lines.print_new(stamps=True)
    assert capsys.readouterr().out.splitlines() == ["0 a │ I am a", "12:00:01 1 friend │ I am friend"]
