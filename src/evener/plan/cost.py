"""What will a step cost on this cluster, with this strategy? From rates and wires to the parts of a step, rank by rank.

    a rank:   update ─▶ input ─▶ forward and backward of each micro-batch ─▶ (blocked until the others are there too)
    wires:                                  └─ each collective starts when the last rank has what it sends, and the
                                               collective before it has ended: start_i = max(ready_i, end_{i-1})

The slowest rank's way, what remains of communication behind it, and what ranks wait because now one is late, now
another (known of machines that trained together), are the step. On a CPU, communication also takes
processor time from the computing that hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from evener.core.collective import Collective
from evener.core.prediction import Cluster, HostRates, Job, Option, RankCost
from evener.core.roster import BUILT, NO_SYNC, Backend, Member, Roster, SyncSpec, num_passes, parse_sync
from evener.core.step import StepCost
from evener.plan.collectives import backend_s, ring, sent_bytes
from evener.plan.memory import memory
from evener.plan.penalty import loss_penalty
from evener.plan.sync import Exchange, Transfer, exchange

BACKWARD = 2 / 3  # of forward and backward: two matrix products where forward has one   [PaLM, appendix B]
RECOMPUTED = 3 / 4  # where backward runs forward again
CODING_PASSES = 10.0  # over the memory, of coding and decoding where nobody measured it: assumption
ROUNDS = 4  # of the fixed point between stolen processor time and overlap: it converges by the overlap's share


class _Times(msgspec.Struct, frozen=True):
    """Of one rank, in seconds from the moment at which the step before released it."""

    begun_s: float  # update and input are done
    compute_s: float
    backward_s: float  # of it, the last micro-batch's backward

    @property
    def computed_s(self) -> float:
        return self.begun_s + self.compute_s

    def ready_s(self, share: float) -> float:
        """When so much of the last backward is over; when computing begins for a negative share."""
        return self.begun_s if share < 0 else self.computed_s - (1 - share) * self.backward_s


def price(job: Job, cluster: Cluster, roster: Roster, name: str = "") -> Option:
    """What a step costs the ranks of a Roster. One without a share waits."""
    num_ranks, members = roster.world_size, roster.members
    work = exchange(job.shape, roster)
    wires = ring(cluster, [member.host for member in members])
    lasting_s = {size: backend_s(*size, wires, roster.backend)
                 for size in {(t.collective, t.size_bytes) for t in (*work.transfers, *work.after)}}  # fmt: skip
    stolen_s = [0.0] * num_ranks
    for _ in range(ROUNDS):
        times = [_times(job, cluster, roster, member, work, stolen_s[member.rank]) for member in members]
        spans = _spans(work, times, lasting_s)
        stolen_s = [_stolen_s(cluster, roster, member, times[member.rank], work, spans) for member in members]
        if not any(stolen_s):
            break
    last_s = max(own.computed_s for own in times)
    in_flight_s = sum(end - start for start, end in spans) / work.every
    if work.every > 1:
        exposed_s = max(0.0, in_flight_s - last_s) if work.hidden else in_flight_s
    else:
        exposed_s = max(0.0, spans[-1][1] - last_s) if spans else 0.0
    late_s = cluster.late_s if num_ranks > 1 and work.every == 1 else 0.0
    after_s = sum(lasting_s[transfer.collective, transfer.size_bytes] for transfer in work.after)
    sent = sum(_sent(transfer, num_ranks, roster.backend) for transfer in work.transfers)
    sent += sum(t.size_bytes for t in work.after) * (num_ranks - 1) / num_ranks  # roots take turns: a copy is sent once
    ranks = [
        RankCost(
            cost=StepCost(
                data_s=cluster.hosts[member.host].data_s,
                compute_s=own.compute_s,
                exposed_sync_s=exposed_s + after_s,
                wait_s=last_s - own.computed_s + late_s,
                optimizer_s=cluster.hosts[member.host].update_s * work.update_share,
            ),
            sync_s=in_flight_s + after_s,
            bytes=round(sent / work.every),
            memory_bytes=memory(job.shape, roster, member.rank, recompute=job.spec.model.recompute).total,
        )
        for member, own in zip(members, times, strict=True)
    ]
    step_s = last_s + exposed_s + after_s + late_s
    penalty, source = loss_penalty(roster.sync, job.shape.num_params(), num_ranks, job.spec.train.steps, job.tokens)
    return Option(
        name=name or str(roster.sync),
        roster=roster,
        ranks=ranks,
        step_s=step_s,
        tokens_per_s=roster.batch * job.shape.block_size / step_s,
        speedup_vs_best_host=None,
        bytes_per_rank=round(sent / work.every),
        loss_penalty=penalty,
        loss_source=source,
        is_built=roster.sync == NO_SYNC or roster.sync.kind in BUILT,
    )


def again(job: Job) -> float:
    """By how much longer forward and backward take where activations are computed again: 4/3, else 1."""
    return (1 - BACKWARD) / (1 - RECOMPUTED) if job.spec.model.recompute else 1.0


def coding_s(host: HostRates, sync: SyncSpec) -> float:
    """Seconds by which a byte of gradients is made small and large again; of PowerSGD on the line over its rank.

    *Assumption* where nobody measured it: ten times over the memory. 0 where nothing of the memory is known.

    >>> host = HostRates(tokens_per_s={}, coding_Bps={"int8": 4e9, "powersgd:4": 2e9, "powersgd:32": 1e9})
    >>> [round(1e9 * coding_s(host, sync), 3) for sync in (SyncSpec(kind="int8"), SyncSpec(kind="powersgd", rank=18))]
    [0.25, 0.75]
    """
    if sync.kind != "powersgd":
        known = host.coding_Bps.get(f"int{sync.bits}" if sync.kind == "diloco" else sync.kind)
        return 1 / known if known else CODING_PASSES / host.copy_Bps if host.copy_Bps else 0.0
    measured = {parse_sync(name): rate for name, rate in host.coding_Bps.items()}
    points = sorted((known.rank, 1 / rate) for known, rate in measured.items() if known.kind == "powersgd")
    if len(points) < 2:
        return CODING_PASSES / host.copy_Bps if host.copy_Bps else 0.0
    (low, at_low), (high, at_high) = points[0], points[-1]
    return max(0.0, at_low + (sync.rank - low) / (high - low) * (at_high - at_low))


def _times(job: Job, cluster: Cluster, roster: Roster, member: Member, work: Exchange, stolen_s: float) -> _Times:
    """A rank by itself: what its share takes, in the mean of a round, and what the strategy and its communication add
    to it.
    """
    host, sequence_s = cluster.hosts[member.host], job.shape.block_size / cluster.tokens_per_s(member)
    more, whole = math.modf(roster.mean_shares[member.rank])  # a sequence more in some of its steps
    few, many = (num_passes(int(whole) + one, member.micro_batch) for one in (0, 1))
    passes_s = again(job) * (host.pass_s * (few + more * (many - few)) + sequence_s * (whole + more))
    last_s = again(job) * (host.pass_s + sequence_s * member.micro_batches[-1]) if member.share else 0.0
    packing_s = work.moved_bytes / work.every / host.copy_Bps if host.copy_Bps else 0.0
    packing_s += work.coded_bytes / work.every * coding_s(host, roster.sync)
    return _Times(
        begun_s=host.update_s * work.update_share + host.data_s,
        compute_s=passes_s + packing_s + stolen_s,
        backward_s=(RECOMPUTED if job.spec.model.recompute else BACKWARD) * last_s + stolen_s,
    )


def _spans(
    work: Exchange, times: Sequence[_Times], lasting_s: Mapping[tuple[Collective, float], float]
) -> list[tuple[float, float]]:
    """When each transfer starts and ends."""
    spans: list[tuple[float, float]] = []
    ended_s = 0.0
    for transfer in work.transfers:
        start_s = max(ended_s, *(own.ready_s(transfer.ready) for own in times))
        ended_s = start_s + lasting_s[transfer.collective, transfer.size_bytes]
        spans.append((start_s, ended_s))
    return spans


def _stolen_s(cluster: Cluster, roster: Roster, member: Member, own: _Times, work: Exchange,
              spans: Sequence[tuple[float, float]]) -> float:  # fmt: skip
    """Seconds by which computing grows because transfers beside it took processor time."""
    host = cluster.hosts[member.host]
    if member.is_gpu or not host.sync_Bps or not host.cpus or work.every > 1:
        return 0.0
    beside = 0.0
    for transfer, (start_s, end_s) in zip(work.transfers, spans, strict=True):
        share = (min(end_s, own.computed_s) - start_s) / (end_s - start_s) if end_s > start_s else 0.0
        beside += max(0.0, share) * _sent(transfer, roster.world_size, roster.backend)
    return beside / host.sync_Bps / host.cpus


def _sent(transfer: Transfer, num_ranks: int, backend: Backend) -> float:
    return sent_bytes(transfer.collective, transfer.size_bytes, num_ranks, backend)
