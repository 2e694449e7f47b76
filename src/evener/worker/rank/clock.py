"""Time asynchronous work on the device that runs it.

On a GPU the host runs ahead, so a host clock would time the queueing. There a mark is an event on the current stream,
and a duration is read when both its events have completed.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Protocol

import torch

from evener.core.run.step_spans import phase_of


class Clock(Protocol):
    """Places marks in the stream of work and measures the seconds between two of them."""

    def mark(self) -> Any:
        """Mark the current point in the stream of work."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Return the seconds from one mark to another; waits until the work has reached the second."""

    def host_time_s(self, mark: Any) -> float:
        """Return the time of a mark on the clock of `time.perf_counter`."""

    def anchor(self) -> None:
        """Align the device's clock with the host's, for `host_time_s` of later marks; waits for all queued work."""


class HostClock:
    """Clock for CPU tensors: work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def host_time_s(self, mark: float) -> float:
        return mark

    def anchor(self) -> None:
        pass


class CudaClock:
    """Clock for CUDA tensors: work is queued on a stream."""

    def __init__(self) -> None:
        self.anchor()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def host_time_s(self, mark: torch.cuda.Event) -> float:
        return self._anchor_host_s + self.elapsed_s(self._anchor, mark)

    def anchor(self) -> None:
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_host_s = time.perf_counter()


class LapTimer:
    """Divides a stretch of work into laps without gaps, each charged to one phase.

    >>> laps = LapTimer(HostClock()); laps.lap("data_s"); laps.lap("compute_s"); laps.lap("data_s")
    >>> sorted(laps.phase_times_s())
    ['compute_s', 'data_s']
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.marks = [("", clock.mark())]

    def lap(self, phase: str) -> None:
        """Charge the time since the last mark to a phase."""
        self.marks.append((phase, self._clock.mark()))

    def total_s(self) -> float:
        """Return the seconds from the first mark to the last; waits until the last lap is over."""
        return self._clock.elapsed_s(self.marks[0][1], self.marks[-1][1])

    def phase_times_s(self) -> dict[str, float]:
        """Return the seconds of every phase that had a lap; waits until the last lap is over."""
        parts: dict[str, float] = {}
        for (_, begin), (part, end) in pairwise(self.marks):
            part = phase_of(part)
            parts[part] = parts.get(part, 0.0) + self._clock.elapsed_s(begin, end)
        return parts
