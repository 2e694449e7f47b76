"""What does a program of ours say that needs torch: on this machine, or on every host of a fleet?

    for rank, line in lines_here(2, "evener.worker.collectives", "{…}"): …
    for rank, line in lines_of_fleet(prepared, sessions, "evener.worker.collectives", "{…}"): …

It prints lines of JSON; whatever else its ranks say is shown when it fails.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import msgspec

from evener.core import errors
from evener.core.errors import EvenerError, HostError, RunError
from evener.core.files import follow_lines
from evener.core.machine import usable_cores
from evener.core.plan import Plan
from evener.core.rundir import RunDir
from evener.hosts.session import RemoteError, Sessions
from evener.launch import fleet
from evener.launch.commands import script_plan
from evener.launch.failures import first_failure
from evener.launch.fleet import Prepared
from evener.launch.local import session
from evener.launch.mirror import Mirror
from evener.launch.tool import ERROR
from evener.launch.torchrun import module_argv

POLL_S = 0.05


def lines_here(num_ranks: int, module: str, arg: str, *, threads: int | None = None) -> Iterator[str]:
    """Lines of JSON that `num_ranks` processes of a module print on this machine, as they come."""
    env = {"OMP_NUM_THREADS": str(threads or max(1, usable_cores() // num_ranks)), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="evener-probe-") as folder:
        log = Path(folder) / "log"
        follower = follow_lines(log)
        said: list[str] = []
        with session(module_argv(num_ranks, module, [arg], Path(folder)), env, log, saves=False) as process:
            ended = False
            while not ended:
                ended = process.poll() is not None
                for line in next(follower):
                    text = line.decode(errors="replace")
                    said = [*said, text][-200:]
                    yield from told(text)
                if not ended:
                    time.sleep(POLL_S)
        if process.returncode != 0:
            raise RunError(
                f"{module} exited with status {process.returncode}",
                hint="its last words stand above",
                output="\n".join(line for line in said if not line.startswith("{"))[-4000:].strip(),
            )


def told(line: str) -> Iterator[str]:
    """The line, if it is one of the program's own; the EvenerError that it tells is raised."""
    if line.startswith(ERROR):
        error = msgspec.json.decode(line, type=dict[str, str])
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
    plan = _plan(prepared, module, args, num_ranks)
    with tempfile.TemporaryDirectory(prefix="evener-probe-") as folder:
        rundir = RunDir(Path(folder) / "run")
        fleet.start(rundir, plan, sessions)
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

            with Mirror(rundir, plan) as mirror:
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
            fleet.stop(plan, now=True)
            for host in plan.hosts:
                with contextlib.suppress(RemoteError, HostError):
                    sessions[host.name].call("files", "remove", place=host.run)


def _plan(prepared: Prepared, module: str, args: Mapping[str, str], num_ranks: int | None) -> Plan:
    """The launcher's own plan for a program, without a project."""
    places = prepared.places
    if num_ranks is not None:
        places = [
            msgspec.structs.replace(place, host=msgspec.structs.replace(place.host, ranks=num_ranks))
            for place in places
        ]
    plan = script_plan(prepared.id, places, prepared.port, ["-m", module], {}, code="")
    return msgspec.structs.replace(
        plan,
        kind="probe",
        hosts=[
            msgspec.structs.replace(host, code=None, cwd=host.run, argv=[*host.argv, args[host.name]])
            for host in plan.hosts
        ],
    )
