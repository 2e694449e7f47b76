"""Statistics of a run's steps: the one source of all reported speeds and of all fits to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from evener.core.base.units import median, percentile
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import PHASES, StepCost, StepRecord, first_rank_record

WARMUP_STEPS = 3  # steps excluded from rates, if the run is long enough
MIN_THIRD_STEPS = 5  # steps in a third of a run that are needed to detect a slowdown


class IntervalMedians(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the steps of one interval of a run, on one rank."""

    compute_s: float | None
    cpu_s: float | None  # CPU seconds per step


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The typical step of one rank after the warm-up; a field is a median over steps unless it says otherwise."""

    rank: int  # index in the manifest's Roster
    tokens: float | None  # per step
    typical: StepCost  # mean phases of the middle half of the steps, scaled to sum to the median step
    bytes: int | None  # sent per step: the mean, as a strategy may send different amounts from step to step
    sync_s: float | None  # collectives in flight, as measured by the last rank to arrive: equal on all ranks
    cpus: float | None  # number of busy cores: the process's CPU seconds per second
    cpu_s: float | None = None  # CPU seconds: the mean of the middle half of the steps, scaled like `typical`
    # the first third of the run and the last; None: too few steps
    thirds: tuple[IntervalMedians, IntervalMedians] | None = None

    @property
    def working_cpus(self) -> float | None:
        """The number of cores that were busy while the rank had work: its CPU seconds per second of that."""
        cost = self.typical
        work_s = (cost.data_s or 0.0) + (cost.compute_s or 0.0) + (cost.optimizer_s or 0.0)
        return None if self.cpu_s is None or not work_s else self.cpu_s / work_s


class TypicalStep(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the steps with the run's current ranks and settings, after the warm-up; None = not measured.

    If replicas synchronize every H steps, a step here is the mean of a round of H.
    """

    step_p50_s: float | None
    step_p95_s: float | None
    tokens_per_step: int
    sync_p50_s: float | None  # collectives of one step in flight: the minimum over ranks, which contains no waiting
    sync_p95_s: float | None
    ranks: list[RankSummary]

    @property
    def jitter_wait_s(self) -> float:
        """The shortest wait of any rank; above 0 if the rank that others wait for varies from step to step."""
        return min((rank.typical.wait_s or 0.0 for rank in self.ranks), default=0.0) if len(self.ranks) > 1 else 0.0


