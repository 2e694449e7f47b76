"""The facts of one machine that `remote/facts.py` collects there, with their types.

A fact is None where the machine does not report it.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_builtins

InterfaceKind = Literal["loopback", "wired", "wireless", "tunnel", "wireguard", "docker", "bridge", "virtual"]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
MIN_BF16_COMPUTE_CAPABILITY = 8.0  # CUDA compute capability from which a GPU has bfloat16 units: Ampere


class FactsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the structs that make up the facts."""


class InterfaceAddress(FactsRecord, frozen=True, kw_only=True):
    """One address of a network interface."""

    address: str
    prefix: int | None

    @property
    def ip(self) -> IPAddress:
        """Return the address as an `ipaddress` object."""
        return ipaddress.ip_address(self.address)

    @property
    def network(self) -> str:
        """Return the network that the address belongs to: "192.168.1.0/24"."""
        width = self.ip.max_prefixlen if self.prefix is None else self.prefix
        return str(ipaddress.ip_network(f"{self.address}/{width}", strict=False))


class NetworkInterface(FactsRecord, frozen=True, kw_only=True):
    """One network interface, its addresses in the order in which Gloo tries them."""

    name: str
    addresses: list[InterfaceAddress]
    up: bool  # switched on, and with a carrier
    kind: InterfaceKind
    mtu: int | None = None
    mac: str | None = None  # its hardware address
    is_physical: bool = False  # a NIC, so that its speed and duplex mean something
    speed_Mbit: int | None = None
    duplex: Literal["full", "half"] | None = None

    @property
    def first_address(self) -> InterfaceAddress | None:
        """Return the address that Gloo binds when it is given this interface's name."""
        return self.addresses[0] if self.addresses else None


class Neighbour(FactsRecord, frozen=True, kw_only=True):
    """A machine that has answered on one of the host's networks."""

    address: str
    interface: str


class ResourceLimit(FactsRecord, frozen=True, kw_only=True):
    """A resource limit; None = unlimited."""

    soft: int | None
    hard: int | None


class StartupLine(FactsRecord, frozen=True, kw_only=True):
    """A line of a file that a login shell reads."""

    file: str  # "~/.bashrc"
    line: int  # from 1


class HostProcess(FactsRecord, frozen=True, kw_only=True):
    """A process that holds the port, is left over from a run, or ends with its terminal."""

    pid: int | None
    owner: str | None = None
    age_s: float | None = None
    command: str | None = None
    run: str | None = None  # the run of evener that it belongs to


class ResolvedAddress(FactsRecord, frozen=True, kw_only=True):
    """One address that the host's own name resolves to."""

    address: str
    binds: bool
    error: str | None = None


class GlooDefaultAddress(FactsRecord, frozen=True, kw_only=True):
    """The address that Gloo would choose without GLOO_SOCKET_IFNAME."""

    hostname: str
    candidates: list[ResolvedAddress]
    address: str
    error: str | None = None


class ComputeDevices(FactsRecord, frozen=True, kw_only=True):
    """The devices that ranks can compute on."""

    cores: int  # available to a process
    bf16_units: list[str] | None = None  # the processor's instructions for bfloat16; None = not known
    gpus: list[str] = []  # names
    gpu_capabilities: list[float] = []  # CUDA compute capabilities, of the GPUs that report one

    @property
    def has_bf16(self) -> bool:
        """Return whether the processor has instructions for bfloat16."""
        return bool(self.bf16_units)

    @property
    def gpus_have_bf16(self) -> bool:
        """Return whether the machine has GPUs and all of them compute in bfloat16."""
        supported = [capability >= MIN_BF16_COMPUTE_CAPABILITY for capability in self.gpu_capabilities]
        return bool(self.gpus) and len(supported) == len(self.gpus) and all(supported)


