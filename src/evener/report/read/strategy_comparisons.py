"""What --sync auto measured when it compared sync strategies, and what the next best one would have taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.units import format_seconds, pluralize
from evener.plan.choice.strategy_trial import StrategyComparison


def strategy_comparisons(events: Sequence[Mapping[str, Any]]) -> list[StrategyComparison]:
    """Return the comparisons of a run in order; skip damaged events."""
    found = []
    for event in events:
        if event.get("event") != "compared":
            continue
        try:
            comparison = from_builtins(event, StrategyComparison)
        except msgspec.ValidationError:
            continue
        if comparison.measured and all(0 < one.measured_s < math.inf for one in comparison.measured):
            found.append(comparison)
    return found


def explain_strategy_choice(comparison: StrategyComparison, num_steps: int, step_s: float | None) -> str:
    """Return a paragraph on a comparison, with the time that the next best strategy would have taken for `num_steps`
    steps, and whether that would have been less.

    `step_s`: the median time of a step of the run; None if it was not trained with the chosen strategy.
    """
    sentences = [f"--sync auto chose {comparison.chosen}; {comparison}."]
    if len(comparison.measured) > 1:
        chosen, other = comparison.measured[:2]
        took_s = step_s or chosen.measured_s
        total_s, instead_s = num_steps * took_s, num_steps * other.measured_s
        sentences.append(
            f"At the run's median step time {pluralize(num_steps, 'step')} take {format_seconds(total_s)}; at the time "
            f"that {other.sync} had in the comparison, they would take {format_seconds(instead_s)}."
        )
        if took_s > other.measured_s and chosen.measured_s <= other.measured_s:
            sentences.append(
                f"Steps now take longer than with {other.sync} in the comparison: the hosts or the link became slower, "
                f"or {other.sync} is the better choice. A short run with --sync {other.sync} shows which."
            )
    return " ".join(sentences)
