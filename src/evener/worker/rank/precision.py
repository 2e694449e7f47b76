"""Mixed precision and compilation: the dtype in which a model is computed, and whether torch.compile compiles it."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from evener.core.base.errors import UsageError
from evener.core.model.shape import GPTShape
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import Dtype, Roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir
from evener.plan.cost.roofline import is_compile_worthwhile

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return the context in which forward runs in this dtype."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, TORCH_DTYPES[dtype])


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes bf16 in hardware. Emulated bf16 is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return bool(units.get("avx512_bf16") or units.get("amx_bf16"))


def rounding_class(device: torch.device) -> str:
    """Return a key for how the device rounds: devices with equal keys round every operation alike.

    Devices with different keys may not: a CPU with AVX2 rounds a product plus a sum once, one without it twice.
    *Measured* on one machine, with different values of ATEN_CPU_CAPABILITY: after 10 steps of AdamW, `default` and
    `avx512` differ by 7e-9, `avx2` and `avx512` in no bit.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    rounding = "fused" if capability.startswith("AVX") else capability
    return f"{platform.machine()} {rounding}"


def should_compile(spec: RunSpec, resolved: ResolvedRun | None, roster: Roster, resumed_from: RunDir | None) -> bool:
    """Return whether to compile the model: a resumed run as before, a new one as --compile says.

    `--compile auto` compiles if that saves time, but not sharded weights. Raise UsageError if `--compile on` finds no
    compiler.
    """
    requested, on_gpu = spec.model.compile, any(member.is_gpu for member in roster.members)
    if on_gpu:
        has_compiler = importlib.util.find_spec("triton") is not None
    else:
        has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    if requested == "on" and not has_compiler:
        raise UsageError("--compile on: this machine has no compiler", hint="apt install g++, or --compile off")
    if roster.sync.is_sharded:
        return False
    if resumed_from is not None:
        return resumed_from.manifest().compiled  # for the same rounding
    if requested != "auto" or resolved is None or not isinstance(resolved.shape, GPTShape):
        return requested == "on"
    shape, train = resolved.shape, spec.train
    flops = shape.flops_per_token() * shape.block_size * train.steps * max(roster.shares)
    return has_compiler and is_compile_worthwhile(flops, "cuda" if on_gpu else "cpu")


def compile_module(module: nn.Module, world_size: int) -> None:
    """Compile a module in place: as a whole on one rank, which is fastest, else by its `compile_blocks` if it has one.

    A backward compiled as a whole produces all gradients at its end, so that no communication overlaps with it.
    """
    whole = functools.partial(module.compile, dynamic=False)
    (getattr(module, "compile_blocks", whole) if world_size > 1 else whole)()
