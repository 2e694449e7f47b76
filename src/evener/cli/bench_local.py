"""The bench that needs no fleet: strong scaling on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from evener.bench import scaling as bench
from evener.cli import follow_output
from evener.cli.terminal import make_console, print_table, print_text
from evener.core.base.errors import UsageError
from evener.core.base.escaped_output import print_escaped
from evener.core.cluster.host_info import usable_cores
from evener.core.run.resolve import resolve
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir
from evener.report.explain.explain_run import explain_scaling, max_loss_difference
from evener.report.explain.run_tables import bench_rows
from evener.report.pages.html_report import write_report
from evener.report.pages.png_charts import scaling_png
from evener.report.read.run_summary import summary_json

DEFAULT_CORPORA = ("data/verbs", "data/python")


def run_scaling_bench(
    base: RunSpec, data: list[str] | None, out: str | None, ranks: list[int] | None, force: bool, as_json: bool
) -> int:
    """Train the same batches with 1, 2, … processes on each corpus; compare tokens/s and losses."""
    screen = make_console(stderr=True, quiet=as_json)
    folder = Path(out or "runs/bench")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UsageError(f"{folder}: exists and is not empty", hint="--force replaces it, or another --out")
    counts = sorted(set(ranks)) if ranks else bench.process_counts(usable_cores())
    corpora = data or [ensure_corpus(corpus) for corpus in DEFAULT_CORPORA]
    series = bench.bench_specs(base, folder, corpora, counts)
    for spec in (spec for runs in series.values() for spec in runs):
        resolve(msgspec.structs.replace(spec, out=None))  # report mistakes before anything is replaced
    if force and folder.exists():
        _remove_bench(folder)
    print_text(screen, "measuring this machine, to predict each run")
    rates = bench.probe_local_rates(base)
    with follow_output.display_series(series, screen) as observer:
        results = bench.train_series(folder, series, observer, rates)
    scaling_png(results, folder / "scaling.png")
    for runs in results.values():
        for summary in runs:
            write_report(RunDir(summary.run_dir))
    page = write_report(RunDir(folder))
    explained = {corpus: explain_scaling(runs) for corpus, runs in results.items()}
    if as_json:
        report = {
            corpus: {
                "runs": [summary_json(summary) for summary in runs],
                "largest_loss_gap": max_loss_difference(runs),
                "explanation": explained[corpus],
            }
            for corpus, runs in results.items()
        }
        print_escaped(json.dumps({"out": str(folder), "report": str(page), "series": report}))
        return 0
    for corpus, runs in results.items():
        title, *figures = bench_rows(runs)
        screen.print()
        print_text(screen, f"{corpus}: {base.model.model}, {runs[0].tokens_per_step} tokens a step")
        print_table(screen, title, figures)
        screen.print()
        print_text(screen, explained[corpus])
    screen.print(f"\npicture: {folder / 'scaling.png'}\nreport:  ", end="", soft_wrap=True)
    print_escaped(page)
    return 0


def ensure_corpus(corpus: str) -> str:
    """Return the corpus folder; make the corpus first if it is one of evener's own and missing."""
    if not (Path(corpus) / "meta.json").exists():
        from evener.cli import data

        makers: dict[str, Callable[..., object]] = {"data/verbs": data.verbs, "data/python": data.python}
        print_text(make_console(stderr=True), f"preparing {corpus}")
        with contextlib.redirect_stdout(sys.stderr):  # its output is not the bench's result
            makers[corpus](out=Path(corpus))
    return corpus


def _remove_bench(folder: Path) -> None:
    """Remove a bench folder; raise UsageError if it is not one."""
    if not (folder / "bench.json").exists():
        raise UsageError(f"{folder}: not a bench, not replaced", hint="another --out")
    shutil.rmtree(folder)
