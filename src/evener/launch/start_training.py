"""Plan a training: choose its hosts, their order and the roster, from predictions of its step time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.shell import quote_word
from evener.core.base.units import format_bytes
from evener.core.cluster.fleet_file import (
    DEFAULT_FLEET,
    Fleet,
    fleet_path,
    load_fleet,
    local_fleet_path,
    select_hosts,
)
from evener.core.model.pretrained import PretrainedModel
from evener.core.run.prediction import Job, Prediction
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import NO_SYNC, RankSlot, why_not_hsdp
from evener.core.run.run_plan import read_plan_if_present
from evener.core.run.rundir import RunDir
from evener.launch.launcher import Notify
from evener.launch.prepare_hosts import ConnectedHosts, prepare_hosts
from evener.launch.resume import ResumedRun
from evener.launch.start_run import PlannedRun, plan_training
from evener.plan.choice.advice import (
    advise_on_loss_budget,
    advise_on_memory,
    advise_on_sync,
    format_loss_penalty,
)
from evener.plan.choice.options import explain_memory_shortage, hosts_short_of_memory
from evener.plan.choice.plan_request import host_ring_order, predict_launch
from evener.plan.choice.search import format_run_prediction, recommended_flags
from evener.plan.cost.sync_traffic import GRADIENT_BYTES


def choose_fleet(given: str | None, names: str | None, resumed: ResumedRun | None) -> Fleet | None:
    """Return the hosts to train on; None: this machine alone.

    They are those of the given fleet file; without one, those of the resumed run's previous start, or, for a new run,
    those of fleet.toml. `names` selects some of them.
    """
    if given is None and resumed is not None:
        fleet = resumed.fleet()
    else:
        path = fleet_path(given)
        fleet = None if path is None else load_fleet(path)
    if fleet is None and names is not None:
        raise UsageError("--hosts names hosts of a fleet, but there is no fleet file", hint="--fleet FILE")
    return None if fleet is None else select_hosts(fleet, names)


def check_out(rundir: RunDir) -> None:
    """Raise UsageError if a run on a fleet was started in this directory."""
    existing = read_plan_if_present(rundir)
    if existing is not None and not existing.is_local_run:
        # Its hosts may have newer records and checkpoints than its directory.
        raise UsageError(
            f"--out {rundir}: already contains a run",
            hint=f"evener train --resume {quote_word(rundir)}, or another --out",
        )


def plan_on_hosts(
    hosts: ConnectedHosts,
    resolved: ResolvedRun,
    notify: Notify,
    *,
    resumed: ResumedRun | None = None,
    as_requested: bool = False,
) -> PlannedRun:
    """Plan a training on these hosts; report the prediction, the hosts left out and a better option if there is one.

    `as_requested`: leave out no host, and recommend nothing else.
    """
    rundir, machine = resolved.rundir, resolved.spec.machine
    previous_plan = resumed.plan if resumed is not None else None
    to_plan = resumed.with_previous_sync(resolved) if resumed is not None else resolved
    if hosts.is_local_run:
        hosts = hosts.with_ranks(machine.ranks)
    else:
        # A resumed run keeps the order of its ranks.
        order = (
            [host.name for host in previous_plan.hosts] if previous_plan else host_ring_order(hosts.fleet, to_plan.job)
        )
        hosts = hosts.in_order(order)
    prepared = prepare_hosts(
        hosts, rundir, machine, run_id=previous_plan.id if previous_plan else None, packages=resolved.packages
    )
    roster, slots = prepared.initial_roster(to_plan), prepared.rank_slots(machine)
    prediction = None
    if (fleet := _measured_local_fleet(slots[0].host) if hosts.is_local_run else hosts.fleet) is not None:
        if resumed is not None and not hosts.is_local_run:
            prediction = resumed.prediction(fleet, to_plan, slots)
        kept = to_plan.job if to_plan.spec.train.sync != resolved.spec.train.sync else None
        prediction = prediction or _predict(fleet, resolved, slots, notify, as_requested=as_requested, resumed=kept)
    if prediction is not None:
        roster = prediction.option(prediction.chosen).roster
        resolved = resolved.with_recompute(prediction.job.spec.model.recompute)
    if why := why_not_hsdp(roster):
        raise UsageError(why, hint="--sync fsdp")
    if resumed is not None:
        roster = resumed.with_previous_buckets(roster)
    if prediction is not None and prediction.left_out:  # the first host, and so the port, may change
        checked = msgspec.structs.replace(machine, private=False)  # the preflight has checked this already
        prepared = prepare_hosts(hosts.only(roster.hosts), rundir, checked, run_id=prepared.id)
    return plan_training(prepared, resolved, roster, prediction)


def _measured_local_fleet(name: str) -> Fleet | None:
    """Return this machine alone, called `name`, with its rates in fleet.toml or in the file of --on local.

    None if neither has any.
    """
    for path in (Path(DEFAULT_FLEET), local_fleet_path()):
        try:
            fleet = load_fleet(path)
        except EvenerError:  # this run does not need the file
            continue
        for known_as, host in fleet.hosts.items():
            if host.is_local and known_as in fleet.rates:
                rates = {name: fleet.rates[known_as]}
                return msgspec.structs.replace(fleet, hosts={name: host}, links={}, rates=rates)
    return None


def _predict(
    fleet: Fleet,
    resolved: ResolvedRun,
    slots: Sequence[RankSlot],
    notify: Notify,
    *,
    as_requested: bool,
    resumed: Job | None,
) -> Prediction | None:
    """Predict a run on these rank slots, and report it. Return None where too little was measured.

    Raise UsageError if a host's memory is smaller than what its ranks need, unless `as_requested`; where it is hardly
    larger, only warn. Nothing is recommended in place of the strategy of `resumed`, which --sync auto has measured or
    will measure.
    """
    is_sync_auto = resolved.spec.train.sync == "auto"
    try:
        prediction = predict_launch(fleet, resolved.job, slots, may_leave_out=not as_requested, resumed=resumed)
    except UsageError as unknown:  # errors that prevent the run itself are reported when it starts
        notify(f"no prediction: {unknown}" + (f"; {unknown.hint}" if unknown.hint else ""))
        if isinstance(resolved.shape, PretrainedModel) and len(slots) > 1:
            num_params = resolved.shape.num_params()
            notify(f"a step exchanges the gradients of {num_params:,} trained parameters: "
                   f"{format_bytes(GRADIENT_BYTES * num_params)} in fp32")  # fmt: skip
        if is_sync_auto:
            notify("--sync auto takes ddp when nothing can be predicted")
        return None
    for why in dict.fromkeys(prediction.left_out.values()):
        names = ", ".join(name for name, of_host in prediction.left_out.items() if of_host == why)
        notify(f"left out: {names}: {why}\nhint:  --shares equal includes all hosts")
    notify(f"predicted: {format_run_prediction(prediction)}")
    chosen = prediction.option(prediction.chosen)
    if resumed is not None:
        notify(f"--sync auto goes on with {chosen.roster.sync}, as before")
        return prediction
    hosts, needs = prediction.cluster.hosts, hosts_short_of_memory(chosen, prediction.cluster)
    if not as_requested and any(need > (hosts[name].memory_bytes or math.inf) for name, need in needs.items()):
        shortage = explain_memory_shortage(chosen, prediction.cluster)
        has_ranks_that_share = len(chosen.roster.members) > len(chosen.roster.hosts)
        if isinstance(resolved.shape, PretrainedModel) and has_ranks_that_share:
            notify(f"warning: {shortage}; less if its ranks map the same frozen weights from the file")
        else:
            hint = advise_on_memory(prediction)[0].text
            raise UsageError(f"--sync {chosen.roster.sync} does not fit: {shortage}", hint=hint)
    if is_sync_auto and chosen.roster.sync != NO_SYNC:
        notify(f"--sync auto: {chosen.roster.sync} is the best choice by prediction{format_loss_penalty(chosen)}")
        if isinstance(resolved.shape, PretrainedModel):
            notify("--sync auto takes an exact strategy: nobody measured what the others cost a fine-tuning in loss")
    if prediction.job.spec.model.recompute and not resolved.spec.model.recompute:
        notify("--sync auto takes --recompute, too: without, it would not fit into the memory")
    if not as_requested and prediction.recommended != prediction.chosen:
        notify(f"warning: {prediction.verdict}")
        if prediction.recommended:
            notify(f"hint:  {recommended_flags(prediction)}")
    advices = advise_on_loss_budget(prediction) if is_sync_auto else []
    for advice in advices if as_requested else [*advise_on_sync(prediction), *advices]:
        notify(f"hint:  {advice.text}")
    return prediction
