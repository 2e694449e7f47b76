"""Enumerate the options for running a job on these machines: predict each and check that it fits into their memory."""

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

BUCKETED = tuple(kind for kind in BUILT if kind != "diloco")  # strategies that exchange gradients, bucket by bucket
WAYS = [parse_sync(name) for name in dict.fromkeys(("ddp", "packed", *(row.sync for row in MEASURED), "fsdp", "hsdp",
                                                    "zero1"))]  # fmt: skip
CANDIDATES = tuple(msgspec.structs.replace(way, sparse=sparse) for way in WAYS
                   for sparse in ((False, True) if way.kind in BUCKETED else (False,)))  # fmt: skip
ALIKE = 0.9  # hosts whose speeds differ by a smaller ratio count as similar
WORTH = 1.02  # a smaller gain is within the prediction error
MOST_IN_ALL_SETS = 5  # up to so many hosts every subset is predicted
MOST_ONE_BY_ONE = 8  # up to so many hosts are left out greedily, one by one
MOST_IN_TURN = 16  # up to so many hosts, every number of the fastest is predicted
MOST_IN_RING = 64  # up to so many hosts the best ring order is searched; larger clusters keep the file's order
WORTH_LOSS = 1.05  # gain over an exact strategy that is required of one that costs loss


def as_trained(job: Job, cluster: Cluster, hosts: Collection[str] | None = None, name: str = "") -> Option:
    """Predict what `train` would do on these hosts, on all if None."""
    wanted = set(cluster.hosts if hosts is None else hosts)
    seats = [seat for seat in cluster.seats if seat.host in wanted]
    roster = first_roster_by_speed(job, cluster, seats)
    return in_best_buckets(job, cluster, roster, name=name or name_of(job, roster))


def in_best_buckets(job: Job, cluster: Cluster, roster: Roster, name: str = "") -> Option:
    """Predict the Roster, with the other bucket size where that is clearly faster.

    Small buckets are sent early and leave little to send after backward; large ones need fewer messages.
    """
    default = price(job, cluster, roster, name=name)
    if roster.world_size == 1 or roster.bucket_bytes or roster.sync.kind not in BUCKETED:
        return default
    if WORTH * (default.step_s - (default.slowest.cost.exposed_sync_s or 0.0)) > default.step_s:  # nothing to gain
        return default
    other_bytes = BUCKET_BYTES if bucket_bytes(roster) else CODED_BUCKET_BYTES
    alternative = price(job, cluster, msgspec.structs.replace(roster, bucket_bytes=other_bytes), name=name)
    return alternative if default.step_s > WORTH * alternative.step_s else default


def name_of(job: Job, roster: Roster) -> str:
    if roster.world_size == 1:
        return f"{roster.hosts[0]} alone"
    if roster.is_equal:
        return str(roster.sync)
    summary = "as asked" if job.spec.machine.are_shares_told else "by speed"
    return f"{roster.sync}, shares {shares_text(roster.mean_shares) if roster.world_size <= 4 else summary}"


def on_one(job: Job, cluster: Cluster, name: str) -> Option:
    """Predict a single host in its own best dtype, with ddp where the requested strategy is rejected."""
    any_job = _of_any_hosts(job)
    option = as_trained(any_job, cluster, [name], name=f"{name} alone")
    if not objection(option, job.spec.train.loss_budget / 100):
        return option
    return as_trained(asking_for(any_job, DDP), cluster, [name], name=f"{name} alone")


def asking_for(job: Job, sync: SyncSpec) -> Job:
    """Return the job with this sync strategy."""
    train = msgspec.structs.replace(job.spec.train, sync=str(sync))
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, train=train))


def on_the_best(alone: Sequence[Option], cluster: Cluster) -> list[Option]:
    """Return the option of the fastest host, preceded by the fastest that fits into memory if that is another one."""
    ranked = sorted(alone, key=speed, reverse=True)
    fits = next((option for option in ranked if fits_in(option, cluster)), ranked[0])
    return [fits] if fits is ranked[0] else [fits, ranked[0]]


def on_fewer(job: Job, cluster: Cluster) -> list[Option]:
    """Predict the job on every candidate subset of at least two hosts."""
    ranked = by_speed(job, cluster)
    return [as_trained(_of_any_hosts(job), cluster, names, name=_name_on(job, names, ranked))
            for names in host_sets(job, cluster)]  # fmt: skip


