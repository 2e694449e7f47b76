"""evener report: write the report of a run or a bench, and compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from evener.report.pages.compare_runs import Runs

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
    from evener.cli import logger_processes
    from evener.core.base.errors import UsageError, did_you_mean
    from evener.core.run.rundir import RunDir
    from evener.report.pages import bench_report, compare_setups

    if log:
        names = logger_processes.select_loggers(log, None)
        for path in run:
            logger_processes.backfill_loggers(RunDir(path), names)
        return 0
    if kind not in FORMATS:
        raise UsageError(f"--format {kind}: expected {', '.join(FORMATS)}", hint=did_you_mean(kind, FORMATS))
    kind = "json" if as_json else kind
    folder = Path(run[0])
    if len(run) == 1 and kind in ("html", "json"):
        return _report_one(run[0], out, kind)
    if len(run) == 1 and (bench_report.is_bench(folder) or compare_setups.is_comparison(folder)):
        runs = _bench_run_dirs(folder)
        return _report_comparison(runs, out or str(RunDir(folder).inside(f"report.{kind}")), kind)
    return _report_comparison(
        run, out or (str(RunDir(folder).inside(f"report.{kind}")) if len(run) == 1 else f"comparison.{kind}"), kind
    )


def _bench_run_dirs(folder: Path) -> list[str]:
    """Return the run directories of a bench."""
    from evener.core.run.rundir import RunDir
    from evener.report.pages import bench_report, compare_setups

    if bench_report.is_bench(folder):
        names_of_runs = [name for names in bench_report.read_bench(folder).values() for name in names]
    else:
        names_of_runs = list(compare_setups.read_setups(folder).runs.values())
    return [str(RunDir(folder).inside(name)) for name in names_of_runs]


def _report_one(run: str, out: str | None, kind: str) -> int:
    """Write and print the report of one run, or of a bench."""
    import json

    from evener.cli import run_output
    from evener.core.run.run_plan import read_plan_if_present
    from evener.core.run.rundir import RunDir
    from evener.report.explain.explain_run import explain_run, explain_scaling
    from evener.report.pages import bench_report, compare_setups
    from evener.report.pages.html_report import write_report
    from evener.report.read.run_summary import summarize_run, summary_json

    rundir = RunDir(run)
    result: dict[str, Any]
    if bench_report.is_bench(rundir.path):
        series = bench_report.summarize_bench(rundir.path)
        explanation = [f"{corpus}: {explain_scaling(runs)}" for corpus, runs in series.items()]
        result = {"series": {corpus: [summary_json(summary) for summary in runs] for corpus, runs in series.items()}}
    elif compare_setups.is_comparison(rundir.path):
        compared = compare_setups.read_setups(rundir.path)
        runs = compare_setups.summarize_setups(rundir.path, compared)
        explanation = compare_setups.explain_setups(compared.kind, runs, compared.base)
        result = {"runs": {label: summary_json(one) for label, one in runs.items()}, "failed": compared.failed}
    else:
        summary = summarize_run(rundir)
        explanation = explain_run(summary)
        result = summary_json(summary) | run_output.checkpoint_info(rundir, read_plan_if_present(rundir))
    page = write_report(rundir, None if out is None else Path(out))
    if kind == "json":
        print_escaped(json.dumps(result | {"explanation": explanation, "page": str(page)}))
        return 0
    _print_explanation(explanation)
    if result.get("newer_checkpoint"):
        run_output.print_checkpoint(rundir, read_plan_if_present(rundir))
    print_escaped(page)
    return 0


def _report_comparison(runs: list[str], out: str, kind: str) -> int:
    """Compare several runs; or report one run as text or a picture."""
    import json

    from evener.core.base.file_io import write_atomic
    from evener.report.pages import compare_runs

    comparison = compare_runs.compare_runs(runs)
    if kind == "json":
        print_escaped(json.dumps(compare_runs.comparison_json(comparison)))
    elif kind == "md":
        print_escaped(compare_runs.comparison_markdown(comparison), end="")
    else:
        if kind == "html":
            write_atomic(Path(out), compare_runs.comparison_page(comparison, " · ".join(comparison)).encode())
        else:
            _draw_comparison(comparison, Path(out))
        _print_explanation(compare_runs.explain_comparison(comparison))
        print_escaped(out)
    return 0


def _draw_comparison(both: Runs, path: Path) -> None:
    from evener.core.base.file_io import create_file
    from evener.report.pages.png_charts import comparison_png

    path.parent.mkdir(parents=True, exist_ok=True)
    create_file(path).close()  # a link in its place would be followed
    comparison_png(both, path)


def _print_explanation(paragraphs: list[str]) -> None:
    """Print the explanation on stderr, next to the path on stdout."""
    from evener.cli.terminal import make_console, print_text

    screen = make_console(stderr=True)
    for paragraph in paragraphs:
        print_text(screen, paragraph)
        screen.print()
