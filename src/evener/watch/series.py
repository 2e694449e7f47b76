"""How does a curve of any length fit into a fixed number of points, no peak of it lost?

Steps fall into buckets of equal width, of each of which the least, the mean and the greatest value are kept. When a
step lies beyond the last one, neighbours become one and the width doubles: so much memory and no more, however long a
run goes on, and a curve that is drawn in so much time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from evener.report.chart import FURTHEST

POINTS = 512  # of one curve: more cannot be told apart


class KeptSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A Series as a file holds it."""

    width: int
    counts: list[int]
    sums: list[float]
    lows: list[float]
    highs: list[float]


@dataclass(frozen=True)
class Points:
    """What is drawn of a curve, by ascending step."""

    steps: Sequence[int]  # the last one of each bucket, from 0; of the newest the last that there is
    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)


class Series:
    """A value of each step, as far as it was measured.

    >>> series = Series(size=4)
    >>> series.add(np.arange(6), np.array([5.0, 1.0, 2.0, 9.0, np.nan, 3.0]))
    >>> points = series.points()
    >>> points.steps, points.means, points.lows, points.highs
    ([1, 3, 5], [3.0, 5.5, 3.0], [1.0, 2.0, 3.0], [5.0, 9.0, 3.0])
    """

    def __init__(self, size: int = POINTS) -> None:
        """`size`: the most buckets, an even number."""
        self.width = 1  # steps of a bucket
        self._newest = -1
        self._counts = np.zeros(size, dtype=np.int64)
        self._sums = np.zeros(size)
        self._lows, self._highs = np.full(size, np.inf), np.full(size, -np.inf)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """More steps, (n,) int64, and their values, (n,); NaN was not measured, and what is infinite, or as good as
        that, cannot be drawn.
        """
        measured = np.abs(values) <= FURTHEST
        steps, values = steps[measured], values[measured]
        if not len(steps):
            return
        self._newest = max(self._newest, int(steps.max()))
        while self._newest >= len(self._counts) * self.width:
            self._halve()
        places = steps // self.width
        np.add.at(self._counts, places, 1)
        np.add.at(self._sums, places, values)
        np.minimum.at(self._lows, places, values)
        np.maximum.at(self._highs, places, values)

    def forget_from(self, step: int) -> None:
        """This step and all later ones are taken again: so are those that cannot be told from it any more."""
        first = step // self.width
        self._counts[first:], self._sums[first:] = 0, 0.0
        self._lows[first:], self._highs[first:] = np.inf, -np.inf
        self._newest = min(self._newest, first * self.width - 1)

    def points(self) -> Points:
        """Of the buckets that hold anything."""
        found = np.flatnonzero(self._counts)
        steps = np.minimum((found + 1) * self.width - 1, self._newest)
        means = self._sums[found] / self._counts[found]
        return Points(steps.tolist(), means.tolist(), self._lows[found].tolist(), self._highs[found].tolist())

    @property
    def mean(self) -> float | None:
        """Over all steps."""
        num = int(self._counts.sum())
        return float(self._sums.sum()) / num if num else None

    @property
    def sums(self) -> list[float]:
        """Of the values of each bucket that holds any."""
        found: list[float] = self._sums[self._counts > 0].tolist()
        return found

    def keep(self) -> KeptSeries:
        """As a file holds it."""
        return KeptSeries(
            width=self.width,
            counts=[self._newest, *self._counts.tolist()],
            sums=self._sums.tolist(),
            lows=self._lows.tolist(),
            highs=self._highs.tolist(),
        )

    @classmethod
    def kept(cls, one: KeptSeries) -> Series:
        """As it was; ValueError where that is none."""
        newest, *counts = one.counts
        sizes = {len(counts), len(one.sums), len(one.lows), len(one.highs)}
        if len(sizes) != 1 or not counts or len(counts) % 2 or one.width < 1 or newest >= one.width * len(counts):
            raise ValueError("no series")
        series = cls(len(counts))
        series.width, series._newest = one.width, newest
        series._counts, series._sums = np.array(counts, dtype=np.int64), np.array(one.sums)
        series._lows, series._highs = np.array(one.lows), np.array(one.highs)
        return series

    def _halve(self) -> None:
        """Two neighbours become one."""
        half = len(self._counts) // 2
        for values, both, none in ((self._counts, np.add, 0), (self._sums, np.add, 0.0),
                                   (self._lows, np.minimum, np.inf), (self._highs, np.maximum, -np.inf)):  # fmt: skip
            values[:half], values[half:] = both(values[::2], values[1::2]), none
        self.width *= 2
