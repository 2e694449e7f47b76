"""evener report: what happened, and why."""

from __future__ import annotations

import typer

EXAMPLES = "evener report runs/mine"


def report(
    run: str = typer.Argument(..., help="run directory, or the folder of a bench"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Write report.html, one page that opens offline: how fast a run was, where its time went, and why.

    Prints the page's path, and beside it (on stderr) the explanation. Of the folder of a bench it makes a page that
    compares its runs.
    """
    import json
    from typing import Any

    from evener.cli import fleets
    from evener.cli.terminal import console, say
    from evener.core.plan import find_plan
    from evener.core.rundir import RunDir
    from evener.report import benchpage, compare
    from evener.report.explain import explain_run, explain_scaling
    from evener.report.page import write_page
    from evener.report.summary import as_result, summarize

    rundir = RunDir(run)
    found: dict[str, Any]
    if benchpage.is_bench(rundir.path):
        series = benchpage.summaries(rundir.path)
        explanation = [f"{corpus}: {explain_scaling(runs)}" for corpus, runs in series.items()]
        found = {"series": {corpus: [as_result(summary) for summary in runs] for corpus, runs in series.items()}}
    elif compare.is_comparison(rundir.path):
        compared = compare.read(rundir.path)
        runs = compare.summaries(rundir.path, compared)
        explanation = compare.explain(compared.kind, runs, compared.base)
        found = {"runs": {label: as_result(one) for label, one in runs.items()}, "failed": compared.failed}
    else:
        summary = summarize(rundir)
        explanation = explain_run(summary)
        found = as_result(summary) | fleets.weights(rundir, find_plan(rundir))
    page = write_page(rundir)
    if as_json:
        print(json.dumps(found | {"explanation": explanation, "page": str(page)}))
        return 0
    screen = console(stderr=True)
    for paragraph in explanation:
        say(screen, paragraph)
        screen.print()
    if found.get("newer_checkpoint"):
        fleets.tell_weights(rundir, find_plan(rundir))
    print(page)
    return 0
