"""The fleet file, `fleet.toml`: hosts as ssh knows them, and what `probe` measured between and on them.

link = "2.5GbE"                 # the default between any two hosts
[hosts.attic]
address = "192.168.1.36"        # "local", or anything that ssh accepts: a name in ~/.ssh/config, an IP address
[links.attic]
shed = "wifi:200Mbit,6ms"       # by hand: from attic to shed, and back unless the file has another link for that
[links.attic.laptop]            # written by `evener probe wire`: from attic to laptop
goodput_Bps = 117_000_000.0
[rates.attic.cpu]               # written by `evener probe host`, for each device
[rates.attic.cpu.models.gpt2]   # of each model that it probed; tokens_per_s alone may be written by hand
tokens_per_s = 500.0
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from evener.core.base.decoding import from_builtins, from_toml
from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.file_io import read_file
from evener.core.base.shell import quote_word
from evener.core.base.units import parse_bytes
from evener.core.cluster.hardware import parse_hardware
from evener.core.cluster.link import parse_link

T = TypeVar("T")
DEFAULT_FLEET = "fleet.toml"
MAX_FLEET_NAME_BYTES = 200  # of a file that --on makes; file systems take 255
LOCAL_FLEET = "local"  # --fleet local: this machine, whatever fleet.toml says
DEFAULT_WORKDIR = "~/.evener"


def fleets_folder() -> Path:
    """Return the folder of the fleet files that evener makes itself, for --on and for this machine alone."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "evener" / "fleets"


def local_fleet_path() -> Path:
    """Return the fleet file of this machine alone, with its measured rates, as `--on local` makes it."""
    return named_fleet_path(["local"])


def named_fleet_path(words: Sequence[str]) -> Path:
    """Return the fleet file of the machines that --on names. Its name tells the words again, unless they are too many.

    >>> named_fleet_path(["local", "ben@attic:2222"]).name
    'local+ben@attic%3A2222.toml'
    """
    file_name = "+".join(quote(word, safe="@=") for word in words)
    if len(file_name) > MAX_FLEET_NAME_BYTES:
        digest = hashlib.blake2b(",".join(words).encode(), digest_size=6).hexdigest()
        file_name = f"{len(words)}-hosts,{digest}"
    return fleets_folder() / f"{file_name}.toml"


def fleet_flag(path: str | Path) -> str:
    """Return the flag that selects a fleet file in a command: "--on local,laptop" if it is a file of --on.

    >>> fleet_flag("lab.toml"), fleet_flag(named_fleet_path(["local", "ben@attic:2222"]))
    ('--fleet lab.toml', '--on local,ben@attic:2222')
    """
    file = Path(path)
    if file.parent == fleets_folder() and "," not in file.name:
        return f"--on {quote_word(unquote(file.stem.replace('+', ',')))}"
    return f"--fleet {quote_word(path)}"


RENDEZVOUS_PORT = 29500
DEFAULT_SSH_PORT = 22

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HostName = Annotated[str, Meta(pattern=rf"^{HOST_NAME.pattern}\Z")]
# ssh puts address and user into the commands that its configuration names (ProxyCommand with %h, Match exec), and newer
# versions refuse these characters for that reason.
SHELL_CHARACTERS = frozenset("'`\"$\\;&<>|(){}")
Rate = Annotated[float, Meta(ge=1e-6, le=1e30)]
Bandwidth = Annotated[float, Meta(ge=1, le=1e15)]
Duration = Annotated[float, Meta(ge=0, le=1e6)]
DeviceCount = Annotated[int, Meta(ge=1, le=1024)]


class FleetSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One table of the fleet file."""


class HostConfig(FleetSection, frozen=True, kw_only=True):
    """How to reach and use one machine. Only `address` is required; ssh's own configuration applies."""

    address: str  # "local", or anything that ssh accepts
    user: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity_file: str | None = None
    ssh_options: list[str] = []  # each for ssh -o: "ConnectTimeout=20"
    python: str | None = None  # interpreter for training, or for setup to make WORKDIR/venv [WORKDIR/venv/bin/python]
    workdir: str = DEFAULT_WORKDIR  # where evener keeps its venv, code, data and runs on that machine
    interface: str | None = None  # the network interface for training [the one that routes to the others]
    devices: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the detected GPUs, else the CPU
    ranks: DeviceCount | None = None  # processes [one per GPU, else one]
    threads: DeviceCount | None = None  # CPU threads per rank [cores / ranks]
    # The planner's fallback for what was not measured:
    gpu: str | None = None  # "4090", "h100", "cpu:8": see core.hardware
    gpus: DeviceCount | None = None  # number of GPUs [1]
    memory: str | None = None  # "24GB": of each GPU, or of a host without GPUs
    node_link: str | None = None  # between its GPUs: "nvlink", "pcie", "50GB/s" [the GPU's own, else pcie]
    watts: Rate | None = None  # of the whole machine while it trains [its devices']
    price_per_h: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # of the whole machine, in any money

    @property
    def is_local(self) -> bool:
        """Return whether the host is the machine that runs this program."""
        return self.address == "local"

    @property
    def names_programs(self) -> bool:
        """Return whether connecting to the host, or using it, may start a program that these settings name.

        An ssh option may be a ProxyCommand, and WORKDIR/venv/bin/python is the default of `python`.
        """
        return bool(self.ssh_options) or self.python is not None or self.workdir != DEFAULT_WORKDIR


