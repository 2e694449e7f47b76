"""Prepare the hosts of a run: connect to them, and collect the facts that determine their commands.

    with connect_hosts(fleet) as hosts:
        prepared = prepare_hosts(hosts, rundir)

This machine alone is a fleet of one host, without ssh and network checks, and with nothing to send or copy, since the
run's folder is the run directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import HostError, RunError
from evener.core.base.file_io import read_file, state_folder, write_atomic
from evener.core.base.shell import quote_command
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import DEFAULT_WORKDIR, RENDEZVOUS_PORT, Fleet, HostConfig, sanitize_host_name
from evener.core.cluster.host_info import local_host_info
from evener.core.run.run_spec import MachineSpec
from evener.core.run.rundir import RunDir
from evener.doctor.context import DEFAULT_MACHINE_SPEC
from evener.doctor.facts import ComputeDevices
from evener.doctor.machine_checks import check_left_out_variables, hosts_on_same_cores
from evener.doctor.network_checks import STRANGERS_CHECK
from evener.doctor.preflight import PreflightReport, run_preflight
from evener.launch.commands import PreparedFleet, PreparedHost
from evener.node.remote.environment import debug_variables, launcher_variables
from evener.ssh.session import Sessions, connect

LOOPBACK = "127.0.0.1"


class ConnectedHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a fleet and the connections to them."""

    fleet: Fleet
    sessions: Sessions
    errors: Mapping[str, HostError]  # of the hosts that cannot be reached
    is_local_run: bool = False  # this machine alone

    def in_order(self, names: Sequence[str]) -> ConnectedHosts:
        """Return these hosts first, in this order, and the others after them."""
        first = {name: self.fleet.hosts[name] for name in names if name in self.fleet.hosts}
        return self._with_hosts(first | self.fleet.hosts)

    def only(self, names: Sequence[str]) -> ConnectedHosts:
        """Return only these hosts, in this order."""
        return self._with_hosts({name: self.fleet.hosts[name] for name in names})

    def with_ranks(
        self, ranks: int | None, *, threads: int | None = None, device: Literal["auto", "cpu", "cuda"] = "auto"
    ) -> ConnectedHosts:
        """Return the hosts with this number of ranks, threads and kind of device on each."""
        hosts = {}
        for name, host in self.fleet.hosts.items():
            devices = host.devices if device == "auto" else device
            hosts[name] = msgspec.structs.replace(
                host, ranks=ranks or host.ranks, threads=threads or host.threads, devices=devices
            )
        return self._with_hosts(hosts)

    def _with_hosts(self, hosts: dict[str, HostConfig]) -> ConnectedHosts:
        sessions = {name: self.sessions[name] for name in hosts if name in self.sessions}
        return msgspec.structs.replace(self, fleet=msgspec.structs.replace(self.fleet, hosts=hosts), sessions=sessions)


@contextlib.contextmanager
def connect_hosts(fleet: Fleet | None) -> Iterator[ConnectedHosts]:
    """Connect to the hosts of a fleet; without one, to this machine alone, named by its host name."""
    hosts = fleet or Fleet(hosts={sanitize_host_name(local_host_info().host): HostConfig(address="local")})
    with connect(hosts) as (sessions, errors):
        if fleet is None and errors:
            raise next(iter(errors.values()))
        yield ConnectedHosts(fleet=hosts, sessions=sessions, errors=errors, is_local_run=fleet is None)


def prepare_hosts(
    hosts: ConnectedHosts,
    rundir: RunDir,
    machine: MachineSpec = DEFAULT_MACHINE_SPEC,
    *,
    run_id: str | None = None,
    port: int | None = None,
    packages: Sequence[str] = (),
    cwd: Path | None = None,
) -> PreparedFleet:
    """Prepare the hosts of a run. Raise RunError with the findings of the preflight if they cannot train together.

    `machine` holds what a run sets for its machines and the fleet file does not; `packages`, what its ranks import
    besides evener's own dependencies. The programs of a local run start in `cwd` [the current folder].
    """
    run_id = run_id or secrets.token_hex(6)
    if hosts.is_local_run:
        host = _local_host(hosts, rundir, cwd)
        return PreparedFleet(id=run_id, hosts=[host], port=0, findings=_local_findings(host.name))
    fleet, sessions, wanted_port = hosts.fleet, hosts.sessions, port or RENDEZVOUS_PORT
    preflight = _require_preflight(hosts, wanted_port, machine, packages)
    first = next(iter(fleet.hosts))
    low, high = preflight.facts[first].port_range
    run_ports = {run_port: name for name, facts in preflight.facts.items() for run_port in facts.run_ports}
    free_port = sessions[first].call(
        "sockets",
        "find_free_port",
        address=preflight.interfaces[first].address,
        wanted=wanted_port,
        low=low,
        high=high,
        avoid=sorted(run_ports),
    )
    if free_port != wanted_port:
        if port in run_ports:
            raise RunError(
                f"{run_ports[port]}: a run there uses port {port}", hint="without --port a free one is chosen"
            )
        if port is not None or free_port is None:
            hint = f"evener doctor{fleet.cli_flag} names who holds it"
            raise RunError(f"{first}: port {wanted_port} is taken", hint=hint)
        # check that the others reach this port, too
        preflight = _require_preflight(hosts, free_port, machine, packages)
    on_same_cores = hosts_on_same_cores(preflight.facts)
    places = [
        PreparedHost(
            name=host,
            host=fleet.hosts[host],
            address=preflight.interfaces[host].address,
            interface=preflight.interfaces[host].interface,
            python=preflight.facts[host].python,
            workdir=preflight.facts[host].workdir,
            run_dir=f"{preflight.facts[host].workdir}/runs/{rundir.path.name}-{run_id[:6]}",
            cores=preflight.facts[host].cores,
            shares_cores_with=on_same_cores[host],
            gpus=preflight.facts[host].gpus,
            gpus_have_bf16=preflight.facts[host].gpus_have_bf16,
            has_bf16=preflight.facts[host].has_bf16,
            is_linux=preflight.facts[host].system.startswith("Linux"),
        )
        for host in fleet.hosts
    ]
    warnings = [finding for finding in preflight.findings if finding.severity == "warning"]
    strangers = [finding for finding in preflight.findings if finding.check == STRANGERS_CHECK]
    if strangers and _is_first_run_on(preflight.interfaces[first].network):
        warnings += strangers
    file = str(Path(fleet.file).absolute()) if fleet.file else None
    return PreparedFleet(id=run_id, hosts=places, port=free_port, findings=warnings, fleet_file=file)


