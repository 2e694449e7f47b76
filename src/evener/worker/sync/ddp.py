"""Synchronize gradients over a fast link: a summing all-reduce of each DDP bucket, between two clock marks.

A rank sends 2(n-1)/n · P bytes a step, P = bytes of the gradients (ring all-reduce).   [Patarasuk & Yuan 2009]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.plan.collectives import ring_all_reduce_bytes
from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import Exchanged, Traits


class AllReduce:
    """DDP's own all-reduce, summing instead of averaging. Stateless."""

    def __init__(self, group: Group, clock: Clock) -> None:
        self._group, self._clock = group, clock
        self._bytes = 0
        self._exchanged: list[Exchanged] = []

    traits = Traits()

    def start(self, bucket: dist.GradBucket, *, is_rehearsal: bool, samples: bool) -> torch.futures.Future[Tensor]:
        index, buffer, events, begin = bucket.index(), bucket.buffer(), self._exchanged, self._clock.mark()
        sent_bytes = ring_all_reduce_bytes(buffer.nbytes, self._group.world_size)
        self._bytes += sent_bytes

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            events.append(Exchanged(index, begin, self._clock.mark(), buffer.nbytes, sent_bytes))
            return future.value()[0]

        work = dist.all_reduce(buffer, group=self._group.gradients, async_op=True)
        return work.get_future().then(done)

    def finish(self) -> None:
        pass  # the reducer has waited for the futures that `start` returned

    def abandon(self) -> None:
        pass  # Gloo's own threads end the work

    def take_bytes(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken

    def take_fidelity(self) -> Tensor | None:
        return None

    def take_exchanged(self) -> list[Exchanged]:
        taken, self._exchanged = self._exchanged, []
        return taken

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return []

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return {}

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        pass
