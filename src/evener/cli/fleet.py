"""`evener fleet`: write the fleet file, which lists the hosts, from names, ssh, MPI or Ansible files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evener.cli.help import CliApp
from evener.cli.terminal import is_interactive
from evener.cli.trust import TRUST_HELP
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evener.core.cluster.fleet_file import Fleet, HostConfig
    from evener.sources.import_hosts import HostList

app = CliApp(help="The file that names your machines.")

MAX_PRINTED_HOSTS = 16  # hosts; a file with more is not printed whole
SOURCE_FLAGS = "--from-ssh-config, --hostfile FILE or --inventory FILE"
EXAMPLES = """
evener fleet init
evener fleet init local laptop=192.168.1.28 ben@attic
evener fleet init --from-ssh-config
evener fleet init local --hostfile hostfile
evener fleet init --inventory hosts.yml --group gpu
"""


@app.command(epilog=EXAMPLES)
def init(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST", help="as for ssh, also user@host:port; NAME=ADDRESS names the host; local is this machine"
        ),
    ] = None,
    from_ssh_config: Annotated[
        bool, typer.Option("--from-ssh-config", help="the hosts of ~/.ssh/config, without git forges")
    ] = False,
    ssh_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the hosts of another one, such as vagrant ssh-config prints"),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the hosts of a hostfile for mpirun or deepspeed")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the hosts of an Ansible inventory, INI or YAML")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="only this group of the inventory [all]")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="a new file to write")] = Path("fleet.toml"),
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a fleet file: which machines train, and how ssh reaches them.

    Without arguments it asks for the hosts. Several sources are merged; a machine in two of them is taken once. No
    machine is contacted; evener doctor does that later. If an imported file names programs, such as a ProxyCommand,
    evener doctor asks before it starts them, unless --trust approves them now.
    """
    from evener.core.base.errors import UsageError
    from evener.core.base.file_io import write_atomic
    from evener.core.cluster.fleet_file import format_fleet, out_option, parse_fleet
    from evener.core.run.trust import fleet_trust_request
    from evener.sources.import_hosts import merge_host_lists

    if os.path.lexists(out):
        raise UsageError(f"{out} exists already", hint="edit it, or write another file: --out other.toml")
    if group is not None and inventory is None:
        raise UsageError("--group needs an inventory", hint="--inventory FILE")
    listed = _read_sources(names or [], from_ssh_config, ssh_config, hostfile, inventory, group)
    hosts, host_list = merge_host_lists(listed or [_prompt_hosts(out)])
    if not hosts:
        why = "; ".join(line.removeprefix("left out: ") for line in _import_warnings(host_list))
        what = f"no machine is left to train on: {why}" if why else "no machine was named"
        raise UsageError(what, hint=f"evener fleet init local laptop=192.168.1.28{out_option(out)} names two")
    text = format_fleet(hosts, "Which machines train, written by evener fleet init. Edit it as you like.")
    fleet = parse_fleet(text, out)
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise UsageError(f"{out}: not written: {error.strerror}", hint="--out FILE in another folder") from None
    if trust and (request := fleet_trust_request(fleet)) is not None:
        request.approve()  # the file is printed below
    if as_json:
        print_escaped(json.dumps(_result_to_dict(out, hosts, host_list, fleet)))
    else:
        _print_result(out, text, host_list, fleet, _hints(fleet) if listed else [])


def _read_sources(
    names: list[str], from_ssh_config: bool, ssh_config: Path | None, hostfile: Path | None, inventory: Path | None,
    group: str | None,
) -> list[HostList]:  # fmt: skip
    """Read the hosts of each given source."""
    from evener.sources.ansible_inventory import import_inventory
    from evener.sources.hostfile import import_hostfile, parse_host_arguments
    from evener.sources.import_hosts import local_host_name
    from evener.sources.ssh_config import import_ssh_config

    listings = [parse_host_arguments(names, local_host_name())] if names else []
    listings += [import_ssh_config()] if from_ssh_config else []
    listings += [import_ssh_config(ssh_config)] if ssh_config is not None else []
    listings += [import_hostfile(hostfile)] if hostfile is not None else []
    return listings + ([import_inventory(inventory, group)] if inventory is not None else [])


def _prompt_hosts(out: Path) -> HostList:
    """Ask for the hosts on the terminal; raise UsageError if there is none."""
    from evener.core.base.errors import UsageError
    from evener.core.cluster.fleet_file import out_option

    if not is_interactive():
        raise UsageError(
            "no machine is named, and there is no terminal to ask in",
            hint=f"evener fleet init local laptop=192.168.1.28{out_option(out)}; or {SOURCE_FLAGS}",
        )
    from evener.cli.fleet_prompts import prompt_hosts
    from evener.sources.import_hosts import local_host_name

    try:
        return prompt_hosts(out, local_host_name())
    except (KeyboardInterrupt, EOFError):
        print_escaped("\nnothing was written", file=sys.stderr)
        raise typer.Abort from None


def _print_result(out: Path, text: str, host_list: HostList, fleet: Fleet, advice: list[str]) -> None:
    """Print the file; on stderr what differs from the sources, hints, and the next command."""
    from evener.cli.terminal import make_console, print_text
    from evener.core.base.units import pluralize

    screen = make_console(stderr=True)
    for line in _import_warnings(host_list):
        print_text(screen, line)
    print_escaped(f"{out}: {pluralize(len(fleet.hosts), 'host')}\n", file=sys.stderr)
    print_escaped(text if len(fleet.hosts) <= MAX_PRINTED_HOSTS else "\n".join([*fleet.hosts, ""]), end="", flush=True)
    screen.print()
    for line in advice:
        print_text(screen, line)
    screen.print(f"next: evener doctor{fleet.cli_flag}", soft_wrap=True)


def _import_warnings(host_list: HostList) -> list[str]:
    """Return what differs from the sources: notes, and hosts left out, grouped by reason."""
    whys: dict[str, list[str]] = {}
    for one in host_list.skipped:
        whys.setdefault(one.why, []).append(one.name)
    return [*host_list.notes, *(f"left out: {', '.join(names)}: {why}" for why, names in whys.items())]


def _hints(fleet: Fleet) -> list[str]:
    """Return hints about a fleet that does not contain this machine."""
    from evener.sources.import_hosts import local_host_name

    if any(host.is_local for host in fleet.hosts.values()):
        return []
    local_name = local_host_name()
    same = [name for name, host in fleet.hosts.items() if host.address.lower().partition(".")[0] == local_name.lower()]
    if same:
        return [f'{same[0]} has the name of this machine: if it is this machine, give it address = "local"']
    return [f'this machine is not in the file; if it trains too, add [hosts.{local_name}] with address = "local"']


def _result_to_dict(out: Path, hosts: Mapping[str, HostConfig], host_list: HostList, fleet: Fleet) -> dict[str, Any]:
    """Return the JSON object of --json."""
    import msgspec

    return {
        "file": str(out),
        "hosts": {name: msgspec.to_builtins(host) for name, host in hosts.items()},
        "left_out": msgspec.to_builtins(host_list.skipped),
        "notes": host_list.notes,
        "next": f"evener doctor{fleet.cli_flag}",
    }
