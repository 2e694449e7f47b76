"""Compare sync strategies by measurement: train some steps with each of the best, then go on.

    ddp ── packed ── diloco:10:int8:streamed ─┬─ clear: the fastest one, which exact ones may be slower than
                                              └─ not clear: the best two once more

All steps are training steps. Strategies with equal replicas come first, so that the one whose replicas drift, which can
only be left by merging them, need not be left if it wins. A figure is the typical time of a step on the slowest rank: a
median over rounds, so that a short disturbance does not decide. Its standard error comes from the differences between a
step and the same step of the round before: neither the pattern of a round nor a slow change of the machine counts as
noise.

No clock and no torch: all ranks decide alike from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from evener.core.base.units import format_seconds, sample_median
from evener.core.run.prediction import PlanOption
from evener.core.run.roster import SyncSpec
from evener.plan.choice.options import MIN_GAIN, pick_fastest, required_gain

MAX_CANDIDATES = 3
MIN_PLAUSIBLE_SPEED = 0.75  # of the fastest by prediction; predictions have been up to 26 % off
SETTLE_STEPS = 2  # steps after a change that do not count: buckets are built, queues fill
MIN_STEPS = 8  # measured with each candidate
MIN_ROUNDS = 3  # of replicas that drift: a median of two would follow a single slow one
MAX_VISITS = 3  # to a candidate
STANDARD_ERRORS = 2.0  # by which a gain must differ from the required one to be clear
MEDIAN_ERROR_FACTOR = 1.2533  # standard error of a median over that of a mean: √(π/2)


class MeasuredStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy that was tried: predicted beside measured."""

    sync: str
    predicted_s: float  # a step
    measured_s: float
    error_s: float  # standard error
    num_steps: int


class StrategyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a trial."""

    chosen: str
    measured: list[MeasuredStrategy]  # the chosen one first, then by speed

    def __str__(self) -> str:
        figures = [f"{one.sync} {format_seconds(one.measured_s)} in {one.num_steps} steps (predicted: "
                   f"{format_seconds(one.predicted_s)})" for one in self.measured]  # fmt: skip
        text = f"measured time of a step: {', '.join(figures)}"
        fastest = min(self.measured, key=lambda one: one.measured_s)
        if fastest is not self.measured[0]:
            text += f"; {fastest.sync} is {self.measured[0].measured_s / fastest.measured_s - 1:.1%} faster: too little"
        return text


def plausible_options(options: Sequence[PlanOption], limit: int = MAX_CANDIDATES) -> list[PlanOption]:
    """Return the best options that may turn out fastest, at most `limit`, in the order in which a trial visits them.

    At most one of them drifts, as changes between two such strategies are merges.
    """
    ranked = sorted(options, key=lambda option: -option.tokens_per_s / required_gain(option))
    if not ranked:
        return []
    least = MIN_PLAUSIBLE_SPEED * ranked[0].tokens_per_s
    near = [option for option in ranked if option.tokens_per_s >= least]
    drifting = pick_fastest([option for option in near if option.roster.sync.drifts])
    best = [option for option in near if option is drifting or not option.roster.sync.drifts][:limit]
    return sorted(best, key=lambda option: (option.roster.sync.drifts, not option.is_exact))


def typical_step_s(visits: Sequence[Sequence[Sequence[float]]], every: int) -> float:
    """Return the typical seconds of a step on the slowest rank: the median of its means over whole rounds.

    `visits`: of each series of consecutive steps the seconds of each step by rank; `every`: steps of a round.
    """
    rounds = [steps[first : first + every] for steps in visits for first in range(0, len(steps) - every + 1, every)]
    rounds = rounds or [[step for steps in visits for step in steps]]  # shorter than a round
    means = [[math.fsum(of_rank) / len(steps) for of_rank in zip(*steps, strict=True)] for steps in rounds]
    return max(sample_median(of_rank) for of_rank in zip(*means, strict=True))


class StrategyTrial:
    """One trial: which strategy the next step uses, and in the end which one was fastest."""

    def __init__(self, candidates: Sequence[PlanOption], max_steps: float = math.inf) -> None:
        """`candidates`: two or more, in the order of `plausible_options`. None is visited again beyond `max_steps`."""
        self._candidates, self._steps_left = list(candidates), max_steps
        self._seen: dict[str, list[_Visit]] = {str(one.roster.sync): [] for one in candidates}
        self._queue = list(candidates[1:])
        self.current = candidates[0]
        self.comparison: StrategyComparison | None = None  # when it is over
        self._begin_visit()

    @property
    def is_settling(self) -> bool:
        """Return whether the next step follows a change, and is not measured."""
        return self._to_settle > 0

    def restart(self) -> bool:
        """Measure all candidates anew, first the current one: the ranks have other shares than before.

        Return False, and go on, if that would take more steps than are left.
        """
        if num_trial_steps(self._candidates) > self._steps_left:
            return False
        self._seen = {sync: [] for sync in self._seen}
        self._queue = [option for option in self._candidates if option is not self.current]
        self._begin_visit()
        return True

    def _begin_visit(self) -> None:
        sync = self.current.roster.sync
        self._to_settle, self._to_measure = _visit_steps(sync)
        self._steps_left -= self._to_settle + self._to_measure
        self._visit = _Visit(sync.every)
        self._seen[str(sync)].append(self._visit)

    def observe_step(self, wall_s: Sequence[float]) -> bool:
        """Add a step that used the current strategy: its time on each rank. Return whether `current` has changed, or
        the trial is over.
        """
        if self._to_settle:
            self._to_settle -= 1
            return False
        self._visit.steps.append(list(wall_s))
        if len(self._visit.steps) < self._to_measure:
            return False
        if not self._queue:
            self._queue = self._unclear_pair()
        if self._queue:
            self.current = self._queue.pop(0)
            self._begin_visit()
        else:
            self.current = self._fastest()
            self.comparison = self._compare()
        return True

    def _fastest(self) -> PlanOption:
        """Return the candidate that gains what is required of it over those before it."""
        best = self._candidates[0]
        for option in self._candidates[1:]:
            if self._gain(best, option)[0] > self._needed_gain(best, option):
                best = option
        return best

    def _unclear_pair(self) -> list[PlanOption]:
        """Return the winner and the first candidate that may be the better one, to be measured again; or nothing."""
        best = self._fastest()
        for option in self._candidates:
            if option is best or max(len(self._seen[str(one.roster.sync)]) for one in (best, option)) >= MAX_VISITS:
                continue
            first, second = sorted((best, option), key=self._candidates.index)
            if num_trial_steps([first, second]) > self._steps_left:
                continue
            gain, error = self._gain(first, second)
            if abs(gain - self._needed_gain(first, second)) < STANDARD_ERRORS * error:
                return [first, second]
        return []

    def _gain(self, before: PlanOption, option: PlanOption) -> tuple[float, float]:
        """Return how many times as fast `option` is as `before`, and the standard error of that."""
        (slow_s, slow_error_s), (fast_s, fast_error_s) = (self._measured(one) for one in (before, option))
        gain, slow_error, fast_error = slow_s / fast_s, slow_error_s / slow_s, fast_error_s / fast_s
        return gain, gain * math.sqrt(slow_error * slow_error + fast_error * fast_error)  # alike on all machines

    @staticmethod
    def _needed_gain(before: PlanOption, option: PlanOption) -> float:
        return max(MIN_GAIN, required_gain(option) / required_gain(before))

    def _measured(self, option: PlanOption) -> tuple[float, float]:
        """Return (typical seconds of a step on the slowest rank, standard error) over all visits."""
        sync = option.roster.sync
        visits = self._seen[str(sync)]
        step_s = typical_step_s([visit.steps for visit in visits], sync.every)
        # The variance of a step, from half the mean square of differences of two of them.
        squares = [difference * difference for visit in visits for difference in visit.differences()]
        variance = math.fsum(squares) / (2 * max(1, len(squares)))
        return step_s, MEDIAN_ERROR_FACTOR * math.sqrt(variance / sum(len(visit.steps) for visit in visits))

    def _compare(self) -> StrategyComparison:
        ranked = sorted(self._candidates, key=lambda option: (option is not self.current, self._measured(option)[0]))
        measured = []
        for option in ranked:
            measured_s, error_s = self._measured(option)
            num_steps = sum(len(visit.steps) for visit in self._seen[str(option.roster.sync)])
            measured.append(MeasuredStrategy(sync=str(option.roster.sync), predicted_s=option.step_s,
                                             measured_s=measured_s, error_s=error_s, num_steps=num_steps))  # fmt: skip
        return StrategyComparison(chosen=str(self.current.roster.sync), measured=measured)


class _Visit:
    """Consecutive steps with one strategy."""

    def __init__(self, every: int) -> None:
        self.every = every  # steps of a round
        self.steps: list[list[float]] = []  # seconds by rank

    def differences(self) -> list[float]:
        """Return the change of the slowest rank's time from each step to the same step of the next round."""
        slowest = [max(wall_s) for wall_s in self.steps]
        return [later - earlier for earlier, later in zip(slowest, slowest[self.every :], strict=False)]


def num_trial_steps(candidates: Sequence[PlanOption]) -> int:
    """Return how many steps a trial takes if every candidate is visited once."""
    return sum(sum(_visit_steps(option.roster.sync)) for option in candidates)


def _visit_steps(sync: SyncSpec) -> tuple[int, int]:
    """Return (steps that settle, steps that are measured) of a visit: whole rounds of replicas that drift."""
    return max(SETTLE_STEPS, sync.every), max(MIN_ROUNDS, -(-MIN_STEPS // sync.every)) * sync.every
