"""What does a training program need from evener? `join()`: its share of every batch, synchronization, measurement,
checkpoints and proof that the replicas agree. Our own loop (`loop.py`) is written with nothing else.

    with evener.join(spec) as run:
        model = run.model(MyModel())                  # on this rank's device; its gradients are exchanged
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 3e-4))
        for step in run.steps(dataset):               # records, checkpoints, verifies
            for batch in step.micro_batches():        # this rank's share of the global batch
                step.backward(loss_sum(model, batch)) # a sum; backward(mean, tokens) where there is a mean
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
    """Take part in the run that torchrun started, or be a world of one; with `resume` go on with the run in `spec.out`.

    `resolved` is there when the model and the corpus are evener's own.
    """
    tell_in_words()
    begin_pulse()
    run = Run(spec or RunSpec(), resolved, resume)
    if run.device.type == "cpu":
        keep_freed_memory()
    return run


def _directory(spec: RunSpec, group: Group) -> RunWriter:
    """Where the run's records go: where it was told to, where its launcher looks for its first run, or a place of its
    own.
    """
    if spec.out is not None:
        return RunWriter(spec.out)
    launched = launched_into()
    own = "" if launched is not None and not RunWriter(launched).is_run() else new_run_path(spec)
    path = group.gather(own.encode())[0].decode() or launched
    assert path is not None
    return RunWriter(path)


def _goes_on_from(rundir: RunWriter, group: Group, spec: RunSpec, resolved: Resolved | None,
                  resume: bool) -> Checkpoint | None:  # fmt: skip
    """The checkpoint with which this start begins; where hosts come and go, they find it together."""
    if group.is_in_world:
        return newest_anywhere(rundir, group) if group.is_let_in else None
    begin = functools.partial(starting_point, rundir, spec, resume=resume)
    return resolved.resume if resolved else group.all_or_none(begin)


def _take_up(who: Membership, engine: Engine, journal: Journal, index: int) -> None:
    """The Roster of step `index`, where the news ask for another one."""
    journal.heard(engine.recorder.completed)
    was, news = who.roster, engine.recorder.news
    if news and (roster := who.hear(news, index)) is not None:
        if roster.sync != was.sync:
            journal.changed(roster, was)
            clock, module = engine.recorder.clock, engine.trained.module
            who.again(lambda: change_sync(engine.sync, who.roster, engine.group, clock, module))
        else:
            check_batch_norm(engine.trained.module, roster)
            journal.changed(roster, was)


def _end(who: Membership, recorder: Recorder, keeper: Keeper, journal: Journal, verdict: str, step: int,
         val_loss: float | None, contention: Contention | None) -> None:  # fmt: skip
    """The run's last pieces; what exchanges nothing is none."""
    who.again(recorder.flush)
    if keeper.is_to_conclude(step):
        who.together(keeper.conclude, step)
        val_loss = None  # of the replicas, before they became one
    agree = who.together(keeper.compare, step)
    if keeper.saved[0] != step:
        who.together(keeper.save, step, val_loss)
    who.together(journal.finish, verdict, step, recorder.last, val_loss, agree, contention)


