"""The output of a followed run shows its speed, its slowest hosts and changes of its settings."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from evener.cli.follow_output import display_progress
from evener.cli.live_display import LiveDisplay, ProgressSnapshot
from evener.cli.run_output import RankLogPrinter
from evener.core.base.file_io import write_atomic
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.progress import HostStepTime, RunProgress, StragglerDetector
from evener.core.run.run_plan import HostPlan, Plan
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import StepCost, StepRecord

from ..integration.pseudo import ESCAPE


def record(step, wall_s):
    cost = StepCost(data_s=0.0, compute_s=1.0, wait_s=0.0, exposed_sync_s=wall_s - 1.0, optimizer_s=0.0)
    return StepRecord(step=step, epoch=0, tokens=512.0, loss=2.0, wall_s=wall_s, cost=cost, sync_s=0.0, cpu_s=1.0,
                      bytes=0, members=2, lr=0.1, grad_norm=None, ended=step * 2.0)  # fmt: skip


def told(sync):
    """The last line of 40 steps of 1 s, of which each tenth takes 11 s: 2 s in the mean."""
    spec, written = parse_args(["--steps", "40", "--batch", "16", "--sync", "auto"]), io.StringIO()
    resolved = SimpleNamespace(spec=spec, step_size=(1024, "tokens"))
    with display_progress(resolved, Console(file=written, width=200)) as observe:
        observe({"event": "start", "step": 0, "ranks": 2, "sync": sync})
        for step in range(40):
            observe(record(step, 11.0 if step % 10 == 9 else 1.0))
    return written.getvalue().splitlines()[-1]


def test_throughput_of_local_update_strategies_is_averaged_over_rounds():
    """--sync auto chose it: what was asked for does not say so, the run's first event does."""
    assert "step 40/40  loss 2.0000  512 tokens/s  communication 50%" in told("diloco:10")
    assert "  1.0k tokens/s" in told("ddp")  # else the usual step's: a hiccup is none of it


def test_run_changes_are_shown_with_reason_except_trials():
    """But not that a host without a share is tried for a step."""
    spec, written = parse_args(["--steps", "40", "--batch", "16"]), io.StringIO()
    resolved = SimpleNamespace(spec=spec, step_size=(1024, "tokens"))
    events = [
        {"event": "remark", "what": "shares stay 8 : 8 whatever the ranks' speed"},
        {"event": "rebalanced", "step": 66, "shares": [10.5, 5.5], "why": "laptop is slow", "is_trial": False},
        {"event": "rebalanced", "step": 90, "shares": [15, 1], "why": "laptop is tried again", "is_trial": True},
        {"event": "rechosen", "step": 100, "sync": "int8", "was": "ddp", "why": "the link is another"},
        {"event": "rechosen", "step": 105, "sync": "ddp", "was": "int8", "why": "on trial", "is_trial": True},
        {"event": "compared", "step": 107, "chosen": "int8", "why": "measured time of a step: int8 20 ms"},
        {"event": "sync.fidelity", "step": 109, "why": "--sync int8: the sums of gradients are 9.0% off"},
    ]
    with display_progress(resolved, Console(file=written, width=200)) as observe:
        for event in events:
            observe(event)
    assert written.getvalue().splitlines() == [
        "shares stay 8 : 8 whatever the ranks' speed",
        "step 67: shares 10.5 : 5.5: laptop is slow",
        "step 101: changing to int8 (before: ddp): the link is another",
        "step 108: --sync auto goes on with int8; measured time of a step: int8 20 ms",
        "step 110: --sync int8: the sums of gradients are 9.0% off",
    ]


def test_added_host_log_is_followed_and_no_line_is_printed_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "logs").mkdir()
    a, friend = (SimpleNamespace(name=name, first_rank=rank, num_ranks=1) for rank, name in enumerate(("a", "friend")))
    for host in (a, friend):
        run.log_path(host.name, host.first_rank).write_text(f"12:00:0{host.first_rank} O I am {host.name}\n")
    lines = RankLogPrinter(run, SimpleNamespace(hosts=[a]))
    lines.print_new()
    for _ in range(2):
        lines.add_hosts(SimpleNamespace(hosts=[a, friend]))
        lines.print_new(with_timestamps=True)
    assert capsys.readouterr().out.splitlines() == ["0 a │ I am a", "12:00:01 1 friend │ I am friend"]


# --- in a terminal ----------------------------------------------------------------------------------------------------


def of_host(works_s, waits_s, sends_s=0.1):
    cost = StepCost(data_s=0.0, compute_s=works_s, wait_s=waits_s, exposed_sync_s=sends_s, optimizer_s=0.0)
    return msgspec.structs.replace(record(0, 2.0), cost=cost, wall_s=works_s + waits_s + sends_s)


def unlike(*hosts, steps=20):
    """(host, rank, seconds of work, of waiting) …"""
    found = StragglerDetector()
    for _ in range(steps):
        for rank, (host, works_s, waits_s) in enumerate(hosts):
            found.add(host, rank, of_host(works_s, waits_s))
    return found.detect_imbalance()


