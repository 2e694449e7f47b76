"""How does a host leave a run that goes on, how does it come back, and how is another one added?"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from evener.core.errors import RunError
from evener.core.fleet import Fleet
from evener.core.plan import Plan, write_plan
from evener.core.rundir import RunDir
from evener.hosts.session import RemoteError, Session, connect, open_session
from evener.launch import fleet as launcher
from evener.launch.commands import joined_plan
from evener.launch.fleet import Progress
from evener.launch.mirror import GONE, State, host_failed
from evener.launch.ship import WORK_S
from evener.launch.tree import describe_data

LEAVE_S = 660.0  # to finish a step, which may take minutes, and save


def leave(rundir: RunDir, plan: Plan, name: str) -> State:
    """Take a host out of a run that goes on without it; its last state. HostError where it cannot be reached."""
    host, state = plan.host(name), dict[str, Any]()
    try:
        with contextlib.closing(open_session(name, host.host)) as session:
            why = "somebody asked for it"
            for item in session.stream("runs", "leave", run=host.folder(rundir), why=why, timeout_s=LEAVE_S):
                state = item or GONE
    except RemoteError as error:
        raise host_failed(error, plan.fleet) from None
    return state


def rejoin(rundir: RunDir, plan: Plan, name: str) -> None:
    """Let a host take part again that left the run, or went down; RunError where it does take part."""
    host = plan.host(name)
    try:
        with contextlib.closing(open_session(name, host.host)) as session:
            session.call("runs", "start_again", run=host.folder(rundir), timeout_s=WORK_S)
    except RemoteError as error:
        raise RunError(f"{name}: {error.message}", hint=f"evener runs; evener logs -f {rundir}") from None


def admit(rundir: RunDir, plan: Plan, fleet: Fleet, name: str, say: Progress) -> Plan:
    """Add a host of `fleet` to a run that goes on, which never had it; the plan from here on. UsageError, RunError or
    HostError, with nothing changed, where it can't take part.

    All hosts of the run learn of it before it begins, so all must be reached: one that did not know of it could not be
    in a world with it.
    """
    hosts = {host.name: host.host for host in plan.hosts} | {name: fleet.hosts[name]}
    whole = msgspec.structs.replace(fleet, hosts=hosts)
    assert plan.spec is not None
    with connect(whole) as (sessions, errors):
        for failed in errors.values():
            raise failed
        first, mine = plan.hosts[0], sessions[name]
        # The run's own port is taken on the others: what is looked at is the way to another one.
        another = _free_port(sessions[first.name], first.address, plan.port + 1)
        prepared = launcher.prepare(whole, sessions, errors, rundir.path.name, plan.id, port=another,
                                    machine=plan.spec.machine)  # fmt: skip
        place = next(place for place in prepared.places if place.name == name)
        if _free_port(mine, place.address, plan.port) != plan.port:
            raise RunError(f"{name}: port {plan.port}, on which the run's agents hear each other, is taken",
                           hint=f"evener doctor{fleet.flag} names who holds it")  # fmt: skip
        tree = describe_data(plan.spec.data.data)
        joined = joined_plan(plan, place, f"{place.workdir}/trees/{tree.digest}")
        alone = msgspec.structs.replace(joined, hosts=[joined.host(name)])
        launcher.deliver([tree], alone, {name: mine}, say)
        for host in joined.hosts[:-1]:
            files = launcher.files_of_members(joined, host)
            try:
                sessions[host.name].call("runs", "put", run=host.folder(rundir), files=files)
            except RemoteError as error:
                raise host_failed(error, plan.fleet) from None
        write_plan(rundir, joined)
        if (why := launcher.start_host(rundir, joined, name, mine)) is not None:
            write_plan(rundir, plan)
            raise RunError(f"{name} did not start: {why}", hint=f"evener doctor{fleet.flag} looks closer")
    return joined


def _free_port(session: Session, address: str, wanted: int) -> int | None:
    port: int | None = session.call("runs", "free_port", address=address, wanted=wanted, low=wanted + 1,
                                    high=wanted + 1000)  # fmt: skip
    return port
