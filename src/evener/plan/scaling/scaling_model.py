"""Scaling model: predict the throughput, efficiency and goodput of 1, 2, 4, … 4096 ranks from the step of one rank.

n  ranks    N  nodes    k  ranks of a node    S  bytes    α  latency of a message, s    β  bandwidth, bytes/s

A step is as long as that of its slowest rank, so jitter of compute times costs more with more ranks; communication
grows by its latencies; and of a thousand nodes one fails every few hours. Expectations are integrals, not samples: the
same scenario gives the same figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from evener.core.base.errors import UsageError
from evener.core.cluster.link import LinkModel
from evener.core.run.prediction import Cluster, Job
from evener.core.run.roster import Member, choose_backend, equal_shares
from evener.core.run.step_cost import StepCost
from evener.plan.choice.options import MAX_RANKS, MIN_GAIN
from evener.plan.cost.collective_cost import Ring, collective_s, nccl_all_reduce_s, ring_phase_s
from evener.plan.cost.cost_model import BACKWARD_FRACTION, backward_fraction, recompute_factor
from evener.plan.cost.expected_max import MaxDistribution, max_of_lognormals
from evener.plan.cost.sync_traffic import (
    BUCKET_BYTES,
    COMPRESSED_BUCKET_BYTES,
    GRADIENT_BYTES,
    bucket_sizes,
    gradient_tensors,
)
from evener.plan.scaling.goodput import checkpoint_interval_s, useful_time_fraction

LIMITS: list[tuple[str, Callable[[float], bool], str]] = [
    ("compute_s slow_factor", lambda x: 0 < x < math.inf, "more than 0"),
    ("sequences micro_batch sequence_tokens per_node", lambda x: x >= 1, "at least 1"),
    ("sum_Bps mtbf_s inner.bandwidth_Bps outer.bandwidth_Bps", lambda x: x > 0, "more than 0"),
    ("update_s gradient_bytes checkpoint_s restart_s", lambda x: 0 <= x < math.inf, "0 or more"),
    ("inner.latency_s outer.latency_s", lambda x: 0 <= x < math.inf, "0 or more"),
    ("jitter", lambda x: 0 <= x <= 3, "between 0 and 3"),
    ("backward_share slow_share", lambda x: 0 <= x <= 1, "between 0 and 1"),
]
MAX_POINTS = 64
MTBF_DAYS = 300.0  # *assumption*
CHECKPOINT_S, RESTART_S = 20.0, 300.0  # *assumptions*: to write a checkpoint, and from a failure to the next step


class ScalingScenario(msgspec.Struct, frozen=True, kw_only=True):
    """The step of one rank, and the conditions for more ranks. Ranks fill a node before the next one is used."""

    compute_s: float  # forward and backward of one rank alone: its mean
    sequences: int  # of its step
    micro_batch: int  # largest number of them in one backward; only the last backward hides communication
    sequence_tokens: int
    update_s: float = 0.0
    backward_share: float = BACKWARD_FRACTION  # of compute_s
    gradient_bytes: int  # reduced once a step
    buckets: list[tuple[int, float]] = []  # (bytes, fraction of backward when ready), see sync_traffic.bucket_sizes;
    # empty: DDP's 25 MiB each, ready evenly over backward
    small_buckets: list[tuple[int, float]] = []  # used instead where that is clearly faster; empty: never
    per_node: int = 8
    inner: LinkModel  # between two ranks of a node
    outer: LinkModel  # between two nodes, all adapters of a node together: eight of 50 GB/s are 400 GB/s
    sum_Bps: float = math.inf  # γ; infinite where the transfer hides the reduction, as with NCCL
    has_trees: bool = True  # NCCL uses a tree where that is faster; Gloo has only rings
    overlap: bool = True
    jitter: float = 0.0  # coefficient of variation of a rank's compute time from step to step; lognormal
    slow_share: float = 0.0  # probability that a rank is permanently slow …
    slow_factor: float = 1.0  # … and then takes so many times as long
    kind: Literal["weak", "strong"] = "weak"  # each rank keeps its sequences, or all ranks share them
    mtbf_s: float | None = None  # mean time between failures of one node; None: nothing fails
    checkpoint_s: float = 0.0  # the run pauses while it saves
    restart_s: float = 0.0  # from a failure to the first step after it
    assumed: list[str] = []  # sentences: assumptions in place of measurements

    def check(self) -> None:
        """Raise UsageError for an impossible scenario."""
        given = msgspec.structs.asdict(self) | {"mtbf_s": math.inf if self.mtbf_s is None else self.mtbf_s}
        for name, wire in (("inner", self.inner), ("outer", self.outer)):
            given |= {f"{name}.latency_s": wire.latency_s, f"{name}.bandwidth_Bps": wire.bandwidth_Bps}
        for names, fits, hint in LIMITS:
            for name in names.split():
                if not fits(given[name]):
                    raise UsageError(f"{name} is {given[name]:g}", hint=f"it must be {hint}")


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one number of ranks."""

    ranks: int
    nodes: int
    share: int  # sequences of the rank that has most
    cost: StepCost  # of the mean rank in the mean step; wait_s = E[slowest rank's compute] - E[a rank's compute]
    step_p50_s: float
    step_p95_s: float
    sync_s: float  # all-reduces in flight, hidden or not
    algorithm: str  # of most transfers: "none", "ring" or "tree"
    tokens_per_s: float
    efficiency: float  # tokens/s per rank, relative to a single rank
    useful: float  # fraction of the time left after failures, restarts, lost work and checkpoints
    goodput: float  # efficiency · useful
    mtbf_s: float | None  # of all nodes together
    checkpoint_every_s: float | None  # the interval that loses least

    @property
    def step_s(self) -> float:
        """Seconds of the mean step."""
        return self.cost.total_s


