"""Elastic membership: ranks survive the loss of others, and repeat the work in progress without them.

Everything that ranks do together is a *collective operation*: the gradients of a pass, a verification, a checkpoint,
the end of the run. A rank that has finished one knows that all had begun it. So when an epoch is lost in the middle of
an operation, the ranks that meet in the next epoch are at the same operation or one apart, and what each has finished
decides how all go on:

    no rank has finished the operation    all repeat it; a pass with other shares of the same batch
    some rank has finished it             the others hold all of their part: they adopt its result and go on

For gradients this holds because a pass ends with a commit, in which each rank confirms that it holds all sums; no rank
updates before all have confirmed. Losses travel with the commit, so that no step's loss is lost with the rank that
computed it.

Drifting replicas take steps independently, and may be one step apart. The updates of a lost rank since the last
synchronization are lost. An exchange that completed on any rank is applied on all; any other counts as never begun, and
its updates are sent with the next one (`DiLoCo.adopt_roster`). Likewise, a step report that any rank received is not
sent again.

Hosts join between two steps, when all ranks ask for a regroup. A joining rank receives weights, optimizer states and
other states from the memory of a rank that trains (`state_transfer.py`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.base.errors import DivergedError, NonFiniteError, RunError
from evener.core.base.file_io import write_atomic
from evener.core.cluster.host_info import local_host_info
from evener.core.run.membership_epoch import PEER_LOST, RankStatus, Rendezvous, read_rendezvous
from evener.core.run.peer_failure import PeersLostError, is_peer_failure
from evener.core.run.prediction import Cluster
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import Roster, SyncSpec
from evener.core.run.run_plan import read_launcher_roster
from evener.core.run.run_spec import RunSpec
from evener.worker.membership import TrainerView
from evener.worker.membership.fixed import FixedMembership
from evener.worker.membership.memory_limits import limit_micro_batches
from evener.worker.membership.regroup import largest_roster
from evener.worker.membership.rollback import RegroupExit
from evener.worker.membership.state_transfer import transfer_state
from evener.worker.membership.strategy_change import replace_sync
from evener.worker.rank.process_groups import ProcessGroups, exit_immediately
from evener.worker.record.run_log import RunLog
from evener.worker.record.step_recorder import StepRecorder
from evener.worker.state.checkpointer import Checkpointer, CheckpointHistory

POLL_S = 0.05  # between polls for a newer epoch
# A collective that begins at the moment in which its connection ends may hang: gloo's Pair::write fails all waiting
# operations when it detects the end, but not the one that it was asked to send. *Observed*: a few times in a hundred
# ends, with a collective every 2 ms.
STUCK_TIMEOUT_S = 5.0  # without any activity of the rank after its epoch was lost
IDLE_CPU_FRACTION = 0.05  # of one CPU: below it a rank is idle, as Gloo's threads always poll
HOSTS_CHANGE = "hosts come or go"
T = TypeVar("T")


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a rank that has trained."""

    num_collectives: int  # finished collective operations
    last_result: Any  # of the last one
    last_reported_step: int  # the newest step that all ranks have reported to it
    stop_step: int | None  # the step before which all stop, as requested in reports
    save_step: int | None  # the step before which all save, as requested in reports; None: not requested, or saved
    step: int  # next, or in progress
    is_updating: bool  # whether its optimizers step
    roster_epoch: int  # version of its Roster
    sync: SyncSpec  # of its Roster
    bucket_bytes: int
    last_trial_step: int  # before which its last trial of strategies ended
    is_undecided: bool  # a trial of strategies is not over
    checkpoint_history: CheckpointHistory  # checkpoints that it knows
    full_roster: Roster  # of all hosts of the run, by its launcher's newest file
    fixed_micro_batch_size: bool  # micro-batches keep their sizes
    is_waiting_for_regroup: bool  # it is between two steps, and has requested a regroup