class TuningGain(FleetSection, frozen=True, kw_only=True):
    """A host setting with a faster alternative, measured by alternating between the two on the same link."""

    check: str  # the finding's id: link.congestion, link.window, link.idle
    host: HostName  # the host of the setting
    setting: str  # net.ipv4.tcp_congestion_control
    was: str  # the current value
    better: str  # the faster value
    was_Bps: Rate  # median throughput with the current value
    better_Bps: Rate  # median throughput with the faster value
    evidence: str  # one sentence


class HostLink(FleetSection, frozen=True, kw_only=True):
    """The measured or declared link from one host to another."""

    goodput_Bps: Bandwidth  # β: payload of one TCP stream in one direction
    duplex_Bps: Bandwidth | None = None  # the same with equal traffic in the other direction, as in a ring all-reduce
    duplex_bytes_per_cpu_s: Bandwidth | None = None  # sent by the source, and as many received, per second of CPU time
    parallel_Bps: Bandwidth | None = None  # total payload of several streams
    rtt_s: Annotated[
        float, Meta(ge=0, le=60)
    ]  # median round trip of a small message: 2α and the reply time of two programs
    rtt_p95_s: Duration | None = None
    retransmits: int | None = None  # TCP segments retransmitted meanwhile; None = not reported by the system
    is_shared: bool = False  # half duplex, shared with all such links, as Wi-Fi is; goodput_Bps is their total payload
    declared: str = ""  # as written in the file: "1GbE"; "" = it was measured
    measured: str = ""  # ISO date and time
    gains: list[TuningGain] = []  # settings that would raise the throughput

    @property
    def bandwidth_Bps(self) -> float:
        """The bandwidth that a collective can use: the duplex rate, if it was measured."""
        return self.goodput_Bps if self.duplex_Bps is None or self.is_shared else self.duplex_Bps


class ModelRate(FleetSection, frozen=True, kw_only=True):
    """The training speed of a model on one device, in one process."""

    tokens_per_s: Rate  # forward and backward, sustained, in large micro-batches
    flops_per_token: Rate | None = None  # of a pretrained model, as it was probed: its FLOPs for each of these tokens
    pass_s: Duration | None = None  # fixed overhead of one micro-batch's forward and backward
    update_s: Duration | None = None  # clipping and AdamW's update of all parameters
    dtype: str = ""  # of forward and backward; "" = not given
    cpus: Rate | None = None  # mean number of busy CPUs meanwhile


class Rates(FleetSection, frozen=True, kw_only=True):
    """The measured or declared rates of one device of a host."""

    name: str = ""  # "AMD EPYC", "NVIDIA H200"
    matmul_flops: dict[str, Rate] = {}  # by dtype ("fp32", "bf16", "fp16"), floating-point operations a second
    copy_Bps: Rate | None = None  # memory bandwidth of a large copy, bytes read and written
    triad_Bps: Rate | None = None  # memory bandwidth of a = b + s·c
    sum_Bps: dict[str, Rate] = {}  # γ: by dtype, bytes per second that one thread adds from one buffer to another
    sync_Bps: Rate | None = None  # bytes sent, received and added per second of CPU time
    loopback_Bps: Rate | None = None  # bytes that each of two ranks on the host sends per second of an all-reduce
    coding_Bps: dict[str, Rate] = {}  # by strategy, gradient bytes that one thread encodes and decodes in a second
    memory_bytes: Annotated[int, Meta(gt=0)] | None = None  # total memory of the device
    has_jemalloc: bool = False  # as the allocator of ranks on the processor
    models: dict[
        str, ModelRate
    ] = {}  # by preset, or "hf:NAME", "hf:NAME+lora16" or "hf:NAME+dora16" of a pretrained model
    shares_cores_with: list[str] = []  # hosts that are on the same machine and compute on the same cores
    measured: str = ""


