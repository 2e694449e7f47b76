"""Has the link between the ranks changed for good, and does another way to agree train faster over it as it is now?

A run with --sync auto begins with what the planner chose. All ranks then hear how long each step's exchange was in
flight on each of them; the rank that was ready last waited for nobody, so the least over ranks is the link's. A change
must last a whole window, both halves of it, and be larger than what a prediction can err. The links of the planner's
cluster are scaled by it, and the ways are priced anew.

Only ways that keep replicas equal are chosen from here: replicas that drift hold other optimizers' states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from evener.core.prediction import Cluster, Job, Option
from evener.core.roster import Roster
from evener.core.units import median, seconds
from evener.plan.cluster import scaled
from evener.plan.cost import price
from evener.plan.options import BUCKETED, CANDIDATES, fastest, in_best_buckets, makes_sense, obstacle

WINDOW = 50  # steps
UNFORESEEN = 2.0  # times what was predicted, before anything was measured: beyond this it is another link
CHANGED = 1.5  # times what was measured
GAIN = 1.05  # in tokens/s: for less a run keeps its way


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Another way to agree, and why."""

    option: Option
    why: str


class Chooser:
    """Fed with every step; pure, so that ranks that hear the same choose the same. Hosts of the cluster that are not in
    the Roster are gone.
    """

    def __init__(self, job: Job, cluster: Cluster, roster: Roster) -> None:
        self._job, self._cluster = job, cluster
        self._expected_s, self._is_measured = self._in_flight_s(roster.by_place()), False
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def hear(self, in_flight_s: Sequence[float], roster: Roster) -> Choice | None:
        """A step's exchange took so long on each rank, of this Roster; NaN where nobody measured it."""
        took_s = min(in_flight_s)
        if not took_s > 0 or not self._expected_s:
            return None
        self._seen.append(took_s)
        if len(self._seen) < WINDOW:
            return None
        seen = list(self._seen)
        halves = [median(seen[: WINDOW // 2]) or 0.0, median(seen[WINDOW // 2 :]) or 0.0]
        most = CHANGED if self._is_measured else UNFORESEEN
        if min(halves) <= most * self._expected_s and max(halves) >= self._expected_s / most:
            if not self._is_measured and max(halves) < CHANGED * min(halves):  # else it is changing just now
                self._expected_s, self._is_measured = median(seen) or 0.0, True
            return None
        return self._choose(roster.by_place(), median(seen) or 0.0)

    def _choose(self, roster: Roster, took_s: float) -> Choice | None:
        """The link is another one."""
        was_s, predicted_s = self._expected_s, self._in_flight_s(roster)
        before, factor = self._cluster, was_s / took_s
        for _ in range(4):  # latencies stay as they are
            self._cluster = scaled(before, factor)
            factor *= self._in_flight_s(roster) / (predicted_s * took_s / was_s)
        present = price(self._job, self._cluster, roster)
        options = [in_best_buckets(self._job, self._cluster, roster.agreeing_by(sync))
                   for sync in CANDIDATES if sync.kind in BUCKETED and makes_sense(sync, self._job)]  # fmt: skip
        budget = self._job.spec.train.loss_budget / 100
        able = [option for option in options if not obstacle(option, self._cluster, budget)]
        best = fastest(able) or present
        gain = best.tokens_per_s / present.tokens_per_s
        if best.roster.sync == roster.sync or gain < GAIN:
            best = present
        # As near to the prediction as before: what was not known of the link is not known of another way either.
        self._expected_s, self._is_measured = self._in_flight_s(best.roster) * was_s / predicted_s, False
        self._seen.clear()
        if best is present:
            return None
        why = (
            f"an exchange takes {seconds(took_s)} and not {seconds(was_s)}: with {best.roster.sync} the run is "
            f"predicted to be {gain:.2f} times as fast as with {roster.sync}"
        )
        return Choice(option=best, why=why)

    def _in_flight_s(self, roster: Roster) -> float:
        return price(self._job, self._cluster, roster).ranks[0].sync_s or 0.0
