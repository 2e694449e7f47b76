"""Smooth noisy curves without bias at the ends: local linear regression, and kernel averages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_POINTS = 512  # points: each pair has a weight
SPAN_SHARE, MIN_SPAN = 0.02, 2.0  # share of a curve; points
MIN_FILTERED = 10  # values: in fewer a peak is no spike
FIRST_SPAN, SPAN_GROWTH = 0.5, 0.2  # points; growth per preceding point


def local_linear_fit(values: Sequence[float]) -> list[float]:
    """Smooth by local linear regression: fit a line at each point, with weights that fall to 1/e within one span.

    A mean would be biased at the ends of a slope, where it has neighbours on one side only. A loss falls fastest in its
    first steps, so the span is shorter there.
    [local linear regression: Hastie, Tibshirani, Friedman, The Elements of Statistical Learning, section 6.1.1]

    >>> [round(value, 9) for value in local_linear_fit([4.0, 3.0, 2.0, 1.0])]
    [4.0, 3.0, 2.0, 1.0]
    """
    before, y = np.arange(len(values), dtype=np.float64), np.asarray(values, dtype=np.float64)
    spans = np.minimum(max(MIN_SPAN, SPAN_SHARE * len(values)), FIRST_SPAN + SPAN_GROWTH * before)
    distance, weights = _kernel_weights(len(values), spans)
    s0, s1, s2 = weights.sum(1), (weights * distance).sum(1), (weights * distance**2).sum(1)
    t0, t1, denominator = weights @ y, (weights * distance) @ y, s0 * s2 - s1 * s1
    with np.errstate(divide="ignore", invalid="ignore"):
        fitted = np.where(denominator > 0, (s2 * t0 - s1 * t1) / denominator, t0 / s0)
    return [float(value) for value in np.clip(fitted, y.min(initial=np.inf), y.max(initial=-np.inf))]


def without_spikes(values: Sequence[float]) -> list[float]:
    """Return the running median of five values, which a spike of one or two steps does not move; the ends stay.

    Of fewer than MIN_FILTERED values all stay.

    >>> without_spikes([9.0, 5.0, 4.0, 80.0, 3.0, 2.0, 2.0, 2.0, 2.0, 1.0])
    [9.0, 7.0, 5.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 1.0]
    """
    if len(values) < MIN_FILTERED:
        return list(values)
    middle = [float(np.median(values[max(0, i - 2) : i + 3])) for i in range(1, len(values) - 1)]
    return [*values[:1], *middle, *values[-1:]]


def kernel_average(values: Sequence[float], span: float | None = None) -> list[float]:
    """Smooth by the weighted mean of all points: for values with outliers and little slope.

    >>> (kernel_average([2.0, 2.0, 2.0], 5.0),
    ...  [round(value, 3) for value in kernel_average([0.0, 1.0], 1 / 0.6931471805599453)])
    ([2.0, 2.0, 2.0], [0.333, 0.667])
    """
    span = max(MIN_SPAN, SPAN_SHARE * len(values)) if span is None else span
    weights = _kernel_weights(len(values), np.full(len(values), span))[1]
    return [float(value) for value in weights @ np.asarray(values, dtype=np.float64) / weights.sum(1)]


def _kernel_weights(num: int, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (distance of each column from its row, kernel weight), each of shape (n, n)."""
    assert num <= MAX_POINTS
    indices = np.arange(num, dtype=np.float64)
    distance = indices[None, :] - indices[:, None]
    return distance, np.exp(-np.abs(distance) / spans[:, None])
