"""Who takes part when nobody comes or goes? The ranks that began; their shares follow their speed, or their
weights, and with --sync auto their way to agree follows the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.core.errors import RunError
from evener.core.prediction import Cluster, Job
from evener.core.resolve import Resolved
from evener.core.roster import Roster
from evener.core.spec import RunSpec
from evener.plan.options import BUCKETED
from evener.plan.rebalance import Balancer
from evener.plan.rechoose import Chooser
from evener.worker.record import News


class Fixed:
    """A run that loses a rank ends: whoever started it hears which, and can resume it."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._weights = [float(share) for share in roster.shares]
        self._balancer: Balancer | None = None
        self._whole: int | None = None
        self._chooser: Chooser | None = None

    def follow(self, spec: RunSpec, resolved: Resolved | None, cluster: Cluster | None, *, one_size: bool) -> str:
        remark = ""
        if spec.machine.shares == "auto" and self.roster.world_size > 1:
            remark = self.balance(one_size=one_size)
        may_choose = spec.train.sync == "auto" and self.roster.sync.kind in BUCKETED  # replicas that drift go on so
        if may_choose and resolved is not None and cluster is not None:
            self._chooser = Chooser(Job(spec=spec, shape=resolved.shape), cluster, self.roster)
        return remark

    def balance(self, *, one_size: bool) -> str:
        """From now on shares follow the ranks' speed, until one of them tells a weight; or why they do not.

        With `one_size` only in whole micro-batches of the size that all have, if that leaves something to choose.
        """
        sizes = sorted({size for member in self.roster.members for size in member.micro_batches})
        if one_size and (len(sizes) > 1 or self.roster.batch // sizes[0] <= self.roster.world_size):
            shares, told = " : ".join(map(str, self.roster.shares)), " and ".join(map(str, sizes))
            return (
                f"shares stay {shares} whatever the ranks' speed: micro-batches of {told} sequences keep their size, "
                "for a compiled model or a BatchNorm"
            )
        self._whole = sizes[-1] if one_size else None
        self._balancer = Balancer(self.roster, self._whole)
        return ""

    def hear(self, news: Sequence[News], next_step: int) -> Roster | None:
        """Other shares, where the ranks' times ask for them or a rank told another weight than before; or another way
        to agree, where the link does.
        """
        choice = self._chooser.hear([told.in_flight_s for told in news], self.roster) if self._chooser else None
        if choice is not None:
            found = choice.option.roster
            self.roster = self.roster.with_sync(found.sync, found.bucket_bytes, next_step, why=choice.why)
            return self.roster
        if not all(math.isnan(told.weight) for told in news):
            self._balancer = None
            return self._weigh(news, next_step)
        step = int(news[0].step)
        if self._balancer is None or step < 0:
            return None
        change = self._balancer.hear(step, [told.took_s for told in news], next_step)
        if change is None:
            return None
        self._weights = [float(share) for share in change.shares]
        self.roster = self.roster.with_shares(
            change.shares, next_step, self._whole, why=change.why, is_trial=change.is_trial
        )
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
