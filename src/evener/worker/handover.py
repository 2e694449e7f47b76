"""How does what one rank remembers come to others? From memory to memory, as a checkpoint holds it (`statetree.py`).

Nothing that is received is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.decoding import from_json
from evener.worker.group import Group
from evener.worker.statetree import pack, unpack


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """What is told before the tensors come."""

    trees: dict[str, Any]  # of the states
    tensors: dict[str, tuple[str, list[int]]]  # their types and shapes, by name


def hand_over(states: dict[str, Any], group: Group, *, source: int, lacks: Sequence[int]) -> dict[str, Any]:
    """States by name: on the ranks at the places that lack them the source's, elsewhere those given. All call it."""
    parcel, tensors = b"", dict[str, Tensor]()
    if group.rank == source:
        trees = {}
        for name, state in states.items():
            trees[name], more = pack(state, name)
            tensors |= more
        shapes = {name: (str(one.dtype).removeprefix("torch."), [*one.shape]) for name, one in tensors.items()}
        parcel = msgspec.json.encode(Parcel(trees=trees, tensors=shapes))
    told = from_json(group.gather(parcel)[source], Parcel)
    if group.rank == source:
        for rank in lacks:
            for name in told.tensors:
                dist.send(tensors[name].cpu().contiguous(), rank, group=group.control)
    elif group.rank in lacks:
        for name, (dtype, shape) in told.tensors.items():
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(tensors[name], source, group=group.control)
        return {name: unpack(tree, tensors) for name, tree in told.trees.items()}
    return states
