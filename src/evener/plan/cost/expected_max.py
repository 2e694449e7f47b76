"""Expected maximum: the time of the slowest of many ranks whose times vary from step to step.

A step is as long as that of its slowest rank, so jitter costs more with more ranks. Expectations are integrals, not
samples: the same ranks give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

INTERVALS = 512  # of a trapezoid rule over a function that fades at both ends: the error falls exponentially


class MaxDistribution:
    """Distribution of the maximum of independent times; `log_cdf(x)` is the log of the probability that none exceeds x.

    Pass as `atoms` all possible values if the times are discrete; leave it empty if they have a density.
    """

    def __init__(self, log_cdf: Callable[[float], float], atoms: Sequence[float] = ()) -> None:
        self.log_cdf, self.atoms = log_cdf, sorted(set(atoms))

    def mean(self) -> float:
        """Return E[max] = ∫ (1 - F(x)) dx.

        >>> exponential = MaxDistribution(lambda x: 4 * math.log(-math.expm1(-x)))
        >>> round(exponential.mean(), 6), round(1 + 1 / 2 + 1 / 3 + 1 / 4, 6)
        (2.083333, 2.083333)
        """
        if self.atoms:
            gaps = zip(self.atoms, self.atoms[1:], strict=False)
            return self.atoms[0] + sum((high - low) * -math.expm1(self.log_cdf(low)) for low, high in gaps)
        low, high = math.log(self._log_quantile(-37.0)), math.log(self._log_quantile(-1e-14))
        width = (high - low) / INTERVALS
        inside = (math.exp(low + i * width) for i in range(1, INTERVALS))  # x = eʸ, dx = x·dy
        middle = math.fsum(x * -math.expm1(self.log_cdf(x)) for x in inside)
        return width * (middle + math.exp(low) / -math.expm1(-width))  # below it all x count: a geometric series

    def quantile(self, probability: float) -> float:
        """Return the time that the maximum does not exceed with this probability."""
        if self.atoms:
            return next(x for x in self.atoms if x == self.atoms[-1] or self.log_cdf(x) >= math.log(probability))
        return self._log_quantile(math.log(probability))

    def _log_quantile(self, log_share: float) -> float:
        low, high = -60.0, 60.0
        for _ in range(52):
            middle = (low + high) / 2
            low, high = (low, middle) if self.log_cdf(math.exp(middle)) >= log_share else (middle, high)
        return math.exp(high)


def max_of_lognormals(groups: Sequence[tuple[float, int]], jitter: float, slow_share: float = 0.0,
               slow_factor: float = 1.0) -> MaxDistribution:  # fmt: skip
    """Return the distribution of the slowest rank's time; `groups` are pairs (mean seconds, number of ranks).

    A rank's time is its mean · a lognormal with mean 1 and coefficient of variation `jitter`, multiplied by
    `slow_factor` with probability `slow_share`.
    """
    factors = [(1.0, 1 - slow_share), (slow_factor, slow_share)]
    factors = [(factor, weight) for factor, weight in factors if weight]
    variance = math.log1p(jitter**2)
    scale = math.sqrt(2 * variance)

    def tail(ratio: float) -> float:
        """Return the probability that a rank takes longer than `ratio` times its mean."""
        if not scale:
            return float(ratio < 1)
        return math.erfc((math.log(ratio) + variance / 2) / scale) / 2

    def log_cdf(x: float) -> float:
        total = 0.0
        for mean_s, num in groups:
            beyond = sum(weight * tail(x / (mean_s * factor)) for factor, weight in factors)
            if beyond >= 1:
                return -math.inf
            total += num * math.log1p(-beyond)
        return total

    atoms = [] if scale else [mean_s * factor for mean_s, _ in groups for factor, _ in factors]
    return MaxDistribution(log_cdf, atoms)


@lru_cache(maxsize=4096)
def expected_max_s(groups: tuple[tuple[float, int], ...], jitter: float) -> float:
    """Return the expected seconds of the slowest rank; `groups` are pairs (mean seconds, number of ranks).

    >>> [round(expected_max_s(((1.0, num),), 0.02), 3) for num in (1, 2, 64)]
    [1.0, 1.011, 1.048]
    """
    return max_of_lognormals(groups, jitter).mean()
