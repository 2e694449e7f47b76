"""What ran when in the steps that were kept, on all ranks by one clock? For whoever draws it.

Steps that follow each other are a stretch, with one offset for each clock: within it nothing moves against anything
else. Times are whole ticks: as microseconds these, their sums and their thousandfold are exact in floating point, so
that no viewer sees a slice end after the next one's begin.
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
    """In nanoseconds.

    >>> in_ticks(1.3e-6)
    1250
    """
    return round(time_s * 1e9 / TICK_NS) * TICK_NS


@dataclass(frozen=True)
class Slice:
    """From when to when, in nanoseconds since the timeline begins."""

    name: str
    begin_ns: int
    end_ns: int

    @property
    def took_s(self) -> float:
        """Seconds."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Part(Slice):
    """A stretch of a step, charged to one of PARTS, or to BLOCKED where nobody knows what of it was waiting.

    It is called as that, or "forward" or "backward".
    """

    part: str


@dataclass(frozen=True)
class Sent(Slice):
    """A bucket's exchange, as one rank saw it."""

    bucket: int
    turn: int  # how many times before in this step
    size_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    rank: int
    spans: StepSpans
    record: StepRecord | None  # None: it was never told of
    begin_ns: int
    end_ns: int
    parts: list[Part]
    sent: list[Sent]
    passes: list[tuple[Slice, Pass]]
    asides: list[Slice]


@dataclass(frozen=True)
class Collective:
    """One exchange on all ranks that kept it."""

    by_rank: dict[int, Sent]

    @property
    def last(self) -> int:
        """The rank for which the others waited: the last to begin."""
        return max(self.by_rank, key=lambda rank: self.by_rank[rank].begin_ns)

    @property
    def transfer_s(self) -> float:
        """What it took the rank that waited for nobody."""
        return min(one.took_s for one in self.by_rank.values())


@dataclass(frozen=True)
class Stretch:
    """Steps that follow each other, with the same ranks."""

    steps: dict[int, dict[int, RankStep]]  # by step and rank
    offsets: dict[int, Offset]  # of each rank's clock, against that of the first of them

    def collectives(self, step: int) -> list[Collective]:
        """Of a step, in the order in which they began."""
        found: dict[tuple[int, int], dict[int, Sent]] = {}
        for rank, one in self.steps[step].items():
            for sent in one.sent:
                found.setdefault((sent.bucket, sent.turn), {})[rank] = sent
        return sorted(map(Collective, found.values()), key=lambda one: min(s.begin_ns for s in one.by_rank.values()))


@dataclass(frozen=True)
class Timeline:
    """What was kept of a run, or of some of its steps."""

    stretches: list[Stretch] = field(default_factory=list)
    began: float = 0.0  # Unix time of its beginning, by the first rank's host
    recorded: list[tuple[int, int]] = field(default_factory=list)  # first and last of each run of steps in the files
    num_steps: int = 0  # that the run has taken

    @property
    def shown(self) -> list[tuple[int, int]]:
        """Those in it."""
        return ranges(sorted({step for stretch in self.stretches for step in stretch.steps}))

    @property
    def error_s(self) -> dict[int, float | None]:
        """How far each rank's clock may be off at most; None: nobody knows."""
        found: dict[int, float | None] = {}
        for stretch in self.stretches:
            for rank, offset in stretch.offsets.items():
                before = found.get(rank, 0.0)
                found[rank] = None if before is None or offset.error_s is None else max(before, offset.error_s)
        return dict(sorted(found.items()))


