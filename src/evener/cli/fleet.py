"""`evener fleet`: write the fleet file, which lists the hosts, from names, ssh, MPI or Ansible files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evener.cli.help import App

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evener.core.fleet import Fleet, Host
    from evener.hosts.found import Listing

app = App(help="The file that names your machines.")

SHOWN = 16  # hosts; a file with more is not printed whole
FILES = "--from-ssh-config, --hostfile FILE or --inventory FILE"
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
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a fleet file: which machines train, and how ssh reaches them.

    Without arguments it asks for the hosts. Several sources are merged; a machine in two of them is taken once. No
    machine is contacted; evener doctor does that afterwards.
    """
    from evener.core.errors import UsageError
    from evener.core.files import write_atomic
    from evener.core.fleet import fleet_text, parse_fleet
    from evener.hosts.found import merged

    if os.path.lexists(out):
        raise UsageError(f"{out} exists already", hint="edit it, or write another file: --out other.toml")
    if group is not None and inventory is None:
        raise UsageError("--group needs an inventory", hint="--inventory FILE")
    listed = _listed(names or [], from_ssh_config, ssh_config, hostfile, inventory, group)
    hosts, host_list = merged(listed or [_asked(out)])
    if not hosts:
        why = "; ".join(line.removeprefix("left out: ") for line in _different(host_list))
        what = f"no machine is left to train on: {why}" if why else "no machine was named"
        raise UsageError(what, hint="evener fleet init local laptop=192.168.1.28 names two")
    text = fleet_text(hosts, "Which machines train, written by evener fleet init. Edit it as you like.")
    fleet = parse_fleet(text, out)
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise UsageError(f"{out}: not written: {error.strerror}", hint="--out FILE in another folder") from None
    if as_json:
        print(json.dumps(_as_object(out, hosts, host_list, fleet)))
    else:
        _tell(out, text, host_list, fleet, _advice(fleet) if listed else [])


def _listed(
    names: list[str], usual: bool, ssh_config: Path | None, hostfile: Path | None, inventory: Path | None,
    group: str | None,
) -> list[Listing]:  # fmt: skip
    """Read the hosts of each given source."""
    from evener.core.errors import UsageError
    from evener.hosts.hostfile import of_hostfile, of_words
    from evener.hosts.inventory import of_inventory
    from evener.hosts.sshconfig import of_ssh_config

    for name in names:
        if "=" not in name and os.path.isfile(name):
            hint = f"--ssh-config, --hostfile or --inventory reads a file; for a host of this name: {name}={name}"
            raise UsageError(f"{name} is a file", hint=hint)
    listings = [of_words(names, here())] if names else []
    listings += [of_ssh_config()] if usual else []
    listings += [of_ssh_config(ssh_config)] if ssh_config is not None else []
    listings += [of_hostfile(hostfile)] if hostfile is not None else []
    return listings + ([of_inventory(inventory, group)] if inventory is not None else [])


def _asked(out: Path) -> Listing:
    """Ask for the hosts on the terminal; raise UsageError if there is none."""
    from evener.core.errors import UsageError

    if not is_terminal():
        raise UsageError(
            "no machine is named, and there is no terminal to ask in",
            hint=f"evener fleet init local laptop=192.168.1.28; or {FILES}",
        )
    from evener.cli.fleet_questions import ask

    try:
        return ask(out, here())
    except (KeyboardInterrupt, EOFError):
        print("\nnothing was written", file=sys.stderr)
        raise typer.Abort from None


def is_terminal() -> bool:
    """Return whether a person can see a question and answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def here() -> str:
    """Return the name of this machine for the fleet file: its own host name."""
    import socket

    from evener.hosts.found import HERE, host_name

    host = socket.gethostname().partition(".")[0]
    return "here" if host.lower() in ("", *HERE) else host_name(host)


def _tell(out: Path, text: str, told: Listing, fleet: Fleet, advice: list[str]) -> None:
    """Print the file; on stderr what differs from the sources, hints, and the next command."""
    from evener.cli.terminal import console, say
    from evener.core.units import plural

    screen = console(stderr=True)
    for line in _different(told):
        say(screen, line)
    print(f"{out}: {plural(len(fleet.hosts), 'host')}\n", file=sys.stderr)
    print(text if len(fleet.hosts) <= SHOWN else "\n".join([*fleet.hosts, ""]), end="", flush=True)
    screen.print()
    for line in advice:
        say(screen, line)
    screen.print(f"next: evener doctor{fleet.flag}", soft_wrap=True)


def _different(told: Listing) -> list[str]:
    """Return what differs from the sources: notes, and hosts left out, grouped by reason."""
    whys: dict[str, list[str]] = {}
    for one in told.left_out:
        whys.setdefault(one.why, []).append(one.name)
    return [*told.notes, *(f"left out: {', '.join(names)}: {why}" for why, names in whys.items())]


def _advice(fleet: Fleet) -> list[str]:
    """Return hints about a fleet that does not contain this machine."""
    if any(host.is_local for host in fleet.hosts.values()):
        return []
    local_name = here()
    same = [name for name, host in fleet.hosts.items() if host.address.lower().partition(".")[0] == local_name.lower()]
    if same:
        return [f'{same[0]} has the name of this machine: if it is this machine, give it address = "local"']
    return [f'this machine is not in the file; if it trains too, add [hosts.{local_name}] with address = "local"']


def _as_object(out: Path, hosts: Mapping[str, Host], told: Listing, fleet: Fleet) -> dict[str, Any]:
    """Return the JSON object of --json."""
    import msgspec

    return {
        "file": str(out),
        "hosts": {name: msgspec.to_builtins(host) for name, host in hosts.items()},
        "left_out": msgspec.to_builtins(told.left_out),
        "notes": told.notes,
        "next": f"evener doctor{fleet.flag}",
    }
