"""Which ways are there of running a job on these machines? Each priced, and whether it fits into their memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from evener.core.prediction import Cluster, Job, Option
from evener.core.roster import BUILT, Roster, SyncSpec, asked_sync, harms_fp16, parse_sync, shares_text
from evener.core.units import size
from evener.plan.collectives import best_ring, ring
from evener.plan.cost import price
from evener.plan.divide import MEMORY_SHARE, first_roster_by_speed
from evener.plan.sync import BUCKET_BYTES, CODED_BUCKET_BYTES, bucket_bytes, gradients, is_thin

CANDIDATES = tuple(map(parse_sync, (
    "ddp", "ddp+sparse", "packed", "bf16", "int8", "int4", "powersgd:4", "fsdp", "zero1",
    "diloco:10:int8:streamed", "diloco:10:int4:streamed", "diloco:30",
)))  # fmt: skip
BUCKETED = tuple(kind for kind in BUILT if kind != "diloco")  # exchange gradients, bucket by bucket
ALIKE = 0.9  # hosts whose speeds differ by less are alike
WORTH = 1.02  # a smaller gain is within what a prediction can err
WORTH_LOSS = 1.05  # what costs loss must gain as much over what is exact


def as_trained(job: Job, cluster: Cluster, hosts: Collection[str] | None = None, name: str = "") -> Option:
    """What `train` does on these hosts, on all if None."""
    seats = [seat for seat in cluster.seats if hosts is None or seat.host in hosts]
    roster = first_roster_by_speed(job, cluster, seats)
    return in_best_buckets(job, cluster, roster, name=name or name_of(job, roster))


def in_best_buckets(job: Job, cluster: Cluster, roster: Roster, name: str = "") -> Option:
    """The Roster as it is, or with buckets of another size where that is clearly faster.

    Small ones leave early, and little is left to send when backward is over; large ones cost fewer messages.
    """
    usual = price(job, cluster, roster, name=name)
    if roster.world_size == 1 or roster.bucket_bytes or roster.sync.kind not in BUCKETED:
        return usual
    other = BUCKET_BYTES if bucket_bytes(roster) else CODED_BUCKET_BYTES
    priced = price(job, cluster, msgspec.structs.replace(roster, bucket_bytes=other), name=name)
    return priced if usual.step_s > WORTH * priced.step_s else usual


def name_of(job: Job, roster: Roster) -> str:
    if roster.world_size == 1:
        return f"{roster.hosts[0]} alone"
    if roster.is_equal:
        return str(roster.sync)
    many = "as asked" if job.spec.machine.are_shares_told else "by speed"
    return f"{roster.sync}, shares {shares_text(roster.mean_shares) if roster.world_size <= 4 else many}"


def on_one(job: Job, cluster: Cluster, name: str) -> Option:
    """One host, in the arithmetic that suits it."""
    return as_trained(_of_any_hosts(job), cluster, [name], name=f"{name} alone")


def on_the_best(alone: Sequence[Option], cluster: Cluster) -> list[Option]:
    """The fastest host, and where it cannot hold the model the fastest that can."""
    ranked = sorted(alone, key=speed, reverse=True)
    fits = next((option for option in ranked if fits_in(option, cluster)), ranked[0])
    return [fits] if fits is ranked[0] else [fits, ranked[0]]


def on_fewer(job: Job, cluster: Cluster) -> list[Option]:
    """Without the slowest host, the two slowest, … while two are left; of a large fleet half stay at least."""
    ranked = by_speed(job, cluster)
    counts = [len(ranked) - num_left_out for num_left_out in (1, 2, 3, 4, 5, 6)]
    found = []
    for num in counts:
        if num < max(2, len(ranked) // 2 if len(ranked) > 8 else 0):
            break
        left_out = ranked[num:]
        name = _name_without(job, cluster, left_out) if len(left_out) <= 2 else f"{_sync(job)} on the {num} fastest"
        found.append(as_trained(_of_any_hosts(job), cluster, ranked[:num], name=name))
    return found


def on_those_that_fit(job: Job, cluster: Cluster, alone: Sequence[Option]) -> list[Option]:
    """Without the hosts that cannot hold the model, while two are left."""
    too_small = [option.roster.hosts[0] for option in alone if not fits_in(option, cluster)]
    if not too_small or len(cluster.names) - len(too_small) < 2:
        return []
    left = [name for name in cluster.names if name not in too_small]
    return [as_trained(_of_any_hosts(job), cluster, left, name=_name_without(job, cluster, too_small))]


def otherwise_divided(job: Job, cluster: Cluster) -> list[Option]:
    """What the job's own shares are not: equal, and the fastest."""
    if len(cluster.seats) > job.spec.train.batch:  # the job's own shares leave some without
        return []
    others = [divided(job, shares) for shares in ("equal", "auto") if shares != job.spec.machine.shares]
    return [as_trained(other, cluster) for other in others]


