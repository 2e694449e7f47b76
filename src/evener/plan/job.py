"""What is trained, as far as its cost depends on it: a Job of a RunSpec."""

from __future__ import annotations

from typing import Literal

from evener.core.prediction import Job
from evener.core.roster import MICRO_BATCH_TOKENS
from evener.core.shape import GPTShape
from evener.core.spec import RunSpec

DTYPES: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}


def job_of(spec: RunSpec, shape: GPTShape, dtype: str) -> Job:
    """`dtype` is what training computes in where the spec leaves it open: "bf16", or torch's "bfloat16"."""
    wish = dtype if spec.model.dtype == "auto" else spec.model.dtype
    return Job(
        model=spec.model.model,
        shape=shape,
        batch=spec.train.batch,
        micro_batch=spec.train.micro_batch or max(1, MICRO_BATCH_TOKENS // shape.block_size),
        dtype=DTYPES[wish],
        recompute=spec.model.recompute,
    )
