"""How fast were the machines of a finished run? Its records as the rates that would have predicted it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evener.core.errors import UsageError
from evener.core.prediction import Cluster, HostRates, Job, Wire
from evener.core.roster import DDP, Member, Roster, Seat
from evener.core.rundir import Manifest
from evener.core.step import StepRecord
from evener.core.units import median
from evener.plan.cost import again, price

WARMUP_STEPS = 3  # that do not count, where there are more
UNKNOWN_RATE = 1e30  # stands where nobody measured a rate, until the records give one
FASTEST_WIRE = Wire(latency_s=0.0, bandwidth_Bps=1e12)  # where nothing was sent


def fit(job: Job, manifest: Manifest, records: Sequence[Sequence[StepRecord]], prior: Cluster | None) -> Cluster:
    """The cluster of a run, refitted: `records` are by rank, `prior` is what was predicted with, if anything was.

    What the records tell replaces what was measured before: rates of computing, the update, input, and the links, all
    by one factor. What they don't tell (memory, communication's processor time, γ) stays. UsageError where a host's
    speed is not known at all.
    """
    roster = manifest.roster
    if prior is None or not _describes(prior, roster):
        prior, has_prior = _unknown(manifest), False
    else:
        has_prior = True
    stolen_s = _stolen_s(job, prior, roster)
    hosts = {}
    for name in roster.hosts:
        of_host = [(member, list(records[member.rank])) for member in roster.members if member.host == name]
        hosts[name] = _host(prior.hosts[name], job, of_host, stolen_s.get(name, 0.0))
        if UNKNOWN_RATE in hosts[name].tokens_per_s.values():
            raise UsageError(
                f"{name} had no share in this run, and nothing else is known of its speed",
                hint="evener probe host measures it, and evener plan --fleet uses that",
            )
    cluster = msgspec.structs.replace(prior, hosts=hosts)
    if roster.sync != DDP:
        return cluster
    return _with_measured_wires(job, roster, cluster, records, has_prior=has_prior)


def _unknown(manifest: Manifest) -> Cluster:
    """The machines of a run of which nobody knew anything."""
    roster = manifest.roster
    memory = {host.host: host.memory_bytes for host in manifest.hosts}
    return Cluster(
        seats=[Seat(host=member.host, device=member.device, has_bf16=member.dtype == "bf16")
               for member in roster.members],
        hosts={member.host: HostRates(tokens_per_s={member.dtype: UNKNOWN_RATE}, local=FASTEST_WIRE,
                                      memory_bytes=memory.get(member.host)) for member in roster.members},
        wires={a: {b: FASTEST_WIRE for b in roster.hosts if b != a} for a in roster.hosts},
    )  # fmt: skip


def _describes(prior: Cluster, roster: Roster) -> bool:
    """Was this run predicted with this cluster, rank for rank, in this arithmetic?"""
    ranks = [(seat.host, seat.device) for seat in prior.seats]
    return ranks == [(member.host, member.device) for member in roster.members] and all(
        member.dtype in prior.hosts[member.host].tokens_per_s for member in roster.members
    )


def _stolen_s(job: Job, prior: Cluster, roster: Roster) -> dict[str, float]:
    """Seconds of a rank's computing that are communication's processor time, as predicted, by host."""
    hosts = {name: msgspec.structs.replace(host, sync_Bps=None) for name, host in prior.hosts.items()}
    both = (price(job, one, roster).ranks for one in (prior, msgspec.structs.replace(prior, hosts=hosts)))
    return {
        member.host: (rank.cost.compute_s or 0.0) - (free.cost.compute_s or 0.0)
        for member, rank, free in zip(roster.members, *both, strict=True)
    }


def _host(base: HostRates, job: Job, ranks: Sequence[tuple[Member, list[StepRecord]]], stolen_s: float) -> HostRates:
    """One host by the medians of its ranks; the slowest of them counts."""

    def slowest(part: Callable[[StepRecord], float | None]) -> float | None:
        return max((value for _, one in ranks if (value := _median(one, part)) is not None), default=None)

    token_s, member, tokens = max(
        ((compute_s / tokens, member, tokens) for member, records in ranks
         if (compute_s := _median(records, lambda record: record.cost.compute_s))
         and (tokens := _median(records, lambda record: float(record.tokens)))),
        default=(0.0, ranks[0][0], 0.0), key=lambda found: found[0],
    )  # fmt: skip
    if not token_s:
        return base
    compute_s = max(token_s * tokens - stolen_s, 0.1 * token_s * tokens) / again(job)
    share = round(tokens / job.shape.block_size)
    passes_s = base.pass_s * len(msgspec.structs.replace(member, share=share).micro_batches)
    known = base.tokens_per_s[member.dtype]
    factor = compute_s / (passes_s + tokens / known) if known < UNKNOWN_RATE else 1.0  # of both its parts
    rate = tokens / (compute_s - passes_s * factor)
    measured_cpus = slowest(lambda record: record.cpu_s / record.wall_s if record.cpu_s and record.wall_s else None)
    return msgspec.structs.replace(
        base,
        pass_s=base.pass_s * factor,
        tokens_per_s={dtype: rate * other / known for dtype, other in base.tokens_per_s.items()},
        update_s=slowest(lambda record: record.cost.optimizer_s) or 0.0,
        data_s=slowest(lambda record: record.cost.data_s) or 0.0,
        cpus=base.cpus or measured_cpus,
    )


def _with_measured_wires(
    job: Job, roster: Roster, cluster: Cluster, records: Sequence[Sequence[StepRecord]], *, has_prior: bool
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
        hosts = {name: msgspec.structs.replace(host, local=wire) for name, host in cluster.hosts.items()}
        return msgspec.structs.replace(cluster, wires=wires, hosts=hosts)
    factor = price(job, cluster, roster).ranks[0].sync_s / measured_s
    wires = {a: {b: _faster(wire, factor) for b, wire in row.items()} for a, row in cluster.wires.items()}
    hosts = {name: msgspec.structs.replace(host, local=_faster(host.local, factor) if host.local else None)
             for name, host in cluster.hosts.items()}  # fmt: skip
    return msgspec.structs.replace(cluster, wires=wires, hosts=hosts)


def _faster(wire: Wire, factor: float) -> Wire:
    return Wire(latency_s=wire.latency_s / factor, bandwidth_Bps=wire.bandwidth_Bps * factor)


def _median(records: Sequence[StepRecord], part: Callable[[StepRecord], float | None]) -> float | None:
    counted = list(records[WARMUP_STEPS:]) or list(records)
    return median([value for record in counted if (value := part(record)) is not None])
