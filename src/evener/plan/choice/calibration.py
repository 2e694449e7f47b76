"""Calibration: fit the cluster's rates and links to the records of a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.units import format_bytes
from evener.core.cluster.fleet_file import Fleet, Rates
from evener.core.cluster.link import LinkModel
from evener.core.run.prediction import Cluster, HostRates, Job, PlanOption
from evener.core.run.roster import DDP, Member, RankSlot, Roster
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import StepRecord, align_steps
from evener.core.run.step_statistics import RankSummary, TypicalStep, summarize_steps
from evener.plan.choice.cluster import (
    LOCAL_BANDWIDTH_BPS,
    LOCAL_LATENCY_S,
    AssumptionLog,
    NotMeasuredError,
    link_models,
    map_links,
    with_uniform_link,
)
from evener.plan.choice.options import option_name
from evener.plan.cost.cost_model import predict_step, recompute_factor

UNKNOWN_RATE = 1e30  # placeholder for a rate that was not measured, until the records give one
ASSUMED_COPY_BPS = 8e9  # *assumption*: a core of a laptop with DDR4
PLACEHOLDER_LINK = LinkModel(latency_s=0.0, bandwidth_Bps=1e12)  # placeholder for a link over which nothing was sent


def calibrate_cluster(
    job: Job, manifest: Manifest, records: Sequence[Sequence[StepRecord]], prior: Cluster | None
) -> Cluster:
    """Return the cluster of a run, calibrated to its `records` (by rank); `prior` is the cluster of its prediction.

    The records replace the prior's compute rates, update times and input times. A run with ddp also scales all links by
    one factor. Memory sizes, `sync_Bps` and `sum_Bps` stay as in the prior. Raise UsageError if no step was recorded by
    all ranks, if a host's speed is in neither the records nor the prior, or if a run without ddp on several hosts has
    no prior, which it needs for the links.
    """
    roster, typical_step = manifest.roster.renumber_ranks(), _typical_step(manifest, records)
    if not typical_step.step_p50_s:
        raise UsageError(
            f"no step was recorded by all ranks{manifest.window_text}", hint="evener report RUN shows what was"
        )
    if prior is None or not has_ranks_of(prior, roster):
        prior = cluster_of_run(manifest, None)
    has_links = prior.wire != PLACEHOLDER_LINK
    stolen_s = _contention_s(job, prior, roster)
    hosts = {}
    for name in roster.hosts:
        ranks = [(member, rank) for member, rank in zip(roster.members, typical_step.ranks, strict=True)
                   if member.host == name]  # fmt: skip
        hosts[name] = _calibrate_host(prior.hosts[name], job, ranks, stolen_s.get(name, 0.0))
        if UNKNOWN_RATE in hosts[name].tokens_per_s.values():
            raise UsageError(
                f"{name} had no share in this run, and nothing else is known of its speed",
                hint="evener probe host measures it, and evener plan --fleet FILE uses that",
            )
    late_s = typical_step.jitter_wait_s
    cluster = msgspec.structs.replace(prior, hosts=hosts, late_s=late_s, jitter=0.0, are_links_measured=True)
    if roster.sync != DDP:
        if not has_links and len(roster.hosts) > 1:
            raise UsageError(
                f"a run with {roster.sync} does not show how fast the links are, and they were not measured before",
                hint="evener probe wire measures them, and evener plan --fleet FILE uses that",
            )
        return cluster
    return _calibrate_links(job, roster, cluster, typical_step, has_links=has_links)


def _typical_step(manifest: Manifest, records: Sequence[Sequence[StepRecord]]) -> TypicalStep:
    """Return the typical step of records that are in the order of the manifest's Roster."""
    ranks = (member.rank for member in manifest.roster.members)
    return summarize_steps(align_steps(dict(zip(ranks, records, strict=True))), manifest)


