"""Curves of all steps of a run in bounded memory.

RUN/steps/rank-R.jsonl ──add(R, records)──▶ RunCurves: for each metric that all ranks share, one series, from whichever
                                            rank's record comes first; for each rank, one series per phase of its
                                            steps, and its newest records unchanged
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from evener.core.step import PARTS, StepCost, StepRecord
from evener.report.smooth import averaged
from evener.watch.series import KeptSeries, Points, Series

NEWEST = 40  # records per rank, for its strip
PART_POINTS = 128
MAX_RANKS = 64  # the first ones; further ranks are not read
NOISE_SPAN = 0.1  # share of the points to average over: for one step, either term of the noise may be negative

SHARED: dict[str, Callable[[StepRecord], float | None]] = {  # the same on all ranks
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
    """`RunCurves` as stored in a file."""

    shared: dict[str, KeptSeries]
    parts: dict[int, dict[str, KeptSeries]]
    newest: dict[int, list[StepRecord]]
    done: int
    num_records: int


class Curves:
    """The downsampled curves and the newest records of a run."""

    def __init__(self) -> None:
        self.shared = {name: Series() for name in SHARED}
        self.parts: dict[int, dict[str, Series]] = {}  # by rank
        self.newest: dict[int, deque[StepRecord]] = {}  # by rank
        self.done = 0  # steps taken
        self.num_records = 0

    def add(self, rank: int, records: Sequence[StepRecord]) -> None:
        """Add a rank's next records. Steps that the rank repeats replace their earlier records."""
        if not records:
            return
        phases = self.parts.setdefault(rank, {phase: Series(PART_POINTS) for phase in PARTS})
        self.newest.setdefault(rank, deque(maxlen=NEWEST))
        self.num_records += len(records)
        for batch in _ascending(records):
            first = batch[0].step
            if self.newest[rank] and self.newest[rank][-1].step >= first:
                self._again(rank, first)
            steps = np.array([record.step for record in batch])
            for phase, series in phases.items():
                series.add(steps, np.array([getattr(record.cost, phase) for record in batch], dtype=np.float64))
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
        self.newest[rank] = deque((record for record in self.newest[rank] if record.step < step), maxlen=NEWEST)
        if step < self.done:
            for series in self.shared.values():
                series.forget_from(step)
            self.done = step

    @property
    def leader(self) -> Sequence[StepRecord]:
        """Return the newest records of the rank that is furthest."""
        return max(self.newest.values(), key=lambda records: records[-1].step if records else -1, default=())

    @property
    def last(self) -> StepRecord | None:
        """Return the newest record."""
        return self.leader[-1] if self.leader else None

    def typical(self, rank: int) -> StepCost:
        """Return a rank's mean step cost over all its steps."""
        return StepCost(**{phase: series.mean for phase, series in self.parts[rank].items()})

    def now(self, rank: int, num: int) -> StepCost:
        """Return a rank's mean step cost over its newest `num` steps."""
        records = list(self.newest[rank])[-num:]
        means = {phase: [value for record in records if (value := getattr(record.cost, phase)) is not None]
                 for phase in PARTS}  # fmt: skip
        return StepCost(**{phase: sum(values) / len(values) if values else None for phase, values in means.items()})

    def noise(self) -> Points | None:
        """Return the gradient noise scale in tokens over the steps; None if too little was measured.

        Both terms are averaged before the division, as in core.step.noise_scale.
        """
        norm_sq, trace = self.shared["norm_sq"].points(), self.shared["trace"].points()
        if len(norm_sq) < 5 or len(norm_sq) != len(trace):
            return None
        span = max(2.0, NOISE_SPAN * len(norm_sq))
        means = zip(norm_sq.steps, averaged(trace.means, span), averaged(norm_sq.means, span), strict=True)
        scales = [(step, above / below) for step, above, below in means if above > 0 < below]
        values = [value for _, value in scales]
        return Points([step for step, _ in scales], values, values, values) if scales else None

    def keep(self) -> KeptCurves:
        """Return the curves as stored in a file."""
        return KeptCurves(
            shared={name: series.keep() for name, series in self.shared.items()},
            parts={
                rank: {phase: series.keep() for phase, series in phases.items()} for rank, phases in self.parts.items()
            },
            newest={rank: list(records) for rank, records in self.newest.items()},
            done=self.done,
            num_records=self.num_records,
        )

    @classmethod
    def kept(cls, one: KeptCurves) -> Curves:
        """Restore stored curves; raise ValueError if their metrics, phases or ranks do not match."""
        if set(one.shared) != set(SHARED) or any(set(by_phase) != set(PARTS) for by_phase in one.parts.values()):
            raise ValueError("stored curves have other metrics or phases")
        curves = cls()
        curves.shared = {name: Series.kept(series) for name, series in one.shared.items()}
        curves.parts = {rank: {phase: Series.kept(series) for phase, series in by_phase.items()}
                        for rank, by_phase in one.parts.items()}  # fmt: skip
        curves.newest = {rank: deque(records, maxlen=NEWEST) for rank, records in one.newest.items()}
        if curves.newest.keys() != curves.parts.keys():
            raise ValueError("stored curves have inconsistent ranks")
        curves.done, curves.num_records = one.done, one.num_records
        return curves


def _ascending(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Split records into runs of ascending steps."""
    cuts = [i for i in range(1, len(records)) if records[i].step <= records[i - 1].step]
    return [records[first:last] for first, last in zip([0, *cuts], [*cuts, len(records)], strict=True)]


def _column(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> np.ndarray:
    """Return the values as (n,) float64; NaN where not measured."""
    return np.array([value(record) for record in records], dtype=np.float64)
