"""evener plan --scale: simulate the scaling efficiency of 1, 2, 4, … 4096 ranks, as a table and two pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evener.cli.terminal import make_console, print_table, print_text
from evener.core.base.errors import UsageError
from evener.core.base.escaped_output import print_escaped
from evener.core.base.units import format_bytes, format_count, pluralize
from evener.plan.choice.options import explain_memory_shortage, job_with_larger_batch, predict_training
from evener.plan.scaling.rule_of_thumb import describe_rule, nanogpt_scenario
from evener.plan.scaling.scaling_model import (
    ScalingPoint,
    ScalingScenario,
    build_scenario,
    parse_rank_counts,
    simulate_scaling,
    with_slow_ranks,
)

if TYPE_CHECKING:
    from evener.plan.choice.plan_request import PlanRequest

LEGEND = (
    "effic.: tokens/s of a rank compared with one rank alone. wait: mean wait of a rank for the slowest. fails: time "
    "between node failures. saves: best checkpoint interval. with both: efficiency with failures and checkpoints."
)


def print_scaling(
    request: PlanRequest,
    counts: str,
    strong: bool,
    jitter: float | None,
    slow: str | None,
    mtbf_days: float | None,
    draw: str | None,
    as_json: bool,
) -> int:
    """Simulate the scaling, draw and print it; `jitter` is in percent."""
    scenario = build_scenario(
        request.job,
        request.cluster,
        strong=strong,
        jitter=None if jitter is None else jitter / 100,
        mtbf_days=mtbf_days,
    )
    if slow is not None:
        scenario = with_slow_ranks(scenario, slow)
    points = simulate_scaling(scenario, parse_rank_counts(counts))
    assumptions = [*scenario.assumed, *request.cluster.assumed]
    whole = job_with_larger_batch(request.job, len(request.cluster.slots))
    if too_large := explain_memory_shortage(predict_training(whole, request.cluster), request.cluster):
        assumptions.insert(0, f"more memory than there is: {too_large}")
    pictures = _draw_plots(points, draw, request.job.model) if draw is not None else []
    rule = describe_rule(nanogpt_scenario())
    if as_json:
        print_escaped(json.dumps({"points": [msgspec.to_builtins(point) | {"step_s": point.step_s} for point in points],
                          "assumed": assumptions, "rule_of_thumb": rule, "pictures": pictures}))  # fmt: skip
        return 0
    _print_table(request, scenario, points, assumptions, rule, pictures)
    return 0


def _draw_plots(points: list[ScalingPoint], folder: str, model: str) -> list[str]:
    from evener.report.pages.simulated_scaling import breakdown_png, efficiency_png

    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        paths = [place / "efficiency.png", place / "parts.png"]
        efficiency_png(points, paths[0], title=f"{model}: what more ranks give, simulated")
        breakdown_png(points, paths[1], title=f"{model}: where a step goes, simulated")
    except OSError as error:
        raise UsageError(f"--draw {folder}: {error.strerror}", hint="a folder that may be written") from None
    return [str(path) for path in paths]


def _print_table(
    request: PlanRequest,
    scenario: ScalingScenario,
    points: list[ScalingPoint],
    assumptions: list[str],
    rule: list[str],
    pictures: list[str],
) -> None:
    from evener.report.pages.simulated_scaling import SCALING_COLUMNS, scaling_rows

    screen = make_console()
    last, job = points[-1], request.job
    share = "shared by all ranks" if scenario.kind == "strong" else "a rank"
    verdict = (
        f"{pluralize(last.ranks, 'rank')} train {format_count(last.tokens_per_s)} tokens/s, "
        f"{last.efficiency:.0%} of linear "
        f"scaling; with failures {last.goodput:.0%}."
    )
    what = (
        f"{job.model}: {format_count(job.shape.num_params())} parameters, "
        f"{format_bytes(scenario.gradient_bytes)} of gradients, "
        f"{pluralize(scenario.sequences, 'sequence')} of {scenario.sequence_tokens} tokens {share}; simulated"
    )
    print_text(screen, verdict, style="bold")
    print_text(screen, what, style="dim")
    screen.print()
    print_table(screen, SCALING_COLUMNS, scaling_rows(points), droppable=("saves", "fails", "wait", "exposed"))
    print_text(screen, LEGEND, style="dim")
    screen.print()
    print_text(screen, "for comparison, a rule of thumb (80-90 % at 8 ranks, 60-70 % at 64):", style="dim")
    for line in rule:
        print_text(screen, line, indent=2, style="dim")
    screen.print()
    print_text(screen, "assumed, not measured:", style="dim")
    for line in assumptions:
        print_text(screen, line, indent=2, style="dim")
    for path in pictures:
        screen.print(path, soft_wrap=True)
