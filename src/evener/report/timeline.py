"""Build the timeline of the recorded steps of all ranks on one clock, for charts and trace viewers.

Consecutive steps form a segment with one offset per clock, so that slices within it keep their relative positions.
Times are whole ticks: in microseconds, ticks, their sums and 1000 times them are exact in floating point, so that no
viewer sees a slice end after the next one begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from evener.core.errors import UsageError
from evener.core.rundir import RunDir
from evener.core.spans import EVERY, LAST, Pass, StepSpans, part_of, ranges
from evener.core.step import BLOCKED, StepRecord
from evener.report.clocks import Clocks, Offset

TICK_NS = 125  # an eighth of a microsecond


def in_ticks(time_s: float) -> int:
    """Round a time to whole ticks, in nanoseconds.

    >>> in_ticks(1.3e-6)
    1250
    """
    return round(time_s * 1e9 / TICK_NS) * TICK_NS


@dataclass(frozen=True)
class Slice:
    """A named interval, in nanoseconds since the timeline begins."""

    name: str
    begin_ns: int
    end_ns: int

    @property
    def took_s(self) -> float:
        """The duration in seconds."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Part(Slice):
    """A slice of a step that counts towards one of PHASES, or BLOCKED if the share of waiting in it is not known.

    Its name is that phase, or "forward" or "backward".
    """

    part: str


@dataclass(frozen=True)
class Sent(Slice):
    """One rank's slice of a bucket's collective."""

    bucket: int
    turn: int  # how many times the bucket was exchanged before in this step
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
    parts: list[Part]
    sent: list[Sent]
    passes: list[tuple[Slice, Pass]]
    asides: list[Slice]


@dataclass(frozen=True)
class Collective:
    """One collective on all ranks that recorded it."""

    by_rank: dict[int, Sent]

    @property
    def last(self) -> int:
        """The last rank to begin, which the others waited for."""
        return max(self.by_rank, key=lambda rank: self.by_rank[rank].begin_ns)

    @property
    def transfer_s(self) -> float:
        """The shortest duration over ranks: that of the rank that waited for none."""
        return min(sent.took_s for sent in self.by_rank.values())


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of the same ranks."""

    steps: dict[int, dict[int, RankStep]]  # by step and rank
    offsets: dict[int, Offset]  # of each rank's clock, relative to the first rank's

    def collectives(self, step: int) -> list[Collective]:
        """Return the collectives of a step in the order in which they began."""
        by_bucket: dict[tuple[int, int], dict[int, Sent]] = {}
        for rank, rank_step in self.steps[step].items():
            for sent in rank_step.sent:
                by_bucket.setdefault((sent.bucket, sent.turn), {})[rank] = sent
        return sorted(
            map(Collective, by_bucket.values()), key=lambda each: min(s.begin_ns for s in each.by_rank.values())
        )


@dataclass(frozen=True)
class Timeline:
    """The recorded steps of a run, or some of them."""

    stretches: list[Stretch] = field(default_factory=list)
    began: float = 0.0  # Unix time of its start, by the clock of the first rank's host
    recorded: list[tuple[int, int]] = field(default_factory=list)  # (first, last) of each range of steps in the files
    num_steps: int = 0  # taken by the run

    @property
    def shown(self) -> list[tuple[int, int]]:
        """The ranges of steps in this timeline."""
        return ranges(sorted({step for segment in self.stretches for step in segment.steps}))

    @property
    def error_s(self) -> dict[int, float | None]:
        """The maximum error of each rank's clock; None: unknown."""
        errors_s: dict[int, float | None] = {}
        for segment in self.stretches:
            for rank, offset in segment.offsets.items():
                known_s = errors_s.get(rank, 0.0)
                errors_s[rank] = None if known_s is None or offset.error_s is None else max(known_s, offset.error_s)
        return dict(sorted(errors_s.items()))


