"""Downsample a curve of any length to a fixed number of points without losing a peak.

Steps fall into buckets of equal width; each keeps the minimum, mean and maximum of its values. When a step lies beyond
the last bucket, neighbouring buckets merge and the width doubles, so memory and rendering time are bounded, however
long a run is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

MAX_BUCKETS = 512  # buckets of one curve: more cannot be distinguished on a screen
MAX_PLOTTABLE = 1e300  # magnitude of a value: sums and differences of such numbers are still finite


class StoredSeries(msgspec.Struct, frozen=True, kw_only=True):
    """`DownsampledSeries` as stored in a file."""

    width: int
    counts: list[int]
    sums: list[float]
    lows: list[float]
    highs: list[float]


@dataclass(frozen=True)
class CurvePoints:
    """The points of a curve, by ascending step."""

    steps: Sequence[int]  # the last step of each bucket, from 0; of the newest bucket, the last step so far
    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)


class Window(NamedTuple):
    """Consecutive steps of a series."""

    first_step: int
    num_values: int
    mean: float


class DownsampledSeries:
    """The values of one metric by step, downsampled; steps without a value are skipped.

    >>> series = DownsampledSeries(max_buckets=4)
    >>> series.add(np.arange(6), np.array([5.0, 1.0, 2.0, 9.0, np.nan, 3.0]))
    >>> points = series.points()
    >>> points.steps, points.means, points.lows, points.highs
    ([1, 3, 5], [3.0, 5.5, 3.0], [1.0, 2.0, 3.0], [5.0, 9.0, 3.0])
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        """`max_buckets`: an even number."""
        self.bucket_steps = 1  # steps per bucket
        self._last_step = -1
        self._counts = np.zeros(max_buckets, dtype=np.int64)
        self._sums = np.zeros(max_buckets)
        self._lows, self._highs = np.full(max_buckets, np.inf), np.full(max_buckets, -np.inf)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add steps, (n,) int64, and their values, (n,). Skip values that are NaN (not measured), infinite,
        or too large to draw.
        """
        measured = np.abs(values) <= MAX_PLOTTABLE
        steps, values = steps[measured], values[measured]
        if not len(steps):
            return
        self._last_step = max(self._last_step, int(steps.max()))
        while self._last_step >= len(self._counts) * self.bucket_steps:
            self._merge_buckets()
        buckets = steps // self.bucket_steps
        np.add.at(self._counts, buckets, 1)
        np.add.at(self._sums, buckets, values)
        np.minimum.at(self._lows, buckets, values)
        np.maximum.at(self._highs, buckets, values)

    def truncate_from(self, step: int) -> None:
        """Drop this step and all later ones, which will be repeated, and earlier ones in the same bucket."""
        first = step // self.bucket_steps
        self._counts[first:], self._sums[first:] = 0, 0.0
        self._lows[first:], self._highs[first:] = np.inf, -np.inf
        self._last_step = min(self._last_step, first * self.bucket_steps - 1)

    def points(self) -> CurvePoints:
        """Return the points of all buckets that hold a value."""
        buckets = np.flatnonzero(self._counts)
        steps = np.minimum((buckets + 1) * self.bucket_steps - 1, self._last_step)
        means = self._sums[buckets] / self._counts[buckets]
        return CurvePoints(steps.tolist(), means.tolist(), self._lows[buckets].tolist(), self._highs[buckets].tolist())

    def mean(self, first_step: int = 0, end_step: int | None = None) -> float | None:
        """Return the mean over the buckets that lie within these steps, by default over all; None without values."""
        end = None if end_step is None else end_step // self.bucket_steps
        within = slice(-(-first_step // self.bucket_steps), end)
        num = int(self._counts[within].sum())
        return float(self._sums[within].sum()) / num if num else None

    def windows(self, num_steps: int, first_step: int, *, without_largest: bool) -> list[Window]:
        """Return consecutive windows of at least `num_steps` values, from `first_step` on.

        `without_largest` leaves the largest value out of each mean, so that one interruption does not change it.

        >>> series = DownsampledSeries()
        >>> series.add(np.arange(5), np.array([1.0, 1.0, 7.0, 2.0, 2.0]))
        >>> series.windows(3, 0, without_largest=True)
        [Window(first_step=0, num_values=3, mean=1.0)]
        """
        starts = np.arange(-(-first_step // self.bucket_steps), len(self._counts), -(-num_steps // self.bucket_steps))
        if not len(starts):
            return []
        counts, sums = np.add.reduceat(self._counts, starts), np.add.reduceat(self._sums, starts)
        largest, trimmed = np.maximum.reduceat(self._highs, starts), (counts > 1) & without_largest
        means = (sums - np.where(trimmed, largest, 0.0)) / np.maximum(counts - trimmed, 1)
        windows = map(Window, (starts * self.bucket_steps).tolist(), counts.tolist(), means.tolist())
        return [window for window in windows if window.num_values >= num_steps]

    @property
    def bucket_sums(self) -> list[float]:
        """Return the sum of the values of each bucket that holds any."""
        sums: list[float] = self._sums[self._counts > 0].tolist()
        return sums

    def to_stored(self) -> StoredSeries:
        """Return the series as stored in a file."""
        return StoredSeries(
            width=self.bucket_steps,
            counts=[self._last_step, *self._counts.tolist()],
            sums=self._sums.tolist(),
            lows=self._lows.tolist(),
            highs=self._highs.tolist(),
        )

    @classmethod
    def from_stored(cls, stored: StoredSeries) -> DownsampledSeries:
        """Restore a stored series; raise ValueError if it is inconsistent."""
        newest, *counts = stored.counts
        sizes = {len(counts), len(stored.sums), len(stored.lows), len(stored.highs)}
        if len(sizes) != 1 or not counts or len(counts) % 2 or stored.width < 1 or newest >= stored.width * len(counts):
            raise ValueError("inconsistent stored series")
        series = cls(len(counts))
        series.bucket_steps, series._last_step = stored.width, newest
        series._counts, series._sums = np.array(counts, dtype=np.int64), np.array(stored.sums)
        series._lows, series._highs = np.array(stored.lows), np.array(stored.highs)
        return series

    def _merge_buckets(self) -> None:
        """Merge each two neighbouring buckets and double the width."""
        half = len(self._counts) // 2
        for values, both, none in ((self._counts, np.add, 0), (self._sums, np.add, 0.0),
                                   (self._lows, np.minimum, np.inf), (self._highs, np.maximum, -np.inf)):  # fmt: skip
            values[:half], values[half:] = both(values[::2], values[1::2]), none
        self.bucket_steps *= 2