def measured_option(
    job: Job, manifest: Manifest, records: Sequence[Sequence[StepRecord]], cluster: Cluster
) -> PlanOption | None:
    """Return the Option of a run, with measured values in place of predicted ones; None if it recorded no step."""
    typical_step = _typical_step(manifest, records)
    if not typical_step.step_p50_s:
        return None
    roster = _with_typical_shares(manifest.roster.renumber_ranks(), typical_step, job.shape.block_size)
    priced = predict_step(job, cluster, roster)
    ranks = [
        msgspec.structs.replace(rank, cost=summary.typical, sync_s=summary.sync_s or 0.0, bytes=summary.bytes or 0)
        for rank, summary in zip(priced.ranks, typical_step.ranks, strict=True)
    ]
    return msgspec.structs.replace(
        priced,
        name=option_name(job, roster),
        ranks=ranks,
        step_s=typical_step.step_p50_s,
        tokens_per_s=typical_step.tokens_per_step / typical_step.step_p50_s,
        bytes_per_rank=max(rank.bytes for rank in ranks),
    )


def _with_typical_shares(roster: Roster, typical_step: TypicalStep, block_size: float) -> Roster:
    """Return the Roster with the shares of the typical step, as the initial ones may have been rebalanced."""
    shares = [round((rank.tokens or 0.0) / block_size) for rank in typical_step.ranks]
    return roster.replace_shares(shares) if sum(shares) == roster.batch and not roster.round_shares else roster


def cluster_of_run(manifest: Manifest, fleet: Fleet | None) -> Cluster:
    """Return the cluster of a run that had no prediction: with placeholders for the speed of hosts and of links, unless
    probing has measured the links of this fleet. What compression and copying cost is known from there, too.
    """
    roster, assumed = manifest.roster.renumber_ranks(), AssumptionLog()
    memory = {host.host: host.memory_bytes for host in manifest.hosts}
    with_jemalloc = {host.host for host in manifest.hosts if host.has_jemalloc}
    wire, wires = PLACEHOLDER_LINK, dict[str, dict[str, LinkModel]]()
    if fleet is not None and len(roster.hosts) > 1:
        with contextlib.suppress(NotMeasuredError):
            common, wires = link_models(fleet, assumed)
            wire = common or next(iter(next(iter(wires.values())).values()))
    local = PLACEHOLDER_LINK  # is fitted with the links between hosts
    if wire != PLACEHOLDER_LINK:
        local = LinkModel(latency_s=LOCAL_LATENCY_S, bandwidth_Bps=LOCAL_BANDWIDTH_BPS)
    return Cluster(
        slots=[RankSlot(host=member.host, device=member.device, has_bf16=member.dtype == "bf16")
               for member in roster.members],
        hosts={member.host: msgspec.structs.replace(
                   rates_besides_compute(member, memory.get(member.host), fleet, local, assumed),
                   has_jemalloc=member.host in with_jemalloc)
               for member in roster.members},
        wire=wire,
        wires=wires,
        assumed=assumed.sentences(len(roster.hosts)),
    )  # fmt: skip


def rates_besides_compute(
    member: Member, memory_bytes: int | None, fleet: Fleet | None, local: LinkModel, assumed: AssumptionLog
) -> HostRates:
    """Return the rates of a member's host that do not depend on the model, with a placeholder for those that do."""
    rates = fleet.rates.get(member.host, {}) if fleet is not None else {}
    rate = rates.get(member.device) or Rates()
    if rate.copy_Bps is None and not member.is_gpu:
        text = f"compression is assumed to copy {format_bytes(ASSUMED_COPY_BPS)}/s; evener probe host measures it"
        assumed.add(text, member.host)
    return HostRates(
        tokens_per_s={member.dtype: UNKNOWN_RATE},
        local=local,
        memory_bytes=memory_bytes,
        sync_Bps=rate.sync_Bps,
        sum_Bps=rate.sum_Bps.get("fp32"),
        copy_Bps=rate.copy_Bps or (None if member.is_gpu else ASSUMED_COPY_BPS),
        coding_Bps=dict(rate.coding_Bps),
    )


