"""Which machines are there? `fleet.toml`: hosts as ssh knows them, and what `probe` measured between and on them.

[hosts.attic]
address = "192.168.1.36"        # "local", or anything that ssh accepts: a name in ~/.ssh/config, an IP address
[links.attic.laptop]            # written by `evener probe wire`: from attic to laptop
goodput_Bps = 117_000_000.0
[rates.attic.cpu]               # written by `evener probe host`, for each device
[rates.attic.cpu.models.gpt2]   # of each model that it probed; tokens_per_s alone may be written by hand
tokens_per_s = 500.0
"""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from evener.core.decoding import from_tree
from evener.core.errors import UsageError, did_you_mean

DEFAULT_FLEET = "fleet.toml"
DEFAULT_WORKDIR = "~/.evener"
RENDEZVOUS_PORT = 29500

HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]
Rate = Annotated[float, Meta(gt=0)]
Few = Annotated[int, Meta(ge=1, le=1024)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One table of the file."""


class Host(Section, frozen=True, kw_only=True):
    """How one machine is reached and used. Only `address` is needed; ssh's own configuration applies."""

    address: str  # "local" or what ssh accepts
    user: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity_file: str | None = None
    ssh_options: list[str] = []  # each is ssh's -o: "ConnectTimeout=20"
    python: str | None = None  # that trains, or of which setup makes WORKDIR/venv [WORKDIR/venv/bin/python]
    workdir: str = DEFAULT_WORKDIR  # where evener keeps its venv, code, data and runs on that machine
    interface: str | None = None  # the network interface for training [the one that routes to the others]
    devices: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPUs found, else the processor
    ranks: Few | None = None  # processes [one a GPU, else one]
    threads: Few | None = None  # processor threads a rank [cores / ranks]

    @property
    def is_local(self) -> bool:
        """Is it the machine that runs this program?"""
        return self.address == "local"


class Gain(Section, frozen=True, kw_only=True):
    """A setting of a host that was tried beside another on the same wire, in turn, and brought more."""

    check: str  # the finding's id: link.congestion, link.window, link.idle
    host: HostName  # where it is set
    setting: str  # net.ipv4.tcp_congestion_control
    was: str  # what the host has
    better: str  # what brings more
    was_Bps: Rate  # medians of what was measured with the one and with the other
    better_Bps: Rate
    evidence: str  # in a sentence


class Link(Section, frozen=True, kw_only=True):
    """What was measured from one host to another."""

    goodput_Bps: Rate  # β: payload of one TCP stream, nothing coming back but acknowledgements
    duplex_Bps: Rate | None = None  # the same while as much is sent the other way: what a ring all-reduce uses
    parallel_Bps: Rate | None = None  # payload of several streams together
    rtt_s: Annotated[float, Meta(ge=0)]  # median round trip of a small message: 2α and what two programs take to answer
    rtt_p95_s: float | None = None
    retransmits: int | None = None  # segments sent again meanwhile; None = the system does not tell
    measured: str = ""  # ISO date and time
    gains: list[Gain] = []  # settings that would bring more

    @property
    def bandwidth_Bps(self) -> float:
        """What a collective can use: sending while receiving, where that was measured."""
        return self.goodput_Bps if self.duplex_Bps is None else self.duplex_Bps


class ModelRate(Section, frozen=True, kw_only=True):
    """What a model preset does on one device, in one process."""

    tokens_per_s: Rate  # forward and backward, sustained, in large micro-batches
    pass_s: Annotated[float, Meta(ge=0)] | None = None  # what a forward and backward costs apart from its tokens
    update_s: Annotated[float, Meta(ge=0)] | None = None  # clipping and AdamW's update of all its parameters
    dtype: str = ""  # its arithmetic; "" = not said
    cpus: Rate | None = None  # processors at work meanwhile


class Rates(Section, frozen=True, kw_only=True):
    """What was measured on one device of a host, or declared by hand."""

    name: str = ""  # "AMD EPYC", "NVIDIA H200"
    matmul_flops: dict[str, Rate] = {}  # by dtype ("fp32", "bf16", "fp16"), floating-point operations a second
    copy_Bps: Rate | None = None  # memory bandwidth of a large copy, bytes read and written
    triad_Bps: Rate | None = None  # and of a = b + s·c
    sum_Bps: dict[str, Rate] = {}  # γ: by dtype, bytes of a buffer to which one thread adds another, in a second
    sync_Bps: Rate | None = None  # bytes that a processor sends, receives and adds in its second
    loopback_Bps: Rate | None = None  # bytes that each of two ranks here sends in an all-reduce
    coding_Bps: dict[str, Rate] = {}  # by strategy, bytes of gradients that a thread makes small and large again
    memory_bytes: Annotated[int, Meta(gt=0)] | None = None  # of the device, all of it
    models: dict[str, ModelRate] = {}  # by preset
    measured: str = ""


class Fleet(Section, frozen=True, kw_only=True):
    """The whole file."""

    hosts: dict[HostName, Host]
    file: str | None = None  # where it was read from, as it was named; no key of the file's
    links: dict[HostName, dict[HostName, Link]] = {}
    rates: dict[HostName, dict[str, Rates]] = {}  # by host, then by device: "cpu", "cuda:0"

    @property
    def flag(self) -> str:
        """What a command needs to be about this fleet: " --fleet lab.toml"; nothing of the usual file."""
        return "" if self.file in (None, DEFAULT_FLEET) else f" --fleet {shlex.quote(self.file)}"


def load_fleet(path: str | Path) -> Fleet:
    """The fleet that a file describes; UsageError where it is not one."""
    file = Path(path)
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{file}: no such file",
            hint=f"name your machines in it: printf '[hosts.here]\\naddress = \"local\"\\n' > {DEFAULT_FLEET}",
        ) from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not TOML: {error}") from None
    _check_keys(file, tree)
    try:
        fleet = from_tree(tree | {"file": str(path)}, Fleet)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {_told(error)}") from None
    _check(file, fleet)
    return fleet


