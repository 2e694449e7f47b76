"""Do the hosts of somebody else's list answer, once they stand in a fleet file? By sshd, with keys, proxy and all."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from evener.core.fleet import Fleet, Host, fleet_text, load_fleet, parse_fleet
from evener.hosts.found import merged
from evener.hosts.inventory import of_inventory
from evener.hosts.session import connect
from evener.hosts.sshconfig import of_ssh_config
from evener.lab.lab import Lab


def as_ssh_config(hosts: dict[str, Host]) -> str:
    lines = []
    for name, host in hosts.items():
        lines += [f"Host {name}", f"HostName {host.address}", f"User {host.user}", f"IdentityFile {host.identity_file}"]
        lines += [option.replace("=", " ", 1) for option in host.ssh_options]
    return "\n".join(lines)


def as_inventory(hosts: dict[str, Host]) -> str:
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
    with connect(fleet) as (sessions, errors):
        assert not errors
        assert list(sessions) == ["a", "b"]


def test_hosts_of_other_lists_are_reached(pair: Lab, tmp_path: Path) -> None:
    hosts = load_fleet(pair.state.fleet_file or "").hosts
    (tmp_path / "config").write_text(as_ssh_config(hosts))
    (tmp_path / "inventory").write_text(as_inventory(hosts))
    for listing in (of_ssh_config(tmp_path / "config"), of_inventory(tmp_path / "inventory")):
        found, _ = merged([listing])
        assert_reached(parse_fleet(fleet_text(found), "fleet.toml"))