def has_ranks_of(prior: Cluster, roster: Roster) -> bool:
    """Return whether the cluster has the same ranks as the Roster, in order, with rates in their dtypes."""
    ranks = [(slot.host, slot.device) for slot in prior.slots]
    return ranks == [(member.host, member.device) for member in roster.members] and all(
        member.dtype in prior.hosts[member.host].tokens_per_s for member in roster.members
    )


def _contention_s(job: Job, prior: Cluster, roster: Roster) -> dict[str, float]:
    """Return for each host the predicted seconds by which communication lengthens a rank's compute time."""
    hosts = {name: msgspec.structs.replace(host, sync_Bps=None) for name, host in prior.hosts.items()}
    both = (predict_step(job, c, roster).ranks for c in (prior, msgspec.structs.replace(prior, hosts=hosts)))
    return {
        member.host: (rank.cost.compute_s or 0.0) - (free.cost.compute_s or 0.0)
        for member, rank, free in zip(roster.members, *both, strict=True)
    }


def _calibrate_host(
    base: HostRates, job: Job, ranks: Sequence[tuple[Member, RankSummary]], stolen_s: float
) -> HostRates:
    """Return the host's rates, calibrated to the typical step of the rank with the most compute time per token."""
    token_s, member, rank = max(
        ((compute_s / tokens, member, rank) for member, rank in ranks
         if (compute_s := rank.typical.compute_s) and (tokens := rank.tokens)),
        default=(0.0, *ranks[0]), key=lambda entry: entry[0],
    )  # fmt: skip
    tokens = rank.tokens
    if not token_s or not tokens:
        return base
    compute_s = max(token_s * tokens - stolen_s, 0.1 * token_s * tokens) / recompute_factor(job)
    share = round(tokens / job.shape.block_size)
    num_passes = msgspec.structs.replace(member, share=share).num_micro_batches
    passes_s, padded = base.pass_s * num_passes, tokens * job.padding_factor(share / max(1, num_passes))
    known = base.tokens_per_s[member.dtype]
    factor = compute_s / (passes_s + padded / known) if known < UNKNOWN_RATE else 1.0  # of both its parts
    rate = padded / (compute_s - passes_s * factor)
    return msgspec.structs.replace(
        base,
        pass_s=base.pass_s * factor,
        tokens_per_s={dtype: rate * other_rate / known for dtype, other_rate in base.tokens_per_s.items()},
        basis="measured",
        update_s=rank.typical.optimizer_s or 0.0,
        data_s=rank.typical.data_s or 0.0,
        cpus=base.cpus or max((cpus for _, summary in ranks if (cpus := summary.working_cpus)), default=None),
    )


def _calibrate_links(
    job: Job, roster: Roster, cluster: Cluster, typical_step: TypicalStep, *, has_links: bool
) -> Cluster:
    """Return the cluster with all links scaled by predicted / measured time in flight.

    If nothing was known of them, give all links the measured bandwidth and no latency.
    """
    measured_s, sent = typical_step.sync_p50_s, typical_step.ranks[0].bytes
    if not measured_s or not sent:
        if not has_links and len(roster.hosts) > 1:
            raise UsageError("the run does not show how fast the links are, and they were not measured before",
                             hint="evener probe wire measures them")  # fmt: skip
        return cluster
    if not has_links:
        wire = LinkModel(latency_s=0.0, bandwidth_Bps=sent / measured_s)
        hosts = {name: msgspec.structs.replace(host, local=wire) for name, host in cluster.hosts.items()}
        return msgspec.structs.replace(with_uniform_link(cluster, wire), hosts=hosts)
    factor = predict_step(job, cluster, roster).ranks[0].sync_s / measured_s
    hosts = {name: msgspec.structs.replace(host, local=_scale_link(host.local, factor) if host.local else None)
             for name, host in cluster.hosts.items()}  # fmt: skip
    return msgspec.structs.replace(map_links(cluster, lambda wire: _scale_link(wire, factor)), hosts=hosts)


def _scale_link(link: LinkModel, factor: float) -> LinkModel:
    return msgspec.structs.replace(link, latency_s=link.latency_s / factor, bandwidth_Bps=link.bandwidth_Bps * factor)
