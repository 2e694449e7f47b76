"""Synchronize a program's DDP models by a strategy of evener's own: `evener launch --sync int8 -- train.py`.

A communication hook passes each bucket to the strategy's all-reduce, on a thread and in a process group of its own, so
that it overlaps with backward and never meets the program's collectives. A lossy strategy keeps what it has not sent
yet, and sends it with later gradients (error feedback).

With `diloco:H` the hook sends nothing: each rank updates with its own gradients, and after every H-th update the ranks
exchange how far their weights have moved.
"""

# No `from __future__ import annotations`: torch inspects the hook's annotations.
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.core.run.roster import Backend, SyncSpec
from evener.worker.rank.clock import Clock, CudaClock, HostClock
from evener.worker.script.group_checks import OWN_GROUP
from evener.worker.script.report import warn
from evener.worker.script.step_measurement import StepMeasurement
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


class CompressionHook:
    """DDP's communication hook of one model."""

    def __init__(self, model: Any, sync: SyncSpec, measurement: StepMeasurement | None) -> None:
        """All ranks of the model's group call it together, as it makes a process group."""
        self._group = _make_group(model)
        self._queue = BucketQueue(self._group, _make_clock(self._group), make_algorithm(sync, self._group), frozenset())
        self._measurement = measurement
        self._num_passes, self._is_in_pass = 0, False
        if measurement is not None:
            measurement.call_after_backward(self._end_pass)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the future of a bucket's mean over the ranks."""
        if bucket.index() == 0:
            self._end_pass()  # the one before, if nobody measures or it raised
            self._num_passes, self._is_in_pass = self._num_passes + 1, True
        buffer = bucket.buffer().div_(self._group.world_size)
        job = self._queue.submit(
            bucket, is_warmup=False, sample_gradients=self._num_passes % SAMPLE_EVERY == SAMPLE_EVERY - 1
        )
        if self._measurement is not None:
            self._measurement.mark_bucket_ready()
        devices: Any = [self._group.device] if self._group.device.type == "cuda" else None
        mean: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

        def pass_on(done: Future[None]) -> None:
            error = done.exception()
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


class LocalSteps:
    """Local steps of one DDP model between exchanges of its weights, by DiLoCo.

    A step ends when optimizers have updated all trainable parameters of the model, or at the latest before the forward
    pass that follows an update.
    """

    def __init__(self, model: Any, sync: SyncSpec, measurement: StepMeasurement | None) -> None:
        """All ranks of the model's group call it together, as it makes a process group."""
        self._group, self._measurement = _make_group(model), measurement
        ranks: Any = self._group  # which of a run's groups holds all that is needed while nobody joins or leaves
        self._diloco = DiLoCo(ranks, _make_clock(self._group), self._lap, sync)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # DDP has made the weights equal, and exchanges no others even if they are unfrozen later.
        self._diloco.wrap(nn.ParameterList(trainable), all_params_used=True, is_under_way=True)
        self._trainable = {id(parameter) for parameter in trainable}
        self._is_pass_over, self._updated = False, set[int]()  # of the present step: ids of tensors
        self._num_steps = 0

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Leave a bucket with this rank's own gradients."""
        self._is_pass_over = self._is_pass_over or bucket.is_last()
        return completed_future(bucket)

    def after_update(self, optimizer: Any) -> None:
        """Note an update of an optimizer."""
        tensors = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        self._updated |= tensors & self._trainable
        if self._updated == self._trainable:
            self.end_step()

    def end_step(self) -> None:
        """End a step, if an update has followed the newest backward pass; every H-th one exchanges the weights."""
        if not (self._is_pass_over and self._updated):
            return
        self._is_pass_over, self._updated = False, set()
        self._diloco.after_optimizer_step(1.0, float(self._group.world_size))  # as in DDP, each rank counts the same
        self._diloco.after_step(self._num_steps)
        self._num_steps += 1
        if self._measurement is not None:
            self._measurement.add_sent(self._diloco.take_comm_stats().sent_bytes)

    def is_synced(self) -> bool:
        """Return whether all ranks have the same weights."""
        return self._diloco.is_synced()

    def _lap(self, phase: str) -> None:
        """DiLoCo's laps: the measurement sees the collectives themselves."""


def make_synchronizer(
    model: Any, sync: SyncSpec, measurement: StepMeasurement | None, *, why_not_local: str
) -> CompressionHook | LocalSteps | None:
    """Return what synchronizes a DDP model; None, with a warning, if the strategy does not fit it.

    `why_not_local`: why the program's updates cannot be of each rank alone; "" if they can.
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
    return (LocalSteps if sync.drifts else CompressionHook)(model, sync, measurement)


def as_function(synchronizer: CompressionHook | LocalSteps) -> Any:
    """Return a communication hook that copies of the model share: a method would be copied with all that it holds."""

    def evener_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return synchronizer.hook(bucket)

    return evener_hook
