"""How does the dense rest of a bucket travel whose tables go row by row? As it would without them: an all-reduce."""

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
    """An Exchange that loses and remembers nothing."""

    traits = Traits()

    def __init__(self, group: Group) -> None:
        self._group, self._together = group, Scratch()

    def run(self, slots: Slots) -> int:
        whole = slots.views[0]
        if len(slots.views) > 1:
            whole = torch.cat(slots.views, out=self._together.take(slots.num, whole.device))
        dist.all_reduce(whole, group=self._group.gradients)
        if len(slots.views) > 1:
            for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True):
                view.copy_(whole[begin:end])
        return ring_all_reduce_bytes(whole.nbytes, self._group.world_size)

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return []

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return {}

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        pass
