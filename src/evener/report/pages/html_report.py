"""Write the HTML report of a run or a bench on one page: the verdict first, the manifest last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import msgspec

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.base.shell import quote_command, quote_word
from evener.core.base.units import format_bytes, format_count, format_seconds, pluralize
from evener.core.cluster.host_vitals import Vitals
from evener.core.run.run_plan import read_plan_if_present
from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import PHASE_NAMES, StepRecord, align_steps
from evener.core.run.step_spans import RECORD_LAST_STEPS
from evener.report.draw import run_charts
from evener.report.draw.step_timeline import StepGantt, typical_step_gantt
from evener.report.draw.svg_charts import Figure
from evener.report.explain.explain_run import explain_bottleneck, explain_measurements
from evener.report.explain.predicted_vs_measured import (
    format_relative_difference,
    prediction_cells,
    rank_rows,
    step_rows,
)
from evener.report.explain.prediction_error import NO_PREDICTION, explain_prediction
from evener.report.explain.speedup_verdict import speedup_verdict
from evener.report.explain.what_if import predict_alternatives, what_if_columns, what_if_rows
from evener.report.pages import bench_report, compare_setups
from evener.report.pages.host_vitals_table import host_table
from evener.report.pages.html_template import KeyFigure, render_document
from evener.report.read.event_log import describe_event, first_failure, format_since_start
from evener.report.read.recorded_run import RecordedRun, record_run
from evener.report.read.run_state import STATE_MARKS, is_unresponsive
from evener.report.read.run_summary import RunSummary, read_records
from evener.report.read.stragglers import has_straggler, slowest_rank
from evener.report.read.timeline import read_timeline

# read of each rank's records for the chart of one step: more than a thousand steps, in 20 ms
RECORDS_TAIL_BYTES = 1 << 20
NestedText: TypeAlias = "dict[str, NestedText] | list[NestedText] | str"  # nested values, each formatted as text


def write_report(rundir: RunDir, path: Path | None = None) -> Path:
    """Write the report of a run or a bench to `path` [report.html in its folder] and return that path."""
    if bench_report.is_bench(rundir.path):
        _write_missing_reports(
            rundir, [name for names in bench_report.read_bench(rundir.path).values() for name in names]
        )
        text = bench_report.bench_page(rundir.path)
    elif compare_setups.is_comparison(rundir.path):
        _write_missing_reports(rundir, compare_setups.read_setups(rundir.path).runs.values())
        text = compare_setups.setups_page(rundir.path)
    else:
        text = run_page(rundir, now=time.time())
    path = path or rundir.inside("report.html")
    write_atomic(path, text.encode())
    return path


def _write_missing_reports(folder: RunDir, names: Iterable[str]) -> None:
    """Write the reports that a bench's page links to, except those that exist."""
    for name in names:
        run = RunDir(folder.inside(name))
        if not run.inside("report.html").exists():
            write_report(run)


def run_page(rundir: RunDir, now: float) -> str:
    """Return the HTML report of one run; `now` (Unix time) decides whether a "running" run is stale."""
    records, events = read_records(rundir), rundir.events()
    steps = align_steps(records)
    run = record_run(rundir, steps, records, events)
    summary, manifest = run.summary, run.summary.manifest
    alternatives = predict_alternatives(summary)
    name, failure, shown_step = rundir.path.resolve().name, first_failure(events), read_step_gantt(rundir, manifest)
    return render_document(
        "run.html",
        title=f"{name}: evener",
        figures=_charts(run, steps, shown_step),
        name=name,
        what=_run_descriptions(summary),
        worth=speedup_verdict(summary, alternatives),
        outcome=_outcome(summary, events, _last_write_unix_s(manifest, records, events), now),
        limit=explain_bottleneck(summary) if summary.step_p50_s else "",
        away=_remote_checkpoint(rundir),
        shown=_key_figures(run, events),
        summary=summary,
        unmeasured=[PHASE_NAMES[part] for part in run_charts.unmeasured_phases(rank.typical for rank in summary.ranks)],
        parts=_breakdown_table(summary),
        moment=shown_step,
        story=explain_measurements(summary),
        predicted=_prediction_report(summary),
        no_prediction=NO_PREDICTION,
        what_if=FigureTable(what_if_columns(alternatives), what_if_rows(alternatives)) if alternatives else None,
        hosts=_host_table(rundir, manifest),
        changes=_membership_rows(summary),
        events=[describe_event(event, manifest) for event in events],
        failure=describe_event(failure, manifest) if failure and manifest.verdict != "finished" else None,
        parameters=_parameter_rows(manifest),
        num_params=f"{manifest.num_params:,}",
        manifest=_manifest_tree(manifest),
        written=_format_utc(now),
    )


