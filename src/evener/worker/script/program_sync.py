"""Synchronize a program's DDP models by a strategy of evener's own: `evener launch --sync int8 -- train.py`.

A communication hook passes each bucket to the strategy's all-reduce, on a thread and in a process group of its own, so
that it overlaps with backward and never meets the program's collectives. A lossy strategy keeps what it has not sent
yet, and sends it with later gradients (error feedback).

With `diloco:H` the hook sends nothing: each rank updates with its own gradients, and after every H-th update the ranks
exchange how far their weights have moved.
"""

# No `from __future__ import annotations`: torch inspects the hook's annotations.
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from evener.core.base.errors import CheckpointError
from evener.core.run.roster import Backend, SyncSpec
from evener.core.run.rundir import RunDir
from evener.worker.rank.clock import Clock, CudaClock, HostClock
from evener.worker.script.group_checks import OWN_GROUP
from evener.worker.script.report import note, run_folder, warn
from evener.worker.script.step_measurement import StepMeasurement
from evener.worker.state.program_state import FoundState, ProgramState, name_of
from evener.worker.sync.bucket_queue import BucketQueue
from evener.worker.sync.diloco import DiLoCo
from evener.worker.sync.gradient_sync import completed_future
from evener.worker.sync.sync_factory import make_algorithm

SAMPLE_EVERY = 10  # backward passes, in one of which the sums of a bucket may be compared with exact ones


@dataclass(frozen=True)
class ProgramGroup:
    """Ranks of a program, as a `RankGroup`."""

    rank: int
    world_size: int
    device: torch.device
    backend: Backend
    gradient_group: Any


def _make_group(model: Any) -> ProgramGroup:
    """Return a process group of our own for a DDP model. All ranks of the model's group call it together."""
    group: Any = dist.new_group(backend=dist.get_backend(model.process_group), group_desc=OWN_GROUP)
    device = next(model.parameters()).device
    backend: Backend = "nccl" if dist.get_backend(group) == "nccl" else "gloo"
    return ProgramGroup(dist.get_rank(), dist.get_world_size(), device, backend, group)


def _make_clock(group: ProgramGroup) -> Clock:
    return CudaClock() if group.device.type == "cuda" else HostClock()


class Synchronizer(ABC):
    """Synchronizes one DDP model by a strategy, and keeps its state when the program saves the model.

    The state is kept beside the run by the weights to which it belongs, and restored in a program that begins with
    these weights, before its first backward pass (worker/state/program_state.py).
    """

    def __init__(self, model: Any, sync: SyncSpec, measurement: StepMeasurement | None, number: int) -> None:
        """All ranks of the model's group call it together, as it makes a process group.

        `number`: of DDP models that the program had before.
        """
        self._group, self._measurement, self._sync = _make_group(model), measurement, sync
        # DDP has made the weights equal, and exchanges no others even if they are unfrozen later.
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trainable = {id(parameter) for parameter in self._parameters}
        self._num_elements = sum(parameter.numel() for parameter in self._parameters)
        self._num_saved = 0  # numbers that the program has saved on this rank, since the newest step
        self._versions: int | None = None  # of the weights after the newest update; None: the state is newer, or kept
        folder = run_folder()
        self._pid = os.getpid()  # not of a process that the program forks
        self._can_keep = True  # whether the disk has taken all states; on this rank alone
        has_state = folder is not None and not sync.is_exact
        self._kept = ProgramState(RunDir(folder or ""), self._group, sync, number) if has_state else None

    @abstractmethod
    def before_forward(self, model: Any) -> None:
        """Prepare for a forward pass in training."""

    def note_save(self, num_elements: int) -> None:
        """Note that the program has saved tensors with so many elements on this rank."""
        self._num_saved += num_elements

    def after_update(self, optimizer: Any) -> None:
        """Note an update of an optimizer."""
        if any(id(tensor) in self._trainable for group in optimizer.param_groups for tensor in group["params"]):
            self._versions = self._count_versions()

    def is_synced(self) -> bool:
        """Return whether all ranks have the same weights."""
        return True

    def keep_after_update(self) -> None:
        """Keep the state if the newest step is complete and its weights are still there.

        Called for a model that the program releases, or with which it ends, as it may have saved it.
        """
        if self._versions is not None and self._versions == self._count_versions():
            self._versions = None
            self._keep()

    def _count_versions(self) -> int:
        return sum(parameter._version for parameter in self._parameters)

    def _keep(self) -> None:
        """Keep the state; after an error, such as a full disk, warn, and keep none any more."""
        if self._kept is None or not self._can_keep or os.getpid() != self._pid:
            return
        try:
            state = self._state_dict()
            self._kept.save(self._parameters, self._common_name(state), state)
        except (OSError, CheckpointError, SafetensorError) as error:
            self._can_keep = False
            warn(
                f"--sync {self._sync} keeps no state for a resume any more: {self._kept.folder}: "
                f"{getattr(error, 'strerror', None) or error}",
                hint="make room there; the program goes on, and when it resumes it begins with an empty state",
            )

    @abstractmethod
    def _state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    @abstractmethod
    def _common_name(self, state: dict[str, Any]) -> str:
        """Return the name of what all ranks have in common with this rank's state."""

    def _restore(self) -> None:
        """Restore the state of the present weights, if one is kept, and say so."""
        if self._kept is None:
            return
        found = self._kept.find(self._parameters)
        loaded, is_first = self._load(found), self._group.rank == 0
        if found.problem:
            warn(
                f"--sync {self._sync} does not restore the state that was kept with these weights: {found.problem}",
                hint="the strategy and the number of ranks of that run restore it; a damaged file is of no use",
            )
        elif loaded and is_first:
            note(f"--sync {self._sync} continues with {loaded} that an earlier run kept with these weights")
        elif is_first and (found.has_others or found.is_of_rank0):
            why = "not every rank has kept one" if found.is_of_rank0 else "no run here has kept one of these weights"
            note(f"--sync {self._sync} begins with an empty state: {why}")

    @abstractmethod
    def _load(self, found: FoundState) -> str:
        """Load a kept state if enough ranks have it; return what was loaded, on all ranks alike, or ""."""


