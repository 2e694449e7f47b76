"""What becomes of buffers that forward changes, such as running statistics, when a batch is divided?

Each micro-batch finds them as the step found them; after the step they are the mean of what all micro-batches of all
ranks made of them. So they do not depend on who ran which micro-batch, nor in which order, and are equal everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Buffers:
    """Some buffers of a module as they are now. Forward may write into one, or put another tensor in its place."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._places: list[tuple[str, dict[str, Any], str]] = []
        for name in names:
            owner, _, key = name.rpartition(".")
            self._places.append((name, module.get_submodule(owner)._buffers, key))
        self._tensors = [place[key] for _, place, key in self._places]
        self._before = [tensor.detach().clone() for tensor in self._tensors]

    def now(self) -> list[Tensor]:
        """What they hold; one that has another shape or type now is a cache, and counts as it was."""
        found = [place[key] for _, place, key in self._places]
        return [now if is_alike(now, before) else before for now, before in zip(found, self._before, strict=True)]

    def moved(self) -> list[str]:
        """Names of those whose value is another one."""
        return [name for (name, place, key), before in zip(self._places, self._before, strict=True)
                if not (is_alike(place[key], before) and torch.equal(place[key], before))]  # fmt: skip

    def put_back(self) -> None:
        """The tensors of then, with the values of then."""
        self.put(self._before)

    @torch.no_grad()
    def put(self, values: Iterable[Tensor]) -> None:
        """The tensors of then, with these values: one each, of any shape."""
        for (_, place, key), tensor, value in zip(self._places, self._tensors, values, strict=True):
            place[key] = tensor
            tensor.copy_(value.view(tensor.shape))


def is_alike(one: Tensor | None, other: Tensor) -> bool:
    """Of one shape and type?"""
    return one is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


class MovingBuffers:
    """The buffers of one pass. None at all costs nothing."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._buffers = Buffers(module, names)
        self._sizes = [buffer.numel() for buffer in self._buffers.now()]
        self._total = torch.zeros(sum(self._sizes) + 1, dtype=torch.float64)

    @torch.no_grad()
    def take(self) -> None:
        """A micro-batch is over, forward and backward: note what it made of them, and put them back."""
        if self._sizes:
            flat = [buffer.flatten().to("cpu", torch.float64) for buffer in self._buffers.now()]
            self._total += torch.cat([*flat, torch.ones(1, dtype=torch.float64)])  # the last counts micro-batches
            self._buffers.put_back()

    def settle(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """The pass is over: the mean. `over_ranks` sums a vector over all ranks, which call this together."""
        if self._sizes:
            total = over_ranks(self._total)  # in it, micro-batches of all ranks
            self._buffers.put((total[:-1] / total[-1]).split(self._sizes))
