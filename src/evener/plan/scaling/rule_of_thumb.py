"""Rule of thumb: find the assumptions under which efficiency is 80 to 90 % at 8 ranks and 60 to 70 % at 64.

A guide to nanoGPT's data-parallel training states this rule for GPT-2 124M without naming the machines. Three things
cost efficiency: bandwidth, whether backward hides communication, and how much ranks differ. This solves for one while
the others are fixed, by bisection over `simulate_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from evener.core.base.units import format_bit_rate, format_bytes
from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.core.run.roster import num_micro_batches
from evener.plan.cost.sync_traffic import bucket_sizes, gradient_tensors
from evener.plan.scaling.scaling_model import ScalingScenario, simulate_scaling

RULE_OF_THUMB = {8: (0.80, 0.90), 64: (0.60, 0.70)}  # ranks → efficiency, minimum and maximum
# *Assumption*: an A100 on GPT-2 124M, compiled, bf16. nanoGPT's README implies 107,000: 600,000 steps of 491,520 tokens
# in about 4 days on 8.
TOKENS_PER_S = 150_000.0
# *assumption*: busbw of 8 A100; NCCL's constant for a ring's step
NVLINK = LinkModel(latency_s=3.4e-6, bandwidth_Bps=230e9)
# *assumption*: eight of 200 Gbit/s in a node; NCCL's constant
NODE_NICS = LinkModel(latency_s=9.6e-6, bandwidth_Bps=200e9)
UPDATE_S = 0.004  # *assumption*: 124M parameters · 28 bytes read and written at 1 TB/s


def nanogpt_scenario(micro_batches: int = 5, *, tokens_per_s: float = TOKENS_PER_S) -> ScalingScenario:
    """Return the scenario of nanoGPT's GPT-2 124M: micro-batches of 12 × 1024 tokens, fp32 gradients, 8 ranks a node.

    `micro_batches` are those of a rank's step; nanoGPT's 40 shared by 8 ranks are 5.

    >>> round(nanogpt_scenario().compute_s, 4), nanogpt_scenario().gradient_bytes
    (0.4096, 497759232)
    """
    shape = preset_shape("gpt2", vocab_size=50257)
    return ScalingScenario(
        compute_s=micro_batches * 12 * 1024 / tokens_per_s,
        sequences=micro_batches * 12,
        micro_batch=12,
        sequence_tokens=1024,
        update_s=UPDATE_S,
        gradient_bytes=4 * shape.num_params(),
        buckets=bucket_sizes(gradient_tensors(shape)),
        inner=NVLINK,
        outer=NODE_NICS,
        assumed=[
            f"a rank computes {tokens_per_s / 1e3:.0f}k tokens/s, an update takes {UPDATE_S * 1e3:.0f} ms",
            f"8 ranks in a node with a busbw of {NVLINK.bandwidth_Bps / 1e9:.0f} GB/s, "
            f"{NODE_NICS.bandwidth_Bps / 1e9:.0f} GB/s out of each node",
        ],
    )


def required_bandwidth_Bps(scenario: ScalingScenario, num_ranks: int, efficiency: float) -> float | None:
    """Return the bandwidth with which `num_ranks` reach `efficiency`: inside a node if all fit in one, else between.

    Return None if no bandwidth is enough, and never less than 1 byte/s.
    """

    def reached(log_Bps: float) -> float:
        return simulate_scaling(_with_bandwidth(scenario, num_ranks, math.exp(log_Bps)), [num_ranks])[0].efficiency

    if reached(math.log(1e18)) < efficiency:
        return None
    return math.exp(_bisect(reached, efficiency, 0.0, math.log(1e18)))


def required_jitter(scenario: ScalingScenario, num_ranks: int, efficiency: float) -> float | None:
    """Return the coefficient of variation of a rank's compute time at which efficiency drops to this value.

    None if it is lower even without jitter.
    """

    def lost(jitter: float) -> float:
        return -simulate_scaling(msgspec.structs.replace(scenario, jitter=jitter), [num_ranks])[0].efficiency

    if -lost(0.0) < efficiency:
        return None
    return _bisect(lost, -efficiency, 0.0, 3.0)


class RuleExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions under which one line of the rule holds, each for its minimum and its maximum efficiency."""

    ranks: int
    efficiency: tuple[float, float]
    expected: float  # the efficiency of the unchanged scenario
    blocking_Bps: tuple[float | None, float | None]  # bandwidth without overlap
    overlapped_Bps: tuple[float | None, float | None]  # bandwidth with overlap
    jitter: tuple[float | None, float | None]  # at the scenario's bandwidth, with overlap


