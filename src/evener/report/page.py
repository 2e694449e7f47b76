"""What does a person want to see of a run, in which order? One page: the verdict first, the manifest last."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from evener.core.prediction import Option
from evener.core.rundir import Manifest, RunDir, write_atomic
from evener.core.step import StepRecord
from evener.core.units import count, seconds, size
from evener.plan.search import what_if
from evener.report import benchpage, figures
from evener.report.explain import explain_measured, limit
from evener.report.markup import (
    Html,
    document,
    fact_table,
    facts,
    html,
    joined,
    legend,
    panel,
    plot,
    section,
    share_bar,
    table,
    tag,
)
from evener.report.predicted import (
    NO_PREDICTION,
    Row,
    cells,
    explain_prediction,
    percent,
    rank_rows,
    step_rows,
)
from evener.report.ranks import last_done, plural, straggles
from evener.report.summary import Summary, summarize
from evener.report.whatif import correction, what_if_table

SILENT_S = 60.0  # a running job that wrote nothing for so long (or for 20 steps) is not running any more
SILENT_STEPS = 20
FAILURES = ("failure", "run.nonfinite", "run.diverged")
CONSEQUENCES = ("run.peer-exit",)  # a rank that lost its peer is loud, and not the one that failed
NOTE = "soft small"
BESIDE = "Predicted beside measured"
MARKS = {"finished": "good", "running": "good", "stopped": "warn", "failed": "bad", "no word": "bad"}


def write_page(rundir: RunDir) -> Path:
    """Write `report.html` into a run directory, or into the folder of a bench, and return its path."""
    if benchpage.is_bench(rundir.path):
        for names in benchpage.read(rundir.path).values():
            for name in names:
                if not (rundir.path / name / "report.html").exists():  # the page of the bench points there
                    write_page(RunDir(rundir.path / name))
        text = benchpage.page(rundir.path)
    else:
        text = run_page(rundir, now=time.time())
    path = rundir.path / "report.html"
    write_atomic(path, text.encode())
    return path


def run_page(rundir: RunDir, now: float) -> str:
    """The page of one run; `now` tells a run that is silent from one that is running."""
    summary, events = summarize(rundir), rundir.events()
    records = [rundir.records(rank)[: summary.num_steps] for rank in range(summary.manifest.world_size)]
    evaluations = _evaluations(events)
    name = rundir.path.resolve().name
    drawn: dict[str, figures.Figure] = {}
    body = [_verdict(name, summary, events, evaluations, _last_word(summary, records, events), now)]
    if summary.num_steps:
        if evaluations or any(loss is not None for loss in summary.losses):
            drawn["loss"] = figures.loss(summary.losses, evaluations)
        drawn["parts"] = figures.bars({f"rank {rank.rank}": rank.typical for rank in summary.ranks})
        drawn["areas"] = figures.areas(records)
        body += [_losses(summary, drawn.get("loss")), _where_time_goes(summary, drawn)]
    if summary.sync_p50_s is not None:
        drawn["sync"] = figures.all_reduce(records, summary)
        body.append(_all_reduces(summary, drawn["sync"]))
    story = tag("div", *(tag("p", paragraph) for paragraph in explain_measured(summary)), class_="story")
    body += [
        section("What happened, and why", story),
        _predicted(summary),
        _events(summary.manifest, events),
        _manifest(summary.manifest),
    ]
    body.append(tag("footer", f"Written {_moment(now)}. All rates are medians over steps after the warm-up."))
    return document(f"{name}: evener", joined(body), drawn)


# --- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(
    name: str,
    summary: Summary,
    events: list[dict[str, Any]],
    evaluations: list[tuple[int, float]],
    last_word: float,
    now: float,
) -> Html:
    manifest, result = summary.manifest, summary.manifest.result
    verdict, told = _outcome(summary, events, last_word, now)
    losses = [loss for loss in summary.losses if loss is not None]
    loss = result.loss if result and result.loss is not None else losses[-1] if losses else None
    val_step, val_loss = evaluations[-1] if evaluations else (None, None)
    if result and result.val_loss is not None:
        val_step, val_loss = result.steps, result.val_loss
    shown = {
        "tokens/s": (count(summary.tokens_per_s), f"{summary.tokens_per_step:,} a step"),
        "step": (seconds(summary.step_p50_s), _step_remark(summary)),
        "loss": (None if loss is None else f"{loss:.4f}", f"after {_steps(summary)}" if losses else ""),
        "validation loss": (
            None if val_loss is None else f"{val_loss:.4f}",
            "" if val_step is None else f"after {plural(val_step, 'step')}",
        ),
        "replicas": _agreement(summary, events),
        "peak memory": _memory(summary),
    }
    if not summary.num_steps:
        shown |= {"tokens/s": (None, ""), "step": (None, "")}
    machine = ", ".join(f"{host.cpu}, {plural(host.cores, 'core')}" for host in manifest.hosts)
    what = [
        f"{manifest.spec.model.model} ({count(manifest.num_params)} parameters)",
        manifest.corpus.name if manifest.corpus else manifest.spec.data.data,
        f"{plural(manifest.world_size, 'process')} with {plural(summary.threads, 'thread')}",
        *([manifest.backend] if manifest.world_size > 1 else []),
        manifest.dtype + (", compiled" if manifest.compiled else ""),
        machine,
        _moment(manifest.started),
    ]
    return tag(
        "header",
        tag("p", "training run", class_="kind"),
        tag("h1", name),
        tag("p", " · ".join(what), class_=NOTE),
        tag("p", tag("span", verdict, class_=f"verdict {MARKS.get(verdict, 'warn')}"), told, class_="lead"),
        tag("p", limit(summary), class_="lead") if summary.num_steps else "",
        facts(shown),
    )


def _outcome(summary: Summary, events: list[dict[str, Any]], last_word: float, now: float) -> tuple[str, Html]:
    """The verdict in a word, and a sentence about it."""
    manifest = summary.manifest
    if manifest.verdict == "finished":
        took = "" if manifest.ended is None else f" in {seconds(manifest.ended - manifest.started)}"
        return "finished", html(f"{plural(manifest.result.steps if manifest.result else 0, 'step')}{took}.")
    resume = tag("code", f"evener train --resume {summary.run_dir}")
    if manifest.verdict == "stopped":
        max_s = manifest.spec.train.max_s
        in_time = max_s is not None and manifest.ended is not None and manifest.ended - manifest.started >= max_s
        why = f"when its {seconds(max_s)} were over" if in_time else "before its end"
        return "stopped", joined([f"after {_steps(summary)}, {why}. It goes on with ", resume, "."])
    if manifest.verdict == "failed":
        failure = _first_failure(events)
        why = f": {_describe(failure)}" if failure else ", and no rank could say why: see its logs"
        return "failed", html(f"after {_steps(summary)}{why}.")
    if manifest.verdict != "running":
        return manifest.verdict, html(f"after {_steps(summary)}.")
    silence_s = now - last_word
    if silence_s > max(SILENT_S, SILENT_STEPS * (summary.step_p50_s or 0.0)):
        told = f"for {seconds(silence_s)}, {_steps(summary)} done. Its processes hang or are gone. It goes on with "
        return "no word", joined([told, resume, "."])
    return "running", html(f"{_steps(summary)} of {manifest.spec.train.steps} done.")


def _steps(summary: Summary) -> str:
    return plural(summary.num_steps, "step")


def _agreement(summary: Summary, events: list[dict[str, Any]]) -> tuple[str | None, str]:
    result = summary.manifest.result
    if summary.manifest.world_size == 1:
        return "one", "nothing to compare"
    if any(event.get("event") == "run.diverged" for event in events) or (result and result.replicas_agree is False):
        return "differ", ""
    checks = [event for event in events if event.get("event") == "replicas.agree"]
    if result and result.replicas_agree:
        return "agree", "to the bit"
    return ("agreed", f"to the bit, after step {checks[-1].get('step')}") if checks else (None, "")


def _step_remark(summary: Summary) -> str:
    remark, option = f"p50; p95 {seconds(summary.step_p95_s)}", summary.predicted
    if option is None or not summary.step_p50_s:
        return remark
    return f"{remark}; predicted {seconds(option.step_s)}, {percent(summary.step_p50_s / option.step_s - 1)}"


def _memory(summary: Summary) -> tuple[str | None, str]:
    result = summary.manifest.result
    if result is None or not result.peak_memory_bytes:
        return None, ""
    return size(max(result.peak_memory_bytes)), "of one rank" if summary.manifest.world_size > 1 else ""


def _last_word(summary: Summary, records: Sequence[Sequence[StepRecord]], events: list[dict[str, Any]]) -> float:
    """Unix time of the last thing that any process wrote."""
    times = [of_rank[-1].ended for of_rank in records if of_rank]
    times += [event["time"] for event in events if isinstance(event.get("time"), int | float)]
    return max([summary.manifest.started, *times])


def _evaluations(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Validation loss by step; of a step that a resumed run took again, the later one."""
    found = {}
    for event in events:
        step, val_loss = event.get("step"), event.get("val_loss")
        if event.get("event") == "evaluation" and isinstance(step, int) and isinstance(val_loss, float):
            found[step] = val_loss
    return sorted(found.items())


