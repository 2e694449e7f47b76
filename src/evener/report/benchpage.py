"""Write the HTML report of a bench: how 1, 2, … processes compare, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from evener.core.files import read_file
from evener.core.rundir import RunDir
from evener.core.stored import from_stored
from evener.core.units import count, plural
from evener.report import figures
from evener.report.benchtable import rows
from evener.report.chart import Figure
from evener.report.explain import Story, scaling_story, speedup, worth_it
from evener.report.gap import NO_PREDICTION
from evener.report.markup import Fact, document
from evener.report.ranks import first_done
from evener.report.summary import Summary, summarize

NAME = "bench.json"
FORMAT = 1


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """`bench.json`: the run directories of a bench, by corpus."""

    format: int
    series: dict[str, list[str]]


def is_bench(folder: Path) -> bool:
    """Return whether this folder holds a bench."""
    return (folder / NAME).is_file()


def read(folder: Path) -> dict[str, list[str]]:
    """Read the run directories, relative to the folder, by corpus."""
    return from_stored(read_file(folder / NAME), Series, FORMAT, folder / NAME).series


def summaries(folder: Path) -> dict[str, list[Summary]]:
    """Summarize the runs of a bench, by corpus."""
    return {corpus: [summarize(RunDir(folder / name)) for name in names] for corpus, names in read(folder).items()}


@dataclass(frozen=True)
class Chapter:
    """The page's section about one corpus: the explanation and figures of its runs."""

    corpus: str
    story: Story
    links: list[tuple[str, str]]  # (URL, text) of each run's own page
    rows: list[tuple[str, ...]]
    is_predicted: bool
    figure: str


def page(folder: Path) -> str:
    """Return the HTML report of a bench."""
    by_corpus, name = summaries(folder), folder.resolve().name
    drawn: dict[str, Figure] = {"scaling": figures.scaling(by_corpus)}
    chapters = []
    for index, (corpus, runs) in enumerate(by_corpus.items()):
        figure = f"parts-{index}"
        drawn[figure] = figures.bars(
            {plural(run.manifest.world_size, "process"): first_done(run).typical for run in runs if run.step_p50_s}
        )
        links = [
            (quote(Path(run.run_dir).name) + "/report.html", plural(run.manifest.world_size, "process")) for run in runs
        ]
        _, *shown = rows(runs)  # the processes row becomes the links
        is_predicted = any(run.predicted for run in runs)
        chapters.append(Chapter(corpus, scaling_story(runs), links, shown, is_predicted, figure))
    return document(
        "bench.html",
        title=f"{name}: evener bench",
        figures=drawn,
        name=name,
        what=_what(by_corpus),
        lead=[
            f"{chapter.corpus}: {' '.join([*chapter.story.result[:1], *chapter.story.advice[:1]])}"
            for chapter in chapters
        ],
        shown=[_best(corpus, runs) for corpus, runs in by_corpus.items()],
        chapters=chapters,
        no_prediction=NO_PREDICTION,
    )


def _what(found: dict[str, list[Summary]]) -> list[str]:
    """Describe the models that were trained and the machines."""
    machines = {host.cpu: host.cores for runs in found.values() for run in runs for host in run.manifest.hosts}
    models = sorted({run.manifest.spec.model.model for runs in found.values() for run in runs})
    return [*models, *(f"{cpu}, {plural(cores, 'core')}" for cpu, cores in machines.items())]


def _best(corpus: str, runs: Sequence[Summary]) -> Fact:
    """Return the recommended number of processes for a corpus, and how the others compare."""
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
