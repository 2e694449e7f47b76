"""Plan a training on a fleet, and start it: the steps that `train` and the benches share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evener.core.errors import HostError
    from evener.core.fleet import Fleet
    from evener.core.plan import Plan
    from evener.core.resolve import Resolved
    from evener.hosts.session import Sessions
    from evener.launch.fleet import Prepared
    from evener.launch.tree import Tree


def planned(fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], resolved: Resolved,
            before: Plan | None = None, *,
            as_asked: bool = False) -> tuple[Plan, list[Tree], Prepared]:  # fmt: skip
    """Plan a training on a fleet; return (plan, trees to send, preflight), and print the prediction and warnings.

    `previous_plan` is the plan of a run that is resumed. `as_requested`: use all hosts, and recommend nothing else.
    """
    import msgspec

    from evener.cli import fleets
    from evener.core.fleet import only
    from evener.launch import fleet as launcher
    from evener.plan.question import ring_order

    name, to_plan = fleets.rundir_of(resolved).path.name, fleets.as_it_agrees(resolved)
    # A resumed run keeps the order of its ranks.
    order = [host.name for host in before.hosts] if before else ring_order(fleet, resolved.job)
    hosts = fleets.in_order(fleet, order)
    machine = resolved.spec.machine
    prepared = launcher.prepare(hosts, sessions, errors, name, before.id if before else None, machine=machine)
    roster, seats = prepared.roster(to_plan), prepared.seats(machine)
    if before is None:
        prediction = fleets.predicted(fleet, to_plan, seats, as_asked=as_asked)
    else:
        prediction = fleets.predicted_again(hosts, to_plan, seats, before)
    if prediction is not None:
        roster = prediction.option(prediction.chosen).roster
    roster = fleets.as_before(roster, resolved)
    if prediction is not None and prediction.left_out:  # the first host, and so the port, may change
        hosts = fleets.in_order(only(hosts, ",".join(roster.hosts)), roster.hosts)
        remaining = {host: sessions[host] for host in hosts.hosts}
        held = msgspec.structs.replace(machine, private=False)  # the preflight has checked this already
        prepared = launcher.prepare(hosts, remaining, errors, name, prepared.id, machine=held)
    fleets.tell_warnings(prepared)
    plan, trees = launcher.plan_training(prepared, resolved, roster, resume=resolved.resume is not None)
    return msgspec.structs.replace(plan, prediction=prediction), trees, prepared


def begin(plan: Plan, trees: list[Tree], prepared: Prepared, sessions: Sessions, resolved: Resolved) -> None:
    """Send the files that the hosts lack, and start all ranks."""
    from evener.cli import fleets
    from evener.launch import carry
    from evener.launch import fleet as launcher

    rundir = fleets.rundir_of(resolved)
    members = {host.name: sessions[host.name] for host in plan.hosts}
    launcher.deliver(trees, plan, members, fleets.say)
    if resolved.resume is not None:
        carry.restore(rundir, plan, members, resolved.resume.step, fleets.say)
    launcher.start(rundir, plan, members)
    launcher.note_findings(rundir, plan, prepared)