def explain_rule(scenario: ScalingScenario) -> list[RuleExplanation]:
    """Return the conditions of each line of the rule."""
    explanations = []
    blocking = msgspec.structs.replace(scenario, overlap=False)
    for ranks, (low, high) in RULE_OF_THUMB.items():
        explanations.append(
            RuleExplanation(
                ranks=ranks,
                efficiency=(low, high),
                expected=simulate_scaling(scenario, [ranks])[0].efficiency,
                blocking_Bps=(
                    required_bandwidth_Bps(blocking, ranks, low),
                    required_bandwidth_Bps(blocking, ranks, high),
                ),
                overlapped_Bps=(
                    required_bandwidth_Bps(scenario, ranks, low),
                    required_bandwidth_Bps(scenario, ranks, high),
                ),
                jitter=(required_jitter(scenario, ranks, low), required_jitter(scenario, ranks, high)),
            )
        )
    return explanations


def describe_rule(scenario: ScalingScenario) -> list[str]:
    """Describe the rule, its assumptions, and the efficiency that this scenario predicts instead."""
    passes = num_micro_batches(scenario.sequences, scenario.micro_batch)
    micro = f"{min(scenario.micro_batch, scenario.sequences)} × {scenario.sequence_tokens} tokens"
    lines = [
        f"The rule of thumb is for GPT-2 124M with data parallelism. A rank's step is {passes} "
        f"micro-batch{'es' if passes > 1 else ''} of {micro} and one all-reduce of "
        f"{format_bytes(scenario.gradient_bytes)}. "
        f"Assumptions: {'; '.join(scenario.assumed)}."
    ]
    readings = explain_rule(scenario)
    for reading in readings:
        low, high = reading.efficiency
        where = "a busbw in the node" if reading.ranks <= scenario.per_node else "a bandwidth out of each node"
        lines.append(
            f"{low:.0%} to {high:.0%} at {reading.ranks} ranks need {where} of "
            f"{_format_bandwidth_range(reading.blocking_Bps)} without "
            f"overlap, or of {_format_bandwidth_range(reading.overlapped_Bps)} with it. With the bandwidth "
            f"assumed here, efficiency is "
            f"{reading.expected:.0%}."
        )
    spans = [(most, least) for reading in readings for least, most in [reading.jitter] if least and most]
    if len(spans) == len(readings):
        both = max(least for least, _ in spans), min(most for _, most in spans)
        verdict = (
            f"only {both[0]:.1%} to {both[1]:.1%} explain both" if both[0] <= both[1] else "no value explains both"
        )
        of_each = [f"{least:.1%} to {most:.1%} at {r.ranks}" for r, (least, most) in zip(readings, spans, strict=True)]
        lines.append(f"Or the ranks' compute times vary from step to step, by {' and '.join(of_each)}; {verdict}.")
    return lines


def _with_bandwidth(scenario: ScalingScenario, num_ranks: int, bandwidth_Bps: float) -> ScalingScenario:
    if num_ranks <= scenario.per_node:
        inner = LinkModel(latency_s=scenario.inner.latency_s, bandwidth_Bps=bandwidth_Bps)
        return msgspec.structs.replace(scenario, inner=inner)
    outer = LinkModel(latency_s=scenario.outer.latency_s, bandwidth_Bps=bandwidth_Bps)
    return msgspec.structs.replace(scenario, outer=outer)


def _bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= wanted else (middle, high)
    return high


def _format_bandwidth_range(bandwidths: tuple[float | None, float | None]) -> str:
    """Format the bandwidths for the minimum and the maximum efficiency; None where no bandwidth is enough."""
    low, high = bandwidths
    if low is None:
        return "no size (no bandwidth is enough)"
    if high is None:
        return f"{_GBps(low)} and more (no bandwidth is enough for the upper end)"
    return f"{_GBps(low)} to {_GBps(high)} ({format_bit_rate(low)} to {format_bit_rate(high)})"


def _GBps(value_Bps: float) -> str:
    return f"{value_Bps / 1e9:.3g} GB/s"