def simulate_scaling(scenario: ScalingScenario, counts: Sequence[int]) -> list[ScalingPoint]:
    """Predict a step with each number of ranks. Raise UsageError for a number below 1 or an impossible scenario."""
    scenario.check()
    if any(num < 1 for num in counts):
        raise UsageError(f"{min(counts)} ranks", hint="at least one rank trains")
    alone = _simulate_point(scenario, 1, None)
    return [_simulate_point(scenario, num, alone.tokens_per_s) for num in counts]


def _simulate_point(scenario: ScalingScenario, num_ranks: int, alone_tokens_per_s: float | None) -> ScalingPoint:
    default = _simulate_with_buckets(scenario, num_ranks, alone_tokens_per_s)
    if not scenario.small_buckets or num_ranks == 1:
        return default
    small_scenario = msgspec.structs.replace(scenario, buckets=scenario.small_buckets)
    alternative = _simulate_with_buckets(small_scenario, num_ranks, alone_tokens_per_s)
    return alternative if default.step_s > MIN_GAIN * alternative.step_s else default


def _simulate_with_buckets(scenario: ScalingScenario, num_ranks: int, alone_tokens_per_s: float | None) -> ScalingPoint:
    shares = (
        equal_shares(scenario.sequences, num_ranks) if scenario.kind == "strong" else [scenario.sequences] * num_ranks
    )
    nodes = -(-num_ranks // scenario.per_node)
    slowest = _max_compute_time(scenario, shares)
    transfers = _transfers(scenario, num_ranks)
    first = Member(rank=0, host="", device="cuda:0", dtype="bf16", share=shares[0], micro_batch=scenario.micro_batch)
    last_pass = first.last_micro_batch / first.share

    def exposed_s(compute_s: float) -> float:
        backward_s = scenario.backward_share * last_pass * compute_s if scenario.overlap else 0.0
        return exposed_communication_s(transfers, backward_s)

    mean_compute_s = scenario.compute_s * sum(shares) / num_ranks / scenario.sequences
    mean_compute_s *= 1 + scenario.slow_share * (scenario.slow_factor - 1)
    slowest_s = max(mean_compute_s, slowest.mean())
    cost = StepCost(
        data_s=0.0,
        compute_s=mean_compute_s,
        exposed_sync_s=exposed_s(slowest_s),
        wait_s=slowest_s - mean_compute_s,
        optimizer_s=scenario.update_s,
    )
    p50_s, p95_s = (at + exposed_s(at) + scenario.update_s for at in (slowest.quantile(0.5), slowest.quantile(0.95)))
    tokens_per_s = sum(shares) * scenario.sequence_tokens / cost.total_s
    efficiency = tokens_per_s / num_ranks / alone_tokens_per_s if alone_tokens_per_s else 1.0
    mtbf_s = scenario.mtbf_s / nodes if scenario.mtbf_s else None
    every_s = None if mtbf_s is None else checkpoint_interval_s(scenario.checkpoint_s, mtbf_s, cost.total_s)
    useful = 1.0
    if mtbf_s is not None and every_s is not None:
        useful = useful_time_fraction(every_s, scenario.checkpoint_s, scenario.restart_s, mtbf_s)
    kinds = [algorithm for _, _, algorithm in transfers]
    return ScalingPoint(
        ranks=num_ranks,
        nodes=nodes,
        share=shares[0],
        cost=cost,
        step_p50_s=p50_s,
        step_p95_s=p95_s,
        sync_s=math.fsum(time_s for _, time_s, _ in transfers),
        algorithm=max(sorted(set(kinds)), key=kinds.count) if kinds else "none",
        tokens_per_s=tokens_per_s,
        efficiency=efficiency,
        useful=useful,
        goodput=efficiency * useful,
        mtbf_s=mtbf_s,
        checkpoint_every_s=every_s,
    )


# Scenarios


def build_scenario(
    job: Job, cluster: Cluster, *, strong: bool, jitter: float | None, mtbf_days: float | None
) -> ScalingScenario:
    """Build a scenario of ranks like the cluster's first and links like that between its first two nodes.

    Raise UsageError if the hosts differ in speed.
    """
    if len({tuple(host.tokens_per_s.items()) for host in cluster.hosts.values()}) > 1:
        raise UsageError("--scale needs identical ranks", hint="one rate: --compute-tokens-per-s 500")
    single = job.initial_roster(cluster.slots[:1])
    (first,), names = single.members, cluster.host_names
    host, outer = cluster.hosts[names[0]], cluster.link_between(names[0], names[1])
    micro_batch = min(first.micro_batch, first.share)
    alone_s = job.padding_factor(micro_batch) * job.tokens / cluster.tokens_per_s(first)
    jitter, mtbf_days = cluster.jitter if jitter is None else jitter, MTBF_DAYS if mtbf_days is None else mtbf_days
    return ScalingScenario(
        compute_s=recompute_factor(job) * (alone_s + host.pass_s * first.num_micro_batches),
        backward_share=backward_fraction(job),
        update_s=host.update_s,
        sequences=first.share,
        micro_batch=micro_batch,
        sequence_tokens=round(job.shape.block_size),
        gradient_bytes=GRADIENT_BYTES * job.shape.num_params(),
        buckets=bucket_sizes(gradient_tensors(job.shape)),
        small_buckets=bucket_sizes(gradient_tensors(job.shape), COMPRESSED_BUCKET_BYTES),
        per_node=len(cluster.slots) // len(names),
        inner=host.local or outer,
        outer=outer,
        has_trees=choose_backend(cluster.slots, job.spec.machine.backend) == "nccl",
        kind="strong" if strong else "weak",
        jitter=jitter,
        mtbf_s=86400 * mtbf_days,
        checkpoint_s=CHECKPOINT_S,
        restart_s=RESTART_S,
        assumed=[
            "the transfer hides the reduction",
            f"a rank's compute time varies by {jitter:.0%} from step to step (lognormal; --jitter)",
            f"a node fails every {mtbf_days:g} days (--mtbf-days); a checkpoint takes {CHECKPOINT_S:.0f} s, a restart "
            f"{RESTART_S:.0f} s",
        ],
    )


def with_slow_ranks(scenario: ScalingScenario, text: str) -> ScalingScenario:
    """Return the scenario with permanently slow ranks, from "share:factor" such as "0.01:1.5"."""
    try:
        share, factor = map(float, text.split(":"))
    except ValueError:
        share, factor = -1.0, 0.0
    if not (0 <= share <= 1 and 1 <= factor < 1e6):
        raise UsageError(f"--slow {text}: expected a share of the ranks and a factor", hint="--slow 0.01:1.5")
    note = f"{share:.2%} of the ranks take {factor:g} times as long in every step (--slow)"
    return msgspec.structs.replace(scenario, slow_share=share, slow_factor=factor, assumed=[*scenario.assumed, note])


def parse_rank_counts(text: str) -> list[int]:
    """Parse numbers of ranks; "…" continues with the ratio of the two numbers before it.

    >>> parse_rank_counts("1,2,4,…,32"), parse_rank_counts("8, 16"), parse_rank_counts("3,9,...,81")
    ([1, 2, 4, 8, 16, 32], [8, 16], [3, 9, 27, 81])
    """
    error = UsageError(f"--scale {text}: expected numbers of ranks, growing", hint="for example 1,2,4,…,4096")
    words = [word.strip() for word in text.split(",")]
    ranks: list[int] = []
    for i, word in enumerate(words):
        if re.fullmatch(r"…|\.\.\.?", word):
            if len(ranks) < 2 or i + 1 >= len(words) or not words[i + 1].isdecimal():
                raise error
            ratio, last = ranks[-1] / ranks[-2], int(words[i + 1])
            while ratio > 1 and round(ranks[-1] * ratio) < last:
                ranks.append(max(ranks[-1] + 1, round(ranks[-1] * ratio)))
                if len(ranks) > MAX_POINTS:
                    break
        elif word.isdecimal() and 1 <= int(word) <= MAX_RANKS and (not ranks or int(word) > ranks[-1]):
            ranks.append(int(word))
        else:
            raise error
        if len(ranks) > MAX_POINTS:
            raise UsageError(f"--scale: more than {MAX_POINTS} numbers of ranks", hint="for example 1,2,4,…,4096")
    return ranks


# Communication


def all_reduce_s(size_bytes: float, num_ranks: int, scenario: ScalingScenario) -> tuple[float, str]:
    """Return the seconds of one all-reduce, and its algorithm: "ring" or, with NCCL, the faster of "ring" and "tree".

    Both pass through all k ranks of a node before they leave it. The latencies of the ring add up to about
    2(n-N)·α_inner + 2(N-1)·α_outer, and each rank sends 2(n-1)/n · S. Chunks are on all links at once, so the slowest
    link sets the pace, and a node sends as much as one rank. Published: 4 nodes of 8 B200 with 400 GB/s each reach a
    busbw of 382 GB/s. This predicts 400; two levels, one after the other, would be 340 (NVLink of 900 GB/s).

    >>> fabric = ScalingScenario(compute_s=1, sequences=1, micro_batch=1, sequence_tokens=1, gradient_bytes=0,
    ...     inner=LinkModel(latency_s=0, bandwidth_Bps=900e9), outer=LinkModel(latency_s=10e-6, bandwidth_Bps=400e9))
    >>> [(round(time_s * 1e3, 2), name) for time_s, name in (all_reduce_s(25e6, n, fabric) for n in (8, 16, 4096))]
    [(0.05, 'ring'), (0.16, 'ring'), (0.59, 'tree')]
    """
    ring = _ring(scenario, num_ranks)
    if not scenario.has_trees:
        return collective_s("all_reduce", size_bytes, ring, "gloo"), "ring"
    part = size_bytes / num_ranks
    ring_s = ring_phase_s(ring.to_next.capped_at(scenario.sum_Bps), part) + ring_phase_s(ring.to_next, part)
    k, nodes = min(num_ranks, scenario.per_node), len(ring.host_sizes)
    _, algorithm = nccl_all_reduce_s(size_bytes, ring_s, k, nodes, ring.inner, ring.outer, scenario.sum_Bps)
    return collective_s("all_reduce", size_bytes, ring, "nccl"), algorithm


def _ring(scenario: ScalingScenario, num_ranks: int) -> Ring:
    """Return the ring that passes through all ranks of a node before it leaves the node."""
    k = scenario.per_node
    nodes = [f"{rank // k}" for rank in range(num_ranks)]
    wires = tuple(scenario.inner if a == b else scenario.outer
                  for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True))  # fmt: skip
    return Ring(hosts=tuple(nodes), links=wires, reverse_links=wires[-1:] + wires[:-1],
                sum_Bps=(scenario.sum_Bps,) * num_ranks)  # fmt: skip


