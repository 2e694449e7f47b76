"""Synchronize gradients over a fast link: a summing all-reduce of each DDP bucket, between two clock marks.

A rank sends 2(n-1)/n · P bytes a step, P = bytes of the gradients (ring all-reduce).   [Patarasuk & Yuan 2009]
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.run.step_spans import BucketCommEvent
from evener.plan.cost.collective_cost import ring_all_reduce_bytes
from evener.worker.rank.clock import Clock
from evener.worker.sync import RankGroup, StatelessReduction


class AllReduceHook(StatelessReduction):
    """DDP's own all-reduce, summing instead of averaging."""

    def __init__(self, group: RankGroup, clock: Clock) -> None:
        self._group, self._clock = group, clock
        self._comm_events: list[BucketCommEvent] = []

    def start(
        self, bucket: dist.GradBucket, *, is_warmup: bool, sample_gradients: bool
    ) -> torch.futures.Future[Tensor]:
        index, buffer, events, begin = bucket.index(), bucket.buffer(), self._comm_events, self._clock.mark()
        sent_bytes = ring_all_reduce_bytes(buffer.nbytes, self._group.world_size)

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            events.append(BucketCommEvent(index, begin, self._clock.mark(), buffer.nbytes, sent_bytes))
            return future.value()[0]

        work = dist.all_reduce(buffer, group=self._group.gradient_group, async_op=True)
        return work.get_future().then(done)

    def wait_all(self) -> None:
        pass  # the reducer has waited for the futures that `start` returned

    def abort(self) -> None:
        pass  # Gloo's own threads end the work

    def close(self) -> None:
        pass

    def take_fidelity(self) -> Tensor | None:
        return None

    def take_comm_events(self) -> list[BucketCommEvent]:
        taken, self._comm_events = self._comm_events, []
        return taken
