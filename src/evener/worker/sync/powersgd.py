"""All-reduce matrices as low-rank products: PowerSGD, with error feedback and warm starts.

    M = gradient + residual    P = orthonormal(Σ M·Q)    Q = Σ Mᵀ·P    sum ≈ P·Qᵀ    residual = M - P·(Mᵀ·P)ᵀ

Σ are all-reduces over the n ranks. A step starts with the Q of the step before, the first with a random one that is the
same on all ranks. For a matrix of a rows and b columns and products of rank r, a rank sends 2(n-1)/n · 4·r·(a+b) bytes,
so few that Gloo's own messages count beside them. Vectors, and matrices whose shorter side is not above 2r, are
all-reduced uncompressed.   [Vogels, Karimireddy & Jaggi 2019, algorithm 2; the residual is that of each rank's own part
of the product]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.plan.cost.collective_cost import protocol_overhead_bytes, ring_all_reduce_bytes
from evener.plan.cost.sync_traffic import is_low_rank_smaller as shrinks
from evener.worker.rank.comm_thread import record_current_stream
from evener.worker.sync import CompressionTraits, RankGroup
from evener.worker.sync.bucket_queue import GradBucketSlice

SEED = 0x5EED


class PowerSGD:
    """A lossy all-reduce algorithm: PowerSGD of rank `rank`."""

    # its rounding depends on the CPU model because torch.linalg's QR does
    traits = CompressionTraits(
        is_lossy=True, preserves_norm=False, residual_kinds=("left",), rounding_depends_on_cpu_model=True
    )

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._residuals: dict[nn.Parameter, Tensor] = {}  # (a, b)
        self._q_factors: dict[nn.Parameter, Tensor] = {}  # (b, r)

    def run(self, grads: GradBucketSlice) -> int:
        pairs = list(zip(grads.parameters, grads.views, strict=True))
        low_rank = [
            (parameter, view.view(len(parameter), -1))
            for parameter, view in pairs
            if is_low_rank_smaller(parameter, self._rank)
        ]
        dense = [view for parameter, view in pairs if not is_low_rank_smaller(parameter, self._rank)]
        residuals, factors = (
            (dict(self._residuals), dict(self._q_factors)) if grads.is_warmup else (self._residuals, self._q_factors)
        )
        matrices = []
        for i, (parameter, view) in enumerate(low_rank):
            if parameter not in factors:
                generator = torch.Generator().manual_seed(SEED + 1000 * grads.bucket_index + i)
                factors[parameter] = torch.randn(view.shape[1], self._rank, generator=generator).to(view.device)
            if parameter not in residuals:
                residuals[parameter] = torch.zeros_like(view)
            elif grads.is_warmup:
                residuals[parameter] = residuals[parameter].clone()
            matrices.append(residuals[parameter].add_(view))
        products = [matrix @ factors[parameter] for matrix, (parameter, _) in zip(matrices, low_rank, strict=True)]
        sent_bytes = self._all_reduce_flat([*products, *dense])
        bases = [torch.linalg.qr(product).Q for product in products]
        local_factors = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        sums = [factor.clone() for factor in local_factors]
        sent_bytes += self._all_reduce_flat(sums)
        for (parameter, view), matrix, basis, local, total in zip(
            low_rank, matrices, bases, local_factors, sums, strict=True
        ):
            torch.mm(basis, total.T, out=view)
            matrix.addmm_(basis, local.T, alpha=-1)
            # A gradient of zeros, as below a layer initialized with zeros, is no estimate of the next one's factor.
            record_current_stream(factors[parameter])
            factors[parameter] = torch.where((total != 0).any(), total, factors[parameter])
        return sent_bytes

    def residuals(self) -> list[tuple[nn.Parameter, Tensor]]:
        return list(self._residuals.items())

    def rank_state_dict(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return the residuals, and the factors Q to start with."""
        return {
            "left": {names[parameter]: residual for parameter, residual in self._residuals.items()},
            "factors": {names[parameter]: factor for parameter, factor in self._q_factors.items()},
        }

    def load_rank_state_dict(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._residuals.clear()
        self._q_factors.clear()
        for state in states:
            for name, saved in state.get("left", {}).items():
                residual = saved.to(parameters[name].device)
                self._residuals[parameters[name]] = (
                    self._residuals[parameters[name]] + residual if parameters[name] in self._residuals else residual
                )
            for name, factor in state.get("factors", {}).items():
                self._q_factors.setdefault(parameters[name], factor.to(parameters[name].device))

    def _all_reduce_flat(self, tensors: list[Tensor]) -> int:
        if not tensors or self._group.world_size == 1:
            return 0
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._group.gradient_group)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))
        num_ranks = self._group.world_size
        return ring_all_reduce_bytes(flat.nbytes + protocol_overhead_bytes(self._group.backend, num_ranks), num_ranks)


def is_low_rank_smaller(parameter: Tensor, rank: int) -> bool:
    """Return whether the two factors of a product of rank `rank` are much smaller than this parameter."""
    rows = len(parameter) if parameter.dim() >= 2 else 0
    return rows > 0 and shrinks(rows, parameter.numel() // rows, rank)