# --- figures with their words -----------------------------------------------------------------------------------------


def _losses(summary: Summary, figure: figures.Figure | None) -> Html:
    if figure is None:
        return section("Loss", tag("p", "It was not measured.", class_="soft"))
    per_point = -(-summary.num_steps // figures.MAX_POINTS)
    note = f"Each point of a line is the mean of {per_point} steps." if per_point > 1 else ""
    return section("Loss", panel(legend(figure), plot("loss")), tag("p", note, class_=NOTE) if note else "")


def _where_time_goes(summary: Summary, drawn: dict[str, figures.Figure]) -> Html:
    columns = list(figures.PART_NAMES)
    costs = [rank.typical for rank in summary.ranks]
    rows = [
        [f"rank {rank}", *(seconds(getattr(cost, part)) for part in columns), seconds(cost.total_s)]
        for rank, cost in enumerate(costs)
    ]
    head = ["", *(figures.PART_NAMES[part] for part in columns), "sum"]
    layers = [f"rank {rank.rank}" for rank in summary.ranks]
    if len(layers) > 1:
        layers.insert(0, figures.ALL_RANKS)
    chooser = tag(
        "label",
        "show ",
        tag("select", *(tag("option", layer) for layer in layers), data_figure="areas"),
        class_="choose",
    )
    missing = [figures.PART_NAMES[part] for part in figures.unmeasured(costs)]
    return section(
        "Where each step’s time goes",
        tag("p", "The median step of each rank, and its parts: means over the middle half of the steps.", class_=NOTE),
        panel(legend(drawn["parts"]), plot("parts")),
        tag("p", f"Not measured: {', '.join(missing)}.", class_=NOTE) if missing else "",
        tag("details", tag("summary", "in figures"), table(head, rows, numbers=range(1, len(head)))),
        tag("p", "Every step as it came.", class_=NOTE),
        panel(chooser if len(layers) > 1 else "", legend(drawn["parts"]), plot("areas")),
    )


def _all_reduces(summary: Summary, figure: figures.Figure) -> Html:
    told = (
        f"Of one step, on the slowest rank: in flight p50 {seconds(summary.sync_p50_s)}, p95 "
        f"{seconds(summary.sync_p95_s)}. Backward may compute meanwhile; exposed is what it did not hide, while the "
        "ranks stood still."
    )
    return section("All-reduce", tag("p", told, class_=NOTE), panel(legend(figure), plot("sync")))


# --- predicted beside measured ----------------------------------------------------------------------------------------


def _predicted(summary: Summary) -> Html:
    prediction, option = summary.prediction, summary.predicted
    if prediction is None:
        return section(BESIDE, tag("p", NO_PREDICTION, class_="soft"))
    told, *causes = explain_prediction(summary, prediction)
    listed = tag("ul", *(tag("li", cause) for cause in causes)) if causes else ""
    children: list[object] = [tag("div", tag("p", told), listed, class_="story")]
    if option is not None:
        slow = last_done(summary).rank
        rest = [rank for rank in range(len(option.ranks)) if rank != slow]
        more = [joined([tag("h3", _rank(option, rank)), _beside(rank_rows(summary, option, rank))]) for rank in rest]
        last = f"{_rank(option, slow)}, for which the others wait" if straggles(summary) else _rank(option, slow)
        children += [
            tag("h3", "The step"),
            _beside(step_rows(summary, option)),
            tag("h3", f"Its parts on {last}"),
            _beside(rank_rows(summary, option, slow)),
            tag("details", tag("summary", "the other ranks"), *more) if more else "",
        ]
    if prediction.cluster.assumed:
        assumed = tag("ul", *(tag("li", sentence) for sentence in prediction.cluster.assumed), class_=NOTE)
        children += [tag("p", "What nobody had measured, and what stood in for it:", class_=NOTE), assumed]
    if option is not None and (others := what_if(prediction)):
        children += _what_if(summary, option, others)
    return section(BESIDE, *children)


def _what_if(summary: Summary, option: Option, others: Sequence[Option]) -> list[Html]:
    measured = summary.step_p50_s is not None
    head, rows = what_if_table(others, option, correction(summary, option) if measured else None)
    note = "These are predictions, not measurements. "
    if measured:
        note += (
            "Corrected means: computing and update of each host, and communication, as much slower or faster than "
            "predicted as they were in this run, and waiting for input as it was here. A host that took no part keeps "
            f"its prediction. This run itself comes out at {rows[0][4]} so; it took {seconds(summary.step_p50_s)}."
        )
    return [tag("h3", "What if"), tag("p", note, class_=NOTE), table(head, rows, numbers=range(1, len(head)))]


def _rank(option: Option, rank: int) -> str:
    return f"rank {rank} ({option.ranks[rank].host})"


def _beside(rows: Sequence[Row]) -> Html:
    return table(["", "predicted", "measured", "difference", ""], map(cells, rows), numbers=range(1, 5))


# --- events and manifest ----------------------------------------------------------------------------------------------


def _events(manifest: Manifest, events: list[dict[str, Any]]) -> Html:
    if not events:
        return section("Events", tag("p", "None was recorded.", class_="soft"))
    first = _first_failure(events)
    alarm: list[Html] = []
    if first and manifest.verdict != "finished":
        hint = tag("p", first["hint"]) if first.get("hint") else ""
        alarm = [panel(tag("strong", "The first failure: ", class_="bad"), _describe(first), hint)]
    rows = [
        [
            _offset(event.get("time"), manifest.started),
            tag("span", event.get("event"), class_="bad" if event.get("event") in FAILURES + CONSEQUENCES else ""),
            _describe(event),
        ]
        for event in events
    ]
    listed = tag("div", table(["since start", "event", "what"], rows, numbers=[0]), class_="events")
    return section("Events", *alarm, listed)


def _first_failure(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What ended the run since it was last started: a failure before what merely followed from one."""
    starts = [index for index, event in enumerate(events) if event.get("event") == "start"]
    since = events[starts[-1] :] if starts else events
    for kinds in (FAILURES, CONSEQUENCES):
        found = [event for event in since if event.get("event") in kinds]
        if found:
            return found[0]
    return None


def _describe(event: dict[str, Any]) -> str:
    """An event in words; one that is not known in its own."""
    step = event.get("step")
    match event.get("event"):
        case "start":
            return f"ranks: {event.get('ranks')}, from step {step}"
        case "evaluation":
            loss = event.get("val_loss")
            return f"step {step}: validation loss " + (f"{loss:.4f}" if isinstance(loss, float) else "not measured")
        case "checkpoint":
            return f"step {step} saved"
        case "replicas.agree":
            return f"step {step}: all {event.get('tensors')} tensors are equal on all ranks, to the bit"
        case "finished" | "stopped":
            return f"step {step}"
        case "run.nonfinite":
            return f"step {step}: the loss is not finite, on rank {str(event.get('ranks')).strip('[]')}"
        case "run.diverged":
            return f"step {step}: the replicas differ: {msgspec.json.encode(event.get('differences')).decode()}"
        case "failure" | "run.peer-exit":
            return f"rank {event.get('rank')}: {event.get('error')}"
        case _:
            rest = {key: value for key, value in event.items() if key not in ("event", "time")}
            return ", ".join(f"{key} {value}" for key, value in rest.items())


def _offset(moment: object, started: float) -> str:
    return seconds(moment - started) if isinstance(moment, int | float) else "not measured"


def _manifest(manifest: Manifest) -> Html:
    total = manifest.num_params or 1
    groups = [
        [group, f"{num:,}", f"{num / total:.1%}", share_bar(num / total)]
        for group, num in manifest.params_by_group.items()
        if num
    ]
    groups.append([tag("strong", "all"), tag("strong", f"{manifest.num_params:,}"), "", ""])
    tree = msgspec.to_builtins(manifest)
    run: dict[str, Any] = {"command": tag("code", shlex.join(manifest.argv))}
    run |= {key: tree[key] for key in ("verdict", "backend", "sync", "dtype", "compiled", "code_hash")}
    run |= {"started": _moment(manifest.started), "ended": None if manifest.ended is None else _moment(manifest.ended)}
    parts = {
        "Run": run | {"versions": tree["versions"], "result": tree["result"]},
        "What was asked for": tree["spec"],
        "Shape of the model": tree["shape"],
        "Corpus": tree["corpus"],
        "Machines": tree["hosts"],
        "Processes": tree["ranks"],
        "Contention: each rank alone, and all together": tree["contention"],
    }
    return section(
        "Manifest",
        tag("h3", "Parameters"),
        table(["group", "parameters", "share", ""], groups, numbers=[1, 2]),
        *(
            tag("details", tag("summary", name), _tree(part, "default" if name == "What was asked for" else "–"))
            for name, part in parts.items()
        ),
    )


def _tree(value: Any, absent: str) -> Html:
    """Nested facts as nested tables; `absent` stands for None."""
    if isinstance(value, dict):
        return fact_table({key: _tree(_with_unit(key, inner), absent) for key, inner in value.items()})
    if isinstance(value, list):
        between = Html() if any(isinstance(inner, dict) for inner in value) else html(", ")
        return Html(between.join(_tree(inner, absent) for inner in value))
    if isinstance(value, bool):
        return html("yes" if value else "no")
    return html(absent if value is None else f"{value:.6g}" if isinstance(value, float) else value)


def _with_unit(name: str, value: Any) -> Any:
    """Quantities whose unit stands in their name, as a person writes them."""
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
