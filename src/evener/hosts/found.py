"""What do other lists of machines have in common, and how does one fleet come of them? Nothing is contacted.

`sshconfig`, `hostfile` and `inventory` each read one kind of list and yield a Listing.
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Host

MOST_BYTES = 1_000_000  # of a list; larger ones are something else
MOST_HOSTS = 4096
LONGEST = 300  # characters of what names a machine
HERE = ("localhost", "127.0.0.1", "::1")
SSH_PORT = 22
PORTS = range(1, 65536)
# A name or an IPv4 address; ssh refuses what a shell would take for its own.
NAME = re.compile(r"\w(?:[\w.-]{0,251}\w)?\.?")
IPV6 = re.compile(r"(?=[^:]*:[^:]*:)[0-9A-Fa-f:.]+(?:%[\w.-]+)?")  # as far as its characters
USER = re.compile(r"[\w.][\w.+\\$-]*")
TARGET = re.compile(
    rf"(?:ssh://)?(?:(?P<user>{USER.pattern})@)?"
    rf"(?:(?P<bare>{IPV6.pattern})|(?:\[(?P<v6>{IPV6.pattern})\]|(?P<name>{NAME.pattern}))(?::(?P<port>[0-9]{{1,5}}))?)"
)


class Found(msgspec.Struct, frozen=True):
    """One machine of a list."""

    name: str  # as the list calls it: not yet one of fleet.toml's
    host: Host


class LeftOut(msgspec.Struct, frozen=True):
    """One that stands there and is not taken."""

    name: str
    why: str


class Listing(msgspec.Struct):
    """What a list says."""

    found: list[Found] = []
    left_out: list[LeftOut] = []
    notes: list[str] = []  # sentences, each of something that was not taken as it stands there


def text_of(file: Path) -> str:
    """The text of a list, its lines ended by a newline; UsageError where it is none."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file", hint=_near(file)) from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if b"\0" in content:
        raise UsageError(f"{file}: not a text: byte {content.index(0)} is 0")
    if len(content) > MOST_BYTES:
        raise UsageError(f"{file}: larger than 1 MB: not a list of machines", hint="a file with these machines alone")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{file}, line {line}: not UTF-8: byte 0x{content[error.start]:02x}",
            hint="save it as UTF-8; iconv -f latin1 -t utf-8 does where it was Latin-1",
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _near(file: Path) -> str:
    """What may have been meant by a file that is not there."""
    try:
        close = difflib.get_close_matches(file.name, os.listdir(file.parent), n=1)
    except OSError:
        return f"there is no folder {file.parent} either"
    return f"did you mean {file.parent / close[0]}?" if close else f"nothing in {file.parent} has such a name"


def target(word: str) -> Host | None:
    """A machine as one names it for ssh; None where it is no such word.

    >>> host = target("ben@192.168.1.28:2222")
    >>> host.address, host.user, host.port
    ('192.168.1.28', 'ben', 2222)
    >>> target("[fe80::1%eth0]:22").address, target("fe80::1").address, target("localhost").address
    ('fe80::1%eth0', 'fe80::1', 'local')
    >>> target("a,b"), target("attic:99999"), target("-oProxyCommand=x")
    (None, None, None)
    """
    said = TARGET.fullmatch(word.removesuffix("/")) if len(word) <= LONGEST else None
    port = int(said["port"]) if said and said["port"] else None
    if said is None or (port is not None and port not in PORTS):
        return None
    address = said["name"] or said["v6"] or said["bare"]
    return host_at(address, user=said["user"], port=port) if is_address(address) else None


def host_at(address: str, *, user: str | None = None, port: int | None = None) -> Host:
    """The host that ssh reaches so; localhost is this machine, unless somebody logs in there or on another port."""
    if address == "local" or (address.lower() in HERE and user is None and port in (None, SSH_PORT)):
        return Host(address="local")
    return Host(address=address, user=user, port=port)


def is_address(word: str) -> bool:
    """Would ssh take it for a machine?

    >>> is_address("gpu-1.lab"), is_address("fe80::1"), is_address("gpu[1-4]"), is_address("-p")
    (True, True, False, False)
    """
    if len(word) <= LONGEST and IPV6.fullmatch(word):
        try:
            ipaddress.IPv6Address(word.partition("%")[0])
        except ValueError:
            return False
        return True
    return len(word) <= LONGEST and bool(NAME.fullmatch(word))


def host_name(word: str) -> str:
    """A name that fleet.toml takes, as near to the word as it can be.

    >>> host_name("gpu-1.lab"), host_name("büro 2"), host_name("fe80::1"), host_name("中央")
    ('gpu-1.lab', 'buro-2', 'fe80-1', 'host')
    """
    plain = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("-._")[:63].rstrip("-") or "host"


def merged(listings: Iterable[Listing]) -> tuple[dict[str, Host], Listing]:
    """Hosts under names of their own, a machine that several lists have once; and all that is to be told."""
    told = Listing()
    hosts: dict[str, Host] = {}
    names: set[str] = set()  # in small letters, for some file systems keep no others apart
    machines: dict[object, str] = {}
    for listing in listings:
        told.left_out += listing.left_out
        told.notes += listing.notes
        for one in listing.found:
            key = machine(one.host)
            if key in machines:
                same = machines[key]
                if one.name != same:
                    why = f"this machine, as {same} is" if one.host.is_local else f"the same machine as {same}"
                    told.left_out.append(LeftOut(one.name, why))
                continue
            if len(hosts) == MOST_HOSTS:
                raise UsageError(f"more than {MOST_HOSTS} machines: no fleet is so large")
            name = machines[key] = _unique(host_name(one.name), names)
            names.add(name.lower())
            hosts[name] = one.host
            told.found.append(Found(name, one.host))
            if name != one.name:
                why = "two have one name" if name != host_name(one.name) else "letters, digits and ._- make a name"
                told.notes.append(f"{one.name} is called {name}: {why}")
    return hosts, told


def machine(host: Host) -> object:
    """Equal for two hosts that are one machine, as far as can be told without asking them."""
    return (host.address.lower().rstrip("."), host.port or SSH_PORT, tuple(host.ssh_options))


def _unique(name: str, taken: set[str]) -> str:
    if name.lower() not in taken:
        return name
    numbered = (f"{name[:58]}-{number}" for number in itertools.count(2))
    return next(one for one in numbered if one.lower() not in taken)
