"""How is a training planned and started on a fleet?"""

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
    """(plan, what the hosts must have for it, what was found of them) of a training, with what is said of it before.

    `before` is the plan of a run that is resumed. `as_asked`: all hosts take part, and nobody is told of a better way.
    """
    import msgspec

    from evener.cli import fleets
    from evener.core.fleet import only
    from evener.launch import fleet as launcher
    from evener.plan.question import ring_order

    name, to_plan = fleets.rundir_of(resolved).path.name, fleets.as_it_agrees(resolved)
    # Of a run that is resumed the ranks stay where they were.
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
    if prediction is not None and prediction.left_out:  # another host may be the first now, with another port
        hosts = fleets.in_order(only(hosts, ",".join(roster.hosts)), roster.hosts)
        mine = {host: sessions[host] for host in hosts.hosts}
        held = msgspec.structs.replace(machine, private=False)  # the others were looked at, and are let in as before
        prepared = launcher.prepare(hosts, mine, errors, name, prepared.id, machine=held)
    fleets.tell_warnings(prepared)
    plan, trees = launcher.plan_training(prepared, resolved, roster, resume=resolved.resume is not None)
    return msgspec.structs.replace(plan, prediction=prediction), trees, prepared


def begin(plan: Plan, trees: list[Tree], prepared: Prepared, sessions: Sessions, resolved: Resolved) -> None:
    """Send what the hosts lack, and start all ranks."""
    from evener.cli import fleets
    from evener.launch import carry
    from evener.launch import fleet as launcher

    rundir = fleets.rundir_of(resolved)
    mine = {host.name: sessions[host.name] for host in plan.hosts}
    launcher.deliver(trees, plan, mine, fleets.say)
    if resolved.resume is not None:
        carry.restore(rundir, plan, mine, resolved.resume.step, fleets.say)
    launcher.start(rundir, plan, mine)
    launcher.note_findings(rundir, plan, prepared)
