"""What does a person want to see of a bench: how do 1, 2, … processes compare, and why?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from evener.core.errors import CheckpointError
from evener.core.rundir import RunDir
from evener.core.units import count, seconds
from evener.report import figures
from evener.report.explain import scaling_story, speedup, worth_it
from evener.report.markup import Html, document, facts, joined, legend, panel, plot, section, table, tag
from evener.report.predicted import NO_PREDICTION, against
from evener.report.ranks import first_done, plural
from evener.report.summary import Summary, summarize

NAME = "bench.json"
FORMAT = 1
COLUMNS = (
    "processes",
    "threads each",
    "tokens/s",
    "speed-up",
    "step p50 / p95",
    "compute",
    "all-reduce p50 / p95",
    "exposed",
    "wait",
    "update",
    "step predicted",
    "difference",
)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """`bench.json`: which run directories belong together."""

    format: int
    series: dict[str, list[str]]


def is_bench(folder: Path) -> bool:
    """Does this folder hold a bench?"""
    return (folder / NAME).is_file()


def read(folder: Path) -> dict[str, list[str]]:
    """Run directories, relative to the folder, by corpus."""
    path = folder / NAME
    try:
        bench = msgspec.json.decode(path.read_bytes(), type=Series)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if bench.format != FORMAT:
        raise CheckpointError(f"{path}: format {bench.format}, this evener reads {FORMAT}")
    return bench.series


def summaries(folder: Path) -> dict[str, list[Summary]]:
    """The runs of a bench by corpus."""
    return {corpus: [summarize(RunDir(folder / name)) for name in names] for corpus, names in read(folder).items()}


def page(folder: Path) -> str:
    """The page of a bench."""
    found = summaries(folder)
    drawn = {"scaling": figures.scaling(found)}
    chapters = []
    for index, (corpus, runs) in enumerate(found.items()):
        measured = [run for run in runs if run.step_p50_s]
        drawn[f"parts-{index}"] = figures.bars(
            {plural(run.manifest.world_size, "process"): first_done(run).typical for run in measured}
        )
        chapters.append(
            section(
                corpus,
                _story(runs),
                table(COLUMNS, _rows(runs), numbers=range(1, len(COLUMNS))),
                "" if any(run.predicted for run in runs) else tag("p", NO_PREDICTION, class_="soft small"),
                tag("p", "The median step and its parts, on the rank that waits most.", class_="soft small"),
                panel(legend(drawn[f"parts-{index}"]), plot(f"parts-{index}")),
            )
        )
    body = [
        _verdict(folder.resolve().name, found),
        section("Speed", panel(legend(drawn["scaling"]), plot("scaling"))),
        *chapters,
        tag("footer", "The same global batches in every run of a corpus; rates are medians over steps."),
    ]
    return document(f"{folder.resolve().name}: evener bench", joined(body), drawn)


def _story(runs: Sequence[Summary]) -> Html:
    story = scaling_story(runs)
    causes = tag("ul", *(tag("li", cause) for cause in story.causes)) if story.causes else ""
    return tag("div", tag("p", " ".join(story.result)), causes, tag("p", " ".join(story.conclusion)), class_="story")


def _verdict(name: str, found: dict[str, list[Summary]]) -> Html:
    shown: dict[str, tuple[object, object]] = {}
    for corpus, runs in found.items():
        measured = [run for run in runs if run.tokens_per_s]
        if not measured:
            shown[corpus] = (None, "no step was recorded")
            continue
        best = worth_it(measured)
        others = [
            f"{plural(run.manifest.world_size, 'process')} {speedup(run, best):.2f} times"
            for run in measured
            if run is not best
        ]
        remark = ", ".join([f"{count(best.tokens_per_s)} tokens/s", *others])
        shown[f"best on {corpus}"] = (plural(best.manifest.world_size, "process"), remark)
    machines = {host.cpu: host.cores for runs in found.values() for run in runs for host in run.manifest.hosts}
    models = sorted({run.manifest.spec.model.model for runs in found.values() for run in runs})
    what = [*models, *(f"{cpu}, {plural(cores, 'core')}" for cpu, cores in machines.items())]
    return tag(
        "header",
        tag("p", "bench", class_="kind"),
        tag("h1", name),
        tag("p", " · ".join(what), class_="soft small"),
        facts(shown),
    )


def _rows(runs: Sequence[Summary]) -> list[list[object]]:
    base = next((run for run in runs if run.tokens_per_s), None)
    return [_row(run, base) for run in runs]


def _row(run: Summary, base: Summary | None) -> list[object]:
    alone = run.manifest.world_size == 1
    cost = first_done(run).typical
    return [
        tag("a", run.manifest.world_size, href=quote(Path(run.run_dir).name) + "/report.html"),
        run.threads,
        count(run.tokens_per_s),
        f"{speedup(run, base):.2f}" if base and run.tokens_per_s else None,
        f"{seconds(run.step_p50_s)} / {seconds(run.step_p95_s)}",
        seconds(cost.compute_s),
        "–" if alone else f"{seconds(run.sync_p50_s)} / {seconds(run.sync_p95_s)}",
        "–" if alone else seconds(cost.exposed_sync_s),
        "–" if alone else seconds(cost.wait_s),
        seconds(cost.optimizer_s),
        *against(run),
    ]
