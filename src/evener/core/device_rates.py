"""What is asked of `probe host`, and what does it find on one device?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evener.core.finding import Finding
from evener.core.fleet import ModelRate, Rates

MOST_BESIDE_TOKENS = 0.95  # of a large pass: what looks like more is a measurement that was disturbed


class DeviceRatesSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `worker.device_rates` is started with, on every host."""

    host: str  # as the findings shall name it
    model: str = "char"
    seconds: Annotated[float, Meta(gt=0)] = 12.0  # of sustained training
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # of the model's arithmetic; auto: as training chooses it
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None  # None: the preset's


class Doing(msgspec.Struct, frozen=True, kw_only=True, tag="doing"):
    """A word on the way."""

    text: str


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of one size of micro-batch, several times."""

    micro_batch: int  # sequences
    tokens: int  # of one pass
    passes: int
    pass_p50_s: float
    pass_p95_s: float


class Sustained(msgspec.Struct, frozen=True, kw_only=True):
    """Large micro-batches without a stop, a few smaller ones between them, and the update after each."""

    dtype: str
    large: Passes
    smaller: list[Passes]  # of the same minutes; none where one sequence takes long enough
    tokens_per_s: float  # of the large passes, by their median
    cpus: float  # processors that the process was running on, in large passes
    updates: int
    update_p50_s: float  # clipping, AdamW, forgetting the gradients
    update_p95_s: float
    first_third_tokens_per_s: float
    last_third_tokens_per_s: float
    first_third_cpus: float
    last_third_cpus: float
    first_third_Hz: float | None  # mean clock of the processors; None: the system does not tell
    last_third_Hz: float | None


def fit_pass(pass_s_by_tokens: Mapping[int, float]) -> tuple[float, float]:
    """(pass_s, tokens_per_s) of t(tokens) = pass_s + tokens / tokens_per_s, from two sizes or more.

    The line goes through the largest size, which is the one that trains; among such lines it is the one with the least
    squares of the relative errors at the others. pass_s is not negative.

    >>> fit_pass({256: 0.0225, 4096: 0.2625})
    (0.0065, 16000.0)
    """
    largest = max(pass_s_by_tokens)
    whole_s = pass_s_by_tokens[largest]
    # With x = 1 - tokens/largest a line through (largest, whole_s) is t = pass_s·x + whole_s·(1 - x).
    others = [(1 - tokens / largest, took_s) for tokens, took_s in pass_s_by_tokens.items() if tokens < largest]
    above = sum(x * (took_s - whole_s * (1 - x)) / took_s**2 for x, took_s in others)
    pass_s = max(0.0, min(above / sum((x / took_s) ** 2 for x, took_s in others), MOST_BESIDE_TOKENS * whole_s))
    return float(f"{pass_s:.9g}"), float(f"{largest / (whole_s - pass_s):.9g}")


def model_rate(sustained: Sustained) -> ModelRate:
    """What the planner keeps of it."""
    sizes = [*sustained.smaller, sustained.large]
    pass_s, tokens_per_s = None, sustained.tokens_per_s
    if sustained.smaller:
        pass_s, tokens_per_s = fit_pass({one.tokens: one.pass_p50_s for one in sizes})
    return ModelRate(
        tokens_per_s=tokens_per_s,
        pass_s=pass_s,
        update_s=sustained.update_p50_s,
        dtype=sustained.dtype,
        cpus=sustained.cpus,
    )


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, tag="device"):
    """One device, measured."""

    host: str
    device: str  # "cpu", "cuda:0"
    threads: int
    model: str
    num_params: int
    rates: Rates
    sustained: Sustained
    findings: list[Finding]


DeviceTold = Doing | DeviceRates
