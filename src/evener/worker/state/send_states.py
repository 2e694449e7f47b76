"""Send state dicts from one rank's memory to others, as a checkpoint stores them (`state_serialization.py`).

Nothing that is received is executed: there is no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.base.decoding import from_json
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.state.state_serialization import flatten_state, unflatten_state


class StatesHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header that precedes the tensors."""

    trees: dict[str, Any]  # of the states by name
    tensors: dict[str, tuple[str, list[int]]]  # dtype and shape by name


def send_states(
    states: dict[str, Any], group: ProcessGroups, *, source: int, receivers: Sequence[int]
) -> dict[str, Any]:
    """Send `states` of rank `source` to the receivers. All ranks call it together.

    Return the source's states, by name, on the receivers; on other ranks return `states`.
    """
    encoded, tensors = b"", dict[str, Tensor]()
    if group.rank == source:
        trees = {}
        for name, state in states.items():
            trees[name], new_tensors = flatten_state(state, name)
            tensors |= new_tensors
        shapes = {name: (str(tensor.dtype).removeprefix("torch."), [*tensor.shape]) for name, tensor in tensors.items()}
        encoded = msgspec.json.encode(StatesHeader(trees=trees, tensors=shapes))
    header = from_json(group.all_gather_bytes(encoded)[source], StatesHeader)
    if group.rank == source:
        for rank in receivers:
            for name in header.tensors:
                dist.send(tensors[name].cpu().contiguous(), rank, group=group.control_group)
    elif group.rank in receivers:
        for name, (dtype, shape) in header.tensors.items():
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(tensors[name], source, group=group.control_group)
        return {name: unflatten_state(tree, tensors) for name, tree in header.trees.items()}
    return states
