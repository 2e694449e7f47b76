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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from evener.core.base.errors import UsageError
from evener.core.cluster.allocator import disable_malloc_trim, has_jemalloc, unmap_freed_blocks
from evener.core.cluster.host_info import local_host_info
from evener.core.model.shape import GPTShape
from evener.core.run.membership_epoch import is_elastic
from evener.core.run.resolve import ResolvedRun, default_run_path, starting_checkpoint
from evener.core.run.roster import Member, Roster
from evener.core.run.run_plan import launcher_run_folder
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Checkpoint, Contention
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepRecord
from evener.plan.cost.memory import peak_memory
from evener.worker.membership import Membership
from evener.worker.membership.elastic import ElasticMembership
from evener.worker.membership.fixed import FixedMembership
from evener.worker.membership.memory_limits import record_oom
from evener.worker.membership.regroup import current_stop_request, replicate_newest_checkpoint
from evener.worker.membership.rollback import RegroupExit, rollback_on_failure
from evener.worker.membership.strategy_change import change_strategy
from evener.worker.rank.clock import CudaClock, HostClock
from evener.worker.rank.precision import autocast, compile_module, should_compile
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.stop_signals import StopRequest, StopSignals
from evener.worker.rank.user_errors import install_excepthook
from evener.worker.record.heartbeat import start_heartbeat
from evener.worker.record.host_monitor import start_host_monitor
from evener.worker.record.profiler import make_profiler
from evener.worker.record.run_log import RunLog
from evener.worker.record.span_recorder import SpanRecorder
from evener.worker.record.step_recorder import StepRecorder
from evener.worker.state.checkpointer import Checkpointer
from evener.worker.state.training_state import (
    USER_STATE_PREFIX,
    StatefulT,
    TrainingState,
    batch_norm_names,
    check_batch_norm,
)
from evener.worker.sync.fully_sharded import shard_module
from evener.worker.sync.sync_factory import make_sync
from evener.worker.train.datasets import Dataset, as_dataset
from evener.worker.train.rank_consistency import check_rank_consistency, load_planned_cluster, starting_roster
from evener.worker.train.train_step import TrainContext, TrainStep

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def join(spec: RunSpec | None = None, resolved: ResolvedRun | None = None, *, resume: bool = False) -> Run:
    """Join the run that torchrun started, or start a run of one rank; with `resume` continue the run in `spec.out`.

    `resolved` is given when the model and the corpus are evener's own.
    """
    install_excepthook()
    start_heartbeat()
    run = Run(spec or RunSpec(), resolved, resume)
    if run.device.type == "cpu":
        disable_malloc_trim() if _keeps_freed_memory(run, resolved) else unmap_freed_blocks()
    return run


def _keeps_freed_memory(run: Run, resolved: ResolvedRun | None) -> bool:
    """Return whether malloc keeps freed memory: with sharded weights only where its host has plenty."""
    if not run.roster.sync.is_sharded or resolved is None or not isinstance(resolved.shape, GPTShape):
        return True
    need = peak_memory(resolved.shape, run.roster, run.rank, recompute=run.spec.model.recompute,
                       host_memory_bytes=local_host_info().memory_bytes, has_jemalloc=has_jemalloc())  # fmt: skip
    return need.fragmentation > 0


def _open_run_dir(spec: RunSpec, group: ProcessGroups) -> RunWriter:
    """Return a writer of the run directory: `spec.out`, the launcher's if it has no run yet, or a new one."""
    if spec.out is not None:
        return RunWriter(spec.out)
    launched = launcher_run_folder()
    new_path = "" if launched is not None and not RunWriter(launched).is_run() else default_run_path(spec)
    path = group.all_gather(new_path, str)[0] or launched
    assert path is not None
    return RunWriter(path)


def _find_start_checkpoint(rundir: RunWriter, group: ProcessGroups, spec: RunSpec, resolved: ResolvedRun | None,
                  resume: bool) -> Checkpoint | None:  # fmt: skip
    """Return the checkpoint to start from; where hosts come and go, all ranks choose the newest one together."""
    if group.has_dynamic_membership:
        return replicate_newest_checkpoint(rundir, group) if group.is_admitted else None
    find = functools.partial(starting_checkpoint, rundir, spec, resume=resume)
    return resolved.resume if resolved else group.run_or_raise_on_all(find)


