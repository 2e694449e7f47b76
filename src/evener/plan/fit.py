"""How fast were the machines of a finished run? Its records as the rates that would have predicted it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.core.errors import UsageError
from evener.core.link import Wire
from evener.core.prediction import Cluster, HostRates, Job, Option
from evener.core.roster import DDP, Member, Roster, Seat
from evener.core.rundir import Manifest
from evener.core.step import StepRecord, aligned
from evener.core.typical import RankSummary, Typical, typical
from evener.plan.cluster import rewired, with_wire
from evener.plan.cost import again, price
from evener.plan.options import name_of

UNKNOWN_RATE = 1e30  # stands where nobody measured a rate, until the records give one
FASTEST_WIRE = Wire(latency_s=0.0, bandwidth_Bps=1e12)  # where nothing was sent


def fit(job: Job, manifest: Manifest, records: Sequence[Sequence[StepRecord]], prior: Cluster | None) -> Cluster:
    """The cluster of a run, refitted: `records` are by rank, `prior` is what was predicted with, if anything was.

    What the records tell replaces what was measured before: rates of computing, the update, input, and the links, all
    by one factor. What they don't tell (memory, communication's processor time, γ) stays. UsageError where a host's
    speed is not known at all.
    """
    roster, found = manifest.roster.by_place(), _typical(manifest, records)
    if not found.step_p50_s:
        raise UsageError(f"no step was recorded by all ranks{manifest.window}", hint="evener report shows what was")
    if prior is None or not _describes(prior, roster):
        prior, has_prior = _unknown(manifest), False
    else:
        has_prior = True
    stolen_s = _stolen_s(job, prior, roster)
    hosts = {}
    for name in roster.hosts:
        of_host = [(member, of_rank) for member, of_rank in zip(roster.members, found.ranks, strict=True)
                   if member.host == name]  # fmt: skip
        hosts[name] = _host(prior.hosts[name], job, of_host, stolen_s.get(name, 0.0))
        if UNKNOWN_RATE in hosts[name].tokens_per_s.values():
            raise UsageError(
                f"{name} had no share in this run, and nothing else is known of its speed",
                hint="evener probe host measures it, and evener plan --fleet uses that",
            )
    cluster = msgspec.structs.replace(prior, hosts=hosts, late_s=found.late_s, jitter=0.0, are_links_measured=True)
    if roster.sync != DDP:
        if not has_prior and len(roster.hosts) > 1:
            raise UsageError(
                f"how fast the links are, a run by {roster.sync} does not tell, and nobody measured it before",
                hint="evener probe wire measures it, and evener plan --fleet uses that",
            )
        return cluster
    return _with_measured_wires(job, roster, cluster, found, has_prior=has_prior)


def _typical(manifest: Manifest, records: Sequence[Sequence[StepRecord]]) -> Typical:
    """Of records by place in the manifest's Roster."""
    ranks = (member.rank for member in manifest.roster.members)
    return typical(aligned(dict(zip(ranks, records, strict=True))), manifest)


def as_it_was(job: Job, manifest: Manifest, records: Sequence[Sequence[StepRecord]], cluster: Cluster) -> Option | None:
    """A run as the option that it was, with what was measured in place of what `cluster` says; None without a step."""
    found = _typical(manifest, records)
    if not found.step_p50_s:
        return None
    roster = _as_divided(manifest.roster.by_place(), found, job.shape.block_size)
    priced = price(job, cluster, roster)
    ranks = [
        msgspec.structs.replace(rank, cost=took.typical, sync_s=took.sync_s or 0.0, bytes=took.bytes or 0)
        for rank, took in zip(priced.ranks, found.ranks, strict=True)
    ]
    return msgspec.structs.replace(
        priced,
        name=name_of(job, roster),
        ranks=ranks,
        step_s=found.step_p50_s,
        tokens_per_s=found.tokens_per_step / found.step_p50_s,
        bytes_per_rank=max(rank.bytes for rank in ranks),
    )


def _as_divided(roster: Roster, found: Typical, block_size: int) -> Roster:
    """With the shares of the typical step: those with which a run begins may have changed since."""
    shares = [round((rank.tokens or 0.0) / block_size) for rank in found.ranks]
    return roster.divided(shares) if sum(shares) == roster.batch and not roster.round_shares else roster


def _unknown(manifest: Manifest) -> Cluster:
    """The machines of a run of which nobody knew anything."""
    roster = manifest.roster
    memory = {host.host: host.memory_bytes for host in manifest.hosts}
    return Cluster(
        seats=[Seat(host=member.host, device=member.device, has_bf16=member.dtype == "bf16")
               for member in roster.members],
        hosts={member.host: HostRates(tokens_per_s={member.dtype: UNKNOWN_RATE}, local=FASTEST_WIRE,
                                      memory_bytes=memory.get(member.host)) for member in roster.members},
        wire=FASTEST_WIRE,
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


def _host(base: HostRates, job: Job, ranks: Sequence[tuple[Member, RankSummary]], stolen_s: float) -> HostRates:
    """One host by its ranks' typical steps; the slowest of them counts."""
    token_s, member, rank = max(
        ((compute_s / tokens, member, rank) for member, rank in ranks
         if (compute_s := rank.typical.compute_s) and (tokens := rank.tokens)),
        default=(0.0, *ranks[0]), key=lambda found: found[0],
    )  # fmt: skip
    tokens = rank.tokens
    if not token_s or not tokens:
        return base
    compute_s = max(token_s * tokens - stolen_s, 0.1 * token_s * tokens) / again(job)
    share = round(tokens / job.shape.block_size)
    passes_s = base.pass_s * msgspec.structs.replace(member, share=share).num_passes
    known = base.tokens_per_s[member.dtype]
    factor = compute_s / (passes_s + tokens / known) if known < UNKNOWN_RATE else 1.0  # of both its parts
    rate = tokens / (compute_s - passes_s * factor)
    return msgspec.structs.replace(
        base,
        pass_s=base.pass_s * factor,
        tokens_per_s={dtype: rate * other / known for dtype, other in base.tokens_per_s.items()},
        basis="measured",
        update_s=rank.typical.optimizer_s or 0.0,
        data_s=rank.typical.data_s or 0.0,
        cpus=base.cpus or max((one.cpus for _, one in ranks if one.cpus is not None), default=None),
    )


def _with_measured_wires(job: Job, roster: Roster, cluster: Cluster, found: Typical, *, has_prior: bool) -> Cluster:
    """All links by the factor between their predicted and their measured time in flight."""
    measured_s, sent = found.sync_p50_s, found.ranks[0].bytes
    if not measured_s or not sent:
        return cluster
    if not has_prior:
        wire = Wire(latency_s=0.0, bandwidth_Bps=sent / measured_s)
        hosts = {name: msgspec.structs.replace(host, local=wire) for name, host in cluster.hosts.items()}
        return msgspec.structs.replace(with_wire(cluster, wire), hosts=hosts)
    factor = price(job, cluster, roster).ranks[0].sync_s / measured_s
    hosts = {name: msgspec.structs.replace(host, local=_faster(host.local, factor) if host.local else None)
             for name, host in cluster.hosts.items()}  # fmt: skip
    return msgspec.structs.replace(rewired(cluster, lambda wire: _faster(wire, factor)), hosts=hosts)


def _faster(wire: Wire, factor: float) -> Wire:
    return msgspec.structs.replace(wire, latency_s=wire.latency_s / factor, bandwidth_Bps=wire.bandwidth_Bps * factor)
