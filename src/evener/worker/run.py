"""Join a distributed run from a training program: `join()` returns a `Run`, with this rank's share of every batch,
gradient synchronization, measurement, checkpoints and verification of the replicas. Our own loop (`loop.py`) uses
nothing else.

    with evener.join(spec) as run:
        model = run.model(MyModel())                  # on this rank's device; its gradients are synchronized
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 3e-4))
        for step in run.steps(dataset):               # records, checkpoints, verifies
            for batch in step.micro_batches():        # this rank's share of the global batch
                step.backward(loss_sum(model, batch)) # a sum; backward(mean, tokens) for a mean
            step.update(optimizer)
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from evener.core.errors import UsageError
from evener.core.machine import keep_freed_memory, this_machine
from evener.core.plan import launched_into
from evener.core.resolve import Resolved, new_run_path, starting_point
from evener.core.roster import Member, Roster
from evener.core.rundir import Checkpoint, Contention
from evener.core.runwriter import RunWriter
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.core.world import ranks_live_on
from evener.worker.agree import agree, planned_cluster, seated
from evener.worker.arithmetic import autocast, compile_module, compiles
from evener.worker.clock import CudaClock, HostClock
from evener.worker.datasets import Dataset, as_dataset
from evener.worker.group import Group
from evener.worker.journal import Journal
from evener.worker.keeper import Keeper
from evener.worker.membership import Membership
from evener.worker.membership.back import Regroup, going_back
from evener.worker.membership.fixed import Fixed
from evener.worker.membership.limits import note_end
from evener.worker.membership.live import Live
from evener.worker.membership.worlds import newest_anywhere, wish
from evener.worker.mistakes import tell_in_words
from evener.worker.profiler import profiler
from evener.worker.pulse import begin_pulse
from evener.worker.record import STOP, Recorder
from evener.worker.spans import Spans
from evener.worker.step import Engine, Step
from evener.worker.stopping import Stopping
from evener.worker.sync.choose import change_sync, make_sync
from evener.worker.trained import USER, Thing, Trained, batch_norms, check_batch_norm
from evener.worker.vitals import begin_vitals

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def join(spec: RunSpec | None = None, resolved: Resolved | None = None, *, resume: bool = False) -> Run:
    """Join the run that torchrun started, or start a run of one rank; with `resume` continue the run in `spec.out`.

    `resolved` is given when the model and the corpus are evener's own.
    """
    tell_in_words()
    begin_pulse()
    run = Run(spec or RunSpec(), resolved, resume)
    if run.device.type == "cpu":
        keep_freed_memory()
    return run


def _directory(spec: RunSpec, group: Group) -> RunWriter:
    """Return a writer of the run directory: `spec.out`, the launcher's if it has no run yet, or a new one."""
    if spec.out is not None:
        return RunWriter(spec.out)
    launched = launched_into()
    new_path = "" if launched is not None and not RunWriter(launched).is_run() else new_run_path(spec)
    path = group.gather(new_path.encode())[0].decode() or launched
    assert path is not None
    return RunWriter(path)


def _goes_on_from(rundir: RunWriter, group: Group, spec: RunSpec, resolved: Resolved | None,
                  resume: bool) -> Checkpoint | None:  # fmt: skip
    """Return the checkpoint to start from; where hosts come and go, all ranks choose the newest one together."""
    if group.is_in_world:
        return newest_anywhere(rundir, group) if group.is_let_in else None
    find = functools.partial(starting_point, rundir, spec, resume=resume)
    return resolved.resume if resolved else group.all_or_none(find)


def _take_up(who: Membership, engine: Engine, journal: Journal, index: int) -> None:
    """Adopt the Roster of step `index`, where the step reports call for a new one."""
    journal.heard(engine.recorder.completed)
    previous, reports = who.roster, engine.recorder.news
    if reports and (roster := who.hear(reports, index)) is not None:
        if roster.sync != previous.sync:
            journal.changed(roster, previous)
            clock, module = engine.recorder.clock, engine.trained.module
            who.again(lambda: change_sync(engine.sync, who.roster, engine.group, clock, module))
        else:
            check_batch_norm(engine.trained.module, roster)
            journal.changed(roster, previous)


def _end(who: Membership, recorder: Recorder, keeper: Keeper, journal: Journal, verdict: str, step: int,
         val_loss: float | None, contention: Contention | None) -> None:  # fmt: skip
    """Flush records, merge and verify replicas, save and log the end; steps with nothing to do are skipped."""
    who.again(recorder.flush)
    if keeper.is_to_conclude(step):
        who.together(keeper.conclude, step)
        val_loss = None  # of the replicas before the merge
    replicas_agree = who.together(keeper.compare, step)
    if keeper.saved[0] != step:
        who.together(keeper.save, step, val_loss)
    who.together(journal.finish, verdict, step, recorder.last, val_loss, replicas_agree, contention)