def read_timeline(rundir: RunDir, wanted: range | None = None, most: int | None = None,
                  also: Collection[int] = (), tail_bytes: int | None = None) -> Timeline:  # fmt: skip
    """Read the newest `max_steps` of the steps in `step_range` [all], and those of `extra_steps` that were recorded.

    `tail_bytes` limits the bytes read of each rank's records [all], and an eighth of it those of its spans; a step
    whose record is not read is divided less finely. Raise UsageError if no such step was recorded.
    """
    manifest, ranks = rundir.manifest(), rundir.recorded_ranks()
    spans = {rank: _newest(rundir.spans(rank, tail_bytes and tail_bytes // 8)) for rank in ranks}
    records = {rank: {(entry.step, entry.epoch): entry for entry in rundir.records(rank, tail_bytes)} for rank in ranks}
    steps = sorted({entry.step for of_rank in spans.values() for entry in of_rank})
    recorded = ranges(steps)
    if not steps:
        raise UsageError(
            f"{rundir}: no spans were recorded",
            hint=f"ranks write them at checkpoints and at the end, for every {EVERY}th step and the last {LAST}",
        )
    shown = [step for step in steps if wanted is None or step in wanted]
    if wanted is not None and not shown:
        raise UsageError(f"{rundir}: steps {wanted.start}:{wanted.stop} are not recorded",
                         hint=f"recorded are {told_ranges(recorded)}")  # fmt: skip
    newest = shown[-most:] if most else shown
    shown = [step for step in shown if step >= newest[0] or step in also]
    clocks = Clocks(spans, {member.rank: member.host for member in manifest.roster.members})
    by_step: dict[int, dict[int, StepSpans]] = {}
    for rank, of_rank in spans.items():
        for entry in of_rank:
            by_step.setdefault(entry.step, {})[rank] = entry
    segments = [_joined(segment, clocks) for segment in _pieces({step: by_step[step] for step in shown})]
    zero = segments[0].origin
    first_s = min(segment.first_s(rank, spans, zero) for segment in segments for of_step in segment.steps.values()
                  for rank, spans in of_step.items())  # fmt: skip
    num_steps = 1 + max([steps[-1], *(step for of_rank in records.values() for step, _ in of_rank)])
    result = [segment.drawn(records, zero, first_s) for segment in segments]
    return Timeline(result, zero + first_s, recorded, num_steps)


def told_ranges(found: Sequence[tuple[int, int]]) -> str:
    """Format ranges of steps.

    >>> told_ranges([(0, 0), (100, 100), (180, 199)])
    '0, 100, 180-199'
    """
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def gaps(recorded: Sequence[tuple[int, int]], num_steps: int) -> list[tuple[int, int]]:
    """Return the ranges of steps between and after the recorded ones.

    >>> gaps([(0, 0), (100, 100)], 103)
    [(1, 99), (101, 102)]
    """
    edges = [-1, *(edge for first, last in recorded for edge in (first, last)), num_steps]
    return [
        (before + 1, after - 1) for before, after in zip(edges[::2], edges[1::2], strict=True) if after - before > 1
    ]


# --- from files to one clock ------------------------------------------------------------------------------------------


def _newest(spans: Sequence[StepSpans]) -> list[StepSpans]:
    """Return the spans by step; of a step that was taken twice, the later ones."""
    return [latest for _, latest in sorted({step_spans.step: step_spans for step_spans in spans}.items())]


def _pieces(by_step: Mapping[int, dict[int, StepSpans]]) -> Iterator[dict[int, dict[int, StepSpans]]]:
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
class _Piece:
    """A segment whose clocks are aligned."""

    steps: dict[int, dict[int, StepSpans]]
    offsets: dict[int, Offset]
    origin: float  # of the first rank's clock

    def begun_s(self, rank: int, spans: StepSpans, zero: float) -> float:
        """Return when a rank's step began, in seconds since the Unix time `zero`."""
        return (self.origin - zero) + (spans.begun_s + self.offsets[rank].add_s)

    def first_s(self, rank: int, spans: StepSpans, zero: float) -> float:
        """Return the same for the earliest span of the step: a collective may have begun before the step."""
        return self.begun_s(rank, spans, zero) + min([0.0, *(exchange.begin_s for exchange in spans.exchanges)])

    def drawn(self, records: Mapping[int, Mapping[tuple[int, int], StepRecord]], zero: float,
              first_s: float) -> Stretch:  # fmt: skip
        return Stretch(
            {step: {rank: self._rank_step(rank, spans, records[rank].get((step, spans.epoch)), zero, first_s)
                    for rank, spans in sorted(of_step.items())} for step, of_step in self.steps.items()},
            self.offsets,
        )  # fmt: skip

    def _rank_step(self, rank: int, spans: StepSpans, record: StepRecord | None, zero: float,
                   first_s: float) -> RankStep:  # fmt: skip
        begun_s = self.begun_s(rank, spans, zero)

        def ns(begin_s: float, end_s: float) -> tuple[int, int]:
            begin_ns = in_ticks(begun_s + begin_s - first_s)
            return begin_ns, max(begin_ns, in_ticks(begun_s + end_s - first_s))

        waiting = _waiting(record, spans)
        parts = [part for lap in spans.laps for part in _parts(lap.part, *ns(lap.begin_s, lap.end_s), waiting)]
        begin_ns, end_ns = ns(0.0, spans.laps[-1].end_s if spans.laps else 0.0)
        return RankStep(
            rank=rank,
            spans=spans,
            record=record,
            begin_ns=begin_ns,
            end_ns=end_ns,
            parts=parts,
            sent=[Sent(f"bucket {each.bucket}", *ns(each.begin_s, each.end_s), each.bucket, turn, each.size_bytes,
                       each.sent_bytes) for each, turn in spans.in_turns()],
            passes=[(Slice(f"{each.group} {'backward' if each.is_backward else 'forward'}",
                           *ns(each.begin_s, each.end_s)), each) for each in spans.passes],
            asides=[Slice(each.what, *ns(each.begin_s, each.end_s)) for each in spans.asides],
        )  # fmt: skip


def _joined(steps: dict[int, dict[int, StepSpans]], clocks: Clocks) -> _Piece:
    first_step, last_step = steps[min(steps)], steps[max(steps)]
    rank = min(first_step)
    first = clocks.of(rank, first_step[rank])
    end = last_step[rank]
    span = first_step[rank].begun_s, end.begun_s + max((lap.end_s for lap in end.laps), default=0.0)
    offsets = {other: clocks.offset(first, clocks.of(other, one), *span) for other, one in first_step.items()}
    return _Piece(steps, offsets, clocks.origin(first))


def _waiting(record: StepRecord | None, spans: StepSpans) -> float | None:
    """Return the share of a rank's blocked time in which it waited for others; None if unknown."""
    parts = spans.parts_s()
    blocked = parts.get(BLOCKED, 0.0)
    if record is None or record.cost.wait_s is None or not blocked:
        return None
    return min(1.0, max(0.0, record.cost.wait_s - parts.get("wait_s", 0.0)) / blocked)


def _parts(lap: str, begin: int, end: int, waiting: float | None) -> list[Part]:
    """Return the phase slices of a lap; split a blocked one into waiting and exposed communication by its record."""
    if lap != BLOCKED or waiting is None:
        return [Part({"compute_s": "backward"}.get(lap, lap), begin, end, part_of(lap))]
    arrived = begin + in_ticks((end - begin) / 1e9 * waiting)
    slices = [Part("wait_s", begin, arrived, "wait_s"), Part("exposed_sync_s", arrived, end, "exposed_sync_s")]
    return [part for part in slices if part.end_ns > part.begin_ns]
