"""Enumerate the options for running a job on these machines: predict each and check that it fits into their memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.units import format_bytes, join_names
from evener.core.model.gradients import ProgramModel
from evener.core.run.prediction import Cluster, Job, PlanOption
from evener.core.run.resolve import check_sync_for_shape
from evener.core.run.roster import (
    DDP,
    Roster,
    SyncSpec,
    format_shares,
    parse_sync,
    requested_sync,
    why_not_hsdp,
    why_unsafe_in_fp16,
)
from evener.plan.cost.collective_cost import best_ring, build_ring
from evener.plan.cost.cost_model import predict_step
from evener.plan.cost.penalty import LOSS_MEASUREMENTS, LossPenalty, why_too_lossy
from evener.plan.cost.sync_traffic import BUCKET_BYTES, COMPRESSED_BUCKET_BYTES, bucket_bytes
from evener.plan.shares.initial_shares import MAX_MEMORY_FRACTION, initial_roster_by_speed

BASE_STRATEGIES = [
    parse_sync(name) for name in dict.fromkeys(("ddp", "packed", *(row.sync for row in LOSS_MEASUREMENTS)))
]
CANDIDATE_STRATEGIES = tuple(msgspec.structs.replace(strategy, sparse=sparse) for strategy in BASE_STRATEGIES
                   for sparse in ((False, True) if strategy.has_buckets else (False,)))  # fmt: skip
SHARDED_STRATEGIES = tuple(map(parse_sync, ("zero1", "fsdp", "hsdp")))  # for a model too large for whole replicas
SIMILAR_SPEED = 0.9  # hosts whose speeds differ by a smaller ratio count as similar
MIN_GAIN = 1.02  # a smaller gain is within the prediction error
MAX_HOSTS_EXHAUSTIVE = 5  # up to so many hosts every subset is predicted
MAX_HOSTS_GREEDY = 8  # up to so many hosts are left out greedily, one by one
MAX_HOSTS_BY_SPEED = 16  # up to so many hosts, every number of the fastest is predicted
MAX_HOSTS_RING_SEARCH = 64  # up to so many hosts the best ring order is searched; larger clusters keep the file's order
MAX_RANKS = 1 << 16  # the largest number of ranks that is predicted
MIN_LOSSY_GAIN = 1.05  # gain over an exact strategy that is required of one that costs loss


def predict_training(job: Job, cluster: Cluster, hosts: Collection[str] | None = None, name: str = "") -> PlanOption:
    """Predict `train` on these hosts, or on all hosts if None."""
    wanted = set(cluster.hosts if hosts is None else hosts)
    slots = [slot for slot in cluster.slots if slot.host in wanted]
    roster = initial_roster_by_speed(job, cluster, slots)
    return with_best_bucket_size(job, cluster, roster, name=name or option_name(job, roster))


def with_best_bucket_size(job: Job, cluster: Cluster, roster: Roster, name: str = "") -> PlanOption:
    """Predict the Roster with its default bucket size, or with the other one (25 or 4 MiB) if that is clearly faster.

    Small buckets are sent early and leave little to send after backward; large ones need fewer messages.
    """
    default = predict_step(job, cluster, roster, name=name)
    if isinstance(job.shape, ProgramModel):  # DDP arranges its buckets
        return default
    if roster.world_size == 1 or roster.bucket_bytes or not roster.sync.has_buckets:
        return default
    # even without any exposed communication the gain would be too small
    if MIN_GAIN * (default.step_s - (default.straggler_cost.cost.exposed_sync_s or 0.0)) > default.step_s:
        return default
    other_bytes = BUCKET_BYTES if bucket_bytes(roster) else COMPRESSED_BUCKET_BYTES
    alternative = predict_step(job, cluster, msgspec.structs.replace(roster, bucket_bytes=other_bytes), name=name)
    return alternative if default.step_s > MIN_GAIN * alternative.step_s else default


def option_name(job: Job, roster: Roster) -> str:
    if roster.world_size == 1:
        return f"{roster.hosts[0]} alone"
    if isinstance(job.shape, ProgramModel) and job.shape.collectives:
        return "its own collectives"
    if roster.has_equal_shares:
        return str(roster.sync)
    summary = "as asked" if job.spec.machine.has_explicit_shares else "by speed"
    return f"{roster.sync}, shares {format_shares(roster.mean_shares) if roster.world_size <= 4 else summary}"


def predict_single_host(job: Job, cluster: Cluster, name: str, *, is_sync_asked: bool = False) -> PlanOption:
    """Predict a single host in the dtype that is best for it, with ddp if the requested strategy is rejected.

    `is_sync_asked`: the user has named the strategy, whatever it may cost in loss.
    """
    any_job = _job_for_any_hosts(job)
    option = predict_training(any_job, cluster, [name], name=f"{name} alone")
    if (is_sync_asked and option.is_built) or not why_strategy_rejected(option, job.spec.train.loss_budget / 100):
        return option
    return predict_training(job_with_sync(any_job, DDP), cluster, [name], name=f"{name} alone")


def job_with_sync(job: Job, sync: SyncSpec, *, recompute: bool | None = None) -> Job:
    """Return the job with this sync strategy, and with or without recomputation if that is given."""
    train, model = msgspec.structs.replace(job.spec.train, sync=str(sync)), job.spec.model
    model = model if recompute is None else msgspec.structs.replace(model, recompute=recompute)
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, model=model, train=train))


def sharded_strategies(cluster: Cluster) -> list[SyncSpec]:
    """Return the strategies that these ranks can run: copies of a part stay equal on devices of one name alone."""
    are_alike = len({slot.name for slot in cluster.slots}) == 1
    return [sync for sync in SHARDED_STRATEGIES if sync.kind != "hsdp" or are_alike]


def fitting_job(job: Job, cluster: Cluster) -> Job | None:
    """Return the job with what makes it fit into memory at least cost in time; None if nothing does.

    The candidates are whole replicas that recompute activations in backward, and weights that are sharded, with or
    without that; of those that are hardly slower than the fastest take the first.
    """
    candidates = [(predict_training(with_them, cluster), with_them)
                  for recompute in (False, True)[job.spec.model.recompute:]
                  for sync in (DDP, *sharded_strategies(cluster))
                  for with_them in [job_with_sync(job, sync, recompute=recompute)]]  # fmt: skip
    fitting = [pair for pair in candidates if fits_in_memory(pair[0], cluster) and pair[0].is_built]
    fastest = max((option_throughput(option) for option, _ in fitting), default=0.0)
    return next((with_them for option, with_them in fitting if fastest < MIN_GAIN * option_throughput(option)), None)


def best_single_host_options(alone: Sequence[PlanOption], cluster: Cluster) -> list[PlanOption]:
    """Return the option of the fastest host, preceded by the fastest that fits into memory if that is another one."""
    ranked = sorted(alone, key=option_throughput, reverse=True)
    fits = next((option for option in ranked if fits_in_memory(option, cluster)), ranked[0])
    return [fits] if fits is ranked[0] else [fits, ranked[0]]


def fewer_host_options(job: Job, cluster: Cluster) -> list[PlanOption]:
    """Predict the job on every candidate subset of at least two hosts."""
    ranked = hosts_by_speed(job, cluster)
    return [predict_training(_job_for_any_hosts(job), cluster, names, name=_host_subset_name(job, names, ranked))
            for names in candidate_host_sets(job, cluster)]  # fmt: skip


def fewer_replica_options(job: Job, cluster: Cluster, loss_budget: float) -> list[PlanOption]:
    """Predict the job's strategy on the two, three, … fastest hosts while its loss penalty stays within the budget; the
    penalty grows with the number of replicas.
    """
    ranked, options = hosts_by_speed(job, cluster), list[PlanOption]()
    for count in range(2, len(ranked)):
        names = ranked[:count]
        option = predict_training(_job_for_any_hosts(job), cluster, names, name=_host_subset_name(job, names, ranked))
        if why_strategy_rejected(option, loss_budget):
            break
        options.append(option)
    return options


def candidate_host_sets(job: Job, cluster: Cluster) -> list[list[str]]:
    """Return subsets of at least two hosts that may train faster than all hosts, from large to small.

    Up to MAX_HOSTS_EXHAUSTIVE hosts: all subsets. Otherwise start with the hosts that can hold the model. Up to
    MAX_HOSTS_GREEDY of them: remove one host at a time, each time the one without which the rest is fastest. Up to
    MAX_HOSTS_BY_SPEED: the k fastest hosts for every k. Above: the k fastest only where k is a halving of their number,
    or where the next host is clearly slower.
    """
    if len(cluster.host_names) <= MAX_HOSTS_EXHAUSTIVE:
        return _all_host_sets(cluster)
    names = _hosts_that_fit(job, cluster)
    sets = [names] if 2 <= len(names) < len(cluster.host_names) else []
    if len(names) <= MAX_HOSTS_GREEDY:
        return sets + _greedy_host_sets(job, cluster, names)
    speeds = throughput_by_host(job, cluster)
    ranked = sorted(names, key=lambda name: -speeds[name])
    if len(names) <= MAX_HOSTS_BY_SPEED:
        return sets + [ranked[:count] for count in range(len(names) - 1, 1, -1)]
    drops = [i for i in range(2, len(names)) if speeds[ranked[i]] < SIMILAR_SPEED * speeds[ranked[i - 1]]]
    halves = [len(names) >> i for i in range(1, len(names).bit_length()) if len(names) >> i >= 2]
    counts = sorted({*drops[-MAX_HOSTS_GREEDY:], *halves}, reverse=True)
    return sets + [ranked[:count] for count in counts]


def _hosts_that_fit(job: Job, cluster: Cluster) -> list[str]:
    """Return the hosts that are left once all hosts short of memory are removed; [] if fewer than two are left."""
    names = cluster.host_names
    while len(names) > 1:
        option = predict_training(
            job if len(names) == len(cluster.host_names) else _job_for_any_hosts(job), cluster, names
        )
        too_small = hosts_short_of_memory(option, cluster)
        if not too_small:
            return names
        names = [name for name in names if name not in too_small]
    return []


def _all_host_sets(cluster: Cluster) -> list[list[str]]:
    """Return all subsets of two hosts or more; of equivalent subsets only the first."""
    names = cluster.host_names
    is_uniform = len(cluster.distinct_links) == 1
    sets: dict[object, list[str]] = {}
    for num in range(len(names) - 1, 1, -1):
        for subset in itertools.combinations(names, num):
            kinds = tuple(sorted(id(cluster.hosts[name]) for name in subset)) if is_uniform else subset
            sets.setdefault(kinds, list(subset))
    return list(sets.values())


def _greedy_host_sets(job: Job, cluster: Cluster, names: list[str]) -> list[list[str]]:
    """Return the subsets left by removing one host at a time, each time the one without which the rest is fastest."""
    sets = []
    is_uniform = len(cluster.distinct_links) == 1
    while len(names) > 2:
        first = {id(cluster.hosts[name]) if is_uniform else name: name for name in names}  # one of each kind
        rests = [[other for other in names if other != name] for name in first.values()]
        names = max(rests, key=lambda rest: option_throughput(predict_training(_job_for_any_hosts(job), cluster, rest)))
        sets.append(names)
    return sets


def single_host_options(job: Job, cluster: Cluster, *, is_sync_asked: bool = False) -> dict[str, PlanOption]:
    """Predict training on each host alone; of identical hosts predict only the first. See `predict_single_host`."""
    devices: dict[str, list[str]] = {name: [] for name in cluster.host_names}
    for slot in cluster.slots:
        devices[slot.host].append(slot.device)
    first: dict[object, str] = {}
    for name, of_host in devices.items():
        first.setdefault((id(cluster.hosts[name]), tuple(of_host)), name)
    return {name: predict_single_host(job, cluster, name, is_sync_asked=is_sync_asked) for name in first.values()}


def fitting_host_options(job: Job, cluster: Cluster) -> list[PlanOption]:
    """Predict the job without the hosts that cannot hold the model, if at least two remain."""
    names = _hosts_that_fit(job, cluster)
    if not 2 <= len(names) < len(cluster.host_names):
        return []
    return [
        predict_training(
            _job_for_any_hosts(job), cluster, names, name=_host_subset_name(job, names, hosts_by_speed(job, cluster))
        )
    ]


def other_shares_options(job: Job, cluster: Cluster) -> list[PlanOption]:
    """Predict the job with equal and with auto shares, except the setting that it already has."""
    if isinstance(job.shape, ProgramModel) and not job.shape.can_divide:
        return []
    if len(cluster.slots) > job.spec.train.batch:  # some ranks have no share at all
        return []
    other_jobs = [job_with_shares(job, shares) for shares in ("equal", "auto") if shares != job.spec.machine.shares]
    return [predict_training(other_job, cluster) for other_job in other_jobs]


def with_best_ring_order(job: Job, cluster: Cluster) -> Cluster:
    """Return the cluster with its hosts in the ring order whose slowest link is fastest; the same if that gains little.

    With explicit shares keep the fleet file's order, because the shares refer to ranks in that order.
    """
    if job.spec.machine.has_explicit_shares or not 2 < len(cluster.host_names) <= MAX_HOSTS_RING_SEARCH:
        return cluster
    if len(cluster.distinct_links) < 2:
        return cluster
    names, roster = cluster.host_names, job.initial_roster(cluster.slots)
    links = {a: {b: cluster.link_between(a, b) for b in names if b != a} for a in names}
    if roster.backend == "gloo":  # each rank sends to the one before it
        links = {a: {b: cluster.link_between(b, a) for b in names if b != a} for a in names}
    ring_order = best_ring(names, links)
    slots = sorted(cluster.slots, key=lambda slot: ring_order.index(slot.host))
    ordered = msgspec.structs.replace(cluster, slots=slots)
    if ring_order == names or slowest_ring_link_Bps(
        job.initial_roster(slots), ordered
    ) < MIN_GAIN * slowest_ring_link_Bps(roster, cluster):
        return cluster
    return ordered


def slowest_ring_link_Bps(roster: Roster, cluster: Cluster) -> float:
    """Return the bandwidth of the slowest link of a ring in rank order."""
    links = build_ring(cluster, [member.host for member in roster.members])
    used = (links.to_previous if roster.backend == "gloo" else links.to_next).distinct
    return min((wire.bandwidth_Bps for wire in used), default=1.0)


def throughput_by_host(job: Job, cluster: Cluster) -> dict[str, float]:
    """Return the tokens/s of each host, summed over its ranks, in the dtype that all hosts use together."""
    speeds = dict.fromkeys(cluster.host_names, 0.0)
    for member in job.initial_roster(cluster.slots).members:
        speeds[member.host] += cluster.tokens_per_s(member)
    return speeds


def hosts_by_speed(job: Job, cluster: Cluster) -> list[str]:
    """Return the hosts from the fastest to the slowest."""
    speeds = throughput_by_host(job, cluster)
    return sorted(speeds, key=lambda name: -speeds[name])


def _host_subset_name(job: Job, names: Sequence[str], ranked: Sequence[str]) -> str:
    """Return the name of an option on these hosts; `ranked` is all hosts from the fastest to the slowest."""
    taken, sync = set(names), requested_sync(job.spec)
    left_out = [name for name in ranked if name not in taken]
    if len(left_out) <= 2:
        return f"{sync} without {', '.join(sorted(left_out))}"
    if taken == set(ranked[: len(names)]):
        return f"{sync} on the {len(names)} fastest"
    return f"{sync} on {join_names(names)}"


def applicable_strategies(job: Job) -> list[SyncSpec]:
    """Return the strategies that apply to this model."""
    return [sync for sync in CANDIDATE_STRATEGIES if is_applicable(sync, job)]


def is_applicable(sync: SyncSpec, job: Job) -> bool:
    """Return whether the strategy suits the shape of the model. Replicas of a user's program drift only if asked to."""
    if isinstance(job.shape, ProgramModel) and sync.drifts:
        return False
    try:
        check_sync_for_shape(sync, job.shape)
    except UsageError:
        return False
    return True


