"""Roofline: find whether arithmetic, memory or neither bounds computation on a device, and whether to compile."""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.core.model.shape import MLP_EXPANSION, GPTShape

# MFU: the fraction of a device's matmul rate that a whole model reaches. *Assumption*; *measured* on 2 cores of an AMD
# EPYC: char 0.47 in bf16 and 0.85 in fp32.
ASSUMED_MFU = 0.5
MIN_EXPLAINED_FRACTION = 0.3  # of a micro-batch's time: arithmetic or memory that would take less does not bound it
Bottleneck = Literal["arithmetic", "memory", "overhead"]  # overhead: operator calls, threads that wait for each other


def training_traffic_bytes(shape: GPTShape, num_tokens: int, element_bytes: int = 4) -> float:
    """Return the bytes that forward and backward of so many tokens move between memory and processor without caches.

    *Assumption*: weights are read in forward and in backward, their gradients written: 3 passes in fp32. Each layer's
    forward writes 18 activations of its width a token and reads as many (norms, q k v, attention's output, the MLP's
    hidden layer before and after its activation, two residuals); backward does twice that. The logits are written and
    read three times. The attention matrix stays in the cache (flash attention). Activations that fit in a cache cost
    less, so this is an upper bound.

    >>> from evener.core.model.shape import preset_shape
    >>> round(training_traffic_bytes(preset_shape("d8", vocab_size=32768), 2048) / 1e9, 1)
    5.7
    """
    activations = shape.num_layers * (10 + 2 * MLP_EXPANSION) * shape.width * 2 * 3
    logits = shape.vocab_size * 2 * 3
    matmul_params = shape.num_layers * (4 + 2 * MLP_EXPANSION) * shape.width**2 + shape.vocab_size * shape.width
    return 3.0 * 4 * matmul_params + float(num_tokens) * element_bytes * (activations + logits)


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """The roofline model of a forward and backward.   [Williams, Waterman & Patterson 2009]"""

    arithmetic_s: float  # if only arithmetic took time
    memory_s: float  # if only memory traffic took time, at most

    def bound_by(self, took_s: float) -> Bottleneck:
        """Return what bounds a micro-batch of this duration; overhead where arithmetic and memory explain little of it.

        >>> roof = Roofline(arithmetic_s=0.5, memory_s=0.2)
        >>> roof.bound_by(0.8), roof.bound_by(8.0)
        ('arithmetic', 'overhead')
        """
        if max(self.arithmetic_s, self.memory_s) < MIN_EXPLAINED_FRACTION * took_s:
            return "overhead"
        return "memory" if self.memory_s > self.arithmetic_s else "arithmetic"


def roofline(shape: GPTShape, num_tokens: int, *, matmul_flops: float, copy_Bps: float, element_bytes: int) -> Roofline:
    """Return the roofline of forward and backward of so many tokens, from two measured rates.

    >>> from evener.core.model.shape import preset_shape
    >>> char = preset_shape("char", vocab_size=65)
    >>> roofline(char, 4096, matmul_flops=1e11, copy_Bps=20e9, element_bytes=4).bound_by(4.0)
    'arithmetic'
    """
    return Roofline(
        arithmetic_s=shape.flops_per_token() * num_tokens / matmul_flops,
        memory_s=training_traffic_bytes(shape, num_tokens, element_bytes) / copy_Bps,
    )


# What torch.compile costs and gains on one rank. Measured on 2 cores of an AMD EPYC (Zen 4), 2026-11; the GPU's figures
# are an assumption.
COMPILE_S = {"cpu": 40.0, "cuda": 60.0}
COMPILE_SPEEDUP = {"cpu": 0.05, "cuda": 0.2}  # char 0.97 to 1.02 of eager, d6 1.07 to 1.12
EAGER_FLOPS_PER_S = {"cpu": 1e11, "cuda": 5e13}


def is_compile_worthwhile(flops: float, device: str) -> bool:
    """Return whether torch.compile saves more than twice its own time on a run of so many FLOPs on one rank.

    >>> is_compile_worthwhile(1e12, "cpu"), is_compile_worthwhile(1e15, "cpu")
    (False, True)
    """
    return flops / EAGER_FLOPS_PER_S[device] * COMPILE_SPEEDUP[device] > 2 * COMPILE_S[device]
