"""Import machines from an Ansible inventory: static ones, INI or YAML, without Ansible.

A host has the variables of every group that it is in, parents before children, then its own, which win.
[docs.ansible.com, "How to build your inventory"]. Templates, vaults and group_vars/ are not evaluated.
"""

from __future__ import annotations

import graphlib
import ipaddress
import os
import re
import shlex
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import UsageError, did_you_mean
from evener.core.cluster.fleet_file import HostConfig
from evener.sources.import_hosts import (
    DEFAULT_SSH_PORT,
    MAX_HOSTS,
    USERNAME_PATTERN,
    VALID_PORTS,
    HostList,
    ImportedHost,
    SkippedHost,
    is_ssh_address,
    make_host,
    read_text_file,
)
from evener.sources.safe_yaml import YamlError, read_yaml

ALL, UNGROUPED = "all", "ungrouped"
MAX_GROUPS = 4096
MAX_LINE_CHARS = 10_000
SECTION = re.compile(r"\[([^:\]\s]+)(?::(\w+))?\]\s*(?:#.*)?")
LOOKS_LIKE_YAML = re.compile(r"(?:---|%YAML|\{|[^\s\[#;]+:(?:\s|$))")
SSH_CONNECTIONS = ("ssh", "smart", "paramiko", "paramiko_ssh", "libssh")
ADDRESS_KEYS, USER_KEYS, PORT_KEY = (
    ("ansible_host", "ansible_ssh_host"),
    ("ansible_user", "ansible_ssh_user"),
    "ansible_port",
)
PORT_KEYS = (PORT_KEY, "ansible_ssh_port")
PRIVATE_KEY_KEYS = ("ansible_ssh_private_key_file", "ansible_private_key_file")
SSH_ARGS_KEYS = ("ansible_ssh_common_args", "ansible_ssh_extra_args")
# evener's
RESERVED_SSH_OPTION = re.compile(r"(?i)control(master|path|persist)|batchmode|loglevel|requesttty|remotecommand")
PASSWORD_KEYS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")
LIST_COMMAND_HINT = (
    "ansible-inventory -i {} --list --yaml > hosts.yml writes what Ansible makes of it: --inventory hosts.yml"
)

Vars = dict[str, str]


class AnsibleInventory:
    """The groups and hosts of a file."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.hosts: dict[str, Vars] = {}
        self.members: dict[str, dict[str, None]] = {ALL: {}, UNGROUPED: {}}
        self.children: dict[str, dict[str, None]] = {}
        self.vars: dict[str, Vars] = {}

    def add_group(self, group: str) -> None:
        """Add a group, if it is new."""
        self.members.setdefault(group, {})
        if len(self.members) > MAX_GROUPS:
            raise UsageError(f"{self.where}: more than {MAX_GROUPS} groups")

    def add_hosts(self, group: str, pattern: str, variables: Vars, where: str) -> None:
        """Add the hosts of a line, `gpu[01:08]:2222`, with its variables."""
        self.add_group(group)
        names, port = _parse_host_pattern(pattern, where)
        own = ({PORT_KEY: port} if port else {}) | variables
        for name in names:
            self.members[group][name] = None
            self.hosts.setdefault(name, {}).update(own)
        if len(self.hosts) > MAX_HOSTS:
            raise UsageError(f"{self.where}: more than {MAX_HOSTS} hosts")

    def add_child(self, group: str, child: str) -> None:
        """Add a group as a child of another."""
        self.add_group(group)
        self.add_group(child)
        self.children.setdefault(group, {})[child] = None

    def sort_groups(self) -> list[str]:
        """Return all groups, parents first; UsageError if one contains itself."""
        try:
            order = list(graphlib.TopologicalSorter({group: self.children.get(group, {}) for group in self.members})
                         .static_order())  # fmt: skip
        except graphlib.CycleError as error:
            cycle = " → ".join(reversed(error.args[1]))
            raise UsageError(f"{self.where}: a group is its own child: {cycle}", hint="take one of them out") from None
        return order[::-1]

    def group_depths(self) -> dict[str, int]:
        """Return the depth of each group below `all`, by the longest path."""
        depths = {group: int(group != ALL) for group in self.members}
        for group in self.sort_groups():
            for child in self.children.get(group, ()):
                depths[child] = max(depths[child], depths[group] + 1)
        return depths

    def hosts_in_group(self, group: str) -> list[str]:
        """Return the hosts of a group and of the groups in it, in the order of the file."""
        if group == ALL:
            return list(self.hosts)
        groups, pending = {group}, [group]
        while pending:
            new = self.children.get(pending.pop(), {}).keys() - groups
            groups |= new
            pending += new
        names = {host for member_group in groups for host in self.members[member_group]}
        return [host for host in self.hosts if host in names]

    def resolve_host_vars(self, hosts: Iterable[str]) -> Iterator[tuple[str, Vars]]:
        """Yield each host with all its variables."""
        depths, parents = self.group_depths(), _invert_graph(self.children)
        groups_of = _invert_graph(self.members)
        for host in hosts:
            ancestors, pending = {ALL}, list(groups_of.get(host, ()))
            while pending:
                group = pending.pop()
                if group not in ancestors:
                    ancestors.add(group)
                    pending += parents.get(group, ())
            variables: Vars = {}
            for _, _, group in sorted(
                (depths[ancestor], self._priority(ancestor), ancestor) for ancestor in ancestors & self.vars.keys()
            ):
                variables |= self.vars[group]
            yield host, variables | self.hosts[host]

    def _priority(self, group: str) -> int:
        value = self.vars[group].get("ansible_group_priority", "1")
        return int(value) if re.fullmatch("-?[0-9]{1,9}", value) else 1


def _invert_graph(graph: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Map each child to its parents."""
    parents: dict[str, list[str]] = {}
    for parent, children in graph.items():
        for child in children:
            parents.setdefault(child, []).append(parent)
    return parents


