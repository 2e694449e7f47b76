"""With this step on one rank, what do 1, 2, 4, … 4096 ranks give?

n  ranks    N  nodes    k  ranks of a node    S  bytes    α  seconds of a message    β  bytes a second

A step is as long as that of its slowest rank, so what a rank's compute time varies by costs more the more ranks there
are; communication grows by its latencies; and of a thousand nodes one fails every few hours. Expectations are
integrals, not samples: the same scenario gives the same figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from evener.core.errors import UsageError
from evener.core.link import Wire
from evener.core.prediction import Cluster, Job
from evener.core.roster import Member, backend_of, equal_shares
from evener.core.step import StepCost
from evener.plan.collectives import Ring, backend_s, lap_s, nccl_all_reduce_s
from evener.plan.cost import BACKWARD, RECOMPUTED, again
from evener.plan.goodput import checkpoint_interval_s, useful_share
from evener.plan.options import WORTH
from evener.plan.slowest import Slowest, slowest_of
from evener.plan.sync import BUCKET_BYTES, CODED_BUCKET_BYTES, GRADIENT_BYTES, buckets, gradients

LIMITS: list[tuple[str, Callable[[float], bool], str]] = [
    ("compute_s slow_factor", lambda x: 0 < x < math.inf, "more than 0"),
    ("sequences micro_batch sequence_tokens per_node", lambda x: x >= 1, "at least 1"),
    ("sum_Bps mtbf_s inner.bandwidth_Bps outer.bandwidth_Bps", lambda x: x > 0, "more than 0"),
    ("update_s gradient_bytes checkpoint_s restart_s", lambda x: 0 <= x < math.inf, "0 or more"),
    ("inner.latency_s outer.latency_s", lambda x: 0 <= x < math.inf, "0 or more"),
    ("jitter", lambda x: 0 <= x <= 3, "between 0 and 3"),
    ("backward_share slow_share", lambda x: 0 <= x <= 1, "between 0 and 1"),
]
MOST_RANKS = 1 << 16
MOST_POINTS = 64
MTBF_DAYS = 300.0  # *assumption*
CHECKPOINT_S, RESTART_S = 20.0, 300.0  # *assumptions*: to write all weights, and from a failure to the next step


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step, and what happens when there are more. Ranks fill a node before the next one is used."""

    compute_s: float  # forward and backward of one rank alone: its mean
    sequences: int  # of its step
    micro_batch: int  # largest number of them in one backward; the last backward alone hides communication
    sequence_tokens: int
    update_s: float = 0.0
    backward_share: float = BACKWARD  # of compute_s
    gradient_bytes: int  # reduced once a step
    buckets: list[tuple[int, float]] = []  # (bytes, share of backward when it is there), see plan.sync.buckets;
    # empty: DDP's 25 MiB each, ready evenly over backward
    small_buckets: list[tuple[int, float]] = []  # instead of them where that is clearly faster; empty: never
    per_node: int = 8
    inner: Wire  # between two ranks of a node
    outer: Wire  # between two nodes: all that a node has, so eight adapters of 50 GB/s are 400 GB/s
    sum_Bps: float = math.inf  # γ; infinite where sums are hidden behind the transfer, as NCCL's are
    has_trees: bool = True  # NCCL takes a tree where that is faster; Gloo has rings alone
    overlap: bool = True
    jitter: float = 0.0  # coefficient of variation of a rank's compute time from step to step; lognormal
    slow_share: float = 0.0  # a rank is slow for good with this probability …
    slow_factor: float = 1.0  # … and then takes so many times as long
    kind: Literal["weak", "strong"] = "weak"  # each rank keeps its sequences, or all ranks share them
    mtbf_s: float | None = None  # mean time between failures of one node; None: nothing fails
    checkpoint_s: float = 0.0  # the run stands still while it saves
    restart_s: float = 0.0  # from a failure to the first step after it
    assumed: list[str] = []  # sentences: what nobody measured

    def check(self) -> None:
        """Raise UsageError for a scenario that cannot be."""
        given = msgspec.structs.asdict(self) | {"mtbf_s": math.inf if self.mtbf_s is None else self.mtbf_s}
        for name, wire in (("inner", self.inner), ("outer", self.outer)):
            given |= {f"{name}.latency_s": wire.latency_s, f"{name}.bandwidth_Bps": wire.bandwidth_Bps}
        for names, fits, hint in LIMITS:
            for name in names.split():
                if not fits(given[name]):
                    raise UsageError(f"{name} is {given[name]:g}", hint=f"it must be {hint}")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What so many ranks give."""

    ranks: int
    nodes: int
    share: int  # sequences of the rank that takes most
    cost: StepCost  # of the mean rank in the mean step; wait_s = E[slowest rank's compute] - E[a rank's compute]
    step_p50_s: float
    step_p95_s: float
    sync_s: float  # all-reduces in flight, hidden or not
    algorithm: str  # of most bytes: "none", "ring" or "tree"
    tokens_per_s: float
    efficiency: float  # tokens/s of a rank against one rank alone
    useful: float  # share of the time that remains, with failures, restarts, lost work and checkpoints
    goodput: float  # efficiency · useful
    mtbf_s: float | None  # of all nodes together
    checkpoint_every_s: float | None  # the interval that loses least

    @property
    def step_s(self) -> float:
        """The mean step."""
        return self.cost.total_s


def scale(scenario: Scenario, counts: Sequence[int]) -> list[Point]:
    """A point for each number of ranks. UsageError where one is not positive or the scenario cannot be."""
    scenario.check()
    if any(num < 1 for num in counts):
        raise UsageError(f"{min(counts)} ranks", hint="at least one rank trains")
    alone = _point(scenario, 1, None)
    return [_point(scenario, num, alone.tokens_per_s) for num in counts]


def _point(scenario: Scenario, num_ranks: int, alone_tokens_per_s: float | None) -> Point:
    usual = _with_buckets(scenario, num_ranks, alone_tokens_per_s)
    if not scenario.small_buckets or num_ranks == 1:
        return usual
    other = msgspec.structs.replace(scenario, buckets=scenario.small_buckets)
    small = _with_buckets(other, num_ranks, alone_tokens_per_s)
    return small if usual.step_s > WORTH * small.step_s else usual


def _with_buckets(scenario: Scenario, num_ranks: int, alone_tokens_per_s: float | None) -> Point:
    shares = (
        equal_shares(scenario.sequences, num_ranks) if scenario.kind == "strong" else [scenario.sequences] * num_ranks
    )
    nodes = -(-num_ranks // scenario.per_node)
    slowest = _slowest(scenario, shares)
    transfers = _transfers(scenario, num_ranks)
    first = Member(rank=0, host="", device="cuda:0", dtype="bf16", share=shares[0], micro_batch=scenario.micro_batch)
    last_pass = first.last_pass / first.share

    def exposed_s(compute_s: float) -> float:
        backward_s = scenario.backward_share * last_pass * compute_s if scenario.overlap else 0.0
        return exposed(transfers, backward_s)

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
        useful = useful_share(every_s, scenario.checkpoint_s, scenario.restart_s, mtbf_s)
    kinds = [algorithm for _, _, algorithm in transfers]
    return Point(
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


# What is asked


def scenario_of(job: Job, cluster: Cluster, *, strong: bool, jitter: float | None, mtbf_days: float | None) -> Scenario:
    """Ranks like the cluster's first, nodes like its first two; UsageError where they are not alike."""
    if len({tuple(host.tokens_per_s.items()) for host in cluster.hosts.values()}) > 1:
        raise UsageError("--scale: all its ranks are alike", hint="one rate: --compute-tokens-per-s 500")
    alone = job.roster(cluster.seats[:1])
    (first,), names = alone.members, cluster.names
    host, outer = cluster.hosts[names[0]], cluster.between(names[0], names[1])
    jitter, mtbf_days = cluster.jitter if jitter is None else jitter, MTBF_DAYS if mtbf_days is None else mtbf_days
    return Scenario(
        compute_s=again(job) * (job.tokens / cluster.tokens_per_s(first) + host.pass_s * first.num_passes),
        backward_share=RECOMPUTED if job.spec.model.recompute else BACKWARD,
        update_s=host.update_s,
        sequences=first.share,
        micro_batch=min(first.micro_batch, first.share),
        sequence_tokens=job.shape.block_size,
        gradient_bytes=GRADIENT_BYTES * job.shape.num_params(),
        buckets=buckets(gradients(job.shape)),
        small_buckets=buckets(gradients(job.shape), CODED_BUCKET_BYTES),
        per_node=len(cluster.seats) // len(names),
        inner=host.local or outer,
        outer=outer,
        has_trees=backend_of(cluster.seats, job.spec.machine.backend) == "nccl",
        kind="strong" if strong else "weak",
        jitter=jitter,
        mtbf_s=86400 * mtbf_days,
        checkpoint_s=CHECKPOINT_S,
        restart_s=RESTART_S,
        assumed=[
            "sums hide behind the transfer",
            f"a rank's compute time varies by {jitter:.0%} from step to step (lognormal; --jitter)",
            f"a node fails every {mtbf_days:g} days (--mtbf-days); a checkpoint takes {CHECKPOINT_S:.0f} s, a restart "
            f"{RESTART_S:.0f} s",
        ],
    )


