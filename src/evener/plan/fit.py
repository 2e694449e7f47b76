"""How fast were the machines of a finished run? Its records as the rates that would have predicted it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evener.core.prediction import Cluster, HostRates, Job, Wire
from evener.core.rundir import Manifest
from evener.core.step import StepRecord
from evener.core.units import median
from evener.plan.balance import micro_batch_sizes
from evener.plan.cost import again, price

WARMUP_STEPS = 3  # that do not count, where there are more
UNKNOWN_RATE = 1e30  # stands where nobody measured a rate, until the records give one
FASTEST_WIRE = Wire(latency_s=0.0, bandwidth_Bps=1e12)  # where nothing was sent


def fit(job: Job, manifest: Manifest, records: Sequence[Sequence[StepRecord]], prior: Cluster | None) -> Cluster:
    """The cluster of a run, refitted: `records` are by rank, `prior` is what was predicted with, if anything was.

    What the records tell replaces what a probe told: rates of computing, the update, input, and the links, all by one
    factor. What they don't tell (memory, communication's processor time, γ) stays.
    """
    names = list(dict.fromkeys(rank.host for rank in manifest.ranks))
    if prior is not None and not _describes(prior, manifest):
        prior = None
    known = {host.name: host for host in prior.hosts} if prior else {}
    stolen_s = _stolen_s(job, prior) if prior else {}
    memory = {host.host: host.memory_bytes for host in manifest.hosts}
    hosts = []
    for name in names:
        ranks = [rank.rank for rank in manifest.ranks if rank.host == name]
        device = "cpu" if manifest.ranks[ranks[0]].device == "cpu" else "cuda"
        base = known.get(name) or HostRates(
            name=name, device=device, tokens_per_s=UNKNOWN_RATE, memory_bytes=memory.get(name)
        )
        of_host = [list(records[rank]) for rank in ranks]
        hosts.append(_host(base, job, len(ranks), of_host, stolen_s.get(name, 0.0)))
    wires = {a: {b: FASTEST_WIRE for b in names if b != a} for a in names}
    if prior:
        wires = {a: {b: prior.wires[a][b] for b in names if b != a} for a in names}
    backend = manifest.roster.backend if manifest.roster.backend in ("gloo", "nccl") else "gloo"
    cluster = Cluster(hosts=hosts, wires=wires, backend=backend, assumed=list(prior.assumed) if prior else [])
    if cluster.num_ranks == 1 or manifest.roster.sync.kind != "ddp":
        return cluster
    return _with_measured_wires(job, cluster, records, has_prior=prior is not None)


def _describes(prior: Cluster, manifest: Manifest) -> bool:
    """Was this run predicted with this cluster, host for host and rank for rank?"""
    ranks = [host.name for host in prior.hosts for _ in range(host.num_ranks)]
    return ranks == [rank.host for rank in manifest.ranks]


def _stolen_s(job: Job, prior: Cluster) -> dict[str, float]:
    """Seconds of a rank's computing that are communication's processor time, as predicted, by host."""
    if prior.num_ranks == 1:
        return {}
    hosts = [msgspec.structs.replace(host, sync_Bps=None) for host in prior.hosts]
    both = (price(job, one, "ddp").ranks for one in (prior, msgspec.structs.replace(prior, hosts=hosts)))
    return {
        rank.host: (rank.cost.compute_s or 0.0) - (free.cost.compute_s or 0.0) for rank, free in zip(*both, strict=True)
    }


def _host(base: HostRates, job: Job, num_ranks: int, records: Sequence[list[StepRecord]], stolen_s: float) -> HostRates:
    """One host by the medians of its ranks; the slowest of them counts."""

    def slowest(part: Callable[[StepRecord], float | None]) -> float | None:
        return max((value for one in records if (value := _median(one, part)) is not None), default=None)

    compute_s = slowest(lambda record: record.cost.compute_s)
    tokens = _median(records[0], lambda record: float(record.tokens))
    if not compute_s or not tokens:
        return msgspec.structs.replace(base, num_ranks=num_ranks)
    compute_s = max(compute_s - stolen_s, 0.1 * compute_s) / again(job)
    sizes = micro_batch_sizes(round(tokens / job.shape.block_size), job.micro_batch)
    passes_s = base.pass_s * len(sizes)
    is_known = base.tokens_per_s < UNKNOWN_RATE  # then both its parts change by one factor
    factor = compute_s / (passes_s + tokens / base.tokens_per_s) if is_known else 1.0
    measured_cpus = slowest(lambda record: record.cpu_s / record.wall_s if record.cpu_s and record.wall_s else None)
    return msgspec.structs.replace(
        base,
        num_ranks=num_ranks,
        pass_s=base.pass_s * factor,
        tokens_per_s=tokens / (compute_s - passes_s * factor),
        update_s=slowest(lambda record: record.cost.optimizer_s) or 0.0,
        data_s=slowest(lambda record: record.cost.data_s) or 0.0,
        cpus=base.cpus or measured_cpus,
    )


def _with_measured_wires(
    job: Job, cluster: Cluster, records: Sequence[Sequence[StepRecord]], *, has_prior: bool
) -> Cluster:
    """All links by the factor between their predicted and their measured time in flight.

    Of a step, the rank that was last to come saw the least of waiting in its time in flight.
    """
    least = [min(values) for step in zip(*records, strict=False)
             if (values := [record.sync_s for record in step if record.sync_s])]  # fmt: skip
    measured_s = median(least[WARMUP_STEPS:] or least)
    sent = _median(list(records[0]), lambda record: float(record.bytes))
    if not measured_s or not sent:
        return cluster
    if not has_prior:
        wire = Wire(latency_s=0.0, bandwidth_Bps=sent / measured_s)
        wires = {a: dict.fromkeys(row, wire) for a, row in cluster.wires.items()}
        hosts = [msgspec.structs.replace(host, local=wire if host.num_ranks > 1 else None) for host in cluster.hosts]
        return msgspec.structs.replace(cluster, wires=wires, hosts=hosts)
    factor = price(job, cluster, "ddp").ranks[0].sync_s / measured_s
    wires = {a: {b: _faster(wire, factor) for b, wire in row.items()} for a, row in cluster.wires.items()}
    hosts = [msgspec.structs.replace(host, local=_faster(host.local, factor) if host.local else None)
             for host in cluster.hosts]  # fmt: skip
    return msgspec.structs.replace(cluster, wires=wires, hosts=hosts)


def _faster(wire: Wire, factor: float) -> Wire:
    return Wire(latency_s=wire.latency_s / factor, bandwidth_Bps=wire.bandwidth_Bps * factor)


def _median(records: Sequence[StepRecord], part: Callable[[StepRecord], float | None]) -> float | None:
    counted = list(records[WARMUP_STEPS:]) or list(records)
    return median([value for record in counted if (value := part(record)) is not None])