def import_inventory(file: Path, group: str | None = None) -> HostList:
    """Return the machines of an inventory, or of one of its groups."""
    if os.path.isdir(file):
        raise UsageError(f"{file}: a folder", hint=f"name one file of it; or: {LIST_COMMAND_HINT.format(file)}")
    inventory = read_inventory(file)
    if group is not None and group not in inventory.members:
        known = [candidate for candidate in inventory.members if candidate not in (ALL, UNGROUPED)]
        raise UsageError(f"{file}: no group {group}", hint=did_you_mean(group, known) if known else "it has no groups")
    names = inventory.hosts_in_group(group or ALL)
    if not names:
        problem = f"group {group} has no host" if group else "it names no host"
        raise UsageError(f"{file}: {problem}", hint="is it an inventory of Ansible?")
    listing = HostList()
    for name, variables in inventory.resolve_host_vars(names):
        _add_host(listing, name, variables, f"{file}: host {name}")
    listing.notes = list(dict.fromkeys(listing.notes))
    if unread := [name for name in ("group_vars", "host_vars") if (file.parent / name).is_dir()]:
        listing.notes.append(f"{' and '.join(unread)} next to {file} are not read; {LIST_COMMAND_HINT.format(file)}")
    return listing


def read_inventory(file: Path) -> AnsibleInventory:
    """Read a file of either format, detected by its name, else by its first line."""
    text, inventory = read_text_file(file), AnsibleInventory(str(file))
    if text.startswith("#!"):
        raise UsageError(f"{file}: a program that makes an inventory", hint=LIST_COMMAND_HINT.format(file))
    lines = (line for line in map(str.strip, text.split("\n")) if line and line[0] not in "#;")
    is_yaml = file.suffix in (".yml", ".yaml", ".json") or (
        file.suffix != ".ini" and LOOKS_LIKE_YAML.match(next(lines, "")) is not None
    )
    if is_yaml:
        _read_yaml(inventory, text)
    else:
        _read_ini(inventory, text)
    return inventory


def _read_ini(inventory: AnsibleInventory, text: str) -> None:
    group, kind = UNGROUPED, "hosts"
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        where = f"{inventory.where}, line {number}"
        if not line or line[0] in "#;":
            continue
        if section := SECTION.fullmatch(line):
            group, kind = section[1], section[2] or "hosts"
            if kind not in ("hosts", "children", "vars"):
                raise UsageError(f"{where}: [{group}:{kind}]", hint=did_you_mean(kind, ["children", "vars"]))
            inventory.add_group(group)
        elif line[0] == "[" and line[-1] == "]":
            raise UsageError(f"{where}: {line}: expected [GROUP], [GROUP:children] or [GROUP:vars]")
        elif kind == "hosts":
            pattern, *pairs = _split_line(line, where)
            inventory.add_hosts(group, pattern, dict(_parse_key_value(pair, where) for pair in pairs), where)
        elif kind == "vars":
            key, value = _parse_key_value(line, where)
            inventory.vars.setdefault(group, {})[key] = value
        else:
            inventory.add_child(group, line.partition("#")[0].strip())


