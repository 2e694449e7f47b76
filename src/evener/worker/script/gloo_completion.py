"""Give programs that were written for NCCL what Gloo lacks, with the same result as one process would have.

    init_process_group("nccl"), new_group(backend="nccl") without a GPU    Gloo, and a line that says so
    reduce_scatter(…, async_op=True).get_future()                          a future, as Gloo's other collectives have

Gloo itself reduces with an all-reduce, of which each rank keeps its part: doing so here sends no byte more. What torch
2.13's Gloo has, such as AVG, futures of all-gathers, all-to-all and batched sends, stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

REDUCE_SCATTERS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor")


def complete_gloo(c10d: ModuleType, *, replaces_nccl: bool) -> None:
    """Replace functions of torch.distributed.distributed_c10d by ones that also work with Gloo.

    `replaces_nccl`: no host of the run has a GPU. If one had, its ranks would wait with NCCL for others with Gloo.
    """
    for name in ("init_process_group", "new_group") if replaces_nccl else ():
        setattr(c10d, name, _without_nccl(getattr(c10d, name)))
    for name in REDUCE_SCATTERS:
        if hasattr(c10d, name):
            setattr(c10d, name, _with_future(getattr(c10d, name), c10d))


def _without_nccl(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a group of Gloo where NCCL is asked for, and there is no GPU."""
    position = 0 if make_group.__name__ == "init_process_group" else 2

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        backend = args[position] if position < len(args) else kwargs.get("backend")
        if isinstance(backend, str) and backend.lower() in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"):
            import torch

            if not torch.cuda.is_available():
                print(
                    f"evener: {make_group.__name__}({backend!r}): torch finds no CUDA device here, so Gloo is used",
                    file=sys.stderr,
                )
                if position < len(args):
                    args = (*args[:position], "gloo", *args[position + 1 :])
                else:
                    kwargs["backend"] = "gloo"
        return make_group(*args, **kwargs)

    return make


def _with_future(reduce_scatter: Callable[..., Any], c10d: ModuleType) -> Callable[..., Any]:
    """Return a reduce-scatter whose asynchronous work has a future on Gloo, too."""

    signature = inspect.signature(reduce_scatter)

    @functools.wraps(reduce_scatter)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        output, group = given.get("output"), given.get("group")
        if not given.get("async_op") or output is None or group == c10d.GroupMember.NON_GROUP_MEMBER:
            return reduce_scatter(*args, **kwargs)
        of_group = group or c10d._get_default_group()
        if not _is_gloo(c10d, of_group, output) or of_group in c10d._world.pg_coalesce_state:
            return reduce_scatter(*args, **kwargs)
        import torch

        from evener.worker.rank.torch_private import create_work_from_future

        parts = given.get("input_list", given.get("input"))
        parts = parts if isinstance(parts, list) else [parts]
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        rank = c10d.get_rank(of_group)
        start = sum(part.numel() for part in parts[:rank]) if len(parts) > 1 else rank * output.numel()

        def keep_part(done: Any) -> list[Any]:
            done.value()  # raises what the all-reduce raised
            with torch.inference_mode(output.is_inference()), torch.no_grad():  # this is a thread of Gloo's
                output.copy_(whole[start : start + output.numel()].view_as(output))
            return [output]

        op = given.get("op", c10d.ReduceOp.SUM)
        work = c10d.all_reduce.__wrapped__(whole, op=op, group=group, async_op=True)
        return create_work_from_future(work.get_future().then(keep_part))

    return reduce


def _is_gloo(c10d: ModuleType, group: Any, tensor: Any) -> bool:
    """Return whether Gloo would carry this tensor: a group can have a backend for each kind of device."""
    return tensor.device.type == "cpu" and "gloo" in c10d.get_backend(group)
