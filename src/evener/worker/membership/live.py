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

Drifting replicas step without each other, and may be one step apart. The updates of a lost rank since the last
synchronization are lost. An exchange that completed on any rank is applied on all; any other counts as never begun, and
its updates go out with the next (`DiLoCo.regroup`). So it is with step reports: one that any rank received is not sent
again.

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

from evener.core.decoding import from_json
from evener.core.errors import RunError
from evener.core.failure import is_consequence
from evener.core.machine import this_machine
from evener.core.plan import told_roster
from evener.core.prediction import Cluster
from evener.core.resolve import Resolved
from evener.core.roster import Roster, SyncSpec
from evener.core.spec import RunSpec
from evener.core.world import LOST, Meeting, Saying, told_meeting
from evener.worker.group import Group, leave
from evener.worker.journal import Journal
from evener.worker.keeper import Keeper, Saved
from evener.worker.membership import Learner
from evener.worker.membership.back import Regroup
from evener.worker.membership.fixed import Fixed
from evener.worker.membership.heal import heal
from evener.worker.membership.limits import limited
from evener.worker.membership.worlds import largest
from evener.worker.record import Recorder
from evener.worker.sync.buckets import Buckets
from evener.worker.sync.choose import change_sync
from evener.worker.sync.diloco import DiLoCo

