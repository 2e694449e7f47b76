"""Which way of running a job is best, does every machine earn its place, and what would make it pay?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from evener.core.link import parse_link
from evener.core.prediction import Cluster, Job, Option, Prediction, Wire
from evener.core.roster import DDP, NO_SYNC, Roster, SyncSpec, asked_sync, equal_shares, parse_sync
from evener.core.units import count, link_rate, plural, seconds, size
from evener.plan.cluster import scaled, with_wire
from evener.plan.collectives import best_ring, ring
from evener.plan.cost import price
from evener.plan.divide import MEMORY_SHARE, first_roster_by_speed
from evener.plan.sync import BUCKET_BYTES, CODED_BUCKET_BYTES, bucket_bytes

CANDIDATES = tuple(map(parse_sync, (
    "ddp", "ddp+sparse", "packed", "bf16", "int8", "int4", "powersgd:4", "fsdp", "zero1", "diloco:30",
    "diloco:100:int4:streamed",
)))  # fmt: skip
BUCKETED = ("ddp", "packed", "bf16", "int8", "int4", "powersgd")
ALIKE = 0.9  # hosts whose speeds differ by less are alike
WORTH = 1.02  # a smaller gain is within what a prediction can err
MOST_FACTOR = 64  # of batch or bandwidth that is looked at
BISECTIONS = 14  # of a range of 2¹²: to 0.05 %


def predict(job: Job, cluster: Cluster, *, keep_order: bool = False) -> Prediction:
    """Price every way, choose the fastest that can run, and say why the others lost.

    The chosen option is what `train` does where all these hosts take part, recommended or not. Hosts are put in the
    order of the fastest ring, unless their own has to be kept.
    """
    given, loss_budget = cluster, job.spec.train.loss_budget / 100
    if not keep_order:
        cluster = in_best_ring(job, cluster)
    job = with_sync(job, cluster)
    chosen = _priced(job, cluster)
    options = [chosen]
    alone = [_alone(job, cluster, name) for name in cluster.names] if len(cluster.names) > 1 else []
    if alone:
        options += _best_alone(alone, cluster)
        options += _fewer(job, cluster)
        options += _that_fit(job, cluster, alone)
    if len(cluster.seats) > 1:
        options += _otherwise_divided(job, cluster)
        options += [in_best_buckets(job, cluster, msgspec.structs.replace(chosen.roster, sync=sync, bucket_bytes=0))
                    for sync in CANDIDATES if sync != chosen.roster.sync and _makes_sense(sync, job)]  # fmt: skip
    options = list({option.name: option for option in reversed(options)}.values())[::-1]
    fitting = [option for option in alone if _fits(option, cluster)]
    baseline = max(map(_speed, fitting), default=None) if alone else chosen.tokens_per_s
    if baseline:
        options = [msgspec.structs.replace(option, speedup_vs_best_host=option.tokens_per_s / baseline)
                   for option in options]  # fmt: skip
    able = [option for option in options if not _obstacle(option, cluster, loss_budget)]
    best = max(able, key=_speed, default=None)
    if best is not None:  # a gain within what a prediction can err is none: then the simpler way, fewer hosts first
        near = [option for option in able if best.tokens_per_s < WORTH * option.tokens_per_s]
        best = min(near, key=lambda option: (len(option.roster.hosts), option.name != chosen.name, option.step_s))
    options = [_judged(option, best, cluster, loss_budget) for option in options]
    prediction = Prediction(
        job=job,
        cluster=cluster,
        verdict="",
        recommended=best.name if best else "",
        chosen=chosen.name,
        options=options,
    )
    advice = _advice(prediction)
    if cluster is not given:
        gain = _slowest_Bps(chosen.roster, cluster) / _slowest_Bps(job.roster(given.seats), given)
        order = " → ".join(cluster.names)
        advice.append(f"The ring goes {order}: its slowest link is {gain:.1f} times that of the file's order.")
    return msgspec.structs.replace(prediction, verdict=_verdict(prediction), advice=advice)


def with_sync(job: Job, cluster: Cluster) -> Job:
    """The job with the fastest strategy that can run and costs no more loss than it may, where it is ours to choose.

    ddp where that is within what a prediction can err.
    """
    if job.spec.train.sync != "auto":
        return job
    plain = _asking_for(job, DDP)
    if len(cluster.seats) == 1:
        return plain
    priced = [_priced(_asking_for(job, sync), cluster) for sync in (DDP, *CANDIDATES) if _makes_sense(sync, job)]
    able = [option for option in priced if not _obstacle(option, cluster, job.spec.train.loss_budget / 100)]
    best = max(able, key=_speed, default=priced[0])
    return plain if best.tokens_per_s < WORTH * priced[0].tokens_per_s else _asking_for(job, best.roster.sync)


def _asking_for(job: Job, sync: SyncSpec) -> Job:
    train = msgspec.structs.replace(job.spec.train, sync=str(sync))
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, train=train))


def in_a_line(prediction: Prediction) -> str:
    """Of the run itself: `a step of 2.31 s, 3.5k tokens/s: compute 1.90 s, exposed communication 360 ms, …`."""
    option = prediction.option(prediction.chosen)
    cost = option.slowest.cost
    parts = (("compute", cost.compute_s), ("exposed communication", cost.exposed_sync_s), ("update", cost.optimizer_s))
    told = ", ".join(f"{name} {seconds(value)}" for name, value in parts if value)
    return f"a step of {seconds(option.step_s)}, {rate(option.tokens_per_s)}: {told}"


def flags_of_recommended(prediction: Prediction) -> str:
    """What to add to `train`'s command line for the option that is recommended and was not chosen."""
    best, chosen = prediction.option(prediction.recommended).roster, prediction.option(prediction.chosen).roster
    if set(best.hosts) != set(chosen.hosts):
        told = prediction.job.spec.machine.are_shares_told
        return f"--hosts {','.join(best.hosts)}{' --shares auto' if told else ''}"
    if best.sync != chosen.sync:
        return f"--sync {best.sync}"
    return f"--shares {'equal' if best.shares == equal_shares(best.batch, best.world_size) else 'auto'}"