class CompressionHook(Synchronizer):
    """DDP's communication hook of one model.

    All ranks keep their states when any of them has saved the model. Beside the forward pass that follows they add up
    how many numbers they have saved; weights and residuals are then still those of the save. A save between that
    forward pass and the update is counted one step later, with the state of other weights: a resume from it begins with
    an empty state, and says so.
    """

    def __init__(self, model: Any, sync: SyncSpec, measurement: StepMeasurement | None, number: int) -> None:
        super().__init__(model, sync, measurement, number)
        self._queue = BucketQueue(self._group, _make_clock(self._group), make_algorithm(sync, self._group), frozenset())
        self._num_passes, self._is_in_pass = 0, False
        self._saves_added: Future[None] | None = None  # those since the newest backward pass, on all ranks
        if measurement is not None:
            measurement.call_after_backward(self._end_pass)
        self._restore()

    def before_forward(self, model: Any) -> None:
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._add_saves()

    def _add_saves(self) -> None:
        """Begin, once before each backward pass, to add up what the ranks have saved."""
        if self._saves_added is None and self._kept is not None:
            num_saved, self._num_saved = self._num_saved, 0
            self._saves_added = self._queue.run_before_next(lambda: self._keep_if_saved(num_saved))

    def _keep_if_saved(self, num_saved: int) -> None:
        """Keep the state if the ranks have saved as many numbers as the model has."""
        on_all = torch.tensor([num_saved], device=self._group.device if self._group.backend == "nccl" else "cpu")
        dist.all_reduce(on_all, group=self._group.gradient_group)
        if int(on_all) >= self._num_elements:
            self._keep()

    def _state_dict(self) -> dict[str, Any]:
        return self._queue.rank_state_dict({parameter: str(i) for i, parameter in enumerate(self._parameters)})

    def _common_name(self, state: dict[str, Any]) -> str:
        return name_of(self._parameters)

    def _load(self, found: FoundState) -> str:
        if found.own is None or not found.is_of_all:
            return ""
        parameters = {str(i): parameter for i, parameter in enumerate(self._parameters)}
        self._queue.load_rank_state_dict([found.own], parameters)
        return "the state"

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the future of a bucket's mean over the ranks."""
        before: Future[None] | None = None  # what the communication thread does first
        if bucket.index() == 0:
            self._end_pass()  # the one before, if nobody measures or it raised
            self._add_saves()  # if it has not begun beside the forward pass
            before, self._saves_added = self._saves_added, None
            self._num_passes, self._is_in_pass, self._versions = self._num_passes + 1, True, None
        buffer = bucket.buffer().div_(self._group.world_size)
        job = self._queue.submit(
            bucket, is_warmup=False, sample_gradients=self._num_passes % SAMPLE_EVERY == SAMPLE_EVERY - 1
        )
        if self._measurement is not None:
            self._measurement.mark_bucket_ready()
        devices: Any = [self._group.device] if self._group.device.type == "cuda" else None
        mean: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

        def pass_on(done: Future[None]) -> None:
            error = (before and before.exception()) or done.exception()
            if isinstance(error, Exception):
                mean.set_exception(error)  # type: ignore[arg-type]
            else:
                mean.set_result(buffer)

        job.add_done_callback(pass_on)
        return mean

    def _end_pass(self) -> None:
        """Take the figures of a backward pass, whose buckets DDP has waited for."""
        if not self._is_in_pass:
            return
        self._is_in_pass = False
        self._queue.wait_all()
        events, fidelity = self._queue.take_comm_events(), self._queue.take_fidelity()
        if self._measurement is not None:
            self._measurement.add_sent(sum(event.sent_bytes for event in events))
            if self._group.device.type == "cpu":  # else the marks are a GPU's
                self._measurement.add_buckets(events)
            if fidelity is not None:
                self._measurement.set_fidelity(*fidelity.tolist())


