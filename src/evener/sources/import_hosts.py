"""Import lists of hosts and merge them into one fleet; no host is contacted.

`ssh_config`, `hostfile` and `ansible_inventory` each read one kind of list and return a `HostList`. Lists of ssh and of
Ansible are read by their own programs.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import itertools
import os
import re
import resource
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from evener.core.base.errors import EvenerError, UsageError
from evener.core.cluster.fleet_file import HostConfig, sanitize_host_name

MAX_FILE_BYTES = 1_000_000  # of a list; a larger file is something else
MAX_HOSTS = 4096
READER_TIMEOUT_S = 30.0  # of a program that reads a list; a small text can stand for a large one
READER_MEMORY_BYTES = 2**30
MAX_TARGET_CHARS = 300  # characters of an address with user and port
LOCALHOST_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_SSH_PORT = 22
VALID_PORTS = range(1, 65536)
# A name or an IPv4 address; ssh refuses characters that are special to a shell.
HOSTNAME_PATTERN = re.compile(r"\w(?:[\w.-]{0,251}\w)?\.?")
IPV6_PATTERN = re.compile(r"(?=[^:]*:[^:]*:)[0-9A-Fa-f:.]+(?:%[\w.-]+)?")  # checks the characters only
USERNAME_PATTERN = re.compile(r"[\w.][\w.+\\$-]*")
SSH_TARGET_PATTERN = re.compile(
    rf"(?:ssh://)?(?:(?P<user>{USERNAME_PATTERN.pattern})@)?"
    rf"(?:(?P<bare>{IPV6_PATTERN.pattern})|(?:\[(?P<v6>{IPV6_PATTERN.pattern})\]|(?P<name>{HOSTNAME_PATTERN.pattern}))(?::(?P<port>[0-9]{{1,5}}))?)"
)


class ImportedHost(msgspec.Struct, frozen=True):
    """One machine of a list."""

    name: str  # as in the list: not yet a valid name in fleet.toml
    host: HostConfig


class SkippedHost(msgspec.Struct, frozen=True):
    """A machine of a list that is not imported, and why."""

    name: str
    why: str


class HostList(msgspec.Struct):
    """The machines of one list."""

    hosts: list[ImportedHost] = []
    skipped: list[SkippedHost] = []
    notes: list[str] = []  # sentences, each about something that was not imported as written


def read_text_file(file: Path) -> str:
    """Return the text of a list, its lines ended by a newline; UsageError if it is not text."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file", hint=_suggest_file(file)) from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if b"\0" in content:
        raise UsageError(f"{file}: not a text: byte {content.index(0)} is 0")
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{file}: larger than 1 MB: not a list of machines", hint="a file with these machines alone")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{file}, line {line}: not UTF-8: byte 0x{content[error.start]:02x}",
            hint="save it as UTF-8; iconv -f latin1 -t utf-8 converts Latin-1",
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _suggest_file(file: Path) -> str:
    """Return a hint at the file that was meant by one that does not exist."""
    try:
        close = difflib.get_close_matches(file.name, os.listdir(file.parent), n=1)
    except OSError:
        return f"there is no folder {file.parent} either"
    return f"did you mean {file.parent / close[0]}?" if close else f"no file in {file.parent} has a similar name"


def run_list_reader(
    argv: list[str], file: Path, env: Mapping[str, str], install: str
) -> subprocess.CompletedProcess[str]:
    """Run the program whose kind of list a file is, with limited time and memory; `install` says how to get it."""
    try:
        return subprocess.run(
            argv, env=os.environ | env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False, timeout=READER_TIMEOUT_S, preexec_fn=_limit_memory,
        )  # fmt: skip
    except FileNotFoundError:
        raise EvenerError(f"{file}: it is read by {argv[0]}, which is not installed", hint=install) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{file}: not read after {READER_TIMEOUT_S:.0f} s by {argv[0]}") from None


def _limit_memory() -> None:
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (READER_MEMORY_BYTES, READER_MEMORY_BYTES))