def why_left_out(prediction: Prediction) -> dict[str, str]:
    """Hosts without which a run that agrees as it was asked to is as fast or faster, and what each of them is told."""
    cluster, chosen = prediction.cluster, prediction.option(prediction.chosen)
    able = [option for option in prediction.options
            if option.roster.sync in (chosen.roster.sync, NO_SYNC) and _fits(option, cluster)]  # fmt: skip
    most = max(map(_speed, able), default=0.0)
    near = [option for option in able if most < WORTH * option.tokens_per_s]
    best = min(near, key=lambda option: (len(option.roster.hosts), option.step_s), default=chosen)
    names = [name for name in cluster.names if name not in best.roster.hosts]
    if not names:
        return {}
    with_them, without = rate(chosen.tokens_per_s), rate(best.tokens_per_s)
    slower = "slower" if best.tokens_per_s > WORTH * chosen.tokens_per_s else "no faster"
    why = f"adding {_listed(names)} makes this run {slower}: {with_them} with "
    why += f"{'it' if len(names) == 1 else 'them'}, {without} without"
    if too_large := _too_large(chosen, cluster):
        why = f"it does not fit: {too_large}"
    return dict.fromkeys(names, why)


def what_if(prediction: Prediction) -> list[Option]:
    """The chosen option with one thing changed at a time: the links, the hosts, the batch, the strategy. What fits."""
    job, cluster = prediction.job, prediction.cluster
    roster = prediction.option(prediction.chosen).roster
    found: list[Option] = []
    if len(cluster.names) > 1:
        for name in ("2.5GbE", "10GbE"):
            wire = parse_link(name).wire
            found.append(price(job, with_wire(cluster, wire), roster, name=f"{name} between all hosts"))
        found += _fewer(job, cluster)[:1] or [_alone(job, cluster, _ranked(job, cluster)[0])]
        found += _otherwise_divided(job, cluster) if job.spec.machine.shares != "auto" else []
    if roster.world_size > 1:
        found.append(_priced(larger(job, 4), cluster, name="batch and accumulation × 4"))
        found += [option for option in prediction.options if option.roster.sync not in (roster.sync, NO_SYNC)]
    return [option for option in {option.name: option for option in found}.values() if _fits(option, cluster)]


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


# --- options ----------------------------------------------------------------------------------------------------------


def _priced(job: Job, cluster: Cluster, hosts: Collection[str] | None = None, name: str = "") -> Option:
    """What `train` does on these hosts, on all if None."""
    seats = [seat for seat in cluster.seats if hosts is None or seat.host in hosts]
    roster = first_roster_by_speed(job, cluster, seats)
    return in_best_buckets(job, cluster, roster, name=name or _name_of(job, roster))


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


