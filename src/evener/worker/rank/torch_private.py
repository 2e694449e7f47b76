"""Private interfaces of torch, in one place: they may change with any release.

Importing this module raises ImportError where the installed torch lacks one of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d, utils
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

TRIED_VERSIONS = "2.13"
BROADCAST_BUCKET_BYTES = 250 << 20  # as DDP does

for _owner, _name in (
    (dist.Reducer, "_rebuild_buckets"),
    (dist.Reducer, "prepare_for_backward"),
    (DistributedDataParallel, "_remove_autograd_hooks"),
    (utils, "_sync_module_states"),
    (distributed_c10d._world, "group_count"),
    (_pytree, "tree_leaves"),
):
    if not hasattr(_owner, _name):
        raise ImportError(f"torch {torch.__version__} has no {_name}: evener was tried with torch {TRIED_VERSIONS}")


def prepare_for_backward(ddp: DistributedDataParallel) -> None:
    """Prepare DDP's reducer to synchronize gradients in the next backward. It expects a gradient of every parameter."""
    ddp.reducer.prepare_for_backward([])


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Rebuild DDP's buckets in the order in which gradients became ready in the last backward. Collective."""
    ddp.reducer._rebuild_buckets()


def remove_autograd_hooks(ddp: DistributedDataParallel) -> None:
    """Remove DDP's hooks from autograd, after its process group was lost, so that backward no longer communicates."""
    ddp._remove_autograd_hooks()


def broadcast_module(module: nn.Module, group: Any) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks."""
    utils._sync_module_states(module, group, BROADCAST_BUCKET_BYTES, 0, (), broadcast_buffers=True)


def restart_group_names() -> None:
    """Have the next process groups named as in a fresh process: all ranks of a group must give it the same name.

    torch numbers groups, and begins again when the default group is destroyed; but not after its creation failed.
    """
    distributed_c10d._world.group_count = 0


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dicts and other containers that torch knows."""
    return _pytree.tree_leaves(tree)
