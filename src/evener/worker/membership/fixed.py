"""Fixed membership: the ranks that began. Shares follow their speed or their weights, and with --sync auto the sync
strategy follows the link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from evener.core.errors import RunError
from evener.core.prediction import Cluster
from evener.core.resolve import Resolved
from evener.core.roster import Roster, weighted_shares
from evener.core.spec import RunSpec
from evener.plan.options import BUCKETED
from evener.plan.rebalance import Balancer
from evener.plan.rechoose import Chooser
from evener.worker.journal import Journal
from evener.worker.keeper import Keeper
from evener.worker.membership import Learner
from evener.worker.membership.back import Regroup
from evener.worker.record import News, Recorder

T = TypeVar("T")


class Fixed:
    """Membership of ranks that end when they lose one: the launcher restarts them, or the user resumes the run."""

    is_lost = False
    result: Any = None

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._stops = False  # a stop request arrived with an earlier flush
        self._weights = roster.mean_shares
        self._balancer: Balancer | None = None
        self._whole: int | None = None
        self._chooser: Chooser | None = None

    def begin(self, learner: Learner, keeper: Keeper, journal: Journal, first: int) -> int:
        return first

    def together(self, do: Callable[..., T], *args: Any) -> T:
        return do(*args)

    def again(self, do: Callable[..., T], *args: Any) -> T:
        return do(*args)

    def listen(self, recorder: Recorder, step: int) -> bool:
        stops = recorder.hear()
        return stops or self._stops

    def agree(self, loss_sum: Tensor) -> float | None:
        return None

    def is_behind(self, error: RuntimeError) -> bool:
        raise error

    def before_step(self, recorder: Recorder, keeper: Keeper, step: int) -> None:
        """Save and regroup if a host leaves; save and continue if a checkpoint was requested.

        In the second case one more step follows if a stop request arrives meanwhile.
        """
        if recorder.leaves:
            recorder.flush()
            keeper.save(step, None, concludes=True)
            raise Regroup
        if recorder.saves:
            self._stops = recorder.flush()
            keeper.save(step, None, concludes=self.begins_anew(recorder))
            self.after_save(recorder)
            recorder.begin()

    def begins_anew(self, recorder: Recorder) -> bool:
        return recorder.regroups

    def after_save(self, recorder: Recorder) -> None:
        if recorder.regroups:
            raise Regroup

    def follow(self, spec: RunSpec, resolved: Resolved | None, cluster: Cluster | None, *, one_size: bool) -> str:
        warning = ""
        if spec.machine.shares == "auto" and self.roster.world_size > 1:
            warning = self.balance(one_size=one_size)
        # Drifting replicas keep their strategy.
        may_choose = spec.train.sync == "auto" and self.roster.sync.kind in BUCKETED and self.roster.world_size > 1
        is_known = cluster is not None and cluster.hosts.keys() >= {*self.roster.hosts}  # no host was added to the run
        if may_choose and resolved is not None and cluster is not None and is_known:
            self._chooser = Chooser(resolved.job, cluster, self.roster)
        return warning

    def balance(self, *, one_size: bool) -> str:
        """Let shares follow the speed of ranks until one of them sets a weight; if they cannot, return a warning.

        With `fixed_micro_batch_size` shares are whole micro-batches of one common size, if that leaves a choice.
        """
        if one_size:
            self.roster = self.roster.divided(self.roster.shares)
        self._whole = self._begin_in_whole() if one_size else None
        if one_size and self._whole is None:
            sizes = sorted({size for member in self.roster.members for size in member.micro_batches})
            finer = self.roster.micro_batch_of_two_each()
            return (
                f"shares stay {' : '.join(map(str, self.roster.shares))} whatever the ranks' speed: micro-batches of "
                f"{' and '.join(map(str, sizes))} sequences keep their size, for a compiled model or a BatchNorm"
                + (f"; with --micro-batch {finer} they would follow it" if finer else "")
            )
        self._balancer = Balancer(self.roster, self._whole)
        return ""

    def _begin_in_whole(self) -> int | None:
        """Return the size of the micro-batches that shares consist of, for a compiled model: the common size, or the
        largest allowed one if it divides the batch. Return None where it leaves no choice of shares.
        """
        roster = self.roster
        sizes = {size for member in roster.members for size in member.micro_batches}
        for candidates in (sizes, {member.micro_batch for member in roster.members}):
            size = min(candidates)
            if len(candidates) > 1 or roster.batch % size or roster.batch // size <= roster.world_size:
                continue
            shares = [size * num for num in weighted_shares(roster.batch // size, roster.shares)]
            if all(share or not old_share for share, old_share in zip(shares, roster.shares, strict=True)):
                self.roster = roster.divided(shares, size)
                return size
        return None

    def hear(self, news: Sequence[News], next_step: int) -> Roster | None:
        """Return a new Roster with other shares, where the ranks' times call for them or a rank changed its weight, or
        with another sync strategy, where the link calls for it; None if nothing changes.
        """
        if not all(math.isnan(report.weight) for report in news):
            self._balancer = None
            if (roster := self._weigh(news, next_step)) is not None:
                return roster
        choice = self._chooser.hear([report.in_flight_s for report in news], self.roster) if self._chooser else None
        if choice is not None:
            chosen = choice.option.roster
            self.roster = self.roster.with_sync(chosen.sync, chosen.bucket_bytes, next_step, why=choice.why)
            return self.roster
        step = int(news[0].step)
        if self._balancer is None or step < 0:
            return None
        change = self._balancer.hear(
            step, [report.took_s for report in news], [report.update_s for report in news], next_step
        )
        if change is None:
            return None
        self.roster = self.roster.with_shares(
            change.shares, next_step, self._whole, why=change.why, is_trial=change.is_trial
        )
        self._weights = self.roster.mean_shares
        return self.roster

    def _weigh(self, news: Sequence[News], next_step: int) -> Roster | None:
        """Set shares in proportion to the weights."""
        weights = [weight if math.isnan(report.weight) else report.weight
                   for weight, report in zip(self._weights, news, strict=True)]  # fmt: skip
        if weights == self._weights:
            return None
        if not any(weights):
            raise RunError(f"step {next_step}: the weight of every rank is 0: no rank would train")
        self._weights = weights
        self.roster = self.roster.with_weights(weights, next_step)
        return self.roster