def with_slow(scenario: Scenario, text: str) -> Scenario:
    """The same with ranks that are slower for good: "0.01:1.5"."""
    try:
        share, factor = map(float, text.split(":"))
    except ValueError:
        share, factor = -1.0, 0.0
    if not (0 <= share <= 1 and 1 <= factor < 1e6):
        raise UsageError(f"--slow {text}: expected a share of the ranks and a factor", hint="--slow 0.01:1.5")
    told = f"of the ranks {share:.2%} take {factor:g} times as long in every step (--slow)"
    return msgspec.structs.replace(scenario, slow_share=share, slow_factor=factor, assumed=[*scenario.assumed, told])


def parse_counts(text: str) -> list[int]:
    """Numbers of ranks; … goes on as the two before it did, by their ratio.

    >>> parse_counts("1,2,4,…,32"), parse_counts("8, 16"), parse_counts("3,9,...,81")
    ([1, 2, 4, 8, 16, 32], [8, 16], [3, 9, 27, 81])
    """
    wrong = UsageError(f"--scale {text}: expected numbers of ranks, growing", hint="for example 1,2,4,…,4096")
    words = [word.strip() for word in text.split(",")]
    found: list[int] = []
    for i, word in enumerate(words):
        if re.fullmatch(r"…|\.\.\.?", word):
            if len(found) < 2 or i + 1 >= len(words) or not words[i + 1].isdecimal():
                raise wrong
            ratio, last = found[-1] / found[-2], int(words[i + 1])
            while ratio > 1 and round(found[-1] * ratio) < last:
                found.append(max(found[-1] + 1, round(found[-1] * ratio)))
                if len(found) > MOST_POINTS:
                    break
        elif word.isdecimal() and 1 <= int(word) <= MOST_RANKS and (not found or int(word) > found[-1]):
            found.append(int(word))
        else:
            raise wrong
        if len(found) > MOST_POINTS:
            raise UsageError(f"--scale: more than {MOST_POINTS} numbers of ranks", hint="for example 1,2,4,…,4096")
    return found


