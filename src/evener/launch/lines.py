"""Run one of evener's own torch programs on this machine or on every host of a fleet, and yield its output lines.

    for line in local_program_lines(2, "evener.worker.collectives", "{…}"): …
    for host, line in fleet_program_lines(prepared, sessions, "evener.worker.collectives", {"a": "{…}"}): …

The program prints lines of JSON; the other output of its ranks is shown only when it fails.
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
    """Yield the JSON lines that `num_ranks` processes of a module print on this machine, as they are printed."""
    with this_machine_connected() as sessions, _folder() as folder:
        prepared = prepare_here(sessions, RunDir(folder), ranks=num_ranks, threads=threads)
        args = {place.name: arg for place in prepared.places}
        with contextlib.closing(_lines(prepared, sessions, RunDir(folder), module, args)) as lines:
            for _, line in lines:
                yield line


def told(line: str) -> Iterator[str]:
    """Yield the line if it is JSON of the program; raise the EvenerError that it reports."""
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
    """Yield (host, line) for the JSON lines that a module prints on every host, as they arrive; `args` is by host.

    Runs `num_ranks` processes on every host, or as many as its table in the fleet file says. When the generator is
    closed, the program has been stopped and its folders removed.
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
    """Yield the path of a temporary run directory."""
    with tempfile.TemporaryDirectory(prefix="evener-probe-") as folder:
        yield Path(folder) / "run"


def _lines(
    prepared: Prepared, sessions: Sessions, rundir: RunDir, module: str, args: Mapping[str, str]
) -> Generator[tuple[str, str]]:
    plan = _plan(prepared, module, args)
    attach_lock = fleet.start(rundir, plan, sessions, attached=plan.is_here)
    try:
        logs = {
            (host.name, rank): follow_lines(rundir.log_path(host.name, rank))
            for host in plan.hosts
            for rank in range(host.first_rank, host.first_rank + host.num_ranks)
        }

        def new_lines() -> Generator[tuple[str, str]]:
            for (name, _), follower in logs.items():
                for line in next(follower):  # TIME STREAM TEXT
                    for text in told(line.decode(errors="replace").partition(" ")[2][2:]):
                        yield name, text

        with attach_lock, Mirror(rundir, plan) as mirror:
            done = False
            while not done:
                done = mirror.is_done
                yield from new_lines()
                host_errors = [host.error for host in mirror.hosts.values() if host.error is not None]
                if host_errors:
                    raise host_errors[0]  # a measurement that cannot be read is useless
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
    """Plan a program of evener's own, without a project."""
    program = ["-m", module]
    plan = script_plan(prepared.id, prepared.places, prepared.port, program, {}, project=None)
    hosts = []
    for place, planned in zip(prepared.places, plan.hosts, strict=True):
        host = msgspec.structs.replace(planned, code=None, cwd=place.cwd or place.run)
        if host.is_here and plan.world_size == 1:
            host = alone(host, program)
        hosts.append(msgspec.structs.replace(host, argv=[*host.argv, args[host.name]]))
    return msgspec.structs.replace(plan, kind="probe", hosts=hosts, fleet_file=prepared.fleet_file)
