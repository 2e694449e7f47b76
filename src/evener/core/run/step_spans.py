"""Step spans: the timeline of a step on one rank, a line of `spans/rank-R.jsonl` (the last steps and every hundredth).

A step's phase spans follow each other without a gap and sum to the phases of its StepRecord. The collectives of buckets
overlap them, and the passes through layer groups lie within them. Times are seconds since the step began, by the clock
of the rank; `report/read/clock_offsets.py` aligns the clocks of hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]

RECORD_EVERY_STEPS = 100  # steps from one that is recorded, with its layer groups, to the next
RECORD_LAST_STEPS = 20  # last steps that are recorded in addition
CLOCK_SYNC_MARK = "evener: clock"
FORWARD = "forward"  # a compute_s span up to the beginning of a backward; other compute_s spans end with a backward


class PhaseSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span of the step that counts for one phase; "blocked" is exposed_sync_s and wait_s together."""

    phase: str
    begin_s: Seconds
    end_s: Seconds


class BucketCommEvent(NamedTuple):
    """The exchange of one bucket or fragment: the Clock's marks around it, and its size."""

    bucket: int
    begin: Any
    end: Any
    size_bytes: int  # of the summed tensor
    sent_bytes: int  # by this rank


class BucketSpan(msgspec.Struct, frozen=True, array_like=True):
    """The collective of one gradient bucket or DiLoCo fragment; a fragment's may have begun in an earlier step."""

    bucket: int
    begin_s: Seconds
    end_s: Seconds
    size_bytes: int  # of the numbers that are summed
    sent_bytes: int  # by this rank


class LayerGroupSpan(msgspec.Struct, frozen=True, array_like=True):
    """The forward or backward (`is_backward`) of one group of layers in one micro-batch."""

    group: str
    is_backward: bool
    begin_s: Seconds
    end_s: Seconds


class BetweenStepsSpan(msgspec.Struct, frozen=True, array_like=True):
    """Work of a rank between this step and the next one."""

    activity: str  # evaluation, checkpoint, comparison
    begin_s: Seconds
    end_s: Seconds


class ProfilerClockSync(msgspec.Struct, frozen=True, kw_only=True):
    """The event in a trace of torch's profiler that aligns its clock with that of the StepSpans."""

    mark: str  # the event's name, which begins with CLOCK_SYNC_MARK
    clock: Seconds  # as in StepSpans
    at_s: Seconds  # the event's time by that clock
    error_s: float
    steps: list[int]  # that were profiled


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one step on one rank."""

    step: int  # counted from 0
    epoch: int  # roster epoch, as in the StepRecord
    clock: Seconds  # Unix time at which this rank's monotonic clock was 0
    begun_s: Seconds  # by that clock
    laps: list[PhaseSpan]
    exchanges: list[BucketSpan] = []
    passes: list[LayerGroupSpan] = []
    asides: list[BetweenStepsSpan] = []
    news: list[tuple[Seconds, Seconds]] = []  # status exchange: (this rank's was sent, all ranks' had been received)

    def numbered_exchanges(self) -> Iterator[tuple[BucketSpan, int]]:
        """Yield each exchange with the number of earlier ones of the same bucket."""
        counts: dict[int, Iterator[int]] = {}
        for exchange in self.exchanges:
            yield exchange, next(counts.setdefault(exchange.bucket, count()))

    def phase_times_s(self) -> dict[str, float]:
        """Return the seconds of each phase, "blocked" as one."""
        times_s: dict[str, float] = {}
        for lap in self.laps:
            phase = phase_of(lap.phase)
            times_s[phase] = times_s.get(phase, 0.0) + lap.end_s - lap.begin_s
        return times_s


def phase_of(span: str) -> str:
    """Return the phase for which a span of this name counts."""
    return "compute_s" if span == FORWARD else span


def contiguous_ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (first, last) of each contiguous range of ascending steps.

    >>> contiguous_ranges([0, 100, 180, 181, 182])
    [(0, 0), (100, 100), (180, 182)]
    """
    pairs: list[tuple[int, int]] = []
    for step in steps:
        if pairs and pairs[-1][1] + 1 == step:
            pairs[-1] = pairs[-1][0], step
        else:
            pairs.append((step, step))
    return pairs