def _name_of(job: Job, roster: Roster) -> str:
    if roster.world_size == 1:
        return f"{roster.hosts[0]} alone"
    if roster.shares == equal_shares(roster.batch, roster.world_size):
        return str(roster.sync)
    many = "as asked" if job.spec.machine.are_shares_told else "by speed"
    return f"{roster.sync}, shares {' : '.join(map(str, roster.shares)) if roster.world_size <= 4 else many}"


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
    if order == names or _slowest_Bps(job.roster(seats), ordered) < WORTH * _slowest_Bps(roster, cluster):
        return cluster
    return ordered


def _slowest_Bps(roster: Roster, cluster: Cluster) -> float:
    """Of the links that a ring in the order of the ranks uses."""
    links = ring(cluster, [member.host for member in roster.members])
    used = links.back if roster.backend == "gloo" else links.wires
    return min((wire.bandwidth_Bps for wire in used), default=1.0)


def _alone(job: Job, cluster: Cluster, name: str) -> Option:
    """One host, in the arithmetic that suits it."""
    return _priced(_of_any_hosts(job), cluster, [name], name=f"{name} alone")


def _best_alone(alone: Sequence[Option], cluster: Cluster) -> list[Option]:
    """The fastest host, and where it cannot hold the model the fastest that can."""
    ranked = sorted(alone, key=_speed, reverse=True)
    fits = next((option for option in ranked if _fits(option, cluster)), ranked[0])
    return [fits] if fits is ranked[0] else [fits, ranked[0]]


def _speeds(job: Job, cluster: Cluster) -> dict[str, float]:
    """Tokens/s of the ranks of every host, in the arithmetic of all."""
    speeds = dict.fromkeys(cluster.names, 0.0)
    for member in job.roster(cluster.seats).members:
        speeds[member.host] += cluster.tokens_per_s(member)
    return speeds


def _ranked(job: Job, cluster: Cluster) -> list[str]:
    """Hosts from the fastest to the slowest."""
    speeds = _speeds(job, cluster)
    return sorted(speeds, key=lambda name: -speeds[name])


