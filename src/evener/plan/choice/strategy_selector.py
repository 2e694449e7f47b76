"""Strategy selection during a run: switch the sync strategy when the link between the ranks has changed for good.

A run with --sync auto starts with the planner's choice. In each step every rank receives how long the exchange was in
flight on each rank. The rank that was ready last waited for no other, so the minimum over ranks is the link's time. A
change of that time must exceed the prediction error in both halves of a window of steps. Then the links of the
planner's cluster are scaled by the change, and all strategies are predicted again.

The candidates keep replicas equal. DiLoCo is not among them: its replicas have per-rank optimizer states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from evener.core.base.units import format_seconds, sample_median
from evener.core.run.prediction import Cluster, Job, PlanOption
from evener.core.run.roster import Roster
from evener.plan.choice.cluster import with_scaled_links
from evener.plan.choice.options import (
    CANDIDATE_STRATEGIES,
    is_applicable,
    pick_fastest,
    why_option_rejected,
    with_best_bucket_size,
)
from evener.plan.cost.cost_model import predict_step

WINDOW = 50  # steps
UNFORESEEN_FACTOR = 2.0  # times the predicted time, before anything was measured: a larger factor is another link
CHANGED_FACTOR = 1.5  # times the measured time
MIN_SWITCH_GAIN = 1.05  # in tokens/s: for less a run keeps its strategy


class StrategySwitch(msgspec.Struct, frozen=True, kw_only=True):
    """Another sync strategy, and the reason."""

    option: PlanOption
    reason: str


class StrategySelector:
    """Observes every step and decides when to switch the strategy.

    Decisions depend only on the observed times, so all ranks decide alike. Hosts of the cluster that are not in the
    Roster have left the run.
    """

    def __init__(self, job: Job, cluster: Cluster, roster: Roster) -> None:
        self._job, self._cluster = job, cluster
        self._expected_s, self._is_measured = self._in_flight_s(roster.renumber_ranks()), False
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def observe_step(self, in_flight_s: Sequence[float], roster: Roster) -> StrategySwitch | None:
        """Observe a step: the seconds for which its exchange was in flight on each rank, NaN where not measured."""
        took_s = min(in_flight_s)
        if not took_s > 0 or not self._expected_s:
            return None
        self._seen.append(took_s)
        if len(self._seen) < WINDOW:
            return None
        samples = list(self._seen)
        halves = [sample_median(samples[: WINDOW // 2]), sample_median(samples[WINDOW // 2 :])]
        factor = CHANGED_FACTOR if self._is_measured else UNFORESEEN_FACTOR
        if min(halves) <= factor * self._expected_s and max(halves) >= self._expected_s / factor:
            if not self._is_measured and max(halves) < CHANGED_FACTOR * min(halves):  # otherwise it is still changing
                self._expected_s, self._is_measured = sample_median(samples), True
            return None
        return self._select(roster.renumber_ranks(), sample_median(samples))

    def _select(self, roster: Roster, took_s: float) -> StrategySwitch | None:
        """Scale the links by the change and return the best strategy over them; None to keep the current one."""
        expected_s, predicted_s = self._expected_s, self._in_flight_s(roster)
        before, factor = self._cluster, expected_s / took_s
        for _ in range(4):  # iterate, because latencies are not scaled
            self._cluster = with_scaled_links(before, factor)
            factor *= self._in_flight_s(roster) / (predicted_s * took_s / expected_s)
        current = predict_step(self._job, self._cluster, roster)
        options = [
            with_best_bucket_size(self._job, self._cluster, roster.replace_sync(sync))
            for sync in CANDIDATE_STRATEGIES
            if sync.has_buckets and is_applicable(sync, self._job)
        ]
        budget = self._job.spec.train.loss_budget / 100
        runnable = [option for option in options if not why_option_rejected(option, self._cluster, budget)]
        best = pick_fastest(runnable) or current
        gain = best.tokens_per_s / current.tokens_per_s
        if best.roster.sync == roster.sync or gain < MIN_SWITCH_GAIN:
            best = current
        # Keep the ratio of measured to predicted time, as if the model erred equally on this link for any strategy.
        self._expected_s, self._is_measured = self._in_flight_s(best.roster) * expected_s / predicted_s, False
        self._seen.clear()
        if best is current:
            return None
        why = (
            f"an exchange takes {format_seconds(took_s)} instead of {format_seconds(expected_s)}: with "
            f"{best.roster.sync} the run is "
            f"predicted to be {gain:.2f} times as fast as with {roster.sync}"
        )
        return StrategySwitch(option=best, reason=why)

    def _in_flight_s(self, roster: Roster) -> float:
        return predict_step(self._job, self._cluster, roster).ranks[0].sync_s or 0.0
