"""Floating-point operations (FLOPs) of a training step, counted as for an MFU: those of matrix products, convolutions,
attention and recurrent layers. A multiplication and its addition are two.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class StepFlops(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs of one step of a user's program on one rank: of all its forward and backward passes."""

    by_dtype: dict[str, int] = {}  # of the operands: "fp32", "bf16", …; empty: not counted
    num_samples: float = 1.0  # that the rank trained on in this step, as its records count
    missing: str = ""  # why nothing was counted, or which operations were not; "": nothing is missing

    @property
    def per_sample(self) -> dict[str, float]:
        """The FLOPs of one sample by dtype; {} if the step took none."""
        return {dtype: flops / self.num_samples for dtype, flops in self.by_dtype.items() if self.num_samples}


def roof_s(flops: Mapping[str, float], matmul_flops: Mapping[str, float]) -> float | None:
    """Return the seconds of these FLOPs at a device's rates of matrix products, both by dtype; None if one is unknown.

    >>> roof_s({"fp32": 1e9, "bf16": 4e9}, {"fp32": 1e10, "bf16": 2e10}), roof_s({"fp32": 1e9}, {})
    (0.30000000000000004, None)
    """
    if not flops.keys() <= matmul_flops.keys():
        return None
    return sum(num / matmul_flops[dtype] for dtype, num in flops.items())
