"""Write the HTML report of a run or a bench on one page: the verdict first, the manifest last."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from evener.core.errors import CheckpointError, UsageError
from evener.core.files import write_atomic
from evener.core.plan import find_plan
from evener.core.rundir import Manifest, RunDir
from evener.core.spans import LAST
from evener.core.step import StepRecord, aligned
from evener.core.units import count, plural, seconds, size
from evener.core.vitals import Vitals
from evener.report import benchpage, compare, figures
from evener.report.chart import Figure
from evener.report.events import evaluations, first_failure, since, tell
from evener.report.explain import explain_measured, limit
from evener.report.gap import NO_PREDICTION, explain_prediction
from evener.report.hosts import host_table
from evener.report.markup import Fact, document
from evener.report.moment import Moment, moment
from evener.report.predicted import cells, percent, rank_rows, step_rows
from evener.report.ranks import last_done, straggles
from evener.report.summary import Summary, records_of, summarize
from evener.report.timeline import read_timeline
from evener.report.whatif import HEAD, asked_again, what_if_rows
from evener.report.worth import worth

SILENT_S = 60.0  # a "running" job that has written nothing for so long (or for 20 steps) is considered dead
SILENT_STEPS = 20
TAIL_BYTES = 1 << 20  # read of each rank's records for the chart of one step: more than a thousand steps, in 20 ms
Text: TypeAlias = "dict[str, Text] | list[Text] | str"  # nested values, each formatted as text
MARKS = {"finished": "good", "running": "good", "stopped": "warn", "failed": "bad", "no word": "bad"}


def write_page(rundir: RunDir, path: Path | None = None) -> Path:
    """Write the report of a run or a bench to `path` [report.html in its folder] and return that path."""
    if benchpage.is_bench(rundir.path):
        _write_pages_of(rundir, [name for names in benchpage.read(rundir.path).values() for name in names])
        text = benchpage.page(rundir.path)
    elif compare.is_comparison(rundir.path):
        _write_pages_of(rundir, compare.read(rundir.path).runs.values())
        text = compare.page(rundir.path)
    else:
        text = run_page(rundir, now=time.time())
    path = path or rundir.path / "report.html"
    write_atomic(path, text.encode())
    return path


def _write_pages_of(folder: RunDir, names: Iterable[str]) -> None:
    """Write the reports that a bench's page links to, except those that exist."""
    for name in names:
        if not (folder.path / name / "report.html").exists():
            write_page(RunDir(folder.path / name))


