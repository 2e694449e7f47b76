"""Initial shares: divide the global batch among ranks at the start of a run, by the measured rates of the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from evener.core.model.gradients import ProgramModel
from evener.core.run.prediction import Cluster, Job
from evener.core.run.roster import Member, RankSlot, Roster, equal_shares
from evener.plan.cost.cost_model import recompute_factor
from evener.plan.cost.memory import peak_memory
from evener.plan.shares.load_balancing import RankTimeModel, fastest_shares, slowest_rank_s

MAX_MEMORY_FRACTION = 0.9  # fraction of a host's memory that a run may use
# Unequal shares gain at least this fraction of a rank's time. Probes of equal hosts differed by up to 7 %, and these
# hosts by up to 9 % while they trained (124 runs in bench/prediction.jsonl): a gain of up to 4 %.
MIN_UNEQUAL_GAIN = 0.05


def initial_roster_by_speed(job: Job, cluster: Cluster, slots: Sequence[RankSlot]) -> Roster:
    """Return the Roster with which `train` starts on these rank slots of the cluster.

    Micro-batches are reduced to fit into the memory, where it is known and --micro-batch was not given. With --shares
    auto the shares are the fastest that give every rank at least one sequence a step, or equal ones if these are hardly
    slower; to drop a slow rank, leave its slot out of `slots`.
    """
    roster = job.initial_roster(slots)
    if job.spec.train.micro_batch is None:
        micro_batches: dict[object, int] = {}  # of identical members
        members = []
        on_host = Counter(member.host for member in roster.members)
        for member in roster.members:
            kind = (id(cluster.hosts[member.host]), on_host[member.host], member.is_gpu, member.dtype)
            if kind not in micro_batches:
                micro_batches[kind] = _fit_micro_batch(job, cluster, roster, member)
            is_same = micro_batches[kind] == member.micro_batch
            members.append(member if is_same else msgspec.structs.replace(member, micro_batch=micro_batches[kind]))
        roster = msgspec.structs.replace(roster, members=members)
    if job.spec.machine.shares != "auto":
        return roster
    every = roster.sync.every
    models: dict[object, RankTimeModel] = {}
    time_models = []  # with DiLoCo the shares of the steps of a round may differ
    for member in roster.members:
        key = (id(cluster.hosts[member.host]), member.dtype, member.micro_batch)
        if key not in models:
            models[key] = rank_time_model(job, cluster, member).for_round(every)
        time_models.append(models[key])
    equal = equal_shares(every * roster.batch, roster.world_size)
    fastest = fastest_shares(every * roster.batch, time_models, min_units=every)
    gain = 1 - slowest_rank_s(fastest, time_models) / slowest_rank_s(equal, time_models)
    return roster.replace_shares(fastest if gain >= MIN_UNEQUAL_GAIN else equal)


def rank_time_model(job: Job, cluster: Cluster, member: Member) -> RankTimeModel:
    """Return the time model of a rank for its share of a step, in seconds."""
    host, factor = cluster.hosts[member.host], recompute_factor(job)
    padding = job.padding_factor(min(member.share, member.micro_batch))
    return RankTimeModel(
        sequence_s=factor * padding * job.shape.block_size / cluster.tokens_per_s(member),
        micro_batch_overhead_s=factor * host.pass_s,
        fixed_s=host.update_s + host.data_s,
        micro_batch=member.micro_batch,
    )


def _fit_micro_batch(job: Job, cluster: Cluster, roster: Roster, member: Member) -> int:
    """Return a rank's micro-batch, halved until it fits into the memory of its device, whatever the rank's share."""
    memory_bytes, micro_batch = cluster.hosts[member.host].memory_bytes, member.micro_batch
    if memory_bytes is None or isinstance(job.shape, ProgramModel):  # whose program divides its batch
        return micro_batch
    num_local_ranks = 1 if member.is_gpu else sum(other.host == member.host for other in roster.members)
    while micro_batch > 1:
        share = min(roster.batch, 2 * micro_batch)
        full = msgspec.structs.replace(member, share=share, micro_batch=micro_batch)
        members = [full if other is member else other for other in roster.members]
        need = peak_memory(job.shape, msgspec.structs.replace(roster, members=members), member.rank,
                           recompute=job.spec.model.recompute,
                           has_jemalloc=cluster.hosts[member.host].has_jemalloc)  # fmt: skip
        if num_local_ranks * need.total <= MAX_MEMORY_FRACTION * memory_bytes:
            break
        micro_batch //= 2
    return micro_batch
