"""The trace of a two-host run with hand-written spans matches its records and its prediction."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from evener.cli.main import app
from evener.core.base.errors import UsageError
from evener.core.base.file_io import write_atomic
from evener.core.base.units import format_seconds
from evener.core.run.rundir import RunDir
from evener.core.run.step_spans import BetweenStepsSpan, BucketSpan, LayerGroupSpan, PhaseSpan, StepSpans
from evener.report.draw.step_timeline import typical_step_gantt
from evener.report.export.chrome_trace import write_trace
from evener.report.pages.html_report import run_page
from evener.report.read.run_summary import summarize_run
from evener.report.read.timeline import read_timeline

from .. import traces

RECORD = Path(__file__).parent / "records" / "two-hosts"
BEHIND_S = 4321.5  # b's clock is behind a's by so much
KEPT = [0, *range(40, 60)]
TRANSFER_S = 0.004


def spans_of(run: RunDir) -> list[list[StepSpans]]:
    """As the records say that it was: who waits comes earlier to the exchange, by what it waits. By two clocks."""
    both = [run.records(rank) for rank in range(2)]
    now_s = 100.0  # by a's clock
    found: list[list[StepSpans]] = [[], []]
    for step in range(60):
        costs = [of_rank[step].cost for of_rank in both]
        meets_s = now_s + max(cost.wait_s + cost.data_s + cost.compute_s for cost in costs)
        edges = []
        for cost in costs:
            took = (cost.data_s, cost.compute_s / 3, cost.compute_s * 2 / 3, cost.wait_s + cost.exposed_sync_s)
            begins_s = meets_s - cost.wait_s - cost.compute_s - cost.data_s
            edges.append([*itertools.accumulate((*took, cost.optimizer_s), initial=begins_s)])
        first_s = max(edge[2] for edge in edges) + TRANSFER_S  # when both leave bucket 0
        for rank, edge in enumerate(edges if step in KEPT else []):
            at = [one - edge[0] for one in edge]
            laps = zip(
                ("data_s", "forward", "compute_s", "blocked", "optimizer_s"), itertools.pairwise(at), strict=True
            )
            found[rank].append(
                StepSpans(
                    step=step,
                    epoch=0,
                    clock=1_795_394_000.0 + rank * (BEHIND_S + 0.2),
                    begun_s=edge[0] - rank * BEHIND_S,
                    laps=[PhaseSpan(part, *between) for part, between in laps],
                    exchanges=[
                        BucketSpan(0, at[2], first_s - edge[0], 400_000, 400_000),
                        BucketSpan(1, at[3], at[4], 27_520, 27_520),
                    ],
                    passes=[]
                    if step
                    else [
                        LayerGroupSpan("blocks.0", False, at[1], at[2]),
                        LayerGroupSpan("blocks.0", True, at[2], at[3]),
                    ],
                    asides=[BetweenStepsSpan("checkpoint", at[5] + 0.01, at[5] + 0.03)] if step == 59 else [],
                )
            )
        now_s = max(edge[5] for edge in edges) + 0.1
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    shutil.copytree(RECORD, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    for rank, spans in enumerate(spans_of(run)):
        write_atomic(run.spans_path(rank), b"".join(msgspec.json.encode(one) + b"\n" for one in spans))
    return run


def traced(run: RunDir, **which) -> traces.Trace:
    path = run.path / "trace.json"
    write_trace(run, read_timeline(run, **which), path)
    return traces.read(path)


def process_of(trace: traces.Trace, name: str) -> str:
    (found,) = {process for process, _ in trace.slices if process.split()[0] in (name, f"{name}:")}
    return found


def test_span_durations_in_trace_sum_to_recorded_step_parts(run):
    trace = traced(run)
    for rank, name in enumerate(("a", "b")):
        found = traces.step_parts_s(trace, process_of(trace, name))
        records = [json.loads(line) for line in run.steps_path(rank).read_text().splitlines()]
        assert sorted(found) == KEPT
        for step, parts in found.items():
            assert records[step]["step"] == step
            for part, took_s in parts.items():
                assert took_s == pytest.approx(records[step]["cost"][part], rel=0.01, abs=2e-7)


def test_rank_clocks_are_aligned_within_stated_error(run):
    """In truth both leave bucket 1 at the same moment: so they do in the trace, within the error that it tells."""
    trace = traced(run)
    ends = [[one.end for one in trace.of(process_of(trace, name), "bucket 1")] for name in ("a", "b")]
    assert len(ends[0]) == len(KEPT)
    off_s = max(abs(a - b) for a, b in zip(*ends, strict=True)) / 1e9
    timeline = read_timeline(run)
    assert timeline.clock_error_s[0] == 0.0
    assert 0 < off_s <= timeline.clock_error_s[1] + 2e-7
    assert timeline.clock_error_s[1] < 0.05
    told = trace.other["clock error"]
    assert told["a"] == "the same clock"
    assert told["b"].startswith("off by at most ")
    assert told["b"] in process_of(trace, "b")


def test_arrows_lead_from_last_rank_to_waiting_ranks(run):
    trace = traced(run)
    assert len(trace.arrows) == 2 * len(KEPT)
    records = [run.records(rank) for rank in range(2)]
    told = [(one, other) for one, other in trace.arrows if other[1].name == "bucket 1"]
    error_s, clear = read_timeline(run).clock_error_s[1], []
    for step, ((process, last), (waiting, _)) in zip(KEPT, told, strict=True):
        waited_s = [of_rank[step].cost.wait_s for of_rank in records]
        if abs(waited_s[0] - waited_s[1]) > error_s:  # clocks leave no doubt
            clear.append(step)
            assert (process.split()[0], waiting.split()[0]) == (("a", "b") if waited_s[0] < waited_s[1] else ("b", "a"))
            assert last.args["last to begin"] == process.split()[0]
    assert len(clear) > 10


def test_trace_bandwidths_match_nccl_tests_definitions(run):
    """Of two ranks busbw is algbw · 2(n-1)/n = algbw, over the time of the one that waits for nobody."""
    trace = traced(run, step_range=range(45, 46))
    (bucket,) = trace.of(process_of(trace, "a"), "bucket 0")
    assert (bucket.args["bytes"], bucket.args["without waiting (ms)"]) == (400_000, 4.0)
    assert bucket.args["algbw (GB/s)"] == bucket.args["busbw (GB/s)"] == pytest.approx(400_000 / 0.004 / 1e9)


def test_predicted_step_is_in_trace(run):
    option = summarize_run(run).predicted
    trace = traced(run)
    process = process_of(trace, "predicted")
    for name, rank in zip(("a", "b"), option.ranks, strict=True):
        found = trace.of(process, name)
        steps = [one for one in found if one.cat == "predicted"]
        assert [int(one.name.removeprefix("step ")) for one in steps] == KEPT
        assert all(abs(one.end - one.begin - 1e9 * option.step_s) <= 125 for one in steps)
        inside = [one for one in found if one.name == "forward, backward"]
        assert inside[-1].end - inside[-1].begin == pytest.approx(1e9 * rank.cost.compute_s, abs=250)


def test_unrecorded_steps_are_reported(run):
    trace = traced(run)
    assert trace.other["steps not recorded"] == "1-39"
    (gap,) = [one for one in trace.of(process_of(trace, "a"), "step") if one.cat == "not recorded"]
    assert gap.name == "39 steps not recorded"
    assert [one.name for one in trace.of(process_of(trace, "a"), "beside")] == ["checkpoint"]
    assert [one.name for one in trace.of(process_of(trace, "b"), "layers")] == ["blocks.0 forward",
                                                                                    "blocks.0 backward"]  # fmt: skip
    with pytest.raises(UsageError, match=r"steps 10:20 are not recorded") as refused:
        read_timeline(run, range(10, 20))
    assert refused.value.hint == "recorded are 0, 40-59"


def test_trace_is_limited_to_newest_steps(run):
    assert read_timeline(run, max_steps=3).shown_ranges == [(57, 59)]
    assert read_timeline(run, step_range=range(0, 43)).shown_ranges == [(0, 0), (40, 42)]


def test_step_missing_on_one_rank_is_marked_as_not_recorded(run):
    lines = run.steps_path(1).read_bytes().splitlines(keepends=True)
    write_atomic(run.steps_path(1), b"".join(lines[:-1]))
    trace = traced(run)
    *_, last = [one for one in trace.of(process_of(trace, "b"), "step") if one.cat == "step"]
    assert last.args == {"recorded": "not all ranks recorded its end"}
    assert trace.of(process_of(trace, "b"), "step")[-2].name == "waiting or exposed communication"


def test_trace_command_writes_trace(run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    done = CliRunner().invoke(app, ["trace", "run"])
    assert done.exit_code == 0
    assert done.stdout == "run/trace.json\n"
    assert "steps 0, 40-59" in done.stderr
    assert "not recorded: 1-39" in done.stderr
    assert "clock of b: off by at most" in done.stderr
    assert "ui.perfetto.dev" in done.stderr
    done = CliRunner().invoke(app, ["trace", "run", "--steps", "50:52", "--out", "other.json", "--json"])
    told = json.loads(done.stdout)
    assert (told["trace"], told["shown"], told["not_recorded"]) == ("other.json", [[50, 51]], [[1, 39]])
    assert told["clock_error_s"]["0"] == 0
    assert len(json.loads(Path("other.json").read_bytes())["traceEvents"]) == told["events"]
    traces.read(Path("other.json"))


@pytest.mark.parametrize("steps", ["x", "5:", "7:7", "9:3", "-1:4", ""])
def test_invalid_step_range_is_refused(run, steps):
    done = CliRunner().invoke(app, ["trace", str(run), "--steps", steps])
    assert isinstance(done.exception, UsageError)


def test_run_without_spans_is_refused(tmp_path):
    shutil.copytree(RECORD, tmp_path / "run")
    with pytest.raises(UsageError, match="no spans were recorded"):
        read_timeline(RunDir(tmp_path / "run"))


def test_trace_checker_detects_each_fault(run, tmp_path):
    """One fault at a time."""
    write_trace(run, read_timeline(run), tmp_path / "t.json")
    whole = json.loads((tmp_path / "t.json").read_bytes())

    def events(kind):
        return [event for event in found["traceEvents"] if event["ph"] == kind]

    def nests():
        parts = [event for event in events("X") if event["cat"] == "optimizer_s"]
        parts[0]["dur"] += 1.0

    def overlaps():
        of_bucket = [event for event in events("X") if event["name"] == "bucket 0"]
        of_bucket[-1]["ts"] = of_bucket[-3]["ts"]

    def faults():
        yield "nests", nests
        yield "overlaps", overlaps
        yield "negative", lambda: events("X")[0].update(dur=-1.0)
        yield "not a number", lambda: events("X")[0].update(ts=None)
        yield "no name", lambda: found["traceEvents"].remove(next(e for e in events("M") if e["name"] == "thread_name"))
        yield "no finish", lambda: found["traceEvents"].remove(events("f")[0])
        yield "binds to nothing", lambda: events("f")[0].update(ts=1e12)
        yield "nanoseconds", lambda: events("X")[0].update(ts=0.12345)
        yield "unknown key", lambda: events("X")[0].update(colour="red")

    for name, spoil in faults():
        found = json.loads(json.dumps(whole))
        spoil()
        (tmp_path / "spoilt.json").write_text(json.dumps(found))
        with pytest.raises(AssertionError):
            print(name, traces.read(tmp_path / "spoilt.json"))


def test_page_draws_spans_of_the_median_step_to_scale(run):
    """The pieces lie where the spans say: in per cent of the axis, which ends where the last rank does."""
    timeline = read_timeline(run, max_steps=20)
    found = typical_step_gantt(timeline, {0: "a", 1: "b"})
    page = run_page(run, now=0.0)
    assert f"Step {found.step + 1}: the median by duration of the last steps with an exchange. " in page
    assert " entered the last exchange " in page
    assert re.search(r'<h2 id="section-\d+">One step</h2>', page)
    (figure,) = re.findall(r'<div class="lanes">.*?</figure>', page, re.DOTALL)
    rows = re.findall(r'<div class="row( thin)?"><span class="label">(.*?)</span><div class="lane">(.*?)</div>', figure)
    assert [(label, bool(thin)) for thin, label, _ in rows] == [
        ("a", False), ("bucket 0", True), ("bucket 1", True), ("b", False), ("bucket 0", True), ("bucket 1", True)
    ]  # fmt: skip
    costs = [run.records(rank)[found.step].cost for rank in range(2)]
    spans = [one for rank in range(2) for one in run.spans(rank) if one.step == found.step]
    per_cent_s = found.duration_s / 100
    for (_, _, drawn), cost in zip(rows[::3], costs, strict=True):
        widths = [float(width) for width in re.findall(r"<span style=\"left:[\d.]+%;width:([\d.]+)%", drawn)]
        assert len(widths) == 6  # input, forward, backward, waiting, exposed communication, update
        assert sum(widths) * per_cent_s == pytest.approx(cost.total_s, rel=1e-3)
        assert widths[2] * per_cent_s == pytest.approx(cost.compute_s * 2 / 3, rel=1e-3)
        assert widths[3] * per_cent_s == pytest.approx(cost.wait_s, rel=1e-3, abs=1e-5)
    for (_, _, drawn), one in zip(rows[1::3], spans, strict=True):
        (width,) = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
        sent = one.exchanges[0]
        assert width * per_cent_s == pytest.approx(sent.end_s - sent.begin_s, rel=1e-3)
    assert [row[-1] for row in found.rows] == [format_seconds(cost.total_s) for cost in costs]
    assert "<span>evener</span> <span>trace</span>" in page


def test_page_without_spans_omits_step_picture(tmp_path):
    shutil.copytree(RECORD, tmp_path / "run")
    assert "One step" not in run_page(RunDir(tmp_path / "run"), now=0.0)
