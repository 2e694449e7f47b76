"""How do gradients travel in half the bytes, and nothing is lost? Those that are bf16 numbers anyway travel as bf16.

Under bf16 autocast the gradient of a linear layer's weight is computed in bf16 and only then written as fp32, where its
lower half is 0, as long as one backward alone has added to it. Embeddings, norms and what several micro-batches add up
are not like that. So it is looked at, tensor by tensor, in every step, and each rank tells the others what it found;
what does not fit travels as fp32.

Two ranks send each other everything: P/2 where all of it fits, and the sums are DDP's to the bit. More than two
scatter: each sends the p-th part to rank p, which adds in fp32 in the order of the ranks; the sums travel in fp32:
(n-1)/n · (P/2 + P).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from evener.worker.group import Group
from evener.worker.sync import Traits
from evener.worker.sync.codes import PIECE, Scratch
from evener.worker.sync.lane import Slots
from evener.worker.sync.swap import swap

ALIGN_BYTES = 8
LOWER_HALF = 0xFFFF  # of an fp32: what bf16 has not


class Packed:
    """An Exchange that loses and remembers nothing."""

    traits = Traits()

    def __init__(self, group: Group) -> None:
        self._group, self._scratch = group, Scratch()
        self._outgoing, self._incoming = ([Scratch(torch.uint8) for _ in range(group.world_size)] for _ in range(2))

    def run(self, slots: Slots) -> int:
        if self._group.world_size == 2:
            other = 1 - self._group.rank
            payloads, fits, sent = self._trade([slots.views, slots.views])
            for view, values in zip(slots.views, values_of(payloads[other], fits[other], slots.views), strict=True):
                self.add(values, view)  # a + b is b + a
            return sent
        return self._by_parts(slots)

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return []

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return {}

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        pass

    def _by_parts(self, slots: Slots) -> int:
        group, rank = self._group, self._group.rank
        bounds = [slots.num * part // group.world_size for part in range(group.world_size + 1)]
        parts = [[view[max(0, low - begin) : max(0, high - begin)]
                  for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True)
                  if begin < high and end > low]
                 for low, high in pairwise(bounds)]  # fmt: skip
        payloads, fits, sent = self._trade(parts)
        mine = [view.clone() for view in parts[rank]]
        for view in parts[rank]:
            view.zero_()
        for peer in range(group.world_size):
            told = mine if peer == rank else values_of(payloads[peer], fits[peer], parts[rank])
            for view, values in zip(parts[rank], told, strict=True):
                self.add(values, view)
        sums = [scratch.take(4 * (high - low), mine[0].device if mine else slots.views[0].device).view(torch.float32)
                for scratch, (low, high) in zip(self._incoming, pairwise(bounds), strict=True)]  # fmt: skip
        if parts[rank]:
            torch.cat(parts[rank], out=sums[rank])
        sent += swap(group, [sums[rank]] * group.world_size, sums)
        for part, total in zip(parts, sums, strict=True):
            reached = 0
            for view in part:
                view.copy_(total[reached : reached + len(view)])
                reached += len(view)
        return sent

    def _trade(self, parts: list[list[Tensor]]) -> tuple[list[Tensor], list[list[bool]], int]:
        """Send parts[peer] to each peer: (what each sent, which of its tensors came as bf16, bytes sent)."""
        group, here, device = self._group, parts[self._group.rank], self._group.device
        outgoing, told = [], []
        for peer, (part, scratch) in enumerate(zip(parts, self._outgoing, strict=True)):
            sends = peer != group.rank
            payload = scratch.take(sum(_room(4 * len(view)) for view in part) if sends else 0, device)
            found = self.pack(part, payload) if sends else [True] * len(part)
            outgoing.append(payload[: _size(found, part)])
            told.append(torch.tensor(found, dtype=torch.uint8, device=device))
        heard = [torch.empty(len(here), dtype=torch.uint8, device=device) for _ in parts]
        sent = swap(group, told, heard)
        fits = [[bool(fit) for fit in fits.tolist()] for fits in heard]
        incoming = [scratch.take(_size(found, here) if peer != group.rank else 0, device)
                    for peer, (scratch, found) in enumerate(zip(self._incoming, fits, strict=True))]  # fmt: skip
        return incoming, fits, sent + swap(group, outgoing, incoming)

    def pack(self, views: list[Tensor], payload: Tensor) -> list[bool]:
        """Write each as bf16 where that is the same number everywhere, else as fp32; which are bf16?"""
        found, reached = [], 0
        for view in views:
            fits = self._pack_one(view, payload[reached : reached + 2 * len(view)].view(torch.bfloat16))
            if not fits:
                payload[reached : reached + 4 * len(view)].view(torch.float32).copy_(view)
            found.append(fits)
            reached += _room((2 if fits else 4) * len(view))
        return found

    def _pack_one(self, view: Tensor, coded: Tensor) -> bool:
        """Is the lower half of every number 0? Then its upper half is written. (Twice as fast as torch.equal.)"""
        if not len(view):  # of a bucket with fewer numbers than ranks
            return True
        size = PIECE[view.device.type]
        for piece, short in zip(view.split(size), coded.split(size), strict=True):
            lower = self._scratch.like(piece).view(torch.int32)
            if torch.bitwise_and(piece.view(torch.int32), LOWER_HALF, out=lower).amax():
                return False
            short.copy_(piece)
        return True

    def add(self, values: Tensor, view: Tensor) -> None:
        """Add what came, bf16 or fp32, to the gradient."""
        size = PIECE[view.device.type]
        for more, piece in zip(values.split(size), view.split(size), strict=True):
            piece.add_(more if more.dtype == piece.dtype else self._scratch.like(piece).copy_(more))


def values_of(payload: Tensor, fits: list[bool], views: list[Tensor]) -> list[Tensor]:
    """What a payload holds for these tensors."""
    found, reached = [], 0
    for fit, view in zip(fits, views, strict=True):
        num_bytes = (2 if fit else 4) * len(view)
        found.append(payload[reached : reached + num_bytes].view(torch.bfloat16 if fit else torch.float32))
        reached += _room(num_bytes)
    return found


def _size(fits: list[bool], views: list[Tensor]) -> int:
    return sum(_room((2 if fit else 4) * len(view)) for fit, view in zip(fits, views, strict=True))


def _room(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
