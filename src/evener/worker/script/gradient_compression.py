"""Sum the gradients of a program's DDP models by a strategy of evener's own: `evener launch --sync int8 -- train.py`.

A communication hook passes each bucket to the strategy's all-reduce, on a thread and in a process group of its own, so
that it overlaps with backward and never meets the program's collectives. A lossy strategy keeps what it has not sent
yet, and sends it with later gradients (error feedback).
"""

# No `from __future__ import annotations`: torch inspects the hook's annotations.
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.run.roster import Backend, SyncSpec
from evener.worker.rank.clock import Clock, CudaClock, HostClock
from evener.worker.script.report import warn
from evener.worker.script.step_measurement import StepMeasurement
from evener.worker.sync.bucket_queue import BucketQueue
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


class CompressionHook:
    """DDP's communication hook of one model."""

    def __init__(self, model: Any, sync: SyncSpec, measurement: StepMeasurement | None) -> None:
        """All ranks of the model's group call it together, as it makes a process group."""
        group: Any = dist.new_group(backend=dist.get_backend(model.process_group))
        device = next(model.parameters()).device
        clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
        backend: Backend = "nccl" if dist.get_backend(group) == "nccl" else "gloo"
        self._group = ProgramGroup(dist.get_rank(), dist.get_world_size(), device, backend, group)
        self._queue = BucketQueue(self._group, clock, make_algorithm(sync, self._group), frozenset())
        self._measurement = measurement
        self._num_passes, self._is_in_pass = 0, False
        if measurement is not None:
            measurement.call_after_backward(self._end_pass)

    def reduce(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
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


def make_compression_hook(model: Any, sync: SyncSpec, measurement: StepMeasurement | None) -> Any:
    """Return the hook for a DDP model; None, with a warning, if the strategy does not fit the model."""
    problem = ""
    if any(parameter.requires_grad and parameter.dtype != torch.float32 for parameter in model.parameters()):
        problem = "some of its weights are not fp32"
    elif dist.get_process_group_ranks(model.process_group) != list(range(dist.get_world_size())):
        problem = "its process group is a part of the ranks"
    if problem:
        warn(f"--sync {sync} has no effect on a DDP model: {problem}", hint="its gradients are summed by DDP itself")
        return None
    return CompressionHook(model, sync, measurement).reduce
