"""Write the HTML report of a bench: how 1, 2, … processes compare, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from evener.core.base.json_files import read_versioned_json
from evener.core.base.units import format_count, pluralize
from evener.core.run.rundir import RunDir
from evener.report.draw import run_charts
from evener.report.draw.svg_charts import Figure
from evener.report.explain.explain_run import ScalingExplanation, recommended_run, scaling_explanation, speedup
from evener.report.explain.prediction_error import NO_PREDICTION
from evener.report.explain.run_tables import bench_rows
from evener.report.pages.html_template import KeyFigure, render_document
from evener.report.read.run_summary import RunSummary, summarize_run
from evener.report.read.stragglers import fastest_rank

FILE_NAME = "bench.json"
FORMAT = 1


class BenchManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`bench.json`: the run directories of a bench, by corpus."""

    format: int
    series: dict[str, list[str]]


def is_bench(folder: Path) -> bool:
    """Return whether this folder holds a bench."""
    return (folder / FILE_NAME).is_file()


def read_bench(folder: Path) -> dict[str, list[str]]:
    """Read the run directories, relative to the folder, by corpus."""
    return read_versioned_json(RunDir(folder).inside(FILE_NAME), BenchManifest, FORMAT).series


def summarize_bench(folder: Path) -> dict[str, list[RunSummary]]:
    """Summarize the runs of a bench, by corpus."""
    return {
        corpus: [summarize_run(RunDir(RunDir(folder).inside(name))) for name in names]
        for corpus, names in read_bench(folder).items()
    }


@dataclass(frozen=True)
class CorpusSection:
    """The page's section about one corpus: the explanation and figures of its runs."""

    corpus: str
    story: ScalingExplanation
    links: list[tuple[str, str]]  # (URL, text) of each run's own page
    rows: list[tuple[str, ...]]
    is_predicted: bool
    figure: str


def bench_page(folder: Path) -> str:
    """Return the HTML report of a bench."""
    by_corpus, name = summarize_bench(folder), folder.resolve().name
    drawn: dict[str, Figure] = {"scaling": run_charts.scaling_chart(by_corpus)}
    chapters = []
    for index, (corpus, runs) in enumerate(by_corpus.items()):
        figure = f"parts-{index}"
        drawn[figure] = run_charts.breakdown_bars(
            {pluralize(run.manifest.world_size, "process"): fastest_rank(run).typical for run in runs if run.step_p50_s}
        )
        links = [
            (quote(Path(run.run_dir).name) + "/report.html", pluralize(run.manifest.world_size, "process"))
            for run in runs
        ]
        _, *shown = bench_rows(runs)  # the processes row becomes the links
        is_predicted = any(run.predicted for run in runs)
        chapters.append(CorpusSection(corpus, scaling_explanation(runs), links, shown, is_predicted, figure))
    return render_document(
        "bench.html",
        title=f"{name}: evener bench",
        figures=drawn,
        name=name,
        what=_run_descriptions(by_corpus),
        lead=[
            f"{chapter.corpus}: {' '.join([*chapter.story.result[:1], *chapter.story.advice[:1]])}"
            for chapter in chapters
        ],
        shown=[_best_figure(corpus, runs) for corpus, runs in by_corpus.items()],
        chapters=chapters,
        no_prediction=NO_PREDICTION,
    )


def _run_descriptions(by_corpus: dict[str, list[RunSummary]]) -> list[str]:
    """Describe the models that were trained and the machines."""
    machines = {host.cpu: host.cores for runs in by_corpus.values() for run in runs for host in run.manifest.hosts}
    models = sorted({run.manifest.spec.model.name for runs in by_corpus.values() for run in runs})
    return [*models, *(f"{cpu}, {pluralize(cores, 'core')}" for cpu, cores in machines.items())]


def _best_figure(corpus: str, runs: Sequence[RunSummary]) -> KeyFigure:
    """Return the recommended number of processes for a corpus, and how the others compare."""
    measured = [run for run in runs if run.tokens_per_s]
    if not measured:
        return KeyFigure(corpus, None, "no step was recorded")
    best = recommended_run(measured)
    others = [
        f"{pluralize(run.manifest.world_size, 'process')} {speedup(run, best):.2f} times"
        for run in measured
        if run is not best
    ]
    remark = ", ".join([f"{format_count(best.tokens_per_s)} tokens/s", *others])
    return KeyFigure(f"best on {corpus}", pluralize(best.manifest.world_size, "process"), remark)
