"""Which ways are there of running a job on these machines? Each priced, and whether it fits into their memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from evener.core.errors import UsageError
from evener.core.prediction import Cluster, Job, Option
from evener.core.resolve import check_suits
from evener.core.roster import BUILT, DDP, Roster, SyncSpec, asked_sync, harms_fp16, parse_sync, shares_text
from evener.core.units import listed, size
from evener.plan.collectives import best_ring, ring
from evener.plan.cost import price
from evener.plan.divide import MEMORY_SHARE, first_roster_by_speed
from evener.plan.penalty import MEASURED, too_dear
from evener.plan.sync import BUCKET_BYTES, CODED_BUCKET_BYTES, bucket_bytes

BUCKETED = tuple(kind for kind in BUILT if kind != "diloco")  # exchange gradients, bucket by bucket
WAYS = [parse_sync(name) for name in dict.fromkeys(("ddp", "packed", *(row.sync for row in MEASURED), "fsdp", "hsdp",
                                                    "zero1"))]  # fmt: skip
CANDIDATES = tuple(msgspec.structs.replace(way, sparse=sparse) for way in WAYS
                   for sparse in ((False, True) if way.kind in BUCKETED else (False,)))  # fmt: skip
ALIKE = 0.9  # hosts whose speeds differ by less are alike
WORTH = 1.02  # a smaller gain is within what a prediction can err
MOST_IN_ALL_SETS = 5  # hosts of which every set is looked at
MOST_ONE_BY_ONE = 8  # hosts that are left out one by one; more are looked at in fewer sets
MOST_IN_TURN = 16
MOST_IN_RING = 64  # hosts whose order is looked for; of more the file's stays
WORTH_LOSS = 1.05  # what costs loss must gain as much over what is exact


def as_trained(job: Job, cluster: Cluster, hosts: Collection[str] | None = None, name: str = "") -> Option:
    """What `train` does on these hosts, on all if None."""
    wanted = set(cluster.hosts if hosts is None else hosts)
    seats = [seat for seat in cluster.seats if seat.host in wanted]
    roster = first_roster_by_speed(job, cluster, seats)
    return in_best_buckets(job, cluster, roster, name=name or name_of(job, roster))


def in_best_buckets(job: Job, cluster: Cluster, roster: Roster, name: str = "") -> Option:
    """The Roster as it is, or with buckets of another size where that is clearly faster.

    Small ones leave early, and little is left to send when backward is over; large ones cost fewer messages.
    """
    usual = price(job, cluster, roster, name=name)
    if roster.world_size == 1 or roster.bucket_bytes or roster.sync.kind not in BUCKETED:
        return usual
    if WORTH * (usual.step_s - (usual.slowest.cost.exposed_sync_s or 0.0)) > usual.step_s:  # nothing to gain
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
    """One host, in the arithmetic that suits it, by ddp where something speaks against how its ranks were to agree."""
    asked = _of_any_hosts(job)
    option = as_trained(asked, cluster, [name], name=f"{name} alone")
    if not objection(option, job.spec.train.loss_budget / 100):
        return option
    return as_trained(asking_for(asked, DDP), cluster, [name], name=f"{name} alone")


def asking_for(job: Job, sync: SyncSpec) -> Job:
    """The job with this strategy."""
    train = msgspec.structs.replace(job.spec.train, sync=str(sync))
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, train=train))


def on_the_best(alone: Sequence[Option], cluster: Cluster) -> list[Option]:
    """The fastest host, and where it cannot hold the model the fastest that can."""
    ranked = sorted(alone, key=speed, reverse=True)
    fits = next((option for option in ranked if fits_in(option, cluster)), ranked[0])
    return [fits] if fits is ranked[0] else [fits, ranked[0]]


def on_fewer(job: Job, cluster: Cluster) -> list[Option]:
    """Some of the hosts, two at least, for every set that is worth a look."""
    ranked = by_speed(job, cluster)
    return [as_trained(_of_any_hosts(job), cluster, names, name=_name_on(job, names, ranked))
            for names in host_sets(job, cluster)]  # fmt: skip


def of_fewer_replicas(job: Job, cluster: Cluster, loss_budget: float) -> list[Option]:
    """The way of the job on two, three, … of the fastest hosts, as long as it loses no more than it may: the more
    replicas drift, the more is lost.
    """
    ranked, found = by_speed(job, cluster), list[Option]()
    for count in range(2, len(ranked)):
        names = ranked[:count]
        option = as_trained(_of_any_hosts(job), cluster, names, name=_name_on(job, names, ranked))
        if objection(option, loss_budget):
            break
        found.append(option)
    return found


def host_sets(job: Job, cluster: Cluster) -> list[list[str]]:
    """Hosts that may do better without the others, two at least, from many to few.

    Of a few hosts all sets are looked at. Of more those that cannot hold the model are left out first, then one by one,
    each time the one without which the rest trains most; of many it is the fastest, of numbers that halve, and where
    the next one is clearly slower.
    """
    if len(cluster.names) <= MOST_IN_ALL_SETS:
        return _all_sets(cluster)
    names = _that_fit(job, cluster)
    found = [names] if 2 <= len(names) < len(cluster.names) else []
    if len(names) <= MOST_ONE_BY_ONE:
        return found + _without_the_worst(job, cluster, names)
    speeds = speeds_of(job, cluster)
    ranked = sorted(names, key=lambda name: -speeds[name])
    if len(names) <= MOST_IN_TURN:
        return found + [ranked[:count] for count in range(len(names) - 1, 1, -1)]
    steps = [i for i in range(2, len(names)) if speeds[ranked[i]] < ALIKE * speeds[ranked[i - 1]]]
    halves = [len(names) >> i for i in range(1, len(names).bit_length()) if len(names) >> i >= 2]
    counts = sorted({*steps[-MOST_ONE_BY_ONE:], *halves}, reverse=True)
    return found + [ranked[:count] for count in counts]


def _that_fit(job: Job, cluster: Cluster) -> list[str]:
    """Hosts that can hold what they have to together; none where that leaves nobody."""
    names = cluster.names
    while len(names) > 1:
        option = as_trained(job if len(names) == len(cluster.names) else _of_any_hosts(job), cluster, names)
        too_small = too_small_for(option, cluster)
        if not too_small:
            return names
        names = [name for name in names if name not in too_small]
    return []


def _all_sets(cluster: Cluster) -> list[list[str]]:
    """Of sets that are alike the first."""
    names = cluster.names
    is_uniform = len(cluster.kinds_of_wires) == 1
    found: dict[object, list[str]] = {}
    for num in range(len(names) - 1, 1, -1):
        for rest in itertools.combinations(names, num):
            kinds = tuple(sorted(id(cluster.hosts[name]) for name in rest)) if is_uniform else rest
            found.setdefault(kinds, list(rest))
    return list(found.values())


def _without_the_worst(job: Job, cluster: Cluster, names: list[str]) -> list[list[str]]:
    found = []
    is_uniform = len(cluster.kinds_of_wires) == 1
    while len(names) > 2:
        first = {id(cluster.hosts[name]) if is_uniform else name: name for name in names}  # of those that are alike one
        rests = [[other for other in names if other != name] for name in first.values()]
        names = max(rests, key=lambda rest: speed(as_trained(_of_any_hosts(job), cluster, rest)))
        found.append(names)
    return found


def alone_on_each(job: Job, cluster: Cluster) -> dict[str, Option]:
    """Each host by itself, of hosts that are alike the first."""
    devices: dict[str, list[str]] = {name: [] for name in cluster.names}
    for seat in cluster.seats:
        devices[seat.host].append(seat.device)
    first: dict[object, str] = {}
    for name, of_host in devices.items():
        first.setdefault((id(cluster.hosts[name]), tuple(of_host)), name)
    return {name: on_one(job, cluster, name) for name in first.values()}


def on_those_that_fit(job: Job, cluster: Cluster) -> list[Option]:
    """Without the hosts that cannot hold the model, while two are left."""
    left = _that_fit(job, cluster)
    if not 2 <= len(left) < len(cluster.names):
        return []
    return [as_trained(_of_any_hosts(job), cluster, left, name=_name_on(job, left, by_speed(job, cluster)))]


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
    if job.spec.machine.are_shares_told or not 2 < len(cluster.names) <= MOST_IN_RING:
        return cluster
    if len(cluster.kinds_of_wires) < 2:
        return cluster
    names, roster = cluster.names, job.roster(cluster.seats)
    links = {a: {b: cluster.between(a, b) for b in names if b != a} for a in names}
    if roster.backend == "gloo":  # each rank sends to the one before it
        links = {a: {b: cluster.between(b, a) for b in names if b != a} for a in names}
    order = best_ring(names, links)
    seats = sorted(cluster.seats, key=lambda seat: order.index(seat.host))
    ordered = msgspec.structs.replace(cluster, seats=seats)
    if order == names or slowest_Bps(job.roster(seats), ordered) < WORTH * slowest_Bps(roster, cluster):
        return cluster
    return ordered


def slowest_Bps(roster: Roster, cluster: Cluster) -> float:
    """Of the links that a ring in the order of the ranks uses."""
    links = ring(cluster, [member.host for member in roster.members])
    used = (links.to_previous if roster.backend == "gloo" else links.to_next).kinds
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


def _name_on(job: Job, names: Sequence[str], ranked: Sequence[str]) -> str:
    """Of a way on these hosts, `ranked` being all of them from the fastest to the slowest."""
    taken, sync = set(names), asked_sync(job.spec)
    left_out = [name for name in ranked if name not in taken]
    if len(left_out) <= 2:
        return f"{sync} without {', '.join(sorted(left_out))}"
    if taken == set(ranked[: len(names)]):
        return f"{sync} on the {len(names)} fastest"
    return f"{sync} on {listed(names)}"


def candidates(job: Job, cluster: Cluster) -> list[SyncSpec]:
    """Strategies that are worth a look on these machines."""
    sizes = Counter(seat.host for seat in cluster.seats).values()
    are_groups = len(sizes) > 1 and min(sizes) == max(sizes) > 1  # hosts of several ranks each
    return [sync for sync in CANDIDATES if makes_sense(sync, job) and (sync.kind != "hsdp" or are_groups)]


def makes_sense(sync: SyncSpec, job: Job) -> bool:
    """Has it something to do in this model?"""
    try:
        check_suits(sync, job.shape)
    except UsageError:
        return False
    return True


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
    """The one with most tokens/s, where what is not exact has to gain something for that, and what costs loss more.

    Of ways that differ in the bits of a number alone, and hardly in speed, the one with more of them.
    """
    best = max(options, key=lambda option: speed(option) / has_to_gain(option), default=None)
    if best is None:
        return None
    way = best.roster.sync
    near = [option for option in options if speed(best) <= WORTH * speed(option)
            and has_to_gain(option) <= has_to_gain(best) and option.roster.hosts == best.roster.hosts
            and msgspec.structs.replace(option.roster.sync, bits=way.bits) == way]  # fmt: skip
    return max(near, key=lambda option: (option.roster.sync.bits, speed(option)))


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


def best_of(options: Sequence[Option], cluster: Cluster) -> list[Option]:
    """The two fastest that fit, or the fastest if none does."""
    fitting = [option for option in options if fits_in(option, cluster)]
    return sorted(fitting, key=speed, reverse=True)[:2] or list(options[:1])


def fits_in(option: Option, cluster: Cluster) -> bool:
    return not what_does_not_fit(option, cluster)


def too_small_for(option: Option, cluster: Cluster) -> dict[str, int]:
    """Hosts that have too little memory for it, and what they need; none where nobody knows."""
    if all(host.memory_bytes is None for host in cluster.hosts.values()):
        return {}
    needs: dict[str, int] = {}
    for member, rank in zip(option.roster.members, option.ranks, strict=True):
        need, before = rank.memory_bytes or 0, needs.get(member.host, 0)
        needs[member.host] = before + need if member.device == "cpu" else max(before, need)
    known = {name: cluster.hosts[name].memory_bytes for name in needs}
    return {name: need for name, need in needs.items() if need > MEMORY_SHARE * (known[name] or math.inf)}


def what_does_not_fit(option: Option, cluster: Cluster) -> str:
    """Which host has too little memory; "" where all have enough, or nobody knows."""
    for name, need in too_small_for(option, cluster).items():
        has = cluster.hosts[name].memory_bytes or 0
        return f"{name} has {size(has)}, a run may fill {size(MEMORY_SHARE * has)} and needs {size(need)}"
    return ""


def obstacle(option: Option, cluster: Cluster, loss_budget: float) -> str:
    """Why an option cannot be chosen, however fast it is."""
    if too_large := what_does_not_fit(option, cluster):
        return f"does not fit: {too_large}"
    return objection(option, loss_budget)


def objection(option: Option, loss_budget: float) -> str:
    """What speaks against its strategy, on whatever machines."""
    if not option.is_built:
        sizes = Counter(member.host for member in option.roster.members).values()
        if option.roster.sync.kind == "hsdp" and min(sizes) != max(sizes):
            return "hosts with unlike numbers of ranks cannot shard alike"
        return "train cannot run it yet"
    if harms_fp16(option.roster):
        return "what is left to send would be of another loss scale than the next step's"
    return too_dear(option.loss_penalty, option.loss_source, loss_budget)
