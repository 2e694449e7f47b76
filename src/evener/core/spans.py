"""When did what happen within a step? A line of `spans/rank-R.jsonl`, of the last steps and of every hundredth.

A step's laps follow each other without a gap and sum to the parts of its StepRecord. Beside them run the exchanges of
buckets, and within them the passes through groups of layers. Times are seconds since the step began, by the clock of
the rank that took it; how the clocks of hosts are joined `report/clocks.py` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]

EVERY = 100  # steps from one that is kept, with its passes, to the next
LAST = 20  # steps that are kept beside those
MARK = "evener: clock"
FORWARD = "forward"  # a lap of compute_s that ends where a backward begins; the others end where one ends


class Lap(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of the step that is charged to one part of it: "blocked" is exposed_sync_s and wait_s together."""

    part: str
    begin_s: Seconds
    end_s: Seconds


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """How a bucket, or what a fragment learned, became its sum over ranks; a fragment's may have begun steps ago."""

    bucket: int
    begin_s: Seconds
    end_s: Seconds
    size_bytes: int  # of the numbers that were summed
    sent_bytes: int  # by this rank


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One group of layers of a micro-batch: forward, or with `is_backward` backward."""

    group: str
    is_backward: bool
    begin_s: Seconds
    end_s: Seconds


class Aside(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did after the step and before the next one."""

    what: str  # evaluation, checkpoint, comparison
    begin_s: Seconds
    end_s: Seconds


class Joint(msgspec.Struct, frozen=True, kw_only=True):
    """In a file of torch's profiler: which of its events is the mark, and when that was."""

    mark: str  # its name, which begins with MARK
    clock: Seconds  # as in StepSpans
    at_s: Seconds  # by that clock
    error_s: float
    steps: list[int]  # that were profiled


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank."""

    step: int  # counted from 0
    epoch: int  # of the Roster, as in its StepRecord
    clock: Seconds  # Unix time at which this rank's clock, which nobody sets, stood at 0
    begun_s: Seconds  # by that clock
    laps: list[Lap]
    exchanges: list[Exchange] = []
    passes: list[Pass] = []
    asides: list[Aside] = []
    news: list[tuple[Seconds, Seconds]] = []  # from when its news went out to when all ranks' were there

    def in_turns(self) -> Iterator[tuple[Exchange, int]]:
        """Each exchange with how many of the same bucket came before."""
        counts: dict[int, Iterator[int]] = {}
        for one in self.exchanges:
            yield one, next(counts.setdefault(one.bucket, count()))

    def parts_s(self) -> dict[str, float]:
        """Seconds of each part, "blocked" as one."""
        parts: dict[str, float] = {}
        for lap in self.laps:
            part = part_of(lap.part)
            parts[part] = parts.get(part, 0.0) + lap.end_s - lap.begin_s
        return parts


def part_of(lap: str) -> str:
    """The part of the step to which a lap is charged."""
    return "compute_s" if lap == FORWARD else lap


def ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending steps as the first and last of each unbroken run.

    >>> ranges([0, 100, 180, 181, 182])
    [(0, 0), (100, 100), (180, 182)]
    """
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and found[-1][1] + 1 == step:
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    return found
