"""Preflight checks: inspect every host and every ordered pair of hosts; return findings, each with its fix.

    with connect(fleet) as (sessions, errors):
        report = run_preflight(fleet, sessions, errors, quick=True)
    report.interfaces["attic"].interface, report.facts["attic"].python, report.findings

`quick` leaves out goodput and the import of torch: it runs before every launch. No function here raises because of a
host: what is wrong with one is a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from evener.core.errors import HostError
from evener.core.finding import Finding, by_severity
from evener.core.fleet import RENDEZVOUS_PORT, Fleet
from evener.core.rundir import code_hash
from evener.core.spec import MachineSpec
from evener.hosts.checks import check, names_to_resolve
from evener.hosts.facts import Facts, to_facts
from evener.hosts.pairs import Asker, Network, Pair, examine
from evener.hosts.private import guards
from evener.hosts.seen import AS_THE_FLEET_SAYS, Seen
from evener.hosts.session import Sessions
from evener.hosts.ways import Way, only_host, ways_of

SSH_PORT = 22


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the checks. An unreachable host has no facts and no interface; a finding says why."""

    hosts: list[str]  # of the fleet, in its order
    facts: dict[str, Facts]
    ways: dict[str, Way]  # the interface and address to use, and why
    pairs: list[Pair]  # every ordered pair
    findings: list[Finding]  # errors first
    took_s: float

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that keep a run from starting or from being correct."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def pair(self, source: str, target: str) -> Pair | None:
        """Return what was measured from one host to another; None if nothing was."""
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)


def survey(
    fleet: Fleet,
    sessions: Sessions,
    errors: Mapping[str, HostError],
    *,
    quick: bool = False,
    port: int = RENDEZVOUS_PORT,
    machine: MachineSpec = AS_THE_FLEET_SAYS,
    told: Callable[[str], None] = lambda text: None,
) -> Survey:
    """Inspect every host and every pair. `errors`: the hosts that could not be reached.

    `machine` is what the run to be started asks of its machines. `on_progress` is called with a line for each stage.
    """
    began = time.monotonic()
    local_code_hash = code_hash()
    failed = dict(errors)
    fanout = Asker(sessions, failed)
    told("inspecting every host")
    facts = _facts(fleet, sessions, fanout, port, quick=quick)
    candidates = {name: ways_of(facts[name], fleet.hosts[name]) for name in facts}
    if len(fleet.hosts) == 1:
        network = Network(ways={name: only_host(facts[name], fleet.hosts[name]) for name in facts})
    else:
        ssh_ports = {name: host.port or SSH_PORT for name, host in fleet.hosts.items() if not host.is_local}
        network = examine(
            fanout,
            facts,
            candidates,
            port=port,
            ssh_ports=ssh_ports,
            names=names_to_resolve(fleet, facts),
            quick=quick,
            told=told,
        )
    protection = guards(fanout, fleet, facts, network, port) if machine.private and len(fleet.hosts) > 1 else {}
    facts = {name: facts[name] for name in facts if name not in failed}
    findings = check(Seen(
        fleet=fleet, machine=machine, facts=facts, candidates=candidates, network=network, errors=failed,
        guards=protection, port=port, own_hash=local_code_hash,
    ))  # fmt: skip
    return Survey(
        hosts=list(fleet.hosts),
        facts=facts,
        ways={name: interface for name, interface in network.ways.items() if name in facts},
        pairs=network.pairs,
        findings=by_severity(findings),
        took_s=time.monotonic() - began,
    )


def _facts(fleet: Fleet, sessions: Sessions, asker: Asker, port: int, *, quick: bool) -> dict[str, Facts]:
    def collect(name: str) -> Facts:
        host = fleet.hosts[name]
        collected = sessions[name].call("facts", "collect", workdir=host.workdir, python=host.python, port=port)
        if not quick and collected.get("torch_version"):
            collected["torch_error"] = sessions[name].call("facts", "import_torch", python=collected["python"])
        return to_facts(collected, sessions[name].clock_offset_s())

    results = asker.each([name for name in fleet.hosts if name in sessions], collect)
    return {name: facts for name, facts in results.items() if facts is not None}
