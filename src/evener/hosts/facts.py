"""What does the controller know of a machine? The facts that `remote/facts.py` collects there, with their types.

Each fact is None where the machine does not tell it.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

import msgspec

from evener.core.decoding import from_tree

Kind = Literal["loopback", "wired", "wireless", "tunnel", "wireguard", "docker", "bridge", "virtual"]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
BF16_CAPABILITY = 8.0  # of a GPU, from which on it has units for bfloat16: Ampere


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the facts."""


class Address(Record, frozen=True, kw_only=True):
    """One address of an interface."""

    address: str
    prefix: int | None

    @property
    def ip(self) -> IPAddress:
        """The address as a number."""
        return ipaddress.ip_address(self.address)

    @property
    def network(self) -> str:
        """The network that it belongs to: "192.168.1.0/24"."""
        width = self.ip.max_prefixlen if self.prefix is None else self.prefix
        return str(ipaddress.ip_network(f"{self.address}/{width}", strict=False))


class Interface(Record, frozen=True, kw_only=True):
    """One network interface; its addresses stand in the order in which Gloo looks at them."""

    name: str
    addresses: list[Address]
    up: bool  # switched on, and with a carrier
    kind: Kind
    mtu: int | None = None
    mac: str | None = None  # its address on the wire
    is_physical: bool = False  # a card, so that its speed and duplex mean something
    speed_Mbit: int | None = None
    duplex: Literal["full", "half"] | None = None

    @property
    def first(self) -> Address | None:
        """What Gloo binds when it is told this interface's name."""
        return self.addresses[0] if self.addresses else None


class Limit(Record, frozen=True, kw_only=True):
    """A resource limit; None = unlimited."""

    soft: int | None
    hard: int | None


class Process(Record, frozen=True, kw_only=True):
    """A process that is in the way."""

    pid: int | None
    owner: str | None = None
    age_s: float | None = None
    command: str | None = None
    run: str | None = None  # the run of evener that it belongs to


class Candidate(Record, frozen=True, kw_only=True):
    """One address that the host's own name resolves to."""

    address: str
    binds: bool
    error: str | None = None


class GlooChoice(Record, frozen=True, kw_only=True):
    """The address that Gloo would take if nobody told it."""

    hostname: str
    candidates: list[Candidate]
    address: str
    error: str | None = None


class Devices(Record, frozen=True, kw_only=True):
    """What ranks can compute on."""

    cores: int  # that a process may use
    bf16_units: list[str] | None = None  # the processor's instructions for bfloat16; None = not known
    gpus: list[str] = []  # names
    gpu_capabilities: list[float] = []  # CUDA's compute capability of those that tell it

    @property
    def has_bf16(self) -> bool:
        """Does the processor compute in bfloat16?"""
        return bool(self.bf16_units)

    @property
    def gpus_have_bf16(self) -> bool:
        """Do all its GPUs compute in bfloat16?"""
        known = [one >= BF16_CAPABILITY for one in self.gpu_capabilities]
        return bool(self.gpus) and len(known) == len(self.gpus) and all(known)


class Facts(Devices, frozen=True, kw_only=True):
    """One machine."""

    hostname: str
    system: str
    architecture: str
    machine_id: str | None = None  # the same for two names of one machine
    user: str | None = None
    is_root: bool = False
    in_container: bool = False
    time: float | None = None

    workdir: str  # absolute
    python: str  # absolute path of the interpreter that trains
    python_version: str | None = None
    python_error: str | None = None  # what it says when it starts in its environment, and cannot
    shadowed: dict[str, str] = {}  # modules of Python's own, and torch, in whose place another file is imported
    torch_error: str | None = None  # what it says when it imports torch, and cannot; None also where nobody asked
    torch_version: str | None = None
    evener_version: str | None = None
    evener_hash: str | None = None  # of evener's source, as `core.rundir.code_hash`

    cpu: str | None = None
    cores_installed: int | None = None
    cpu_max_MHz: float | None = None
    cpu_limit_MHz: float | None = None
    cpu_busy_MHz: float | None = None  # of a core that is busy
    cpu_throttle_events: int | None = None  # while we looked
    load: float | None = None

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    swap_bytes: int | None = None
    swap_Bps: float | None = None  # to and from the disk while we looked
    disk_free_bytes: int | None = None  # where the working directory is
    disk_folder: str | None = None  # that, or what there is above it
    disk_writable: bool | None = None
    shm_bytes: int | None = None
    limits: dict[str, Limit | None] = {}

    gpu_driver: str | None = None
    gpu_error: str | None = None
    gpu_cards: int = 0  # of NVIDIA's, on the bus
    gpu_iommu: bool | None = None  # translates between the cards

    interfaces: list[Interface] = []
    port_range: tuple[int, int] = (32768, 60999)
    congestion_control: str | None = None
    queue_discipline: str | None = None
    sysctls: dict[str, str] = {}  # what TCP's speed may hang on, by name; without those that the system does not have
    has_infiniband: bool = False
    firewall: Literal["ufw", "firewalld", "nftables", "iptables", "macos"] | None = None
    firewall_chain: str | None = None
    port: int
    port_holder: Process | None = None
    gloo: GlooChoice
    environment: dict[str, str] = {}
    set_in: dict[str, str] = {}  # the file that sets a variable for every session
    stale: list[Process] = []
    attached: list[Process] = []

    has_battery: bool | None = None
    on_battery: bool | None = None
    lid_suspends: bool | None = None
    idle_sleeps: bool | None = None

    clock_offset_s: float | None = None  # their clock minus the controller's
    clock_error_s: float | None = None

    def interface(self, name: str) -> Interface | None:
        """The interface of this name."""
        return next((one for one in self.interfaces if one.name == name), None)

    def interface_of(self, address: str) -> Interface | None:
        """The interface that has this address; any of 127.0.0.0/8 is the loopback's."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        for one in self.interfaces:
            if any(ip == other.ip for other in one.addresses) or (ip.is_loopback and one.kind == "loopback"):
                return one
        return None


def to_facts(told: dict[str, Any], clock: tuple[float, float] | None = None) -> Facts:
    """The facts that a host told, with its clock's offset and the error of that."""
    facts = from_tree(told, Facts)
    if clock is None:
        return facts
    return msgspec.structs.replace(facts, clock_offset_s=clock[0], clock_error_s=clock[1])