def of_fewer_replicas(job: Job, cluster: Cluster, loss_budget: float) -> list[Option]:
    """Predict the job's strategy on the two, three, … fastest hosts while its loss penalty stays within the budget; the
    penalty grows with the number of replicas.
    """
    ranked, options = by_speed(job, cluster), list[Option]()
    for count in range(2, len(ranked)):
        names = ranked[:count]
        option = as_trained(_of_any_hosts(job), cluster, names, name=_name_on(job, names, ranked))
        if objection(option, loss_budget):
            break
        options.append(option)
    return options


def host_sets(job: Job, cluster: Cluster) -> list[list[str]]:
    """Return subsets of at least two hosts that may be faster than all of them, from large to small.

    A few hosts: all subsets. More: first without the hosts that cannot hold the model, then greedily without one more
    host at a time, the one without which the rest is fastest. Many: the fastest hosts, in numbers that halve and where
    the next host is clearly slower.
    """
    if len(cluster.names) <= MOST_IN_ALL_SETS:
        return _all_sets(cluster)
    names = _that_fit(job, cluster)
    sets = [names] if 2 <= len(names) < len(cluster.names) else []
    if len(names) <= MOST_ONE_BY_ONE:
        return sets + _without_the_worst(job, cluster, names)
    speeds = speeds_of(job, cluster)
    ranked = sorted(names, key=lambda name: -speeds[name])
    if len(names) <= MOST_IN_TURN:
        return sets + [ranked[:count] for count in range(len(names) - 1, 1, -1)]
    drops = [i for i in range(2, len(names)) if speeds[ranked[i]] < ALIKE * speeds[ranked[i - 1]]]
    halves = [len(names) >> i for i in range(1, len(names).bit_length()) if len(names) >> i >= 2]
    counts = sorted({*drops[-MOST_ONE_BY_ONE:], *halves}, reverse=True)
    return sets + [ranked[:count] for count in counts]


def _that_fit(job: Job, cluster: Cluster) -> list[str]:
    """Return the hosts that remain after removing, repeatedly, those short of memory; none if fewer than two remain."""
    names = cluster.names
    while len(names) > 1:
        option = as_trained(job if len(names) == len(cluster.names) else _of_any_hosts(job), cluster, names)
        too_small = too_small_for(option, cluster)
        if not too_small:
            return names
        names = [name for name in names if name not in too_small]
    return []


def _all_sets(cluster: Cluster) -> list[list[str]]:
    """Return all subsets of two hosts or more; of equivalent subsets only the first."""
    names = cluster.names
    is_uniform = len(cluster.kinds_of_wires) == 1
    sets: dict[object, list[str]] = {}
    for num in range(len(names) - 1, 1, -1):
        for subset in itertools.combinations(names, num):
            kinds = tuple(sorted(id(cluster.hosts[name]) for name in subset)) if is_uniform else subset
            sets.setdefault(kinds, list(subset))
    return list(sets.values())


def _without_the_worst(job: Job, cluster: Cluster, names: list[str]) -> list[list[str]]:
    """Return the subsets that result from removing, again and again, the host without which the rest is fastest."""
    sets = []
    is_uniform = len(cluster.kinds_of_wires) == 1
    while len(names) > 2:
        first = {id(cluster.hosts[name]) if is_uniform else name: name for name in names}  # one of each kind
        rests = [[other for other in names if other != name] for name in first.values()]
        names = max(rests, key=lambda rest: speed(as_trained(_of_any_hosts(job), cluster, rest)))
        sets.append(names)
    return sets


def alone_on_each(job: Job, cluster: Cluster) -> dict[str, Option]:
    """Predict each host by itself; of identical hosts only the first."""
    devices: dict[str, list[str]] = {name: [] for name in cluster.names}
    for seat in cluster.seats:
        devices[seat.host].append(seat.device)
    first: dict[object, str] = {}
    for name, of_host in devices.items():
        first.setdefault((id(cluster.hosts[name]), tuple(of_host)), name)
    return {name: on_one(job, cluster, name) for name in first.values()}


