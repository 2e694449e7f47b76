"""Fixed membership: the ranks that start a run are those that end it.

Shares of the batch follow the ranks' speed, or the weights that ranks set. With --sync auto the sync strategy is the
one that was fastest in a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from evener.core.base.errors import RunError
from evener.core.run.prediction import Cluster
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import Roster, weighted_shares
from evener.core.run.run_spec import RunSpec
from evener.plan.choice.cluster import with_added_hosts
from evener.plan.choice.strategy_selector import StepTimes, StrategySelector
from evener.plan.choice.strategy_trial import StrategyComparison
from evener.plan.shares.rebalance import LoadBalancer
from evener.worker.membership import TrainerView
from evener.worker.membership.rollback import RegroupExit
from evener.worker.record.run_log import RunLog
from evener.worker.record.step_recorder import StepRecorder, StepReport
from evener.worker.state.checkpointer import Checkpointer

T = TypeVar("T")


class FixedMembership:
    """Membership of ranks that all exit when one is lost: the launcher restarts them, or the user resumes the run.

    With one rank it is also the fake of a Membership for tests: it communicates with nobody.
    """

    is_epoch_lost = False
    last_result: Any = None

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._is_stop_requested = False  # a stop request arrived with an earlier flush
        self._weights = roster.mean_shares
        self._balancer: LoadBalancer | None = None
        self._share_unit: int | None = None
        self._selector: StrategySelector | None = None
        self._last_trial_step, self._was_trying = 0, False  # of strategies, in an earlier membership epoch

    def start(self, trainer: TrainerView, checkpointer: Checkpointer, run_log: RunLog, first_step: int) -> int:
        return first_step

    def run_collectively(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)

    def retry_after_regroup(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)

    def run_or_restart(self, fn: Callable[[], object]) -> None:
        fn()

    def receive_reports(self, recorder: StepRecorder, step: int) -> bool:
        stops = recorder.receive_due_reports()
        return stops or self._is_stop_requested

    def commit_gradients(self, loss_sum: Tensor) -> float | None:
        return None

    def recover_from(self, error: RuntimeError) -> bool:
        raise error

    def before_step(self, recorder: StepRecorder, checkpointer: Checkpointer, step: int) -> None:
        """If a host leaves, save a checkpoint and regroup. Else, if a checkpoint was requested, save it.

        After a requested checkpoint, regroup if hosts wait to join, else continue. A stop request that arrives
        meanwhile takes effect after one more step.
        """
        if recorder.is_leave_requested:
            recorder.flush()
            checkpointer.save(step, None, finalize=True)
            raise RegroupExit
        if recorder.is_save_requested:
            self._is_stop_requested = recorder.flush()
            checkpointer.save(step, None, finalize=self.will_restart_from_checkpoint(recorder))
            self.after_save(recorder)
            recorder.begin_step()

    def will_restart_from_checkpoint(self, recorder: StepRecorder) -> bool:
        return recorder.is_regroup_requested

    def after_save(self, recorder: StepRecorder) -> None:
        if recorder.is_regroup_requested:
            raise RegroupExit

    def enable_adaptation(
        self, spec: RunSpec, resolved: ResolvedRun | None, cluster: Cluster | None, *, fixed_micro_batch_size: bool
    ) -> str:
        warning = ""
        if spec.machine.shares == "auto" and self.roster.world_size > 1:
            warning = self.enable_balancing(fixed_micro_batch_size=fixed_micro_batch_size)
        cluster = with_added_hosts(cluster, self.roster) if cluster is not None else None
        may_change = spec.train.sync == "auto" and self.roster.world_size > 1 and not self.roster.sync.is_sharded
        if may_change and resolved is not None and cluster is not None:
            self._selector = StrategySelector(resolved.job, cluster, self._last_trial_step, was_trying=self._was_trying)
        return warning

    @property
    def is_undecided(self) -> bool:
        return self._was_trying if self._selector is None else self._selector.is_undecided

    def resume_strategy_trial(self) -> None:
        self._was_trying = True

    def begin_strategy_trial(self) -> None:
        if self._selector is not None:
            self.roster = self._selector.begin(self.roster)
            self._rebuild_balancer()

    def _rebuild_balancer(self) -> None:
        """Rebuild the load balancer if shares count the sequences of another number of steps than before."""
        if self._balancer is not None and self._balancer.every != self.roster.sync.every and not self._share_unit:
            self._balancer = LoadBalancer(self.roster, self._share_unit, previous=self._balancer)

    def take_comparison(self) -> StrategyComparison | None:
        comparison = None
        if self._selector is not None:
            comparison, self._selector.comparison = self._selector.comparison, None
        return comparison

    def enable_balancing(self, *, fixed_micro_batch_size: bool) -> str:
        """Let shares follow the ranks' speed until a rank sets a weight; return a warning if they cannot, else "".

        With `fixed_micro_batch_size` shares consist of whole micro-batches of one common size. If that leaves no choice
        of shares, they stay as they are.
        """
        if fixed_micro_batch_size:
            self.roster = self.roster.replace_shares(self.roster.shares)
        self._share_unit = self._equalize_micro_batches() if fixed_micro_batch_size else None
        if fixed_micro_batch_size and self._share_unit is None:
            sizes = sorted({size for member in self.roster.members for size in member.micro_batch_sizes})
            finer = self.roster.largest_uniform_micro_batch()
            return (
                f"shares stay {' : '.join(map(str, self.roster.shares))} whatever the ranks' speed: micro-batches of "
                f"{' and '.join(map(str, sizes))} sequences keep their size, for a compiled model or a BatchNorm"
                + (f"; with --micro-batch {finer} they would follow it" if finer else "")
            )
        self._balancer = LoadBalancer(self.roster, self._share_unit)
        return ""

    def _equalize_micro_batches(self) -> int | None:
        """Give all micro-batches one size, so that shares change by whole micro-batches, and return it.

        Try the size that all micro-batches have now, then the largest size allowed if it is the same on all ranks.
        Return None if neither divides the batch and leaves a choice of shares.
        """
        roster = self.roster
        sizes = {size for member in roster.members for size in member.micro_batch_sizes}
        for candidates in (sizes, {member.micro_batch for member in roster.members}):
            size = min(candidates)
            if len(candidates) > 1 or roster.batch % size or roster.batch // size <= roster.world_size:
                continue
            shares = [size * num for num in weighted_shares(roster.batch // size, roster.shares)]
            if all(share or not old_share for share, old_share in zip(shares, roster.shares, strict=True)):
                self.roster = roster.replace_shares(shares, size)
                return size
        return None

    def update_roster(self, reports: Sequence[StepReport], next_step: int) -> Roster | None:
        """Return the Roster from `next_step` on, given the reports of all ranks; None if nothing changes.

        Shares change if a rank has set another weight, or if the ranks' times call for it. The sync strategy changes in
        a trial, and after it.
        """
        if not all(math.isnan(report.share_weight) for report in reports):
            self._balancer = None
            if (roster := self._apply_weights(reports, next_step)) is not None:
                return roster
        step = int(reports[0].step)
        if step < 0:
            return None
        # A step in which an idle rank is tried shows no strategy's time.
        if self._selector is not None and not (self._balancer is not None and self._balancer.is_trying):
            times = StepTimes(
                *([getattr(report, name) for report in reports] for name in ("wall_s", "work_s", "in_flight_s"))
            )
            switch = self._selector.observe_step(step, times, self.roster, next_step)
            if switch is not None:
                self.roster = self.roster.with_sync(
                    switch.sync, switch.bucket_bytes, next_step, why=switch.reason, is_trial=switch.is_trial
                )
                self._rebuild_balancer()
                return self.roster
        if self._balancer is None:
            return None
        change = self._balancer.observe_step(
            step,
            [report.work_s for report in reports],
            [report.optimizer_s for report in reports],
            next_step,
            self._selector is not None and self._selector.is_undecided,
        )
        if change is None:
            return None
        if self._selector is not None:
            self._selector.adopt_shares(next_step)
        self.roster = self.roster.with_shares(
            change.shares, next_step, self._share_unit, why=change.reason, is_trial=change.is_trial
        )
        self._weights = self.roster.mean_shares
        return self.roster

    def _apply_weights(self, reports: Sequence[StepReport], next_step: int) -> Roster | None:
        """Set shares in proportion to the weights."""
        weights = [weight if math.isnan(report.share_weight) else report.share_weight
                   for weight, report in zip(self._weights, reports, strict=True)]  # fmt: skip
        if weights == self._weights:
            return None
        if not any(weights):
            raise RunError(f"step {next_step}: the weight of every rank is 0: no rank would train")
        self._weights = weights
        self.roster = self.roster.with_weights(weights, next_step)
        return self.roster
