"""Curves of all steps of a run in bounded memory.

RUN/steps/rank-R.jsonl ──add(R, records)──▶ RunCurves: for each metric that all ranks share, one series, from whichever
                                            rank's record comes first; for each rank, one series per phase of its
                                            steps, and its newest records unchanged

A run that trains is read record by record; the steps of one that is read as a whole come aligned (`from_steps`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from evener.core.run.step_cost import PHASES, StepCost, StepRecord, first_rank_record
from evener.report.read.downsampled_series import DownsampledSeries, StoredSeries

NEWEST_RECORDS = 40  # records per rank, for its strip
PHASE_POINTS = 128
MAX_RANKS = 64  # the first ones; further ranks are not read

SHARED_METRICS: dict[str, Callable[[StepRecord], float | None]] = {  # the same on all ranks
    "loss": lambda record: record.loss,
    "lr": lambda record: record.lr,
    "grad_norm": lambda record: record.grad_norm,
    "wall_s": lambda record: record.wall_s,
    "norm_sq": lambda record: None if record.noise is None else record.noise.norm_sq,
    "trace": lambda record: None if record.noise is None else record.noise.trace,
    "error": lambda record: None if record.fidelity is None else record.fidelity.error,
    "bytes": lambda record: float(record.bytes),
}


class StoredCurves(msgspec.Struct, frozen=True, kw_only=True):
    """`RunCurves` as stored in a file."""

    shared: dict[str, StoredSeries]
    parts: dict[int, dict[str, StoredSeries]]
    newest: dict[int, list[StepRecord]]
    done: int
    num_records: int


class RunCurves:
    """The downsampled curves and the newest records of a run."""

    def __init__(self) -> None:
        self.shared_series = {name: DownsampledSeries() for name in SHARED_METRICS}
        self.phase_series: dict[int, dict[str, DownsampledSeries]] = {}  # by rank
        self.newest: dict[int, deque[StepRecord]] = {}  # by rank
        self.steps_done = 0  # steps taken
        self.num_records = 0

    def add(self, rank: int, records: Sequence[StepRecord]) -> None:
        """Add a rank's next records. Steps that the rank repeats replace their earlier records."""
        if not records:
            return
        phases = self.phase_series.setdefault(rank, {phase: DownsampledSeries(PHASE_POINTS) for phase in PHASES})
        self.newest.setdefault(rank, deque(maxlen=NEWEST_RECORDS))
        self.num_records += len(records)
        for batch in _split_ascending(records):
            first = batch[0].step
            if self.newest[rank] and self.newest[rank][-1].step >= first:
                self._rewind(rank, first)
            steps = np.array([record.step for record in batch])
            for phase, series in phases.items():
                series.add(steps, np.array([getattr(record.cost, phase) for record in batch], dtype=np.float64))
            self.newest[rank].extend(batch[-NEWEST_RECORDS:])
            self._add_shared(batch[int(np.searchsorted(steps, self.steps_done)) :])

    def _add_shared(self, records: Sequence[StepRecord]) -> None:
        """Add the metrics that are the same on all ranks, from one rank's records of new steps."""
        if records:
            steps = np.array([record.step for record in records])
            for name, value in SHARED_METRICS.items():
                self.shared_series[name].add(steps, _column(records, value))
            self.steps_done = records[-1].step + 1

    @classmethod
    def from_steps(cls, steps: Sequence[Mapping[int, StepRecord]]) -> RunCurves:
        """Return the curves of a run's aligned steps."""
        curves = cls()
        curves._add_shared([first_rank_record(by_rank) for by_rank in steps])
        for rank in sorted({rank for by_rank in steps for rank in by_rank}):
            curves.add(rank, [by_rank[rank] for by_rank in steps if rank in by_rank])
        return curves

    def _rewind(self, rank: int, step: int) -> None:
        for series in self.phase_series[rank].values():
            series.truncate_from(step)
        self.newest[rank] = deque((record for record in self.newest[rank] if record.step < step), maxlen=NEWEST_RECORDS)
        if step < self.steps_done:
            for series in self.shared_series.values():
                series.truncate_from(step)
            self.steps_done = step

    @property
    def train_time_s(self) -> float:
        """Return the time spent in steps, without pauses between starts, evaluations and checkpoints."""
        return sum(self.shared_series["wall_s"].bucket_sums)

    @property
    def leader_records(self) -> Sequence[StepRecord]:
        """Return the newest records of the rank that is furthest."""
        return max(self.newest.values(), key=lambda records: records[-1].step if records else -1, default=())

    @property
    def last_record(self) -> StepRecord | None:
        """Return the newest record."""
        return self.leader_records[-1] if self.leader_records else None

    def mean_cost(self, rank: int, first_step: int = 0, end_step: int | None = None) -> StepCost:
        """Return a rank's mean step cost over these steps, by default over all, in the resolution of its series."""
        phases = self.phase_series[rank].items()
        return StepCost(**{phase: series.mean(first_step, end_step) for phase, series in phases})

    def recent_cost(self, rank: int, num: int) -> StepCost:
        """Return a rank's mean step cost over its newest `num` steps."""
        records = list(self.newest[rank])[-num:]
        means = {phase: [value for record in records if (value := getattr(record.cost, phase)) is not None]
                 for phase in PHASES}  # fmt: skip
        return StepCost(**{phase: sum(values) / len(values) if values else None for phase, values in means.items()})

    def to_stored(self) -> StoredCurves:
        """Return the curves as stored in a file."""
        return StoredCurves(
            shared={name: series.to_stored() for name, series in self.shared_series.items()},
            parts={
                rank: {phase: series.to_stored() for phase, series in phases.items()}
                for rank, phases in self.phase_series.items()
            },
            newest={rank: list(records) for rank, records in self.newest.items()},
            done=self.steps_done,
            num_records=self.num_records,
        )

    @classmethod
    def from_stored(cls, stored: StoredCurves) -> RunCurves:
        """Restore stored curves; raise ValueError if their metrics, phases or ranks do not match."""
        if set(stored.shared) != set(SHARED_METRICS) or any(
            set(by_phase) != set(PHASES) for by_phase in stored.parts.values()
        ):
            raise ValueError("stored curves have other metrics or phases")
        curves = cls()
        curves.shared_series = {name: DownsampledSeries.from_stored(series) for name, series in stored.shared.items()}
        curves.phase_series = {
            rank: {phase: DownsampledSeries.from_stored(series) for phase, series in by_phase.items()}
            for rank, by_phase in stored.parts.items()
        }
        curves.newest = {rank: deque(records, maxlen=NEWEST_RECORDS) for rank, records in stored.newest.items()}
        if curves.newest.keys() != curves.phase_series.keys():
            raise ValueError("stored curves have inconsistent ranks")
        curves.steps_done, curves.num_records = stored.done, stored.num_records
        return curves


def _split_ascending(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Split records into runs of ascending steps."""
    cuts = [i for i in range(1, len(records)) if records[i].step <= records[i - 1].step]
    return [records[first:last] for first, last in zip([0, *cuts], [*cuts, len(records)], strict=True)]


def _column(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> np.ndarray:
    """Return the values as (n,) float64; NaN where not measured."""
    return np.array([value(record) for record in records], dtype=np.float64)
