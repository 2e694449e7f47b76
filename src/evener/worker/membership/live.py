"""Who takes part where ranks live on? Whoever is left: what was under way is done again without those who are gone.

All that ranks do together is a piece: the gradients of a pass, a comparison, a checkpoint, the run's end. Whoever
has done a piece to its end knows that all had begun it. So when the world is lost in the middle of one, and those who
are left meet in the next world, they are at the same piece or one apart, and what each has done says how all go on:

    nobody has the piece behind it        all do it again; a pass with other shares of the same batch
    somebody has                          the others have all of it that is theirs: they take over its result, and go on

For the gradients that holds because a pass ends with each rank telling that it has all sums; until all have told it
nobody updates. Losses travel with that word, so that no step's is lost with the rank that computed it.

Replicas that drift go on alone from step to step, and may be a step apart. What a rank that is gone learned since they
agreed last is lost. Of an exchange that anybody had done all take over what came of it; any other is as if it had not
begun, and what each has learned goes out with the next (`DiLoCo.regroup`). So it is with the news of a step: what
anybody has heard is not told again.

Hosts are let in between two steps, when all ask for it. Whoever comes takes over weights, optimizers and states of one
who is there, from its memory (`heal.py`).
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

LOOK_S = 0.05  # between looks for another world
# A collective that begins in the very moment in which its connection ends may never hear of it: gloo's Pair::write
# tells all that waits of the end that it meets, and leaves what it was asked to send waiting. *Seen*: a few times in a
# hundred ends, with a collective every 2 ms.
STUCK_S = 5.0  # that a rank did nothing at all after its world had ended
IDLE = 0.05  # of a processor: less is nothing, for Gloo's threads look around all the time
ASKS = "hosts come or go"
T = TypeVar("T")


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is that has learned."""

    done: int  # pieces
    result: Any  # of the last
    heard: int  # the newest step of which it has heard from all
    stops_at: int | None  # the step before which all stop, by what it heard
    saves_at: int | None  # the step before which all save, by what it heard; None: that is done
    step: int  # that comes next, or is under way
    learns: bool  # its optimizers do not stand still
    epoch: int  # of its Roster
    sync: SyncSpec  # as its Roster has it, chosen anew or not
    bucket_bytes: int
    saved: Saved  # checkpoints that it knows of
    told: Roster  # of all hosts of the run, as its launcher told it last
    one_size: bool  # micro-batches keep theirs
    asks: bool  # it is between two steps, and has asked for another world


