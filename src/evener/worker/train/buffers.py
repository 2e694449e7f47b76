"""Average buffers that forward changes, such as running statistics, over the micro-batches of all ranks.

Each micro-batch starts from the buffers that the step started with; after the step they are the mean of the results of
all micro-batches of all ranks. So they do not depend on which rank ran which micro-batch, nor on the order, and are
equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class BufferSnapshot:
    """A snapshot of some buffers of a module. Forward may write into a buffer, or replace it by another tensor."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._places: list[tuple[str, dict[str, Any], str]] = []
        for name in names:
            owner, _, key = name.rpartition(".")
            self._places.append((name, module.get_submodule(owner)._buffers, key))
        self._tensors = [place[key] for _, place, key in self._places]
        self._before = [tensor.detach().clone() for tensor in self._tensors]

    def current(self) -> list[Tensor]:
        """Return the current values; a buffer whose shape or dtype changed is a cache, and keeps its old value."""
        current = [place[key] for _, place, key in self._places]
        return [
            now if has_same_shape_and_dtype(now, before) else before
            for now, before in zip(current, self._before, strict=True)
        ]

    def mutated_names(self) -> list[str]:
        """Return the names of the buffers whose values have changed."""
        return [name for (name, place, key), before in zip(self._places, self._before, strict=True)
                if not (has_same_shape_and_dtype(place[key], before) and torch.equal(place[key], before))]  # fmt: skip

    def restore(self) -> None:
        """Restore the snapshot's tensors and their values."""
        self.assign(self._before)

    @torch.no_grad()
    def assign(self, values: Iterable[Tensor]) -> None:
        """Restore the snapshot's tensors and set them to `values`: one for each buffer, of any shape."""
        for (_, place, key), tensor, value in zip(self._places, self._tensors, values, strict=True):
            place[key] = tensor
            tensor.copy_(value.view(tensor.shape))


def has_same_shape_and_dtype(one: Tensor | None, other: Tensor) -> bool:
    """Return whether both have the same shape and dtype."""
    return one is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


class BufferAverager:
    """Averages the buffers of one step over all micro-batches. Costs nothing if there are none."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._buffers = BufferSnapshot(module, names)
        self._sizes = [buffer.numel() for buffer in self._buffers.current()]
        self._total = torch.zeros(sum(self._sizes) + 1, dtype=torch.float64)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the buffers after a micro-batch's forward and backward to the sum, and restore them."""
        if self._sizes:
            flat = [buffer.flatten().to("cpu", torch.float64) for buffer in self._buffers.current()]
            self._total += torch.cat([*flat, torch.ones(1, dtype=torch.float64)])  # the last one counts micro-batches
            self._buffers.restore()

    def average(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Set the buffers to their mean. `all_reduce_sum` sums a vector over ranks; all ranks call this."""
        if self._sizes:
            total = all_reduce_sum(self._total)  # including the number of micro-batches of all ranks
            self._buffers.assign((total[:-1] / total[-1]).split(self._sizes))
