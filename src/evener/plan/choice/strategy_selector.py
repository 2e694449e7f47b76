"""Select the sync strategy of a run with --sync auto by measurement, and again when machines or links have changed.

    start           the best strategies by prediction are tried (strategy_trial.py), the fastest one goes on
    meanwhile       a step that takes 10 % longer or shorter than measured, over a window of steps, means another link
                    or another speed of the hosts: all strategies are predicted anew, from the times that exchanges and
                    computing take now, and corrected by what the last trial measured of each; where another one may be
                    faster, they are tried again. So are they in the first window after a resume or a change of
                    membership, and always if that interrupted a trial

Only strategies within the loss budget take part. A lossy strategy is left for one whose replicas drift by way of ddp,
in whose exact sums all that it has not sent yet goes out.

No clock and no torch: all ranks decide alike from the same step reports.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from evener.core.base.units import format_seconds, sample_median
from evener.core.run.prediction import Cluster, Job, PlanOption
from evener.core.run.roster import DDP, Roster, SyncSpec, parse_sync
from evener.plan.choice.cluster import with_scaled_links
from evener.plan.choice.options import (
    CANDIDATE_STRATEGIES,
    MIN_GAIN,
    is_applicable,
    pick_fastest,
    required_gain,
    why_option_rejected,
    with_best_bucket_size,
)
from evener.plan.choice.strategy_trial import (
    MAX_CANDIDATES,
    StrategyComparison,
    StrategyTrial,
    num_trial_steps,
    plausible_options,
    typical_step_s,
)
from evener.plan.cost.cost_model import predict_step

WINDOW = 50  # steps, or more for whole rounds of replicas that drift
CHANGED_FACTOR = 1.1  # times the expected time of a step, in both halves of a window
MAX_TRIAL_FRACTION = 0.1  # of the steps that are left, and of those since the last trial unless a large gain is likely
LARGE_GAIN = 1.25  # by prediction


class StepTimes(NamedTuple):
    """The times of a step on each rank, in seconds."""

    wall_s: Sequence[float]
    work_s: Sequence[float]  # input, forward and backward
    in_flight_s: Sequence[float]  # with an exchange in flight; NaN where not measured


class StrategySwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Another sync strategy, and the reason."""

    sync: SyncSpec
    bucket_bytes: int = 0
    reason: str
    is_trial: bool = False