def _split_line(line: str, where: str) -> list[str]:
    if len(line) > MAX_LINE_CHARS:
        raise UsageError(f"{where}: longer than {MAX_LINE_CHARS} characters")
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).lower()}") from None
    if not words:
        raise UsageError(f"{where}: it names no host")
    return words


def _parse_key_value(text: str, where: str) -> tuple[str, str]:
    """Parse `ansible_user = ben  # who set it up` into ("ansible_user", "ben")."""
    key, is_pair, value = text.partition("=")
    if not is_pair or not key.strip():
        raise UsageError(f"{where}: {text!r}: expected KEY=VALUE")
    value = value.strip()
    if value[:1] in ("'", '"') and (end := value.find(value[0], 1)) > 0:
        return key.strip(), value[1:end]
    return key.strip(), re.split(r"\s#", value, maxsplit=1)[0].rstrip()


def _read_yaml(inventory: AnsibleInventory, text: str) -> None:
    try:
        tree = read_yaml(text)
    except YamlError as error:
        where = inventory.where if error.line is None else f"{inventory.where}, line {error.line}"
        raise UsageError(f"{where}: not the YAML of an inventory: {error}") from None
    if isinstance(tree, dict) and "plugin" in tree:
        hint = LIST_COMMAND_HINT.format(inventory.where)
        raise UsageError(f"{inventory.where}: settings of a plugin that makes an inventory", hint=hint)
    for group, content in _require_table(tree, inventory.where, "groups").items():
        _read_group(inventory, group, content, group)


def _read_group(inventory: AnsibleInventory, group: str, content: Any, path: str) -> None:
    where = f"{inventory.where}: {path}"
    inventory.add_group(group)
    table = _require_table(content, where, "hosts, children and vars")
    for pattern, variables in _require_table(table.get("hosts"), f"{where}.hosts", "hosts").items():
        own = _string_values(_require_table(variables, f"{where}.hosts.{pattern}", "variables"))
        inventory.add_hosts(group, pattern, own, f"{where}.hosts")
    for child, inner in _require_table(table.get("children"), f"{where}.children", "groups").items():
        inventory.add_child(group, child)
        _read_group(inventory, child, inner, f"{path}.{child}")
    inventory.vars.setdefault(group, {}).update(
        _string_values(_require_table(table.get("vars"), f"{where}.vars", "variables"))
    )


def _require_table(tree: Any, where: str, what: str) -> dict[str, Any]:
    """Return a table; a single word is its only key, as in Ansible."""
    if isinstance(tree, dict) or tree is None:
        return tree or {}
    if isinstance(tree, str) and not tree.count(" "):
        return {tree: None}
    raise UsageError(f"{where}: expected a table of {what}", hint="each is a key, with a colon after it")


def _string_values(table: dict[str, Any]) -> Vars:
    return {key: value for key, value in table.items() if isinstance(value, str)}


def _parse_host_pattern(pattern: str, where: str) -> tuple[list[str], str]:
    """Parse `gpu[01:03]:2222` or `[fe80::1]:22` into (names, port)."""
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::([0-9]{1,5}))?", pattern)
    if bracketed and _is_ipv6(bracketed[1]):
        return [bracketed[1]], bracketed[2] or ""
    if _is_ipv6(pattern):
        return [pattern], ""
    name, colon, port = pattern.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port):
        name, port = pattern, ""
    return _expand_ranges(name, where), port


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _expand_ranges(pattern: str, where: str) -> list[str]:
    """Expand `gpu[01:03]` to gpu01, gpu02, gpu03; several ranges give all combinations."""
    names = [""]
    for number, part in enumerate(re.split(r"\[([^\[\]]*)\]", pattern)):
        values = _expand_range(part, pattern, where) if number % 2 else [part]
        if len(names) * len(values) > MAX_HOSTS:
            raise UsageError(f"{where}: {pattern} is more than {MAX_HOSTS} hosts")
        names = [name + value for name in names for value in values]
    return names


