"""What is the typical step of a run? Whatever is told of its speed, and whatever is fitted to it, reads this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from evener.core.rundir import Manifest
from evener.core.step import PARTS, StepCost, StepRecord, first_of
from evener.core.units import median, percentile

WARMUP_STEPS = 3  # steps that are left out of rates, where the run is long enough
THIRD_STEPS = 5  # fewer steps in a third of a run do not tell whether it slowed down


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a run, on one rank: medians over its steps."""

    compute_s: float | None
    cpu_s: float | None  # processor seconds a step


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: medians over its steps after the warm-up."""

    rank: int  # its place in the manifest's Roster
    tokens: float | None  # a step
    typical: StepCost  # the median step divided: these parts do sum to it, medians of parts need not
    bytes: int | None  # a step, sent: the mean, for a strategy need not send the same in every step
    sync_s: float | None  # collectives in flight, as the last to come saw it: the same on every rank
    cpus: float | None  # cores that the process really ran on: CPU seconds a second
    cpu_s: float | None = None  # processor seconds of the typical step
    thirds: tuple[Pace, Pace] | None = None  # the first third of the run and the last; None: too few steps


class Typical(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the steps that a run took as it is now, after the warm-up; None = not measured.

    Where replicas agree every so many steps, a step is the mean of such a round.
    """

    step_p50_s: float | None
    step_p95_s: float | None
    tokens_per_step: int
    sync_p50_s: float | None  # collectives of one step in flight: of what the ranks saw the least, which has no waiting
    sync_p95_s: float | None
    ranks: list[RankSummary]

    @property
    def late_s(self) -> float:
        """What even the last rank waits in a step, because now one is late, now another."""
        return min((rank.typical.wait_s or 0.0 for rank in self.ranks), default=0.0) if len(self.ranks) > 1 else 0.0


def typical(steps: Sequence[dict[int, StepRecord]], manifest: Manifest) -> Typical:
    """Of steps as `aligned` gives them; those with other ranks or settings do not count."""
    numbers = [member.rank for member in manifest.roster.members]
    ranks = range(manifest.world_size)  # places among them, from here on
    ours = [{place: of_step[numbers[place]] for place in ranks} for of_step in steps
            if of_step.keys() == set(numbers) and first_of(of_step).step >= manifest.since]  # fmt: skip
    warm = in_rounds(ours[min(WARMUP_STEPS, len(ours) // 4) :], manifest.roster.sync.every)
    walls = [of_step[0].wall_s for of_step in warm]
    syncs = [least for of_step in warm if (least := least_sync_s(of_step)) is not None]
    step_p50_s, sync_p50_s = median(walls), median(syncs)
    by_wall = sorted(warm, key=lambda of_step: of_step[0].wall_s)
    middle = by_wall[len(walls) // 4 : len(walls) - len(walls) // 4]
    return Typical(
        step_p50_s=step_p50_s,
        step_p95_s=percentile(walls, 0.95) if walls else None,
        tokens_per_step=round(median([sum(record.tokens for record in of_step.values()) for of_step in warm]) or 0),
        sync_p50_s=sync_p50_s,
        sync_p95_s=percentile(syncs, 0.95) if syncs else None,
        ranks=_leaving_together(
            [
                _rank_summary(
                    rank, [step[rank] for step in warm], [step[rank] for step in middle], step_p50_s, sync_p50_s
                )
                for rank in ranks
            ]
        ),
    )


class Wall(msgspec.Struct, frozen=True, kw_only=True):
    """As much of a StepRecord."""

    step: int
    wall_s: float


def step_p50_s(walls: Iterable[Wall], manifest: Manifest) -> float | None:
    """The same median from one rank's alone: all take a step in the same time."""
    by_step = {wall.step: wall.wall_s for wall in walls if wall.step >= manifest.since}
    steps = sorted(by_step)
    rounds: dict[int, list[float]] = {}
    for step in steps[min(WARMUP_STEPS, len(steps) // 4) :]:
        rounds.setdefault(step // manifest.roster.sync.every, []).append(by_step[step])
    complete = [one for one in rounds.values() if len(one) == manifest.roster.sync.every]
    means = [sum(one) / len(one) for one in complete or [[*chain(*rounds.values())]] if one]
    return median(means)


def least_sync_s(of_step: dict[int, StepRecord]) -> float | None:
    """Collectives of one step in flight, as the rank that was last to come saw it."""
    return min((record.sync_s for record in of_step.values() if record.sync_s is not None), default=None)


def in_rounds(steps: Sequence[dict[int, StepRecord]], every: int) -> list[dict[int, StepRecord]]:
    """Steps as they repeat: the mean of every complete round, one of whose steps costs what the others do not.

    Where no round is complete, the mean of what there is.
    """
    if every == 1 or not steps:
        return list(steps)
    rounds: dict[int, list[dict[int, StepRecord]]] = {}
    for of_step in steps:
        rounds.setdefault(of_step[0].step // every, []).append(of_step)
    complete = [one for one in rounds.values() if len(one) == every] or [list(steps)]
    return [{rank: _mean_record([of_step[rank] for of_step in one]) for rank in one[0]} for one in complete]


def _mean_record(records: Sequence[StepRecord]) -> StepRecord:
    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return msgspec.structs.replace(
        records[-1],
        tokens=sum(record.tokens for record in records) / len(records),
        wall_s=sum(record.wall_s for record in records) / len(records),
        cost=StepCost(**{part: mean([getattr(record.cost, part) for record in records]) for part in PARTS}),
        sync_s=mean([record.sync_s for record in records]),
        cpu_s=mean([record.cpu_s for record in records]),
        bytes=round(sum(record.bytes for record in records) / len(records)),
    )


def _typical_cost(records: list[StepRecord], step_s: float | None) -> StepCost:
    """Means over the middle half of the steps, which no outlier enters, scaled so that they sum to the median step.

    Waiting comes and goes: where two ranks are late in turns, each one's median wait is small and its mean is not.
    """
    parts = {part: [getattr(record.cost, part) for record in records] for part in PARTS}
    is_whole = all(value is not None for values in parts.values() for value in values)
    sums_s = [record.cost.total_s if is_whole else record.wall_s for record in records]
    return StepCost(**{part: _scaled(values, sums_s, step_s) for part, values in parts.items()})


def _leaving_together(ranks: list[RankSummary]) -> list[RankSummary]:
    """All ranks leave a collective together: what one has more of it after scaling than another is waiting."""
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
    def middle(of: list[StepRecord], value: Callable[[StepRecord], float | None]) -> float | None:
        return median([known for record in of if (known := value(record)) is not None])

    def pace(of: list[StepRecord]) -> Pace:
        return Pace(
            compute_s=middle(of, lambda record: record.cost.compute_s), cpu_s=middle(of, lambda record: record.cpu_s)
        )

    third = len(records) // 3
    return RankSummary(
        rank=rank,
        tokens=middle(records, lambda record: record.tokens),
        typical=_typical_cost(middle_half, step_s),
        bytes=round(sum(record.bytes for record in records) / len(records)) if records else None,
        sync_s=sync_s,
        cpus=middle(records, lambda record: None if record.cpu_s is None else record.cpu_s / record.wall_s),
        cpu_s=_scaled([record.cpu_s for record in middle_half], [record.wall_s for record in middle_half], step_s),
        thirds=(pace(records[:third]), pace(records[-third:])) if third >= THIRD_STEPS else None,
    )