# Communication


def all_reduce_s(size_bytes: float, num_ranks: int, scenario: Scenario) -> tuple[float, str]:
    """Seconds of one all-reduce, and "ring" or "tree": the faster of NCCL's two. Both go through a node's k ranks.

    Latencies are about 2(n-N)·α_inner + 2(N-1)·α_outer of the ring, which sends 2(n-1)/n · S. Chunks are in all links
    at once, so the slowest sets the pace, and a node sends what one rank does. Published: 4 nodes of 8 B200 with 400
    GB/s each reach a busbw of 382 GB/s; this gives 400, two levels one after the other 340 (NVLink of 900 GB/s).

    >>> fabric = Scenario(compute_s=1, sequences=1, micro_batch=1, sequence_tokens=1, gradient_bytes=0,
    ...     inner=Wire(latency_s=0, bandwidth_Bps=900e9), outer=Wire(latency_s=10e-6, bandwidth_Bps=400e9))
    >>> [(round(time_s * 1e3, 2), name) for time_s, name in (all_reduce_s(25e6, n, fabric) for n in (8, 16, 4096))]
    [(0.05, 'ring'), (0.16, 'ring'), (0.59, 'tree')]
    """
    around = _ring(scenario, num_ranks)
    if not scenario.has_trees:
        return backend_s("all_reduce", size_bytes, around, "gloo"), "ring"
    part = size_bytes / num_ranks
    ring_s = lap_s(around.to_next.at_most(scenario.sum_Bps), part) + lap_s(around.to_next, part)
    k, nodes = min(num_ranks, scenario.per_node), len(around.host_sizes)
    _, algorithm = nccl_all_reduce_s(size_bytes, ring_s, k, nodes, around.inner, around.outer, scenario.sum_Bps)
    return backend_s("all_reduce", size_bytes, around, "nccl"), algorithm


def _ring(scenario: Scenario, num_ranks: int) -> Ring:
    """Through all ranks of a node before it leaves it."""
    k = scenario.per_node
    nodes = [f"{rank // k}" for rank in range(num_ranks)]
    wires = tuple(scenario.inner if here == there else scenario.outer
                  for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True))  # fmt: skip
    return Ring(hosts=tuple(nodes), wires=wires, back=wires[-1:] + wires[:-1],
                sum_Bps=(scenario.sum_Bps,) * num_ranks)  # fmt: skip


def _transfers(scenario: Scenario, num_ranks: int) -> list[tuple[float, float, str]]:
    """(share of backward when it may start, seconds, algorithm) of each bucket."""
    if num_ranks == 1:
        return []
    found = list(scenario.buckets)
    if not found:
        total, sent = scenario.gradient_bytes, 0
        while sent < total:
            size = min(BUCKET_BYTES, total - sent)
            sent += size
            found.append((size, sent / total))
    times = {size: all_reduce_s(size, num_ranks, scenario) for size in {size for size, _ in found}}
    return [(ready, *times[size]) for size, ready in found]


def exposed(transfers: Sequence[tuple[float, float, str]], backward_s: float) -> float:
    """Seconds from the end of backward to that of the last transfer: start_i = max(ready_i, end_{i-1}).

    >>> exposed([(0.5, 0.75, "ring"), (1.0, 0.5, "ring")], backward_s=1.0)
    0.75
    """
    end_s = 0.0
    for ready, time_s, _ in transfers:
        end_s = max(ready * backward_s, end_s) + time_s
    return max(0.0, end_s - backward_s)


def _slowest(scenario: Scenario, shares: Sequence[int]) -> Slowest:
    """Of ranks whose compute time is share · lognormal with mean 1 · slow_factor with probability slow_share."""
    groups = [(scenario.compute_s * s / scenario.sequences, shares.count(s)) for s in sorted(set(shares)) if s]
    return slowest_of(groups, scenario.jitter, scenario.slow_share, scenario.slow_factor)