def local_host_name() -> str:
    """Return the name of this machine for a fleet file: its own host name."""
    host = socket.gethostname().partition(".")[0]
    return "here" if host.lower() in ("", *LOCALHOST_NAMES) else sanitize_host_name(host)


def parse_ssh_target(text: str) -> HostConfig | None:
    """Parse a machine as it is named for ssh; return None if the text is not valid.

    >>> host = parse_ssh_target("ben@192.168.1.28:2222")
    >>> host.address, host.user, host.port
    ('192.168.1.28', 'ben', 2222)
    >>> (parse_ssh_target("[fe80::1%eth0]:22").address, parse_ssh_target("fe80::1").address,
    ...  parse_ssh_target("localhost").address)
    ('fe80::1%eth0', 'fe80::1', 'local')
    >>> parse_ssh_target("a,b"), parse_ssh_target("attic:99999"), parse_ssh_target("-oProxyCommand=x")
    (None, None, None)
    """
    match = SSH_TARGET_PATTERN.fullmatch(text.removesuffix("/")) if len(text) <= MAX_TARGET_CHARS else None
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and port not in VALID_PORTS):
        return None
    address = match["name"] or match["v6"] or match["bare"]
    return make_host(address, user=match["user"], port=port) if is_ssh_address(address) else None


def make_host(address: str, *, user: str | None = None, port: int | None = None) -> HostConfig:
    """Return the host at an address; localhost is this machine, unless a user or another port is given."""
    if address == "local" or (address.lower() in LOCALHOST_NAMES and user is None and port in (None, DEFAULT_SSH_PORT)):
        return HostConfig(address="local")
    return HostConfig(address=address, user=user, port=port)


def is_ssh_address(text: str) -> bool:
    """Return whether ssh accepts the text as a machine.

    >>> is_ssh_address("gpu-1.lab"), is_ssh_address("fe80::1"), is_ssh_address("gpu[1-4]"), is_ssh_address("-p")
    (True, True, False, False)
    """
    if len(text) <= MAX_TARGET_CHARS and IPV6_PATTERN.fullmatch(text):
        try:
            ipaddress.IPv6Address(text.partition("%")[0])
        except ValueError:
            return False
        return True
    return len(text) <= MAX_TARGET_CHARS and bool(HOSTNAME_PATTERN.fullmatch(text))


def merge_host_lists(listings: Iterable[HostList]) -> tuple[dict[str, HostConfig], HostList]:
    """Merge lists; return the hosts under unique names, a machine of several lists once, and what to report."""
    report = HostList()
    hosts: dict[str, HostConfig] = {}
    names: set[str] = set()  # in lower case: some file systems do not distinguish case
    machines: dict[object, str] = {}
    for listing in listings:
        report.skipped += listing.skipped
        report.notes += listing.notes
        for entry in listing.hosts:
            key = machine_key(entry.host)
            if key in machines:
                same = machines[key]
                if entry.name != same:
                    reason = f"this machine, like {same}" if entry.host.is_local else f"the same machine as {same}"
                    report.skipped.append(SkippedHost(entry.name, reason))
                continue
            if len(hosts) == MAX_HOSTS:
                raise UsageError(f"more than {MAX_HOSTS} machines: no fleet is so large")
            name = machines[key] = _unique_name(sanitize_host_name(entry.name), names)
            names.add(name.lower())
            hosts[name] = entry.host
            report.hosts.append(ImportedHost(name, entry.host))
            if name != entry.name:
                reason = (
                    "two hosts have one name"
                    if name != sanitize_host_name(entry.name)
                    else "a name has letters, digits and ._- only"
                )
                report.notes.append(f"{entry.name} is called {name}: {reason}")
    return hosts, report


def machine_key(host: HostConfig) -> object:
    """Return a key that is equal for two hosts that are one machine, as far as is known without contacting them."""
    return (host.address.lower().rstrip("."), host.port or DEFAULT_SSH_PORT, tuple(host.ssh_options))


def _unique_name(name: str, taken: set[str]) -> str:
    if name.lower() not in taken:
        return name
    numbered = (f"{name[:58]}-{number}" for number in itertools.count(2))
    return next(candidate for candidate in numbered if candidate.lower() not in taken)
