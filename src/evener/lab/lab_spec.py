"""The specification of a lab as frozen structs, read from flags or from a TOML file.

name = "attic"
[defaults]                  # for every host below
rate = "1Gbit"
[hosts.a]
[hosts.b]
cpus = 0.5
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import UsageError, did_you_mean

MAX_HOSTS = 200
# the controller is 10.77.0.254; hosts are .1, .2 …
LAN, LAN6, OVERLAY, CONTROLLER_NUMBER = "10.77.0", "fd77:", "100.64.0", 254
MTU_MIN, MTU_MAX = 1280, 9216  # IPv6 needs 1280

CpuShare = Annotated[float, Meta(ge=0.05, le=1024)]
WritebackInterval = Annotated[float, Meta(ge=0.1, le=3600)]
Mtu = Annotated[int, Meta(ge=MTU_MIN, le=MTU_MAX)]


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host: its link, its limits of CPU, memory and disk, its interfaces and its firewall."""

    rate: Annotated[str | None, Meta(description="link rate, both ways: 1Gbit, 100Mbit [unlimited]")] = None
    rate_up: Annotated[str | None, Meta(description="sending rate [rate]")] = None
    rate_down: Annotated[str | None, Meta(description="receiving rate [rate]")] = None
    policed: Annotated[bool, Meta(description="drop packets above rate_down, do not queue them")] = False
    mtu: Annotated[Mtu, Meta(description="MTU of its interface")] = 1500
    path_mtu: Annotated[Mtu | None, Meta(description="path MTU: larger packets vanish [mtu]")] = None
    cpus: Annotated[CpuShare | None, Meta(description="CPU time that it may use, in cores")] = None
    cores: Annotated[
        tuple[int, ...] | None, Meta(description="cores that it is pinned to [its own part of the machine's]")
    ] = None
    memory: Annotated[str | None, Meta(description="memory limit: 2GB, 512MB")] = None
    disk: Annotated[
        str | None, Meta(description="size of its home, a file system of its own: 2GB [this machine's]")
    ] = None
    writeback_s: Annotated[
        WritebackInterval | None,
        Meta(description="power-off loses the unflushed writes of up to so many seconds; needs gcc [it loses none]"),
    ] = None
    interface: Annotated[str, Meta(description="name of its interface")] = "eth0"
    more_interfaces: Annotated[
        tuple[str, ...], Meta(description="docker0, br-… (bridge), tun0, tailscale0, wg0 (overlay), wlan0, eth1 (link)")
    ] = ()
    loopback_hostname: Annotated[bool, Meta(description="its /etc/hosts says 127.0.1.1 NAME, as Debian's")] = False
    firewall: Annotated[tuple[str, ...], Meta(description="nftables rules for incoming packets")] = ()

    @property
    def up_bps(self) -> int | None:
        """Sending rate in bit/s; None: no limit."""
        return _bps(self.rate_up or self.rate)

    @property
    def down_bps(self) -> int | None:
        """Receiving rate in bit/s; None: no limit."""
        return _bps(self.rate_down or self.rate)

    @property
    def memory_bytes(self) -> int | None:
        """Memory limit; None: no limit."""
        return parse_bytes(self.memory, "memory") if self.memory else None

    @property
    def disk_bytes(self) -> int | None:
        """Size of its disk; None: it shares this machine's."""
        return parse_bytes(self.disk, "disk") if self.disk else None

    def interfaces_of_kind(self, kind: Literal["bridge", "overlay", "link"]) -> list[str]:
        """Return its other interfaces of a kind, which their name prefix tells."""
        prefixes = {"docker": "bridge", "br-": "bridge", "virbr": "bridge", "tun": "overlay", "tailscale": "overlay",
                    "wg": "overlay"}  # fmt: skip
        return [name for name in self.more_interfaces
                if kind == next((k for prefix, k in prefixes.items() if name.startswith(prefix)), "link")]  # fmt: skip


class LabSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lab: its name and its hosts, which share one switch."""

    name: str = "lab"
    hosts: dict[str, HostSpec] = msgspec.field(default_factory=lambda: {"a": HostSpec(), "b": HostSpec()})

    def check(self) -> None:
        """Raise UsageError if the lab cannot be created."""
        _check_name("lab", self.name)
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise UsageError(f"a lab of {len(self.hosts)} hosts: expected 1 to {MAX_HOSTS}")
        for name, host in self.hosts.items():
            _check_name("host", name)
            _check_host(name, host)


def default_host_names(count: int) -> list[str]:
    """Return the names a, b … z, then h27, h28 …

    >>> default_host_names(3)
    ['a', 'b', 'c']
    """
    return [chr(ord("a") + i) if i < 26 else f"h{i + 1}" for i in range(count)]


def parse_bps(text: str) -> int:
    """Parse a rate into bit/s.

    >>> parse_bps("1Gbit"), parse_bps("2.5Gbit"), parse_bps("100mbit")
    (1000000000, 2500000000, 100000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s|ps)?", text.strip(), re.IGNORECASE)
    bps = int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()]) if match else 0
    if not 8_000 <= bps <= 100_000_000_000:
        raise UsageError(f"rate {text!r}: expected 8kbit to 100Gbit", hint="for example 1Gbit, 100Mbit, 2.5Gbit")
    return bps