class StrategySelector:
    """Observes every step and decides when to switch the strategy.

    Decisions depend only on the observed times, so all ranks decide alike. Hosts of the cluster that are not in the
    Roster have left the run.
    """

    def __init__(self, job: Job, cluster: Cluster, last_trial_step: int = 0, *, was_trying: bool = False) -> None:
        """`last_trial_step`: the step before which the last trial ended; `was_trying`: one was interrupted."""
        self._job, self._cluster, self._num_steps = job, cluster, job.spec.train.steps
        self._expected_s: float | None = None  # of a step; None until a trial or a window of steps has measured it
        self._bias: dict[SyncSpec, float] = {}  # in the last trial: seconds of a step / predicted ones
        self._window: deque[StepTimes] = deque()
        self._trial: StrategyTrial | None = None
        self._measured: dict[SyncSpec, list[StepTimes]] = {}  # in the trial
        self._from_step = 0  # reports of earlier steps are of another strategy
        self._last_step = -1  # that was observed
        self._last_times: StepTimes | None = None  # of it, in a trial
        self.last_trial_step, self._was_trying = last_trial_step, was_trying
        self._next: StrategySwitch | None = None  # after a step with ddp
        self.comparison: StrategyComparison | None = None  # of the last trial that has ended

    @property
    def is_trying(self) -> bool:
        """Return whether a trial is under way."""
        return self._trial is not None

    @property
    def is_undecided(self) -> bool:
        """Return whether no strategy is chosen yet: a trial, or the change after it, is not over."""
        return self.is_trying or self._was_trying or self._next is not None

    def begin(self, roster: Roster) -> Roster:
        """Return the Roster with the strategy with which a new run begins: the first that is tried, or its own."""
        candidates = plausible_options(self._options(self._cluster, roster))
        max_steps = MAX_TRIAL_FRACTION * self._num_steps
        if len(candidates) < 2 or num_trial_steps(candidates) > max_steps:
            return roster
        self._trial = StrategyTrial(candidates, max_steps)
        first = candidates[0].roster
        return roster if first.sync == roster.sync else roster.replace_sync(first.sync, first.bucket_bytes)

    def adopt_shares(self, next_step: int) -> None:
        """Measure anew from `next_step` on, as the ranks then have other shares: a trial that is under way restarts."""
        if self._trial is not None and self._trial.restart():
            self._measured, self._from_step, self._last_times = {}, next_step, None

    def observe_step(self, step: int, times: StepTimes, roster: Roster, next_step: int) -> StrategySwitch | None:
        """Observe a step; return the strategy from `next_step` on if it is another one."""
        if self._next is not None:
            awaited, self._next, self._from_step = self._next, None, next_step
            return awaited
        if step < self._from_step:
            return None
        num_steps, self._last_step = step - max(self._last_step, self._from_step - 1), step
        if self._trial is not None:
            # A step whose report was lost in a checkpoint counts as the one before it, so that rounds stay whole.
            steps = [*[self._last_times or times] * (num_steps - 1), times]
            self._last_times = times
            return self._continue_trial(self._trial, steps, roster, next_step)
        self._window.append(times)
        if len(self._window) < 2 * _half_window(roster.sync):
            return None
        switch = self._reconsider(roster, next_step)
        if self._window:
            self._window.popleft()
        return switch

    def _continue_trial(self, trial: StrategyTrial, steps: Sequence[StepTimes], roster: Roster,
                        next_step: int) -> StrategySwitch | None:  # fmt: skip
        for times in steps:
            if not trial.is_settling:
                self._measured.setdefault(roster.sync, []).append(times)
            if trial.observe_step(times.wall_s):
                break
        else:
            return None
        if trial.comparison is None:
            return self._switch(trial.current, roster, next_step, "to compare step times", is_trial=True)
        self._trial, self.comparison, self.last_trial_step = None, trial.comparison, next_step
        self._expected_s = trial.comparison.measured[0].measured_s
        self._learn_bias(trial.comparison, trial.current.roster, roster)
        self._measured = {}
        return self._switch(trial.current, roster, next_step, "the result of the comparison")

    def _switch(self, option: PlanOption, roster: Roster, next_step: int, why: str, *,
                is_trial: bool = False) -> StrategySwitch | None:  # fmt: skip
        self._from_step, self._last_times = next_step, None
        self._window.clear()
        chosen = option.roster
        if chosen.sync == roster.sync:
            return None
        switch = StrategySwitch(sync=chosen.sync, bucket_bytes=chosen.bucket_bytes, reason=why, is_trial=is_trial)
        if chosen.sync.drifts and not roster.sync.drifts and not roster.sync.is_exact:
            self._next = switch
            return StrategySwitch(
                sync=DDP, reason=f"one step sends the remaining rounding errors of {roster.sync}", is_trial=True
            )
        return switch

    def _reconsider(self, roster: Roster, next_step: int) -> StrategySwitch | None:
        """Begin a trial if the last steps took another time than expected, and another strategy may be faster now."""
        times, half = list(self._window), _half_window(roster.sync)
        halves = [_typical_s(of_half, roster.sync) for of_half in (times[:half], times[half:])]
        if max(halves) > CHANGED_FACTOR * min(halves):  # it is still changing
            return None
        times, took_s = times[half:], halves[1]  # all of them since the change
        known_s = self._expected_s
        if known_s and min(halves) <= CHANGED_FACTOR * known_s and max(halves) >= known_s / CHANGED_FACTOR:
            return None
        self._expected_s = took_s
        self._window.clear()
        cluster = self._as_measured(times, roster)
        now = predict_step(self._job, cluster, roster.renumber_ranks())
        options = self._options(cluster, roster)
        if all(option.roster.sync != roster.sync for option in options):  # not within the budget any more
            self._expected_s = None  # of another strategy
            if (best := pick_fastest(options)) is None:
                return None
            why = why_option_rejected(now, cluster, self._job.spec.train.loss_budget / 100)
            return self._switch(best, roster, next_step, f"{roster.sync} is rejected with these ranks: {why}")
        candidates = self._candidates(options, now, took_s)
        num_steps, max_steps = num_trial_steps(candidates), MAX_TRIAL_FRACTION * (self._num_steps - next_step)
        if len(candidates) < 2 or num_steps > max_steps:
            best = pick_fastest(options) if self._was_trying else None
            self._was_trying = False
            return None if best is None else self._switch(best, roster, next_step, "a comparison was interrupted")
        is_large = any(LARGE_GAIN * self._expected_step_s(one, now, took_s) < took_s for one in candidates)
        is_due = is_large or self._was_trying or num_steps <= MAX_TRIAL_FRACTION * (next_step - self.last_trial_step)
        if not is_due:
            self._expected_s = None  # ask again after the next steps
            return None
        self._trial, self._was_trying = StrategyTrial(candidates, max_steps), False
        why = f"a step takes {format_seconds(took_s)}; step times are compared"
        return self._switch(self._trial.current, roster, next_step, why, is_trial=True)

    def _candidates(self, options: Sequence[PlanOption], now: PlanOption, took_s: float) -> list[PlanOption]:
        """Return the current strategy `now`, a step of which takes `took_s`, and those that may be faster, as a trial
        visits them. After a trial that was interrupted, all plausible ones may be.
        """
        needed = 0.0 if self._was_trying else MIN_GAIN / required_gain(now)
        faster = [option for option in options if option.roster.sync != now.roster.sync
                  and needed * required_gain(option) * self._expected_step_s(option, now, took_s) < took_s]  # fmt: skip
        tried = [now, *plausible_options(faster, MAX_CANDIDATES - 1)]
        return sorted(tried, key=lambda option: (option.roster.sync.drifts, not option.is_exact))  # stable

    def _learn_bias(self, comparison: StrategyComparison, chosen: Roster, roster: Roster) -> None:
        """Compare the times in the trial with what is predicted for the machines as the trial has shown them."""
        now = roster.replace_sync(chosen.sync, chosen.bucket_bytes)
        cluster, renumbered = self._as_measured(self._measured[chosen.sync], now), roster.renumber_ranks()
        self._bias = {}
        for one in comparison.measured:
            option = with_best_bucket_size(self._job, cluster, renumbered.replace_sync(sync := parse_sync(one.sync)))
            self._bias[sync] = one.measured_s / option.step_s

    def _expected_step_s(self, option: PlanOption, now: PlanOption, took_s: float) -> float:
        """Return the seconds of a step with `option` where one takes `took_s` with `now`: in the ratio that is
        predicted, corrected by what the last trial measured if it tried both.
        """
        biases = [self._bias.get(one.roster.sync, math.nan) for one in (option, now)]
        bias = 1.0 if math.isnan(sum(biases)) else biases[0] / biases[1]
        return bias * took_s * option.step_s / now.step_s

    def _options(self, cluster: Cluster, roster: Roster) -> list[PlanOption]:
        """Return what the strategies within the loss budget are predicted to take, with the shares of the Roster."""
        renumbered, budget = roster.renumber_ranks(), self._job.spec.train.loss_budget / 100
        options = [
            with_best_bucket_size(self._job, cluster, renumbered.replace_sync(sync))
            for sync in CANDIDATE_STRATEGIES
            if is_applicable(sync, self._job)
        ]
        return [option for option in options if not why_option_rejected(option, cluster, budget)]

    def _as_measured(self, times: Sequence[StepTimes], roster: Roster) -> Cluster:
        """Return the cluster with links and hosts as fast as these steps show."""
        roster = roster.renumber_ranks()
        predicted, slowness = predict_step(self._job, self._cluster, roster), dict.fromkeys(roster.hosts, 0.0)
        for member in roster.members:
            computed_s = predicted.ranks[member.rank].cost.compute_s
            took_s = sample_median([one.work_s[member.rank] for one in times])
            if computed_s and took_s > 0:
                slowness[member.host] = max(slowness[member.host], took_s / computed_s)
        hosts = dict(self._cluster.hosts)
        for name, factor in slowness.items():
            if factor:
                rates = {dtype: rate / factor for dtype, rate in hosts[name].tokens_per_s.items()}
                hosts[name] = msgspec.structs.replace(hosts[name], tokens_per_s=rates)
        cluster = msgspec.structs.replace(self._cluster, hosts=hosts)
        in_flight_s = math.fsum(min(one.in_flight_s) for one in times) / len(times)
        if not in_flight_s > 0:
            return cluster
        for _ in range(4):  # latencies are not scaled, and exchanges overlap with computing
            predicted_s = predict_step(self._job, cluster, roster).ranks[0].sync_s
            if not predicted_s:
                break
            cluster = with_scaled_links(cluster, predicted_s / in_flight_s)
        return cluster


def _typical_s(times: Sequence[StepTimes], sync: SyncSpec) -> float:
    return typical_step_s([[one.wall_s for one in times]], sync.every)


def _half_window(sync: SyncSpec) -> int:
    """Return the steps of half a window: whole rounds."""
    return -(-(WINDOW // 2) // sync.every) * sync.every
