"""When did it happen, on the device that does the work?

On a GPU the host runs ahead, so a host clock would time the queueing. There a mark is an event on the current stream,
and a duration is read when both its events have passed.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Protocol

import torch

from evener.core.spans import part_of


class Clock(Protocol):
    """Marks in the course of the work, and the seconds between two of them."""

    def mark(self) -> Any:
        """Now, in the course of the work."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one mark to another; waits until the work has reached the second."""

    def at(self, mark: Any) -> float:
        """When that was, by `time.perf_counter`."""

    def anchor(self) -> None:
        """Look where the work is now, so that `at` can tell of marks near it; waits for all that is queued."""


class HostClock:
    """The work is done when the call returns: CPU tensors."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def at(self, mark: float) -> float:
        return mark

    def anchor(self) -> None:
        pass


class CudaClock:
    """The work is queued on a stream: CUDA tensors."""

    def __init__(self) -> None:
        self.anchor()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def at(self, mark: torch.cuda.Event) -> float:
        return self._anchored + self.seconds(self._anchor, mark)

    def anchor(self) -> None:
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchored = time.perf_counter()


class Laps:
    """A stretch of work cut into laps, each charged to one part: they cover it without a gap.

    >>> laps = Laps(HostClock()); laps.lap("data_s"); laps.lap("compute_s"); laps.lap("data_s")
    >>> sorted(laps.parts_s())
    ['compute_s', 'data_s']
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.marks = [("", clock.mark())]

    def lap(self, part: str) -> None:
        """Charge the time since the last mark to a part."""
        self.marks.append((part, self._clock.mark()))

    def parts_s(self) -> dict[str, float]:
        """Seconds of every part that had a lap; waits until the last lap has passed."""
        parts: dict[str, float] = {}
        for (_, begin), (part, end) in pairwise(self.marks):
            part = part_of(part)
            parts[part] = parts.get(part, 0.0) + self._clock.seconds(begin, end)
        return parts