class Live(Fixed):
    """One rank's part in it."""

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
                    theirs: T = self.result
                    return theirs
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
        """And not before another one: whoever loses its world before it hears of it has it from who did, and may be a
        step behind.
        """
        self._stops_at = step if self._stops_at is None else self._stops_at

    def have_done(self, result: Any) -> None:
        """A piece, with what came of it."""
        self._done, self.result = self._done + 1, result

    def is_behind(self, error: RuntimeError | RunError) -> bool:
        """A piece could not be done: after this the rank is in another world. Have others done it? Then so has this
        one. The error, where it is of another kind.
        """
        culprit = error.of_rank if isinstance(error, RunError) else None  # which ends, for its disk is full or the like
        if not self._has_learned or (culprit is None and not is_consequence(error)):
            raise error
        if culprit is not None and self._group.rank == int(self._group.numbers[0] == culprit):  # one of us tells it
            self._journal.failed(error)
        return self._meet(LOST)

    def agree(self, loss_sum: Tensor) -> float | None:
        drifts, moves = self._learner.sync.replica == "drifting", bool(self._learner.moved)
        if drifts and not moves and self._has_learned:
            return None
        mine, group = loss_sum.reshape(1, 1), self._group
        told = torch.empty(group.world_size, 1, dtype=torch.float64)
        dist.all_gather_single(told, mine, group=group.control)
        total = float(told.sum())
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
            if self.again(recorder.catch_up):  # who comes has nothing to tell of steps before
                self._stop_before(step + 1)
            if recorder.saves:
                self._saves_at = step
            self.again(self._learner.sync.await_all)
        if self._saves_at is not None and step >= self._saves_at:
            self._save(recorder, keeper, step)
        if recorder.regroups:  # and the world was not lost meanwhile
            self._meet(ASKS)

    def _save(self, recorder: Recorder, keeper: Keeper, step: int) -> None:
        """Somebody asked for it."""
        if keeper.saved[0] != step:
            if self.again(recorder.flush):  # no piece: it may exchange nothing
                self._stop_before(step + 1)
            self.together(keeper.save, step, None)
            recorder.begin()
        self._saves_at = None

    def begins_anew(self, recorder: Recorder) -> bool:
        return False

    def after_save(self, recorder: Recorder) -> None:
        pass

    # --- from world to world ----------------------------------------------------------------------------------------

    def _meet(self, asks: str) -> bool:
        """Go on in the next world; have others done what this rank was at?"""
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
        """Leave this world; be in the next one with this host."""
        group, was = self._group, self._group.world
        assert was is not None
        group.shut()  # what is under way fails
        self._learner.sync.abandon()
        group.leave_world()
        self._is_between = True
        while (meeting := told_meeting()).world.number <= was.number or not self._is_for_us(meeting):
            time.sleep(LOOK_S / 5)
        with self._lock:
            self.is_lost, self._is_between, group.world, group.is_let_in = False, False, meeting.world, True
        group.enter(meeting)

    def _is_for_us(self, meeting: Meeting) -> bool:
        """May this rank be in that world as it is?"""
        is_for_us = self._host in meeting.world.hosts and not meeting.world.is_fresh
        if self._has_learned and not is_for_us:
            raise Regroup  # others go on without it, or all begin anew
        return is_for_us

    def _take_up(self, asks: bool, began: float) -> bool:
        """Become one of the new world, as all in it do together."""
        group, learner, mine_told = self._group, self._learner, told_roster()
        assert mine_told is not None
        mine = Position(done=self._done, result=self.result, heard=learner.recorder.heard, step=self._step,
                        learns=learner.trained.learns,
                        stops_at=self._stops_at, saves_at=self._saves_at, epoch=self.roster.epoch, asks=asks,
                        sync=self.roster.sync, bucket_bytes=self.roster.bucket_bytes, saved=self._keeper.saved,
                        told=mine_told, one_size=self._one_size)  # fmt: skip
        told = [from_json(text, list[Position])
                for text in group.gather(msgspec.json.encode([mine] if self._has_learned else []))]  # fmt: skip
        known = [one for of_rank in told for one in of_rank]
        if not known or (len(known) < len(told) and not all(one.asks for one in known)):
            raise RuntimeError("remote process exit: nobody can be let in here")  # and so does everybody
        newest = max(known, key=lambda one: (one.done, one.step, one.learns))
        if newest.done - min(one.done for one in known) > 1:
            raise RunError(f"ranks are more than a piece apart: {[one.done for one in known]}")
        assert group.world is not None
        latest, full = max(known, key=lambda one: one.epoch), largest([one.told for one in known])
        self._full = full if latest.sync == full.sync else full.agreeing_by(latest.sync, latest.bucket_bytes)
        roster = limited(self._full.among(group.world.hosts, latest.epoch + 1, group.world.why), group)
        roster = self._kept(roster)
        group.numbers = [member.rank for member in roster.members]
        lacks = [rank for rank, of_rank in enumerate(told) if not of_rank]
        if isinstance(learner.sync, DiLoCo):
            learner.sync.regroup(lacks)
        if lacks:
            heal(learner, self._keeper, newest.step, source=told.index([newest]), lacks=lacks)
        Fixed.__init__(self, roster)
        if isinstance(learner.sync, Buckets):
            change_sync(learner.sync, roster, group, learner.recorder.clock, learner.trained.module)
        self._keeper.entered(newest.saved)
        self._stops_at = min((one.stops_at for one in known if one.stops_at is not None), default=None)
        # Who has done most knows whether it is saved already.
        saves_at = [one.saves_at for one in known if one.done == newest.done and one.saves_at is not None]
        self._saves_at = max(saves_at, default=None)
        self._one_size = any(one.one_size for one in known)  # who is let in may have no compiler, and the others one
        super().follow(*self._follow, one_size=self._one_size)
        self._journal.entered(self.roster, newest.step, lost_s=time.monotonic() - began)
        # At last: a rank that is a step ahead tells of a step that others tell of when they have taken it.
        learner.recorder.enter(roster, group.rank, group.control, max(one.heard for one in known))
        is_behind = self._has_learned and newest.done > self._done
        self._step = self._step if self._has_learned else newest.step
        self._done, self.result = newest.done, newest.result
        return is_behind

    def _kept(self, roster: Roster) -> Roster:
        """A rank that is alone for a while goes on as with others: nothing else then changes with a world."""
        assert self._full is not None
        return msgspec.structs.replace(roster, sync=self._full.sync, backend=self._full.backend)

    def _say(self, asks: str) -> None:
        world = self._group.world
        assert world is not None
        number = world.number if self._has_learned else -1
        saying = Saying(pid=os.getpid(), world=number, step=self._step, asks=asks)
        new = self._path.with_name(f".{self._path.name}")
        new.write_bytes(msgspec.json.encode(saying))  # once a step: nobody waits for the disk, for it dies with us
        new.replace(self._path)

    def _watch(self) -> NoReturn:
        """Whoever waits for somebody who is gone is freed as soon as its host knows of another world; who can't be
        ends, and comes back as another one.
        """
        path, changed, newest, idle_s, cpu_s = Path(os.environ["EVENER_WORLD"]), 0, -1, 0.0, 0.0
        while True:
            time.sleep(LOOK_S)
            was_s, cpu_s = cpu_s, time.process_time()
            is_idle = self.is_lost and not self._is_between and cpu_s - was_s < IDLE * LOOK_S
            idle_s = idle_s + LOOK_S if is_idle else 0.0
            if idle_s > STUCK_S:
                print("evener: could not be freed from a world that is no more, and begins anew", file=sys.stderr)
                leave(1)
            if (now := path.stat().st_mtime_ns) != changed:
                changed, newest = now, told_meeting().world.number
            with self._lock:
                world = self._group.world
                if world is not None and self._group.is_let_in and newest > world.number:
                    self.is_lost = True
                    self._group.shut()
