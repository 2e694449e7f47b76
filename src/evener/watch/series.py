"""Downsample a curve of any length to a fixed number of points without losing a peak.

Steps fall into buckets of equal width; each keeps the minimum, mean and maximum of its values. When a step lies beyond
the last bucket, neighbouring buckets merge and the width doubles, so memory and rendering time are bounded, however
long a run is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from evener.report.chart import FURTHEST

POINTS = 512  # buckets of one curve: more cannot be distinguished on a screen


class KeptSeries(msgspec.Struct, frozen=True, kw_only=True):
    """`DownsampledSeries` as stored in a file."""

    width: int
    counts: list[int]
    sums: list[float]
    lows: list[float]
    highs: list[float]


@dataclass(frozen=True)
class Points:
    """The points of a curve, by ascending step."""

    steps: Sequence[int]  # the last step of each bucket, from 0; of the newest bucket, the last step so far
    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)


class Series:
    """The values of one metric by step, downsampled; steps without a value are skipped.

    >>> series = Series(size=4)
    >>> series.add(np.arange(6), np.array([5.0, 1.0, 2.0, 9.0, np.nan, 3.0]))
    >>> points = series.points()
    >>> points.steps, points.means, points.lows, points.highs
    ([1, 3, 5], [3.0, 5.5, 3.0], [1.0, 2.0, 3.0], [5.0, 9.0, 3.0])
    """

    def __init__(self, size: int = POINTS) -> None:
        """`max_buckets`: an even number."""
        self.width = 1  # steps per bucket
        self._newest = -1
        self._counts = np.zeros(size, dtype=np.int64)
        self._sums = np.zeros(size)
        self._lows, self._highs = np.full(size, np.inf), np.full(size, -np.inf)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add steps, (n,) int64, and their values, (n,). Skip values that are NaN (not measured), or too large to draw
        or infinite.
        """
        measured = np.abs(values) <= FURTHEST
        steps, values = steps[measured], values[measured]
        if not len(steps):
            return
        self._newest = max(self._newest, int(steps.max()))
        while self._newest >= len(self._counts) * self.width:
            self._halve()
        buckets = steps // self.width
        np.add.at(self._counts, buckets, 1)
        np.add.at(self._sums, buckets, values)
        np.minimum.at(self._lows, buckets, values)
        np.maximum.at(self._highs, buckets, values)

    def forget_from(self, step: int) -> None:
        """Drop this step and all later ones, which will be repeated, and earlier ones in the same bucket."""
        first = step // self.width
        self._counts[first:], self._sums[first:] = 0, 0.0
        self._lows[first:], self._highs[first:] = np.inf, -np.inf
        self._newest = min(self._newest, first * self.width - 1)

    def points(self) -> Points:
        """Return the points of all buckets that hold a value."""
        buckets = np.flatnonzero(self._counts)
        steps = np.minimum((buckets + 1) * self.width - 1, self._newest)
        means = self._sums[buckets] / self._counts[buckets]
        return Points(steps.tolist(), means.tolist(), self._lows[buckets].tolist(), self._highs[buckets].tolist())

    @property
    def mean(self) -> float | None:
        """Return the mean over all steps; None without values."""
        num = int(self._counts.sum())
        return float(self._sums.sum()) / num if num else None

    @property
    def sums(self) -> list[float]:
        """Return the sum of the values of each bucket that holds any."""
        sums: list[float] = self._sums[self._counts > 0].tolist()
        return sums

    def keep(self) -> KeptSeries:
        """Return the series as stored in a file."""
        return KeptSeries(
            width=self.width,
            counts=[self._newest, *self._counts.tolist()],
            sums=self._sums.tolist(),
            lows=self._lows.tolist(),
            highs=self._highs.tolist(),
        )

    @classmethod
    def kept(cls, one: KeptSeries) -> Series:
        """Restore a stored series; raise ValueError if it is inconsistent."""
        newest, *counts = one.counts
        sizes = {len(counts), len(one.sums), len(one.lows), len(one.highs)}
        if len(sizes) != 1 or not counts or len(counts) % 2 or one.width < 1 or newest >= one.width * len(counts):
            raise ValueError("inconsistent stored series")
        series = cls(len(counts))
        series.width, series._newest = one.width, newest
        series._counts, series._sums = np.array(counts, dtype=np.int64), np.array(one.sums)
        series._lows, series._highs = np.array(one.lows), np.array(one.highs)
        return series

    def _halve(self) -> None:
        """Merge each two neighbouring buckets and double the width."""
        half = len(self._counts) // 2
        for values, both, none in ((self._counts, np.add, 0), (self._sums, np.add, 0.0),
                                   (self._lows, np.minimum, np.inf), (self._highs, np.maximum, -np.inf)):  # fmt: skip
            values[:half], values[half:] = both(values[::2], values[1::2]), none
        self.width *= 2
