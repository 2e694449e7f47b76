"""Search for the best option of a job: the sync strategy, the hosts and their shares."""

from __future__ import annotations

import msgspec

from evener.core.base.units import format_seconds, join_names
from evener.core.cluster.link import parse_link
from evener.core.model.gradients import ProgramModel
from evener.core.model.shape import GPTShape
from evener.core.run.prediction import Cluster, Job, PlanOption, Prediction
from evener.core.run.roster import DDP, NO_SYNC
from evener.plan.choice.advice import faster_strategy, format_throughput, format_verdict
from evener.plan.choice.cluster import with_uniform_link
from evener.plan.choice.options import (
    MIN_GAIN,
    applicable_strategies,
    best_single_host_options,
    best_two_that_fit,
    explain_memory_shortage,
    fewer_host_options,
    fewer_replica_options,
    fits_in_memory,
    fitting_host_options,
    fitting_job,
    hosts_by_speed,
    job_with_larger_batch,
    job_with_sync,
    option_throughput,
    other_shares_options,
    pick_fastest,
    pick_simplest,
    predict_single_host,
    predict_training,
    required_gain,
    single_host_options,
    slowest_ring_link_Bps,
    why_not_as_requested,
    why_option_rejected,
    why_strategy_rejected,
    with_best_ring_order,
)
from evener.plan.cost.cost_model import predict_step


def predict(job: Job, cluster: Cluster, *, keep_order: bool = False, measured: PlanOption | None = None,
            may_leave_out: bool = True) -> Prediction:  # fmt: skip
    """Predict all options, recommend the fastest that can run, and say why the others were rejected.

    The chosen option is what `train` does with all these hosts, recommended or not. Hosts are put in the order of the
    fastest ring, unless `keep_order`. `measured` is an option as a run measured it; it replaces the predicted option of
    the same name. With `may_leave_out` and auto shares, --sync auto also considers strategies that exceed the loss
    budget on all hosts but not on fewer.
    """
    original, loss_budget, is_sync_ours = cluster, job.spec.train.loss_budget / 100, job.spec.train.sync == "auto"
    if not keep_order:
        cluster = with_best_ring_order(job, cluster)
    may_leave_out = may_leave_out and job.spec.machine.shares == "auto"
    asked = job
    job = choose_sync(job, cluster, may_leave_out=may_leave_out)
    chosen = predict_training(job, cluster)
    if measured is not None and measured.name == chosen.name:
        chosen = measured
    options = [chosen, *([measured] if measured is not None else [])]
    alone = list(single_host_options(job, cluster, is_sync_asked=not is_sync_ours).values())
    alone = alone if len(cluster.host_names) > 1 else []
    if alone:
        options += best_single_host_options(alone, cluster)
        options += best_two_that_fit(fewer_host_options(job, cluster), cluster)
        options += fitting_host_options(job, cluster)
        if is_sync_ours and may_leave_out and chosen.roster.sync.drifts and why_strategy_rejected(chosen, loss_budget):
            options += fewer_replica_options(job, cluster, loss_budget)
    if len(cluster.slots) > 1:
        options += other_shares_options(job, cluster)
        options += [predict_training(job_with_sync(job, sync), cluster, name=str(sync))
                    for sync in applicable_strategies(job) if sync != chosen.roster.sync]  # fmt: skip
    options = list({option.name: option for option in reversed(options)}.values())[::-1]
    fitting = [option for option in alone if fits_in_memory(option, cluster)]
    baseline = max(map(option_throughput, fitting), default=None) if alone else chosen.tokens_per_s
    if baseline:
        options = [msgspec.structs.replace(option, speedup_vs_best_host=option.tokens_per_s / baseline)
                   for option in options]  # fmt: skip

    def why_rejected(option: PlanOption) -> str:
        if not is_sync_ours and option.roster.sync == chosen.roster.sync:
            return why_not_as_requested(option, cluster)
        why = why_option_rejected(option, cluster, loss_budget)
        is_other = not is_sync_ours and chosen.is_built and option.roster.hosts == chosen.roster.hosts
        return why or (f"--sync {chosen.roster.sync} was asked for" if is_other else "")

    reasons = {option.name: why_rejected(option) for option in options}
    runnable = [option for option in options if not reasons[option.name]]
    best = pick_fastest(runnable)
    if best is not None:
        best = pick_simplest(runnable, best, chosen.name)
    options = [_with_rejection(option, best, reasons[option.name]) for option in options]
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
    if job.spec.model.recompute and not asked.spec.model.recompute:
        notes.append("With --recompute activations are computed again in backward: without, it would not fit.")
    if cluster is not original:
        gain = slowest_ring_link_Bps(chosen.roster, cluster) / slowest_ring_link_Bps(
            job.initial_roster(original.slots), original
        )
        order = " → ".join(cluster.host_names)
        notes.append(f"The ring order is {order}: its slowest link is {gain:.1f} times as fast as in the file's order.")
    return msgspec.structs.replace(prediction, verdict=format_verdict(prediction), notes=notes)