@dataclass(frozen=True)
class FigureTable:
    """A table for the template's `table` macro: a column of names, then columns of figures."""

    head: list[str]
    rows: list[list[str]]


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOutcome:
    """The run's verdict and a sentence that explains it."""

    verdict: str
    message: str
    command: str = ""  # resumes the run

    @property
    def mark(self) -> str:
        """The verdict's colour class."""
        return ({"running": "good"} | STATE_MARKS).get(self.verdict, "warn")


def _remote_checkpoint(rundir: RunDir) -> tuple[int, str] | None:
    """Return (step, host) of the newest checkpoint if it is saved on another host and not here."""
    saved, plan = rundir.last_saved_step(), read_plan_if_present(rundir)
    if saved is None or plan is None or plan.is_local_run or saved <= max(rundir.checkpoint_steps(), default=-1):
        return None
    return saved, plan.hosts[0].name


def _outcome(summary: RunSummary, events: list[dict[str, Any]], last_write_unix_s: float, now: float) -> RunOutcome:
    manifest = summary.manifest
    verdict, done = manifest.verdict, pluralize(summary.num_steps, "step")
    resume = f"evener train --resume {quote_word(summary.run_dir)}" if manifest.program is None else ""
    if verdict == "finished":
        took = "" if manifest.ended is None else f" in {format_seconds(manifest.ended - manifest.started)}"
        steps = manifest.result.steps if manifest.result else summary.num_steps
        return RunOutcome(verdict, f"{pluralize(steps, 'step')}{took}.")
    if verdict == "stopped":
        max_s = manifest.spec.train.max_s
        why = f"when its {format_seconds(max_s)} were over" if manifest.was_time_up else "before its end"
        return RunOutcome(verdict, f"after {done}, {why}.", resume)
    if verdict == "failed":
        failure = first_failure(events)
        why = (
            f": {describe_event(failure, manifest).description}"
            if failure
            else ", and no rank reported why: see its logs"
        )
        return RunOutcome(verdict, f"after {done}{why}.")
    if verdict != "running":
        return RunOutcome(verdict, f"after {done}.")
    silence_s = now - last_write_unix_s
    if is_unresponsive(silence_s, summary.step_p50_s):
        message = f"for {format_seconds(silence_s)}, {done} done. Its processes hang or are gone."
        return RunOutcome("unresponsive", message, resume)
    planned = f" of {manifest.planned_steps}" if manifest.planned_steps else ""
    return RunOutcome(verdict, f"{done}{planned} done.")


def _last_write_unix_s(manifest: Manifest, records: dict[int, list[StepRecord]], events: list[dict[str, Any]]) -> float:
    """Return the Unix time of the last record or event that any process wrote."""
    times = [of_rank[-1].ended for of_rank in records.values() if of_rank]
    times += [event["time"] for event in events if isinstance(event.get("time"), int | float)]
    return max([manifest.started, *times])


def _run_descriptions(summary: RunSummary) -> list[str]:
    """Describe what was trained, on which data and machines, and when."""
    manifest = summary.manifest
    num_params = f"{format_count(manifest.num_params)} parameters"
    if (total := sum(manifest.params_by_group.values())) > manifest.num_params:  # some are frozen
        num_params = f"{format_count(total)} parameters, {format_count(manifest.num_params)} of them trained"
    of_what = [f"{manifest.spec.model.name} ({num_params})", manifest.corpus.name if manifest.corpus else "no corpus"]
    if manifest.shape is None:  # a program of the user's own, which the flags of evener's model say nothing about
        program = manifest.program or (PurePath(manifest.argv[0]).name if manifest.argv else "a program")
        of_what = [f"{program} ({num_params})"]
    return [
        *of_what,
        _processes(manifest),
        *([manifest.roster.backend] if manifest.world_size > 1 else []),
        manifest.roster.dtypes_text + (", compiled" if manifest.compiled else ""),
        *dict.fromkeys(f"{host.cpu}, {pluralize(host.cores, 'core')}" for host in manifest.hosts),
        _format_utc(manifest.started),
    ]


def _processes(manifest: Manifest) -> str:
    """Describe how many processes ran, on which hosts, with how many threads."""
    threads = sorted({rank.threads for rank in manifest.ranks})
    each = " or ".join(map(str, threads)) + (" thread" if threads == [1] else " threads")
    hosts = manifest.roster.hosts
    on = f" on {', '.join(hosts)}" if len(hosts) > 1 else ""
    return f"{pluralize(manifest.world_size, 'process')}{on} with {each}"


