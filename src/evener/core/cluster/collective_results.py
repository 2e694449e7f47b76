"""The input and results of the benchmark `probe collectives`, with the terms and columns of nccl-tests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# swap: an all_to_all made of point-to-point messages, see worker/sync/pairwise.py
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "swap"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
NCCL_DTYPE_NAMES = {"fp32": "float", "bf16": "bfloat16", "fp16": "half"}  # as nccl-tests prints them
MIN_SIZE_BYTES = 1 << 10


class CollectiveBenchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of every rank."""

    collectives: tuple[Collective, ...] = COLLECTIVES
    sizes: tuple[Annotated[int, Meta(ge=1)], ...] = tuple(4**i * MIN_SIZE_BYTES for i in range(10))  # bytes, ascending
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    seconds: float = 120.0  # for the whole benchmark; sizes that do not fit are skipped and reported
    in_place: bool = False  # for all_gather and reduce_scatter, the only ones with both variants
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    corrupt_results: int = 0  # for tests: rank 0 corrupts this many of its results


class CollectiveResult(msgspec.Struct, frozen=True, kw_only=True, tag="row"):
    """One row of the table: one collective at one size."""

    collective: Collective
    size_bytes: int  # as in nccl-tests: of the whole buffer, the parts of all ranks together
    count: int  # elements of the buffer or, if each rank has a part of it, of one part
    dtype: str
    redop: str  # "sum" or "none"
    root: int  # -1: none
    in_place: bool
    time_s: float  # median of the slowest rank
    time_p95_s: float
    iterations: int
    algbw_Bps: float
    busbw_Bps: float
    num_wrong: int  # wrong elements, over all ranks
    sent_bytes: float | None  # per operation of the busiest rank, by kernel counters; None: ranks share an interface


class SkippedSizes(msgspec.Struct, frozen=True, kw_only=True, tag="stopped"):
    """The larger sizes of a collective were skipped for lack of time."""

    collective: Collective
    size_bytes: int  # the first one skipped
    needs_s: float
    left_s: float


class CollectiveBenchGroup(msgspec.Struct, frozen=True, kw_only=True, tag="world"):
    """The process group of the benchmark; the first message."""

    ranks: int
    hosts: list[str]  # by rank
    backend: str
    device: str
    interface: str | None
    sum_Bps: float  # γ: bytes per second that one thread adds from one buffer to another, on the slowest rank
    torch: str


CollectiveBenchMessage = CollectiveBenchGroup | CollectiveResult | SkippedSizes