def _fewer(job: Job, cluster: Cluster) -> list[Option]:
    """Without the slowest host, the two slowest, … while two are left; of a large fleet half stay at least."""
    ranked = _ranked(job, cluster)
    counts = [len(ranked) - num_left_out for num_left_out in (1, 2, 3, 4, 5, 6)]
    found = []
    for num in counts:
        if num < max(2, len(ranked) // 2 if len(ranked) > 8 else 0):
            break
        left_out = ranked[num:]
        name = _name_without(job, cluster, left_out) if len(left_out) <= 2 else f"{_sync(job)} on the {num} fastest"
        found.append(_priced(_of_any_hosts(job), cluster, ranked[:num], name=name))
    return found


def _that_fit(job: Job, cluster: Cluster, alone: Sequence[Option]) -> list[Option]:
    """Without the hosts that cannot hold the model, while two are left."""
    too_small = [option.roster.hosts[0] for option in alone if not _fits(option, cluster)]
    if not too_small or len(cluster.names) - len(too_small) < 2:
        return []
    left = [name for name in cluster.names if name not in too_small]
    return [_priced(_of_any_hosts(job), cluster, left, name=_name_without(job, cluster, too_small))]


def _name_without(job: Job, cluster: Cluster, left_out: Sequence[str]) -> str:
    if len(left_out) <= 2:
        return f"{_sync(job)} without {', '.join(sorted(left_out))}"
    return f"{_sync(job)} on {', '.join(name for name in cluster.names if name not in left_out)}"


def _sync(job: Job) -> SyncSpec:
    return asked_sync(job.spec)


def _otherwise_divided(job: Job, cluster: Cluster) -> list[Option]:
    """What the job's own shares are not: equal, and the fastest."""
    if len(cluster.seats) > job.spec.train.batch:  # the job's own shares leave some without
        return []
    others = [divided(job, shares) for shares in ("equal", "auto") if shares != job.spec.machine.shares]
    return [_priced(other, cluster) for other in others]


def _makes_sense(sync: SyncSpec, job: Job) -> bool:
    """Are there tables that are only looked up?"""
    shape = job.shape
    return not sync.sparse or shape.value_embeddings or not shape.tied_head


def _speed(option: Option) -> float:
    return option.tokens_per_s


# --- judgement --------------------------------------------------------------------------------------------------------


def _fits(option: Option, cluster: Cluster) -> bool:
    return not _too_large(option, cluster)


def _too_large(option: Option, cluster: Cluster) -> str:
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


def _obstacle(option: Option, cluster: Cluster, loss_budget: float) -> str:
    """Why an option cannot be chosen, however fast it is."""
    if too_large := _too_large(option, cluster):
        return f"does not fit: {too_large}"
    if not option.is_built:
        return "train cannot run it yet"
    if option.loss_penalty is None:
        return "nobody measured what it costs in loss"
    if option.loss_penalty > loss_budget:
        return f"costs {option.loss_penalty:.1%} of loss, more than {loss_budget:.1%}"
    return ""


def _judged(option: Option, best: Option | None, cluster: Cluster, loss_budget: float) -> Option:
    because = _obstacle(option, cluster, loss_budget)
    if best is None or option.name == best.name:
        return msgspec.structs.replace(option, rejected_because=because)
    slower = best.tokens_per_s / option.tokens_per_s
    if not because and slower >= WORTH:
        because = f"slower: {best.name} trains {slower:.2f} times as fast"
    elif not because:
        because = f"no faster than {best.name}"
    return msgspec.structs.replace(option, rejected_because=because)


def rate(tokens_per_s: float) -> str:
    """Tokens a second for a sentence.

    >>> rate(57.04), rate(3812.0)
    ('57 tokens/s', '3.8k tokens/s')
    """
    return f"{count(tokens_per_s) if tokens_per_s >= 999.5 else f'{tokens_per_s:.3g}'} tokens/s"


def _verdict(prediction: Prediction) -> str:
    if not prediction.recommended:
        why = prediction.option(prediction.chosen).rejected_because
        return f"This cannot be trained here: {why}; a smaller --micro-batch or --recompute needs less."
    best, chosen = prediction.option(prediction.recommended), prediction.option(prediction.chosen)
    hosts, its_hosts = prediction.cluster.names, best.roster.hosts
    left_out = [name for name in hosts if name not in its_hosts]
    everyone = "both hosts" if len(hosts) == 2 else f"all {len(hosts)} hosts"
    if len(hosts) == 1:
        ranks = plural(best.roster.world_size, "rank")
        return f"{hosts[0]} with {ranks} trains {rate(best.tokens_per_s)}."
    if not left_out:
        gain = f", {best.speedup_vs_best_host:.2f} times the fastest host alone" if best.speedup_vs_best_host else ""
        return f"Train on {everyone} with {best.name}: {rate(best.tokens_per_s)}{gain}."
    if _too_large(chosen, prediction.cluster):
        why = f"{chosen.rejected_because}; a smaller --micro-batch or --recompute needs less"
        return f"Use {_listed(its_hosts)} only. With {everyone} it {why}."
    with_all, fewer = rate(chosen.tokens_per_s), rate(best.tokens_per_s)
    if chosen.tokens_per_s * WORTH > best.tokens_per_s:
        return f"{_listed(its_hosts)} will do: {everyone} together train {with_all}, it alone {fewer}."
    speeds = _speeds(prediction.job, prediction.cluster).values()
    if len(its_hosts) == 1 and (len(hosts) > 2 or min(speeds) > ALIKE * max(speeds)):
        return f"Don't distribute this: {its_hosts[0]} alone trains {fewer}, {everyone} {with_all}."
    return f"Leave {_listed(left_out)} out: with {'it' if len(left_out) == 1 else 'them'} {with_all}, without {fewer}."


def _advice(prediction: Prediction) -> list[str]:
    """Who is slow, what would pay, what would be faster if it could run."""
    chosen, cluster = prediction.option(prediction.chosen), prediction.cluster
    found = []
    if len(chosen.ranks) > 1:
        found.append(_division(chosen))
    alone = [option for option in prediction.options if len(option.roster.hosts) == 1 and _fits(option, cluster)]
    if len(chosen.roster.hosts) > 1 and alone and _fits(chosen, cluster):
        found += _break_even(prediction, chosen, alone[0])
    faster = [option for option in prediction.options
              if not option.is_built and option.loss_penalty == 0.0 and _fits(option, cluster)]  # fmt: skip
    top = max(faster, key=_speed, default=None)
    recommended = prediction.recommended and prediction.option(prediction.recommended)
    if top and recommended and top.tokens_per_s > WORTH * recommended.tokens_per_s:
        found.append(
            f"{top.name} would train {rate(top.tokens_per_s)}, {top.tokens_per_s / recommended.tokens_per_s:.2f} times "
            "as much, and exactly the same model; train cannot run it yet."
        )
    return found


def _division(option: Option) -> str:
    """The slowest rank, and what its step is made of."""
    slow, shares = option.last, option.roster.shares
    communication_s = option.slowest.cost.exposed_sync_s or 0.0
    most_wait_s = max(rank.cost.wait_s or 0.0 for rank in option.ranks)
    hosts = "all hosts" if len(option.roster.hosts) > 1 else f"all ranks of {slow.host}"
    told = f"A step on {hosts} takes {seconds(option.step_s)}"
    share = communication_s / option.step_s
    if share > 0.005:
        told += f", of which {seconds(communication_s)} ({share:.0%}) is communication that computing does not hide"
    if most_wait_s > 0.01 * option.step_s and slow.share == min(shares) + 1:
        divided = f"{sum(shares)} sequences are not divided equally by {len(shares)}"
        return f"{told}. {divided}: others wait for {slow.host}."
    if most_wait_s > 0.05 * option.step_s:
        return f"{told}. {slow.host} is the straggler: others wait up to {seconds(most_wait_s)} for it in every step."
    return f"{told}."


def _break_even(prediction: Prediction, chosen: Option, alone: Option) -> list[str]:
    """The bandwidth and the batch from which on all hosts together are clearly faster than the best one alone."""
    job, cluster = prediction.job, prediction.cluster
    slowest_Bps = min(wire.bandwidth_Bps for row in cluster.wires.values() for wire in row.values())

    def gain_with(factor: float) -> float:
        return price(job, scaled(cluster, factor), chosen.roster).tokens_per_s / alone.tokens_per_s

    def gain_at(factor: int) -> float:
        more = larger(job, factor)
        one = _alone(more, cluster, alone.roster.hosts[0])
        return _priced(more, cluster).tokens_per_s / one.tokens_per_s

    pays = chosen.tokens_per_s > WORTH * alone.tokens_per_s
    by_speed = first_roster_by_speed(divided(job, "auto"), cluster, cluster.seats)
    is_equal = job.spec.machine.shares == "equal" and by_speed.shares != chosen.roster.shares
    equally = "with equal shares " if is_equal else ""
    factor = _crossing(gain_with, pays)
    if factor is None and pays:
        return []
    has = link_rate(slowest_Bps)
    if factor is not None and pays:
        return [f"It pays from {link_rate(factor * slowest_Bps)} between the hosts upwards; they have {has}."]
    instant = with_wire(cluster, Wire(latency_s=0.0, bandwidth_Bps=1e18))
    if factor is not None:
        needs = link_rate(factor * slowest_Bps)
        told = f"{equally}it would pay from {needs} between the hosts upwards; they have {has}."
    elif price(job, instant, chosen.roster).tokens_per_s > WORTH * alone.tokens_per_s:
        latency_s = max(wire.latency_s for row in cluster.wires.values() for wire in row.values())
        told = f"{equally}bandwidth alone would not make it pay: every message takes {seconds(latency_s)} one way."
    else:
        told = f"{equally}no network would make all hosts together pay: their computing alone takes longer."
    batch = next((k for k in range(2, MOST_FACTOR + 1) if gain_at(k) > WORTH), None)
    if batch:
        sequences = batch * job.spec.train.batch
        more = f"Or with --batch {sequences}, {batch} times as many sequences a step: another training run."
    else:
        more = f"A batch up to {MOST_FACTOR} times as large would not make it pay."
    return [_sentence(told), more]


def _crossing(gain: Callable[[float], float], pays: bool) -> float | None:
    """The factor at which a gain that grows with it is worth something; None if none within 1/MOST² … MOST² does it."""
    low, high = (1.0 / MOST_FACTOR**2, 1.0) if pays else (1.0, float(MOST_FACTOR**2))
    if (gain(low) > WORTH) == (gain(high) > WORTH):
        return None
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if gain(middle) > WORTH:
            high = middle
        else:
            low = middle
    return high


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