def choose_sync(job: Job, cluster: Cluster, *, may_leave_out: bool) -> Job:
    """For --sync auto, return the job with the fastest strategy that can run within the loss budget; else the job.

    Predict each strategy on all hosts. With `may_leave_out`, also predict DiLoCo variants that exceed the loss budget
    on as many of the fastest hosts as the budget allows. Choose ddp if the best one gains less than MIN_GAIN. Where
    some host cannot hold a replica, choose the fastest of `fitting_job`.
    """
    if job.spec.train.sync != "auto":
        return job
    plain, is_single = job_with_sync(job, DDP), len(cluster.slots) == 1
    options = [predict_training(plain, cluster)]
    options += [] if is_single else [
        predict_training(job_with_sync(job, sync), cluster) for sync in applicable_strategies(job)
    ]  # fmt: skip
    if not any(fits_in_memory(option, cluster) for option in options) and isinstance(job.shape, GPTShape):
        return fitting_job(job, cluster) or plain
    loss_budget = job.spec.train.loss_budget / 100
    runnable = [option for option in options if not why_option_rejected(option, cluster, loss_budget)]
    for option in options if may_leave_out and runnable else ():
        if option.roster.sync.drifts and why_strategy_rejected(option, loss_budget):
            subsets = fewer_replica_options(job_with_sync(job, option.roster.sync), cluster, loss_budget)
            runnable += [o for o in subsets if not why_option_rejected(o, cluster, loss_budget)]
    best = pick_fastest(runnable) or options[0]
    is_plain = is_single or best.tokens_per_s < MIN_GAIN * options[0].tokens_per_s
    return plain if is_plain else job_with_sync(job, best.roster.sync)


def format_run_prediction(prediction: Prediction) -> str:
    """Format the chosen option: `a step of 2.31 s, 3.5k tokens/s: compute 1.90 s, exposed communication 360 ms, …`."""
    option, unit = prediction.option(prediction.chosen), prediction.job.unit
    cost = option.straggler_cost.cost
    parts = (("compute", cost.compute_s), ("exposed communication", cost.exposed_sync_s), ("update", cost.optimizer_s))
    summary = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value)
    return f"a step of {format_seconds(option.step_s)}, {format_throughput(option.tokens_per_s, unit)}: {summary}"


def recommended_flags(prediction: Prediction) -> str:
    """Return the flags that turn the chosen option of `train` into the recommended one."""
    best, chosen = prediction.option(prediction.recommended).roster, prediction.option(prediction.chosen).roster
    if set(best.hosts) != set(chosen.hosts):
        are_explicit = prediction.job.spec.machine.has_explicit_shares
        return f"--hosts {','.join(best.hosts)}{' --shares auto' if are_explicit else ''}"
    if best.sync != chosen.sync:
        return f"--sync {best.sync}"
    return f"--shares {'equal' if best.has_equal_shares else 'auto'}"


