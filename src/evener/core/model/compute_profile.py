"""The input and result of `worker/probe/compute_bench.py`: the time of each operation of a training step."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evener.core.model.operations import OperationName, Phase
from evener.core.model.shape import GPTShape


class ComputeBenchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's training step, and how long to repeat it."""

    shape: GPTShape
    batch: Annotated[int, Meta(ge=1)]  # sequences of the block size, in one micro-batch
    seconds: Annotated[float, Meta(gt=0)]
    dtype: Literal["auto", "fp32", "bf16"] = "auto"  # of forward and backward; auto: as in training
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Meta(ge=1)] | None = None  # None: one per usable core


class OperationTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one operation in a step with the profiler."""

    name: OperationName
    phase: Phase
    time_s: float


class ComputeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of a step, and the rates that bound them, measured in the same minutes."""

    device: str  # "cpu", "cuda"
    device_name: str
    threads: int
    torch: str
    dtype: Literal["fp32", "bf16", "fp16"]
    tokens: int  # a step
    num_steps: int  # with the profiler, and as many without it
    step_s: float  # without the profiler; like all times, the mean of the middle half of the steps by duration
    profiled_step_s: float
    cpus: float  # mean number of CPUs that the process was running on, in steps without the profiler
    matmul_flops: float  # FLOP/s: the best of torch.mm at the model's own shapes
    matmul_shape: tuple[int, int, int]  # (m, k, n) of that product
    memory_Bps: float  # read and written: the best of a copy and a triad, in memory and in the caches
    operations: list[OperationTime]
