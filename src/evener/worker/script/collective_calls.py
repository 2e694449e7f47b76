"""Record the collectives that a program calls through torch.distributed, for `CallRing`.

torch.distributed's functions are replaced when the module is imported, before the program can take one of them. DDP
calls its all-reduce in C++: a communication hook, the one that torch ships, makes the same call in Python.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from evener.core.collectives.call_ring import CallRing
from evener.worker.record.heartbeat import current_line
from evener.worker.script.step_measurement import StepMeasurement

# Operations that exchange tensors, and the positions of the tensor, or list of tensors, whose size is recorded.
COLLECTIVES = {
    "all_reduce": 0, "broadcast": 0, "reduce": 0, "all_gather": 1, "all_gather_into_tensor": 1, "all_gather_single": 1,
    "gather": 0, "scatter": 0, "reduce_scatter": 0, "reduce_scatter_tensor": 0, "reduce_scatter_single": 0,
    "all_to_all": 1, "all_to_all_single": 1, "barrier": None, "all_reduce_coalesced": 0, "all_gather_coalesced": 1,
}  # fmt: skip
DDP_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def record_collectives(c10d: ModuleType, ring: CallRing, measurement: StepMeasurement | None) -> None:
    """Replace the collectives of torch.distributed.distributed_c10d by functions that record each call."""
    for name, position in COLLECTIVES.items():
        if hasattr(c10d, name):
            setattr(c10d, name, _recorded(getattr(c10d, name), name, position, c10d, ring, measurement))


def _recorded(
    collective: Callable[..., Any],
    name: str,
    position: int | None,
    c10d: ModuleType,
    ring: CallRing,
    measurement: StepMeasurement | None,
) -> Callable[..., Any]:
    """Return a collective that records its calls. One that torch makes inside of another is part of that."""

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        caller = str(frame.f_globals.get("__name__", ""))
        if caller == c10d.__name__ and frame.f_code.co_name in COLLECTIVES:
            return collective(*args, **kwargs)
        operation = f"DDP's {name}" if caller.startswith(DDP_HOOKS) else name
        num_elements, dtype, num_bytes = _size(args, kwargs, position)
        group = next((one for one in (*args, *kwargs.values()) if isinstance(one, c10d.ProcessGroup)), None)
        place = ring.begin(_group_name(c10d, group), operation, num_elements, dtype, current_line(frame))
        try:
            return collective(*args, **kwargs)
        finally:
            ring.end(place)
            if measurement is not None:
                measurement.add_sent(sent_bytes(name, num_bytes, c10d.get_world_size(group)))
                if operation != name:
                    measurement.mark_bucket_ready()

    return call


def _size(args: tuple[Any, ...], kwargs: dict[str, Any], position: int | None) -> tuple[int, str, int]:
    """Return (elements, dtype, bytes) of the tensor, or tensors, that a call passes; 0 if it passes none."""
    if position is None:
        return 0, "", 0
    tensors: Any = args[position] if position < len(args) else next(
        (kwargs[key] for key in ("tensor", "output_tensor", "input_tensor", "output", "input", "tensor_list")
         if key in kwargs), None)  # fmt: skip
    with contextlib.suppress(Exception):  # not a tensor: the collective itself says so
        many = tensors if isinstance(tensors, list | tuple) else [tensors]
        num_elements = sum(tensor.numel() for tensor in many)
        return num_elements, str(many[0].dtype).removeprefix("torch."), num_elements * many[0].element_size()
    return 0, "", 0


def sent_bytes(name: str, num_bytes: int, num_ranks: int) -> float:
    """Return the bytes that a rank sends on average in a collective of Gloo, whose tensor has so many bytes.

    A ring all-reduce sends 2(n-1)/n of them [Patarasuk & Yuan 2009]; Gloo's reduce-scatter is an all-reduce of all
    parts. An all-gather passes on n-1 parts.

    >>> sent_bytes("all_reduce", 100, 2), sent_bytes("reduce_scatter_single", 50, 2), sent_bytes("all_gather", 50, 2)
    (100.0, 100.0, 50.0)
    """
    others = num_ranks - 1
    if name.startswith("reduce_scatter"):
        return 2.0 * others * num_bytes
    if name.startswith("all_reduce"):
        return 2 * others / num_ranks * num_bytes
    if name.startswith("all_gather"):
        return float(others * num_bytes)
    return others / num_ranks * num_bytes


def _group_name(c10d: ModuleType, group: Any) -> str:
    with contextlib.suppress(Exception):  # there is no process group: the collective itself says so
        return str((group or c10d._get_default_group()).group_name)
    return ""


def hook_ddp(distributed: ModuleType) -> None:
    """Have each DDP model sum its gradients by a call in Python, unless the program has its own hook.

    `distributed` is torch.nn.parallel.distributed. The hook is registered at the first forward pass, when a program has
    registered its own.
    """
    ddp = distributed.DistributedDataParallel
    forward, register = ddp.forward, ddp._register_builtin_comm_hook

    @functools.wraps(register)
    def register_builtin(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._evener_has_hook = True
        return register(self, *args, **kwargs)

    @functools.wraps(forward)
    def hooked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get("_evener_has_hook"):
            self._evener_has_hook = True
            if not self._comm_hooks and self.__dict__.get("process_group") is not None:
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

                with contextlib.suppress(RuntimeError):  # a hook is registered, or this model can have none
                    self.register_comm_hook(self.process_group, allreduce_hook)
        return forward(self, *args, **kwargs)

    ddp._register_builtin_comm_hook, ddp.forward = register_builtin, hooked_forward