def reasons_left_out(prediction: Prediction) -> dict[str, str]:
    """Return the hosts without which the chosen strategy trains at least as fast, each with the reason, and with the
    strategy that would make them help, if there is one.
    """
    cluster, chosen, unit = prediction.cluster, prediction.option(prediction.chosen), prediction.job.unit
    loss_budget = prediction.job.spec.train.loss_budget / 100 if prediction.is_sync_ours else None

    def may_run(option: PlanOption) -> bool:
        if option.roster.sync not in (chosen.roster.sync, NO_SYNC) and len(option.roster.hosts) > 1:
            return False
        if loss_budget is None:
            return fits_in_memory(option, cluster)
        return not why_option_rejected(option, cluster, loss_budget)

    runnable = [option for option in prediction.options if may_run(option)]

    def worth(option: PlanOption) -> float:
        return option.tokens_per_s / (required_gain(option) if prediction.is_sync_ours else 1.0)

    most = max(map(worth, runnable), default=0.0)
    near = [option for option in runnable if most < MIN_GAIN * worth(option)]
    best = min(near, key=lambda option: (len(option.roster.hosts), option.step_s), default=chosen)
    names = [name for name in cluster.host_names if name not in best.roster.hosts]
    if not names:
        return {}
    if too_large := explain_memory_shortage(chosen, cluster):
        return dict.fromkeys(names, f"it does not fit: {too_large}")
    them = "it" if len(names) == 1 else "them"
    slower = "slower" if best.tokens_per_s > MIN_GAIN * chosen.tokens_per_s else "no faster"
    why = f"adding {join_names(names)} makes this run {slower}"
    if loss_budget is not None and (reason := why_strategy_rejected(chosen, loss_budget)):
        why = f"{chosen.roster.sync} with {them}: {reason}"
    with_them, without = (format_throughput(option.tokens_per_s, unit) for option in (chosen, best))
    why += f"; {with_them} with {them}, {without} without"
    helpful = faster_strategy(prediction)
    if helpful is not None and {*names} <= {*helpful.roster.hosts}:
        why += f", {format_throughput(helpful.tokens_per_s, unit)} with {them} and --sync {helpful.roster.sync}"
    return dict.fromkeys(names, why)


def what_if_options(prediction: Prediction) -> list[PlanOption]:
    """Predict the chosen option with one change at a time: links, hosts, batch, strategy. Return those that fit."""
    job, cluster = prediction.job, prediction.cluster
    roster = prediction.option(prediction.chosen).roster
    options: list[PlanOption] = []
    if len(cluster.host_names) > 1:
        for name in ("2.5GbE", "10GbE"):
            wire = parse_link(name).wire
            options.append(
                predict_step(job, with_uniform_link(cluster, wire), roster, name=f"{name} between all hosts")
            )
        on_subset = best_two_that_fit(fewer_host_options(job, cluster), cluster)[:1]
        options += on_subset or [predict_single_host(job, cluster, hosts_by_speed(job, cluster)[0])]
        options += other_shares_options(job, cluster) if job.spec.machine.shares != "auto" else []
    if roster.world_size > 1 and not isinstance(job.shape, ProgramModel):  # which sets its own batch
        options.append(predict_training(job_with_larger_batch(job, 4), cluster, name="batch and accumulation × 4"))
    if roster.world_size > 1:
        options += [option for option in prediction.options if option.roster.sync not in (roster.sync, NO_SYNC)]
    return [
        option for option in {option.name: option for option in options}.values() if fits_in_memory(option, cluster)
    ]


def _with_rejection(option: PlanOption, best: PlanOption | None, reason: str) -> PlanOption:
    """Return the option with the reason for which it is not the best one; `reason` is why it cannot run, if so."""
    if best is None or option.name == best.name:
        return msgspec.structs.replace(option, rejected_because=reason)
    slower = best.tokens_per_s / option.tokens_per_s
    if not reason and slower < 1 and not option.is_exact:
        reason = f"not exact, and only {1 / slower:.2f} times as fast as {best.name}"
    elif not reason and slower >= MIN_GAIN:
        reason = f"slower: {best.name} trains {slower:.2f} times as fast"
    elif not reason:
        reason = f"no faster than {best.name}"
    return msgspec.structs.replace(option, rejected_because=reason)
