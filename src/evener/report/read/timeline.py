"""Build the timeline of the recorded steps of all ranks on one clock, for charts and trace viewers.

Consecutive steps form a segment with one offset per clock, so that slices within it keep their relative positions.
Times are whole ticks: in microseconds, ticks, their sums and 1000 times them are exact in floating point, so that no
viewer sees a slice end after the next one begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from evener.core.base.errors import UsageError
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import BLOCKED, StepRecord
from evener.core.run.step_spans import (
    RECORD_EVERY_STEPS,
    RECORD_LAST_STEPS,
    LayerGroupSpan,
    StepSpans,
    contiguous_ranges,
    phase_of,
)
from evener.report.read.clock_offsets import ClockOffset, RankClocks

TICK_NS = 125  # an eighth of a microsecond


def to_tick_ns(time_s: float) -> int:
    """Round a time to whole ticks, in nanoseconds.

    >>> to_tick_ns(1.3e-6)
    1250
    """
    return round(time_s * 1e9 / TICK_NS) * TICK_NS


@dataclass(frozen=True)
class TimelineSlice:
    """A named interval, in nanoseconds since the timeline begins."""

    name: str
    begin_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class PhaseSlice(TimelineSlice):
    """A slice of a step that counts towards one of PHASES, or BLOCKED if the share of waiting in it is not known.

    Its name is that phase, or "forward" or "backward".
    """

    phase: str


@dataclass(frozen=True)
class CollectiveSlice(TimelineSlice):
    """One rank's slice of a bucket's collective."""

    bucket: int
    occurrence: int  # how many times the bucket was exchanged before in this step
    size_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    rank: int
    spans: StepSpans
    record: StepRecord | None  # None: the step has no record
    begin_ns: int
    end_ns: int
    phase_slices: list[PhaseSlice]
    collective_slices: list[CollectiveSlice]
    layer_group_slices: list[tuple[TimelineSlice, LayerGroupSpan]]
    between_step_slices: list[TimelineSlice]


@dataclass(frozen=True)
class TimelineCollective:
    """One collective on all ranks that recorded it."""

    by_rank: dict[int, CollectiveSlice]

    @property
    def last_rank(self) -> int:
        """The last rank to begin, which the others waited for."""
        return max(self.by_rank, key=lambda rank: self.by_rank[rank].begin_ns)

    @property
    def transfer_s(self) -> float:
        """The shortest duration over ranks: that of the rank that waited for none."""
        return min(sent.duration_s for sent in self.by_rank.values())


@dataclass(frozen=True)
class TimelineSegment:
    """Consecutive steps of the same ranks."""

    steps: dict[int, dict[int, RankStep]]  # by step and rank
    offsets: dict[int, ClockOffset]  # of each rank's clock, relative to the first rank's

    def collectives(self, step: int) -> list[TimelineCollective]:
        """Return the collectives of a step in the order in which they began."""
        by_bucket: dict[tuple[int, int], dict[int, CollectiveSlice]] = {}
        for rank, rank_step in self.steps[step].items():
            for sent in rank_step.collective_slices:
                by_bucket.setdefault((sent.bucket, sent.occurrence), {})[rank] = sent
        return sorted(
            map(TimelineCollective, by_bucket.values()), key=lambda each: min(s.begin_ns for s in each.by_rank.values())
        )


@dataclass(frozen=True)
class Timeline:
    """The recorded steps of a run, or some of them."""

    segments: list[TimelineSegment] = field(default_factory=list)
    begin_unix_s: float = 0.0  # Unix time of its start, by the clock of the first rank's host
    # (first, last) of each range of steps in the files
    recorded_ranges: list[tuple[int, int]] = field(default_factory=list)
    num_steps: int = 0  # taken by the run

    @property
    def shown_ranges(self) -> list[tuple[int, int]]:
        """The ranges of steps in this timeline."""
        return contiguous_ranges(sorted({step for segment in self.segments for step in segment.steps}))

    @property
    def clock_error_s(self) -> dict[int, float | None]:
        """The maximum error of each rank's clock; None: unknown."""
        errors_s: dict[int, float | None] = {}
        for segment in self.segments:
            for rank, offset in segment.offsets.items():
                known_s = errors_s.get(rank, 0.0)
                errors_s[rank] = None if known_s is None or offset.error_s is None else max(known_s, offset.error_s)
        return dict(sorted(errors_s.items()))


