"""Hosts imported from other tools' lists are reachable through sshd, with their keys and proxies."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from evener.core.cluster.fleet_file import Fleet, HostConfig, format_fleet, load_fleet, parse_fleet
from evener.core.run.trust import trust_fleet
from evener.lab.emulated_lab import EmulatedLab
from evener.sources.ansible_inventory import import_inventory
from evener.sources.import_hosts import merge_host_lists
from evener.sources.ssh_config import import_ssh_config
from evener.ssh.session import connect


def as_ssh_config(hosts: dict[str, HostConfig]) -> str:
    lines = []
    for name, host in hosts.items():
        lines += [f"Host {name}", f"HostName {host.address}", f"User {host.user}", f"IdentityFile {host.identity_file}"]
        lines += [option.replace("=", " ", 1) for option in host.ssh_options]
    return "\n".join(lines)


def as_inventory(hosts: dict[str, HostConfig]) -> str:
    variables = {
        name: {
            "ansible_host": host.address,
            "ansible_user": host.user,
            "ansible_ssh_private_key_file": host.identity_file,
            "ansible_ssh_common_args": shlex.join(f"-o{option}" for option in host.ssh_options),
        }
        for name, host in hosts.items()
    }
    return json.dumps({"all": {"hosts": variables}})  # which is YAML


def assert_reached(fleet: Fleet) -> None:
    trust_fleet(fleet)
    with connect(fleet) as (sessions, errors):
        assert not errors
        assert list(sessions) == ["a", "b"]


def test_hosts_imported_from_lists_are_reachable(pair: EmulatedLab, tmp_path: Path) -> None:
    hosts = load_fleet(pair.state.fleet_file or "").hosts
    (tmp_path / "config").write_text(as_ssh_config(hosts))
    (tmp_path / "inventory").write_text(as_inventory(hosts))
    for listing in (import_ssh_config(tmp_path / "config"), import_inventory(tmp_path / "inventory")):
        found, _ = merge_host_lists([listing])
        assert_reached(parse_fleet(format_fleet(found), "fleet.toml"))
