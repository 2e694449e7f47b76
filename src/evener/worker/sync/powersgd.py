"""How is a matrix exchanged as a product of two thin ones? PowerSGD, with error feedback and warm starts.

    M = gradient + what is left    P = orthonormal(Σ M·Q)    Q = Σ Mᵀ·P    sum ≈ P·Qᵀ    left = M - P·(Mᵀ·P)ᵀ

Σ are all-reduces over the ranks; Q is the last step's, at first random and the same everywhere. For a matrix of a rows
and b columns 2(n-1)/n · 4·r·(a+b) bytes travel, so few that what Gloo says beside them counts. Vectors, and matrices
whose shorter side is not above 2r, go as they are.
[Vogels, Karimireddy & Jaggi 2019, algorithm 2; what is left is kept for each rank's own part of the product]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.plan.collectives import ring_all_reduce_bytes, words_bytes
from evener.plan.sync import is_thin as shrinks
from evener.worker.group import Group
from evener.worker.sync import Traits
from evener.worker.sync.jobs import keep_for_this_stream
from evener.worker.sync.lane import Slots

SEED = 0x5EED


class PowerSGD:
    """An Exchange of rank `rank`."""

    traits = Traits(is_lossy=True, keeps_norm=False, takes=("left",), rounds_by_model=True)  # torch.linalg's QR

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank
        self._left: dict[nn.Parameter, Tensor] = {}  # (a, b)
        self._factors: dict[nn.Parameter, Tensor] = {}  # (b, r)

    def run(self, slots: Slots) -> int:
        pairs = list(zip(slots.parameters, slots.views, strict=True))
        thin = [
            (parameter, view.view(len(parameter), -1)) for parameter, view in pairs if is_thin(parameter, self._rank)
        ]
        whole = [view for parameter, view in pairs if not is_thin(parameter, self._rank)]
        left, factors = (dict(self._left), dict(self._factors)) if slots.is_rehearsal else (self._left, self._factors)
        matrices = []
        for i, (parameter, view) in enumerate(thin):
            if parameter not in factors:
                generator = torch.Generator().manual_seed(SEED + 1000 * slots.bucket + i)
                factors[parameter] = torch.randn(view.shape[1], self._rank, generator=generator).to(view.device)
            if parameter not in left:
                left[parameter] = torch.zeros_like(view)
            elif slots.is_rehearsal:
                left[parameter] = left[parameter].clone()
            matrices.append(left[parameter].add_(view))
        products = [matrix @ factors[parameter] for matrix, (parameter, _) in zip(matrices, thin, strict=True)]
        sent = self._sum([*products, *whole])
        bases = [torch.linalg.qr(product).Q for product in products]
        mine = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        sums = [one.clone() for one in mine]
        sent += self._sum(sums)
        for (parameter, view), matrix, basis, own, total in zip(thin, matrices, bases, mine, sums, strict=True):
            torch.mm(basis, total.T, out=view)
            matrix.addmm_(basis, own.T, alpha=-1)
            # A gradient of nothing but zeros, as below a layer that begins with zeros, says nothing of the next one's.
            keep_for_this_stream(factors[parameter])
            factors[parameter] = torch.where((total != 0).any(), total, factors[parameter])
        return sent

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return list(self._left.items())

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """What is left, and the factors to begin with."""
        return {
            "left": {names[parameter]: left for parameter, left in self._left.items()},
            "factors": {names[parameter]: factor for parameter, factor in self._factors.items()},
        }

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._left.clear()
        self._factors.clear()
        for state in states:
            for name, left in state.get("left", {}).items():
                here = left.to(parameters[name].device)
                self._left[parameters[name]] = (
                    self._left[parameters[name]] + here if parameters[name] in self._left else here
                )
            for name, factor in state.get("factors", {}).items():
                self._factors.setdefault(parameters[name], factor.to(parameters[name].device))

    def _sum(self, tensors: list[Tensor]) -> int:
        if not tensors or self._group.world_size == 1:
            return 0
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._group.gradients)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))
        num_ranks = self._group.world_size
        return ring_all_reduce_bytes(flat.nbytes + words_bytes(self._group.backend, num_ranks), num_ranks)


def is_thin(parameter: Tensor, rank: int) -> bool:
    """Is a product of rank `rank` much smaller than this parameter?"""
    rows = len(parameter) if parameter.dim() >= 2 else 0
    return rows > 0 and shrinks(rows, parameter.numel() // rows, rank)
