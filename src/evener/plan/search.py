"""Which way of running a job is best, and does every machine earn its place?"""

from __future__ import annotations

import msgspec

from evener.core.link import parse_link
from evener.core.prediction import Cluster, Job, Option, Prediction
from evener.core.roster import DDP, NO_SYNC
from evener.core.units import listed, seconds
from evener.plan.advice import rate, verdict_of
from evener.plan.cluster import with_wire
from evener.plan.cost import price
from evener.plan.options import (
    WORTH,
    alone_on_each,
    as_trained,
    asking_for,
    best_of,
    by_speed,
    candidates,
    fastest,
    fits_in,
    in_best_ring,
    larger,
    objection,
    obstacle,
    of_fewer_replicas,
    on_fewer,
    on_one,
    on_the_best,
    on_those_that_fit,
    otherwise_divided,
    simplest,
    slowest_Bps,
    speed,
    what_does_not_fit,
)


def predict(job: Job, cluster: Cluster, *, keep_order: bool = False, measured: Option | None = None,
            leaves_out: bool = True) -> Prediction:  # fmt: skip
    """Price every way, choose the fastest that can run, and say why the others lost.

    The chosen option is what `train` does where all these hosts take part, recommended or not. Hosts are put in the
    order of the fastest ring, unless their own has to be kept. `measured` is a way as a run has shown it to be, and
    stands for what it would be priced at. `leaves_out`: some hosts may be left out, so that a way counts that pays on
    fewer.
    """
    given, loss_budget, is_ours = cluster, job.spec.train.loss_budget / 100, job.spec.train.sync == "auto"
    if not keep_order:
        cluster = in_best_ring(job, cluster)
    leaves_out = leaves_out and job.spec.machine.shares == "auto"
    job = with_sync(job, cluster, leaves_out=leaves_out)
    chosen = as_trained(job, cluster)
    if measured is not None and measured.name == chosen.name:
        chosen = measured
    options = [chosen, *([measured] if measured is not None else [])]
    alone = list(alone_on_each(job, cluster).values()) if len(cluster.names) > 1 else []
    if alone:
        options += on_the_best(alone, cluster)
        options += best_of(on_fewer(job, cluster), cluster)
        options += on_those_that_fit(job, cluster)
        if is_ours and leaves_out and chosen.roster.sync.kind == "diloco" and objection(chosen, loss_budget):
            options += of_fewer_replicas(job, cluster, loss_budget)
    if len(cluster.seats) > 1:
        options += otherwise_divided(job, cluster)
        options += [as_trained(asking_for(job, sync), cluster, name=str(sync))
                    for sync in candidates(job, cluster) if sync != chosen.roster.sync]  # fmt: skip
    options = list({option.name: option for option in reversed(options)}.values())[::-1]
    fitting = [option for option in alone if fits_in(option, cluster)]
    baseline = max(map(speed, fitting), default=None) if alone else chosen.tokens_per_s
    if baseline:
        options = [msgspec.structs.replace(option, speedup_vs_best_host=option.tokens_per_s / baseline)
                   for option in options]  # fmt: skip
    able = [option for option in options if not obstacle(option, cluster, loss_budget)]
    best = fastest(able)
    if best is not None:
        best = simplest(able, best, chosen.name)
    options = [_judged(option, best, cluster, loss_budget) for option in options]
    prediction = Prediction(
        job=job,
        cluster=cluster,
        verdict="",
        recommended=best.name if best else "",
        chosen=chosen.name,
        options=options,
        is_sync_ours=is_ours,
    )
    notes = []
    if cluster is not given:
        gain = slowest_Bps(chosen.roster, cluster) / slowest_Bps(job.roster(given.seats), given)
        order = " → ".join(cluster.names)
        notes.append(f"The ring goes {order}: its slowest link is {gain:.1f} times that of the file's order.")
    return msgspec.structs.replace(prediction, verdict=verdict_of(prediction), notes=notes)


