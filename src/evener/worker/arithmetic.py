"""In which arithmetic is a model computed, and is it compiled?"""

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

from evener.core.errors import UsageError
from evener.core.resolve import Resolved
from evener.core.roster import Dtype, Roster
from evener.core.rundir import RunDir
from evener.core.spec import RunSpec
from evener.plan.compute import compile_pays

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[Any]:
    """The context in which forward runs in this arithmetic."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, TORCH_DTYPES[dtype])


def has_bf16(device: torch.device) -> bool:
    """Has this device units for bf16? Without them it is emulated, and slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return bool(units.get("avx512_bf16") or units.get("amx_bf16"))


def rounding_of(device: torch.device) -> str:
    """Devices of which this is equal round alike, operation by operation.

    Others do not: with AVX2 a product and a sum are rounded once, without it twice. *Measured* on one machine with
    ATEN_CPU_CAPABILITY: after 10 steps of AdamW default and avx512 differ by 7e-9, avx2 and avx512 in no bit.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    fuses = "fused" if capability.startswith("AVX") else capability
    return f"{platform.machine()} {fuses}"


def compiles(spec: RunSpec, resolved: Resolved | None, roster: Roster, resumed: RunDir | None) -> bool:
    """Is the model compiled? As before where a run is resumed, else as was asked for, or where it repays its time."""
    wish, on_gpu = spec.model.compile, any(member.is_gpu for member in roster.members)
    if on_gpu:
        has_compiler = importlib.util.find_spec("triton") is not None
    else:
        has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    if wish == "on" and not has_compiler:
        raise UsageError("--compile on: this machine has no compiler", hint="apt install g++, or --compile off")
    if resumed is not None:
        return resumed.manifest().compiled  # the same arithmetic
    if wish != "auto" or resolved is None:
        return wish == "on"
    shape, train = resolved.shape, spec.train
    flops = shape.flops_per_token() * shape.block_size * train.steps * max(roster.shares)
    return has_compiler and compile_pays(flops, "cuda" if on_gpu else "cpu")


def compile_module(module: nn.Module, world_size: int) -> None:
    """Compile it in place. Whole is fastest; but on several ranks a whole backward hands over all gradients at its end,
    and hides nothing of their journey.
    """
    whole = functools.partial(module.compile, dynamic=False)
    (getattr(module, "compile_blocks", whole) if world_size > 1 else whole)()
