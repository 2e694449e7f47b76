"""Plan a training on a fleet, and start it: the steps that `train` and the benches share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evener.core.base.errors import HostError
    from evener.core.cluster.fleet_file import Fleet
    from evener.core.run.resolve import ResolvedRun
    from evener.core.run.run_plan import Plan
    from evener.launch.launcher import PreparedFleet
    from evener.ssh.session import Sessions
    from evener.transfer.file_tree import FileTree


def plan_fleet_training(fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], resolved: ResolvedRun,
            previous_plan: Plan | None = None, *,
            as_requested: bool = False) -> tuple[Plan, list[FileTree], PreparedFleet]:  # fmt: skip
    """Plan a training on a fleet; return (plan, trees to send, preflight), and print the prediction and warnings.

    `previous_plan` is the plan of a run that is resumed. `as_requested`: use all hosts, and recommend nothing else.
    """
    import msgspec

    from evener.cli import start_run
    from evener.core.cluster.fleet_file import select_hosts
    from evener.launch import launcher
    from evener.plan.choice.plan_request import host_ring_order

    name, to_plan = start_run.rundir_of(resolved).path.name, start_run.with_previous_sync(resolved)
    # A resumed run keeps the order of its ranks.
    order = [host.name for host in previous_plan.hosts] if previous_plan else host_ring_order(fleet, resolved.job)
    hosts = start_run.reorder_hosts(fleet, order)
    machine = resolved.spec.machine
    prepared = launcher.prepare_fleet(
        hosts, sessions, errors, name, previous_plan.id if previous_plan else None, machine=machine
    )
    roster, seats = prepared.initial_roster(to_plan), prepared.rank_slots(machine)
    if previous_plan is None:
        prediction = start_run.predict_run(fleet, to_plan, seats, as_requested=as_requested)
    else:
        prediction = start_run.predict_resumed_run(hosts, to_plan, seats, previous_plan)
    if prediction is not None:
        roster = prediction.option(prediction.chosen).roster
    roster = start_run.with_previous_buckets(roster, resolved)
    if prediction is not None and prediction.left_out:  # the first host, and so the port, may change
        hosts = start_run.reorder_hosts(select_hosts(hosts, ",".join(roster.hosts)), roster.hosts)
        remaining = {host: sessions[host] for host in hosts.hosts}
        held = msgspec.structs.replace(machine, private=False)  # the preflight has checked this already
        prepared = launcher.prepare_fleet(hosts, remaining, errors, name, prepared.id, machine=held)
    start_run.print_warnings(prepared)
    plan, trees = launcher.plan_training(prepared, resolved, roster, resume=resolved.resume is not None)
    return msgspec.structs.replace(plan, prediction=prediction), trees, prepared


def start_fleet_training(
    plan: Plan, trees: list[FileTree], prepared: PreparedFleet, sessions: Sessions, resolved: ResolvedRun
) -> None:
    """Send the files that the hosts lack, and start all ranks."""
    from evener.cli import start_run
    from evener.launch import launcher
    from evener.transfer import checkpoint_transfer

    rundir = start_run.rundir_of(resolved)
    members = {host.name: sessions[host.name] for host in plan.hosts}
    launcher.stage_files(trees, plan, members, start_run.print_status)
    if resolved.resume is not None:
        checkpoint_transfer.restore_to_hosts(rundir, plan, members, resolved.resume.step, start_run.print_status)
    launcher.start(rundir, plan, members)
    launcher.record_preflight_warnings(rundir, plan, prepared)