def read_timeline(rundir: RunDir, step_range: range | None = None, max_steps: int | None = None,
                  extra_steps: Collection[int] = (), tail_bytes: int | None = None) -> Timeline:  # fmt: skip
    """Read the newest `max_steps` recorded steps in `step_range`, and those of them that are in `extra_steps`.

    By default, read all recorded steps.
    `tail_bytes` limits the bytes that are read of each rank's records, and an eighth of it those of its spans. A step
    whose record is not read is divided less finely. Raise UsageError if no such step was recorded.
    """
    manifest, ranks = rundir.manifest(), rundir.recorded_ranks()
    spans = {rank: _latest_spans(rundir.spans(rank, tail_bytes and tail_bytes // 8)) for rank in ranks}
    records = {rank: {(entry.step, entry.epoch): entry for entry in rundir.records(rank, tail_bytes)} for rank in ranks}
    steps = sorted({entry.step for of_rank in spans.values() for entry in of_rank})
    recorded = contiguous_ranges(steps)
    if not steps:
        raise UsageError(
            f"{rundir}: no spans were recorded",
            hint=f"ranks write them at checkpoints and at the end, for every {RECORD_EVERY_STEPS}th step and "
            f"the last {RECORD_LAST_STEPS}",
        )
    shown = [step for step in steps if step_range is None or step in step_range]
    if step_range is not None and not shown:
        raise UsageError(f"{rundir}: steps {step_range.start}:{step_range.stop} are not recorded",
                         hint=f"recorded are {format_ranges(recorded)}")  # fmt: skip
    newest = shown[-max_steps:] if max_steps else shown
    shown = [step for step in shown if step >= newest[0] or step in extra_steps]
    clocks = RankClocks(spans, {member.rank: member.host for member in manifest.roster.members})
    by_step: dict[int, dict[int, StepSpans]] = {}
    for rank, of_rank in spans.items():
        for entry in of_rank:
            by_step.setdefault(entry.step, {})[rank] = entry
    segments = [_align_clocks(segment, clocks) for segment in _split_segments({step: by_step[step] for step in shown})]
    zero = segments[0].origin
    first_s = min(segment.earliest_s(rank, spans, zero) for segment in segments for of_step in segment.steps.values()
                  for rank, spans in of_step.items())  # fmt: skip
    num_steps = 1 + max([steps[-1], *(step for of_rank in records.values() for step, _ in of_rank)])
    result = [segment.to_segment(records, zero, first_s) for segment in segments]
    return Timeline(result, zero + first_s, recorded, num_steps)


def format_ranges(intervals: Sequence[tuple[int, int]]) -> str:
    """Format ranges of steps.

    >>> format_ranges([(0, 0), (100, 100), (180, 199)])
    '0, 100, 180-199'
    """
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in intervals)


def missing_ranges(recorded: Sequence[tuple[int, int]], num_steps: int) -> list[tuple[int, int]]:
    """Return the ranges of steps between and after the recorded ones.

    >>> missing_ranges([(0, 0), (100, 100)], 103)
    [(1, 99), (101, 102)]
    """
    edges = [-1, *(edge for first, last in recorded for edge in (first, last)), num_steps]
    return [
        (before + 1, after - 1) for before, after in zip(edges[::2], edges[1::2], strict=True) if after - before > 1
    ]


# --- from files to one clock ------------------------------------------------------------------------------------------


def _latest_spans(spans: Sequence[StepSpans]) -> list[StepSpans]:
    """Return the spans by step; of a step that was taken twice, the later ones."""
    return [latest for _, latest in sorted({step_spans.step: step_spans for step_spans in spans}.items())]


def _split_segments(by_step: Mapping[int, dict[int, StepSpans]]) -> Iterator[dict[int, dict[int, StepSpans]]]:
    """Split steps into runs of consecutive steps of the same processes."""
    segment: dict[int, dict[int, StepSpans]] = {}
    for step, of_step in by_step.items():
        processes = {rank: spans.clock for rank, spans in of_step.items()}
        if segment and (
            step - 1 not in segment or processes != {r: spans.clock for r, spans in segment[step - 1].items()}
        ):
            yield segment
            segment = {}
        segment[step] = of_step
    if segment:
        yield segment


@dataclass(frozen=True)
class _AlignedSegment:
    """A segment whose clocks are aligned."""

    steps: dict[int, dict[int, StepSpans]]
    offsets: dict[int, ClockOffset]
    origin: float  # of the first rank's clock

    def step_begin_s(self, rank: int, spans: StepSpans, zero: float) -> float:
        """Return when a rank's step began, in seconds since the Unix time `zero`."""
        return (self.origin - zero) + (spans.begun_s + self.offsets[rank].add_s)

    def earliest_s(self, rank: int, spans: StepSpans, zero: float) -> float:
        """Return when the step's earliest span began, since `zero`: a collective may have begun before the step."""
        return self.step_begin_s(rank, spans, zero) + min([0.0, *(exchange.begin_s for exchange in spans.exchanges)])

    def to_segment(self, records: Mapping[int, Mapping[tuple[int, int], StepRecord]], zero: float,
              first_s: float) -> TimelineSegment:  # fmt: skip
        return TimelineSegment(
            {step: {rank: self._rank_step(rank, spans, records[rank].get((step, spans.epoch)), zero, first_s)
                    for rank, spans in sorted(of_step.items())} for step, of_step in self.steps.items()},
            self.offsets,
        )  # fmt: skip

    def _rank_step(self, rank: int, spans: StepSpans, record: StepRecord | None, zero: float,
                   first_s: float) -> RankStep:  # fmt: skip
        begun_s = self.step_begin_s(rank, spans, zero)

        def ns(begin_s: float, end_s: float) -> tuple[int, int]:
            begin_ns = to_tick_ns(begun_s + begin_s - first_s)
            return begin_ns, max(begin_ns, to_tick_ns(begun_s + end_s - first_s))

        waiting = _wait_fraction(record, spans)
        parts = [part for lap in spans.laps for part in _phase_slices(lap.phase, *ns(lap.begin_s, lap.end_s), waiting)]
        begin_ns, end_ns = ns(0.0, spans.laps[-1].end_s if spans.laps else 0.0)
        return RankStep(
            rank=rank,
            spans=spans,
            record=record,
            begin_ns=begin_ns,
            end_ns=end_ns,
            phase_slices=parts,
            collective_slices=[
                CollectiveSlice(
                    f"bucket {each.bucket}",
                    *ns(each.begin_s, each.end_s),
                    each.bucket,
                    turn,
                    each.size_bytes,
                    each.sent_bytes,
                )
                for each, turn in spans.numbered_exchanges()
            ],
            layer_group_slices=[
                (
                    TimelineSlice(
                        f"{each.group} {'backward' if each.is_backward else 'forward'}", *ns(each.begin_s, each.end_s)
                    ),
                    each,
                )
                for each in spans.passes
            ],
            between_step_slices=[TimelineSlice(each.activity, *ns(each.begin_s, each.end_s)) for each in spans.asides],
        )


def _align_clocks(steps: dict[int, dict[int, StepSpans]], clocks: RankClocks) -> _AlignedSegment:
    first_step, last_step = steps[min(steps)], steps[max(steps)]
    rank = min(first_step)
    first = clocks.clock_of(rank, first_step[rank])
    end = last_step[rank]
    span = first_step[rank].begun_s, end.begun_s + max((lap.end_s for lap in end.laps), default=0.0)
    offsets = {other: clocks.offset(first, clocks.clock_of(other, one), *span) for other, one in first_step.items()}
    return _AlignedSegment(steps, offsets, clocks.origin_unix_s(first))


def _wait_fraction(record: StepRecord | None, spans: StepSpans) -> float | None:
    """Return the share of a rank's blocked time in which it waited for others; None if unknown."""
    parts = spans.phase_times_s()
    blocked = parts.get(BLOCKED, 0.0)
    if record is None or record.cost.wait_s is None or not blocked:
        return None
    return min(1.0, max(0.0, record.cost.wait_s - parts.get("wait_s", 0.0)) / blocked)


def _phase_slices(lap: str, begin: int, end: int, wait_fraction: float | None) -> list[PhaseSlice]:
    """Return the phase slices of a lap; split a blocked one into waiting and exposed communication by its record."""
    if lap != BLOCKED or wait_fraction is None:
        return [PhaseSlice({"compute_s": "backward"}.get(lap, lap), begin, end, phase_of(lap))]
    arrived = begin + to_tick_ns((end - begin) / 1e9 * wait_fraction)
    slices = [
        PhaseSlice("wait_s", begin, arrived, "wait_s"),
        PhaseSlice("exposed_sync_s", arrived, end, "exposed_sync_s"),
    ]
    return [part for part in slices if part.end_ns > part.begin_ns]
