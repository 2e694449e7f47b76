"""A smoothed curve matches numpy's weighted linear fit at each point."""

import random

import numpy as np
import pytest

from evener.report.draw.smoothing import FIRST_SPAN, MIN_SPAN, SPAN_GROWTH, kernel_average, local_linear_fit


def fitted(values: list[float], n: int, span: float) -> float:
    """At n, of the line that fits best where a point so far away counts exp(-away / span)."""
    places = np.arange(len(values))
    weights = np.exp(-np.abs(places - n) / span)
    return float(np.polyval(np.polyfit(places, values, 1, w=np.sqrt(weights)), n))


def test_smoothing_matches_numpy_weighted_fit():
    rng = random.Random(3)
    values = [rng.random() for _ in range(20)]
    spans = [min(MIN_SPAN, FIRST_SPAN + SPAN_GROWTH * n) for n in range(20)]
    fits = [min(max(fitted(values, n, span), min(values)), max(values)) for n, span in enumerate(spans)]
    assert local_linear_fit(values) == pytest.approx(fits)


def test_smoothing_stays_within_value_range():
    """A line through a slow first step would go on below all others, to rates that are negative."""
    values = [10.0, *5 * [0.1]]
    assert min(local_linear_fit(values)) == pytest.approx(0.1)
    assert min(kernel_average(values)) > 0.1


def test_kernel_average_matches_weighted_mean_definition():
    """Σ w_i x_i / Σ w_i with w_i = exp(-|n - i| / span), written out."""
    rng = random.Random(3)
    values, span = [rng.random() for _ in range(20)], 4.0
    for n, found in enumerate(kernel_average(values, span)):
        weights = np.exp(-np.abs(np.arange(len(values)) - n) / span)
        assert found == pytest.approx(float(np.average(values, weights=weights)))


@pytest.mark.parametrize("values", [[], [1.5], [1.5, 2.5]])
def test_smoothing_leaves_few_points_unchanged(values):
    assert local_linear_fit(values) == pytest.approx(values)
