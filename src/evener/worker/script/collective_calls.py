"""Record the collectives that a program calls through torch.distributed, for `CallRing`.

torch.distributed's functions are replaced when the module is imported, before the program can take one of them. DDP
calls its all-reduce in C++: a communication hook, the one that torch ships, makes the same call in Python.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from evener.core.run.roster import DDP, SyncSpec
from evener.core.script.call_ring import CallRing
from evener.worker.record.heartbeat import current_line
from evener.worker.script.gloo_completion import PairwiseExchanges
from evener.worker.script.module_changer import ModuleChange, collect_instances
from evener.worker.script.report import launched_rank, warn
from evener.worker.script.step_measurement import StepMeasurement
from evener.worker.script.training_checks import TrainingChecks

if TYPE_CHECKING:
    from evener.worker.script.program_sync import CompressionHook, LocalSteps

# Operations that exchange tensors, and the positions of the tensor, or list of tensors, whose size is recorded.
COLLECTIVES = {
    "all_reduce": 0, "broadcast": 0, "reduce": 0, "all_gather": 1, "all_gather_into_tensor": 1, "all_gather_single": 1,
    "gather": 0, "scatter": 0, "reduce_scatter": 0, "reduce_scatter_tensor": 0, "reduce_scatter_single": 0,
    "all_to_all": 1, "all_to_all_single": 1, "barrier": None, "all_reduce_coalesced": 0, "all_gather_coalesced": 1,
}  # fmt: skip
DDP_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def record_collectives(
    c10d: ModuleType,
    ring: CallRing,
    measurement: StepMeasurement | None,
    checks: TrainingChecks | None,
    exchanges: PairwiseExchanges,
) -> None:
    """Replace the collectives of torch.distributed.distributed_c10d by functions that record each call."""
    names = GroupNames(c10d)
    for name, position in COLLECTIVES.items():
        if hasattr(c10d, name):
            setattr(
                c10d,
                name,
                _recorded(getattr(c10d, name), name, position, c10d, names, ring, measurement, checks, exchanges),
            )


def _recorded(
    collective: Callable[..., Any],
    name: str,
    position: int | None,
    c10d: ModuleType,
    names: GroupNames,
    ring: CallRing,
    measurement: StepMeasurement | None,
    checks: TrainingChecks | None,
    exchanges: PairwiseExchanges,
) -> Callable[..., Any]:
    """Return a collective that records its calls. One that torch makes inside of another is part of that."""

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(one is c10d.GroupMember.NON_GROUP_MEMBER for one in (*args, *kwargs.values())):
            return collective(*args, **kwargs)  # torch does nothing on a rank outside of the group
        frame = sys._getframe(1)
        caller = str(frame.f_globals.get("__name__", ""))
        if caller == c10d.__name__ and frame.f_code.co_name in COLLECTIVES:
            return collective(*args, **kwargs)
        operation = f"DDP's {name}" if caller.startswith(DDP_HOOKS) else name
        tensors = _tensors(args, kwargs, position)
        num_elements, dtype, num_bytes = _size(tensors)
        group = next((one for one in (*args, *kwargs.values()) if isinstance(one, c10d.ProcessGroup)), None)
        if checks is not None and name.startswith("all_reduce") and not caller.startswith(("torch.", "evener.")):
            checks.see_all_reduce(tensors, group, frame)
        place = ring.begin(names.group_key(c10d, group, tensors), operation, num_elements, dtype, current_line(frame))
        began = time.perf_counter()
        try:
            result = collective(*args, **kwargs)
        finally:
            ring.end(place)
        if measurement is not None:
            num_ranks, in_pairs = c10d.get_world_size(group), exchanges.take_sent()
            sent = in_pairs or sent_bytes(name, num_bytes, num_ranks)
            if not caller.startswith("evener."):  # a strategy counts what it sends itself
                measurement.add_sent(sent)
            if operation != name:
                measurement.time_bucket(result if tensors[0].device.type == "cpu" else None, num_bytes, int(sent))
            elif num_bytes and not caller.startswith("evener."):
                obstacle = ""
                if hasattr(result, "wait"):
                    obstacle = f"it calls {name} with async_op=True, and what it computes until it waits is unknown"
                elif num_ranks < c10d.get_world_size():
                    obstacle = f"it calls {name} in a group of some ranks"
                took_s = time.perf_counter() - began
                measurement.collectives.add(
                    name, num_bytes, num_ranks, took_s, sent_in_pairs=in_pairs, obstacle=obstacle
                )
        return result

    return call


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any], position: int | None) -> list[Any]:
    """Return the tensors whose size counts in a call; [] if it passes none."""
    if position is None:
        return []
    tensors: Any = args[position] if position < len(args) else next(
        (kwargs[key] for key in ("tensor", "output_tensor", "input_tensor", "output", "input", "tensor_list")
         if key in kwargs), None)  # fmt: skip
    many = tensors if isinstance(tensors, list | tuple) else [tensors]
    return [tensor for tensor in many if hasattr(tensor, "numel")]


def _size(tensors: list[Any]) -> tuple[int, str, int]:
    """Return (elements, dtype, bytes) of tensors of one type."""
    if not tensors:
        return 0, "", 0
    num_elements = sum(tensor.numel() for tensor in tensors)
    return num_elements, str(tensors[0].dtype).removeprefix("torch."), num_elements * tensors[0].element_size()


class GroupNames:
    """Names process groups so that two groups never share a name in the records.

    torch numbers groups anew after the default group was destroyed, and a group may have a backend, and an order of
    calls, for each kind of device.
    """

    def __init__(self, c10d: ModuleType) -> None:
        self._num_inits, init = 0, c10d.init_process_group

        @functools.wraps(init)
        def counted_init(*args: Any, **kwargs: Any) -> Any:
            self._num_inits += 1
            return init(*args, **kwargs)

        setattr(c10d, "init_process_group", counted_init)  # noqa: B010  the type checker knows no names of it

    def group_key(self, c10d: ModuleType, group: Any, tensors: list[Any]) -> str:
        """Return the name of a group for calls with these tensors."""
        with contextlib.suppress(Exception):  # there is no process group: the collective itself says so
            of_group = group or c10d._get_default_group()
            of_barrier = "cuda" if c10d.get_backend(of_group) == "nccl" else "cpu"
            device = tensors[0].device.type if tensors else of_barrier
            return f"{self._num_inits}/{of_group.group_name}/{device}"
        return ""


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


class ProgramSync:
    """Has a program's DDP models synchronized by a strategy, unless a model has a communication hook of its own.

    A hook is made at the first forward pass, when a program has registered its own. With plain `ddp` it is torch's own,
    which calls the all-reduce in Python. `sync` is the strategy of the models that have not come to that pass yet.
    """

    def __init__(self, sync: SyncSpec, measurement: StepMeasurement | None) -> None:
        self.sync, self._measurement = sync, measurement
        # by DDP model; as it is released, the state of its synchronizer is kept
        self._synchronizers: dict[weakref.ref[Any], CompressionHook | LocalSteps] = {}
        self._num_synchronizers = 0  # that were made
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._zero_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def changes(self) -> dict[str, ModuleChange]:
        """Return what to change in modules that update or save a model, when each is imported."""

        def change_optimizer(optimizer: ModuleType) -> None:
            optimizer.register_optimizer_step_post_hook(self._after_update)

        def change_scaler(grad_scaler: ModuleType) -> None:
            scaler = grad_scaler.GradScaler
            scaler.__init__ = collect_instances(scaler.__init__, self._scalers)

        def change_zero(zero: ModuleType) -> None:
            optimizer = zero.ZeroRedundancyOptimizer
            optimizer.__init__ = collect_instances(optimizer.__init__, self._zero_optimizers)

        return {
            "torch.optim.optimizer": change_optimizer,
            "torch.amp.grad_scaler": change_scaler,
            "torch.distributed.optim.zero_redundancy_optimizer": change_zero,
            "torch.serialization": self._note_saves("save"),
            "safetensors.torch": self._note_saves("save_file"),
            # its `save` calls torch.save in this thread
            "torch.distributed.checkpoint.state_dict_saver": self._note_saves("async_save"),
        }

    def _note_saves(self, name: str) -> ModuleChange:
        """Return the change of a module whose function of this name saves its first argument."""

        def change(module: ModuleType) -> None:
            save = getattr(module, name)

            @functools.wraps(save)
            def noted(*args: Any, **kwargs: Any) -> Any:
                # What other threads save belongs to an earlier step.
                if self._synchronizers and threading.current_thread() is threading.main_thread():
                    from evener.worker.script.program_sync import count_elements

                    num_elements = count_elements([*args[:1], *kwargs.values()])
                    for synchronizer in list(self._synchronizers.values()):
                        synchronizer.note_save(num_elements)
                return save(*args, **kwargs)

            setattr(module, name, noted)

        return change

    def change_ddp(self, distributed: ModuleType) -> None:
        """Have DDP models of torch.nn.parallel.distributed make their hook before their first pass in training."""
        ddp = distributed.DistributedDataParallel
        forward, register = ddp.forward, ddp._register_builtin_comm_hook

        @functools.wraps(register)
        def register_builtin(model: Any, *args: Any, **kwargs: Any) -> Any:
            model._evener_has_hook = True
            return register(model, *args, **kwargs)

        @functools.wraps(forward)
        def hooked_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.__dict__.get("_evener_has_hook") and _may_hook(model, distributed):
                model._evener_has_hook = True
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

                hook = self._make_hook(model)
                with contextlib.suppress(RuntimeError):  # a hook is registered, or this model can have none
                    if hook is None:
                        # WORLD is None: a process group, which cannot be copied, would keep the model from being so
                        is_world = model.process_group is distributed.dist.group.WORLD
                        model.register_comm_hook(None if is_world else model.process_group, allreduce_hook)
                    else:
                        model.register_comm_hook(None, hook)
            is_traced = sys.modules["torch"].compiler.is_compiling() and not self.sync.drifts
            if self._synchronizers and model.training and not is_traced:
                synchronizer = self._synchronizers.get(weakref.ref(model))
                if synchronizer is not None:
                    synchronizer.before_forward(model)
            return forward(model, *args, **kwargs)

        ddp._register_builtin_comm_hook, ddp.forward = register_builtin, hooked_forward

    def are_replicas_equal(self) -> bool:
        """Return whether the weights of all models are those that the ranks last exchanged."""
        return all(synchronizer.is_synced() for synchronizer in list(self._synchronizers.values()))

    def close(self, *, is_finished: bool) -> None:
        """End: keep the states of a program that has finished.

        Say so if it ends with weights that are not those of all ranks.
        """
        are_equal = self.are_replicas_equal()
        synchronizers, self._synchronizers = list(self._synchronizers.values()), {}
        if not is_finished:
            return
        for synchronizer in synchronizers:
            synchronizer.keep_after_update()
        if not are_equal and launched_rank() == 0:
            warn(
                f"the program has ended between two exchanges of {self.sync}: what rank 0 saved last is its own model",
                hint=f"a number of updates that {self.sync.every} divides, also between two checkpoints",
            )

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        for synchronizer in list(self._synchronizers.values()):
            synchronizer.after_update(optimizer)

    def _release(self, model: weakref.ref[Any]) -> None:
        """Keep the state of a model that the program has released, which it may have saved."""
        if (synchronizer := self._synchronizers.pop(model, None)) is not None:
            synchronizer.keep_after_update()

    def _make_hook(self, model: Any) -> Any:
        """Return the hook of a strategy for a model; None: torch's own."""
        if self.sync == DDP:
            return None
        from evener.worker.script.program_sync import as_function, make_synchronizer

        why_not_local = ""
        if any(scaler.is_enabled() for scaler in self._scalers):
            why_not_local = "the program's GradScaler would skip updates on one rank and not on another"
        elif self._zero_optimizers:
            why_not_local = "the program's ZeroRedundancyOptimizer updates each tensor with the gradients of one rank"
        number = self._num_synchronizers
        made = make_synchronizer(model, self.sync, self._measurement, number, why_not_local=why_not_local)
        if made is None:
            return None
        self._num_synchronizers += 1
        self._synchronizers[weakref.ref(model, self._release)] = made
        return as_function(made)


def _may_hook(model: Any, distributed: ModuleType) -> bool:
    """Return whether a hook changes nothing but how a DDP model's gradients are summed, in the backward of this forward
    pass.
    """
    import torch

    return (
        torch.is_grad_enabled()
        and model.training
        and model.require_backward_grad_sync
        and not model.__dict__.get("_comm_hooks", [model])
        and model.__dict__.get("process_group") is not None
        and not model._join_config.enable  # ranks that have joined count in the mean, or do not
        and not getattr(model, "_use_python_reducer", False)
        and not getattr(model, "_delay_all_reduce_all_params", False)
        and not any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters())
        # torch's wrapped groups end ranks that exchange gradients in hooks by SIGSEGV
        and distributed.dist.get_debug_level() != distributed.dist.DebugLevel.DETAIL
    )