def read_timeline(rundir: RunDir, wanted: range | None = None, most: int | None = None,
                  also: Collection[int] = (), tail_bytes: int | None = None) -> Timeline:  # fmt: skip
    """Of the steps that are wanted [all], the newest `most`, and some others also. UsageError where none of them was
    kept. `tail_bytes`: of each rank's records that are read [all], and an eighth as much of what ran when; a step whose
    record lies before is divided less.
    """
    manifest, ranks = rundir.manifest(), rundir.recorded_ranks()
    spans = {rank: _newest(rundir.spans(rank, tail_bytes and tail_bytes // 8)) for rank in ranks}
    records = {rank: {(one.step, one.epoch): one for one in rundir.records(rank, tail_bytes)} for rank in ranks}
    steps = sorted({one.step for of_rank in spans.values() for one in of_rank})
    recorded = ranges(steps)
    if not steps:
        raise UsageError(
            f"{rundir}: when what ran was not recorded",
            hint=f"ranks write it at checkpoints and at the end, of every {EVERY}th step and the last {LAST}",
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
        for one in of_rank:
            by_step.setdefault(one.step, {})[rank] = one
    pieces = [_joined(piece, clocks) for piece in _pieces({step: by_step[step] for step in shown})]
    zero = pieces[0].origin
    first_s = min(piece.first_s(rank, spans, zero) for piece in pieces for of_step in piece.steps.values()
                  for rank, spans in of_step.items())  # fmt: skip
    num_steps = 1 + max([steps[-1], *(step for of_rank in records.values() for step, _ in of_rank)])
    stretches = [piece.drawn(records, zero, first_s) for piece in pieces]
    return Timeline(stretches, zero + first_s, recorded, num_steps)


def told_ranges(found: Sequence[tuple[int, int]]) -> str:
    """For a person.

    >>> told_ranges([(0, 0), (100, 100), (180, 199)])
    '0, 100, 180-199'
    """
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def gaps(recorded: Sequence[tuple[int, int]], num_steps: int) -> list[tuple[int, int]]:
    """The steps between and after those.

    >>> gaps([(0, 0), (100, 100)], 103)
    [(1, 99), (101, 102)]
    """
    edges = [-1, *(edge for first, last in recorded for edge in (first, last)), num_steps]
    return [
        (before + 1, after - 1) for before, after in zip(edges[::2], edges[1::2], strict=True) if after - before > 1
    ]


# --- from files to one clock ------------------------------------------------------------------------------------------


def _newest(spans: Sequence[StepSpans]) -> list[StepSpans]:
    """Of a step that was taken twice, what was kept last."""
    return [found for _, found in sorted({one.step: one for one in spans}.items())]


def _pieces(by_step: Mapping[int, dict[int, StepSpans]]) -> Iterator[dict[int, dict[int, StepSpans]]]:
    """Steps that follow each other, with the same processes."""
    piece: dict[int, dict[int, StepSpans]] = {}
    for step, of_step in by_step.items():
        processes = {rank: one.clock for rank, one in of_step.items()}
        if piece and (step - 1 not in piece or processes != {r: one.clock for r, one in piece[step - 1].items()}):
            yield piece
            piece = {}
        piece[step] = of_step
    if piece:
        yield piece


@dataclass(frozen=True)
class _Piece:
    """A stretch whose clocks are joined."""

    steps: dict[int, dict[int, StepSpans]]
    offsets: dict[int, Offset]
    origin: float  # of the first rank's clock

    def begun_s(self, rank: int, spans: StepSpans, zero: float) -> float:
        """When a rank's step began, since a Unix time."""
        return (self.origin - zero) + (spans.begun_s + self.offsets[rank].add_s)

    def first_s(self, rank: int, spans: StepSpans, zero: float) -> float:
        """The same of the first that is told of it: an exchange may have begun before."""
        return self.begun_s(rank, spans, zero) + min([0.0, *(one.begin_s for one in spans.exchanges)])

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
            sent=[Sent(f"bucket {one.bucket}", *ns(one.begin_s, one.end_s), one.bucket, turn, one.size_bytes,
                       one.sent_bytes) for one, turn in spans.in_turns()],
            passes=[(Slice(f"{one.group} {'backward' if one.is_backward else 'forward'}",
                           *ns(one.begin_s, one.end_s)), one) for one in spans.passes],
            asides=[Slice(one.what, *ns(one.begin_s, one.end_s)) for one in spans.asides],
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
    """Which part of the time that a rank was blocked it waited for others; None where nobody knows."""
    parts = spans.parts_s()
    blocked = parts.get(BLOCKED, 0.0)
    if record is None or record.cost.wait_s is None or not blocked:
        return None
    return min(1.0, max(0.0, record.cost.wait_s - parts.get("wait_s", 0.0)) / blocked)


def _parts(lap: str, begin: int, end: int, waiting: float | None) -> list[Part]:
    """A lap; one that was blocked as waiting, and then what remained: how its record divides it."""
    if lap != BLOCKED or waiting is None:
        return [Part({"compute_s": "backward"}.get(lap, lap), begin, end, part_of(lap))]
    arrived = begin + in_ticks((end - begin) / 1e9 * waiting)
    found = [Part("wait_s", begin, arrived, "wait_s"), Part("exposed_sync_s", arrived, end, "exposed_sync_s")]
    return [part for part in found if part.end_ns > part.begin_ns]
