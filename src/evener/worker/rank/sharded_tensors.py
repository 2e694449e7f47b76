"""Tensors that are sharded over the ranks, as torch's DTensors: the whole of one, and this rank's part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, gathered from all ranks, which call this together; else the tensor itself.

    >>> full_tensor(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, in the same memory; else the tensor itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def copy_part(whole: Tensor, like: Tensor | None) -> Tensor:
    """Return a copy of this rank's part of `whole` if `like`, of the same shape, is sharded; else of all of it."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.clone()
    part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    assert isinstance(part, DTensor)
    return DTensor.from_local(part.to_local().clone(), like.device_mesh, like.placements, run_check=False,
                              shape=whole.shape, stride=whole.stride())  # fmt: skip
