"""Who takes part when nobody comes or goes? The ranks that began; their shares follow their speed, or their
weights, and with --sync auto their way to agree follows the link.
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
    """Ranks that lose one end: whoever started them hears which, and they begin again, or somebody resumes the run."""

    is_lost = False
    result: Any = None

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._stops = False  # by what was heard before it was asked for
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
        heard = recorder.hear()
        return heard or self._stops

    def agree(self, loss_sum: Tensor) -> float | None:
        return None

    def is_behind(self, error: RuntimeError) -> bool:
        raise error

    def before_step(self, recorder: Recorder, keeper: Keeper, step: int) -> None:
        """Where a host is to leave, all save what they have learned, and go to another world. Where somebody asked for
        a checkpoint, they save and go on: one more step, if meanwhile they heard that they stop.
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
        remark = ""
        if spec.machine.shares == "auto" and self.roster.world_size > 1:
            remark = self.balance(one_size=one_size)
        # Replicas that drift go on so.
        may_choose = spec.train.sync == "auto" and self.roster.sync.kind in BUCKETED and self.roster.world_size > 1
        is_known = cluster is not None and cluster.hosts.keys() >= {*self.roster.hosts}  # none was added to the run
        if may_choose and resolved is not None and cluster is not None and is_known:
            self._chooser = Chooser(resolved.job, cluster, self.roster)
        return remark

    def balance(self, *, one_size: bool) -> str:
        """From now on shares follow the ranks' speed, until one of them tells a weight; or why they do not.

        With `one_size` only in whole micro-batches of a size that all have, if that leaves something to choose.
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
        """The size of which shares consist from now on, of a compiled model: that of all micro-batches, or the largest
        that was allowed where the batch consists of such. None where it leaves nothing to choose.
        """
        roster = self.roster
        sizes = {size for member in roster.members for size in member.micro_batches}
        for of_all in (sizes, {member.micro_batch for member in roster.members}):
            size = min(of_all)
            if len(of_all) > 1 or roster.batch % size or roster.batch // size <= roster.world_size:
                continue
            shares = [size * num for num in weighted_shares(roster.batch // size, roster.shares)]
            if all(share or not before for share, before in zip(shares, roster.shares, strict=True)):
                self.roster = roster.divided(shares, size)
                return size
        return None

    def hear(self, news: Sequence[News], next_step: int) -> Roster | None:
        """Other shares, where the ranks' times ask for them or a rank told another weight than before; or another way
        to agree, where the link does.
        """
        if not all(math.isnan(told.weight) for told in news):
            self._balancer = None
            if (roster := self._weigh(news, next_step)) is not None:
                return roster
        choice = self._chooser.hear([told.in_flight_s for told in news], self.roster) if self._chooser else None
        if choice is not None:
            found = choice.option.roster
            self.roster = self.roster.with_sync(found.sync, found.bucket_bytes, next_step, why=choice.why)
            return self.roster
        step = int(news[0].step)
        if self._balancer is None or step < 0:
            return None
        change = self._balancer.hear(step, [told.took_s for told in news], [told.update_s for told in news], next_step)
        if change is None:
            return None
        self.roster = self.roster.with_shares(
            change.shares, next_step, self._whole, why=change.why, is_trial=change.is_trial
        )
        self._weights = self.roster.mean_shares
        return self.roster

    def _weigh(self, news: Sequence[News], next_step: int) -> Roster | None:
        """Shares in proportion to the weights."""
        weights = [known if math.isnan(told.weight) else told.weight
                   for known, told in zip(self._weights, news, strict=True)]  # fmt: skip
        if weights == self._weights:
            return None
        if not any(weights):
            raise RunError(f"step {next_step}: every rank's weight is 0: nobody is left to train")
        self._weights = weights
        self.roster = self.roster.with_weights(weights, next_step)
        return self.roster
