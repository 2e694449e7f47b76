"""What is remembered of all the steps of a run, however many they are?

RUN/steps/rank-R.jsonl ──add(R, records)──▶ Curves: of what all ranks know alike a Series, told by whichever rank's
                                            record comes first; of each rank the parts of its steps, a Series each,
                                            and its newest records as they are
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from evener.core.step import PARTS, StepCost, StepRecord
from evener.report.smooth import averaged
from evener.watch.series import KeptSeries, Points, Series

NEWEST = 40  # records of each rank, for the strip
PART_POINTS = 128
MAX_RANKS = 64  # of more, the first ones are read
NOISE_SPAN = 0.1  # of the points drawn: of one step either part of the noise may be negative

SHARED: dict[str, Callable[[StepRecord], float | None]] = {  # what all ranks know alike
    "loss": lambda record: record.loss,
    "lr": lambda record: record.lr,
    "grad_norm": lambda record: record.grad_norm,
    "wall_s": lambda record: record.wall_s,
    "norm_sq": lambda record: None if record.noise is None else record.noise.norm_sq,
    "trace": lambda record: None if record.noise is None else record.noise.trace,
    "error": lambda record: None if record.fidelity is None else record.fidelity.error,
    "bytes": lambda record: float(record.bytes),
}


class KeptCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Curves as a file holds them."""

    shared: dict[str, KeptSeries]
    parts: dict[int, dict[str, KeptSeries]]
    newest: dict[int, list[StepRecord]]
    done: int
    num_records: int


class Curves:
    """The steps of a run."""

    def __init__(self) -> None:
        self.shared = {name: Series() for name in SHARED}
        self.parts: dict[int, dict[str, Series]] = {}  # by rank
        self.newest: dict[int, deque[StepRecord]] = {}  # by rank
        self.done = 0  # steps taken
        self.num_records = 0

    def add(self, rank: int, records: Sequence[StepRecord]) -> None:
        """What a rank recorded next. Where it takes steps again, what it recorded of them first counts no more."""
        if not records:
            return
        parts = self.parts.setdefault(rank, {part: Series(PART_POINTS) for part in PARTS})
        self.newest.setdefault(rank, deque(maxlen=NEWEST))
        self.num_records += len(records)
        for batch in _ascending(records):
            first = batch[0].step
            if self.newest[rank] and self.newest[rank][-1].step >= first:
                self._again(rank, first)
            steps = np.array([record.step for record in batch])
            for part, series in parts.items():
                series.add(steps, np.array([getattr(record.cost, part) for record in batch], dtype=np.float64))
            self.newest[rank].extend(batch[-NEWEST:])
            new = batch[int(np.searchsorted(steps, self.done)) :]
            if new:
                steps = steps[-len(new) :]
                for name, value in SHARED.items():
                    self.shared[name].add(steps, _column(new, value))
                self.done = new[-1].step + 1

    def _again(self, rank: int, step: int) -> None:
        for series in self.parts[rank].values():
            series.forget_from(step)
        self.newest[rank] = deque((one for one in self.newest[rank] if one.step < step), maxlen=NEWEST)
        if step < self.done:
            for series in self.shared.values():
                series.forget_from(step)
            self.done = step

    @property
    def leader(self) -> Sequence[StepRecord]:
        """The newest records of the rank that is furthest."""
        return max(self.newest.values(), key=lambda records: records[-1].step if records else -1, default=())

    @property
    def last(self) -> StepRecord | None:
        """The newest of them."""
        return self.leader[-1] if self.leader else None

    def typical(self, rank: int) -> StepCost:
        """The mean of each part over all steps of a rank."""
        return StepCost(**{part: series.mean for part, series in self.parts[rank].items()})

    def now(self, rank: int, num: int) -> StepCost:
        """The same of its newest steps."""
        records = list(self.newest[rank])[-num:]
        means = {part: [value for record in records if (value := getattr(record.cost, part)) is not None]
                 for part in PARTS}  # fmt: skip
        return StepCost(**{part: sum(values) / len(values) if values else None for part, values in means.items()})

    def noise(self) -> Points | None:
        """The noise scale in tokens as it goes; None where too little was measured.

        Means before the division, as in core.step.noise_scale.
        """
        norm_sq, trace = self.shared["norm_sq"].points(), self.shared["trace"].points()
        if len(norm_sq) < 5 or len(norm_sq) != len(trace):
            return None
        span = max(2.0, NOISE_SPAN * len(norm_sq))
        means = zip(norm_sq.steps, averaged(trace.means, span), averaged(norm_sq.means, span), strict=True)
        found = [(step, above / below) for step, above, below in means if above > 0 < below]
        values = [value for _, value in found]
        return Points([step for step, _ in found], values, values, values) if found else None

    def keep(self) -> KeptCurves:
        """As a file holds them."""
        return KeptCurves(
            shared={name: series.keep() for name, series in self.shared.items()},
            parts={rank: {part: one.keep() for part, one in of_rank.items()} for rank, of_rank in self.parts.items()},
            newest={rank: list(records) for rank, records in self.newest.items()},
            done=self.done,
            num_records=self.num_records,
        )

    @classmethod
    def kept(cls, one: KeptCurves) -> Curves:
        """As they were; ValueError where a file holds something else."""
        if set(one.shared) != set(SHARED) or any(set(of_rank) != set(PARTS) for of_rank in one.parts.values()):
            raise ValueError("other curves than these")
        curves = cls()
        curves.shared = {name: Series.kept(series) for name, series in one.shared.items()}
        curves.parts = {rank: {part: Series.kept(series) for part, series in of_rank.items()}
                        for rank, of_rank in one.parts.items()}  # fmt: skip
        curves.newest = {rank: deque(records, maxlen=NEWEST) for rank, records in one.newest.items()}
        if curves.newest.keys() != curves.parts.keys():
            raise ValueError("other ranks than these")
        curves.done, curves.num_records = one.done, one.num_records
        return curves


def _ascending(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Cut where a step is not after the one before."""
    cuts = [i for i in range(1, len(records)) if records[i].step <= records[i - 1].step]
    return [records[first:last] for first, last in zip([0, *cuts], [*cuts, len(records)], strict=True)]


def _column(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> np.ndarray:
    """(n,) float64; NaN where it was not measured."""
    return np.array([value(record) for record in records], dtype=np.float64)
