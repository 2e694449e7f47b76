"""Import machines from an MPI or DeepSpeed hostfile, and from arguments on the command line.

    worker-1 slots=8        Open MPI, DeepSpeed, Horovod
    worker-2:8              MPICH, Intel MPI
    ben@worker-3:2222       a login name and a port of ssh

Slots are parsed, so that a file with them is valid, but they are not used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from evener.core.base.errors import UsageError
from evener.sources.import_hosts import (
    USERNAME_PATTERN,
    HostList,
    ImportedHost,
    SkippedHost,
    machine_key,
    parse_ssh_target,
    read_text_file,
)

EXPECTED = "expected a name or an IP address, user@host:port, NAME=ADDRESS or local"
MIN_SSH_PORT = 1024  # a smaller number after a host's colon is its slots: no machine has so many
SLOTS_NOTE = (
    "slots are not written: evener starts a process for each GPU that it finds, and one where there is none; "
    "`ranks = N` below a host sets another number"
)


def parse_host_arguments(arguments: Iterable[str], local_name: str = "here") -> HostList:
    """Parse machines as typed: "attic=192.168.1.36", "ben@laptop:2222", "local", which is named `local_name`.

    Raise UsageError for what names no machine, or a file.
    """
    arguments = list(arguments)
    for name in arguments:
        if "=" not in name and os.path.isfile(name):
            flags = "--ssh-config, --hostfile or --inventory of evener fleet init reads a file"
            hint = f"{flags}; for a host of this name: {name}={name}"
            raise UsageError(f"{name} is a file", hint=hint)
    return HostList(hosts=[parse_host_argument(word, local_name) for word in arguments])


def parse_host_argument(argument: str, local_name: str = "here") -> ImportedHost:
    """Parse one machine as typed.

    >>> found = parse_host_argument("attic=192.168.1.36")
    >>> found.name, found.host.address
    ('attic', '192.168.1.36')
    """
    name, is_named, address = argument.partition("=")
    host = parse_ssh_target(address if is_named else argument)
    if host is None or (is_named and not name.strip()):
        raise UsageError(f"{argument!r} names no machine", hint=EXPECTED)
    return ImportedHost(name if is_named else local_name if host.is_local else host.address, host)


def import_hostfile(file: Path) -> HostList:
    """Return the machines of a hostfile, without duplicates. UsageError names the line that is not valid."""
    hosts: dict[object, ImportedHost] = {}
    slots: dict[object, int] = {}
    for number, line in enumerate(read_text_file(file).split("\n"), 1):
        words = " ".join(line.partition("#")[0].split()).replace(" =", "=").replace("= ", "=").split()
        if words:
            imported, count = _parse_host_line(words, f"{file}, line {number}")
            key = machine_key(imported.host)
            hosts.setdefault(key, imported)
            slots[key] = slots.get(key, 0) + count
    if not hosts:
        raise UsageError(f"{file}: it names no host", hint="one a line: worker-1 slots=8")
    return HostList(
        hosts=[imported for key, imported in hosts.items() if slots[key]],
        skipped=[SkippedHost(imported.name, "it has no slots") for key, imported in hosts.items() if not slots[key]],
        notes=[SLOTS_NOTE] if max(slots.values()) > 1 else [],
    )


def _parse_host_line(words: list[str], where: str) -> tuple[ImportedHost, int]:
    """Parse a line into (host, slots); 1 slot if it gives none."""
    first, *pairs = words
    count = 1
    name, _, digits = first.rpartition(":")
    if re.fullmatch(r"[0-9]{1,4}", digits) and int(digits) < MIN_SSH_PORT and (":" not in name or name.endswith("]")):
        first, count = name, int(digits)
    host = parse_ssh_target(first)
    if host is None:
        raise UsageError(f"{where}: {words[0]!r} names no machine", hint="expected one a line: worker-1 slots=8")
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not is_pair:
            raise UsageError(f"{where}: {pair!r}: expected KEY=VALUE after the host", hint="such as slots=8")
        if key == "slots":
            if not re.fullmatch(r"[0-9]{1,6}", value):
                raise UsageError(f"{where}: {pair!r}: expected a whole number")
            count = int(value)
        elif key in ("user", "username") and USERNAME_PATTERN.fullmatch(value) and not host.is_local:
            host = msgspec.structs.replace(host, user=host.user or value)
    return ImportedHost("localhost" if host.is_local else host.address, host), count
