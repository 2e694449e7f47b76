"""Do the replicas hold the same bits, and if not, which rank differs, and where first?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 20
LEAST = 1e-30
_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that disagrees."""

    rank: int
    tensor: str


def tensor_hash(tensor: Tensor) -> int:
    """Σ wᵢ·xᵢ mod 2^64 of the tensor's bits, with fixed odd random weights; on the tensor's own device.

    One changed element always changes it (an odd weight has an inverse), any other change all but surely: the family is
    universal.   [Carter & Wegman 1979]
    """
    bits = tensor.detach().contiguous().view(-1).view(_INT[tensor.element_size()])
    generator = torch.Generator().manual_seed(0x5EED)
    weights = torch.randint(-(2**62), 2**62, (min(_CHUNK, len(bits)),), generator=generator).to(bits.device) * 2 + 1
    total = torch.tensor(len(bits), device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * 0x9E3779B97F4A7C1 + (chunk.to(torch.int64) * weights[: len(chunk)]).sum()
    return int(total)


def hash_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Hashes by name, as hex."""
    return {name: f"{tensor_hash(tensor) % 2**64:016x}" for name, tensor in named}


def gather_hashes(hashes: dict[str, str], world_size: int, group: Any) -> list[list[str]]:
    """[rank][tensor]: every rank's hashes, on every rank."""
    mine = torch.tensor([int(value, 16) - 2**63 for value in hashes.values()], dtype=torch.int64)
    if world_size == 1:
        return [list(hashes.values())]
    everyone = torch.empty(world_size, len(mine), dtype=torch.int64)
    dist.all_gather_single(everyone, mine[None], group=group)
    return [[f"{value + 2**63:016x}" for value in row] for row in everyone.tolist()]


@torch.no_grad()
def take_over(named: Mapping[str, Tensor], group: Any, is_first: bool) -> tuple[str, float]:
    """Take rank 0's tensors: (where ours differed most, by how much, relative to the tensor's largest number).

    All ranks call it together.
    """
    worst, at = 0.0, ""
    for name, tensor in named.items():
        theirs = tensor.detach().cpu().contiguous()
        theirs = theirs if is_first else torch.empty_like(theirs)
        dist.broadcast(theirs, src=0, group=group)
        if not is_first:
            here = theirs.to(tensor.device)
            apart = float((tensor - here).abs().max()) if tensor.is_floating_point() else float((tensor != here).any())
            largest = max(LEAST, float(here.abs().max())) if tensor.is_floating_point() else 1.0
            if not apart <= worst * largest:  # NaN, too
                worst, at = apart / largest, name
            tensor.copy_(here)
    return at, worst


def odd_ones(replica_hashes: list[list[str]]) -> list[int]:
    """Ranks that do not hold what more than half of all hold; [] where there is no such half.

    >>> odd_ones([["1", "2"], ["1", "3"], ["1", "2"]]), odd_ones([["1"], ["2"]])
    ([1], [])
    """
    usual, num = Counter(map(tuple, replica_hashes)).most_common(1)[0]
    return [rank for rank, row in enumerate(replica_hashes) if tuple(row) != usual and 2 * num > len(replica_hashes)]


def differences(names: list[str], replica_hashes: list[list[str]]) -> list[Difference]:
    """Every (rank, tensor) that is not what most ranks hold; of two ranks it is the second that is named.

    >>> differences(["a", "b"], [["1", "2"], ["1", "3"], ["1", "2"]])
    [Difference(rank=1, tensor='b')]
    """
    found = []
    for i, name in enumerate(names):
        held = [row[i] for row in replica_hashes]
        usual = Counter(held).most_common(1)[0][0]  # ties go to the lowest rank
        found += [Difference(rank=rank, tensor=name) for rank, value in enumerate(held) if value != usual]
    return found
