"""How do replicas agree over a fast link? torch's DistributedDataParallel, summing, with its all-reduces timed.

A rank sends 2(n-1)/n · P bytes a step, P = bytes of the gradients (ring all-reduce).   [Patarasuk & Yuan 2009]
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.plan.collectives import ring_all_reduce_bytes
from evener.worker.clock import Clock


class DDP:
    """The hook replaces DDP's own all-reduce by the same one, summing instead of averaging, between two clock marks."""

    name = "ddp"

    def __init__(self, world_size: int, device: torch.device, clock: Clock, lap: Callable[[str], None]) -> None:
        self._world_size = world_size
        self._device = device
        self._clock = clock
        self._lap = lap
        self._in_flight: list[tuple[Any, Any]] = []
        self.bytes_per_step = 0
        self.waits = False

    def wrap(self, module: nn.Module) -> nn.Module:
        gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        self.bytes_per_step = ring_all_reduce_bytes(gradient_bytes, self._world_size)
        self._module = DistributedDataParallel(
            module,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # the buckets are the gradients: a copy less each way
            forward_sync_buffers=False,  # rank 0's are the ones that are saved
        )
        self._module.register_comm_hook(None, self._all_reduce)
        return self._module

    def arm(self, last: bool) -> None:
        self._module.require_backward_grad_sync = self.waits = last

    def take_sync_s(self) -> float:
        spans = [(self._clock.seconds(self._first, begin), self._clock.seconds(self._first, end))
                 for begin, end in self._in_flight]  # fmt: skip
        self._in_flight = []
        return union_s(spans)

    def _all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            self._lap("compute_s")  # the last gradient is there: from here on backward only waits
        begin, in_flight = self._clock.mark(), self._in_flight
        if bucket.index() == 0:
            self._first = begin

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            in_flight.append((begin, self._clock.mark()))
            return future.value()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)


def union_s(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> union_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
