"""evener bench: the main job."""

from __future__ import annotations

import typer


def bench(
    preset: str = typer.Option("scaling", help="scaling: 1, 2, … processes on this machine; lab01: the first lab"),
    data: list[str] | None = typer.Option(None, help="corpus, may be given twice [data/verbs and data/python]"),
    out: str | None = typer.Option(None, help="folder of the results [runs/bench, experiments/35-ddp-cpu]"),
    seconds: float = typer.Option(45.0, min=1.0, max=3600.0, help="training time of each set-up"),
    ranks: list[int] | None = typer.Option(None, min=1, max=1024, help="numbers of processes [1, 2, … cores]"),
    model: str = typer.Option("char", help="model preset"),
    batch: int = typer.Option(8, min=1, help="sequences in the global batch"),
    force: bool = typer.Option(False, "--force", help="replace an existing folder"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Measure what more processes bring on this machine, and say why.

    Trains the same global batches with 1, 2, … processes, some minutes in all, on the verb corpus and on Python's own
    source (prepared first where they are missing). Ends with a table, a picture, a page and a paragraph that explains
    this machine's result.

    Example: `evener bench --seconds 20`. The lab: `evener bench --preset lab01`.
    """
    from evener.cli import benchmarks
    from evener.core.errors import UsageError, did_you_mean

    if preset == "scaling":
        return benchmarks.scaling(data, out, seconds, ranks, model, batch, force, as_json)
    if preset == "lab01":
        return benchmarks.lab01(data, out, force, as_json)
    raise UsageError(f"--preset {preset}: no such preset", hint=did_you_mean(preset, ["scaling", "lab01"]))