LOOK_S = 0.05  # between polls for a newer epoch
# A collective that begins at the moment in which its connection ends may hang: gloo's Pair::write fails all waiting
# operations when it detects the end, but not the one that it was asked to send. *Observed*: a few times in a hundred
# ends, with a collective every 2 ms.
STUCK_S = 5.0  # without any activity of the rank after its epoch was lost
IDLE = 0.05  # of one CPU: below it a rank is idle, as Gloo's threads always poll
ASKS = "hosts come or go"
T = TypeVar("T")


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a rank that has trained."""

    done: int  # finished collective operations
    result: Any  # of the last one
    heard: int  # the newest step that all ranks have reported to it
    stops_at: int | None  # the step before which all stop, as requested in reports
    saves_at: int | None  # the step before which all save, as requested in reports; None: saved
    step: int  # next, or in progress
    learns: bool  # whether its optimizers step
    epoch: int  # version of its Roster
    sync: SyncSpec  # of its Roster
    bucket_bytes: int
    saved: Saved  # checkpoints that it knows
    told: Roster  # of all hosts of the run, by its launcher's newest file
    one_size: bool  # micro-batches keep their sizes
    asks: bool  # it is between two steps, and has requested a regroup


class Live(Fixed):
    """One rank's elastic membership."""

    def __init__(self, roster: Roster, group: Group) -> None:
        self._group, self._full, self._one_size = group, told_roster(), False
        super().__init__(self._kept(roster))
        self._done, self.result, self._step = 0, None, -1
        self._has_learned = self.is_lost = self._is_between = False
        self._stops_at: int | None = None
        self._saves_at: int | None = None
        self._host, self._lock = this_machine().host, threading.Lock()
        self._path = Path(os.environ["EVENER_SAYINGS"], str(group.local_rank))

    def follow(self, spec: RunSpec, resolved: Resolved | None, cluster: Cluster | None, *, one_size: bool) -> str:
        self._follow, self._one_size = (spec, resolved, cluster), one_size
        return super().follow(spec, resolved, cluster, one_size=one_size)

    def begin(self, learner: Learner, keeper: Keeper, journal: Journal, first: int) -> int:
        self._learner, self._keeper, self._journal, self._step = learner, keeper, journal, first
        threading.Thread(target=self._watch, daemon=True, name="worlds").start()
        if not self._group.is_let_in:
            self._meet("")
        return self._step

    def together(self, do: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                result: T = do(*args)
                break
            except (RuntimeError, RunError) as error:
                if self.is_behind(error):
                    others_result: T = self.result
                    return others_result
        self.have_done(result)
        return result

    def again(self, do: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                return do(*args)
            except RuntimeError as error:
                self.is_behind(error)

    def listen(self, recorder: Recorder, step: int) -> bool:
        if self.again(recorder.hear):
            self._stop_before(step)
        if recorder.saves:
            self._saves_at = step
        return self._stops_at is not None and step >= self._stops_at

    def _stop_before(self, step: int) -> None:
        """Stop before `step`, unless a stop is set already.

        A rank that loses its epoch before it receives the stop request learns it from one that did, and may be a step
        behind.
        """
        self._stops_at = step if self._stops_at is None else self._stops_at

    def have_done(self, result: Any) -> None:
        """Record a finished collective operation and its result."""
        self._done, self.result = self._done + 1, result

    def is_behind(self, error: RuntimeError | RunError) -> bool:
        failed_rank = error.of_rank if isinstance(error, RunError) else None  # it exits, e.g. on a full disk
        if not self._has_learned or (failed_rank is None and not is_consequence(error)):
            raise error
        if failed_rank is not None and self._group.rank == int(self._group.numbers[0] == failed_rank):  # logged once
            self._journal.failed(error)
        return self._meet(LOST)

    def agree(self, loss_sum: Tensor) -> float | None:
        is_drifting, has_changed_buffers = self._learner.sync.replica == "drifting", bool(self._learner.moved)
        if is_drifting and not has_changed_buffers and self._has_learned:
            return None
        local_loss, group = loss_sum.reshape(1, 1), self._group
        losses = torch.empty(group.world_size, 1, dtype=torch.float64)
        dist.all_gather_single(losses, local_loss, group=group.control)
        total = float(losses.sum())
        self.have_done(total)
        if not self._has_learned:
            self._has_learned = True
            self._say("")
        return total

    def before_step(self, recorder: Recorder, keeper: Keeper, step: int) -> None:
        if step > self._step:
            self._step = step
            self._say("")
        if recorder.regroups:
            if self.again(recorder.catch_up):  # a joining rank has no reports of earlier steps
                self._stop_before(step + 1)
            if recorder.saves:
                self._saves_at = step
            self.again(self._learner.sync.await_all)
        if self._saves_at is not None and step >= self._saves_at:
            self._save(recorder, keeper, step)
        if recorder.regroups:  # and the epoch was not lost meanwhile
            self._meet(ASKS)

    def _save(self, recorder: Recorder, keeper: Keeper, step: int) -> None:
        """Save a checkpoint that was requested."""
        if keeper.saved[0] != step:
            if self.again(recorder.flush):  # not a collective operation: it may exchange nothing
                self._stop_before(step + 1)
            self.together(keeper.save, step, None)
            recorder.begin()
        self._saves_at = None

    def begins_anew(self, recorder: Recorder) -> bool:
        return False

    def after_save(self, recorder: Recorder) -> None:
        pass

    # --- regroup ----------------------------------------------------------------------------------------------------

    def _meet(self, asks: str) -> bool:
        """Join the next epoch; return whether other ranks have finished the operation that failed here."""
        began = time.monotonic()
        while True:
            self._say(asks)
            try:
                self._enter()
                is_behind = self._take_up(asks == ASKS, began)
            except RuntimeError as error:
                if not (is_consequence(error) or "gloo" in str(error).lower()):
                    raise
                asks = LOST if self._has_learned else ""
            else:
                self._has_learned = True
                self._say("")
                self._learner.recorder.waited()
                return is_behind

    def _enter(self) -> None:
        """Leave this epoch and join the next one that includes this host."""
        group, previous = self._group, self._group.world
        assert previous is not None
        group.shut()  # collectives in flight fail
        self._learner.sync.abandon()
        group.leave_world()
        self._is_between = True
        while (meeting := told_meeting()).world.number <= previous.number or not self._is_for_us(meeting):
            time.sleep(LOOK_S / 5)
        with self._lock:
            self.is_lost, self._is_between, group.world, group.is_let_in = False, False, meeting.world, True
        group.enter(meeting)

    def _is_for_us(self, meeting: Meeting) -> bool:
        """Return whether this rank can join that epoch with its state."""
        is_for_us = self._host in meeting.world.hosts and not meeting.world.is_fresh
        if self._has_learned and not is_for_us:
            raise Regroup  # others go on without it, or all restart from a checkpoint
        return is_for_us

    def _take_up(self, asks: bool, began: float) -> bool:
        """Exchange positions with all ranks of the new epoch, transfer state to those that join, and adopt the new
        Roster.

        All ranks call it together. Return whether others have finished the operation that failed here.
        """
        group, learner, own_full = self._group, self._learner, told_roster()
        assert own_full is not None
        own = Position(done=self._done, result=self.result, heard=learner.recorder.heard, step=self._step,
                       learns=learner.trained.learns,
                       stops_at=self._stops_at, saves_at=self._saves_at, epoch=self.roster.epoch, asks=asks,
                       sync=self.roster.sync, bucket_bytes=self.roster.bucket_bytes, saved=self._keeper.saved,
                       told=own_full, one_size=self._one_size)  # fmt: skip
        gathered = [from_json(text, list[Position])
                    for text in group.gather(msgspec.json.encode([own] if self._has_learned else []))]  # fmt: skip
        positions = [pos for of_rank in gathered for pos in of_rank]
        if not positions or (len(positions) < len(gathered) and not all(pos.asks for pos in positions)):
            raise RuntimeError("remote process exit: no rank can join this epoch")  # raised on all ranks
        newest = max(positions, key=lambda pos: (pos.done, pos.step, pos.learns))
        if newest.done - min(pos.done for pos in positions) > 1:
            raise RunError(f"ranks differ by more than one collective operation: {[pos.done for pos in positions]}")
        assert group.world is not None
        latest, full = max(positions, key=lambda pos: pos.epoch), largest([pos.told for pos in positions])
        self._full = full if latest.sync == full.sync else full.agreeing_by(latest.sync, latest.bucket_bytes)
        roster = limited(self._full.among(group.world.hosts, latest.epoch + 1, group.world.why), group)
        roster = self._kept(roster)
        group.numbers = [member.rank for member in roster.members]
        joining_ranks = [rank for rank, of_rank in enumerate(gathered) if not of_rank]
        if isinstance(learner.sync, DiLoCo):
            learner.sync.regroup(joining_ranks)
        if joining_ranks:
            heal(learner, self._keeper, newest.step, source=gathered.index([newest]), lacks=joining_ranks)
        Fixed.__init__(self, roster)
        if isinstance(learner.sync, Buckets):
            change_sync(learner.sync, roster, group, learner.recorder.clock, learner.trained.module)
        self._keeper.entered(newest.saved)
        self._stops_at = min((pos.stops_at for pos in positions if pos.stops_at is not None), default=None)
        # The rank that has finished most knows whether it is saved already.
        saves_at = [pos.saves_at for pos in positions if pos.done == newest.done and pos.saves_at is not None]
        self._saves_at = max(saves_at, default=None)
        self._one_size = any(pos.one_size for pos in positions)  # a joining rank may lack a compiler
        super().follow(*self._follow, one_size=self._one_size)
        self._journal.entered(self.roster, newest.step, lost_s=time.monotonic() - began)
        # At last: a rank that is a step ahead reports a step that others report later.
        learner.recorder.enter(roster, group.rank, group.control, max(pos.heard for pos in positions))
        is_behind = self._has_learned and newest.done > self._done
        self._step = self._step if self._has_learned else newest.step
        self._done, self.result = newest.done, newest.result
        return is_behind

    def _kept(self, roster: Roster) -> Roster:
        """Return the Roster with the full run's sync strategy and backend, so that a rank that is alone for a while
        keeps them.
        """
        assert self._full is not None
        return msgspec.structs.replace(roster, sync=self._full.sync, backend=self._full.backend)

    def _say(self, asks: str) -> None:
        epoch = self._group.world
        assert epoch is not None
        number = epoch.number if self._has_learned else -1
        status = Saying(pid=os.getpid(), world=number, step=self._step, asks=asks)
        new_path = self._path.with_name(f".{self._path.name}")
        new_path.write_bytes(msgspec.json.encode(status))  # once a step; no fsync: it need not outlive us
        new_path.replace(self._path)

    def _watch(self) -> NoReturn:
        """Watch for newer epochs: free a rank that waits for a lost one as soon as its host knows of a newer epoch.

        A rank that cannot be freed exits, and its agent restarts it.
        """
        path, changed, newest, idle_s, cpu_s = Path(os.environ["EVENER_WORLD"]), 0, -1, 0.0, 0.0
        while True:
            time.sleep(LOOK_S)
            cpu_before_s, cpu_s = cpu_s, time.process_time()
            is_idle = self.is_lost and not self._is_between and cpu_s - cpu_before_s < IDLE * LOOK_S
            idle_s = idle_s + LOOK_S if is_idle else 0.0
            if idle_s > STUCK_S:
                print("evener: hung in a collective of a lost membership epoch: this rank restarts", file=sys.stderr)
                leave(1)
            if (now := path.stat().st_mtime_ns) != changed:
                changed, newest = now, told_meeting().world.number
            with self._lock:
                epoch = self._group.world
                if epoch is not None and self._group.is_let_in and newest > epoch.number:
                    self.is_lost = True
                    self._group.shut()