def job_with_larger_batch(job: Job, factor: int) -> Job:
    """Return the job with its batch multiplied by `factor`, in the same micro-batches."""
    train = job.spec.train
    spec = msgspec.structs.replace(job.spec, train=msgspec.structs.replace(train, batch=factor * train.batch))
    return msgspec.structs.replace(job, spec=spec)


def job_with_shares(job: Job, shares: str) -> Job:
    """Return the job with these --shares."""
    spec = msgspec.structs.replace(job.spec, machine=msgspec.structs.replace(job.spec.machine, shares=shares))
    return msgspec.structs.replace(job, spec=spec)


def _job_for_any_hosts(job: Job) -> Job:
    """Return the job with auto shares in place of explicit shares, which suit only a run on all hosts."""
    return job_with_shares(job, "auto") if job.spec.machine.has_explicit_shares else job


def option_throughput(option: PlanOption) -> float:
    return option.tokens_per_s


def pick_fastest(options: Sequence[PlanOption]) -> PlanOption | None:
    """Return the option with the most tokens/s after dividing each by its `required_gain`; None if there is no option.

    Among strategies that differ only in bits and by less than MIN_GAIN in speed, prefer more bits.
    """
    best = max(options, key=lambda option: option_throughput(option) / required_gain(option), default=None)
    if best is None:
        return None
    strategy = best.roster.sync
    near = [option for option in options if option_throughput(best) <= MIN_GAIN * option_throughput(option)
            and required_gain(option) <= required_gain(best) and option.roster.hosts == best.roster.hosts
            and msgspec.structs.replace(option.roster.sync, bits=strategy.bits) == strategy]  # fmt: skip
    return max(near, key=lambda option: (option.roster.sync.bits, option_throughput(option)))


