"""What will a step cost on this cluster, with this strategy? From rates and wires to the parts of a step, rank by rank.

    a rank:   update ─▶ input ─▶ forward and backward of each micro-batch ─▶ (blocked until the others are there too)
    wires:                                  └─ each collective starts when the last rank has what it sends, and the
                                               collective before it has ended: start_i = max(ready_i, end_{i-1})

The slowest rank's way and what remains of communication behind it are the step. On a CPU, communication also takes
processor time from the computing that hides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evener.core.collective import Collective
from evener.core.errors import UsageError
from evener.core.prediction import Cluster, HostRates, Job, Option, RankCost
from evener.core.step import StepCost
from evener.plan.balance import equal_shares, micro_batch_sizes
from evener.plan.collectives import backend_s, ring, sent_bytes
from evener.plan.memory import memory
from evener.plan.sync import BUILT, Exchange, Transfer, exchange, loss_penalty

BACKWARD = 2 / 3  # of forward and backward: two matrix products where forward has one   [PaLM, appendix B]
RECOMPUTED = 3 / 4  # where backward runs forward again
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


def price(job: Job, cluster: Cluster, sync: str, *, shares: Sequence[int] | None = None, name: str = "") -> Option:
    """What a step of the job costs on all hosts of the cluster.

    `shares` are sequences of the global batch by rank, as equal as can be if None. A rank without a share waits.
    UsageError where there are more ranks than sequences, or nobody knows the strategy.
    """
    num_ranks = cluster.num_ranks
    if shares is None:
        if num_ranks > job.batch:
            raise UsageError(
                f"{num_ranks} ranks, more than the {job.batch} sequences of one batch",
                hint=f"--batch {num_ranks} or more gives every rank something to do",
            )
        shares = equal_shares(job.batch, num_ranks)
    assert (len(shares), sum(shares)) == (num_ranks, job.batch), shares
    hosts = [cluster.host_of(rank) for rank in range(num_ranks)]
    work = exchange(sync, job, num_ranks, max(shares))
    wires = ring(cluster)
    lasting_s = {size: backend_s(*size, wires, cluster.backend)
                 for size in {(t.collective, t.size_bytes) for t in (*work.transfers, *work.after)}}  # fmt: skip
    stolen_s = [0.0] * num_ranks
    for _ in range(ROUNDS):
        times = [_times(job, *of_rank) for of_rank in zip(hosts, shares, [work] * num_ranks, stolen_s, strict=True)]
        spans = _spans(work, times, lasting_s)
        stolen_s = [_stolen_s(host, own, work, spans, num_ranks, cluster.backend)
                    for host, own in zip(hosts, times, strict=True)]  # fmt: skip
        if not any(stolen_s):
            break
    last_s = max(own.computed_s for own in times)
    in_flight_s = sum(end - start for start, end in spans) / work.every
    if work.every > 1:
        exposed_s = max(0.0, in_flight_s - last_s) if work.hidden else in_flight_s
    else:
        exposed_s = max(0.0, spans[-1][1] - last_s) if spans else 0.0
    after_s = sum(lasting_s[transfer.collective, transfer.size_bytes] for transfer in work.after)
    sent = sum(sent_bytes(t.collective, t.size_bytes, num_ranks, cluster.backend) for t in work.transfers)
    sent += (
        sum(t.size_bytes for t in work.after) * (num_ranks - 1) / num_ranks
    )  # roots take turns: each copy is sent once
    ranks = []
    for rank, (host, share, own) in enumerate(zip(hosts, shares, times, strict=True)):
        update_s = host.update_s * work.update_share
        sizes = micro_batch_sizes(share, job.micro_batch) if share else [0]
        needs = memory(job.shape, sequences=max(sizes), dtype=job.dtype, recompute=job.recompute, sync=sync,
                       num_ranks=num_ranks, device=host.device, accumulates=len(sizes) > 1)  # fmt: skip
        ranks.append(
            RankCost(
                rank=rank,
                host=host.name,
                share=share,
                cost=StepCost(
                    data_s=host.data_s,
                    compute_s=own.compute_s,
                    exposed_sync_s=exposed_s + after_s,
                    wait_s=last_s - own.computed_s,
                    optimizer_s=update_s,
                ),
                sync_s=in_flight_s + after_s,
                bytes=round(sent / work.every),
                memory_bytes=needs.total,
            )
        )
    step_s = last_s + exposed_s + after_s
    penalty, source = loss_penalty(sync, job.shape.num_params(), num_ranks)
    return Option(
        name=name or sync,
        sync=sync,
        hosts=[host.name for host in cluster.hosts],
        ranks=ranks,
        step_s=step_s,
        tokens_per_s=job.tokens / step_s,
        speedup_vs_best_host=None,
        bytes_per_rank=round(sent / work.every),
        loss_penalty=penalty,
        loss_source=source,
        is_built=sync in BUILT and list(shares) == equal_shares(job.batch, num_ranks),
    )


def again(job: Job) -> float:
    """By how much longer forward and backward take where activations are computed again: 4/3, else 1."""
    return (1 - BACKWARD) / (1 - RECOMPUTED) if job.recompute else 1.0


def _times(job: Job, host: HostRates, share: int, work: Exchange, stolen_s: float) -> _Times:
    """A rank by itself: what its share takes, and what the strategy and its communication add to it."""
    sizes = micro_batch_sizes(share, job.micro_batch) if share else []
    passes = [again(job) * (host.pass_s + size * job.shape.block_size / host.tokens_per_s) for size in sizes]
    packing_s = work.moved_bytes / work.every / host.copy_Bps if host.copy_Bps else 0.0
    backward = (RECOMPUTED if job.recompute else BACKWARD) * (passes[-1] if passes else 0.0)
    return _Times(
        begun_s=host.update_s * work.update_share + host.data_s,
        compute_s=sum(passes) + packing_s + stolen_s,
        backward_s=backward + stolen_s,
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


def _stolen_s(host: HostRates, own: _Times, work: Exchange, spans: Sequence[tuple[float, float]], num_ranks: int,
              backend: str) -> float:  # fmt: skip
    """Seconds by which computing grows because transfers beside it took processor time."""
    if host.device != "cpu" or not host.sync_Bps or not host.cpus or work.every > 1:
        return 0.0
    beside = 0.0
    for transfer, (start_s, end_s) in zip(work.transfers, spans, strict=True):
        share = (min(end_s, own.computed_s) - start_s) / (end_s - start_s) if end_s > start_s else 0.0
        beside += max(0.0, share) * _sent(transfer, num_ranks, backend)
    return beside / host.sync_Bps / host.cpus


def _sent(transfer: Transfer, num_ranks: int, backend: str) -> float:
    return sent_bytes(transfer.collective, transfer.size_bytes, num_ranks, backend)
