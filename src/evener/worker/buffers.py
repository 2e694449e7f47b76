"""What becomes of buffers that forward changes, such as running statistics, when a batch is divided?

Each micro-batch finds them as the step found them; after the step they are the mean of what all micro-batches of all
ranks made of them. So they do not depend on who ran which micro-batch, nor in which order, and are equal everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class MovingBuffers:
    """The buffers of one pass. None at all costs nothing."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = list(buffers)
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self._total = torch.zeros(sum(buffer.numel() for buffer in self._buffers) + 1, dtype=torch.float64)

    @torch.no_grad()
    def take(self) -> None:
        """A micro-batch is over, forward and backward: note what it made of them, and put them back."""
        if self._buffers:
            flat = [buffer.flatten().to("cpu", torch.float64) for buffer in self._buffers]
            self._total += torch.cat([*flat, torch.ones(1, dtype=torch.float64)])  # the last counts micro-batches
            self._put(self._before)

    @torch.no_grad()
    def settle(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """The pass is over: the mean. `over_ranks` sums a vector over all ranks, which call this together."""
        if self._buffers:
            total = over_ranks(self._total)  # in it, micro-batches of all ranks
            mean = total[:-1] / total[-1]
            self._put(list(mean.split([buffer.numel() for buffer in self._buffers])))

    def _put(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value.view(buffer.shape))