def required_gain(option: PlanOption) -> float:
    """Return the speedup over an exact strategy that is required of this option."""
    if option.is_exact:
        return 1.0
    return MIN_LOSSY_GAIN if option.loss_penalty is None or option.loss_penalty > 0 else MIN_GAIN


def pick_simplest(options: Sequence[PlanOption], best: PlanOption, chosen: str) -> PlanOption:
    """Return the simplest option within the prediction error of the best: fewest hosts, then the one named `chosen`."""
    near = [option for option in options if best.tokens_per_s < MIN_GAIN * option.tokens_per_s
            and required_gain(option) <= required_gain(best)]  # fmt: skip
    return min(near, key=lambda option: (len(option.roster.hosts), option.name != chosen, option.step_s))


def best_two_that_fit(options: Sequence[PlanOption], cluster: Cluster) -> list[PlanOption]:
    """Return the two fastest options that fit into memory, or the fastest option if none fits."""
    ranked = sorted(options, key=option_throughput, reverse=True)
    return [option for option in ranked if fits_in_memory(option, cluster)][:2] or ranked[:1]


def fits_in_memory(option: PlanOption, cluster: Cluster) -> bool:
    return not explain_memory_shortage(option, cluster)


def hosts_short_of_memory(option: PlanOption, cluster: Cluster) -> dict[str, int]:
    """Return the hosts that have too little memory for the option, and the bytes that they need."""
    if all(host.memory_bytes is None for host in cluster.hosts.values()):
        return {}
    needs: dict[str, int] = {}
    for member, rank in zip(option.roster.members, option.ranks, strict=True):
        need, before = rank.memory_bytes or 0, needs.get(member.host, 0)
        needs[member.host] = before + need if member.device == "cpu" else max(before, need)
    known = {name: cluster.hosts[name].memory_bytes for name in needs}
    return {name: need for name, need in needs.items() if need > MAX_MEMORY_FRACTION * (known[name] or math.inf)}