def _expand_range(text: str, pattern: str, where: str) -> list[str]:
    """Expand the text in brackets: 01:07:3 to 01, 04, 07, and a:c to a, b, c."""
    match = re.fullmatch(r"([0-9]{0,9}|[A-Za-z]):([0-9]{1,9}|[A-Za-z])(?::([0-9]{1,9}))?", text)
    begin, end, step = (match[1] or "0", match[2], int(match[3] or 1)) if match else ("", "", 0)
    if begin.isdecimal() and end.isdecimal():
        first, last, width = int(begin), int(end), len(begin) if begin[0] == "0" else 0
    else:
        first, last, width = string.ascii_letters.find(begin or "?"), string.ascii_letters.find(end or "?"), 0
    if step == 0 or begin.isdecimal() != end.isdecimal() or not 0 <= first <= last:
        raise UsageError(f"{where}: {pattern}: [{text}]: expected a range", hint="gpu[01:08], gpu[1:8:2] or gpu-[a:d]")
    numbers = range(first, last + 1, step)
    if len(numbers) > MAX_HOSTS:
        raise UsageError(f"{where}: {pattern} is more than {MAX_HOSTS} hosts")
    return [str(number).zfill(width) if begin.isdecimal() else string.ascii_letters[number] for number in numbers]


def _add_host(listing: HostList, name: str, variables: Vars, where: str) -> None:
    """Add the host that its variables describe to the list, or to the skipped ones."""
    connection = variables.get("ansible_connection", "ssh").rpartition(".")[2]
    if connection == "local":
        listing.hosts.append(ImportedHost(name, HostConfig(address="local")))
        return
    if connection not in SSH_CONNECTIONS:
        listing.skipped.append(SkippedHost(name, f"reached by {connection}, not by ssh"))
        return
    address, user, key = (
        _render_inventory_hostname(_first_value(variables, keys), name)
        for keys in (ADDRESS_KEYS, USER_KEYS, PRIVATE_KEY_KEYS)
    )
    port = _first_value(variables, PORT_KEYS)
    options, others = _parse_ssh_args(" ".join(variables.get(argument, "") for argument in SSH_ARGS_KEYS), where)
    if templated := [value for value in (address, port, *options) if _is_templated(value)]:
        listing.skipped.append(SkippedHost(name, f"{_abbreviate(templated[0])} is for Ansible to evaluate"))
        return
    settings = {"login name": user, "key file": key}
    listing.notes += [
        f"the {what} {_abbreviate(value)} is not taken over: it is for Ansible to evaluate"
        for what, value in settings.items()
        if _is_templated(value)
    ]
    address, user, key = address or name, *("" if _is_templated(value) else value for value in (user, key))
    if not is_ssh_address(address):
        raise UsageError(f"{where}: {address!r} is neither a name nor an IP address")
    if user and not USERNAME_PATTERN.fullmatch(user):
        raise UsageError(f"{where}: ansible_user {user!r}: expected a login name")
    if port and (not re.fullmatch("[0-9]{1,5}", port) or int(port) not in VALID_PORTS):
        raise UsageError(f"{where}: ansible_port {port!r}: expected a whole number to {VALID_PORTS[-1]}")
    port_number = int(port) if port and int(port) != DEFAULT_SSH_PORT else None
    host = make_host(address, user=user or None, port=port_number)
    if not host.is_local:
        host = msgspec.structs.replace(host, identity_file=key or None, ssh_options=options)
    listing.hosts.append(ImportedHost(name, host))
    if others:
        listing.notes.append(f"these ssh arguments are not taken over: {' '.join(others)}")
    if _first_value(variables, PASSWORD_KEYS):
        listing.notes.append("passwords are not taken over: evener logs in by key; ssh-copy-id installs one on a host")


def _first_value(variables: Vars, keys: Iterable[str]) -> str:
    return next((variables[key] for key in keys if key in variables), "")


def _render_inventory_hostname(text: str, name: str) -> str:
    """Replace `inventory_hostname`, the only template that is evaluated here."""
    return re.sub(r"\{\{ *inventory_hostname *\}\}", lambda _: name, text)


def _is_templated(text: str) -> bool:
    """Return whether it is a template, or encrypted in a vault."""
    return "{{" in text or text.startswith("$ANSIBLE_VAULT")


def _abbreviate(text: str) -> str:
    """Return enough of it to identify it."""
    line = text.partition("\n")[0]
    return line if len(line) <= 40 else f"{line[:40]}…"


def _parse_ssh_args(text: str, where: str) -> tuple[list[str], list[str]]:
    """Split `-o ProxyJump=gate -C` into (options for fleet.toml, other arguments)."""
    words, options, others = iter(_split_line(text, where) if text.strip() else []), [], []
    for word in words:
        value = word[2:] if word[:2] in ("-o", "-J") else ""
        if word[:2] not in ("-o", "-J") or not (value := value or next(words, "")):
            others.append(word)
        elif word[:2] == "-o" and RESERVED_SSH_OPTION.match(value):
            others.append(f"-o {value}")
        else:
            options.append(value if word[:2] == "-o" else f"ProxyJump={value}")
    return options, others
