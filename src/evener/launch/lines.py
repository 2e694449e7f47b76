"""What does a program of ours say that needs torch: on this machine, or on every host of a fleet?

    for rank, line in lines_here(2, "evener.worker.collectives", "{…}"): …
    for rank, line in lines_of_fleet(prepared, sessions, "evener.worker.collectives", "{…}"): …

It prints lines of JSON; whatever else its ranks say is shown when it fails.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import msgspec

from evener.core import errors
from evener.core.decoding import from_json
from evener.core.errors import EvenerError, HostError
from evener.core.files import follow_lines
from evener.core.plan import Plan
from evener.core.rundir import RunDir
from evener.hosts.session import RemoteError, Sessions
from evener.launch import fleet
from evener.launch.commands import alone, script_plan
from evener.launch.failures import first_failure
from evener.launch.fleet import Prepared
from evener.launch.here import prepare_here, this_machine_connected
from evener.launch.mirror import Mirror
from evener.launch.tool import ERROR

POLL_S = 0.05


def lines_here(num_ranks: int, module: str, arg: str, *, threads: int | None = None) -> Generator[str]:
    """Lines of JSON that `num_ranks` processes of a module print on this machine, as they come."""
    with this_machine_connected() as sessions, _folder() as folder:
        prepared = prepare_here(sessions, RunDir(folder), ranks=num_ranks, threads=threads)
        args = {place.name: arg for place in prepared.places}
        with contextlib.closing(_lines(prepared, sessions, RunDir(folder), module, args)) as lines:
            for _, line in lines:
                yield line


def told(line: str) -> Iterator[str]:
    """The line, if it is one of the program's own; the EvenerError that it tells is raised."""
    if line.startswith(ERROR):
        error = from_json(line, dict[str, str])
        kind = getattr(errors, error["kind"])
        assert issubclass(kind, EvenerError)
        raise kind(error["error"], hint=error["hint"])
    if line.startswith("{"):
        yield line


def lines_of_fleet(
    prepared: Prepared, sessions: Sessions, module: str, args: Mapping[str, str], *, num_ranks: int | None = None
) -> Generator[tuple[str, str]]:
    """(host, line) of the lines of JSON that a module prints on every host, as they come home; `args` is each host's.

    `num_ranks` processes on every host, or as many as its table in the fleet says. When it is left, nothing of the
    program runs any more, and its folders are gone.
    """
    if num_ranks is not None:
        places = [
            msgspec.structs.replace(place, host=msgspec.structs.replace(place.host, ranks=num_ranks))
            for place in prepared.places
        ]
        prepared = msgspec.structs.replace(prepared, places=places)
    with _folder() as folder:
        yield from _lines(prepared, sessions, RunDir(folder), module, args)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A place for a run directory that nobody needs afterwards."""
    with tempfile.TemporaryDirectory(prefix="evener-probe-") as folder:
        yield Path(folder) / "run"


def _lines(
    prepared: Prepared, sessions: Sessions, rundir: RunDir, module: str, args: Mapping[str, str]
) -> Generator[tuple[str, str]]:
    plan = _plan(prepared, module, args)
    hold = fleet.start(rundir, plan, sessions, attached=plan.is_here)
    try:
        logs = {
            (host.name, rank): follow_lines(rundir.log_path(host.name, rank))
            for host in plan.hosts
            for rank in range(host.first_rank, host.first_rank + host.num_ranks)
        }

        def news() -> Generator[tuple[str, str]]:
            for (name, _), follower in logs.items():
                for line in next(follower):  # TIME o text
                    for text in told(line.decode(errors="replace").partition(" ")[2][2:]):
                        yield name, text

        with hold, Mirror(rundir, plan) as mirror:
            done = False
            while not done:
                done = mirror.is_done
                yield from news()
                lost = [host.error for host in mirror.hosts.values() if host.error is not None]
                if lost:
                    raise lost[0]  # what nobody sees need not be measured
                if not done:
                    mirror.wait(POLL_S)
            states = {name: host.state or {} for name, host in mirror.hosts.items()}
        failure = first_failure(rundir, plan, states)
        if failure is not None:
            raise failure.error(rundir, plan)
    finally:
        fleet.stop(rundir, plan, now=True)
        for host in plan.hosts:
            if host.run is not None:
                with contextlib.suppress(RemoteError, HostError):
                    sessions[host.name].call("files", "remove", place=host.run)


def _plan(prepared: Prepared, module: str, args: Mapping[str, str]) -> Plan:
    """The launcher's own plan for a program, without a project."""
    program = ["-m", module]
    plan = script_plan(prepared.id, prepared.places, prepared.port, program, {}, project=None)
    hosts = []
    for place, planned in zip(prepared.places, plan.hosts, strict=True):
        host = msgspec.structs.replace(planned, code=None, cwd=place.cwd or place.run)
        if host.is_here and plan.world_size == 1:
            host = alone(host, program)
        hosts.append(msgspec.structs.replace(host, argv=[*host.argv, args[host.name]]))
    return msgspec.structs.replace(plan, kind="probe", hosts=hosts, fleet_file=prepared.fleet_file)
