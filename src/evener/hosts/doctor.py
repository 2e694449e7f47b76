"""Can these machines train together, by which interface, and if not, what mends it?

    with connect(fleet) as (sessions, errors):
        found = survey(fleet, sessions, errors, quick=True)
    found.ways["attic"].interface, found.facts["attic"].python, found.findings

`quick` leaves out goodput and the import of torch: it is what runs before every launch. Nothing here raises because of
a host: what is wrong with one is a finding.
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
    """What was found. Hosts that could not be reached have no facts and no way; a finding says why."""

    hosts: list[str]  # of the fleet, in its order
    facts: dict[str, Facts]
    ways: dict[str, Way]  # the interface and address to use, and why
    pairs: list[Pair]  # every ordered pair
    findings: list[Finding]  # errors first
    took_s: float

    @property
    def errors(self) -> list[Finding]:
        """What keeps a run from starting, or from being right."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def pair(self, source: str, target: str) -> Pair | None:
        """What was seen from one host to another."""
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
    """Look at every host and every pair. `errors`: hosts that could not be reached; `told` hears of progress.

    `machine` is what the run that begins asks of its machines.
    """
    began = time.monotonic()
    own_hash = code_hash()
    failed = dict(errors)
    asker = Asker(sessions, failed)
    told("looking at every host")
    facts = _facts(fleet, sessions, asker, port, quick=quick)
    ways = {name: ways_of(facts[name], fleet.hosts[name]) for name in facts}
    if len(fleet.hosts) == 1:
        network = Network(ways={name: only_host(facts[name], fleet.hosts[name]) for name in facts})
    else:
        ssh_ports = {name: host.port or SSH_PORT for name, host in fleet.hosts.items() if not host.is_local}
        network = examine(
            asker,
            facts,
            ways,
            port=port,
            ssh_ports=ssh_ports,
            names=names_to_resolve(fleet, facts),
            quick=quick,
            told=told,
        )
    held = guards(asker, fleet, facts, network, port) if machine.private and len(fleet.hosts) > 1 else {}
    facts = {name: facts[name] for name in facts if name not in failed}
    findings = check(Seen(
        fleet=fleet, machine=machine, facts=facts, candidates=ways, network=network, errors=failed, guards=held,
        port=port,        own_hash=own_hash,
    ))  # fmt: skip
    return Survey(
        hosts=list(fleet.hosts),
        facts=facts,
        ways={name: way for name, way in network.ways.items() if name in facts},
        pairs=network.pairs,
        findings=by_severity(findings),
        took_s=time.monotonic() - began,
    )


def _facts(fleet: Fleet, sessions: Sessions, asker: Asker, port: int, *, quick: bool) -> dict[str, Facts]:
    def look(name: str) -> Facts:
        host = fleet.hosts[name]
        told = sessions[name].call("facts", "collect", workdir=host.workdir, python=host.python, port=port)
        if not quick and told.get("torch_version"):
            told["torch_error"] = sessions[name].call("facts", "import_torch", python=told["python"])
        return to_facts(told, sessions[name].clock_offset_s())

    looked = asker.each([name for name in fleet.hosts if name in sessions], look)
    return {name: facts for name, facts in looked.items() if facts is not None}
