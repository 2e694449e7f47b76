"""evener report: write the report of a run or a bench, and compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from evener.report.beside import Beside

EXAMPLES = (
    "evener report runs/mine\n"
    "evener report runs/mine --format png\n"
    "evener report runs/mine runs/other --out comparison.html"
)
FORMATS = ("html", "md", "json", "png")


def report(
    run: list[str] = typer.Argument(..., help="run directory, or the folder of a bench; several are compared"),
    kind: str = typer.Option(
        "html", "--format", metavar="|".join(FORMATS), help="a page, text, one JSON object, a picture"
    ),
    out: str | None = typer.Option(
        None,
        metavar="FILE",
        help="file for the page or picture [RUN/report.html; for several runs comparison.html; .png]",
    ),
    log: list[str] | None = typer.Option(
        None,
        metavar="LOGGER",
        help="instead, send tensorboard, wandb, trackio or mlflow the steps that they do not have",
    ),
    as_json: bool = typer.Option(False, "--json", help="the same as --format json"),
) -> int:
    """Write report.html, a page that opens offline: a run's throughput, where its time went, and why.

    Prints the page's path, and the explanation on stderr. For the folder of a bench the page compares its runs. For
    several runs it compares their losses, steps and metrics, and lists the settings in which they differ.
    """
    from evener.cli import loggers
    from evener.core.errors import UsageError, did_you_mean
    from evener.core.rundir import RunDir
    from evener.report import benchpage, compare

    if log:
        names = loggers.chosen(log, None)
        for path in run:
            loggers.tell_now(RunDir(path), names)
        return 0
    if kind not in FORMATS:
        raise UsageError(f"--format {kind}: expected {', '.join(FORMATS)}", hint=did_you_mean(kind, FORMATS))
    kind = "json" if as_json else kind
    folder = Path(run[0])
    if len(run) == 1 and kind in ("html", "json"):
        return _one(run[0], out, kind)
    if len(run) == 1 and (benchpage.is_bench(folder) or compare.is_comparison(folder)):
        runs = _runs_of(folder)
        return _several(runs, out or str(folder / f"report.{kind}"), kind)
    return _several(run, out or (str(folder / f"report.{kind}") if len(run) == 1 else f"comparison.{kind}"), kind)


def _runs_of(folder: Path) -> list[str]:
    """Return the run directories of a bench."""
    from evener.report import benchpage, compare

    if benchpage.is_bench(folder):
        names_of_runs = [name for names in benchpage.read(folder).values() for name in names]
    else:
        names_of_runs = list(compare.read(folder).runs.values())
    return [str(folder / name) for name in names_of_runs]


def _one(run: str, out: str | None, kind: str) -> int:
    """Write and print the report of one run, or of a bench."""
    import json

    from evener.cli import fleets
    from evener.core.plan import find_plan
    from evener.core.rundir import RunDir
    from evener.report import benchpage, compare
    from evener.report.explain import explain_run, explain_scaling
    from evener.report.page import write_page
    from evener.report.summary import as_result, summarize

    rundir = RunDir(run)
    result: dict[str, Any]
    if benchpage.is_bench(rundir.path):
        series = benchpage.summaries(rundir.path)
        explanation = [f"{corpus}: {explain_scaling(runs)}" for corpus, runs in series.items()]
        result = {"series": {corpus: [as_result(summary) for summary in runs] for corpus, runs in series.items()}}
    elif compare.is_comparison(rundir.path):
        compared = compare.read(rundir.path)
        runs = compare.summaries(rundir.path, compared)
        explanation = compare.explain(compared.kind, runs, compared.base)
        result = {"runs": {label: as_result(one) for label, one in runs.items()}, "failed": compared.failed}
    else:
        summary = summarize(rundir)
        explanation = explain_run(summary)
        result = as_result(summary) | fleets.weights(rundir, find_plan(rundir))
    page = write_page(rundir, None if out is None else Path(out))
    if kind == "json":
        print(json.dumps(result | {"explanation": explanation, "page": str(page)}))
        return 0
    _explain(explanation)
    if result.get("newer_checkpoint"):
        fleets.tell_weights(rundir, find_plan(rundir))
    print(page)
    return 0


def _several(runs: list[str], out: str, kind: str) -> int:
    """Compare several runs; or report one run as text or a picture."""
    import json

    from evener.core.files import write_atomic
    from evener.report import beside

    comparison = beside.beside(runs)
    if kind == "json":
        print(json.dumps(beside.result(comparison)))
    elif kind == "md":
        print(beside.markdown(comparison), end="")
    else:
        if kind == "html":
            write_atomic(Path(out), beside.page(comparison, " · ".join(comparison.runs)).encode())
        else:
            _draw(comparison, Path(out))
        _explain(beside.explain(comparison))
        print(out)
    return 0


def _draw(both: Beside, path: Path) -> None:
    from evener.report.picture import runs_png

    path.parent.mkdir(parents=True, exist_ok=True)
    runs_png(both, path)


def _explain(paragraphs: list[str]) -> None:
    """Print the explanation on stderr, next to the path on stdout."""
    from evener.cli.terminal import console, say

    screen = console(stderr=True)
    for paragraph in paragraphs:
        say(screen, paragraph)
        screen.print()
