"""Cost model: predict the time of a step, rank by rank, from the cluster's rates and links and a sync strategy.

    a rank:   update ─▶ input ─▶ forward and backward of each micro-batch ─▶ (blocked until all ranks have finished)
    links:                                  └─ each collective starts when the last rank has its input ready and the
                                               previous collective has ended: start_i = max(ready_i, end_{i-1})

A step is the compute time of the slowest rank, plus the communication left exposed after it, plus the wait caused by
jitter (measured for machines that trained together). On a CPU, communication also takes processor time from the
computation that hides it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from evener.core.cluster.collective_results import Collective
from evener.core.model.fine_tuning import FineTuning
from evener.core.model.gradients import ProgramModel
from evener.core.run.prediction import Cluster, HostRates, Job, PlanOption, RankCost
from evener.core.run.roster import Member, Roster, SyncSpec, num_micro_batches, parse_sync, why_not_hsdp
from evener.core.run.step_cost import StepCost
from evener.plan.cost.collective_cost import Ring, build_ring, collective_s, sent_bytes
from evener.plan.cost.expected_max import expected_max_s
from evener.plan.cost.memory import faulted_bytes, peak_memory
from evener.plan.cost.penalty import loss_penalty, task_of
from evener.plan.cost.sync_traffic import (
    CollectiveCall,
    CollectiveScope,
    SyncWorkload,
    gradients_fit_bf16,
    sync_workload,
)

BACKWARD_FRACTION = 2 / 3  # of forward and backward: two matrix products where forward has one   [PaLM, appendix B]
CODEC_MEMORY_PASSES = 10.0  # passes over the memory to encode and decode, where not measured: *assumption*
# Where computation waits for weights layer by layer: T³ = C³ + M³ of computation and communication. *Fit* to published
# runs of FSDP on MareNostrum 5 (docs/figures/published/scaling.csv: 3.3 % rms of a step, perfect overlap, max(C, M),
# 7.0), validated on runs of other clusters.
OVERLAP_EXPONENT = 3
PAGE_FAULT_S_PER_BYTE = 2.1e-6 / 4096  # CPU time to map and zero a page (*measured*, d8, 2026-11-23: host_info.py)
# fixed-point iteration between contention and overlap; tolerance relative to a step
MAX_ITERATIONS, TOLERANCE = 200, 1e-4


CollectiveKey = tuple[Collective, float, CollectiveScope]  # a collective, the bytes of its buffer, and its scope


class _RankGroup(msgspec.Struct, frozen=True):
    """Identical ranks, which are modeled once."""

    member: Member  # the first of them
    mean_share: float
    num_ranks: int
    memory_bytes: int | None
    page_faults_s: float  # a step, where sharded ranks unmap freed blocks


class _RankTimes(msgspec.Struct, frozen=True):
    """Times of one rank, in seconds since the previous step ended for it."""

    compute_start_s: float  # update and input are done
    compute_s: float
    backward_s: float  # part of compute_s: backward of the last micro-batch

    @property
    def compute_end_s(self) -> float:
        return self.compute_start_s + self.compute_s

    def scaled_by(self, factor: float) -> _RankTimes:
        """Return these times multiplied by `factor`."""
        return _RankTimes(factor * self.compute_start_s, factor * self.compute_s, factor * self.backward_s)

    def ready_s(self, fraction: float) -> float:
        """Return when this fraction of the last backward is done; the start of computation if it is negative."""
        return self.compute_start_s if fraction < 0 else self.compute_end_s - (1 - fraction) * self.backward_s


def predict_step(job: Job, cluster: Cluster, roster: Roster, name: str = "") -> PlanOption:
    """Predict a step of this Roster, rank by rank. A rank that gets no sequences of the batch only waits."""
    num_ranks = roster.world_size
    kinds, group_of_rank = _group_ranks(job, cluster, roster)
    work = sync_workload(job, roster)
    sizes = {_collective_key(transfer) for transfer in (*work.transfers, *work.after_update)}
    rings = {
        scope: build_ring(cluster, _hosts_in_scope(cluster, roster, scope)) for scope in {scope for *_, scope in sizes}
    }
    lasting_s = {size: collective_s(size[0], size[1], rings[size[2]], roster.backend) for size in sizes}
    sent_of = {size: _sent_bytes(size, rings[size[2]], roster) for size in sizes}
    times, spans = _solve_overlap(job, cluster, roster, kinds, work, lasting_s, sent_of)
    last_s = max(timing.compute_end_s for timing in times)
    late_s = _jitter_wait_s(cluster, kinds, times, work.every) if num_ranks > 1 else 0.0
    in_flight_s = sum(end - start for start, end in spans) / work.every
    if work.every > 1:
        exposed_s = max(0.0, in_flight_s - last_s) if work.is_hidden else in_flight_s
    elif work.is_interleaved:  # T³ = C³ + M³
        exposed_s = max(
            0.0, (last_s**OVERLAP_EXPONENT + in_flight_s**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT) - last_s
        )
    else:
        spans = (
            _schedule_transfers(work, [timing.scaled_by(1 + late_s / last_s) for timing in times], lasting_s)
            if late_s
            else spans
        )
        exposed_s = max(0.0, spans[-1][1] - last_s - late_s) if spans else 0.0
    after_s = sum(lasting_s[_collective_key(transfer)] for transfer in work.after_update)
    sent = sum(transfer.num * sent_of[_collective_key(transfer)] for transfer in work.transfers)
    # roots take turns: a copy is sent once
    sent += sum(t.size_bytes for t in work.after_update) * (num_ranks - 1) / num_ranks
    costs = [
        RankCost(
            cost=StepCost(
                data_s=cluster.hosts[kind.member.host].data_s,
                compute_s=timing.compute_s,
                exposed_sync_s=exposed_s + after_s,
                wait_s=last_s - timing.compute_end_s + late_s,
                optimizer_s=cluster.hosts[kind.member.host].update_s * work.update_fraction,
            ),
            sync_s=in_flight_s + after_s,
            bytes=round((sent - _saved_bytes(job, roster, kind.member, work)) / work.every),
            memory_bytes=kind.memory_bytes,
        )
        for kind, timing in zip(kinds, times, strict=True)
    ]
    step_s = last_s + exposed_s + after_s + late_s
    penalty = loss_penalty(roster.sync, job.shape.num_params(), roster.mean_shares, job.spec.train.steps, job.tokens,
                           task_of(job.shape))  # fmt: skip
    return PlanOption(
        name=name or str(roster.sync),
        roster=roster,
        ranks=[costs[kind] for kind in group_of_rank],
        step_s=step_s,
        tokens_per_s=roster.batch * job.shape.block_size / step_s,
        speedup_vs_best_host=None,
        bytes_per_rank=round(sent / work.every),
        loss_penalty=penalty.loss,
        loss_margin=penalty.margin,
        loss_source=penalty.source,
        is_built=not why_not_hsdp(roster),
    )


def _collective_key(transfer: CollectiveCall) -> CollectiveKey:
    return transfer.collective, transfer.size_bytes, transfer.scope


def _hosts_in_scope(cluster: Cluster, roster: Roster, scope: CollectiveScope) -> list[str]:
    """Return the host of each rank of a ring. The scope "all" has all ranks, "host" those of the host whose ranks have
    the slowest link between them, "hosts" one rank of each host.
    """
    if scope == "all":
        return [member.host for member in roster.members]
    hosts = roster.hosts
    if scope == "hosts":
        return hosts
    slowest = min(hosts, key=lambda name: getattr(cluster.hosts[name].local, "bandwidth_Bps", math.inf))
    return [slowest] * (roster.world_size // len(hosts))


def _sent_bytes(size: CollectiveKey, ring: Ring, roster: Roster) -> float:
    """Return the bytes that a rank sends in one collective; in the scope "hosts" the mean over the ranks of a host."""
    collective, size_bytes, scope = size
    sent = sent_bytes(collective, size_bytes, ring.num_ranks, roster.backend)
    return sent * len(roster.hosts) / roster.world_size if scope == "hosts" else sent


def _saved_bytes(job: Job, roster: Roster, member: Member, work: SyncWorkload) -> float:
    """Return how many bytes fewer than the busiest rank this rank sends in an exchange."""
    fewer_rows = job.embedding_rows(max(roster.shares)) - job.embedding_rows(member.share)
    return work.bf16_saved_bytes * gradients_fit_bf16(member) + work.row_bytes * fewer_rows


def _group_ranks(job: Job, cluster: Cluster, roster: Roster) -> tuple[list[_RankGroup], list[int]]:
    """Return groups of identical ranks, and the group index of each rank."""
    hosts, shares = {name: id(host) for name, host in cluster.hosts.items()}, roster.mean_shares
    keys = [(hosts[m.host], m.is_gpu, m.dtype, m.share, m.micro_batch, share)
            for m, share in zip(roster.members, shares, strict=True)]  # fmt: skip
    counted = Counter(keys)
    numbers = {key: number for number, key in enumerate(counted)}
    group_of_rank = [numbers[key] for key in keys]
    firsts = [keys.index(key) for key in counted]
    kinds = [_RankGroup(roster.members[rank], shares[rank], num, *_memory_and_page_faults(job, cluster, roster, rank))
             for rank, num in zip(firsts, counted.values(), strict=True)]  # fmt: skip
    return kinds, group_of_rank


def _memory_and_page_faults(job: Job, cluster: Cluster, roster: Roster, rank: int) -> tuple[int | None, float]:
    """Return a rank's peak memory and, where its host's memory is known, the seconds of its page faults in a step."""
    if isinstance(job.shape, ProgramModel):
        return job.shape.peak_memory_bytes, 0.0
    host = cluster.hosts[roster.members[rank].host]
    need = peak_memory(job.shape, roster, rank, recompute=job.spec.model.recompute,
                       host_memory_bytes=host.memory_bytes, has_jemalloc=host.has_jemalloc)  # fmt: skip
    if host.memory_bytes is None or roster.members[rank].is_gpu:
        return need.total, 0.0
    return need.total, faulted_bytes(job.shape, roster, need) * PAGE_FAULT_S_PER_BYTE / (host.cpus or 1)


def _solve_overlap(
    job: Job,
    cluster: Cluster,
    roster: Roster,
    kinds: Sequence[_RankGroup],
    work: SyncWorkload,
    lasting_s: Mapping[CollectiveKey, float],
    sent_bytes: Mapping[CollectiveKey, float],
) -> tuple[list[_RankTimes], list[tuple[float, float]]]:
    """Return the times of each group of ranks and the (start, end) of each transfer, as a fixed point: communication
    takes processor time from the computation that hides it, which then hides more of it, and so on.
    """
    stolen_s = [0.0] * len(kinds)
    for _ in range(MAX_ITERATIONS):
        times = [
            _rank_times(job, cluster, roster, kind, work, stolen) for kind, stolen in zip(kinds, stolen_s, strict=True)
        ]
        spans = _schedule_transfers(work, times, lasting_s)
        before_s = stolen_s
        stolen_s = [_contention_s(cluster, kind.member, t, work, spans, sent_bytes)
                    for kind, t in zip(kinds, times, strict=True)]  # fmt: skip
        most_s = max(abs(now - then) for now, then in zip(stolen_s, before_s, strict=True))
        if most_s <= TOLERANCE * max(t.compute_end_s for t in times):
            break
    return times, spans


def _jitter_wait_s(cluster: Cluster, kinds: Sequence[_RankGroup], times: Sequence[_RankTimes], every: int) -> float:
    """Return the seconds by which the slowest rank of a step exceeds the rank that is slowest on average.

    These are the cluster's measured `late_s` (0 if ranks exchange only every several steps), or else the expectation
    from its `jitter`, which averages out over the `every` steps between two exchanges.
    """
    if cluster.late_s or not cluster.jitter:
        return cluster.late_s if every == 1 else 0.0
    means: Counter[float] = Counter()
    for kind, t in zip(kinds, times, strict=True):
        means[t.compute_end_s] += kind.num_ranks
    jitter, last_s = cluster.jitter / math.sqrt(every), max(means)
    near = tuple((mean_s / last_s, num) for mean_s, num in means.items() if mean_s > (1 - 5 * jitter) * last_s)
    return max(0.0, expected_max_s(near, jitter) - 1) * last_s


def recompute_factor(job: Job) -> float:
    """Return the factor by which recomputing activations, a second forward, lengthens forward and backward: 4/3 where
    all weights are trained, or 1 without it.
    """
    return 2 - _plain_backward_fraction(job) if job.spec.model.recompute else 1.0


def backward_fraction(job: Job) -> float:
    """Return the fraction of forward and backward that is backward, which runs forward again if it recomputes."""
    return 1 - (1 - _plain_backward_fraction(job)) / recompute_factor(job)


def _plain_backward_fraction(job: Job) -> float:
    """Return the same without recomputing: less if weights are frozen."""
    return job.shape.backward_fraction if isinstance(job.shape, FineTuning) else BACKWARD_FRACTION


def codec_s_per_byte(host: HostRates, sync: SyncSpec) -> float:
    """Return the seconds to encode and decode one gradient byte; for PowerSGD interpolated linearly in its rank.

    *Assumption* where not measured: ten passes over the memory. 0 where the memory bandwidth is not known.

    >>> host = HostRates(tokens_per_s={}, coding_Bps={"int8": 4e9, "powersgd:4": 2e9, "powersgd:32": 1e9})
    >>> [round(1e9 * codec_s_per_byte(host, sync), 3) for sync in (SyncSpec(kind="int8"),
    ...     SyncSpec(kind="powersgd", rank=18))]
    [0.25, 0.75]
    """
    if sync.kind != "powersgd":
        known = host.coding_Bps.get(f"int{sync.bits}" if sync.drifts else sync.kind)
        return 1 / known if known else CODEC_MEMORY_PASSES / host.copy_Bps if host.copy_Bps else 0.0
    measured = {parse_sync(name): rate for name, rate in host.coding_Bps.items()}
    points = sorted((known.rank, 1 / rate) for known, rate in measured.items() if known.kind == "powersgd")
    if len(points) < 2:
        return CODEC_MEMORY_PASSES / host.copy_Bps if host.copy_Bps else 0.0
    (low, at_low), (high, at_high) = points[0], points[-1]
    return max(0.0, at_low + (sync.rank - low) / (high - low) * (at_high - at_low))


def _rank_times(
    job: Job, cluster: Cluster, roster: Roster, kind: _RankGroup, work: SyncWorkload, stolen_s: float
) -> _RankTimes:
    """Return the times of a rank that waits for no other: to compute its mean share of the batch, to copy and encode
    gradients, and `stolen_s` of contention.
    """
    member = kind.member
    host, sequence_s = cluster.hosts[member.host], job.shape.block_size / cluster.tokens_per_s(member)
    more, whole = math.modf(kind.mean_share)  # one sequence more in this fraction of its steps
    few, many = (num_micro_batches(int(whole) + extra, member.micro_batch) for extra in (0, 1))
    num_passes = few + more * (many - few)
    sequence_s *= job.padding_factor(kind.mean_share / num_passes) if num_passes else 1.0
    factor = recompute_factor(job)
    passes_s = factor * (host.pass_s * num_passes + sequence_s * kind.mean_share)
    last_s = factor * (host.pass_s + sequence_s * member.last_micro_batch) if member.share else 0.0
    packing_s = work.copied_bytes / work.every / host.copy_Bps if host.copy_Bps else 0.0
    packing_s += work.encoded_bytes / work.every * codec_s_per_byte(host, roster.sync)
    return _RankTimes(
        compute_start_s=host.update_s * work.update_fraction + host.data_s,
        compute_s=passes_s + packing_s + kind.page_faults_s + stolen_s,
        backward_s=backward_fraction(job) * last_s + stolen_s,
    )


def _schedule_transfers(
    work: SyncWorkload, times: Sequence[_RankTimes], lasting_s: Mapping[CollectiveKey, float]
) -> list[tuple[float, float]]:
    """Return the (start, end) of each transfer, in seconds since the step began."""
    spans: list[tuple[float, float]] = []
    ended_s, last_ready = 0.0, _prune_dominated(times)
    for transfer in work.transfers:
        start_s = max(ended_s, *(t.ready_s(transfer.ready) for t in last_ready))
        ended_s = start_s + transfer.num * lasting_s[_collective_key(transfer)]
        spans.append((start_s, ended_s))
    return spans


def _prune_dominated(times: Sequence[_RankTimes]) -> list[_RankTimes]:
    """Drop ranks whose gradients are always ready before those of another rank; three fractions of backward suffice."""
    kept: list[_RankTimes] = []
    for t in sorted(times, key=lambda t: -t.compute_end_s):
        if not any(all(other.ready_s(share) >= t.ready_s(share) for share in (-1.0, 0.0, 1.0)) for other in kept):
            kept.append(t)
    return kept


def _contention_s(
    cluster: Cluster,
    member: Member,
    times: _RankTimes,
    work: SyncWorkload,
    spans: Sequence[tuple[float, float]],
    sent_bytes: Mapping[CollectiveKey, float],
) -> float:
    """Return the seconds by which computation grows because concurrent transfers take processor time.

    Transfers between rounds of several steps overlap with all of them if they are hidden, else with none.
    """
    host = cluster.hosts[member.host]
    if member.is_gpu or not host.sync_Bps or not host.cpus:
        return 0.0
    overlapped_bytes = 0.0
    for transfer, (start_s, end_s) in zip(work.transfers, spans, strict=True):
        if work.every > 1:
            overlap = float(work.is_hidden)
        else:
            overlap = (min(end_s, times.compute_end_s) - start_s) / (end_s - start_s) if end_s > start_s else 0.0
        overlapped_bytes += max(0.0, overlap) * transfer.num * sent_bytes[_collective_key(transfer)]
    return overlapped_bytes / work.every / host.sync_Bps / host.cpus
