"""Goodput: the best checkpoint interval, and the fraction of time that remains useful with failures.

τ  work between two checkpoints, s    δ  a checkpoint, s    R  a restart, s    M  mean time between failures, s
"""

from __future__ import annotations

import math


def checkpoint_interval_s(checkpoint_s: float, mtbf_s: float, min_interval_s: float = 0.0) -> float:
    """Return the seconds of work between two checkpoints that lose least time.   [Daly 2006]

    With δ = `checkpoint_s` and M = `mtbf_s`: √(2δM)·(1 + ⅓·√(δ/2M) + ⅑·δ/2M) - δ, or M if δ ≥ 2M; at least
    `min_interval_s`, such as one step. The first factor is Young's interval of 1974.

    >>> [round(checkpoint_interval_s(300, hours * 3600) / 60, 1) for hours in (24, 6, 0.25)]  # Daly's 117, 57, 9.1 min
    [116.7, 56.7, 9.1]
    """
    if checkpoint_s >= 2 * mtbf_s:
        return max(min_interval_s, mtbf_s)
    ratio = checkpoint_s / (2 * mtbf_s)
    return max(
        min_interval_s, math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
    )


def useful_time_fraction(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the fraction of time that is useful work with random failures: τ / (M · e^{R/M} · (e^{(τ+δ)/M} - 1)).

    τ = `interval_s`, δ = `checkpoint_s`, R = `restart_s`, M = `mtbf_s`.   [Daly 2006]

    >>> round(useful_time_fraction(7000, 300, 600, 86400), 4)
    0.9126
    """
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:  # more than a float holds: nothing is ever finished
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))
