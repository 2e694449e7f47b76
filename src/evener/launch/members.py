"""How does a host leave a run that goes on, how does it come back, and how is another one added?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.corpus import load_corpus
from evener.core.errors import HostError, RunError, UsageError
from evener.core.fleet import Fleet
from evener.core.plan import Plan, read_plan, write_plan
from evener.core.rundir import RunDir
from evener.hosts.session import RemoteError, Session, Sessions, connect, open_session
from evener.launch import fleet as launcher
from evener.launch.carry import alone
from evener.launch.commands import Place, joined_plan, told_anew
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


def admit(rundir: RunDir, fleet: Fleet, name: str, say: Progress) -> Plan:
    """Add a host of `fleet` to a run that goes on, which never had it; the plan from here on. UsageError, RunError or
    HostError where it can't take part: the run then goes on as it was.

    The run's hosts learn of it before it begins. Those that are out of reach hear of it from the others, before they
    could be in a world with it.
    """
    with _alone(rundir):
        plan = read_plan(rundir)
        spec, hosts = plan.spec, {host.name: host.host for host in plan.hosts} | {name: fleet.hosts[name]}
        whole = msgspec.structs.replace(fleet, hosts=hosts)
        if spec is None or name in {host.name for host in plan.hosts}:
            raise UsageError(f"{rundir} has a host {name} already", hint=f"evener runs; evener logs -f {rundir}")
        with connect(whole) as (sessions, errors):
            if name in errors or len(sessions) < 2:  # it, or all others
                raise errors.get(name) or next(iter(errors.values()))
            for away in errors:
                say(f"{away} is out of reach: it hears of {name} from the others")
            place = _looked_at(rundir, plan, whole, sessions, name)
            _check_corpus(rundir, spec.data.data)
            tree = describe_data(spec.data.data)
            joined = joined_plan(plan, place, f"{place.workdir}/trees/{tree.digest}", _edition())
            part = msgspec.structs.replace(joined, hosts=[joined.host(name)])
            launcher.deliver([tree], part, {name: sessions[name]}, say)
            try:
                _tell(rundir, joined, sessions, name)
                write_plan(rundir, joined)
                if (why := launcher.start_host(rundir, joined, name, sessions[name])) is not None:
                    raise RunError(f"{name} did not start: {why}", hint=f"evener doctor{fleet.flag} looks closer")
            except BaseException:
                ended = launcher.stop(rundir, part, now=True)[name]  # it may have begun, and the word of it been lost
                if not isinstance(ended, HostError):
                    without = _without(joined, plan)
                    write_plan(rundir, without)
                    with contextlib.suppress(HostError):
                        _tell(rundir, without, sessions, name)
                raise
    return joined


@contextlib.contextmanager
def _alone(rundir: RunDir) -> Iterator[None]:
    """Nobody else adds a host to it meanwhile; RunError where somebody does."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(alone(rundir, None, "add.lock"))
        except BlockingIOError:
            hint = "when that is done, again"
            raise RunError(f"{rundir}: another terminal is adding a host to it", hint=hint) from None
        yield


def _looked_at(rundir: RunDir, plan: Plan, whole: Fleet, sessions: Sessions, name: str) -> Place:
    """The newcomer, where it and the others reach each other as the run needs it."""
    assert plan.spec is not None
    there = [host for host in plan.hosts if host.name in sessions]
    reached = msgspec.structs.replace(whole, hosts={name: whole.hosts[name] for name in sessions})
    # The run's own port is taken on the others: what is looked at is the way to another one.
    another = _free_port(sessions[there[0].name], there[0].address, plan.port + 1)
    machine = plan.spec.machine
    prepared = launcher.prepare(reached, sessions, {}, rundir.path.name, plan.id, port=another, machine=machine)
    places = {place.name: place for place in prepared.places}
    for host in there:
        found = places[host.name].address
        if found != host.address:
            hint = f'interface = "{host.interface}" under [hosts.{host.name}], if {name} is in that network too'
            raise RunError(f"{name} reaches {host.name} at {found}, and the run is at {host.address}", hint=hint)
    if _free_port(sessions[name], places[name].address, plan.port) != plan.port:
        raise RunError(f"{name}: port {plan.port}, on which the run's agents hear each other, is taken",
                       hint=f"evener doctor{whole.flag} names who holds it")  # fmt: skip
    return places[name]


def _check_corpus(rundir: RunDir, folder: str) -> None:
    """UsageError where the folder holds another text than that on which the run trains."""
    trained = rundir.manifest().corpus if rundir.is_run() else None
    if trained is not None and load_corpus(Path(folder)).content_hash != trained.content_hash:
        raise UsageError(
            f"{folder}: not the corpus on which {rundir} trains", hint="from the folder where it was begun"
        )


def _tell(rundir: RunDir, plan: Plan, sessions: Sessions, newcomer: str) -> None:
    """The run's hosts that can be reached hear who may take part."""
    for host in plan.hosts:
        if host.name != newcomer and host.name in sessions:
            files = launcher.files_of_members(plan, host)
            try:
                sessions[host.name].call("runs", "put", run=host.folder(rundir), files=files)
            except RemoteError as error:
                raise host_failed(error, plan.fleet) from None


def _without(joined: Plan, plan: Plan) -> Plan:
    """The plan as it was before a host joined, for agents that may have heard of it."""
    agents = [host.agent for host in plan.hosts if host.agent is not None]
    known = msgspec.structs.replace(plan, hosts=joined.hosts[: len(plan.hosts)])
    return msgspec.structs.replace(told_anew(known, agents[0].hosts, _edition()), roster=plan.roster)


def _edition() -> int:
    """Higher than any before, also one of which nothing was written down here."""
    return time.time_ns() // 1_000_000


def _free_port(session: Session, address: str, wanted: int) -> int | None:
    low = min(wanted + 1, 64_000)
    port: int | None = session.call("runs", "free_port", address=address, wanted=wanted, low=low, high=low + 1000)
    return port
