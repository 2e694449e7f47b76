"""What does a person want to see of a bench: how do 1, 2, … processes compare, and why?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from evener.core.rundir import RunDir
from evener.core.stored import from_stored
from evener.core.units import count, plural, seconds
from evener.report import figures
from evener.report.explain import Story, scaling_story, speedup, worth_it
from evener.report.gap import NO_PREDICTION
from evener.report.markup import Fact, document
from evener.report.predicted import against
from evener.report.ranks import first_done
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
    return from_stored((folder / NAME).read_bytes(), Series, FORMAT, folder / NAME).series


def summaries(folder: Path) -> dict[str, list[Summary]]:
    """The runs of a bench by corpus."""
    return {corpus: [summarize(RunDir(folder / name)) for name in names] for corpus, names in read(folder).items()}


@dataclass(frozen=True)
class Row:
    """A run in the table of its corpus."""

    link: str  # to its own page
    processes: int
    cells: list[str]  # the other columns


@dataclass(frozen=True)
class Chapter:
    """A corpus: what its runs say, and their figures."""

    corpus: str
    story: Story
    rows: list[Row]
    is_predicted: bool
    figure: str


def page(folder: Path) -> str:
    """The page of a bench."""
    found, name = summaries(folder), folder.resolve().name
    drawn = {"scaling": figures.scaling(found)}
    chapters = []
    for index, (corpus, runs) in enumerate(found.items()):
        figure = f"parts-{index}"
        drawn[figure] = figures.bars(
            {plural(run.manifest.world_size, "process"): first_done(run).typical for run in runs if run.step_p50_s}
        )
        base = next((run for run in runs if run.tokens_per_s), None)
        rows = [_row(run, base) for run in runs]
        chapters.append(Chapter(corpus, scaling_story(runs), rows, any(run.predicted for run in runs), figure))
    return document(
        "bench.html",
        title=f"{name}: evener bench",
        figures=drawn,
        name=name,
        what=_what(found),
        shown=[_best(corpus, runs) for corpus, runs in found.items()],
        columns=COLUMNS,
        chapters=chapters,
        no_prediction=NO_PREDICTION,
    )


def _what(found: dict[str, list[Summary]]) -> list[str]:
    """Which models were trained on which machines."""
    machines = {host.cpu: host.cores for runs in found.values() for run in runs for host in run.manifest.hosts}
    models = sorted({run.manifest.spec.model.model for runs in found.values() for run in runs})
    return [*models, *(f"{cpu}, {plural(cores, 'core')}" for cpu, cores in machines.items())]


def _best(corpus: str, runs: Sequence[Summary]) -> Fact:
    """How many processes train a corpus best, and how the others compare."""
    measured = [run for run in runs if run.tokens_per_s]
    if not measured:
        return Fact(corpus, None, "no step was recorded")
    best = worth_it(measured)
    others = [
        f"{plural(run.manifest.world_size, 'process')} {speedup(run, best):.2f} times"
        for run in measured
        if run is not best
    ]
    remark = ", ".join([f"{count(best.tokens_per_s)} tokens/s", *others])
    return Fact(f"best on {corpus}", plural(best.manifest.world_size, "process"), remark)


def _row(run: Summary, base: Summary | None) -> Row:
    alone = run.manifest.world_size == 1
    cost = first_done(run).typical
    cells = [
        str(run.threads),
        count(run.tokens_per_s),
        f"{speedup(run, base):.2f}" if base and run.tokens_per_s else "not measured",
        f"{seconds(run.step_p50_s)} / {seconds(run.step_p95_s)}",
        seconds(cost.compute_s),
        "–" if alone else f"{seconds(run.sync_p50_s)} / {seconds(run.sync_p95_s)}",
        "–" if alone else seconds(cost.exposed_sync_s),
        "–" if alone else seconds(cost.wait_s),
        seconds(cost.optimizer_s),
        *against(run),
    ]
    return Row(quote(Path(run.run_dir).name) + "/report.html", run.manifest.world_size, cells)
