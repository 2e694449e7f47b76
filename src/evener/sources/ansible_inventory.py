"""Import machines from an Ansible inventory, as `ansible-inventory --list` reads it.

The file is data: of Ansible's inventory plugins only those that parse text are enabled, so that neither a script nor a
cloud's plugin is started, and no ansible.cfg is read that could name others. Templates are not evaluated.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins, from_json
from evener.core.base.errors import UsageError, did_you_mean
from evener.core.cluster.fleet_file import HostConfig
from evener.sources.import_hosts import (
    DEFAULT_SSH_PORT,
    USERNAME_PATTERN,
    VALID_PORTS,
    HostList,
    ImportedHost,
    SkippedHost,
    is_ssh_address,
    make_host,
    read_text_file,
    run_list_reader,
)

ALL, UNGROUPED = "all", "ungrouped"
INSTALL_HINT = "pip install ansible-core"
SSH_CONNECTIONS = ("ssh", "smart", "paramiko", "paramiko_ssh", "libssh")
ADDRESS_KEYS, USER_KEYS = ("ansible_host", "ansible_ssh_host"), ("ansible_user", "ansible_ssh_user")
PORT_KEYS = ("ansible_port", "ansible_ssh_port")
PRIVATE_KEY_KEYS = ("ansible_ssh_private_key_file", "ansible_private_key_file")
SSH_ARGS_KEYS = ("ansible_ssh_common_args", "ansible_ssh_extra_args")
# evener's
RESERVED_SSH_OPTION = re.compile(r"(?i)control(master|path|persist)|batchmode|loglevel|requesttty|remotecommand")
PASSWORD_KEYS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")
LIST_COMMAND_HINT = (
    "ansible-inventory -i {} --list --yaml > hosts.yml writes what Ansible makes of it: --inventory hosts.yml"
)

Vars = dict[str, str]


class InventoryGroup(msgspec.Struct):
    """A group as `ansible-inventory --list` prints it; `hosts` are without those of its children."""

    hosts: list[str] = []
    children: list[str] = []


class Inventory(msgspec.Struct):
    """What `ansible-inventory --list` prints: the groups that are not empty, and each host's variables."""

    groups: dict[str, InventoryGroup]
    host_vars: dict[str, dict[str, Any]]


def import_inventory(file: Path, group: str | None = None) -> HostList:
    """Return the machines of an inventory, or of one of its groups."""
    if os.path.isdir(file):
        raise UsageError(f"{file}: a folder", hint=f"name one file of it; or: {LIST_COMMAND_HINT.format(file)}")
    read_text_file(file)  # reports what is not a text
    return hosts_of_inventory(read_inventory(file), file, group)


def read_inventory(file: Path) -> Inventory:
    """Read a file by ansible-inventory."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ansible.cfg"
        config.touch()
        env = {
            "ANSIBLE_CONFIG": str(config),
            "ANSIBLE_HOME": folder,
            "ANSIBLE_PLAYBOOK_DIR": folder,  # beside a playbook there may be plugins
            "ANSIBLE_INVENTORY_ENABLED": "yaml,ini",
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",  # the only encoding that Ansible accepts
        }
        argv = [ansible_inventory_program(), "--list", "-i", os.path.abspath(file)]
        done = run_list_reader(argv, file, env, INSTALL_HINT)
    if done.returncode == 0:
        return parse_inventory_list(done.stdout)
    reasons = re.findall(r"with '?(\w+)'? plugin: (.+)", done.stderr)
    problem = "; ".join(f"as {plugin}: {why}" for plugin, why in reasons) or done.stderr.strip().rpartition("\n")[2]
    raise UsageError(f"{file}: not read by ansible-inventory: {problem}", hint=LIST_COMMAND_HINT.format(file))


def ansible_inventory_program() -> str:
    """Return the program of this Python's environment, which need not be activated, or the one on the PATH."""
    beside = Path(sys.executable).with_name("ansible-inventory")
    return str(beside) if beside.exists() else beside.name


def parse_inventory_list(text: str) -> Inventory:
    """Parse the JSON that `ansible-inventory --list` prints."""
    groups = from_json(text, dict[str, dict[str, Any]])
    host_vars = groups.pop("_meta", {}).get("hostvars", {})
    return from_builtins({"groups": groups, "host_vars": host_vars}, Inventory)


def hosts_of_inventory(inventory: Inventory, file: Path, group: str | None = None) -> HostList:
    """Return the machines of an inventory that was read from a file, or of one of its groups."""
    if group is not None and group not in inventory.groups:
        known = [candidate for candidate in inventory.groups if candidate not in (ALL, UNGROUPED)]
        raise UsageError(f"{file}: no group {group}", hint=did_you_mean(group, known) if known else "it has no groups")
    names = _hosts_in_group(inventory.groups, group or ALL)
    if not names:
        problem = f"group {group} has no host" if group else "it names no host"
        raise UsageError(f"{file}: {problem}", hint="is it an inventory of Ansible?")
    listing = HostList()
    for name in names:
        variables = {key: _to_text(value) for key, value in inventory.host_vars.get(name, {}).items()}
        _add_host(listing, name, variables, f"{file}: host {name}")
    listing.notes = list(dict.fromkeys(listing.notes))
    return listing


def _hosts_in_group(groups: dict[str, InventoryGroup], group: str) -> list[str]:
    """Return the hosts of a group and of the groups in it, each once."""
    names: dict[str, None] = {}
    seen: set[str] = set()
    pending = [group]
    while pending:
        one = pending.pop()
        if one in groups and one not in seen:
            seen.add(one)
            names |= dict.fromkeys(groups[one].hosts)
            pending += reversed(groups[one].children)
    return list(names)


def _to_text(value: Any) -> str:
    """Return a variable as text; an encrypted one is {"__ansible_vault": "$ANSIBLE_VAULT;…"}."""
    if isinstance(value, dict):
        return str(next(iter(value.values()), ""))
    return "" if value is None else str(value)


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
    """Return whether a value is a template, or encrypted in a vault."""
    return "{{" in text or text.startswith("$ANSIBLE_VAULT")


def _abbreviate(text: str) -> str:
    """Return the first line of a text, at most 40 characters of it."""
    line = text.partition("\n")[0]
    return line if len(line) <= 40 else f"{line[:40]}…"


def _parse_ssh_args(text: str, where: str) -> tuple[list[str], list[str]]:
    """Split `-o ProxyJump=gate -C` into (options for fleet.toml, other arguments)."""
    try:
        words, options, others = iter(shlex.split(text)), [], []
    except ValueError as error:
        raise UsageError(f"{where}: ssh arguments: {str(error).lower()}") from None
    for word in words:
        value = word[2:] if word[:2] in ("-o", "-J") else ""
        if word[:2] not in ("-o", "-J") or not (value := value or next(words, "")):
            others.append(word)
        elif word[:2] == "-o" and RESERVED_SSH_OPTION.match(value):
            others.append(f"-o {value}")
        else:
            options.append(value if word[:2] == "-o" else f"ProxyJump={value}")
    return options, others