def only(fleet: Fleet, names: str | None) -> Fleet:
    """The fleet with these hosts alone ("attic,laptop"), in the file's order; all of them if None."""
    if names is None:
        return fleet
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in fleet.hosts:
            raise UsageError(f"--hosts {names}: the fleet has no host {name}", hint=did_you_mean(name, fleet.hosts))
    if not wanted:
        raise UsageError(f"--hosts {names!r}: it names no host", hint=f"--hosts {next(iter(fleet.hosts))}")
    return msgspec.structs.replace(fleet, hosts={name: host for name, host in fleet.hosts.items() if name in wanted})


def _check_keys(file: Path, tree: dict[str, Any]) -> None:
    known = [key for key in Fleet.__struct_fields__ if key != "file"]
    for key in tree:
        if key not in known:
            raise UsageError(f"{file}: no key {key}", hint=did_you_mean(key, known))
    hosts = tree.get("hosts")
    if not isinstance(hosts, dict) or not hosts:
        raise UsageError(f"{file}: it names no host", hint='[hosts.NAME] with address = "local" or what ssh accepts')
    for name, host in hosts.items():
        if not isinstance(host, dict):
            raise UsageError(f"{file}: hosts.{name}: expected a table: [hosts.{name}]")
        _check_table(file, f"hosts.{name}", host, Host)
    for source, targets in _tables(tree.get("links")):
        for target, link in _tables(targets):
            _check_table(file, f"links.{source}.{target}", link, Link)
    for name, devices in _tables(tree.get("rates")):
        for device, rates in _tables(devices):
            _check_table(file, f"rates.{name}.{device}", rates, Rates)
            for model, rate in _tables(rates.get("models")):
                _check_table(file, f"rates.{name}.{device}.models.{model}", rate, ModelRate)


def _tables(tree: Any) -> list[tuple[str, dict[str, Any]]]:
    """The tables inside one; what is none of them is told by the types, afterwards."""
    return [(name, table) for name, table in tree.items() if isinstance(table, dict)] if isinstance(tree, dict) else []


def _check_table(file: Path, name: str, table: dict[str, Any], kind: type[Section]) -> None:
    for key in table:
        if key not in kind.__struct_fields__:
            raise UsageError(f"{file}: no key {key} in [{name}]", hint=did_you_mean(key, kind.__struct_fields__))


def _check(file: Path, fleet: Fleet) -> None:
    for name, host in fleet.hosts.items():
        if not host.address or host.address.startswith("-") or not host.address.isprintable() or " " in host.address:
            raise UsageError(f"{file}: hosts.{name}: address {host.address!r}: expected a name or an IP address")
        if host.user is not None and (host.user.startswith("-") or "@" in host.user or not host.user.isprintable()):
            raise UsageError(f"{file}: hosts.{name}: user {host.user!r}: expected a login name")
        if host.is_local and (host.user or host.port or host.identity_file or host.ssh_options):
            raise UsageError(f"{file}: hosts.{name}: address is local, so ssh's settings have no use")
    here = [name for name, host in fleet.hosts.items() if host.is_local]
    if len(here) > 1:
        raise UsageError(f"{file}: {' and '.join(here)} are both local: one machine is one host", hint="ranks = 2")


def _told(error: msgspec.ValidationError) -> str:
    what, _, where = str(error).partition(" - at ")
    return f"{where.strip('`').removeprefix('$.')}: {what[0].lower()}{what[1:].replace('`', '')}" if where else what