def _key_figures(run: RecordedRun, events: list[dict[str, Any]]) -> list[KeyFigure]:
    """Return the key figures at the top of the page."""
    summary, evaluated = run.summary, run.val_losses
    result, has_steps = summary.manifest.result, summary.step_p50_s is not None
    loss = result.loss if result and result.loss is not None else summary.last_loss
    done = f"after {pluralize(summary.num_steps, 'step')}"
    return [
        KeyFigure(
            f"{summary.unit}/s",
            format_count(summary.tokens_per_s) if has_steps else None,
            f"{summary.tokens_per_step:,} a step" if has_steps else "",
        ),
        KeyFigure(
            "step",
            format_seconds(summary.step_p50_s) if has_steps else None,
            _step_remark(summary) if has_steps else "",
        ),
        KeyFigure("loss", "diverged", f"at step {summary.diverged_at}")
        if summary.diverged_at is not None
        else KeyFigure("loss", None if loss is None else f"{loss:.4f}", done if summary.last_loss is not None else ""),
        KeyFigure("validation loss", f"{evaluated[-1][1]:.4f}", f"after {pluralize(evaluated[-1][0], 'step')}")
        if evaluated
        else KeyFigure("validation loss", None),
        _replica_figure(summary, events),
        _memory_figure(summary),
    ]


def _step_remark(summary: RunSummary) -> str:
    remark, option = f"p50; p95 {format_seconds(summary.step_p95_s)}", summary.predicted
    if since := summary.manifest.since:
        remark += f"; since step {since + 1}"
    if option is None or not summary.step_p50_s:
        return remark
    return (
        f"{remark}; predicted {format_seconds(option.step_s)}, "
        f"{format_relative_difference(summary.step_p50_s / option.step_s - 1)}"
    )


def _replica_figure(summary: RunSummary, events: list[dict[str, Any]]) -> KeyFigure:
    name, result = "replicas", summary.manifest.result
    if summary.manifest.world_size == 1:
        return KeyFigure(name, "one", "nothing to compare")
    diverged = [event for event in events if event.get("event") == "run.diverged" and not event.get("goes_back")]
    if diverged or (result and result.replicas_agree is False):
        return KeyFigure(name, "differ")
    if result and result.replicas_agree:
        is_program = summary.manifest.program is not None
        return KeyFigure(name, "agree", "in samples of their weights" if is_program else "to the bit")
    checks = [event for event in events if event.get("event") == "replicas.agree"]
    return (
        KeyFigure(name, "agreed", f"to the bit, after step {checks[-1].get('step')}")
        if checks
        else KeyFigure(name, None)
    )


def _memory_figure(summary: RunSummary) -> KeyFigure:
    name, result = "peak memory", summary.manifest.result
    if result is None or not result.peak_memory_bytes:
        return KeyFigure(name, None)
    return KeyFigure(
        name, format_bytes(max(result.peak_memory_bytes)), "of one rank" if summary.manifest.world_size > 1 else ""
    )


# --- charts and tables ------------------------------------------------------------------------------------------------


def read_step_gantt(rundir: RunDir, manifest: Manifest) -> StepGantt | None:
    """Return the Gantt chart of a typical step; None if no spans were recorded or they are damaged."""
    try:
        timeline = read_timeline(rundir, max_steps=RECORD_LAST_STEPS, tail_bytes=RECORDS_TAIL_BYTES)
    except (UsageError, CheckpointError):
        return None
    return typical_step_gantt(timeline, {rank: manifest.roster.rank_label(rank) for rank in timeline.clock_error_s})


def _charts(
    run: RecordedRun, steps: Sequence[dict[int, StepRecord]], shown_step: StepGantt | None
) -> dict[str, Figure]:
    """Return the page's charts by their name in the template."""
    summary = run.summary
    drawn: dict[str, Figure] = {**run_charts.curve_charts(run)}
    if summary.step_p50_s is not None:
        drawn["parts"] = run_charts.breakdown_bars({summary.rank_label(rank): rank.typical for rank in summary.ranks})
        drawn["areas"] = run_charts.breakdown_areas(run)
    if shown_step is not None:
        drawn["moment"] = shown_step.chart
    if summary.sync_p50_s:
        drawn["sync"] = run_charts.all_reduce_chart(steps, summary)
    return drawn


def _breakdown_table(summary: RunSummary) -> FigureTable:
    """Return the phases of each rank's median step."""
    rows = [
        [summary.rank_label(rank), *(format_seconds(getattr(rank.typical, part)) for part in PHASE_NAMES),
         format_seconds(rank.typical.total_s)]
        for rank in summary.ranks
    ]  # fmt: skip
    return FigureTable(["", *PHASE_NAMES.values(), "sum"], rows)


