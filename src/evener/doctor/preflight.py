"""Preflight checks: inspect every host and every ordered pair of hosts; return findings, each with its fix.

    with connect(fleet) as (sessions, errors):
        report = run_preflight(fleet, sessions, errors, quick=True)
    report.interfaces["attic"].interface, report.facts["attic"].python, report.findings

`quick` leaves out goodput and the import of torch: it runs before every launch. No function here raises because of a
host: what is wrong with one is a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from evener.core.base.errors import HostError
from evener.core.cluster.finding import Finding, sort_by_severity
from evener.core.cluster.fleet_file import DEFAULT_SSH_PORT, RENDEZVOUS_PORT, Fleet
from evener.core.run.run_spec import MachineSpec
from evener.core.run.rundir import code_hash
from evener.doctor.checks import names_to_resolve, run_checks
from evener.doctor.connectivity import ConnectivityReport, HostFanout, PairConnectivity, probe_connectivity
from evener.doctor.context import DEFAULT_MACHINE_SPEC, CheckContext
from evener.doctor.facts import HostFacts, decode_facts
from evener.doctor.firewall import inspect_port_protection
from evener.doctor.interfaces import SocketInterface, candidate_interfaces, single_host_interface
from evener.ssh.session import Sessions


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the checks. An unreachable host has no facts and no interface; a finding says why."""

    hosts: list[str]  # of the fleet, in its order
    facts: dict[str, HostFacts]
    interfaces: dict[str, SocketInterface]  # the interface and address to use, and why
    pairs: list[PairConnectivity]  # every ordered pair
    findings: list[Finding]  # errors first
    took_s: float

    @property
    def blocking_findings(self) -> list[Finding]:
        """Return the findings that keep a run from starting or from being correct."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def find_pair(self, source: str, target: str) -> PairConnectivity | None:
        """Return what was measured from one host to another; None if nothing was."""
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)


def run_preflight(
    fleet: Fleet,
    sessions: Sessions,
    errors: Mapping[str, HostError],
    *,
    quick: bool = False,
    port: int = RENDEZVOUS_PORT,
    machine: MachineSpec = DEFAULT_MACHINE_SPEC,
    packages: Sequence[str] = (),
    notify: Callable[[str], None] = lambda text: None,
) -> PreflightReport:
    """Inspect every host and every pair. `errors`: the hosts that could not be reached.

    `machine` is what the run to be started asks of its machines, and `packages` what it imports besides evener's own
    dependencies. `notify` is called with a line for each stage.
    """
    began = time.monotonic()
    local_code_hash = code_hash()
    failed = dict(errors)
    fanout = HostFanout(sessions, failed)
    notify("inspecting every host")
    facts = _collect_facts(fleet, sessions, fanout, port, packages, quick=quick)
    candidates = {name: candidate_interfaces(facts[name], fleet.hosts[name]) for name in facts}
    if len(fleet.hosts) == 1:
        network = ConnectivityReport(
            interfaces={name: single_host_interface(facts[name], fleet.hosts[name]) for name in facts}
        )
    else:
        ssh_ports = {name: host.port or DEFAULT_SSH_PORT for name, host in fleet.hosts.items() if not host.is_local}
        network = probe_connectivity(
            fanout,
            facts,
            candidates,
            port=port,
            ssh_ports=ssh_ports,
            names=names_to_resolve(fleet, facts),
            quick=quick,
            notify=notify,
        )
    protection = (
        inspect_port_protection(fanout, fleet, facts, network, port) if machine.private and len(fleet.hosts) > 1 else {}
    )
    facts = {name: facts[name] for name in facts if name not in failed}
    findings = run_checks(CheckContext(
        fleet=fleet, machine=machine, facts=facts, candidates=candidates, network=network, errors=failed,
        port_protection=protection, port=port, local_code_hash=local_code_hash,
    ))  # fmt: skip
    return PreflightReport(
        hosts=list(fleet.hosts),
        facts=facts,
        interfaces={name: interface for name, interface in network.interfaces.items() if name in facts},
        pairs=network.pairs,
        findings=sort_by_severity(findings),
        took_s=time.monotonic() - began,
    )


def _collect_facts(
    fleet: Fleet, sessions: Sessions, fanout: HostFanout, port: int, packages: Sequence[str], *, quick: bool
) -> dict[str, HostFacts]:
    def collect(name: str) -> HostFacts:
        host = fleet.hosts[name]
        collected = sessions[name].call(
            "facts", "collect", workdir=host.workdir, python=host.python, port=port, packages=list(packages)
        )
        if not quick and collected.get("torch_version"):
            collected["torch_error"] = sessions[name].call("facts", "import_torch", python=collected["python"])
        return decode_facts(collected, sessions[name].clock_offset_s())

    results = fanout.map_hosts([name for name in fleet.hosts if name in sessions], collect)
    return {name: facts for name, facts in results.items() if facts is not None}
