"""The context of the preflight checks, and helpers that word their findings."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from evener.core.base.errors import HostError
from evener.core.base.shell import quote_command, quote_word
from evener.core.cluster.finding import Finding, Severity
from evener.core.cluster.fleet_file import DEFAULT_SSH_PORT, Fleet, fleet_flag
from evener.core.run.roster import RankSlot, rank_devices, requested_device
from evener.core.run.run_spec import MachineSpec
from evener.doctor.connectivity import ConnectivityReport
from evener.doctor.facts import HostFacts
from evener.doctor.firewall import PortProtection
from evener.doctor.interfaces import KIND_PREFERENCE, SocketInterface
from evener.ssh.transport import HOST_KEY_CHANGED

# What may stand before NAME= in a shell's file, as `facts.DECLARATION` there: an export, also of other names before it.
DECLARATION = "((export|declare -x|typeset -x) +([^#]* )?)?"
DEFAULT_MACHINE_SPEC = MachineSpec()  # of a run that asks nothing of its machines beyond the fleet file


class CheckContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checks judge: the fleet, facts of hosts, connectivity, and errors."""

    fleet: Fleet
    machine: MachineSpec = DEFAULT_MACHINE_SPEC  # what the run to be started asks of its machines
    facts: Mapping[str, HostFacts]  # of the hosts that answered
    candidates: Mapping[str, Sequence[SocketInterface]]
    network: ConnectivityReport
    errors: Mapping[str, HostError]  # of the hosts that did not
    port_protection: Mapping[str, PortProtection] = {}  # of the hosts, with --private
    port: int
    local_code_hash: str  # of this machine's evener

    @property
    def rendezvous_host(self) -> str | None:
        """Return the rendezvous host, the fleet's first; None if it did not answer."""
        first = next(iter(self.fleet.hosts))
        return first if first in self.facts else None

    @property
    def is_one_host(self) -> bool:
        """Return whether the fleet has one host, so that no traffic leaves it."""
        return len(self.fleet.hosts) == 1

    def devices(self, name: str) -> list[str]:
        """Return the devices of the ranks that a run starts on a host; missing GPUs are another finding."""
        requested = self.requested_device(name)
        host = msgspec.structs.replace(self.fleet.hosts[name], devices="cpu" if requested == "cpu" else "auto")
        machine = msgspec.structs.replace(self.machine, device="auto")
        return rank_devices(name, host, len(self.facts[name].gpus), machine)

    def rank_slots(self) -> list[RankSlot]:
        """Return the host and device of every rank."""
        return [RankSlot(host=name, device=device) for name in self.facts for device in self.devices(name)]

    def requested_device(self, name: str) -> str:
        """Return the device that a host's ranks were asked to compute on: auto, cpu or cuda."""
        return requested_device(self.fleet.hosts[name], self.machine)

    def uses_gpu(self, name: str) -> bool:
        """Return whether a host's ranks will compute on GPUs."""
        return "cpu" not in self.devices(name)

    def num_ranks(self, name: str) -> int:
        """Return the number of ranks that a run starts on a host."""
        return len(self.devices(name))

    def sudo_prefix(self, name: str) -> str:
        """Return the prefix of a command that needs root on a host: "sudo ", or "" if its user is root."""
        return "" if name in self.facts and self.facts[name].is_root else "sudo "

    def setup_command(self, *flags: str) -> str:
        """Return the command that installs what hosts lack."""
        return " ".join([f"evener setup{self.fleet.cli_flag}", *flags])

    def prune_command(self, name: str) -> str:
        """Return the command that lists what a host stores of earlier runs."""
        if self.fleet.file is None:
            return "evener runs --prune --fleet local"
        return f"evener runs --prune {fleet_flag(self.fleet.file)} --hosts {quote_word(name)}"

    def unset_command(self, name: str, *variables: str) -> str:
        """Return the command that removes variables from a host's environment for good: it comments out their lines."""
        files: dict[str, list[str]] = {}
        for variable in variables:
            file = self.facts[name].set_in.get(variable)
            if file is None:
                return f"on {name}: unset {quote_command(variables)}  # and remove it where it is set"
            files.setdefault(file, []).append(variable)
        commands = []
        for file, names in files.items():
            sudo = self.sudo_prefix(name) if file.startswith("/etc") else ""
            program = f"s/^[[:space:]]*{DECLARATION}({'|'.join(map(re.escape, names))})=/#&/"
            home, path = ("~/", file[2:]) if file.startswith("~/") else ("", file)
            commands.append(f"{sudo}sed -i.old -E {quote_word(program)} {home}{quote_word(path)}")
        return f"on {name}: {' && '.join(commands)}"


def has_foreign_host_key(context: CheckContext, name: str) -> bool:
    """Return whether ssh got another machine's key at a host's address, on the default port."""
    error, host = context.errors[name], context.fleet.hosts[name]
    return error.check == "ssh.hostkey" and HOST_KEY_CHANGED in str(error) and host.port in (None, DEFAULT_SSH_PORT)


def find_address_holder(context: CheckContext, name: str, address: str) -> str | None:
    """Return another machine of the fleet that has this host's address on a network card; None if there is none."""
    if not is_ip_address(address):
        return None
    machine_id = context.facts[name].machine_id if name in context.facts else None
    for other, facts in context.facts.items():
        nic = facts.find_interface_by_address(address)
        is_other = other != name and (machine_id is None or facts.machine_id != machine_id)
        if (
            is_other
            and nic is not None
            and KIND_PREFERENCE[nic.kind] == 0
            and context.fleet.hosts[other].address != address
        ):
            return other
    return None


def is_ip_address(text: str) -> bool:
    """Return whether the text is an IP address, not a name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def finding_for_hosts(hosts: Sequence[str], check: str, severity: Severity, evidence: str, fix: str) -> Finding:
    """Return one finding for any number of hosts; it names the host if there is only one."""
    host = hosts[0] if len(hosts) == 1 else None
    return Finding(check=check, severity=severity, host=host, evidence=evidence, fix=fix)


def describe_by_host(hosts: Sequence[str], describe: Callable[[str], str]) -> str:
    """Return 'a: torch 2.12; b, c: torch 2.11': hosts of one description together; a single host is not named."""
    groups: dict[str, list[str]] = {}
    for name in hosts:
        groups.setdefault(describe(name), []).append(name)
    if len(hosts) == 1:
        return next(iter(groups))
    return "; ".join(f"{join_names(names)}: {description}" for description, names in groups.items())


def join_names(names: Iterable[str]) -> str:
    """Join names: all of a few, the first of many.

    >>> join_names(["a", "b", "c"]), join_names("abcdefgh")
    ('a, b, c', 'a, b, c, d and 4 more')
    """
    known = list(names)
    return ", ".join(known) if len(known) <= 5 else f"{', '.join(known[:4])} and {len(known) - 4} more"