# --- predicted vs. measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionReport:
    """Prediction against measurement: sentences, and tables if the two can be compared."""

    message: str
    causes: list[str]
    assumptions: list[str]
    step_rows: list[list[str]]
    straggler: str  # the rank that finished last
    straggler_rows: list[list[str]]
    other_rank_rows: dict[str, list[list[str]]]  # by rank


def _prediction_report(summary: RunSummary) -> PredictionReport | None:
    prediction, option = summary.prediction, summary.predicted
    if prediction is None:
        return None
    message, *causes = explain_prediction(summary, prediction)
    assumptions = prediction.cluster.assumptions
    if option is None:
        return PredictionReport(
            message, causes, assumptions, step_rows=[], straggler="", straggler_rows=[], other_rank_rows={}
        )
    names = [option.roster.rank_label(member.rank) for member in option.roster.members]
    tables = [[prediction_cells(row) for row in rank_rows(summary, option, rank)] for rank in range(len(names))]
    last = slowest_rank(summary).rank
    return PredictionReport(
        message,
        causes,
        assumptions,
        step_rows=[prediction_cells(row) for row in step_rows(summary, option)],
        straggler=f"{names[last]}, for which the others wait" if has_straggler(summary) else names[last],
        straggler_rows=tables[last],
        other_rank_rows={
            name: table for rank, (name, table) in enumerate(zip(names, tables, strict=True)) if rank != last
        },
    )


def _host_table(rundir: RunDir, manifest: Manifest) -> FigureTable | None:
    """Return the vitals of each host; skip damaged files, since the page is useful without them."""
    vitals_by_host: dict[str, list[Vitals]] = {}
    for name in [*(machine.host for machine in manifest.hosts), *manifest.roster.hosts]:
        with contextlib.suppress(CheckpointError):
            vitals_by_host[name] = rundir.vitals(name)
    head, rows = host_table(vitals_by_host)
    return FigureTable(head, rows) if rows else None


def _membership_rows(summary: RunSummary) -> list[dict[str, str]]:
    """Return the membership changes: when hosts left or joined, and what that cost."""
    return [
        {
            "since_start": format_since_start(change.time - summary.manifest.started),
            "step": f"{change.step + 1:,}",
            "hosts": ", ".join(change.hosts),
            "why": change.why,
            "cost": format_seconds(change.cost_s),
        }
        for change in summary.membership_changes
    ]


# --- the manifest -----------------------------------------------------------------------------------------------------


def _parameter_rows(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return rows of (group, number of parameters, share of the total)."""
    total = sum(manifest.params_by_group.values()) or 1  # of a fine-tuned model with the frozen ones
    return [(group, f"{num:,}", f"{num / total:.1%}") for group, num in manifest.params_by_group.items() if num]


def _manifest_tree(manifest: Manifest) -> dict[str, NestedText]:
    """Return the manifest as sections of formatted values."""
    tree, roster = msgspec.to_builtins(manifest), manifest.roster
    run: dict[str, Any] = {"command": quote_command(manifest.argv)}
    run |= {key: tree[key] for key in ("verdict", "compiled", "sampler", "code_hash")}
    run |= {"sync": str(roster.sync), "backend": roster.backend, "dtype": roster.dtypes_text}
    run |= {
        "started": _format_utc(manifest.started),
        "ended": None if manifest.ended is None else _format_utc(manifest.ended),
    }
    return {
        "Run": _format_nested(run | {"versions": tree["versions"], "result": tree["result"]}),
        "Requested settings": _format_nested(tree["spec"] if manifest.program is None else None, absent="default"),
        "Shape of the model": _format_nested(tree["shape"]),
        "Corpus": _format_nested(tree["corpus"]),
        "Machines": _format_nested(tree["hosts"]),
        "Processes": _format_nested(tree["ranks"]),
        "Shares at the start": _format_nested(
            [
                member | {"share": share}
                for member, share in zip(tree["roster"]["members"], roster.mean_shares, strict=True)
            ]
        ),
        "Contention: each rank alone, and all ranks at once": _format_nested(tree["contention"]),
    }


def _format_nested(value: Any, absent: str = "–") -> NestedText:
    """Format nested values for display; `absent` stands for None."""
    if isinstance(value, dict):
        return {key: _format_nested(_with_unit(key, inner), absent) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [_format_nested(each, absent) for each in value]
        return inner if any(isinstance(each, dict) for each in value) else ", ".join(map(str, inner))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return absent if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _with_unit(name: str, value: Any) -> Any:
    """Format a quantity whose name ends in a unit (_s, _bytes, _Bps); return other values unchanged."""
    if isinstance(value, list):
        return [_with_unit(name, inner) for inner in value]
    if value is None or isinstance(value, dict):
        return value
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_Bps"):
        return f"{format_bytes(value)}/s"
    return format_seconds(value) if name.endswith("_s") else value


def _format_utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
