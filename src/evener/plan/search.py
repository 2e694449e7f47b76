"""Which way of running a job is best, does every machine earn its place, and what would make it pay?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evener.core.link import parse_link
from evener.core.prediction import Cluster, Job, Option, Prediction
from evener.core.step import StepCost
from evener.core.units import count, link_rate, plural, seconds, size
from evener.plan.balance import equal_shares, fastest_shares
from evener.plan.cluster import scaled, with_wire, without
from evener.plan.collectives import best_ring, ring
from evener.plan.cost import price

LOSS_BUDGET = 0.01
CANDIDATES = (
    "ddp+sparse",
    "bf16",
    "int8",
    "int4",
    "powersgd:4",
    "fsdp",
    "zero1",
    "diloco:30",
    "diloco:100:int4:streamed",
)
WORTH = 1.02  # a smaller gain is within what a prediction can err
MOST_FACTOR = 64  # of batch or bandwidth that is looked at
BISECTIONS = 14  # of a range of 2¹²: to 0.05 %
MEMORY_SHARE = 0.9  # of a host that a run may fill


def plan(job: Job, cluster: Cluster, *, loss_budget: float = LOSS_BUDGET, sync: str = "ddp") -> Prediction:
    """Price every way, choose the fastest that can run, and say why the others lost.

    `sync` is what `train` will run on all hosts: the chosen option, recommended or not.
    """
    given, cluster = cluster, _in_best_ring(cluster)
    chosen = _everywhere(job, cluster, sync)
    alone = [_alone(job, cluster, host.name) for host in cluster.hosts] if len(cluster.hosts) > 1 else []
    best_alone = max((option for option in alone if _fits(option, cluster)), key=_speed, default=None)
    options = [chosen]
    if best_alone is not None:
        options.append(best_alone)
    if len(cluster.hosts) > 1:
        options += _fewer(job, cluster, sync)
        options += _unequal(job, cluster, sync)
    if cluster.num_ranks > 1:
        options += [price(job, cluster, name) for name in CANDIDATES if _makes_sense(name, job)]
    baseline = best_alone.tokens_per_s if best_alone else chosen.tokens_per_s if not alone else None
    if baseline:
        options = [msgspec.structs.replace(option, speedup_vs_best_host=option.tokens_per_s / baseline)
                   for option in options]  # fmt: skip
    able = [option for option in options if not _obstacle(option, cluster, loss_budget)]
    best = max(able, key=lambda option: (_speed(option), option.name == chosen.name), default=None)
    if best is not None:  # a gain within what a prediction can err is none: then the simpler way, fewer hosts first
        near = [option for option in able if best.tokens_per_s < WORTH * option.tokens_per_s]
        best = min(near, key=lambda option: (len(option.hosts), option.name != chosen.name, option.step_s))
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
        order = " → ".join(host.name for host in cluster.hosts)
        gain = _slowest_Bps(cluster) / _slowest_Bps(given)
        advice.append(f"The ring goes {order}: its slowest link is {gain:.1f} times that of the file's order.")
    return msgspec.structs.replace(prediction, verdict=_verdict(prediction), advice=advice)


def in_a_line(prediction: Prediction) -> str:
    """Of the run itself: `a step of 2.31 s, 3.5k tokens/s: compute 1.90 s, exposed communication 360 ms, …`."""
    option = prediction.option(prediction.chosen)
    cost = option.slowest.cost
    parts = (("compute", cost.compute_s), ("exposed communication", cost.exposed_sync_s), ("update", cost.optimizer_s))
    told = ", ".join(f"{name} {seconds(value)}" for name, value in parts if value)
    return f"a step of {seconds(option.step_s)}, {rate(option.tokens_per_s)}: {told}"


def what_if(prediction: Prediction) -> list[Option]:
    """The chosen option with one thing changed at a time: the links, the hosts, the batch, the strategy."""
    job, cluster = prediction.job, prediction.cluster
    sync = prediction.option(prediction.chosen).sync
    found: list[Option] = []
    if len(cluster.hosts) > 1:
        for name in ("2.5GbE", "10GbE"):
            wire = parse_link(name).wire
            found.append(price(job, with_wire(cluster, wire), sync, name=f"{name} between all hosts"))
        found += _fewer(job, cluster, sync, 1) or [_alone(job, cluster, _ranked(job, cluster)[0])]
        found += _unequal(job, cluster, sync)
    if cluster.num_ranks > 1:
        found.append(price(larger(job, 4), cluster, sync, name="batch and accumulation × 4"))
        found += [option for option in prediction.options
                  if option.sync not in (sync, "none") and len(option.hosts) == len(cluster.hosts)]  # fmt: skip
    return list({option.name: option for option in found}.values())


def larger(job: Job, factor: int) -> Job:
    """The job with so many times its batch, in micro-batches as before."""
    return msgspec.structs.replace(job, batch=factor * job.batch)


# --- options ----------------------------------------------------------------------------------------------------------


def _everywhere(job: Job, cluster: Cluster, sync: str) -> Option:
    if cluster.num_ranks == 1:
        return price(job, cluster, "none", name=f"{cluster.hosts[0].name} alone")
    return price(job, cluster, sync)


def _in_best_ring(cluster: Cluster) -> Cluster:
    """Hosts in the order in which the slowest link of the ring is fastest; the same object where that gains nothing."""
    names = [host.name for host in cluster.hosts]
    if cluster.backend == "gloo":  # each rank sends to the one before it
        wires = {a: {b: cluster.wires[b][a] for b in names if b != a} for a in names}
    else:
        wires = cluster.wires
    order = best_ring(names, wires)
    by_name = {host.name: host for host in cluster.hosts}
    ordered = msgspec.structs.replace(cluster, hosts=[by_name[name] for name in order])
    if order == names or _slowest_Bps(ordered) < WORTH * _slowest_Bps(cluster):
        return cluster
    return ordered


def _slowest_Bps(cluster: Cluster) -> float:
    """Of the links that a ring in the order of the hosts uses."""
    used = ring(cluster).back if cluster.backend == "gloo" else ring(cluster).wires
    return min((wire.bandwidth_Bps for wire in used), default=1.0)


def _alone(job: Job, cluster: Cluster, name: str) -> Option:
    only = without(cluster, *(host.name for host in cluster.hosts if host.name != name))
    return price(job, only, "ddp" if only.num_ranks > 1 else "none", name=f"{name} alone")


def _ranked(job: Job, cluster: Cluster) -> list[str]:
    """Hosts from the fastest to the slowest."""
    return [host.name for host in sorted(cluster.hosts, key=lambda host: -host.all_tokens_per_s)]


def _fewer(job: Job, cluster: Cluster, sync: str, most: int | None = None) -> list[Option]:
    """Without the slowest host, the two slowest, … while two are left."""
    ranked = _ranked(job, cluster)
    found = []
    for num_left_out in range(1, len(ranked) - 1):
        if most is not None and num_left_out > most:
            break
        left_out = ranked[-num_left_out:]
        few = without(cluster, *left_out)
        if num_left_out > 1 and few.num_ranks * 2 < cluster.num_ranks and len(ranked) > 8:
            break  # half of a large fleet is not thrown away one by one
        found.append(price(job, few, sync, name=f"{sync} without {', '.join(sorted(left_out))}"))
    return found


def _unequal(job: Job, cluster: Cluster, sync: str) -> list[Option]:
    """Shares in proportion to speed, where that is another division."""
    hosts = [cluster.host_of(rank) for rank in range(cluster.num_ranks)]
    fixed = [host.update_s + host.data_s + host.pass_s for host in hosts]
    shares = fastest_shares(job.batch, fixed, [job.shape.block_size / host.tokens_per_s for host in hosts])
    if shares == equal_shares(job.batch, cluster.num_ranks):
        return []
    if not all(shares):
        return []  # a host without a share is left out instead
    told = " : ".join(map(str, shares)) if len(shares) <= 4 else "by speed"
    return [price(job, cluster, sync, shares=shares, name=f"{sync}, shares {told}")]


def _makes_sense(sync: str, job: Job) -> bool:
    """Are there tables that are only looked up?"""
    shape = job.shape
    return sync != "ddp+sparse" or shape.value_embeddings or not shape.tied_head


def _speed(option: Option) -> float:
    return option.tokens_per_s


# --- judgement --------------------------------------------------------------------------------------------------------


def _fits(option: Option, cluster: Cluster) -> bool:
    return not _too_large(option, cluster)


def _too_large(option: Option, cluster: Cluster) -> str:
    """Which host has too little memory; "" where all have enough, or nobody knows."""
    for host in cluster.hosts:
        needs = [rank.memory_bytes or 0 for rank in option.ranks if rank.host == host.name]
        if not needs or host.memory_bytes is None:
            continue
        need = sum(needs) if host.device == "cpu" else max(needs)
        if need > MEMORY_SHARE * host.memory_bytes:
            return f"{host.name} has {size(host.memory_bytes)} of memory, it needs {size(need)}"
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
    return f"{count(tokens_per_s) if tokens_per_s >= 1000 else f'{tokens_per_s:.3g}'} tokens/s"


def _verdict(prediction: Prediction) -> str:
    if not prediction.recommended:
        why = prediction.option(prediction.chosen).rejected_because
        return f"This cannot be trained here: {why}."
    best, chosen = prediction.option(prediction.recommended), prediction.option(prediction.chosen)
    everyone = [host.name for host in prediction.cluster.hosts]
    left_out = [name for name in everyone if name not in best.hosts]
    if len(everyone) == 1:
        ranks = plural(prediction.cluster.num_ranks, "rank")
        return f"{everyone[0]} with {ranks} trains {rate(best.tokens_per_s)}."
    if not left_out:
        gain = f", {best.speedup_vs_best_host:.2f} times the fastest host alone" if best.speedup_vs_best_host else ""
        hosts = "both hosts" if len(everyone) == 2 else f"all {len(everyone)} hosts"
        return f"Train on {hosts} with {best.name}: {rate(best.tokens_per_s)}{gain}."
    if chosen.rejected_because.startswith("does not fit"):
        return f"Leave out {_listed(left_out)}: {chosen.rejected_because}."
    with_all, fewer = rate(chosen.tokens_per_s), rate(best.tokens_per_s)
    if len(best.hosts) == 1 and len(everyone) > 2:
        return f"Don't distribute this: {best.hosts[0]} alone trains {fewer}, all {len(everyone)} hosts {with_all}."
    return f"Leave {_listed(left_out)} out: with {'it' if len(left_out) == 1 else 'them'} {with_all}, without {fewer}."


def _advice(prediction: Prediction) -> list[str]:
    """Who is slow, what would pay, what would be faster if it could run."""
    chosen = prediction.option(prediction.chosen)
    found = []
    if len(chosen.ranks) > 1:
        found.append(_division(chosen))
    best_alone = [option for option in prediction.options if len(option.hosts) == 1]
    if len(chosen.hosts) > 1 and best_alone:
        found += _break_even(prediction, chosen, best_alone[0])
    faster = [option for option in prediction.options
              if not option.is_built and option.loss_penalty == 0.0 and _fits(option, prediction.cluster)]  # fmt: skip
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
    slow = option.slowest
    cost: StepCost = slow.cost
    communication_s = cost.exposed_sync_s or 0.0
    most_wait = max(rank.cost.wait_s or 0.0 for rank in option.ranks)
    told = (
        f"Of a step of {seconds(option.step_s)} on all hosts, {seconds(communication_s)} is communication that nothing "
        f"hides ({communication_s / option.step_s:.0%})"
    )
    if most_wait > 0.05 * option.step_s:
        return f"{told}; {slow.host} is the straggler: the others wait up to {seconds(most_wait)} for it in every step."
    return f"{told}; the hosts are equally fast."


def _break_even(prediction: Prediction, chosen: Option, alone: Option) -> list[str]:
    """The bandwidth and the batch at which all hosts together are as fast as the best one alone."""
    job, cluster = prediction.job, prediction.cluster
    slowest_Bps = min(wire.bandwidth_Bps for row in cluster.wires.values() for wire in row.values())

    def gain_with(factor: float) -> float:
        return price(job, scaled(cluster, factor), chosen.sync).tokens_per_s / alone.tokens_per_s

    def gain_at(factor: int) -> float:
        more = larger(job, factor)
        return price(more, cluster, chosen.sync).tokens_per_s / _alone(more, cluster, alone.hosts[0]).tokens_per_s

    pays = chosen.tokens_per_s > alone.tokens_per_s
    factor = _crossing(gain_with, pays)
    if factor is None:
        if pays:
            return []
        return ["No network would make all hosts together pay: their computing alone takes longer."]
    rate_told = link_rate(factor * slowest_Bps)
    if pays:
        return [f"It pays from {rate_told} between the hosts upwards; they have {link_rate(slowest_Bps)}."]
    told = [
        f"With equal shares it would pay from {rate_told} between the hosts upwards; "
        f"they have {link_rate(slowest_Bps)}."
    ]
    batch = next((k for k in range(2, MOST_FACTOR + 1) if gain_at(k) > 1), None)
    if batch:
        told.append(f"Or with --batch {batch * job.batch}, {batch} times as many sequences between two exchanges.")
    else:
        told.append(f"A batch up to {MOST_FACTOR} times as large would not make it pay.")
    return told


def _crossing(gain: Callable[[float], float], pays: bool) -> float | None:
    """The factor at which a gain that grows with it passes 1; None if none within 1/MOST … MOST² does."""
    low, high = (1.0 / MOST_FACTOR**2, 1.0) if pays else (1.0, float(MOST_FACTOR**2))
    if (gain(low) > 1) == (gain(high) > 1):
        return None
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if gain(middle) > 1:
            high = middle
        else:
            low = middle
    return high


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
