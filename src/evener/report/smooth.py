"""How is a noisy curve told by a line, its beginning and its end as truly as its middle?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST = 512  # points: each is weighed against all
SPAN, LEAST_SPAN = 0.02, 2.0  # of a curve; points
FIRST_SPAN, GROWS = 0.5, 0.2  # points; for each that lies before it


def smoothed(values: Sequence[float]) -> list[float]:
    """At each point a straight line is laid through all, of which those as many points away as the span count 1/e.

    A mean would be off where a slope begins or ends, for it has neighbours on one side alone; and a loss falls in its
    first steps as never again, so that fewer count there.
    [local linear regression: Hastie, Tibshirani, Friedman, The Elements of Statistical Learning, section 6.1.1]

    >>> [round(value, 9) for value in smoothed([4.0, 3.0, 2.0, 1.0])]
    [4.0, 3.0, 2.0, 1.0]
    """
    before, y = np.arange(len(values), dtype=np.float64), np.asarray(values, dtype=np.float64)
    spans = np.minimum(max(LEAST_SPAN, SPAN * len(values)), FIRST_SPAN + GROWS * before)
    away, weights = _weights(len(values), spans)
    s0, s1, s2 = weights.sum(1), (weights * away).sum(1), (weights * away**2).sum(1)
    t0, t1, below = weights @ y, (weights * away) @ y, s0 * s2 - s1 * s1
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(below > 0, (s2 * t0 - s1 * t1) / below, t0 / s0)
    return [float(value) for value in np.clip(found, y.min(initial=np.inf), y.max(initial=-np.inf))]


def averaged(values: Sequence[float], span: float | None = None) -> list[float]:
    """Each the mean of all, weighed in the same way: for what has no slope to speak of, and outliers.

    >>> averaged([2.0, 2.0, 2.0], 5.0), [round(value, 3) for value in averaged([0.0, 1.0], 1 / 0.6931471805599453)]
    ([2.0, 2.0, 2.0], [0.333, 0.667])
    """
    span = max(LEAST_SPAN, SPAN * len(values)) if span is None else span
    weights = _weights(len(values), np.full(len(values), span))[1]
    return [float(value) for value in weights @ np.asarray(values, dtype=np.float64) / weights.sum(1)]


def _weights(num: int, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, n) each: how far each column is from its row, and what it counts there."""
    assert num <= MOST
    places = np.arange(num, dtype=np.float64)
    away = places[None, :] - places[:, None]
    return away, np.exp(-np.abs(away) / spans[:, None])