def _apply_new_roster(membership: Membership, context: TrainContext, run_log: RunLog, index: int) -> None:
    """Adopt the Roster of step `index`, where the step reports call for a new one."""
    run_log.check_fidelity(context.recorder.completed)
    previous, reports = membership.roster, context.recorder.reports
    roster = membership.update_roster(reports, index) if reports else None
    state, is_undecided = context.training_state, membership.is_undecided
    # A checkpoint that is saved during a change is one of the strategy that is left.
    state.is_strategy_on_trial = is_undecided or (roster is not None and roster.sync != previous.sync)
    if (comparison := membership.take_comparison()) is not None:
        run_log.log_comparison(comparison, index)
    if roster is not None:
        if roster.sync != previous.sync and (roster.sync.drifts or previous.sync.drifts):
            if previous.sync.drifts:
                membership.run_or_restart(lambda: change_strategy(context, roster))
            else:
                change_strategy(context, roster)
            run_log.log_roster_change(roster, previous)
        elif roster.sync != previous.sync:
            run_log.log_roster_change(roster, previous)
            membership.retry_after_regroup(lambda: context.sync.adopt_roster(membership.roster))
        else:
            check_batch_norm(state.module, roster)
            run_log.log_roster_change(roster, previous)
        state.is_strategy_on_trial = is_undecided


