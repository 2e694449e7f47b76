"""The input and results of `probe host`: compute rates of one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import ModelRate, Rates

MAX_OVERHEAD_SHARE = 0.95  # share of a large micro-batch's time; a larger overhead comes from a disturbed measurement


class PretrainedProbe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pretrained model as it is probed: built from its config.json with random weights, so that none are sent."""

    name: str  # under which a fleet file keeps its rate
    config: str  # the content of its config.json
    vocab_size: int
    block_size: int  # all sequences are this long, and all of their tokens carry loss
    lora_rank: int | None
    has_dora: bool
    num_trained: int
    flops_per_token: float


class HostProbeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of `worker/probe/device_probe.py` on every host."""

    host: str  # the name used in findings
    models: Annotated[tuple[str, ...], Meta(min_length=1)] = ("char",)  # presets, one after the other
    pretrained: PretrainedProbe | None = None  # instead of presets
    seconds: Annotated[float, Meta(gt=0)] = 12.0  # of sustained training of each
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # of forward and backward; auto: as in training
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None  # None: the preset's


class ProbeProgress(msgspec.Struct, frozen=True, kw_only=True, tag="doing"):
    """A progress message."""

    text: str


class MicroBatchTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The times of repeated forward and backward passes with one micro-batch size."""

    micro_batch: int  # sequences
    tokens: int  # per pass
    passes: int
    pass_p50_s: float
    pass_p95_s: float


class SustainedThroughput(msgspec.Struct, frozen=True, kw_only=True):
    """Sustained training: large micro-batches without a pause, a few smaller ones in between, an update after each."""

    dtype: str
    large: MicroBatchTiming
    smaller: list[MicroBatchTiming]  # interleaved with the large ones; empty if a single sequence takes long enough
    tokens_per_s: float  # of the large micro-batches, by their median
    cpus: float  # mean number of CPUs that the process was running on, in large micro-batches
    updates: int
    update_p50_s: float  # clipping, AdamW, zeroing the gradients
    update_p95_s: float
    first_third_tokens_per_s: float
    last_third_tokens_per_s: float
    first_third_cpus: float
    last_third_cpus: float
    first_third_Hz: float | None  # mean clock of the CPUs; None: not reported by the system
    last_third_Hz: float | None


def fit_micro_batch_time(time_s_by_tokens: Mapping[int, float]) -> tuple[float, float]:
    """Fit t(tokens) = pass_s + tokens / tokens_per_s to two or more sizes; return (pass_s, tokens_per_s).

    The line goes through the largest size, the one used in training; among such lines it has the least squares of the
    relative errors at the other sizes. pass_s is not negative.

    >>> fit_micro_batch_time({256: 0.0225, 4096: 0.2625})
    (0.0065, 16000.0)
    """
    largest = max(time_s_by_tokens)
    largest_s = time_s_by_tokens[largest]
    # With x = 1 - tokens/largest a line through (largest, largest_s) is t = pass_s·x + largest_s·(1 - x).
    others = [(1 - tokens / largest, time_s) for tokens, time_s in time_s_by_tokens.items() if tokens < largest]
    excess = sum(x * (time_s - largest_s * (1 - x)) / time_s**2 for x, time_s in others)
    pass_s = max(0.0, min(excess / sum((x / time_s) ** 2 for x, time_s in others), MAX_OVERHEAD_SHARE * largest_s))
    return float(f"{pass_s:.9g}"), float(f"{largest / (largest_s - pass_s):.9g}")


def model_rate(sustained: SustainedThroughput, flops_per_token: float | None = None) -> ModelRate:
    """Return the rates that the planner needs, from a sustained measurement.

    `flops_per_token`: of a pretrained model.
    """
    timings = [*sustained.smaller, sustained.large]
    pass_s, tokens_per_s = None, sustained.tokens_per_s
    if sustained.smaller:
        pass_s, tokens_per_s = fit_micro_batch_time({timing.tokens: timing.pass_p50_s for timing in timings})
    return ModelRate(
        tokens_per_s=tokens_per_s,
        flops_per_token=flops_per_token,
        pass_s=pass_s,
        update_s=sustained.update_p50_s,
        dtype=sustained.dtype,
        cpus=sustained.cpus,
    )


class DeviceProbeResult(msgspec.Struct, frozen=True, kw_only=True, tag="device"):
    """The measured rates of one device with one model, and the findings."""

    host: str
    device: str  # "cpu", "cuda:0"
    threads: int
    model: str
    rates: Rates
    sustained: SustainedThroughput
    findings: list[Finding]


ProbeMessage = ProbeProgress | DeviceProbeResult