def in_best_ring(job: Job, cluster: Cluster) -> Cluster:
    """Hosts in the order in which the slowest link of the ring is fastest; the same object where that gains nothing.

    Shares that were asked for are those of the ranks as the file's hosts are counted: then it stays.
    """
    wires = {wire for row in cluster.wires.values() for wire in row.values()}
    if job.spec.machine.are_shares_told or len(wires) < 2:
        return cluster
    names, roster = cluster.names, job.roster(cluster.seats)
    links = cluster.wires
    if roster.backend == "gloo":  # each rank sends to the one before it
        links = {a: {b: cluster.wires[b][a] for b in names if b != a} for a in names}
    order = best_ring(names, links)
    seats = sorted(cluster.seats, key=lambda seat: order.index(seat.host))
    ordered = msgspec.structs.replace(cluster, seats=seats)
    if order == names or slowest_Bps(job.roster(seats), ordered) < WORTH * slowest_Bps(roster, cluster):
        return cluster
    return ordered


def slowest_Bps(roster: Roster, cluster: Cluster) -> float:
    """Of the links that a ring in the order of the ranks uses."""
    links = ring(cluster, [member.host for member in roster.members])
    used = links.back if roster.backend == "gloo" else links.wires
    return min((wire.bandwidth_Bps for wire in used), default=1.0)


def speeds_of(job: Job, cluster: Cluster) -> dict[str, float]:
    """Tokens/s of the ranks of every host, in the arithmetic of all."""
    speeds = dict.fromkeys(cluster.names, 0.0)
    for member in job.roster(cluster.seats).members:
        speeds[member.host] += cluster.tokens_per_s(member)
    return speeds


def by_speed(job: Job, cluster: Cluster) -> list[str]:
    """Hosts from the fastest to the slowest."""
    speeds = speeds_of(job, cluster)
    return sorted(speeds, key=lambda name: -speeds[name])


def _name_without(job: Job, cluster: Cluster, left_out: Sequence[str]) -> str:
    if len(left_out) <= 2:
        return f"{_sync(job)} without {', '.join(sorted(left_out))}"
    return f"{_sync(job)} on {', '.join(name for name in cluster.names if name not in left_out)}"


def _sync(job: Job) -> SyncSpec:
    return asked_sync(job.spec)


def makes_sense(sync: SyncSpec, job: Job) -> bool:
    """Are there tables that are only looked up, or matrices that become smaller?"""
    tensors = gradients(job.shape)
    if sync.kind == "powersgd" and not any(is_thin(one.rows, one.columns, sync.rank) for one in tensors):
        return False
    return not sync.sparse or any(one.is_lookup for one in tensors)


def larger(job: Job, factor: int) -> Job:
    """The job with so many times its batch, in micro-batches as before."""
    train = job.spec.train
    spec = msgspec.structs.replace(job.spec, train=msgspec.structs.replace(train, batch=factor * train.batch))
    return msgspec.structs.replace(job, spec=spec)


def divided(job: Job, shares: str) -> Job:
    """The job with --shares of this."""
    spec = msgspec.structs.replace(job.spec, machine=msgspec.structs.replace(job.spec.machine, shares=shares))
    return msgspec.structs.replace(job, spec=spec)


def _of_any_hosts(job: Job) -> Job:
    """The job with shares that hold for any hosts: those that were told are of all."""
    return divided(job, "auto") if job.spec.machine.are_shares_told else job


def speed(option: Option) -> float:
    return option.tokens_per_s


def fastest(options: Sequence[Option]) -> Option | None:
    """The one with most tokens/s, where what is not exact has to gain something for that, and what costs loss more."""
    return max(options, key=lambda option: speed(option) / has_to_gain(option), default=None)


def has_to_gain(option: Option) -> float:
    """Times as fast as what is exact it must be to be worth it."""
    if option.is_exact:
        return 1.0
    return WORTH_LOSS if option.loss_penalty is None or option.loss_penalty > 0 else WORTH


def simplest(options: Sequence[Option], best: Option, chosen: str) -> Option:
    """Of those that are as good, for a gain within what a prediction can err is none: fewer hosts first, then what was
    chosen.
    """
    near = [option for option in options if best.tokens_per_s < WORTH * option.tokens_per_s
            and has_to_gain(option) <= has_to_gain(best)]  # fmt: skip
    return min(near, key=lambda option: (len(option.roster.hosts), option.name != chosen, option.step_s))


def fits_in(option: Option, cluster: Cluster) -> bool:
    return not what_does_not_fit(option, cluster)


def what_does_not_fit(option: Option, cluster: Cluster) -> str:
    """Which host has too little memory; "" where all have enough, or nobody knows."""
    for name in option.roster.hosts:
        members = [member for member in option.roster.members if member.host == name]
        needs = [option.ranks[member.rank].memory_bytes or 0 for member in members]
        has = cluster.hosts[name].memory_bytes
        if has is None:
            continue
        need = max(needs) if members[0].is_gpu else sum(needs)
        if need > MEMORY_SHARE * has:
            return f"{name} has {size(has)}, a run may fill {size(MEMORY_SHARE * has)} and needs {size(need)}"
    return ""


def obstacle(option: Option, cluster: Cluster, loss_budget: float) -> str:
    """Why an option cannot be chosen, however fast it is."""
    if too_large := what_does_not_fit(option, cluster):
        return f"does not fit: {too_large}"
    if not option.is_built:
        return "train cannot run it yet"
    if harms_fp16(option.roster):
        return "what is left to send would be of another loss scale than the next step's"
    if option.loss_penalty is None:
        return "nobody measured what it costs in loss"
    if not loss_budget and not option.is_exact:
        return "not exact, and no loss may be spent"
    if option.loss_penalty > loss_budget:
        return f"costs {option.loss_penalty:.1%} of loss, more than {loss_budget:.1%}"
    return ""