def _require_preflight(
    hosts: ConnectedHosts, port: int, machine: MachineSpec, packages: Sequence[str]
) -> PreflightReport:
    preflight = run_preflight(
        hosts.fleet, hosts.sessions, hosts.errors, quick=True, port=port, machine=machine, packages=packages
    )
    if preflight.blocking_findings:
        raise RunError(
            f"{len(preflight.blocking_findings)} "
            f"{'obstacle' if len(preflight.blocking_findings) == 1 else 'obstacles'} on the fleet",
            hint=f"evener doctor{hosts.fleet.cli_flag}{' --private' * machine.private} looks closer",
            output="\n".join(_format_finding(finding) for finding in preflight.blocking_findings),
        )
    return preflight


def _is_first_run_on(network: str | None) -> bool:
    """Return whether no run of this user on this network was prepared before, and remember this one."""
    known = list[str]()
    with contextlib.suppress(OSError):  # none yet
        known = read_file(state_folder() / "networks").decode(errors="replace").splitlines()
    if str(network) in known:
        return False
    with contextlib.suppress(OSError):
        path = state_folder() / "networks"
        write_atomic(path, "".join(f"{line}\n" for line in [*known, network]).encode())
    return True


def _format_finding(finding: Finding) -> str:
    where = f"{finding.host} → {finding.peer}" if finding.host and finding.peer else finding.host or ""
    return f"{finding.check}  {where}: {finding.evidence}\n    {finding.fix}"


def _local_host(hosts: ConnectedHosts, rundir: RunDir, cwd: Path | None) -> PreparedHost:
    """Return this machine as the only host of a run.

    If a number of ranks is given, each has its own GPU or, if there are too few, all are on the CPU. If not: one rank
    per GPU, or one on the CPU.
    """
    name, host = next(iter(hosts.fleet.hosts.items()))
    devices = from_builtins(hosts.sessions[name].call("facts", "collect_devices"), ComputeDevices)
    gpus = _visible_gpus(devices.gpus) if _torch_has_cuda() else []
    if host.ranks is not None and host.ranks > len(gpus):
        host = msgspec.structs.replace(host, devices="cpu")
    return PreparedHost(
        name=name,
        host=host,
        address=LOOPBACK,
        interface=next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
        python=sys.executable,
        workdir=str(Path(DEFAULT_WORKDIR).expanduser()),
        run_dir=str(rundir.path.absolute()),
        cwd=str(cwd or Path.cwd()),
        is_local_run=True,
        cores=devices.cores,
        gpus=gpus,
        gpus_have_bf16=devices.gpus_have_bf16,
        has_bf16=devices.has_bf16,
    )


def _local_findings(name: str) -> list[Finding]:
    """Return the findings about this program's environment, from which the ranks' environment is made."""
    launcher, debug = launcher_variables(os.environ), debug_variables(os.environ)
    return list(check_left_out_variables(name, launcher, debug, lambda *names: f"unset {quote_command(names)}"))


def _visible_gpus(gpus: list[str]) -> list[str]:
    """Return the GPUs that CUDA shows to programs started by this one.   [CUDA_VISIBLE_DEVICES]"""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return gpus[: len([entry for entry in visible.split(",") if entry.strip() and not entry.strip().startswith("-")])]


def _torch_has_cuda() -> bool:
    """Return whether the torch installed here was built for CUDA, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        return re.search(r"^cuda\b.*=\s*'", text, re.MULTILINE) is not None
    return False