def on_those_that_fit(job: Job, cluster: Cluster) -> list[Option]:
    """Predict the job without the hosts that cannot hold the model, if at least two remain."""
    names = _that_fit(job, cluster)
    if not 2 <= len(names) < len(cluster.names):
        return []
    return [as_trained(_of_any_hosts(job), cluster, names, name=_name_on(job, names, by_speed(job, cluster)))]


def otherwise_divided(job: Job, cluster: Cluster) -> list[Option]:
    """Predict the job with equal and with auto shares, except the setting that it already has."""
    if len(cluster.seats) > job.spec.train.batch:  # some ranks have no share at all
        return []
    other_jobs = [divided(job, shares) for shares in ("equal", "auto") if shares != job.spec.machine.shares]
    return [as_trained(other_job, cluster) for other_job in other_jobs]


def in_best_ring(job: Job, cluster: Cluster) -> Cluster:
    """Reorder hosts so that the slowest link of the ring is fastest; return the same object if that gains nothing.

    Explicit shares refer to the ranks in the file's order, which is then kept.
    """
    if job.spec.machine.are_shares_told or not 2 < len(cluster.names) <= MOST_IN_RING:
        return cluster
    if len(cluster.kinds_of_wires) < 2:
        return cluster
    names, roster = cluster.names, job.roster(cluster.seats)
    links = {a: {b: cluster.between(a, b) for b in names if b != a} for a in names}
    if roster.backend == "gloo":  # each rank sends to the one before it
        links = {a: {b: cluster.between(b, a) for b in names if b != a} for a in names}
    ring_order = best_ring(names, links)
    seats = sorted(cluster.seats, key=lambda seat: ring_order.index(seat.host))
    ordered = msgspec.structs.replace(cluster, seats=seats)
    if ring_order == names or slowest_Bps(job.roster(seats), ordered) < WORTH * slowest_Bps(roster, cluster):
        return cluster
    return ordered


def slowest_Bps(roster: Roster, cluster: Cluster) -> float:
    """Return the bandwidth of the slowest link of a ring in rank order."""
    links = ring(cluster, [member.host for member in roster.members])
    used = (links.to_previous if roster.backend == "gloo" else links.to_next).kinds
    return min((wire.bandwidth_Bps for wire in used), default=1.0)


def speeds_of(job: Job, cluster: Cluster) -> dict[str, float]:
    """Return the tokens/s of each host, summed over its ranks, in the dtype that all hosts use together."""
    speeds = dict.fromkeys(cluster.names, 0.0)
    for member in job.roster(cluster.seats).members:
        speeds[member.host] += cluster.tokens_per_s(member)
    return speeds


def by_speed(job: Job, cluster: Cluster) -> list[str]:
    """Return the hosts from the fastest to the slowest."""
    speeds = speeds_of(job, cluster)
    return sorted(speeds, key=lambda name: -speeds[name])


def _name_on(job: Job, names: Sequence[str], ranked: Sequence[str]) -> str:
    """Return the name of an option on these hosts; `ranked` is all hosts from the fastest to the slowest."""
    taken, sync = set(names), asked_sync(job.spec)
    left_out = [name for name in ranked if name not in taken]
    if len(left_out) <= 2:
        return f"{sync} without {', '.join(sorted(left_out))}"
    if taken == set(ranked[: len(names)]):
        return f"{sync} on the {len(names)} fastest"
    return f"{sync} on {listed(names)}"


def candidates(job: Job, cluster: Cluster) -> list[SyncSpec]:
    """Return the strategies that apply to this model and these machines."""
    sizes = Counter(seat.host for seat in cluster.seats).values()
    are_groups = len(sizes) > 1 and min(sizes) == max(sizes) > 1  # hosts of several ranks each
    return [sync for sync in CANDIDATES if makes_sense(sync, job) and (sync.kind != "hsdp" or are_groups)]


def makes_sense(sync: SyncSpec, job: Job) -> bool:
    """Return whether the strategy suits the shape of the model."""
    try:
        check_suits(sync, job.shape)
    except UsageError:
        return False
    return True


def larger(job: Job, factor: int) -> Job:
    """Return the job with its batch multiplied by `factor`, in the same micro-batches."""
    train = job.spec.train
    spec = msgspec.structs.replace(job.spec, train=msgspec.structs.replace(train, batch=factor * train.batch))
    return msgspec.structs.replace(job, spec=spec)