def explain_memory_shortage(option: PlanOption, cluster: Cluster) -> str:
    """Explain which host has too little memory; "" if every host of known memory size has enough."""
    for name, need in hosts_short_of_memory(option, cluster).items():
        has = cluster.hosts[name].memory_bytes or 0
        return (
            f"{name} has {format_bytes(has)}, a run may fill {format_bytes(MAX_MEMORY_FRACTION * has)} and "
            f"needs {format_bytes(need)}, {format_bytes(need - MAX_MEMORY_FRACTION * has)} more"
        )
    return ""


def why_option_rejected(option: PlanOption, cluster: Cluster, loss_budget: float) -> str:
    """Return why an option cannot be chosen, however fast it is; "" if it can."""
    if too_large := explain_memory_shortage(option, cluster):
        return f"does not fit: {too_large}"
    return why_strategy_rejected(option, loss_budget)


def why_not_as_requested(option: PlanOption, cluster: Cluster) -> str:
    """Return why an option cannot be chosen whose strategy the user has asked for, at whatever loss; "" if it can."""
    return why_option_rejected(msgspec.structs.replace(option, loss_penalty=0.0, loss_margin=0.0), cluster, math.inf)


def why_strategy_rejected(option: PlanOption, loss_budget: float) -> str:
    """Return why the option's strategy is rejected on any machines; "" if it is not."""
    return (
        why_not_hsdp(option.roster)
        or why_unsafe_in_fp16(option.roster)
        or why_too_lossy(penalty_of(option), loss_budget)
    )


def penalty_of(option: PlanOption) -> LossPenalty:
    return LossPenalty(option.loss_penalty, option.loss_source, option.loss_margin)
