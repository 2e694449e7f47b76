"""Replica hashes: find out whether replicas are bitwise equal, and which rank differs in which tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20
MIN_SCALE = 1e-30
_INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in which a rank's replica differs from the others."""

    rank: int
    tensor: str


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of the tensor's bits, computed on the tensor's device.

    For each chunk of _CHUNK_ELEMENTS it is Σ wᵢ·xᵢ mod 2^64, where xᵢ are the bits of an element as an integer and wᵢ
    fixed odd random weights. One changed element always changes the hash (an odd weight has an inverse), any other
    change almost surely: the family is universal.   [Carter & Wegman 1979]
    """
    bits = tensor.detach().contiguous().view(-1).view(_INT_DTYPES[tensor.element_size()])
    generator = torch.Generator().manual_seed(0x5EED)
    weights = (
        torch.randint(-(2**62), 2**62, (min(_CHUNK_ELEMENTS, len(bits)),), generator=generator).to(bits.device) * 2 + 1
    )
    total = torch.tensor(len(bits), device=bits.device)
    for chunk in bits.split(_CHUNK_ELEMENTS):
        total = total * 0x9E3779B97F4A7C1 + (chunk.to(torch.int64) * weights[: len(chunk)]).sum()
    return int(total)


def hash_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the hash of each tensor by name, as 16 hex digits."""
    return {name: f"{hash_tensor(tensor) % 2**64:016x}" for name, tensor in named}


def gather_hashes(hashes: dict[str, str], world_size: int, group: Any) -> list[list[str]]:
    """Gather every rank's hashes on every rank: [rank][tensor]."""
    mine = torch.tensor([int(value, 16) - 2**63 for value in hashes.values()], dtype=torch.int64)
    if world_size == 1:
        return [list(hashes.values())]
    all_hashes = torch.empty(world_size, len(mine), dtype=torch.int64)
    dist.all_gather_single(all_hashes, mine[None], group=group)
    return [[f"{value + 2**63:016x}" for value in row] for row in all_hashes.tolist()]


@torch.no_grad()
def copy_from_rank0(named: Mapping[str, Tensor], group: Any, is_source: bool) -> tuple[str, float]:
    """Broadcast rank 0's tensors into this rank's; all ranks call it.

    Return (name, difference) of the tensor that differed most on this rank: its largest difference, relative to the
    largest number of rank 0's tensor.
    """
    worst, at = 0.0, ""
    for name, tensor in named.items():
        theirs = tensor.detach().cpu().contiguous()
        theirs = theirs if is_source else torch.empty_like(theirs)
        dist.broadcast(theirs, src=0, group=group)
        if not is_source:
            source = theirs.to(tensor.device)
            is_float = tensor.is_floating_point()
            diff = float((tensor - source).abs().max()) if is_float else float((tensor != source).any())
            largest = max(MIN_SCALE, float(source.abs().max())) if is_float else 1.0
            if not diff <= worst * largest:  # NaN, too
                worst, at = diff / largest, name
            tensor.copy_(source)
    return at, worst


def minority_ranks(replica_hashes: list[list[str]]) -> list[int]:
    """Return the ranks that differ from the majority (more than half of all); [] if there is no majority.

    >>> minority_ranks([["1", "2"], ["1", "3"], ["1", "2"]]), minority_ranks([["1"], ["2"]])
    ([1], [])
    """
    usual, num = Counter(map(tuple, replica_hashes)).most_common(1)[0]
    return [rank for rank, row in enumerate(replica_hashes) if tuple(row) != usual and 2 * num > len(replica_hashes)]


def replica_mismatches(names: list[str], replica_hashes: list[list[str]]) -> list[ReplicaMismatch]:
    """Return every (rank, tensor) that differs from most ranks; of two ranks the second is named.

    >>> replica_mismatches(["a", "b"], [["1", "2"], ["1", "3"], ["1", "2"]])
    [ReplicaMismatch(rank=1, tensor='b')]
    """
    mismatches = []
    for i, name in enumerate(names):
        hashes = [row[i] for row in replica_hashes]
        usual = Counter(hashes).most_common(1)[0][0]  # ties go to the lowest rank
        mismatches += [ReplicaMismatch(rank=rank, tensor=name) for rank, value in enumerate(hashes) if value != usual]
    return mismatches