class LocalSteps(Synchronizer):
    """Local steps of one DDP model between exchanges of its weights, by DiLoCo.

    A step ends when optimizers have updated all trainable parameters of the model, or at the latest before the forward
    pass that follows an update. A rank that saves the model keeps its state, and the others theirs at the end of the
    program. Where they have none, they take over the outer optimizer's from rank 0, which is equal on all ranks, and
    continue with the weights that the program has given them.
    """

    def __init__(self, model: Any, sync: SyncSpec, measurement: StepMeasurement | None, number: int) -> None:
        super().__init__(model, sync, measurement, number)
        ranks: Any = self._group  # which of a run's groups holds all that is needed while nobody joins or leaves
        self._diloco = DiLoCo(ranks, _make_clock(self._group), self._lap, sync)
        self._diloco.wrap(nn.ParameterList(self._parameters), all_params_used=True, is_under_way=True)
        self._is_pass_over, self._updated = False, set[int]()  # of the present step: ids of tensors
        self._num_steps = 0
        self._restore()

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Leave a bucket with this rank's own gradients."""
        self._is_pass_over, self._versions = self._is_pass_over or bucket.is_last(), None
        return completed_future(bucket)

    def before_forward(self, model: Any) -> None:
        self.end_step()

    def note_save(self, num_elements: int) -> None:
        super().note_save(num_elements)
        if self._num_saved >= self._num_elements:
            self.keep_after_update()

    def keep_after_update(self) -> None:
        if not self._updated:  # else a step is not over
            super().keep_after_update()

    def after_update(self, optimizer: Any) -> None:
        tensors = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        self._updated |= tensors & self._trainable
        if self._updated == self._trainable:
            self.end_step()
        super().after_update(optimizer)

    def end_step(self) -> None:
        """End a step, if an update has followed the newest backward pass; every H-th one exchanges the weights."""
        if not (self._is_pass_over and self._updated):
            return
        self._is_pass_over, self._updated, self._num_saved = False, set(), 0
        self._diloco.after_optimizer_step(1.0, float(self._group.world_size))  # as in DDP, each rank counts the same
        self._diloco.after_step(self._num_steps)
        self._num_steps += 1
        if self._measurement is not None:
            self._measurement.add_sent(self._diloco.take_comm_stats().sent_bytes)

    def is_synced(self) -> bool:
        return self._diloco.is_synced()

    def _state_dict(self) -> dict[str, Any]:
        return self._diloco.rank_state_dict()

    def _common_name(self, state: dict[str, Any]) -> str:
        return name_of(state["agreed"].values(), *_steps_since_exchange(state))

    def _load(self, found: FoundState) -> str:
        if not found.is_of_rank0:
            return ""
        if found.own is not None and (found.is_of_all or self._group.rank == 0):
            self._diloco.load_rank_state_dict(found.own, ())
        if not found.is_of_all:
            self._diloco.adopt_outer_state()
        self._num_steps = int(_steps_since_exchange(self._diloco.rank_state_dict())[0])
        return "the state" if found.is_of_all or self._num_steps == 0 else "rank 0's part of the state"

    def _lap(self, phase: str) -> None:
        """DiLoCo's laps: the measurement sees the collectives themselves."""


def _steps_since_exchange(state: dict[str, Any]) -> list[float]:
    """Return how many steps a rank's state of DiLoCo is past the last exchange of each fragment."""
    return [steps for steps, _ in state["tokens"]]  # each step counts as one token


def make_synchronizer(
    model: Any, sync: SyncSpec, measurement: StepMeasurement | None, number: int, *, why_not_local: str
) -> CompressionHook | LocalSteps | None:
    """Return what synchronizes a DDP model; None, with a warning, if the strategy does not fit it.

    `number`: of DDP models that the program had before. `why_not_local`: why the program's updates cannot be of each
    rank alone; "" if they can.
    """
    problem = ""
    if any(parameter.requires_grad and parameter.dtype != torch.float32 for parameter in model.parameters()):
        problem = "some of its weights are not fp32"
    elif dist.get_process_group_ranks(model.process_group) != list(range(dist.get_world_size())):
        problem = "its process group is a part of the ranks"
    elif sync.drifts:
        problem = why_not_local
    if problem:
        warn(f"--sync {sync} has no effect on a DDP model: {problem}", hint="its gradients are summed by DDP itself")
        return None
    return (LocalSteps if sync.drifts else CompressionHook)(model, sync, measurement, number)


def count_elements(value: Any) -> int:
    """Return the elements of the tensors in a module, or in nested dicts and lists; 0 for anything else."""
    if isinstance(value, nn.Module):
        return sum(parameter.numel() for parameter in value.parameters())
    if isinstance(value, Mapping):
        return sum(map(count_elements, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(count_elements, value))
    return value.numel() if isinstance(value, Tensor) else 0


def as_function(synchronizer: CompressionHook | LocalSteps) -> Any:
    """Return a communication hook that copies of the model share: a method would be copied with all that it holds."""

    def evener_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return synchronizer.hook(bucket)

    return evener_hook