def test_only_a_clear_straggler_host_is_shown_and_listed_first():
    paces = unlike(("attic", 1.0, 0.9), ("laptop", 1.9, 0.0), ("tower", 1.1, 0.8))
    assert [pace.host for pace in paces] == ["laptop", "tower", "attic"]
    assert (paces[0].work_s, paces[0].exposed_sync_s, paces[0].wait_s) == (1.9, 0.1, 0.0)
    assert unlike(("attic", 1.0, 0.04), ("laptop", 1.05, 0.0)) == []  # 4 % of a step
    assert unlike(("attic", 1.0, 0.5), ("laptop", 1.1, 0.4)) == []  # late in turns
    assert unlike(("attic", 1.0, 0.9), ("attic", 1.9, 0.0)) == []  # two ranks of one host
    assert unlike(("attic", 1.0, 0.9), ("laptop", 1.9, 0.0), steps=4) == []


def test_slowest_rank_represents_its_host():
    paces = unlike(("attic", 1.0, 0.9), ("attic", 0.5, 1.4), ("laptop", 1.9, 0.0))
    assert [(pace.host, pace.work_s) for pace in paces] == [("laptop", 1.9), ("attic", 1.0)]


def drawn(columns, paces=(), **how):
    """The display's lines, as a terminal of this width has them."""
    progress = RunProgress(200, (1024, "tokens"))
    for step in range(40):
        progress.add(msgspec.structs.replace(record(step, 2.0), ended=2.0 * step))
    display = LiveDisplay()
    display.snapshot, display.imbalanced_hosts = ProgressSnapshot.from_progress(progress, 2.4407), list(paces)
    where = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None, **how)
    where.print(display)
    return where.file.getvalue().rstrip("\n").split("\n")


def test_progress_bar_shows_time_left_loss_throughput_and_communication():
    """40 steps of 2 s: 160 are left, so 320 s; a half of each was spent sending."""
    first, second = drawn(80)
    assert first.endswith("  step 40/200  left 5 min 20 s")
    room = 80 - len("  step 40/200  left 5 min 20 s")
    assert second == "loss 2.0000  validation 2.4407  512 tokens/s  communication 50%"
    assert len(first.rstrip()) == 80
    assert re.match(r"━+", first)[0] == "━" * int(room / 5)  # a fifth; where there is no colour, the rest is blank
    assert drawn(50)[1] == "loss 2.0000  512 tokens/s  communication 50%"  # the evaluation had a line of its own


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("num", [2, 3, 12])
def test_one_line_per_host_fits_terminal(columns, num):
    paces = [HostStepTime("laptop", 1.9, 0.1, 0.0), *(HostStepTime(f"node{i}", 1.0, 0.1, 0.9) for i in range(num - 1))]
    _, _, *lines = drawn(columns, paces)
    assert max(map(len, lines)) <= columns
    assert re.fullmatch(r"laptop +━+╍*  works 1.90 s, sends 100 ms, the others wait", lines[0].rstrip())
    assert re.fullmatch(r"node0 +━+╍?·+ +works 1.00 s, sends 100 ms, waits 900 ms", lines[1].rstrip())
    assert len(lines) == min(num, 6)
    if num == 12:
        assert lines[-1].rstrip() == "and 7 hosts between them"


def test_step_bars_of_hosts_are_drawn_to_scale():
    """The longest has 24 marks: 22.8 of work and 1.2 of sending; the other half as much work."""
    lines = drawn(100, [HostStepTime("a", 1.9, 0.1, 0.0), HostStepTime("b", 0.95, 0.1, 0.95)])[2:]
    assert [(line.count("━"), line.count("╍"), line.count("·")) for line in lines] == [(23, 1, 0), (11, 2, 11)]


def test_live_view_shows_records_of_all_ranks(tmp_path):
    """Only rank 0's records are told; the others' are read where they come home."""
    hosts = [
        HostPlan(
            name=name,
            host=HostConfig(address=name),
            node_rank=rank,
            first_rank=rank,
            num_ranks=1,
            address="",
            interface="",
            run="/r",
            code=None,
            cwd="/",
            argv=[],
            env={},
        )
        for rank, name in enumerate(("attic", "laptop"))
    ]
    plan, run = Plan(kind="train", spec=None, hosts=hosts), RunDir(tmp_path / "run")
    records = {0: of_host(1.0, 0.9), 1: of_host(1.9, 0.0)}
    for rank, one in records.items():
        lines = [msgspec.structs.replace(one, step=step, ended=2.0 * step) for step in range(30)]
        write_atomic(run.steps_path(rank), b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    spec, written = parse_args(["--steps", "40", "--out", str(run)]), io.StringIO()
    resolved = SimpleNamespace(spec=spec, step_size=(1024, "tokens"))
    where = Console(file=written, width=80, force_terminal=True, force_interactive=True, color_system=None)
    with display_progress(resolved, where, plan) as observe:
        observe({"event": "evaluation", "step": 10, "val_loss": 2.5})
        observe(run.records(0)[29])
    text = ESCAPE.sub("", written.getvalue())
    assert "step 10: validation loss 2.5000" in text
    assert "validation 2.5000" in text
    assert re.search(r"laptop +━+╍ +works 1.90 s, sends 100 ms, the others wait", text)
    assert re.search(r"attic +━+╍?·+ +works 1.00 s, sends 100 ms, waits 900 ms", text)
