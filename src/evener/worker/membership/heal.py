"""How does a rank that comes learn what the others know? One of them sends it all that it has, from memory to memory.

Weights, the states of optimizers, schedulers and of what else the program named, as a checkpoint would hold them
(`statetree.py`), and what the others found out in their rehearsal. Nothing that is received is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.decoding import from_json
from evener.core.errors import UsageError
from evener.core.rundir import code_hash
from evener.worker import rng
from evener.worker.checkpoint import put_weights
from evener.worker.keeper import Keeper
from evener.worker.membership import Learner
from evener.worker.statetree import pack, unpack

WEIGHTS = "weights/"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of it before the tensors come."""

    code: str
    tensors: dict[str, tuple[str, list[int]]]  # their types and shapes, by name
    trees: dict[str, Any]  # of the states
    moved: list[str]  # buffers that forward changes


def heal(learner: Learner, keeper: Keeper, step: int, *, source: int, lacks: Sequence[int]) -> None:
    """The ranks at these places become what the source is, before `step`. All ranks call it together."""
    group, trained = learner.group, learner.trained
    mine, tensors = b"", dict[str, Tensor]()
    if group.rank == source:
        trees: dict[str, Any] = {}
        weights = learner.sync.agreed(trained.weights())
        tensors = {WEIGHTS + name: tensor.detach() for name, tensor in weights.items()}
        for name, state in trained.state_dicts().items():
            trees[name], more = pack(state, name)
            tensors |= more
        shapes = {name: (str(one.dtype).removeprefix("torch."), [*one.shape]) for name, one in tensors.items()}
        known = Known(code=code_hash(), tensors=shapes, trees=trees, moved=sorted(learner.moved))
        mine = msgspec.json.encode(known)
    told = from_json(group.gather(mine)[source], Known)
    if group.rank == source:
        for rank in lacks:
            for name in told.tensors:
                dist.send(tensors[name].cpu().contiguous(), rank, group=group.control)
    elif group.rank in lacks:
        if told.code != code_hash():
            hint = "evener setup brings the same to all; evener add RUN --host HOST then lets it in"
            raise UsageError("code.mismatch: evener is another here than on the hosts that train", hint=hint)
        for name, (dtype, shape) in told.tensors.items():
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(tensors[name], source, group=group.control)
        weights = {name.removeprefix(WEIGHTS): one for name, one in tensors.items() if name.startswith(WEIGHTS)}
        put_weights(weights, trained.weights(), keeper.folder)
        trained.load_states({name: unpack(tree, tensors) for name, tree in told.trees.items()})
        learner.moved |= set(told.moved)
        rng.begin(learner.spec.train.seed, step, group.number)
