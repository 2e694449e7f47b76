"""All-reduce the dense rest of a bucket whose embedding tables are reduced sparsely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.plan.collectives import ring_all_reduce_bytes
from evener.worker.group import Group
from evener.worker.sync import Traits
from evener.worker.sync.codes import Scratch
from evener.worker.sync.lane import Slots


class Whole:
    """A lossless, stateless all-reduce algorithm."""

    traits = Traits()

    def __init__(self, group: Group) -> None:
        self._group, self._together = group, Scratch()

    def run(self, slots: Slots) -> int:
        flat = slots.views[0]
        if len(slots.views) > 1:
            flat = torch.cat(slots.views, out=self._together.take(slots.num, flat.device))
        dist.all_reduce(flat, group=self._group.gradients)
        if len(slots.views) > 1:
            for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True):
                view.copy_(flat[begin:end])
        return ring_all_reduce_bytes(flat.nbytes, self._group.world_size)

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return []

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return {}

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        pass
