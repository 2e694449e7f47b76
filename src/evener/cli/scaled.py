"""evener plan --scale: simulate the scaling efficiency of 1, 2, 4, … 4096 ranks, as a table and two pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evener.cli.terminal import console, say, table
from evener.core.errors import UsageError
from evener.core.units import count, plural, size
from evener.plan.options import as_trained, larger, what_does_not_fit
from evener.plan.scale import Point, Scenario, parse_counts, scale, scenario_of, with_slow
from evener.plan.thumb import nanogpt, sentences

if TYPE_CHECKING:
    from evener.plan.question import Question

LEGEND = (
    "effic.: tokens/s of a rank compared with one rank alone. wait: mean wait of a rank for the slowest. fails: time "
    "between node failures. saves: best checkpoint interval. with both: efficiency with failures and checkpoints."
)


def tell(asked: Question, counts: str, strong: bool, jitter: float | None, slow: str | None, mtbf_days: float | None,
         draw: str | None, as_json: bool) -> int:  # fmt: skip
    """Simulate the scaling, draw and print it; `jitter` is in percent."""
    scenario = scenario_of(asked.job, asked.cluster, strong=strong, jitter=None if jitter is None else jitter / 100,
                           mtbf_days=mtbf_days)  # fmt: skip
    if slow is not None:
        scenario = with_slow(scenario, slow)
    points = scale(scenario, parse_counts(counts))
    assumptions = [*scenario.assumed, *asked.cluster.assumed]
    whole = larger(asked.job, len(asked.cluster.seats))
    if too_large := what_does_not_fit(as_trained(whole, asked.cluster), asked.cluster):
        assumptions.insert(0, f"more memory than there is: {too_large}")
    pictures = _draw(points, draw, asked.job.model) if draw is not None else []
    rule = sentences(nanogpt())
    if as_json:
        print(json.dumps({"points": [msgspec.to_builtins(point) | {"step_s": point.step_s} for point in points],
                          "assumed": assumptions, "rule_of_thumb": rule, "pictures": pictures}))  # fmt: skip
        return 0
    _print(asked, scenario, points, assumptions, rule, pictures)
    return 0


def _draw(points: list[Point], folder: str, model: str) -> list[str]:
    from evener.report.scaling_sheet import efficiency_png, parts_png

    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        paths = [place / "efficiency.png", place / "parts.png"]
        efficiency_png(points, paths[0], title=f"{model}: what more ranks give, simulated")
        parts_png(points, paths[1], title=f"{model}: where a step goes, simulated")
    except OSError as error:
        raise UsageError(f"--draw {folder}: {error.strerror}", hint="a folder that may be written") from None
    return [str(path) for path in paths]


def _print(asked: Question, scenario: Scenario, points: list[Point], told: list[str], rule: list[str],
           pictures: list[str]) -> None:  # fmt: skip
    from evener.report.scaling_sheet import HEAD, rows

    screen = console()
    last, job = points[-1], asked.job
    share = "shared by all ranks" if scenario.kind == "strong" else "a rank"
    verdict = (
        f"{plural(last.ranks, 'rank')} train {count(last.tokens_per_s)} tokens/s, {last.efficiency:.0%} of linear "
        f"scaling; with failures {last.goodput:.0%}."
    )
    what = (
        f"{job.model}: {count(job.shape.num_params())} parameters, {size(scenario.gradient_bytes)} of gradients, "
        f"{plural(scenario.sequences, 'sequence')} of {job.shape.block_size} tokens {share}; simulated"
    )
    say(screen, verdict, style="bold")
    say(screen, what, style="dim")
    screen.print()
    table(screen, HEAD, rows(points), spare=("saves", "fails", "wait", "exposed"))
    say(screen, LEGEND, style="dim")
    screen.print()
    say(screen, "for comparison, a rule of thumb (80-90 % at 8 ranks, 60-70 % at 64):", style="dim")
    for line in rule:
        say(screen, line, indent=2, style="dim")
    screen.print()
    say(screen, "assumed, not measured:", style="dim")
    for line in told:
        say(screen, line, indent=2, style="dim")
    for path in pictures:
        screen.print(path, soft_wrap=True)