class HostFacts(ComputeDevices, frozen=True, kw_only=True):
    """All that is known of one machine."""

    hostname: str
    system: str
    architecture: str
    machine_id: str | None = None  # equal for two names of one machine
    boot_id: str | None = None  # equal also for containers of one machine
    allowed_cpus: list[int] | None = None  # numbers of the processors that a process may run on
    cpu_quota: float | None = None  # CPU time that it may use, in cores; None: no limit
    user: str | None = None
    is_root: bool = False
    in_container: bool = False
    time: float | None = None

    workdir: str  # absolute
    python: str  # absolute path of the interpreter that runs the ranks
    python_version: str | None = None
    python_error: str | None = None  # its output, if it cannot start in its environment
    breaking_variable: str | None = None  # without this PYTHON… variable it starts, and has torch
    shadowed: dict[str, str] = {}  # standard modules, or torch: the file imported instead of them
    torch_error: str | None = None  # its output, if importing torch fails; None also where that was not tried
    torch_version: str | None = None
    evener_version: str | None = None
    evener_hash: str | None = None  # of evener's source, as in `core.rundir.code_hash`
    missing_packages: list[str] = []  # of those that the run needs besides evener's own dependencies

    cpu: str | None = None
    cores_installed: int | None = None
    cpu_max_MHz: float | None = None
    cpu_limit_MHz: float | None = None
    cpu_busy_MHz: float | None = None  # of a core that is busy
    cpu_throttle_events: int | None = None  # while the facts were collected
    load: float | None = None

    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    swap_bytes: int | None = None
    swap_Bps: float | None = None  # to and from the disk, while the facts were collected
    disk_free_bytes: int | None = None  # where the working directory is
    stored_bytes: int | None = None  # of runs, code and data in the working directory; None: too many files to count
    partial_checkpoints: int = 0  # half-written ones that killed runs left
    partial_checkpoint_bytes: int = 0
    disk_folder: str | None = None  # that, or the nearest existing folder above it
    disk_writable: bool | None = None
    shm_bytes: int | None = None
    limits: dict[str, ResourceLimit | None] = {}
    limits_set_in: dict[str, StartupLine] = {}  # the lines that set them, by limit

    gpu_driver: str | None = None
    gpu_error: str | None = None
    gpu_cards: int = 0  # NVIDIA cards on the bus
    gpu_iommu: bool | None = None  # an IOMMU translates between the cards

    interfaces: list[NetworkInterface] = []
    port_range: tuple[int, int] = (32768, 60999)
    congestion_control: str | None = None
    queue_discipline: str | None = None
    sysctls: dict[str, str] = {}  # that TCP throughput may depend on, by name; only those that the system has
    has_infiniband: bool = False
    neighbours: list[Neighbour] = []  # without routers
    firewall: Literal["ufw", "firewalld", "nftables", "iptables", "macos", "hyper-v", "wsl-nat"] | None = None
    firewall_chain: str | None = None
    port: int
    port_holder: HostProcess | None = None
    run_ports: list[int] = []  # of the runs that are alive there, whether they listen at this moment or not
    gloo: GlooDefaultAddress
    environment: dict[str, str] = {}
    launcher_variables: list[str] = []  # that a launcher has set; left out of the ranks' environment
    debug_variables: list[str] = []  # with values that keep ranks from training; left out too
    set_in: dict[str, str] = {}  # the file that sets a variable for every session
    stale: list[HostProcess] = []
    attached: list[HostProcess] = []

    has_battery: bool | None = None
    on_battery: bool | None = None
    lid_suspends: bool | None = None
    idle_sleeps: bool | None = None

    clock_offset_s: float | None = None  # their clock minus the controller's
    clock_error_s: float | None = None

    def find_interface(self, name: str) -> NetworkInterface | None:
        """Return the interface of this name, if there is one."""
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def find_interface_by_address(self, address: str) -> NetworkInterface | None:
        """Return the interface that has this address; any of 127.0.0.0/8 counts as the loopback's."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        for interface in self.interfaces:
            if any(ip == entry.ip for entry in interface.addresses) or (
                ip.is_loopback and interface.kind == "loopback"
            ):
                return interface
        return None


def decode_facts(collected: dict[str, Any], clock: tuple[float, float] | None = None) -> HostFacts:
    """Decode the facts that a host reported; `clock` is (its clock's offset, the error of that) in seconds."""
    facts = from_builtins(collected, HostFacts)
    if clock is None:
        return facts
    return msgspec.structs.replace(facts, clock_offset_s=clock[0], clock_error_s=clock[1])