def divided(job: Job, shares: str) -> Job:
    """Return the job with these --shares."""
    spec = msgspec.structs.replace(job.spec, machine=msgspec.structs.replace(job.spec.machine, shares=shares))
    return msgspec.structs.replace(job, spec=spec)


def _of_any_hosts(job: Job) -> Job:
    """Return the job with auto shares in place of explicit ones, which are for all hosts."""
    return divided(job, "auto") if job.spec.machine.are_shares_told else job


def speed(option: Option) -> float:
    return option.tokens_per_s


def fastest(options: Sequence[Option]) -> Option | None:
    """Return the option with most tokens/s, of which a lossy strategy must gain something, and more if it costs loss.

    Of strategies that differ only in their bits and hardly in speed, prefer more bits.
    """
    best = max(options, key=lambda option: speed(option) / has_to_gain(option), default=None)
    if best is None:
        return None
    strategy = best.roster.sync
    near = [option for option in options if speed(best) <= WORTH * speed(option)
            and has_to_gain(option) <= has_to_gain(best) and option.roster.hosts == best.roster.hosts
            and msgspec.structs.replace(option.roster.sync, bits=strategy.bits) == strategy]  # fmt: skip
    return max(near, key=lambda option: (option.roster.sync.bits, speed(option)))


def has_to_gain(option: Option) -> float:
    """Return the speedup over an exact strategy that is required of this option."""
    if option.is_exact:
        return 1.0
    return WORTH_LOSS if option.loss_penalty is None or option.loss_penalty > 0 else WORTH


def simplest(options: Sequence[Option], best: Option, chosen: str) -> Option:
    """Return the simplest option within the prediction error of the best: fewest hosts first, then the chosen one."""
    near = [option for option in options if best.tokens_per_s < WORTH * option.tokens_per_s
            and has_to_gain(option) <= has_to_gain(best)]  # fmt: skip
    return min(near, key=lambda option: (len(option.roster.hosts), option.name != chosen, option.step_s))


def best_of(options: Sequence[Option], cluster: Cluster) -> list[Option]:
    """Return the two fastest options that fit into memory, or the first option if none fits."""
    fitting = [option for option in options if fits_in(option, cluster)]
    return sorted(fitting, key=speed, reverse=True)[:2] or list(options[:1])


def fits_in(option: Option, cluster: Cluster) -> bool:
    return not what_does_not_fit(option, cluster)


def too_small_for(option: Option, cluster: Cluster) -> dict[str, int]:
    """Return the hosts that have too little memory for the option, and the bytes that they need."""
    if all(host.memory_bytes is None for host in cluster.hosts.values()):
        return {}
    needs: dict[str, int] = {}
    for member, rank in zip(option.roster.members, option.ranks, strict=True):
        need, before = rank.memory_bytes or 0, needs.get(member.host, 0)
        needs[member.host] = before + need if member.device == "cpu" else max(before, need)
    known = {name: cluster.hosts[name].memory_bytes for name in needs}
    return {name: need for name, need in needs.items() if need > MEMORY_SHARE * (known[name] or math.inf)}


def what_does_not_fit(option: Option, cluster: Cluster) -> str:
    """Explain which host has too little memory; "" if all have enough, as far as known."""
    for name, need in too_small_for(option, cluster).items():
        has = cluster.hosts[name].memory_bytes or 0
        return f"{name} has {size(has)}, a run may fill {size(MEMORY_SHARE * has)} and needs {size(need)}"
    return ""


def obstacle(option: Option, cluster: Cluster, loss_budget: float) -> str:
    """Return why an option cannot be chosen, however fast it is; "" if it can."""
    if too_large := what_does_not_fit(option, cluster):
        return f"does not fit: {too_large}"
    return objection(option, loss_budget)


def objection(option: Option, loss_budget: float) -> str:
    """Return why the option's strategy is rejected on any machines; "" if it is not."""
    if not option.is_built:
        sizes = Counter(member.host for member in option.roster.members).values()
        if option.roster.sync.kind == "hsdp" and min(sizes) != max(sizes):
            return "hsdp needs the same number of ranks on every host"
        return "train cannot run it yet"
    if harms_fp16(option.roster):
        return "its error feedback would be of another loss scale than the next step's gradients"
    return too_dear(option.loss_penalty, option.loss_source, loss_budget)
