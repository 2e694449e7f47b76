"""What will it cost? Formulas, each with its source; nothing is measured here.

n  ranks    S  bytes of a collective's buffer    α  seconds of a message    β  bytes a second, each direction
γ  bytes a second that one thread adds to a buffer
"""

from __future__ import annotations

import msgspec

from evener.core.collective import Collective
from evener.core.shape import MLP_EXPANSION, GPTShape


def ring_all_reduce_bytes(size_bytes: int, num_ranks: int) -> int:
    """Bytes that each rank sends: 2(n-1)/n · S.   [Patarasuk & Yuan 2009]

    >>> ring_all_reduce_bytes(100, 1), ring_all_reduce_bytes(100, 2), ring_all_reduce_bytes(100, 4)
    (0, 100, 150)
    """
    return round(2 * (num_ranks - 1) / num_ranks * size_bytes)


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """busbw = factor · S/t: what a perfect algorithm sends through each rank's link.   [nccl-tests, PERFORMANCE.md]

    >>> [bus_factor(collective, 4) for collective in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def sent_bytes(collective: Collective, size_bytes: float, num_ranks: int, backend: str = "gloo") -> float:
    """Bytes that the busiest rank really sends.   [Gloo's and PyTorch's sources; measured by the kernel's counters]

    All-reduce, all-gather and all-to-all send what they must. A broadcast of Gloo is a binomial tree: the root sends
    the buffer ⌈log₂ n⌉ times, NCCL's ring sends it once. Reduce-scatter on Gloo is an all-reduce: twice the textbook.

    >>> sent_bytes("reduce_scatter", 100, 2), sent_bytes("reduce_scatter", 100, 2, "nccl")
    (100.0, 50.0)
    >>> sent_bytes("broadcast", 100, 8), sent_bytes("broadcast", 100, 8, "nccl")
    (300.0, 100.0)
    """
    factor = bus_factor(collective, num_ranks)
    if backend == "gloo" and collective == "reduce_scatter":
        factor = bus_factor("all_reduce", num_ranks)
    if backend == "gloo" and collective == "broadcast":
        factor = float(_rounds(num_ranks))
    return factor * size_bytes


def num_messages(collective: Collective, num_ranks: int, backend: str = "gloo") -> int:
    """Messages that must follow one another: a ring's steps, a tree's rounds.   [Thakur et al. 2005]

    >>> [num_messages(collective, 4) for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all")]
    [6, 3, 2, 1]
    """
    ring = num_ranks - 1
    if collective == "all_reduce":
        return 2 * ring
    if collective == "reduce_scatter":
        return 2 * ring if backend == "gloo" else ring
    if collective == "broadcast":
        return _rounds(num_ranks) if backend == "gloo" else ring
    return ring if collective == "all_gather" else min(1, ring)  # all-to-all: every pair at the same time


def reduced_bytes(collective: Collective, size_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank adds to its own in a ring: (n-1)/n · S where there is a sum, else 0.

    >>> reduced_bytes("all_reduce", 100, 4), reduced_bytes("all_gather", 100, 4)
    (75.0, 0.0)
    """
    return (num_ranks - 1) / num_ranks * size_bytes if collective in ("all_reduce", "reduce_scatter") else 0.0


def collective_s(
    collective: Collective,
    size_bytes: float,
    num_ranks: int,
    *,
    latency_s: float,
    bandwidth_Bps: float,
    sum_Bps: float = float("inf"),
    backend: str = "gloo",
) -> float:
    """Seconds of a collective: messages·α + sent/β + reduced/γ.   [Thakur et al. 2005]

    Latency, wire and sum one after the other: an upper bound where a backend overlaps them, as Gloo's segments do. But
    Gloo's all-gather and all-to-all hardly send while they receive once a message outgrows the socket's buffers: they
    take 2.0 times this with 2 ranks, 1.4 and 1.5 times with 3 (*measured* with 64 MiB, lab of 1 Gbit/s, torch 2.13,
    2026-11-21).

    >>> round(collective_s("all_reduce", 100_000_000, 2, latency_s=1e-3, bandwidth_Bps=125e6), 3)
    0.802
    """
    return (
        num_messages(collective, num_ranks, backend) * latency_s
        + sent_bytes(collective, size_bytes, num_ranks, backend) / bandwidth_Bps
        + reduced_bytes(collective, size_bytes, num_ranks) / sum_Bps
    )


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one collective goes. The four sum to it."""

    wire_s: float  # sent/β
    latency_s: float  # of the smallest message: rounds, wake-ups, the backend's own work
    reduction_s: float  # reduced/γ
    rest_s: float  # what these three do not explain: negative where the backend overlaps them

    @property
    def total_s(self) -> float:
        return self.wire_s + self.latency_s + self.reduction_s + self.rest_s


def split_collective(
    collective: Collective,
    size_bytes: float,
    num_ranks: int,
    *,
    time_s: float,
    latency_s: float,
    bandwidth_Bps: float,
    sum_Bps: float,
    backend: str = "gloo",
) -> Split:
    """A measured time against its model: t = α-term + sent/β + reduced/γ + rest.

    The α-term, `latency_s`, is what the same collective takes at its smallest size, less that size's other two terms.

    >>> split_collective("all_reduce", 100e6, 2, time_s=1.0, latency_s=0.01, bandwidth_Bps=125e6, sum_Bps=1e9)
    Split(wire_s=0.8, latency_s=0.01, reduction_s=0.05, rest_s=0.13999999999999996)
    """
    wire_s = sent_bytes(collective, size_bytes, num_ranks, backend) / bandwidth_Bps
    reduction_s = reduced_bytes(collective, size_bytes, num_ranks) / sum_Bps
    latency_s = max(0.0, min(latency_s, time_s - wire_s - reduction_s))
    return Split(
        wire_s=wire_s,
        latency_s=latency_s,
        reduction_s=reduction_s,
        rest_s=time_s - wire_s - latency_s - reduction_s,
    )


def _rounds(num_ranks: int) -> int:
    return max(0, num_ranks - 1).bit_length()


def training_traffic_bytes(shape: GPTShape, num_tokens: int, element_bytes: int = 4) -> float:
    """Bytes that forward and backward of so many tokens move between memory and processor, if no cache helps.

    *Assumption*: weights are read in forward and in backward, their gradients written: 3 passes in fp32. Each layer's
    forward writes 18 activations of its width a token and reads as many (norms, q k v, attention's output, the MLP's
    hidden layer before and after its activation, two residuals); backward does twice that. The logits are written and
    read three times. The attention matrix stays in the cache (flash attention). Activations that fit in a cache cost
    less, so this is an upper bound.

    >>> from evener.core.shape import preset_shape
    >>> round(training_traffic_bytes(preset_shape("d8", vocab_size=32768), 2048) / 1e9, 1)
    5.7
    """
    activations = shape.num_layers * (10 + 2 * MLP_EXPANSION) * shape.width * 2 * 3
    logits = shape.vocab_size * 2 * 3
    matmul_params = shape.num_layers * (4 + 2 * MLP_EXPANSION) * shape.width**2 + shape.vocab_size * shape.width
    return 3.0 * 4 * matmul_params + float(num_tokens) * element_bytes * (activations + logits)


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a device: its arithmetic or its memory.   [Williams, Waterman & Patterson 2009]"""

    arithmetic_s: float  # if only arithmetic took time
    memory_s: float  # if only memory did, at most

    @property
    def bound_by(self) -> str:
        """ "arithmetic" or "memory"."""
        return "memory" if self.memory_s > self.arithmetic_s else "arithmetic"


def roofline(shape: GPTShape, num_tokens: int, *, matmul_flops: float, copy_Bps: float, element_bytes: int) -> Roofline:
    """Forward and backward of so many tokens against two measured rates.

    >>> from evener.core.shape import preset_shape
    >>> char = preset_shape("char", vocab_size=65)
    >>> roofline(char, 4096, matmul_flops=1e11, copy_Bps=20e9, element_bytes=4).bound_by
    'arithmetic'
    """
    return Roofline(
        arithmetic_s=shape.flops_per_token() * num_tokens / matmul_flops,
        memory_s=training_traffic_bytes(shape, num_tokens, element_bytes) / copy_Bps,
    )


# What torch.compile costs and gains on one rank. Measured on 2 cores of an AMD EPYC (Zen 4), 2026-11; the GPU's figures
# are an assumption.
COMPILE_S = {"cpu": 40.0, "cuda": 60.0}
COMPILE_GAIN = {"cpu": 0.05, "cuda": 0.2}  # char 0.97 to 1.02 of eager, d6 1.07 to 1.12
EAGER_FLOPS = {"cpu": 1e11, "cuda": 5e13}


def compile_pays(flops: float, device: str) -> bool:
    """Is the time that torch.compile saves on a run of so many FLOPs on one rank twice what compiling takes?

    >>> compile_pays(1e12, "cpu"), compile_pays(1e15, "cpu")
    (False, True)
    """
    return flops / EAGER_FLOPS[device] * COMPILE_GAIN[device] > 2 * COMPILE_S[device]