def _transfers(scenario: ScalingScenario, num_ranks: int) -> list[tuple[float, float, str]]:
    """Return (fraction of backward when it may start, seconds, algorithm) of each bucket's all-reduce."""
    if num_ranks == 1:
        return []
    buckets = list(scenario.buckets)
    if not buckets:
        total, sent = scenario.gradient_bytes, 0
        while sent < total:
            size = min(BUCKET_BYTES, total - sent)
            sent += size
            buckets.append((size, sent / total))
    times = {size: all_reduce_s(size, num_ranks, scenario) for size in {size for size, _ in buckets}}
    return [(ready, *times[size]) for size, ready in buckets]


def exposed_communication_s(transfers: Sequence[tuple[float, float, str]], backward_s: float) -> float:
    """Return the seconds from the end of backward to the end of the last transfer: start_i = max(ready_i, end_{i-1}).

    >>> exposed_communication_s([(0.5, 0.75, "ring"), (1.0, 0.5, "ring")], backward_s=1.0)
    0.75
    """
    end_s = 0.0
    for ready, time_s, _ in transfers:
        end_s = max(ready * backward_s, end_s) + time_s
    return max(0.0, end_s - backward_s)


def _max_compute_time(scenario: ScalingScenario, shares: Sequence[int]) -> MaxDistribution:
    """Return the distribution of the slowest rank's compute time.

    A rank's time is its mean time times a lognormal factor with mean 1, and times `slow_factor` with probability
    `slow_share`.
    """
    groups = [(scenario.compute_s * s / scenario.sequences, shares.count(s)) for s in sorted(set(shares)) if s]
    return max_of_lognormals(groups, scenario.jitter, scenario.slow_share, scenario.slow_factor)