class Run:
    """One rank of a run: the interface of a training program."""

    rank = property(lambda self: self.group.rank, doc="This rank's index in the process group, from 0.")
    world_size = property(lambda self: self.group.world_size, doc="The number of ranks.")

    def __init__(self, spec: RunSpec, resolved: ResolvedRun | None, resume: bool) -> None:
        self.spec, self._resolved = spec, resolved
        self.group = ProcessGroups(spec.machine.device)
        self.device = self.group.device
        machine = local_host_info()
        torch.set_num_threads(spec.machine.threads or max(1, machine.cores // self.group.local_world_size))
        self.dir = _open_run_dir(spec, self.group)
        self._run_log = RunLog(self.dir, self.group, machine)
        self._start_checkpoint = _find_start_checkpoint(self.dir, self.group, spec, resolved, resume)
        # the first step of this start of the run
        self.first_step = self._start_checkpoint.step if self._start_checkpoint else 0
        roster = starting_roster(self.group, self.dir, machine, spec, resolved, self._start_checkpoint)
        self._membership: Membership = (
            ElasticMembership(roster, self.group) if is_elastic() else FixedMembership(roster)
        )
        has_comm_thread = self.roster.sync.streamed or self.roster.sync.is_sharded or spec.train.sync == "auto"
        self.group.set_gradient_backend(self.roster.backend, separate_group=has_comm_thread)
        is_resumed = self._start_checkpoint is not None or (not self.group.is_admitted and self.dir.is_run())
        self._compiled = should_compile(spec, resolved, self.roster, self.dir if is_resumed else None)
        self._training_state = TrainingState(torch.amp.GradScaler("cuda", enabled=self.member.dtype == "fp16"))
        self._clock = CudaClock() if self.device.type == "cuda" else HostClock()
        self._recorder: StepRecorder | None = None
        # the step that the program is executing
        self._current_step: tuple[TrainContext, Checkpointer, TrainStep] | None = None
        self.contention: Contention | None = None
        self._evaluate: Callable[[int], float] | None = None
        self._share_weight, self._stop_signals = math.nan, StopSignals()
        torch.manual_seed(spec.train.seed)  # the same weights on every rank

    # --- the interface of a training program ------------------------------------------------------------------------

    def model(self, module: Model) -> Model:
        """Move the module to this rank's device, compile it where that pays, and synchronize its gradients.

        May be called for several models. All have rank 0's weights when the first step begins.
        """
        self._require_before_steps("run.model")
        self._training_state.models.append(module.to(self.device))
        if self._compiled:
            compile_module(module, self.world_size)
        if self.roster.sync.is_sharded:
            if self._resolved is None:
                raise UsageError(f"--sync {self.roster.sync}: not for a program of your own", hint="--sync ddp")
            shard_module(module, self.group, self.roster)
        return module

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Register an optimizer, whose state the checkpoints will hold. May be called for several."""
        self._require_before_steps("run.optimizer")
        self._training_state.add_optimizer(optimizer)
        return optimizer

    def state(self, name: str, thing: StatefulT) -> StatefulT:
        """Register a scheduler, or any object with state_dict and load_state_dict, to be checkpointed by this name."""
        self._require_before_steps("run.state")
        self._training_state.add_state(USER_STATE_PREFIX + name, thing)
        return thing

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward uses the run's precision, `--dtype`; fp32 by default."""
        return autocast(self.device, self.member.dtype)

    def steps(self, dataset: Any, evaluate: Callable[[int], float] | None = None) -> Iterator[TrainStep]:
        """Iterate over the remaining optimizer steps.

        `dataset` is a `Dataset`, a map-style torch Dataset or a DataLoader of one. A program may leave its loop early,
        on all ranks alike: the run is then saved as a stopped one. `evaluate` returns the validation loss after so many
        steps; it is called on all ranks where a run with a time limit ends before its last step.
        """
        self._evaluate = evaluate
        train, every, first_step = self.spec.train, self.spec.checkpoint, self.first_step
        with rollback_on_failure(self.dir, self.group):
            context, checkpointer = self._set_up(as_dataset(dataset, self.spec), first_step)
            is_fresh, membership = self.group.is_admitted, self._membership
            first_step = membership.start(context, checkpointer, self._run_log, first_step)
            self._stop_signals.start_time_limit(train.max_s)
            for index in range(first_step, train.steps):
                context.recorder.begin_step()
                if index > first_step or is_fresh:  # else the others received the reports before they admitted it
                    if membership.receive_reports(context.recorder, index):
                        return self._finish(checkpointer, "stopped", index, None)
                    membership.before_step(context.recorder, checkpointer, index)
                _apply_new_roster(membership, context, self._run_log, index)
                step = TrainStep(context, self.roster.at_step(index), index, is_first=index == first_step and is_fresh)
                self._current_step = context, checkpointer, step
                yield step
                self._current_step = None
                step.end(
                    stop_request=StopRequest.STOP
                    if self._stop_signals.should_stop
                    else current_stop_request(self.group, self.dir.path),
                    share_weight=self._share_weight,
                )
                self._share_weight = math.nan
                done = index + 1
                if every.verify_every and done % every.verify_every == 0 and done < train.steps:
                    membership.run_collectively(checkpointer.verify_replicas, done)
                if every.checkpoint_every and done % every.checkpoint_every == 0 and done < train.steps:
                    if membership.run_collectively(context.recorder.flush):
                        return self._finish(checkpointer, "stopped", done, step.val_loss)
                    membership.run_collectively(
                        checkpointer.save,
                        done,
                        step.val_loss,
                        membership.will_restart_from_checkpoint(context.recorder),
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
        return self._training_state.module

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the newest step that all ranks have reported; it lags behind."""
        return self._recorder.last_record if self._recorder else None

    def set_share_weight(self, weight: float) -> None:
        """Set this rank's weight: the batch is shared among ranks in proportion to their weights.

        The weight of a rank that has set none is its share. A new weight applies once all ranks have received it; from
        then on shares no longer follow the ranks' speed.
        """
        if not 0 <= weight < 1e9:
            raise UsageError(f"run.set_share_weight({weight}): expected a number of at least 0 and below 1e9")
        self._share_weight = weight

    def mean(self, total: float, num: float) -> float:
        """Return Σ total / Σ num over ranks."""
        sums = self._membership.run_collectively(self.group.all_reduce_sum, total, num)
        return sums[0] / sums[1]

    def print_once(self, text: str) -> None:
        """Print a line on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None and self._current_step is not None:
                with rollback_on_failure(self.dir, self.group):
                    self._finish_after_break(*self._current_step)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None and not isinstance(error, RegroupExit):
                record_oom(error, self.group.local_rank)
                self._run_log.log_failure(error)
            if self._recorder is not None:
                self._recorder.close()
            self._stop_signals.close()
            if error is None:
                self.group.close()

    # --- start and end of a run -------------------------------------------------------------------------------------

    def _set_up(self, dataset: Dataset, first: int) -> tuple[TrainContext, Checkpointer]:
        """Check that the ranks are consistent, load the checkpoint, and log the start."""
        self._require_before_steps("run.steps")
        training_state = self._training_state
        training_state.check_trainable()
        check_rank_consistency(self.group, self.dir, self.spec, self._resolved, self.roster, first, training_state)
        if self.group.is_admitted:
            check_batch_norm(training_state.module, self.roster)
        # A compiled model recompiles for every batch size, and all ranks must decide alike.
        fixed_size = self.group.any_rank(self._compiled or bool(batch_norm_names(training_state.module)))
        if self._start_checkpoint is not None and self._start_checkpoint.is_strategy_on_trial:
            self._membership.resume_strategy_trial()
        warning = self._membership.enable_adaptation(
            self.spec, self._resolved, load_planned_cluster(), fixed_micro_batch_size=fixed_size
        )
        if first == 0 and self.group.is_admitted:
            self._membership.begin_strategy_trial()
        sync = make_sync(self.roster, self.group, self._clock, lambda part: recorder.lap(part), training_state.module)
        training_state.sync = sync
        # Experts of a pretrained model may have no token in a step.
        training_state.all_params_used = self._resolved is not None and not self._resolved.corpus.is_samples
        spans = SpanRecorder(
            self.dir, self.member.rank, self._clock, make_profiler(self.spec, self.dir, self.member.rank, first)
        )
        checkpointer = Checkpointer(self.dir, self.spec, self.group, training_state, spans)
        if self.group.is_admitted:
            checkpointer.restore_checkpoint(self._start_checkpoint)
        sync.wrap(training_state.module, all_params_used=training_state.all_params_used)
        checkpointer.restore_rank_state(self._start_checkpoint)
        self._run_log.log_start(
            self.spec,
            self._resolved,
            self.roster,
            training_state.num_params,
            is_compiled=self._compiled,
            first_step=first,
            is_resumed=self._start_checkpoint is not None,
            warning=warning,
        )
        # After the log has dropped the records that a resumed run repeats.
        self._recorder = recorder = StepRecorder(
            self.dir, self.rank, self.roster, self._clock, self.group.control_group, spans
        )
        if self.group.local_rank == 0:
            start_host_monitor(self.dir.vitals_path(local_host_info().host), has_gpu=self.device.type == "cuda")
        return TrainContext(self.spec, self.group, dataset, training_state, recorder, self._membership,
                      self._resolved is None, self._compiled), checkpointer  # fmt: skip

    def _finish_after_break(self, context: TrainContext, checkpointer: Checkpointer, step: TrainStep) -> None:
        """Finish and save a run whose program left its loop early, on all ranks."""
        if step.is_updated:
            step.end(stop_request=StopRequest.STOP, share_weight=math.nan)
        self._finish(checkpointer, "stopped", step.index + step.is_updated, step.val_loss)

    def _finish(self, checkpointer: Checkpointer, verdict: str, step: int, val_loss: float | None) -> None:
        """Flush records, merge and verify replicas, save and log the end; steps with nothing to do are skipped."""
        assert self._recorder is not None
        membership, recorder = self._membership, self._recorder
        membership.retry_after_regroup(recorder.flush)
        if checkpointer.needs_finalize(step):
            membership.run_collectively(checkpointer.finalize_replicas, step)
            val_loss = None  # of the replicas before the merge
        if val_loss is None and self._evaluate is not None and self.spec.train.max_s is not None:
            val_loss = self._evaluate(step)
        replicas_agree = membership.run_collectively(checkpointer.verify_replicas, step)
        if checkpointer.history[0] != step:
            membership.run_collectively(checkpointer.save, step, val_loss)
        membership.run_collectively(
            self._run_log.log_finish, verdict, step, recorder.last_record, val_loss, replicas_agree, self.contention
        )

    def _require_before_steps(self, what: str) -> None:
        if self._recorder is not None:
            raise UsageError(f"{what} after run.steps: register models, optimizers and states before the first step")
