"""Search for the best option of a job: the sync strategy, the hosts and their shares."""

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
    """Predict all options, recommend the fastest that can run, and say why the others were rejected.

    The chosen option is what `train` does with all these hosts, recommended or not. Hosts are put in the order of the
    fastest ring, unless `keep_order`. `measured` is an option as a run measured it; it replaces the predicted option of
    the same name. With `leaves_out` some hosts may be left out, so strategies count that are fast enough on fewer.
    """
    original, loss_budget, is_sync_ours = cluster, job.spec.train.loss_budget / 100, job.spec.train.sync == "auto"
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
        if is_sync_ours and leaves_out and chosen.roster.sync.kind == "diloco" and objection(chosen, loss_budget):
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
    runnable = [option for option in options if not obstacle(option, cluster, loss_budget)]
    best = fastest(runnable)
    if best is not None:
        best = simplest(runnable, best, chosen.name)
    options = [_judged(option, best, cluster, loss_budget) for option in options]
    prediction = Prediction(
        job=job,
        cluster=cluster,
        verdict="",
        recommended=best.name if best else "",
        chosen=chosen.name,
        options=options,
        is_sync_ours=is_sync_ours,
    )
    notes = []
    if cluster is not original:
        gain = slowest_Bps(chosen.roster, cluster) / slowest_Bps(job.roster(original.seats), original)
        order = " → ".join(cluster.names)
        notes.append(f"The ring order is {order}: its slowest link is {gain:.1f} times as fast as in the file's order.")
    return msgspec.structs.replace(prediction, verdict=verdict_of(prediction), notes=notes)


def with_sync(job: Job, cluster: Cluster, *, leaves_out: bool) -> Job:
    """Return the job with its strategy chosen, for --sync auto: the fastest that can run within the loss budget.

    It is predicted on all hosts or, with `leaves_out`, on as many as the loss budget allows. ddp wins within the
    prediction error.
    """
    if job.spec.train.sync != "auto":
        return job
    plain = asking_for(job, DDP)
    if len(cluster.seats) == 1:
        return plain
    options = [as_trained(asking_for(job, sync), cluster) for sync in (DDP, *candidates(job, cluster))]
    loss_budget = job.spec.train.loss_budget / 100
    runnable = [option for option in options if not obstacle(option, cluster, loss_budget)]
    for option in options if leaves_out and runnable else ():
        if option.roster.sync.kind == "diloco" and objection(option, loss_budget):
            subsets = of_fewer_replicas(asking_for(job, option.roster.sync), cluster, loss_budget)
            runnable += [o for o in subsets if not obstacle(o, cluster, loss_budget)]
    best = fastest(runnable) or options[0]
    return plain if best.tokens_per_s < WORTH * options[0].tokens_per_s else asking_for(job, best.roster.sync)


def in_a_line(prediction: Prediction) -> str:
    """Format the chosen option: `a step of 2.31 s, 3.5k tokens/s: compute 1.90 s, exposed communication 360 ms, …`."""
    option = prediction.option(prediction.chosen)
    cost = option.slowest.cost
    parts = (("compute", cost.compute_s), ("exposed communication", cost.exposed_sync_s), ("update", cost.optimizer_s))
    summary = ", ".join(f"{name} {seconds(value)}" for name, value in parts if value)
    return f"a step of {seconds(option.step_s)}, {rate(option.tokens_per_s)}: {summary}"


def flags_of_recommended(prediction: Prediction) -> str:
    """Return the flags that turn the chosen option of `train` into the recommended one."""
    best, chosen = prediction.option(prediction.recommended).roster, prediction.option(prediction.chosen).roster
    if set(best.hosts) != set(chosen.hosts):
        are_explicit = prediction.job.spec.machine.are_shares_told
        return f"--hosts {','.join(best.hosts)}{' --shares auto' if are_explicit else ''}"
    if best.sync != chosen.sync:
        return f"--sync {best.sync}"
    return f"--shares {'equal' if best.is_equal else 'auto'}"


def why_left_out(prediction: Prediction) -> dict[str, str]:
    """Return the hosts without which the run, with its strategy, is at least as fast, and the reason for each."""
    cluster, chosen = prediction.cluster, prediction.option(prediction.chosen)
    loss_budget = prediction.job.spec.train.loss_budget / 100 if prediction.is_sync_ours else None

    def may_run(option: Option) -> bool:
        return fits_in(option, cluster) if loss_budget is None else not obstacle(option, cluster, loss_budget)

    runnable = [option for option in prediction.options
            if option.roster.sync in (chosen.roster.sync, NO_SYNC) and may_run(option)]  # fmt: skip
    max_speed = max(map(speed, runnable), default=0.0)
    near = [option for option in runnable if max_speed < WORTH * option.tokens_per_s]
    best = min(near, key=lambda option: (len(option.roster.hosts), option.step_s), default=chosen)
    names = [name for name in cluster.names if name not in best.roster.hosts]
    if not names:
        return {}
    if too_large := what_does_not_fit(chosen, cluster):
        return dict.fromkeys(names, f"it does not fit: {too_large}")
    them = "it" if len(names) == 1 else "them"
    slower = "slower" if best.tokens_per_s > WORTH * chosen.tokens_per_s else "no faster"
    why = f"adding {listed(names)} makes this run {slower}"
    if loss_budget is not None and (reason := objection(chosen, loss_budget)):
        why = f"with {them} {chosen.roster.sync} {reason}"
    return dict.fromkeys(names, f"{why}: {rate(chosen.tokens_per_s)} with {them}, {rate(best.tokens_per_s)} without")


def what_if(prediction: Prediction) -> list[Option]:
    """Predict the chosen option with one change at a time: links, hosts, batch, strategy. Return those that fit."""
    job, cluster = prediction.job, prediction.cluster
    roster = prediction.option(prediction.chosen).roster
    options: list[Option] = []
    if len(cluster.names) > 1:
        for name in ("2.5GbE", "10GbE"):
            wire = parse_link(name).wire
            options.append(price(job, with_wire(cluster, wire), roster, name=f"{name} between all hosts"))
        on_subset = best_of(on_fewer(job, cluster), cluster)[:1]
        options += on_subset or [on_one(job, cluster, by_speed(job, cluster)[0])]
        options += otherwise_divided(job, cluster) if job.spec.machine.shares != "auto" else []
    if roster.world_size > 1:
        options.append(as_trained(larger(job, 4), cluster, name="batch and accumulation × 4"))
        options += [option for option in prediction.options if option.roster.sync not in (roster.sync, NO_SYNC)]
    return [option for option in {option.name: option for option in options}.values() if fits_in(option, cluster)]


def _judged(option: Option, best: Option | None, cluster: Cluster, loss_budget: float) -> Option:
    """Return the option with the reason for which it is not the best one."""
    reason = obstacle(option, cluster, loss_budget)
    if best is None or option.name == best.name:
        return msgspec.structs.replace(option, rejected_because=reason)
    slower = best.tokens_per_s / option.tokens_per_s
    if not reason and slower < 1 and not option.is_exact:
        reason = f"not exact, and only {1 / slower:.2f} times as fast as {best.name}"
    elif not reason and slower >= WORTH:
        reason = f"slower: {best.name} trains {slower:.2f} times as fast"
    elif not reason:
        reason = f"no faster than {best.name}"
    return msgspec.structs.replace(option, rejected_because=reason)
