"""All-reduce matrices as low-rank products: PowerSGD, with error feedback and warm starts.

    M = gradient + residual    P = orthonormal(Σ M·Q)    Q = Σ Mᵀ·P    sum ≈ P·Qᵀ    residual = M - P·(Mᵀ·P)ᵀ

Σ are all-reduces over the ranks; Q is the last step's, at first random and the same everywhere. For a matrix of a rows
and b columns 2(n-1)/n · 4·r·(a+b) bytes travel, so few that Gloo's own messages beside them count. Vectors, and
matrices whose shorter side is not above 2r, are all-reduced uncompressed.   [Vogels, Karimireddy & Jaggi 2019,
algorithm 2; the residual is that of each rank's own part of the product]
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
    """A lossy all-reduce algorithm: PowerSGD of rank `rank`."""

    traits = Traits(is_lossy=True, keeps_norm=False, takes=("left",), rounds_by_model=True)  # torch.linalg's QR

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank
        self._left: dict[nn.Parameter, Tensor] = {}  # (a, b)
        self._factors: dict[nn.Parameter, Tensor] = {}  # (b, r)

    def run(self, slots: Slots) -> int:
        pairs = list(zip(slots.parameters, slots.views, strict=True))
        low_rank = [
            (parameter, view.view(len(parameter), -1)) for parameter, view in pairs if is_thin(parameter, self._rank)
        ]
        dense = [view for parameter, view in pairs if not is_thin(parameter, self._rank)]
        residuals, factors = (
            (dict(self._left), dict(self._factors)) if slots.is_rehearsal else (self._left, self._factors)
        )
        matrices = []
        for i, (parameter, view) in enumerate(low_rank):
            if parameter not in factors:
                generator = torch.Generator().manual_seed(SEED + 1000 * slots.bucket + i)
                factors[parameter] = torch.randn(view.shape[1], self._rank, generator=generator).to(view.device)
            if parameter not in residuals:
                residuals[parameter] = torch.zeros_like(view)
            elif slots.is_rehearsal:
                residuals[parameter] = residuals[parameter].clone()
            matrices.append(residuals[parameter].add_(view))
        products = [matrix @ factors[parameter] for matrix, (parameter, _) in zip(matrices, low_rank, strict=True)]
        sent_bytes = self._sum([*products, *dense])
        bases = [torch.linalg.qr(product).Q for product in products]
        local_factors = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        sums = [factor.clone() for factor in local_factors]
        sent_bytes += self._sum(sums)
        for (parameter, view), matrix, basis, local, total in zip(
            low_rank, matrices, bases, local_factors, sums, strict=True
        ):
            torch.mm(basis, total.T, out=view)
            matrix.addmm_(basis, local.T, alpha=-1)
            # A gradient of zeros, as below a layer initialized with zeros, is no estimate of the next one's factor.
            keep_for_this_stream(factors[parameter])
            factors[parameter] = torch.where((total != 0).any(), total, factors[parameter])
        return sent_bytes

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return list(self._left.items())

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return the residuals, and the factors Q to start with."""
        return {
            "left": {names[parameter]: residual for parameter, residual in self._left.items()},
            "factors": {names[parameter]: factor for parameter, factor in self._factors.items()},
        }

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._left.clear()
        self._factors.clear()
        for state in states:
            for name, saved in state.get("left", {}).items():
                residual = saved.to(parameters[name].device)
                self._left[parameters[name]] = (
                    self._left[parameters[name]] + residual if parameters[name] in self._left else residual
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
    """Return whether a product of rank `rank` is much smaller than this parameter."""
    rows = len(parameter) if parameter.dim() >= 2 else 0
    return rows > 0 and shrinks(rows, parameter.numel() // rows, rank)