class Fleet(FleetSection, frozen=True, kw_only=True):
    """The whole fleet file."""

    hosts: dict[HostName, HostConfig]
    # the path as given by the user, not a key of the file; None: evener composed the fleet, "": of a run without a file
    file: str | None = None
    link: str | None = None  # between any two hosts without an entry in `links`: "1GbE", "wifi:200Mbit"
    links: dict[HostName, dict[HostName, HostLink]] = {}
    rates: dict[HostName, dict[str, Rates]] = {}  # by host, then by device: "cpu", "cuda:0"
    price_per_kwh: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # of electricity

    @property
    def cli_flag(self) -> str:
        """The flag that selects this fleet in a command, after a space; "" for the default file."""
        return "" if not self.file or self.file == DEFAULT_FLEET else f" {fleet_flag(self.file)}"


def fleet_path(given: str | None) -> str | None:
    """Return the path of the fleet file: the given one, else fleet.toml if it exists; None is this machine alone."""
    if given is not None:
        return None if given == LOCAL_FLEET else given
    return DEFAULT_FLEET if Path(DEFAULT_FLEET).exists() else None


def out_option(path: str | Path) -> str:
    """Return the flag with which `evener fleet init` writes this file; "" for the default file."""
    return "" if str(path) == DEFAULT_FLEET else f" --out {quote_word(path)}"


def load_fleet(path: str | Path) -> Fleet:
    """Read a fleet file. Raise UsageError if it is invalid."""
    file = Path(path)
    try:
        text = read_file(file).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file", hint=f"evener fleet init{out_option(path)} writes one") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not TOML: {error}", hint="TOML is UTF-8") from None
    return parse_fleet(text, path)


def parse_fleet(text: str, path: str | Path) -> Fleet:
    """Parse the text of a fleet file; `path` names it in errors. Raise UsageError if it is invalid."""
    file = Path(path)
    try:
        tree = from_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file}: not TOML: {error}", hint="names in brackets are of A-Z, a-z, 0-9, - and _") from None
    _check_keys(file, tree)
    _read_links(file, tree)
    try:
        fleet = from_builtins(tree | {"file": str(path)}, Fleet)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {_validation_message(error)}") from None
    _check(file, fleet)
    return _with_absolute_interpreters(file, fleet)


def _with_absolute_interpreters(file: Path, fleet: Fleet) -> Fleet:
    """Return the fleet with this machine's interpreter as an absolute path; a relative one is that beside the file."""
    folder = Path(os.path.abspath(file)).parent
    hosts = {name: msgspec.structs.replace(host, python=str(folder / host.python))
             if host.is_local and host.python and "/" in host.python and not host.python.startswith("~") else host
             for name, host in fleet.hosts.items()}  # fmt: skip
    return msgspec.structs.replace(fleet, hosts=hosts)


def format_fleet(hosts: Mapping[str, HostConfig], head: str = "") -> str:
    """Return the text of a fleet file with these hosts, below the comment `head`.

    >>> print(format_fleet({"attic": HostConfig(address="local"),
    ...     "10.0.0.7": HostConfig(address="10.0.0.7", user="ben")}), end="")
    [hosts.attic]
    address = "local"
    <BLANKLINE>
    [hosts."10.0.0.7"]
    address = "10.0.0.7"
    user = "ben"
    """
    import tomlkit

    document = tomlkit.document()
    if head:
        document.add(tomlkit.comment(head))
        document.add(tomlkit.nl())
    tables = tomlkit.table(is_super_table=True)
    for name, host in hosts.items():
        table = tomlkit.table()
        table.update(msgspec.to_builtins(host))
        tables.append(name, table)
    document["hosts"] = tables
    return tomlkit.dumps(document)


