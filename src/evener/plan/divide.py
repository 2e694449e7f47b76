"""Who takes which part of a batch when a run begins, by what was measured of the hosts?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from evener.core.prediction import Cluster, Job
from evener.core.roster import Member, Roster, Seat
from evener.plan.balance import Pace, fastest_shares
from evener.plan.cost import again
from evener.plan.memory import memory

MEMORY_SHARE = 0.9  # of a host that a run may fill


def first_roster_by_speed(job: Job, cluster: Cluster, seats: Sequence[Seat]) -> Roster:
    """The Roster with which `train` begins on these seats of the cluster.

    Micro-batches fit into what memory is known, unless they were told. With --shares auto the shares are the fastest of
    which every rank has a sequence a step: whoever is better off without a rank leaves it out.
    """
    roster = job.roster(seats)
    if job.spec.train.micro_batch is None:
        fitting: dict[object, int] = {}  # of members that are alike
        members = []
        on_host = Counter(member.host for member in roster.members)
        for member in roster.members:
            kind = (id(cluster.hosts[member.host]), on_host[member.host], member.is_gpu, member.dtype)
            if kind not in fitting:
                fitting[kind] = _fitting(job, cluster, roster, member)
            is_same = fitting[kind] == member.micro_batch
            members.append(member if is_same else msgspec.structs.replace(member, micro_batch=fitting[kind]))
        roster = msgspec.structs.replace(roster, members=members)
    if job.spec.machine.shares != "auto":
        return roster
    every = roster.sync.every
    alike: dict[object, Pace] = {}
    of_round = []  # what replicas that drift do in a step need not be alike
    for member in roster.members:
        paced = (id(cluster.hosts[member.host]), member.dtype, member.micro_batch)
        if paced not in alike:
            alike[paced] = pace(job, cluster, member).of_round(every)
        of_round.append(alike[paced])
    return roster.divided(fastest_shares(every * roster.batch, of_round, least=every))


def pace(job: Job, cluster: Cluster, member: Member) -> Pace:
    """What a rank takes for its share of a step, in seconds."""
    host, factor = cluster.hosts[member.host], again(job)
    return Pace(
        sequence_s=factor * job.shape.block_size / cluster.tokens_per_s(member),
        pass_s=factor * host.pass_s,
        fixed_s=host.update_s + host.data_s,
        micro_batch=member.micro_batch,
    )


def _fitting(job: Job, cluster: Cluster, roster: Roster, member: Member) -> int:
    """A half, a quarter, … of a rank's micro-batch: the largest that its device can hold, whatever its share."""
    memory_bytes, micro_batch = cluster.hosts[member.host].memory_bytes, member.micro_batch
    if memory_bytes is None:
        return micro_batch
    beside = 1 if member.is_gpu else sum(other.host == member.host for other in roster.members)
    while micro_batch > 1:
        share = min(roster.batch, 2 * micro_batch)
        full = msgspec.structs.replace(member, share=share, micro_batch=micro_batch)
        members = [full if other is member else other for other in roster.members]
        need = memory(job.shape, msgspec.structs.replace(roster, members=members), member.rank,
                      recompute=job.spec.model.recompute)  # fmt: skip
        if beside * need.total <= MEMORY_SHARE * memory_bytes:
            break
        micro_batch //= 2
    return micro_batch