class ElasticMembership(FixedMembership):
    """One rank's elastic membership."""

    def __init__(self, roster: Roster, group: ProcessGroups) -> None:
        self._group, self._full_roster, self._fixed_micro_batch_size = group, read_launcher_roster(), False
        if group.is_admitted and self._full_roster is not None:  # --sync auto may have chosen another strategy since
            self._full_roster = self._full_roster.replace_sync(roster.sync, roster.bucket_bytes)
        super().__init__(self._with_full_sync(roster))
        self._num_collectives, self.last_result, self._step = 0, None, -1
        self._has_trained = self.is_epoch_lost = self._is_between_epochs = False
        self._stop_step: int | None = None
        self._save_step: int | None = None
        self._host, self._lock = local_host_info().host, threading.Lock()
        self._status_path = Path(os.environ["EVENER_SAYINGS"], str(group.local_rank))

    def enable_adaptation(
        self, spec: RunSpec, resolved: ResolvedRun | None, cluster: Cluster | None, *, fixed_micro_batch_size: bool
    ) -> str:
        self._adaptation_args, self._fixed_micro_batch_size = (spec, resolved, cluster), fixed_micro_batch_size
        return super().enable_adaptation(spec, resolved, cluster, fixed_micro_batch_size=fixed_micro_batch_size)

    def start(self, trainer: TrainerView, checkpointer: Checkpointer, run_log: RunLog, first_step: int) -> int:
        self._trainer, self._checkpointer, self._run_log, self._step = trainer, checkpointer, run_log, first_step
        threading.Thread(target=self._watch_epochs, daemon=True, name="worlds").start()
        if not self._group.is_admitted:
            self._regroup("")
        return self._step

    def run_collectively(self, fn: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                result: T = fn(*args)
                break
            except (RuntimeError, RunError) as error:
                if self.recover_from(error):
                    others_result: T = self.last_result
                    return others_result
        self.record_collective(result)
        return result

    def retry_after_regroup(self, fn: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                return fn(*args)
            except RuntimeError as error:
                self.recover_from(error)

    def run_or_restart(self, fn: Callable[[], object]) -> None:
        try:
            try:
                self._checkpointer.save(self._step, None)
            except RunError as error:
                if isinstance(error, (DivergedError, NonFiniteError)):
                    raise  # of a full disk the next save will tell
            fn()
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            raise RegroupExit from error

    def receive_reports(self, recorder: StepRecorder, step: int) -> bool:
        if self.retry_after_regroup(recorder.receive_due_reports):
            self._set_stop_step(step)
        if recorder.is_save_requested:
            self._save_step = step
        return self._stop_step is not None and step >= self._stop_step

    def _set_stop_step(self, step: int) -> None:
        """Stop before `step`, unless a stop is set already.

        A rank that loses its epoch before it has received the stop request learns the stop step from a rank that has
        received it, and that may be a step ahead.
        """
        self._stop_step = step if self._stop_step is None else self._stop_step

    def record_collective(self, result: Any) -> None:
        """Record a finished collective operation and its result."""
        self._num_collectives, self.last_result = self._num_collectives + 1, result

    def recover_from(self, error: RuntimeError | RunError) -> bool:
        failed_rank = error.failed_rank if isinstance(error, RunError) else None  # it exits, e.g. on a full disk
        if not self._has_trained or (failed_rank is None and not is_peer_failure(error)):
            raise error
        # logged once
        if failed_rank is not None and self._group.rank == int(self._group.member_ranks[0] == failed_rank):
            self._run_log.log_failure(error)
        return self._regroup(PEER_LOST)

    def commit_gradients(self, loss_sum: Tensor) -> float | None:
        if self._trainer.sync.drifts and not self._trainer.changed_buffers and self._has_trained:
            return None
        local_loss, group = loss_sum.reshape(1, 1), self._group
        losses = torch.empty(group.world_size, 1, dtype=torch.float64)
        dist.all_gather_single(losses, local_loss, group=group.control_group)
        total = float(losses.sum())
        self.record_collective(total)
        if not self._has_trained:
            self._has_trained = True
            self._write_status("")
        return total

    def before_step(self, recorder: StepRecorder, checkpointer: Checkpointer, step: int) -> None:
        if step > self._step:
            self._step = step
            self._write_status("")
        if recorder.is_regroup_requested:
            if self.retry_after_regroup(recorder.receive_all_reports):  # a joining rank has no reports of earlier steps
                self._set_stop_step(step + 1)
            if recorder.is_save_requested:
                self._save_step = step
            self.retry_after_regroup(self._trainer.sync.wait_all)
        if self._save_step is not None and step >= self._save_step:
            self._save_requested_checkpoint(recorder, checkpointer, step)
        if recorder.is_regroup_requested:  # and the epoch was not lost meanwhile
            self._regroup(HOSTS_CHANGE)

    def _save_requested_checkpoint(self, recorder: StepRecorder, checkpointer: Checkpointer, step: int) -> None:
        """Save a checkpoint that was requested."""
        if checkpointer.history[0] != step:
            if self.retry_after_regroup(recorder.flush):  # not a collective operation: it may exchange nothing
                self._set_stop_step(step + 1)
            self.run_collectively(checkpointer.save, step, None)
            recorder.begin_step()
        self._save_step = None

    def will_restart_from_checkpoint(self, recorder: StepRecorder) -> bool:
        return False

    def after_save(self, recorder: StepRecorder) -> None:
        pass

    # --- regroup ----------------------------------------------------------------------------------------------------

    def _regroup(self, regroup_reason: str) -> bool:
        """Join the next epoch; return whether other ranks have finished the operation that failed here."""
        began = time.monotonic()
        while True:
            self._write_status(regroup_reason)
            try:
                self._join_next_epoch()
                is_behind = self._resume_in_epoch(regroup_reason == HOSTS_CHANGE, began)
            except RuntimeError as error:
                if not is_peer_failure(error, is_joining=True):
                    raise
                regroup_reason = PEER_LOST if self._has_trained else ""
            else:
                self._has_trained = True
                self._write_status("")
                self._trainer.recorder.charge_wait()
                return is_behind

    def _join_next_epoch(self) -> None:
        """Leave this epoch and join the next one that includes this host."""
        group, previous = self._group, self._group.membership_epoch
        assert previous is not None
        group.shut_down_connections()  # collectives in flight fail
        self._trainer.sync.abort()
        group.leave_epoch()
        self._is_between_epochs = True
        while (meeting := read_rendezvous()).epoch.number <= previous.number or not self._can_join(meeting):
            time.sleep(POLL_S / 5)
        with self._lock:
            self.is_epoch_lost = False
            self._is_between_epochs = False
            group.membership_epoch = meeting.epoch
            group.is_admitted = True
        group.join_epoch(meeting)

    def _can_join(self, rendezvous: Rendezvous) -> bool:
        """Return whether this rank can join that epoch with its state."""
        is_for_us = self._host in rendezvous.epoch.hosts and not rendezvous.epoch.is_cold_start
        if self._has_trained and not is_for_us:
            raise RegroupExit  # others go on without it, or all restart from a checkpoint
        return is_for_us

    def _resume_in_epoch(self, is_waiting_for_regroup: bool, began: float) -> bool:
        """Exchange positions with all ranks of the new epoch, transfer state to those that join, and adopt the new
        Roster.

        All ranks call it together. Return whether others have finished the operation that failed here.
        """
        group, learner, own_full = self._group, self._trainer, read_launcher_roster()
        assert own_full is not None
        own = RankPosition(
            num_collectives=self._num_collectives,
            last_result=self.last_result,
            last_reported_step=learner.recorder.last_reported_step,
            step=self._step,
            is_updating=learner.training_state.is_learning,
            stop_step=self._stop_step,
            save_step=self._save_step,
            roster_epoch=self.roster.epoch,
            is_waiting_for_regroup=is_waiting_for_regroup,
            sync=self.roster.sync,
            bucket_bytes=self.roster.bucket_bytes,
            last_trial_step=self._last_trial_step if self._selector is None else self._selector.last_trial_step,
            is_undecided=self.is_undecided,
            checkpoint_history=self._checkpointer.history,
            full_roster=own_full,
            fixed_micro_batch_size=self._fixed_micro_batch_size,
        )
        gathered = group.all_gather([own] if self._has_trained else [], list[RankPosition])
        positions = [pos for of_rank in gathered for pos in of_rank]
        if not positions or (
            len(positions) < len(gathered) and not all(pos.is_waiting_for_regroup for pos in positions)
        ):
            raise PeersLostError("no rank can join this epoch")  # raised on all ranks
        newest = max(positions, key=lambda pos: (pos.num_collectives, pos.step, pos.is_updating))
        if newest.num_collectives - min(pos.num_collectives for pos in positions) > 1:
            raise RunError(
                f"ranks differ by more than one collective operation: {[pos.num_collectives for pos in positions]}"
            )
        assert group.membership_epoch is not None
        latest = max(positions, key=lambda pos: pos.roster_epoch)
        full = largest_roster([pos.full_roster for pos in positions])
        self._full_roster = full if latest.sync == full.sync else full.replace_sync(latest.sync, latest.bucket_bytes)
        roster = limit_micro_batches(
            self._full_roster.for_hosts(
                group.membership_epoch.hosts, latest.roster_epoch + 1, group.membership_epoch.why
            ),
            group,
        )
        roster = self._with_full_sync(roster)
        group.member_ranks = [member.rank for member in roster.members]
        joining_ranks = [rank for rank, of_rank in enumerate(gathered) if not of_rank]
        own_sync = learner.sync.spec  # as planned, or from before a change that reached only others
        if own_sync != roster.sync and (own_sync.drifts or roster.sync.drifts):
            if own_sync.drifts and group.rank not in joining_ranks:
                raise RegroupExit  # its replica was not merged with those of the others
            replace_sync(learner, roster)
        learner.sync.adopt_roster(roster, joining_ranks)
        if joining_ranks:
            transfer_state(
                learner, self._checkpointer, newest.step, source=gathered.index([newest]), joining_ranks=joining_ranks
            )
        FixedMembership.__init__(self, roster)
        self._last_trial_step, self._was_trying = latest.last_trial_step, latest.is_undecided
        self._checkpointer.reset_after_regroup(newest.checkpoint_history)
        self._stop_step = min((pos.stop_step for pos in positions if pos.stop_step is not None), default=None)
        # The rank that has finished most knows whether it is saved already.
        saves_at = [
            pos.save_step
            for pos in positions
            if pos.num_collectives == newest.num_collectives and pos.save_step is not None
        ]
        self._save_step = max(saves_at, default=None)
        # a joining rank may lack a compiler
        self._fixed_micro_batch_size = any(pos.fixed_micro_batch_size for pos in positions)
        super().enable_adaptation(*self._adaptation_args, fixed_micro_batch_size=self._fixed_micro_batch_size)
        self._run_log.log_regroup(self.roster, newest.step, lost_s=time.monotonic() - began)
        # Last, because a rank that is a step ahead reports a step that others report later.
        learner.recorder.enter_epoch(
            roster, group.rank, group.control_group, max(pos.last_reported_step for pos in positions)
        )
        is_behind = self._has_trained and newest.num_collectives > self._num_collectives
        self._step = self._step if self._has_trained else newest.step
        self._num_collectives, self.last_result = newest.num_collectives, newest.last_result
        return is_behind

    def _with_full_sync(self, roster: Roster) -> Roster:
        """Return the Roster with the full run's sync strategy and backend, so that a rank that is alone for a while
        keeps them.
        """
        assert self._full_roster is not None
        return msgspec.structs.replace(roster, sync=self._full_roster.sync, backend=self._full_roster.backend)

    def _write_status(self, regroup_reason: str) -> None:
        epoch = self._group.membership_epoch
        assert epoch is not None
        number = epoch.number if self._has_trained else -1
        status = RankStatus(pid=os.getpid(), epoch_number=number, step=self._step, regroup_reason=regroup_reason)
        # once a step; it need not outlive us
        write_atomic(self._status_path, msgspec.json.encode(status), is_durable=False)

    def _watch_epochs(self) -> NoReturn:
        """Watch for newer epochs; when there is one, shut down connections so that the lost epoch's collectives fail.

        A rank that hangs in a collective nevertheless exits, and its agent restarts it.
        """
        path, changed, newest, idle_s, cpu_s = Path(os.environ["EVENER_WORLD"]), 0, -1, 0.0, 0.0
        while True:
            time.sleep(POLL_S)
            cpu_before_s, cpu_s = cpu_s, time.process_time()
            is_idle = (
                self.is_epoch_lost and not self._is_between_epochs and cpu_s - cpu_before_s < IDLE_CPU_FRACTION * POLL_S
            )
            idle_s = idle_s + POLL_S if is_idle else 0.0
            if idle_s > STUCK_TIMEOUT_S:
                print("evener: hung in a collective of a lost membership epoch: this rank restarts", file=sys.stderr)
                exit_immediately(1)
            if (now := path.stat().st_mtime_ns) != changed:
                changed, newest = now, read_rendezvous().epoch.number
            with self._lock:
                epoch = self._group.membership_epoch
                if epoch is not None and self._group.is_admitted and newest > epoch.number:
                    self.is_epoch_lost = True
                    self._group.shut_down_connections()
