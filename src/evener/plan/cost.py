"""What will it cost? Formulas, each with its source; nothing is measured here."""

from __future__ import annotations


def ring_all_reduce_bytes(size_bytes: int, num_ranks: int) -> int:
    """Bytes that each rank sends: 2(n-1)/n · S.   [Patarasuk & Yuan 2009]

    >>> ring_all_reduce_bytes(100, 1), ring_all_reduce_bytes(100, 2), ring_all_reduce_bytes(100, 4)
    (0, 100, 150)
    """
    return round(2 * (num_ranks - 1) / num_ranks * size_bytes)


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