def parse_bytes(text: str, what: str) -> int:
    """Parse a size into bytes; GB is 1e9, GiB is 2**30.

    >>> parse_bytes("2GB", "memory"), parse_bytes("512MiB", "disk")
    (2000000000, 536870912)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(i?)b", text.strip(), re.IGNORECASE)
    power = "kmg".index(match[2].lower()) + 1 if match else 0
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match else 0
    if size < 64_000_000:
        raise UsageError(f"{what} {text!r}: expected 64MB or more", hint="for example 2GB, 512MiB")
    return size


def read_lab_spec(file: Path) -> LabSpec:
    """Read a lab from a TOML file; raise UsageError for a bad file."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not TOML: {error}") from None
    _check_keys(file, "", tree, ["name", "defaults", "hosts"])
    defaults = _table(file, "defaults", tree.pop("defaults", {}))
    hosts = tree.get("hosts", {name: {} for name in default_host_names(2)})
    if not isinstance(hosts, dict):
        raise UsageError(f"{file}: hosts: expected a table for each host", hint="[hosts.a]")
    tree["hosts"] = {name: {**defaults, **_table(file, f"hosts.{name}", host)} for name, host in hosts.items()}
    try:
        return from_builtins(tree, LabSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {format_validation_error(error)}") from None


def with_host_values(spec: LabSpec, values: Mapping[str, Any]) -> LabSpec:
    """Return the lab with these values in every host."""
    hosts = {}
    for name, host in spec.hosts.items():
        try:
            hosts[name] = from_builtins({**msgspec.to_builtins(host), **values}, HostSpec)
        except msgspec.ValidationError as error:
            raise UsageError(format_validation_error(error)) from None
    return msgspec.structs.replace(spec, hosts=hosts)


def with_own_cores(spec: LabSpec, usable: Sequence[int]) -> LabSpec:
    """Return the lab with each host pinned to its own part of the usable cores.

    Hosts that share cores measure one speed alone and reach another together. A lab stays as it is if it has more hosts
    than there are cores, names cores, or has a quota beyond a host's part.

    >>> [host.cores for host in with_own_cores(LabSpec(), [0, 1, 2]).hosts.values()]
    [(0,), (1, 2)]
    """
    count, total = len(spec.hosts), len(usable)
    if count > total or any(host.cores or (host.cpus or 0) > total // count for host in spec.hosts.values()):
        return spec
    parts = [tuple(usable[i * total // count : (i + 1) * total // count]) for i in range(count)]
    hosts = {name: msgspec.structs.replace(host, cores=part)
             for (name, host), part in zip(spec.hosts.items(), parts, strict=True)}  # fmt: skip
    return msgspec.structs.replace(spec, hosts=hosts)


def without_limits(spec: LabSpec) -> LabSpec:
    """Return the lab as an ordinary user can create it: without limits that need cgroups and mounts."""
    hosts = {
        name: msgspec.structs.replace(host, cpus=None, memory=None, disk=None) for name, host in spec.hosts.items()
    }
    return msgspec.structs.replace(spec, hosts=hosts)


def format_validation_error(error: msgspec.ValidationError) -> str:
    """Format a msgspec error for users: the place first, then the problem."""
    what, _, where = str(error).partition(" - at `$.")
    what = what.replace("`", "").replace("| null", "or nothing")
    return (f"{where.rstrip('`')}: " if where else "") + what[0].lower() + what[1:]


def _bps(text: str | None) -> int | None:
    return parse_bps(text) if text else None


def _table(file: Path, where: str, table: object) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(f"{file}: {where}: expected a table", hint=f"[{where}]")
    _check_keys(file, f" in [{where}]", table, HostSpec.__struct_fields__)
    return table


def _check_keys(file: Path, where: str, tree: Mapping[str, Any], known: list[str] | tuple[str, ...]) -> None:
    for key in tree:
        if key not in known:
            raise UsageError(f"{file}: no key {key}{where}", hint=did_you_mean(key, known))


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}[a-z0-9]|[a-z]", name) or name == "localhost":
        raise UsageError(
            f"{kind} name {name!r}: expected at most 32 small letters, digits and dashes, a letter first",
            hint="for example attic, or gpu-1",
        )


def _check_host(name: str, host: HostSpec) -> None:
    host.up_bps, host.down_bps, host.memory_bytes, host.disk_bytes  # noqa: B018  each raises if it cannot be parsed
    interfaces = (host.interface, *host.more_interfaces)
    for interface in interfaces:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", interface) or interface in (".", "..", "lo"):
            raise UsageError(f"host {name}: interface {interface!r}: expected 1 to 15 letters, digits, - and _")
    if len(set(interfaces)) < len(interfaces):
        raise UsageError(f"host {name}: two interfaces have one name: {', '.join(interfaces)}")
    if host.path_mtu is not None and host.path_mtu > host.mtu:
        raise UsageError(f"host {name}: path_mtu {host.path_mtu}: greater than mtu {host.mtu}")
    if host.policed and host.down_bps is None:
        raise UsageError(f"host {name}: policed without a rate", hint='rate = "1Gbit"')
    if host.cores is not None and not host.cores:
        raise UsageError(f"host {name}: cores: expected at least one")