def with_sync(job: Job, cluster: Cluster, *, leaves_out: bool) -> Job:
    """The job with the fastest strategy that can run and costs no more loss than it may, where it is ours to choose: on
    all hosts, or where some may be left out on those whose replicas lose no more.

    ddp where that is within what a prediction can err.
    """
    if job.spec.train.sync != "auto":
        return job
    plain = asking_for(job, DDP)
    if len(cluster.seats) == 1:
        return plain
    priced = [as_trained(asking_for(job, sync), cluster) for sync in (DDP, *candidates(job, cluster))]
    loss_budget = job.spec.train.loss_budget / 100
    able = [option for option in priced if not obstacle(option, cluster, loss_budget)]
    for option in priced if leaves_out and able else ():
        if option.roster.sync.kind == "diloco" and objection(option, loss_budget):
            fewer = of_fewer_replicas(asking_for(job, option.roster.sync), cluster, loss_budget)
            able += [one for one in fewer if not obstacle(one, cluster, loss_budget)]
    best = fastest(able) or priced[0]
    return plain if best.tokens_per_s < WORTH * priced[0].tokens_per_s else asking_for(job, best.roster.sync)


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
    return f"--shares {'equal' if best.is_equal else 'auto'}"


def why_left_out(prediction: Prediction) -> dict[str, str]:
    """Hosts without which a run that agrees as it was asked to is as fast or faster, and what each of them is told."""
    cluster, chosen = prediction.cluster, prediction.option(prediction.chosen)
    loss_budget = prediction.job.spec.train.loss_budget / 100 if prediction.is_sync_ours else None

    def may_run(option: Option) -> bool:
        return fits_in(option, cluster) if loss_budget is None else not obstacle(option, cluster, loss_budget)

    able = [option for option in prediction.options
            if option.roster.sync in (chosen.roster.sync, NO_SYNC) and may_run(option)]  # fmt: skip
    most = max(map(speed, able), default=0.0)
    near = [option for option in able if most < WORTH * option.tokens_per_s]
    best = min(near, key=lambda option: (len(option.roster.hosts), option.step_s), default=chosen)
    names = [name for name in cluster.names if name not in best.roster.hosts]
    if not names:
        return {}
    if too_large := what_does_not_fit(chosen, cluster):
        return dict.fromkeys(names, f"it does not fit: {too_large}")
    them = "it" if len(names) == 1 else "them"
    slower = "slower" if best.tokens_per_s > WORTH * chosen.tokens_per_s else "no faster"
    why = f"adding {listed(names)} makes this run {slower}"
    if loss_budget is not None and (dear := objection(chosen, loss_budget)):
        why = f"with {them} {chosen.roster.sync} {dear}"
    return dict.fromkeys(names, f"{why}: {rate(chosen.tokens_per_s)} with {them}, {rate(best.tokens_per_s)} without")


def what_if(prediction: Prediction) -> list[Option]:
    """The chosen option with one thing changed at a time: the links, the hosts, the batch, the strategy. What fits."""
    job, cluster = prediction.job, prediction.cluster
    roster = prediction.option(prediction.chosen).roster
    found: list[Option] = []
    if len(cluster.names) > 1:
        for name in ("2.5GbE", "10GbE"):
            wire = parse_link(name).wire
            found.append(price(job, with_wire(cluster, wire), roster, name=f"{name} between all hosts"))
        without = best_of(on_fewer(job, cluster), cluster)[:1]
        found += without or [on_one(job, cluster, by_speed(job, cluster)[0])]
        found += otherwise_divided(job, cluster) if job.spec.machine.shares != "auto" else []
    if roster.world_size > 1:
        found.append(as_trained(larger(job, 4), cluster, name="batch and accumulation × 4"))
        found += [option for option in prediction.options if option.roster.sync not in (roster.sync, NO_SYNC)]
    return [option for option in {option.name: option for option in found}.values() if fits_in(option, cluster)]


def _judged(option: Option, best: Option | None, cluster: Cluster, loss_budget: float) -> Option:
    because = obstacle(option, cluster, loss_budget)
    if best is None or option.name == best.name:
        return msgspec.structs.replace(option, rejected_because=because)
    slower = best.tokens_per_s / option.tokens_per_s
    if not because and slower < 1 and not option.is_exact:
        because = f"not exact, and only {1 / slower:.2f} times as fast as {best.name}"
    elif not because and slower >= WORTH:
        because = f"slower: {best.name} trains {slower:.2f} times as fast"
    elif not because:
        because = f"no faster than {best.name}"
    return msgspec.structs.replace(option, rejected_because=because)
