"""Run one of evener's own torch programs on prepared hosts, and yield its output lines.

    for host, line in fleet_program_lines(prepared, sessions, "evener.worker.probe.collective_bench", {"a": "{…}"}): …

The program prints lines of JSON; the other output of its ranks is shown only when it fails.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

import msgspec

from evener.core.base.errors import HostError
from evener.core.base.file_io import follow_lines
from evener.core.run.run_plan import Plan
from evener.core.run.rundir import RunDir
from evener.launch import launcher
from evener.launch.commands import OWN_PROGRAM_ENV, PreparedFleet, script_plan, without_torchrun
from evener.launch.root_cause import first_failure
from evener.launch.torch_subprocess import ERROR_PREFIX, raise_reported_error
from evener.ssh.session import RemoteError, Sessions
from evener.transfer.mirror import RunMirror

PROGRAM_RUN = RunDir("probe")  # names the folders of these programs on the hosts
POLL_S = 0.05


def fleet_program_lines(
    prepared: PreparedFleet, sessions: Sessions, module: str, args: Mapping[str, str]
) -> Generator[tuple[str, str]]:
    """Yield (host, line) for the JSON lines that a module prints on every host, as they arrive; `args` is by host.

    Closing the generator stops the program and removes its folders on the hosts.
    """
    with tempfile.TemporaryDirectory(prefix="evener-probe-") as folder:
        rundir = RunDir(Path(folder) / "run")
        if prepared.is_local_run:  # its folder is the run directory
            places = [msgspec.structs.replace(place, run_dir=str(rundir.path)) for place in prepared.hosts]
            prepared = msgspec.structs.replace(prepared, hosts=places)
        yield from _program_lines(rundir, _program_plan(prepared, module, args), sessions)


def _program_lines(rundir: RunDir, plan: Plan, sessions: Sessions) -> Generator[tuple[str, str]]:
    attach_lock = launcher.start(rundir, plan, sessions, attached=plan.is_local_run)
    try:
        logs = {
            (host.name, rank): follow_lines(rundir.log_path(host.name, rank))
            for host in plan.hosts
            for rank in range(host.first_rank, host.first_rank + host.num_ranks)
        }

        def new_lines() -> Generator[tuple[str, str]]:
            for (name, _), follower in logs.items():
                for line in next(follower):
                    text = line.decode(errors="replace").partition(" ")[2][2:]  # of TIME STREAM TEXT
                    if text.startswith(ERROR_PREFIX):
                        raise_reported_error(text)
                    if text.startswith("{"):
                        yield name, text

        with attach_lock, RunMirror(rundir, plan) as mirror:
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
            raise failure.to_error(rundir, plan)
    finally:
        launcher.stop(rundir, plan, now=True)
        for host in plan.hosts:
            if host.run is not None:
                with contextlib.suppress(RemoteError, HostError):
                    sessions[host.name].call("content_store", "remove_path", place=host.run)


def _program_plan(prepared: PreparedFleet, module: str, args: Mapping[str, str]) -> Plan:
    """Plan a program of evener's own, without a project."""
    program = ["-m", module]
    plan = script_plan(prepared, program, {}, project=None, key=prepared.new_key())
    hosts = []
    for place, planned in zip(prepared.hosts, plan.hosts, strict=True):
        host = msgspec.structs.replace(planned, code=None, cwd=place.cwd or place.run_dir)
        if host.is_local_run and plan.world_size == 1:
            host = without_torchrun(host, program)
        env = host.env | OWN_PROGRAM_ENV
        hosts.append(msgspec.structs.replace(host, argv=[*host.argv, args[host.name]], env=env))
    return msgspec.structs.replace(plan, kind="probe", hosts=hosts)
