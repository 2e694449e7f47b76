"""What is known of the hosts when the findings are made, and in which words is it told?"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from evener.core.errors import HostError
from evener.core.finding import Finding, Severity
from evener.core.fleet import Fleet
from evener.core.roster import Seat, devices_of, wished_device
from evener.core.spec import MachineSpec
from evener.hosts.facts import Facts
from evener.hosts.pairs import Network
from evener.hosts.private import Guard
from evener.hosts.shell import OTHER_KEY
from evener.hosts.ways import CLASS, Way

SSH_PORT = 22
AS_THE_FLEET_SAYS = MachineSpec()  # of a run that asks nothing of its machines beside the fleet file


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known when the findings are made."""

    fleet: Fleet
    machine: MachineSpec = AS_THE_FLEET_SAYS  # on what the run that begins was asked to run
    facts: Mapping[str, Facts]  # of the hosts that answered
    candidates: Mapping[str, Sequence[Way]]
    network: Network
    errors: Mapping[str, HostError]  # of those that did not
    guards: Mapping[str, Guard] = {}  # of hosts whose ports shall be for the run alone
    port: int
    own_hash: str  # of the evener that asks

    @property
    def head(self) -> str | None:
        """The host of the rendezvous: the fleet's first."""
        first = next(iter(self.fleet.hosts))
        return first if first in self.facts else None

    @property
    def is_one_host(self) -> bool:
        """Nothing leaves it."""
        return len(self.fleet.hosts) == 1

    def devices(self, name: str) -> list[str]:
        """Of the ranks that a run starts there; GPUs that it should have and has not are a finding of their own."""
        wish = self.wished_device(name)
        host = msgspec.structs.replace(self.fleet.hosts[name], devices="cpu" if wish == "cpu" else "auto")
        machine = msgspec.structs.replace(self.machine, device="auto")
        return devices_of(name, host, len(self.facts[name].gpus), machine)

    def seats(self) -> list[Seat]:
        """What the ranks of all hosts take."""
        return [Seat(host=name, device=device) for name in self.facts for device in self.devices(name)]

    def wished_device(self, name: str) -> str:
        """What its ranks were asked to compute on: auto, cpu or cuda."""
        return wished_device(self.fleet.hosts[name], self.machine)

    def uses_gpu(self, name: str) -> bool:
        """Will its ranks compute on GPUs?"""
        return "cpu" not in self.devices(name)

    def num_ranks(self, name: str) -> int:
        """Processes that a run starts there."""
        return len(self.devices(name))

    def sudo(self, name: str) -> str:
        """What a command needs in front of it there."""
        return "" if name in self.facts and self.facts[name].is_root else "sudo "

    def setup(self, *flags: str) -> str:
        """The command that installs what hosts lack."""
        return " ".join([f"evener setup{self.fleet.flag}", *flags])

    def unset(self, name: str, *variables: str) -> str:
        """What takes variables out of a host's environment for good: their lines become comments."""
        files: dict[str, list[str]] = {}
        for variable in variables:
            file = self.facts[name].set_in.get(variable)
            if file is None:
                return f"on {name}: unset {' '.join(variables)}, and wherever it is set"
            files.setdefault(file, []).append(variable)
        commands = []
        for file, those in files.items():
            root = self.sudo(name) if file.startswith("/etc") else ""
            commands.append(f"{root}sed -i.old -E 's/^[[:space:]]*(export +)?({'|'.join(those)})=/#&/' {file}")
        return f"on {name}: {' && '.join(commands)}"


def is_mistaken(seen: Seen, name: str) -> bool:
    """Does ssh meet another machine's key at a host's address, on the usual port?"""
    error, host = seen.errors[name], seen.fleet.hosts[name]
    return error.check == "ssh.hostkey" and OTHER_KEY in str(error) and host.port in (None, SSH_PORT)


def holder_of(seen: Seen, name: str, address: str) -> str | None:
    """Another machine of the fleet that has this host's address on a network card of its own."""
    if not is_address(address):
        return None
    mine = seen.facts[name].machine_id if name in seen.facts else None
    for other, facts in seen.facts.items():
        there = facts.interface_of(address)
        is_other = other != name and (mine is None or facts.machine_id != mine)
        if is_other and there is not None and CLASS[there.kind] == 0 and seen.fleet.hosts[other].address != address:
            return other
    return None


def is_address(text: str) -> bool:
    """A number, not a name?"""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def finding_of(hosts: Sequence[str], check: str, severity: Severity, evidence: str, fix: str) -> Finding:
    """One finding for whatever number of hosts."""
    host = hosts[0] if len(hosts) == 1 else None
    return Finding(check=check, severity=severity, host=host, evidence=evidence, fix=fix)


def each(hosts: Sequence[str], say: Callable[[str], str]) -> str:
    """'a: torch 2.12; b, c: torch 2.11': hosts with the same to be said stand together; one alone is not named."""
    groups: dict[str, list[str]] = {}
    for name in hosts:
        groups.setdefault(say(name), []).append(name)
    if len(hosts) == 1:
        return next(iter(groups))
    return "; ".join(f"{listed(names)}: {what}" for what, names in groups.items())


def listed(words: Iterable[str]) -> str:
    """All of a few, the first of many.

    >>> listed(["a", "b", "c"]), listed("abcdefgh")
    ('a, b, c', 'a, b, c, d and 4 more')
    """
    known = list(words)
    return ", ".join(known) if len(known) <= 5 else f"{', '.join(known[:4])} and {len(known) - 4} more"
