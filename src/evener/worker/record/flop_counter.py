"""Count the floating-point operations of a part of a program, which runs as it does without.

`FlopCounter` is a TorchDispatchMode: torch calls it with each operation of this thread and of the backward passes that
this thread starts. It passes them on as they are. torch's own FlopCounterMode also hooks into all modules, replaces
operations by others, imports torch.compile's 800 modules and lacks some formulas.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from evener.core.model.flops import StepFlops

aten = torch.ops.aten
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Of operations that multiply nothing, or by operations of aten.
KNOWN_NAMESPACES = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_dtensor", "fsdp"}
MAX_NAMED = 3  # operations without a formula

Formula = Callable[..., int]  # of the result of an operation and its arguments


def _convolution(result: Any, *args: Any) -> int:
    """Each weight is multiplied once at each place of the output, or of the input of a transposed convolution."""
    x, weight, is_transposed = args[0], args[1], args[6]
    return 2 * x.shape[0] * prod((x if is_transposed else result).shape[2:]) * weight.numel()


def _convolution_backward(_: Any, *args: Any) -> int:
    """The products of forward once for the gradient of the input, and once for that of the weights. (torch's formula
    has those of the weights of a grouped convolution once for each group.)
    """
    gradient, x, weight, is_transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return sum(wanted[:2]) * 2 * x.shape[0] * prod((x if is_transposed else gradient).shape[2:]) * weight.numel()


def _attention(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    return flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(result: Any, gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Twice those of forward: that a kernel computes the scores again is its own affair, as in an MFU."""
    return 2 * _attention(result, query, key, value)


def _recurrent(_: Any, x: Any, *args: Any) -> int:
    """Each row of the input, at each time, is multiplied by each matrix of the layers (in an LSTM as in a GRU)."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:2]
    return 2 * x.numel() // x.shape[-1] * sum(one.numel() for one in weights if one.dim() == 2)


def _recurrent_backward(result: Any, *args: Any) -> int:
    return 2 * _recurrent(result, *args)


def _grouped_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    """The rows or columns of one operand are divided among matrices of the other, or each has its own."""
    columns_are_divided = a.dim() == 3 and b.dim() == 2
    return 2 * a.numel() * b.shape[-1] // (a.shape[0] if columns_are_divided else 1)


def _from_torch(formula: Callable[..., int]) -> Formula:
    return lambda result, *args, **kwargs: formula(*args, out_val=result, **kwargs)


FORMULAS: dict[Any, Formula] = {
    operation: _from_torch(one) for operation, one in flop_counter.flop_registry.items()
} | {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    aten._cudnn_rnn: _recurrent,
    aten._cudnn_rnn_backward: _recurrent_backward,
    aten._grouped_mm: _grouped_product,
}


class FlopCounter(TorchDispatchMode):
    """Counts from `start` until `stop`. It never changes a result, nor ends the program."""

    supports_higher_order_operators = True

    def __init__(self, is_counting: Callable[[], bool]) -> None:
        """`is_counting`: whether the program is at a place whose operations count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_counting, self._is_on = is_counting, False
        self._by_dtype: Counter[str] = Counter()
        self._unknown: dict[str, None] = {}  # operations without a formula that may multiply, in order
        self._why_not = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile compiles nothing meanwhile

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports torch.compile: 90 MB, and seconds

    def start(self) -> None:
        """Begin to count, if nothing else is in the way."""
        self._is_on = True
        if _runs_compiled():
            self._why_not = "the program is compiled"
        elif not _is_between_passes() or _get_current_dispatch_mode() is not None:
            self._why_not = "a dispatch mode of the program's own, or a backward pass, was active"
        else:
            self.__enter__()  # type: ignore[no-untyped-call]
            os.register_at_fork(after_in_child=self._leave)  # a data loader's worker

    def stop(self) -> bool:
        """End the count; return False if it must be called again later, to leave no trace."""
        if self._is_on and not self._why_not and _runs_compiled():
            self._why_not = "the program is compiled"
        self._is_on = False
        return self._leave()

    def _leave(self) -> bool:
        """Leave torch's stack of modes; return False if that must wait: this mode is in it, and not on top."""
        self._is_on = False
        if not any(torch._C._get_dispatch_stack_at(i) is self for i in range(torch._C._len_torch_dispatch_stack())):
            return True
        if not _is_between_passes() or _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def flops(self, num_samples: float) -> StepFlops:
        """Return what was counted, in a step of so many samples."""
        why_not = self._why_not or ("" if self._by_dtype else "no matrix product was seen")
        if not num_samples:  # as where a program updates twice a batch
            why_not = "the step took no samples"
        if why_not:
            return StepFlops(num_samples=num_samples, missing=why_not)
        names = [*self._unknown][:MAX_NAMED] + ["…"] * (len(self._unknown) > MAX_NAMED)
        missing = f"those of {', '.join(names)} are missing" if names else ""
        return StepFlops(by_dtype=dict(self._by_dtype), num_samples=num_samples, missing=missing)

    def __torch_dispatch__(self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # such as a DTensor, which calls operations on what this rank has of it
        if func is aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            return args[0]  # a number that autograd saved: torch passes it to a mode without its tensor
        result = func(*args, **kwargs or {})
        if self._is_on and not self._why_not and self._is_counting():
            try:
                self._count(func, result, args, kwargs or {})
            except Exception as error:
                self._why_not = f"{func} with other arguments than expected: {type(error).__name__}"
        return result

    def _count(self, func: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        formula = FORMULAS.get(operation := getattr(func, "_overloadpacket", func))
        if formula is not None:
            dtype = next(one.dtype for one in args if isinstance(one, torch.Tensor))
            self._by_dtype[DTYPES.get(dtype, str(dtype).removeprefix("torch."))] += formula(result, *args, **kwargs)
        elif getattr(func, "namespace", "") not in KNOWN_NAMESPACES:
            self._unknown[str(operation)] = None


def _runs_compiled() -> bool:
    """Return whether torch.compile has compiled something: it calls operations, or kernels of its own, unseen."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["ok"])


def _is_between_passes() -> bool:
    """Return whether no backward pass is under way, at whose end torch restores the modes of its beginning."""
    return bool(torch._C._current_graph_task_id() == -1)