def run_page(rundir: RunDir, now: float) -> str:
    """Return the HTML report of one run; `now` (Unix time) decides whether a "running" run is stale."""
    summary, events = summarize(rundir), rundir.events()
    manifest = summary.manifest
    records, alternatives = records_of(rundir), asked_again(summary)
    name, failure, shown_step = rundir.path.resolve().name, first_failure(events), one_step(rundir, manifest)
    return document(
        "run.html",
        title=f"{name}: evener",
        figures=_figures(summary, aligned(records), evaluations(events), shown_step),
        name=name,
        what=_what(summary),
        worth=worth(summary, alternatives),
        outcome=_outcome(summary, events, _last_word(manifest, records, events), now),
        limit=limit(summary) if summary.step_p50_s else "",
        away=_away(rundir),
        shown=_shown(summary, events),
        summary=summary,
        steps_per_point=-(-len(summary.losses) // figures.MAX_POINTS),
        unmeasured=[figures.PART_NAMES[part] for part in figures.unmeasured(rank.typical for rank in summary.ranks)],
        parts=_parts(summary),
        moment=shown_step,
        story=explain_measured(summary),
        predicted=_beside(summary),
        no_prediction=NO_PREDICTION,
        what_if=Table(list(HEAD), what_if_rows(alternatives)) if alternatives else None,
        hosts=_hosts(rundir, manifest),
        changes=_changes(summary),
        events=[tell(event, manifest) for event in events],
        failure=tell(failure, manifest) if failure and manifest.verdict != "finished" else None,
        parameters=_parameters(manifest),
        num_params=f"{manifest.num_params:,}",
        manifest=_manifest(manifest),
        written=_moment(now),
    )


@dataclass(frozen=True)
class Table:
    """A table for the template's `table` macro: a column of names, then columns of figures."""

    head: list[str]
    rows: list[list[str]]


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The run's verdict and a sentence that explains it."""

    verdict: str
    told: str
    command: str = ""  # resumes the run

    @property
    def mark(self) -> str:
        """The verdict's colour class."""
        return MARKS.get(self.verdict, "warn")


def _away(rundir: RunDir) -> tuple[int, str] | None:
    """Return (step, host) of the newest checkpoint if it is saved on another host and not here."""
    saved, plan = rundir.saved_step(), find_plan(rundir)
    if saved is None or plan is None or plan.is_here or saved <= max(rundir.checkpoint_steps(), default=-1):
        return None
    return saved, plan.hosts[0].name


def _outcome(summary: Summary, events: list[dict[str, Any]], last_word: float, now: float) -> Outcome:
    manifest = summary.manifest
    verdict, done = manifest.verdict, plural(summary.num_steps, "step")
    resume = f"evener train --resume {summary.run_dir}"
    if verdict == "finished":
        took = "" if manifest.ended is None else f" in {seconds(manifest.ended - manifest.started)}"
        return Outcome(verdict, f"{plural(manifest.result.steps if manifest.result else 0, 'step')}{took}.")
    if verdict == "stopped":
        max_s = manifest.spec.train.max_s
        in_time = max_s is not None and manifest.ended is not None and manifest.ended - manifest.started >= max_s
        why = f"when its {seconds(max_s)} were over" if in_time else "before its end"
        return Outcome(verdict, f"after {done}, {why}.", resume)
    if verdict == "failed":
        failure = first_failure(events)
        why = f": {tell(failure, manifest).what}" if failure else ", and no rank reported why: see its logs"
        return Outcome(verdict, f"after {done}{why}.")
    if verdict != "running":
        return Outcome(verdict, f"after {done}.")
    silence_s = now - last_word
    if silence_s > max(SILENT_S, SILENT_STEPS * (summary.step_p50_s or 0.0)):
        message = f"for {seconds(silence_s)}, {done} done. Its processes hang or are gone."
        return Outcome("no word", message, resume)
    return Outcome(verdict, f"{done} of {manifest.spec.train.steps} done.")


def _last_word(manifest: Manifest, records: dict[int, list[StepRecord]], events: list[dict[str, Any]]) -> float:
    """Return the Unix time of the last record or event that any process wrote."""
    times = [of_rank[-1].ended for of_rank in records.values() if of_rank]
    times += [event["time"] for event in events if isinstance(event.get("time"), int | float)]
    return max([manifest.started, *times])


def _what(summary: Summary) -> list[str]:
    """Describe what was trained, on which data and machines, and when."""
    manifest = summary.manifest
    return [
        f"{manifest.spec.model.model} ({count(manifest.num_params)} parameters)",
        manifest.corpus.name if manifest.corpus else manifest.spec.data.data,
        _processes(manifest),
        *([manifest.roster.backend] if manifest.world_size > 1 else []),
        manifest.roster.dtypes + (", compiled" if manifest.compiled else ""),
        *dict.fromkeys(f"{host.cpu}, {plural(host.cores, 'core')}" for host in manifest.hosts),
        _moment(manifest.started),
    ]


def _processes(manifest: Manifest) -> str:
    """Describe how many processes ran, on which hosts, with how many threads."""
    threads = sorted({rank.threads for rank in manifest.ranks})
    each = " or ".join(map(str, threads)) + (" thread" if threads == [1] else " threads")
    hosts = manifest.roster.hosts
    on = f" on {', '.join(hosts)}" if len(hosts) > 1 else ""
    return f"{plural(manifest.world_size, 'process')}{on} with {each}"


def _shown(summary: Summary, events: list[dict[str, Any]]) -> list[Fact]:
    """Return the key figures at the top of the page."""
    result, has_steps = summary.manifest.result, summary.step_p50_s is not None
    loss = result.loss if result and result.loss is not None else summary.last_loss
    evaluated = evaluations(events)
    if result and result.val_loss is not None:
        evaluated.append((result.steps, result.val_loss))
    done = f"after {plural(summary.num_steps, 'step')}"
    return [
        Fact("tokens/s", count(summary.tokens_per_s) if has_steps else None,
             f"{summary.tokens_per_step:,} a step" if has_steps else ""),
        Fact("step", seconds(summary.step_p50_s) if has_steps else None, _step_remark(summary) if has_steps else ""),
        Fact("loss", None if loss is None else f"{loss:.4f}", done if summary.last_loss is not None else ""),
        Fact("validation loss", f"{evaluated[-1][1]:.4f}", f"after {plural(evaluated[-1][0], 'step')}")
        if evaluated else Fact("validation loss", None),
        _agreement(summary, events),
        _memory(summary),
    ]  # fmt: skip


def _step_remark(summary: Summary) -> str:
    remark, option = f"p50; p95 {seconds(summary.step_p95_s)}", summary.predicted
    if since := summary.manifest.since:
        remark += f"; since step {since + 1}"
    if option is None or not summary.step_p50_s:
        return remark
    return f"{remark}; predicted {seconds(option.step_s)}, {percent(summary.step_p50_s / option.step_s - 1)}"


def _agreement(summary: Summary, events: list[dict[str, Any]]) -> Fact:
    name, result = "replicas", summary.manifest.result
    if summary.manifest.world_size == 1:
        return Fact(name, "one", "nothing to compare")
    diverged = [event for event in events if event.get("event") == "run.diverged" and not event.get("goes_back")]
    if diverged or (result and result.replicas_agree is False):
        return Fact(name, "differ")
    if result and result.replicas_agree:
        return Fact(name, "agree", "to the bit")
    checks = [event for event in events if event.get("event") == "replicas.agree"]
    return Fact(name, "agreed", f"to the bit, after step {checks[-1].get('step')}") if checks else Fact(name, None)


def _memory(summary: Summary) -> Fact:
    name, result = "peak memory", summary.manifest.result
    if result is None or not result.peak_memory_bytes:
        return Fact(name, None)
    return Fact(name, size(max(result.peak_memory_bytes)), "of one rank" if summary.manifest.world_size > 1 else "")


# --- charts and tables ------------------------------------------------------------------------------------------------


def one_step(rundir: RunDir, manifest: Manifest) -> Moment | None:
    """Return the Gantt chart of a typical step; None if no spans were recorded or they are damaged."""
    try:
        timeline = read_timeline(rundir, most=LAST, tail_bytes=TAIL_BYTES)
    except (UsageError, CheckpointError):
        return None
    return moment(timeline, {rank: manifest.roster.name_of(rank) for rank in timeline.error_s})


def _figures(summary: Summary, steps: Sequence[dict[int, StepRecord]], evaluated: Sequence[tuple[int, float]],
             shown_step: Moment | None) -> dict[str, Figure]:  # fmt: skip
    """Return the page's charts by their name in the template."""
    drawn: dict[str, Figure] = {}
    if evaluated or summary.last_loss is not None:
        drawn["loss"] = figures.loss(summary.losses, evaluated)
    if summary.step_p50_s is not None:
        drawn["schedule"] = figures.schedule(steps)
        drawn["parts"] = figures.bars({summary.name_of(rank): rank.typical for rank in summary.ranks})
        names = {rank: summary.manifest.roster.name_of(rank) for of_step in steps for rank in of_step}
        drawn["areas"] = figures.areas(steps, names)
        if gradients := figures.gradients(steps):
            drawn["gradients"] = gradients
    if shown_step is not None:
        drawn["moment"] = shown_step.lanes
    if summary.sync_p50_s:
        drawn["sync"] = figures.all_reduce(steps, summary)
    return drawn


def _parts(summary: Summary) -> Table:
    """Return the phases of each rank's median step."""
    rows = [
        [summary.name_of(rank), *(seconds(getattr(rank.typical, part)) for part in figures.PART_NAMES),
         seconds(rank.typical.total_s)]
        for rank in summary.ranks
    ]  # fmt: skip
    return Table(["", *figures.PART_NAMES.values(), "sum"], rows)


# --- predicted vs. measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Prediction against measurement: sentences, and tables if the two can be compared."""

    told: str
    causes: list[str]
    assumed: list[str]
    step: list[list[str]]
    last: str  # the rank that finished last
    of_last: list[list[str]]
    of_others: dict[str, list[list[str]]]  # by rank


def _beside(summary: Summary) -> Beside | None:
    prediction, option = summary.prediction, summary.predicted
    if prediction is None:
        return None
    message, *causes = explain_prediction(summary, prediction)
    assumptions = prediction.cluster.assumptions
    if option is None:
        return Beside(message, causes, assumptions, step=[], last="", of_last=[], of_others={})
    names = [option.roster.name_of(member.rank) for member in option.roster.members]
    tables = [[cells(row) for row in rank_rows(summary, option, rank)] for rank in range(len(names))]
    last = last_done(summary).rank
    return Beside(
        message,
        causes,
        assumptions,
        step=[cells(row) for row in step_rows(summary, option)],
        last=f"{names[last]}, for which the others wait" if straggles(summary) else names[last],
        of_last=tables[last],
        of_others={name: table for rank, (name, table) in enumerate(zip(names, tables, strict=True)) if rank != last},
    )


def _hosts(rundir: RunDir, manifest: Manifest) -> Table | None:
    """Return the vitals of each host; skip damaged files, since the page is useful without them."""
    vitals_by_host: dict[str, list[Vitals]] = {}
    for name in [*(machine.host for machine in manifest.hosts), *manifest.roster.hosts]:
        with contextlib.suppress(CheckpointError):
            vitals_by_host[name] = rundir.vitals(name)
    head, rows = host_table(vitals_by_host)
    return Table(head, rows) if rows else None


def _changes(summary: Summary) -> list[dict[str, str]]:
    """Return the membership changes: when hosts left or joined, and what that cost."""
    return [
        {
            "since_start": since(change.time - summary.manifest.started),
            "step": f"{change.step + 1:,}",
            "hosts": ", ".join(change.hosts),
            "why": change.why,
            "cost": seconds(change.cost_s),
        }
        for change in summary.changes
    ]


# --- the manifest -----------------------------------------------------------------------------------------------------


def _parameters(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return rows of (group, number of parameters, share of the total)."""
    return [
        (group, f"{num:,}", f"{num / (manifest.num_params or 1):.1%}")
        for group, num in manifest.params_by_group.items()
        if num
    ]


def _manifest(manifest: Manifest) -> dict[str, Text]:
    """Return the manifest as sections of formatted values."""
    tree, roster = msgspec.to_builtins(manifest), manifest.roster
    run: dict[str, Any] = {"command": shlex.join(manifest.argv)}
    run |= {key: tree[key] for key in ("verdict", "compiled", "sampler", "code_hash")}
    run |= {"sync": str(roster.sync), "backend": roster.backend, "dtype": roster.dtypes}
    run |= {"started": _moment(manifest.started), "ended": None if manifest.ended is None else _moment(manifest.ended)}
    return {
        "Run": _text(run | {"versions": tree["versions"], "result": tree["result"]}),
        "Requested settings": _text(tree["spec"], absent="default"),
        "Shape of the model": _text(tree["shape"]),
        "Corpus": _text(tree["corpus"]),
        "Machines": _text(tree["hosts"]),
        "Processes": _text(tree["ranks"]),
        "Shares at the start": _text(
            [
                member | {"share": share}
                for member, share in zip(tree["roster"]["members"], roster.mean_shares, strict=True)
            ]
        ),
        "Contention: each rank alone, and all ranks at once": _text(tree["contention"]),
    }


def _text(value: Any, absent: str = "–") -> Text:
    """Format nested values for display; `absent` stands for None."""
    if isinstance(value, dict):
        return {key: _text(_with_unit(key, inner), absent) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [_text(each, absent) for each in value]
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
        return size(value)
    if name.endswith("_Bps"):
        return f"{size(value)}/s"
    return seconds(value) if name.endswith("_s") else value


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
