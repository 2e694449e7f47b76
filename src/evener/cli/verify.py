"""evener verify: do the replicas agree?"""

from __future__ import annotations

from typing import Any

import typer

EXAMPLES = "evener verify runs/mine"


def verify(
    run: str = typer.Argument(..., help="run directory"),
    other: str | None = typer.Argument(None, help="a second run, to compare their newest weights"),
    tolerance: float = typer.Option(0.0, min=0.0, help="largest absolute difference that passes"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Do the replicas of a run agree, to the bit or within what tolerance, and where not?

    Compares the hashes that every rank took of its own weights with each other and with the stored weights; and whole
    states where ranks left them. With a second run: the newest weights of both.
    Exit status 1 when they differ by more than the tolerance.
    """
    import json

    from evener.core.errors import UsageError
    from evener.launch.tool import lines_of

    from pathlib import Path  # isort: skip

    for path in (run, other):
        if path is not None and not Path(path).is_dir():
            raise UsageError(f"{path}: no such directory", hint="ls runs/ shows the runs made here")
    found = json.loads(list(lines_of("evener.worker.compare", run, *([other] if other else [])))[-1])
    largest = found["largest_difference"]
    passes = found["agree"] or (largest is not None and largest <= tolerance)
    if as_json:
        print(json.dumps(found | {"passes": passes}))
    else:
        for check in found["checks"]:
            print(f"{_word(check):>24}  {check['what']} ({check['tensors']} tensors)")
        print(_verdict(found["agree"], largest, passes))
    return 0 if passes else 1


def _word(check: dict[str, Any]) -> str:
    if check["equal"]:
        return "equal to the bit"
    largest = check["largest_difference"]
    return f"differs in {check['tensor']}" if largest is None else f"differs by {largest:.3g}"


def _verdict(agree: bool, largest: float | None, passes: bool) -> str:
    if agree:
        return "agree to the bit: largest absolute difference 0"
    size = "not known: only hashes were kept" if largest is None else f"{largest:.3g}"
    return f"{'agree within the tolerance' if passes else 'DIFFER'}: largest absolute difference {size}"