class Run:
    """One rank of a run, as a training program sees it."""

    rank = property(lambda self: self.group.rank, doc="This rank's place among those who take part, from 0.")
    world_size = property(lambda self: self.group.world_size, doc="How many take part.")

    def __init__(self, spec: RunSpec, resolved: Resolved | None, resume: bool) -> None:
        self.spec, self._resolved = spec, resolved
        self.group = Group(spec.machine.device)
        self.device = self.group.device
        machine = this_machine()
        torch.set_num_threads(spec.machine.threads or max(1, machine.cores // self.group.local_world_size))
        self.dir = _directory(spec, self.group)
        self._journal = Journal(self.dir, self.group, machine)
        self._resume = _goes_on_from(self.dir, self.group, spec, resolved, resume)
        self.begins_at = self._resume.step if self._resume else 0  # the first step of this start
        roster = seated(self.group, self.dir, machine, spec, resolved)
        self._membership: Membership = Live(roster, self.group) if ranks_live_on() else Fixed(roster)
        self.group.move_gradients_by(self.roster.backend, apart=self.roster.sync.streamed)
        goes_on = self._resume is not None or (not self.group.is_let_in and self.dir.is_run())
        self._compiled = compiles(spec, resolved, self.roster, self.dir if goes_on else None)
        self._trained = Trained(torch.amp.GradScaler("cuda", enabled=self.member.dtype == "fp16"))
        self._clock = CudaClock() if self.device.type == "cuda" else HostClock()
        self._recorder: Recorder | None = None
        self._open: tuple[Engine, Keeper, Step] | None = None  # the step that the program is in
        self.contention: Contention | None = None
        self._weight, self._stopping = math.nan, Stopping()
        torch.manual_seed(spec.train.seed)  # the same weights on every rank

    # --- what a training program calls ------------------------------------------------------------------------------

    def model(self, module: Model) -> Model:
        """The module on this rank's device, compiled where that pays; what backward does to it is exchanged.

        May be called for several models. All have rank 0's weights when the first step begins.
        """
        self._only_before_steps("run.model")
        self._trained.models.append(module.to(self.device))
        if self._compiled:
            compile_module(module, self.world_size)
        return module

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, whose state the checkpoints will hold. May be called for several."""
        self._only_before_steps("run.optimizer")
        self._trained.add_optimizer(optimizer)
        return optimizer

    def state(self, name: str, thing: Thing) -> Thing:
        """A scheduler, or anything with state_dict and load_state_dict, that checkpoints will hold by this name."""
        self._only_before_steps("run.state")
        self._trained.add_state(USER + name, thing)
        return thing

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward runs in the run's arithmetic: `--dtype`; fp32 if a program says nothing."""
        return autocast(self.device, self.member.dtype)

    def steps(self, dataset: Any) -> Iterator[Step]:
        """The optimizer steps that are left to take.

        `dataset` is a `Dataset`, a map-style torch Dataset or a DataLoader of one. A program may leave its loop early,
        on all ranks alike: the run is then saved as one that was stopped.
        """
        train, every, first = self.spec.train, self.spec.checkpoint, self.begins_at
        with going_back(self.dir, self.group):
            engine, keeper = self._begin(as_dataset(dataset, self.spec), first)
            is_fresh, who = self.group.is_let_in, self._membership
            first = who.begin(engine, keeper, self._journal, first)
            self._stopping.begin(train.max_s)
            for index in range(first, train.steps):
                engine.recorder.begin()
                if index > first or is_fresh:  # the others have heard the news before they let this rank in
                    if who.listen(engine.recorder, index):
                        return self._finish(keeper, "stopped", index, None)
                    who.before_step(engine.recorder, keeper, index)
                _take_up(who, engine, self._journal, index)
                step = Step(engine, self.roster.at(index), index, is_first=index == first and is_fresh)
                self._open = engine, keeper, step
                yield step
                self._open = None
                step.end(wish=STOP if self._stopping.is_due else wish(self.group, self.dir.path), weight=self._weight)
                self._weight = math.nan
                done = index + 1
                if every.verify_every and done % every.verify_every == 0 and done < train.steps:
                    who.together(keeper.compare, done)
                if every.checkpoint_every and done % every.checkpoint_every == 0 and done < train.steps:
                    if who.together(engine.recorder.flush):
                        return self._finish(keeper, "stopped", done, step.val_loss)
                    who.together(keeper.save, done, step.val_loss, who.begins_anew(engine.recorder))
                    who.after_save(engine.recorder)
            return self._finish(keeper, "finished", train.steps, step.val_loss)

    @property
    def roster(self) -> Roster:
        """Who takes part in the next step; where the steps of a round differ, with shares as they are in the mean."""
        return self._membership.roster

    @property
    def member(self) -> Member:
        """This rank's part of it."""
        return self.roster.members[self.rank]

    @property
    def module(self) -> nn.Module:
        """The model; several as one."""
        return self._trained.module

    @property
    def last_record(self) -> StepRecord | None:
        """The newest step that all ranks have told of; it lags behind."""
        return self._recorder.last if self._recorder else None

    def weigh(self, weight: float) -> None:
        """This rank's part of the batch relative to the others', which at first weigh what their shares are.

        It holds from the next step that begins after all ranks have heard of it. Shares follow speeds no more.
        """
        if not 0 <= weight < 1e9:
            raise UsageError(f"run.weigh({weight}): expected a number that is not negative, and below 1e9")
        self._weight = weight

    def mean(self, total: float, num: float) -> float:
        """Σ total / Σ num over ranks."""
        totals = self._membership.together(self.group.sum, total, num)
        return totals[0] / totals[1]

    def tell(self, text: str) -> None:
        """Print a line, once for all ranks."""
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

    # --- the life of a run ------------------------------------------------------------------------------------------

    def _begin(self, data: Dataset, first: int) -> tuple[Engine, Keeper]:
        """Everything is given: compare, load, and write down what begins."""
        self._only_before_steps("run.steps")
        trained = self._trained
        trained.check()
        agree(self.group, self.dir, self.spec, self._resolved, self.roster, first, trained)
        if self.group.is_let_in:
            check_batch_norm(trained.module, self.roster)
        # A compiled model is compiled again for every size; and it is one on all ranks, or on none.
        one_size = self.group.sum(float(self._compiled or bool(batch_norms(trained.module))), 0.0)[0] > 0
        remark = self._membership.follow(self.spec, self._resolved, planned_cluster(), one_size=one_size)
        sync = make_sync(self.roster, self.group, self._clock, lambda part: recorder.lap(part), trained.module)
        trained.add_state("sync", sync)
        spans = Spans(self.dir, self.member.rank, self._clock, profiler(self.spec, self.dir, self.member.rank, first))
        keeper = Keeper(self.dir, self.spec, self.group, trained, sync, spans)
        if self.group.is_let_in:
            keeper.restore(self._resume)
        sync.wrap(trained.module, uses_all=self._resolved is not None)
        keeper.restore_own(self._resume)
        self._journal.begin(self.spec, self._resolved, self.roster, trained.num_params, compiled=self._compiled,
                            first=first, resumes=self._resume is not None, remark=remark)  # fmt: skip
        # Not before the records that a resumed run makes again are gone from its file.
        self._recorder = recorder = Recorder(self.dir, self.rank, self.roster, self._clock, self.group.control, spans)
        if self.group.local_rank == 0:
            begin_vitals(self.dir.vitals_path(this_machine().host), has_gpu=self.device.type == "cuda")
        return Engine(self.spec, self.group, data, trained, sync, recorder, self._membership, self._resolved is None,
                      self._compiled), keeper  # fmt: skip

    def _leave(self, engine: Engine, keeper: Keeper, step: Step) -> None:
        """The program has left its loop by itself, on all ranks: what it has learned is saved."""
        if step.is_updated:
            step.end(wish=STOP, weight=math.nan)
        self._finish(keeper, "stopped", step.index + step.is_updated, step.val_loss)

    def _finish(self, keeper: Keeper, verdict: str, step: int, val_loss: float | None) -> None:
        assert self._recorder is not None
        _end(self._membership, self._recorder, keeper, self._journal, verdict, step, val_loss, self.contention)

    def _only_before_steps(self, what: str) -> None:
        if self._recorder is not None:
            raise UsageError(f"{what} after run.steps: models, optimizers and states are named before the first step")
