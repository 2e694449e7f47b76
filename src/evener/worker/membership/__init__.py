"""Decide which ranks take part in each step: the `Membership` protocol, which yields a Roster and handles changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from evener.core.run.prediction import Cluster
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import Roster
from evener.core.run.run_spec import RunSpec
from evener.plan.choice.strategy_trial import StrategyComparison
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.record.run_log import RunLog
from evener.worker.record.step_recorder import StepRecorder, StepReport
from evener.worker.state.checkpointer import Checkpointer
from evener.worker.state.training_state import TrainingState
from evener.worker.sync import Sync

T = TypeVar("T")


class TrainerView(Protocol):
    """The part of a rank that a change of membership needs."""

    spec: RunSpec
    group: ProcessGroups
    training_state: TrainingState
    recorder: StepRecorder
    changed_buffers: set[str]  # names of buffers that forward mutates

    @property
    def sync(self) -> Sync:
        """The sync strategy in force."""


class Membership(Protocol):
    """The Roster in force. All ranks hold the same one at the same step, derived from the same step reports."""

    roster: Roster
    last_result: Any  # of the last collective operation
    is_epoch_lost: bool  # a newer epoch exists: the work in progress will be discarded

    def start(self, trainer: TrainerView, checkpointer: Checkpointer, run_log: RunLog, first_step: int) -> int:
        """Wait until this rank takes part in the run, which may be training already; return the step to start with."""

    def run_collectively(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn` once on all ranks and return its JSON-serializable result.

        If the group broke after some ranks had finished it, skip it here and return their result.
        """

    def retry_after_regroup(self, fn: Callable[..., T], *args: Any) -> T:
        """Retry `fn` after every regroup until it succeeds. `fn` must be idempotent."""

    def run_or_restart(self, fn: Callable[[], object]) -> None:
        """Run a collective `fn` that cannot be repeated. If a peer is lost meanwhile, all ranks restart; where hosts
        come and go, from a checkpoint that is saved before.
        """

    def receive_reports(self, recorder: StepRecorder, step: int) -> bool:
        """Receive the step reports that are due before `step`; return whether all ranks stop now."""

    def commit_gradients(self, loss_sum: Tensor) -> float | None:
        """Confirm on all ranks that they hold all sums of a pass, before any rank updates; return the loss summed over
        ranks.

        It is a collective operation. Return None where nothing need be confirmed: with fixed membership, where a lost
        rank ends the run, and for drifting replicas that average no buffers.
        """

    def recover_from(self, error: RuntimeError) -> bool:
        """Regroup after a collective operation failed; return whether other ranks had finished it, so that it counts as
        done.

        The Roster is another one afterwards. Raise the error if it is no failure of a peer.
        """

    def before_step(self, recorder: StepRecorder, checkpointer: Checkpointer, step: int) -> None:
        """Before `step` begins, save a checkpoint if one was requested, and let hosts leave or join."""

    def will_restart_from_checkpoint(self, recorder: StepRecorder) -> bool:
        """Return whether all ranks will restart from the checkpoint that is due now, in another epoch."""

    def after_save(self, recorder: StepRecorder) -> None:
        """Let waiting hosts join after a checkpoint was saved."""

    def enable_adaptation(
        self, spec: RunSpec, resolved: ResolvedRun | None, cluster: Cluster | None, *, fixed_micro_batch_size: bool
    ) -> str:
        """Adapt what the spec leaves open to measurements: shares to the speed of ranks, the sync strategy to the link.

        `cluster` is the planner's model of the machines, None if there is none. With `fixed_micro_batch_size`
        micro-batches keep their sizes. Return a warning for the user, or "".
        """

    @property
    def is_undecided(self) -> bool:
        """Return whether a trial of sync strategies is not over."""

    def resume_strategy_trial(self) -> None:
        """Let a run that was interrupted in a trial try the strategies again; before `enable_adaptation`."""

    def begin_strategy_trial(self) -> None:
        """Let a new run with --sync auto begin with the first strategy that it tries; all ranks call it alike."""

    def take_comparison(self) -> StrategyComparison | None:
        """Return how the strategies of a trial compare, once after it has ended."""

    def update_roster(self, reports: Sequence[StepReport], next_step: int) -> Roster | None:
        """Return the Roster from `next_step` on, given the reports of all ranks; None if it is unchanged."""