def sanitize_host_name(text: str) -> str:
    """Return a valid name in fleet.toml, as similar to the text as possible.

    >>> (sanitize_host_name("gpu-1.lab"), sanitize_host_name("büro 2"), sanitize_host_name("fe80::1"),
    ...  sanitize_host_name("中央"))
    ('gpu-1.lab', 'buro-2', 'fe80-1', 'host')
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("-._")[:63].rstrip("-") or "host"


def select_hosts(fleet: Fleet, names: str | None) -> Fleet:
    """Return the fleet with only these hosts ("attic,laptop"), in the file's order; None: all of them."""
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
        if not HOST_NAME.fullmatch(name):
            raise UsageError(f"{file}: host {name!r}: a name has a-z, A-Z, 0-9, . _ and -, and 63 of them at most",
                             hint="its address may be anything that ssh accepts")  # fmt: skip
        if not isinstance(host, dict):
            raise UsageError(f"{file}: hosts.{name}: expected a table: [hosts.{name}]")
        _check_table(file, f"hosts.{name}", host, HostConfig)
    for section in ("links", "rates"):
        for name in [name for name, _ in _tables(tree.get(section))]:
            _check_known(file, f"{section}.{name}", name, hosts)
    for source, targets in _tables(tree.get("links")):
        for target in targets:
            _check_known(file, f"links.{source}.{target}", target, hosts)
        for target, link in _tables(targets):
            _check_table(file, f"links.{source}.{target}", link, HostLink)
    for name, devices in _tables(tree.get("rates")):
        for device, rates in _tables(devices):
            for model, rate in _tables(rates.get("models")):
                _check_table(file, f"rates.{name}.{device}.models.{model}", rate, ModelRate)
            _check_table(file, f"rates.{name}.{device}", rates, Rates)


def _check_known(file: Path, where: str, name: str, hosts: dict[str, Any]) -> None:
    if name not in hosts:
        raise UsageError(f"{file}: {where}: the fleet has no host {name}", hint=did_you_mean(name, hosts))


def _read_links(file: Path, tree: dict[str, Any]) -> None:
    """Replace links declared as text, [links.a] b = "1GbE", by tables with their rates."""
    for source, targets in _tables(tree.get("links")):
        for target, text in targets.items():
            if isinstance(text, str):
                where = f"{file}: links.{source}.{target}"
                wire = _parse_at(where, parse_link, text).wire
                targets[target] = {"goodput_Bps": wire.bandwidth_Bps, "rtt_s": 2 * wire.latency_s,
                                   "is_shared": wire.is_shared, "declared": text}  # fmt: skip


def _parse_at(where: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}", hint=error.hint) from None


def _tables(tree: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables inside a table; type validation reports all other values later."""
    return [(name, table) for name, table in tree.items() if isinstance(table, dict)] if isinstance(tree, dict) else []


def _check_table(file: Path, name: str, table: dict[str, Any], kind: type[FleetSection]) -> None:
    for key in table:
        if key not in kind.__struct_fields__:
            raise UsageError(f"{file}: no key {key} in [{name}]", hint=did_you_mean(key, kind.__struct_fields__))
    try:
        from_builtins(table, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {name}: {_validation_message(error)}") from None


def _check(file: Path, fleet: Fleet) -> None:
    for name, host in fleet.hosts.items():
        check_host(f"{file}: hosts.{name}", host)
        for key, text, parse in (("gpu", host.gpu, parse_hardware), ("memory", host.memory, parse_bytes),
                                 ("node_link", host.node_link, parse_link)):  # fmt: skip
            if text is not None:
                _parse_at(f"{file}: hosts.{name}.{key}", parse, text)
    if fleet.link is not None:
        _parse_at(f"{file}: link", parse_link, fleet.link)
    local_hosts = [name for name, host in fleet.hosts.items() if host.is_local]
    if len(local_hosts) > 1:
        raise UsageError(
            f"{file}: {' and '.join(local_hosts)} are both local: one machine is one host", hint="ranks = 2"
        )


def check_host(where: str, host: HostConfig) -> None:
    """Raise UsageError, which begins with `where`, if ssh or a program would misread a setting of a host."""
    if not host.address or " " in host.address or _is_unsafe(host.address, SHELL_CHARACTERS):
        raise UsageError(f"{where}: address {host.address!r}: expected a name or an IP address")
    if host.user is not None and ("@" in host.user or _is_unsafe(host.user, SHELL_CHARACTERS - set("$\\"))):
        raise UsageError(f"{where}: user {host.user!r}: expected a login name")
    if host.is_local and (host.user or host.port or host.identity_file or host.ssh_options):
        raise UsageError(f"{where}: address is local, so ssh settings do not apply")
    texts = [("ssh_options", option) for option in host.ssh_options]
    texts += [(key, getattr(host, key) or "") for key in ("identity_file", "python", "workdir", "interface")]
    for key, text in texts:
        if not text.isprintable():
            raise UsageError(f"{where}: {key} {text!r}: it contains control characters")


def _is_unsafe(text: str, special: Collection[str]) -> bool:
    """Return whether ssh could take a text for an option, or a shell that it starts for more than one word."""
    return text.startswith("-") or not text.isprintable() or any(character in special for character in text)


def _validation_message(error: msgspec.ValidationError) -> str:
    what, _, where = str(error).partition(" - at ")
    return f"{where.strip('`').removeprefix('$.')}: {what[0].lower()}{what[1:].replace('`', '')}" if where else what
