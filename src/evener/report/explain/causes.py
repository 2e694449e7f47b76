"""Causes: what makes a step longer or shorter than expected, and which of them an explanation names.

Two explanations divide a difference between two step times into causes: measured against predicted
(`prediction_error`), and many ranks against few (`scaling_breakdown`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIN_NAMED_SHARE = 0.05  # of a step: smaller costs get no sentence
MAX_NAMED_CAUSES = 4  # in one explanation


@dataclass(frozen=True)
class Cause:
    """One cause of the difference between two step times."""

    cost_s: float  # > 0: it makes the step longer
    reason: str  # a clause with the figures that are the evidence, and the rank if it is one rank's
    advice: str = ""  # a sentence on what helps


def largest_causes(causes: Iterable[Cause], step_s: float) -> list[Cause]:
    """Return the causes that are worth a sentence in the explanation of a step of `step_s`, the largest first."""
    named = [cause for cause in causes if abs(cause.cost_s) >= MIN_NAMED_SHARE * step_s]
    return sorted(named, key=lambda cause: -abs(cause.cost_s))[:MAX_NAMED_CAUSES]


def unexplained_s(difference_s: float, causes: Iterable[Cause], step_s: float) -> float:
    """Return the seconds of a difference that the causes do not explain; 0 if that is not worth a sentence."""
    rest_s = difference_s - sum(cause.cost_s for cause in causes)
    return rest_s if abs(rest_s) >= MIN_NAMED_SHARE * step_s else 0.0