class Run:
    """One rank of a run: the interface of a training program."""

    rank = property(lambda self: self.group.rank, doc="This rank's index in the process group, from 0.")
    world_size = property(lambda self: self.group.world_size, doc="The number of ranks.")

    def __init__(self, spec: RunSpec, resolved: Resolved | None, resume: bool) -> None:
        self.spec, self._resolved = spec, resolved
        self.group = Group(spec.machine.device)
        self.device = self.group.device
        machine = this_machine()
        torch.set_num_threads(spec.machine.threads or max(1, machine.cores // self.group.local_world_size))
        self.dir = _directory(spec, self.group)
        self._journal = Journal(self.dir, self.group, machine)
        self._resume = _goes_on_from(self.dir, self.group, spec, resolved, resume)
        self.begins_at = self._resume.step if self._resume else 0  # the first step of this start of the run
        roster = seated(self.group, self.dir, machine, spec, resolved)
        self._membership: Membership = Live(roster, self.group) if ranks_live_on() else Fixed(roster)
        self.group.move_gradients_by(self.roster.backend, apart=self.roster.sync.streamed)
        is_resumed = self._resume is not None or (not self.group.is_let_in and self.dir.is_run())
        self._compiled = compiles(spec, resolved, self.roster, self.dir if is_resumed else None)
        self._trained = Trained(torch.amp.GradScaler("cuda", enabled=self.member.dtype == "fp16"))
        self._clock = CudaClock() if self.device.type == "cuda" else HostClock()
        self._recorder: Recorder | None = None
        self._open: tuple[Engine, Keeper, Step] | None = None  # the step that the program is executing
        self.contention: Contention | None = None
        self._weight, self._stopping = math.nan, Stopping()
        torch.manual_seed(spec.train.seed)  # the same weights on every rank

    # --- the interface of a training program ------------------------------------------------------------------------

    def model(self, module: Model) -> Model:
        """Move the module to this rank's device, compile it where that pays, and synchronize its gradients.

        May be called for several models. All have rank 0's weights when the first step begins.
        """
        self._only_before_steps("run.model")
        self._trained.models.append(module.to(self.device))
        if self._compiled:
            compile_module(module, self.world_size)
        return module

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Register an optimizer, whose state the checkpoints will hold. May be called for several."""
        self._only_before_steps("run.optimizer")
        self._trained.add_optimizer(optimizer)
        return optimizer

    def state(self, name: str, thing: Thing) -> Thing:
        """Register a scheduler, or any object with state_dict and load_state_dict, to be checkpointed by this name."""
        self._only_before_steps("run.state")
        self._trained.add_state(USER + name, thing)
        return thing

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward uses the run's precision, `--dtype`; fp32 by default."""
        return autocast(self.device, self.member.dtype)

    def steps(self, dataset: Any) -> Iterator[Step]:
        """Iterate over the remaining optimizer steps.

        `dataset` is a `Dataset`, a map-style torch Dataset or a DataLoader of one. A program may leave its loop early,
        on all ranks alike: the run is then saved as a stopped one.
        """
        train, every, first_step = self.spec.train, self.spec.checkpoint, self.begins_at
        with going_back(self.dir, self.group):
            context, checkpointer = self._begin(as_dataset(dataset, self.spec), first_step)
            is_fresh, membership = self.group.is_let_in, self._membership
            first_step = membership.begin(context, checkpointer, self._journal, first_step)
            self._stopping.begin(train.max_s)
            for index in range(first_step, train.steps):
                context.recorder.begin()
                if index > first_step or is_fresh:  # else the others received the reports before they admitted it
                    if membership.listen(context.recorder, index):
                        return self._finish(checkpointer, "stopped", index, None)
                    membership.before_step(context.recorder, checkpointer, index)
                _take_up(membership, context, self._journal, index)
                step = Step(context, self.roster.at(index), index, is_first=index == first_step and is_fresh)
                self._open = context, checkpointer, step
                yield step
                self._open = None
                step.end(wish=STOP if self._stopping.is_due else wish(self.group, self.dir.path), weight=self._weight)
                self._weight = math.nan
                done = index + 1
                if every.verify_every and done % every.verify_every == 0 and done < train.steps:
                    membership.together(checkpointer.compare, done)
                if every.checkpoint_every and done % every.checkpoint_every == 0 and done < train.steps:
                    if membership.together(context.recorder.flush):
                        return self._finish(checkpointer, "stopped", done, step.val_loss)
                    membership.together(
                        checkpointer.save, done, step.val_loss, membership.begins_anew(context.recorder)
                    )
                    membership.after_save(context.recorder)
            return self._finish(checkpointer, "finished", train.steps, step.val_loss)

    @property
    def roster(self) -> Roster:
        """The Roster of the next step; where the steps of a round have different shares, it holds their mean."""
        return self._membership.roster

    @property
    def member(self) -> Member:
        """This rank's entry in the Roster."""
        return self.roster.members[self.rank]

    @property
    def module(self) -> nn.Module:
        """The model, or all models as one module."""
        return self._trained.module

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the newest step that all ranks have reported; it lags behind."""
        return self._recorder.last if self._recorder else None

    def weigh(self, weight: float) -> None:
        """Set this rank's share of the batch relative to the others', whose initial weights are their shares.

        It applies once all ranks have received it. From then on shares no longer follow the ranks' speed.
        """
        if not 0 <= weight < 1e9:
            raise UsageError(f"run.set_share_weight({weight}): expected a number of at least 0 and below 1e9")
        self._weight = weight

    def mean(self, total: float, num: float) -> float:
        """Return Σ total / Σ num over ranks."""
        sums = self._membership.together(self.group.sum, total, num)
        return sums[0] / sums[1]

    def tell(self, text: str) -> None:
        """Print a line on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None and self._open is not None:
                with going_back(self.dir, self.group):
                    self._leave(*self._open)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and not isinstance(error, Regroup):
                note_end(error, self.group.local_rank)
                self._journal.failed(error)
            if self._recorder is not None:
                self._recorder.close()
            self._stopping.close()
            if error is None:
                self.group.close()

    # --- start and end of a run -------------------------------------------------------------------------------------

    def _begin(self, dataset: Dataset, first: int) -> tuple[Engine, Keeper]:
        """Check that the ranks are consistent, load the checkpoint, and log the start."""
        self._only_before_steps("run.steps")
        training_state = self._trained
        training_state.check()
        agree(self.group, self.dir, self.spec, self._resolved, self.roster, first, training_state)
        if self.group.is_let_in:
            check_batch_norm(training_state.module, self.roster)
        # A compiled model recompiles for every batch size, and all ranks must decide alike.
        fixed_size = self.group.sum(float(self._compiled or bool(batch_norms(training_state.module))), 0.0)[0] > 0
        warning = self._membership.follow(self.spec, self._resolved, planned_cluster(), one_size=fixed_size)
        sync = make_sync(self.roster, self.group, self._clock, lambda part: recorder.lap(part), training_state.module)
        training_state.add_state("sync", sync)
        spans = Spans(self.dir, self.member.rank, self._clock, profiler(self.spec, self.dir, self.member.rank, first))
        checkpointer = Keeper(self.dir, self.spec, self.group, training_state, sync, spans)
        if self.group.is_let_in:
            checkpointer.restore(self._resume)
        sync.wrap(training_state.module, uses_all=self._resolved is not None)
        checkpointer.restore_own(self._resume)
        self._journal.begin(self.spec, self._resolved, self.roster, training_state.num_params, compiled=self._compiled,
                            first=first, resumes=self._resume is not None, remark=warning)  # fmt: skip
        # After the log has dropped the records that a resumed run repeats.
        self._recorder = recorder = Recorder(self.dir, self.rank, self.roster, self._clock, self.group.control, spans)
        if self.group.local_rank == 0:
            begin_vitals(self.dir.vitals_path(this_machine().host), has_gpu=self.device.type == "cuda")
        return Engine(self.spec, self.group, dataset, training_state, sync, recorder, self._membership,
                      self._resolved is None, self._compiled), checkpointer  # fmt: skip

    def _leave(self, engine: Engine, keeper: Keeper, step: Step) -> None:
        """Finish and save a run whose program left its loop early, on all ranks."""
        if step.is_updated:
            step.end(wish=STOP, weight=math.nan)
        self._finish(keeper, "stopped", step.index + step.is_updated, step.val_loss)

    def _finish(self, keeper: Keeper, verdict: str, step: int, val_loss: float | None) -> None:
        assert self._recorder is not None
        _end(self._membership, self._recorder, keeper, self._journal, verdict, step, val_loss, self.contention)

    def _only_before_steps(self, what: str) -> None:
        if self._recorder is not None:
            raise UsageError(f"{what} after run.steps: register models, optimizers and states before the first step")
