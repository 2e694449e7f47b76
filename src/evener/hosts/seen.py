"""The context of the preflight checks, and helpers that word their findings."""

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
AS_THE_FLEET_SAYS = MachineSpec()  # of a run that asks nothing of its machines beyond the fleet file


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checks judge: the fleet, facts of hosts, connectivity, and errors."""

    fleet: Fleet
    machine: MachineSpec = AS_THE_FLEET_SAYS  # what the run to be started asks of its machines
    facts: Mapping[str, Facts]  # of the hosts that answered
    candidates: Mapping[str, Sequence[Way]]
    network: Network
    errors: Mapping[str, HostError]  # of the hosts that did not
    guards: Mapping[str, Guard] = {}  # of the hosts, with --private
    port: int
    own_hash: str  # of this machine's evener

    @property
    def head(self) -> str | None:
        """Return the rendezvous host, the fleet's first; None if it did not answer."""
        first = next(iter(self.fleet.hosts))
        return first if first in self.facts else None

    @property
    def is_one_host(self) -> bool:
        """Return whether the fleet has one host, so that no traffic leaves it."""
        return len(self.fleet.hosts) == 1

    def devices(self, name: str) -> list[str]:
        """Return the devices of the ranks that a run starts there; missing GPUs are a finding of their own."""
        requested = self.wished_device(name)
        host = msgspec.structs.replace(self.fleet.hosts[name], devices="cpu" if requested == "cpu" else "auto")
        machine = msgspec.structs.replace(self.machine, device="auto")
        return devices_of(name, host, len(self.facts[name].gpus), machine)

    def seats(self) -> list[Seat]:
        """Return the host and device of every rank."""
        return [Seat(host=name, device=device) for name in self.facts for device in self.devices(name)]

    def wished_device(self, name: str) -> str:
        """Return the device that its ranks were asked to compute on: auto, cpu or cuda."""
        return wished_device(self.fleet.hosts[name], self.machine)

    def uses_gpu(self, name: str) -> bool:
        """Return whether its ranks will compute on GPUs."""
        return "cpu" not in self.devices(name)

    def num_ranks(self, name: str) -> int:
        """Return the number of ranks that a run starts there."""
        return len(self.devices(name))

    def sudo(self, name: str) -> str:
        """Return the prefix of a command that needs root there: "sudo ", or "" for root."""
        return "" if name in self.facts and self.facts[name].is_root else "sudo "

    def setup(self, *flags: str) -> str:
        """Return the command that installs what hosts lack."""
        return " ".join([f"evener setup{self.fleet.flag}", *flags])

    def unset(self, name: str, *variables: str) -> str:
        """Return the command that removes variables from a host's environment for good: it comments out their lines."""
        files: dict[str, list[str]] = {}
        for variable in variables:
            file = self.facts[name].set_in.get(variable)
            if file is None:
                return f"on {name}: unset {' '.join(variables)}, and wherever it is set"
            files.setdefault(file, []).append(variable)
        commands = []
        for file, names in files.items():
            sudo = self.sudo(name) if file.startswith("/etc") else ""
            commands.append(f"{sudo}sed -i.old -E 's/^[[:space:]]*(export +)?({'|'.join(names)})=/#&/' {file}")
        return f"on {name}: {' && '.join(commands)}"


def is_mistaken(seen: Seen, name: str) -> bool:
    """Return whether ssh got another machine's key at a host's address, on the default port."""
    error, host = seen.errors[name], seen.fleet.hosts[name]
    return error.check == "ssh.hostkey" and OTHER_KEY in str(error) and host.port in (None, SSH_PORT)


def holder_of(seen: Seen, name: str, address: str) -> str | None:
    """Return another machine of the fleet that has this host's address on a network card; None if there is none."""
    if not is_address(address):
        return None
    machine_id = seen.facts[name].machine_id if name in seen.facts else None
    for other, facts in seen.facts.items():
        nic = facts.interface_of(address)
        is_other = other != name and (machine_id is None or facts.machine_id != machine_id)
        if is_other and nic is not None and CLASS[nic.kind] == 0 and seen.fleet.hosts[other].address != address:
            return other
    return None


def is_address(text: str) -> bool:
    """Return whether the text is an IP address, not a name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def finding_of(hosts: Sequence[str], check: str, severity: Severity, evidence: str, fix: str) -> Finding:
    """Return one finding for any number of hosts; it names the host if there is only one."""
    host = hosts[0] if len(hosts) == 1 else None
    return Finding(check=check, severity=severity, host=host, evidence=evidence, fix=fix)


def each(hosts: Sequence[str], say: Callable[[str], str]) -> str:
    """Return 'a: torch 2.12; b, c: torch 2.11': hosts of one description together; a single host is not named."""
    groups: dict[str, list[str]] = {}
    for name in hosts:
        groups.setdefault(say(name), []).append(name)
    if len(hosts) == 1:
        return next(iter(groups))
    return "; ".join(f"{listed(names)}: {description}" for description, names in groups.items())


def listed(words: Iterable[str]) -> str:
    """Join names: all of a few, the first of many.

    >>> listed(["a", "b", "c"]), listed("abcdefgh")
    ('a, b, c', 'a, b, c, d and 4 more')
    """
    known = list(words)
    return ", ".join(known) if len(known) <= 5 else f"{', '.join(known[:4])} and {len(known) - 4} more"
