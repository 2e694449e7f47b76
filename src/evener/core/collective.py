"""What is asked of `probe collectives`, and what does it find? The words and columns are those of nccl-tests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# swap: an all_to_all by single messages, see worker/sync/swap.py
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "swap"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes an element
NCCL_NAMES = {"fp32": "float", "bf16": "bfloat16", "fp16": "half"}  # as nccl-tests prints them
SMALLEST_BYTES = 1 << 10


class CollectiveSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every rank is started with."""

    collectives: tuple[Collective, ...] = COLLECTIVES
    sizes: tuple[Annotated[int, Meta(ge=1)], ...] = tuple(4**i * SMALLEST_BYTES for i in range(10))  # bytes, ascending
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    seconds: float = 120.0  # for everything; what does not fit is left out, and said
    in_place: bool = False  # all_gather and reduce_scatter; the others know one way only
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    spoil: int = 0  # for tests: rank 0 changes so many of its results


class Row(msgspec.Struct, frozen=True, kw_only=True, tag="row"):
    """One line of the table: one collective at one size."""

    collective: Collective
    size_bytes: int  # nccl-tests' size: the whole buffer, where each rank has a part of it all parts together
    count: int  # elements; where each rank has a part, of the part
    dtype: str
    redop: str  # "sum" or "none"
    root: int  # -1: there is none
    in_place: bool
    time_s: float  # median of the slowest rank
    time_p95_s: float
    iterations: int
    algbw_Bps: float
    busbw_Bps: float
    num_wrong: int  # elements, over all ranks, that are not what they must be
    sent_bytes: float | None  # the kernel's count of one operation, busiest rank; None: ranks share an interface


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag="stopped"):
    """Larger sizes of a collective were left out."""

    collective: Collective
    size_bytes: int  # the first that was
    needs_s: float
    left_s: float


class World(msgspec.Struct, frozen=True, kw_only=True, tag="world"):
    """Who takes part; the first thing that is told."""

    ranks: int
    hosts: list[str]  # of each rank
    backend: str
    device: str
    interface: str | None
    sum_Bps: float  # γ: bytes of a buffer to which one thread adds another, in a second; the slowest rank
    torch: str


Told = World | Row | Stopped