def summarize_steps(steps: Sequence[dict[int, StepRecord]], manifest: Manifest) -> TypicalStep:
    """Summarize the steps that `align_steps` returns. Steps with other ranks or settings do not count."""
    numbers = [member.rank for member in manifest.roster.members]
    ranks = range(manifest.world_size)  # from here on ranks are indices of the Roster
    current = [{rank: by_rank[numbers[rank]] for rank in ranks} for by_rank in steps
               if by_rank.keys() == set(numbers) and first_rank_record(by_rank).step >= manifest.since]  # fmt: skip
    warm = average_rounds(current[min(WARMUP_STEPS, len(current) // 4) :], manifest.roster.sync.every)
    walls = [by_rank[0].wall_s for by_rank in warm]
    syncs = [sync_s for by_rank in warm if (sync_s := min_sync_s(by_rank)) is not None]
    step_p50_s, sync_p50_s = median(walls), median(syncs)
    by_wall = sorted(warm, key=lambda by_rank: by_rank[0].wall_s)
    middle_half = by_wall[len(walls) // 4 : len(walls) - len(walls) // 4]
    return TypicalStep(
        step_p50_s=step_p50_s,
        step_p95_s=percentile(walls, 0.95) if walls else None,
        tokens_per_step=round(median([sum(record.tokens for record in by_rank.values()) for by_rank in warm]) or 0),
        sync_p50_s=sync_p50_s,
        sync_p95_s=percentile(syncs, 0.95) if syncs else None,
        ranks=_equalize_exposed_sync(
            [
                _rank_summary(
                    rank, [step[rank] for step in warm], [step[rank] for step in middle_half], step_p50_s, sync_p50_s
                )
                for rank in ranks
            ]
        ),
    )


class StepWallTime(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a StepRecord that a median step time needs."""

    step: int
    wall_s: float


def median_step_s(walls: Iterable[StepWallTime | StepRecord], every: int, num_before: int = 0) -> float | None:
    """Return the median step time from the records of one rank: a step takes all ranks the same time.

    If replicas synchronize every `every` steps, it is the median over rounds of so many of their mean. The first steps
    of a run do not count, see WARMUP_STEPS; `num_before` of the run's steps are not among the records, but earlier.
    """
    by_step = {wall.step: wall.wall_s for wall in walls}
    steps = sorted(by_step)
    num_warmup = min(WARMUP_STEPS, (num_before + len(steps)) // 4)
    rounds: dict[int, list[float]] = {}
    for step in steps[max(0, num_warmup - num_before) :]:
        rounds.setdefault(step // every, []).append(by_step[step])
    complete = [walls_s for walls_s in rounds.values() if len(walls_s) == every]
    means = [sum(walls_s) / len(walls_s) for walls_s in complete or [[*chain(*rounds.values())]] if walls_s]
    return median(means)


def min_sync_s(by_rank: dict[int, StepRecord]) -> float | None:
    """Return the time of one step's collectives in flight, as measured by the last rank to arrive: the minimum."""
    return min((record.sync_s for record in by_rank.values() if record.sync_s is not None), default=None)


def average_rounds(steps: Sequence[dict[int, StepRecord]], every: int) -> list[dict[int, StepRecord]]:
    """Return the mean of every complete round of `every` steps, only one of which includes the synchronization.

    If no round is complete, return the mean of all steps.
    """
    if every == 1 or not steps:
        return list(steps)
    rounds: dict[int, list[dict[int, StepRecord]]] = {}
    for by_rank in steps:
        rounds.setdefault(by_rank[0].step // every, []).append(by_rank)
    complete = [group for group in rounds.values() if len(group) == every] or [list(steps)]
    return [{rank: _mean_record([by_rank[rank] for by_rank in group]) for rank in group[0]} for group in complete]


def _mean_record(records: Sequence[StepRecord]) -> StepRecord:
    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return msgspec.structs.replace(
        records[-1],
        tokens=sum(record.tokens for record in records) / len(records),
        wall_s=sum(record.wall_s for record in records) / len(records),
        cost=StepCost(**{phase: mean([getattr(record.cost, phase) for record in records]) for phase in PHASES}),
        sync_s=mean([record.sync_s for record in records]),
        cpu_s=mean([record.cpu_s for record in records]),
        bytes=round(sum(record.bytes for record in records) / len(records)),
    )


def _typical_cost(records: list[StepRecord], step_s: float | None) -> StepCost:
    """Return the phase means over the middle half of the steps (no outliers), scaled to sum to the median step.

    Means, as waiting is intermittent: if two ranks are late in turn, each one's median wait is small and its mean not.
    """
    phases = {phase: [getattr(record.cost, phase) for record in records] for phase in PHASES}
    is_complete = all(value is not None for values in phases.values() for value in values)
    sums_s = [record.cost.total_s if is_complete else record.wall_s for record in records]
    return StepCost(**{phase: _scaled(values, sums_s, step_s) for phase, values in phases.items()})


def _equalize_exposed_sync(ranks: list[RankSummary]) -> list[RankSummary]:
    """Move the excess of each rank's exposed_sync_s over the minimum to wait_s, as ranks leave a collective together.

    The ranks' values differ only because `_typical_cost` scales each rank separately.
    """
    costs = [rank.typical for rank in ranks]
    if any(cost.exposed_sync_s is None or cost.wait_s is None for cost in costs):
        return ranks
    least_s = min(cost.exposed_sync_s or 0.0 for cost in costs)
    shared = [
        msgspec.structs.replace(
            cost, exposed_sync_s=least_s, wait_s=(cost.wait_s or 0.0) + (cost.exposed_sync_s or 0.0) - least_s
        )
        for cost in costs
    ]
    return [msgspec.structs.replace(rank, typical=cost) for rank, cost in zip(ranks, shared, strict=True)]


def _scaled(values: list[float | None], sums_s: list[float], step_s: float | None) -> float | None:
    measured = [value for value in values if value is not None]
    if not measured or not step_s:
        return None
    return sum(measured) / len(measured) * step_s / (sum(sums_s) / len(sums_s))


def _rank_summary(
    rank: int, records: list[StepRecord], middle_half: list[StepRecord], step_s: float | None, sync_s: float | None
) -> RankSummary:
    def median_of(steps: list[StepRecord], value: Callable[[StepRecord], float | None]) -> float | None:
        return median([known for record in steps if (known := value(record)) is not None])

    def medians(steps: list[StepRecord]) -> IntervalMedians:
        return IntervalMedians(
            compute_s=median_of(steps, lambda record: record.cost.compute_s),
            cpu_s=median_of(steps, lambda record: record.cpu_s),
        )

    third = len(records) // 3
    return RankSummary(
        rank=rank,
        tokens=median_of(records, lambda record: record.tokens),
        typical=_typical_cost(middle_half, step_s),
        bytes=round(sum(record.bytes for record in records) / len(records)) if records else None,
        sync_s=sync_s,
        cpus=median_of(records, lambda record: None if record.cpu_s is None else record.cpu_s / record.wall_s),
        cpu_s=_scaled([record.cpu_s for record in middle_half], [record.wall_s for record in middle_half], step_s),
        thirds=(medians(records[:third]), medians(records[-third:])) if third >= MIN_THIRD_STEPS else None,
    )
