"""`evener fleet`: the file that names the machines."""

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

SHOWN = 16  # hosts of a file that is printed whole
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
            metavar="HOST", help="as ssh takes it, user@host:port too; NAME=ADDRESS names it; local is this machine"
        ),
    ] = None,
    from_ssh_config: Annotated[
        bool, typer.Option("--from-ssh-config", help="the hosts of ~/.ssh/config, but for git forges")
    ] = False,
    ssh_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the same of another file, such as vagrant ssh-config prints")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the hosts of one that mpirun or deepspeed reads")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the hosts of one that Ansible reads, INI or YAML")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="of the inventory, this group alone [all]")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="where to write; never over a file")] = Path("fleet.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a fleet file: which machines train, and how ssh reaches them.

    Without anything behind it, it asks. Several lists add up; a machine that two of them name is taken once. No machine
    is contacted: that is what evener doctor does, afterwards.
    """
    from evener.core.errors import UsageError
    from evener.core.files import write_atomic
    from evener.core.fleet import fleet_text, parse_fleet
    from evener.hosts.found import merged

    if os.path.lexists(out):
        raise UsageError(f"{out} is there already", hint="edit it, or give the new one another name: --out other.toml")
    if group is not None and inventory is None:
        raise UsageError("--group: of which inventory?", hint="--inventory FILE")
    listed = _listed(names or [], from_ssh_config, ssh_config, hostfile, inventory, group)
    hosts, told = merged(listed or [_asked(out)])
    if not hosts:
        why = "; ".join(line.removeprefix("left out: ") for line in _different(told))
        what = f"no machine is left to train on: {why}" if why else "no machine was named"
        raise UsageError(what, hint="evener fleet init local laptop=192.168.1.28 names two")
    text = fleet_text(hosts, "Which machines train, written by evener fleet init. Edit it as you like.")
    fleet = parse_fleet(text, out)
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise UsageError(f"{out}: not written: {error.strerror}", hint="--out FILE in another folder") from None
    if as_json:
        print(json.dumps(_as_object(out, hosts, told, fleet)))
    else:
        _tell(out, text, told, fleet, _advice(fleet) if listed else [])


def _listed(
    names: list[str], usual: bool, ssh_config: Path | None, hostfile: Path | None, inventory: Path | None,
    group: str | None,
) -> list[Listing]:  # fmt: skip
    """What each source says; nothing without any."""
    from evener.core.errors import UsageError
    from evener.hosts.hostfile import of_hostfile, of_words
    from evener.hosts.inventory import of_inventory
    from evener.hosts.sshconfig import of_ssh_config

    for name in names:
        if "=" not in name and os.path.isfile(name):
            hint = f"--ssh-config, --hostfile or --inventory reads one; a machine of this name: {name}={name}"
            raise UsageError(f"{name} is a file", hint=hint)
    listings = [of_words(names, here())] if names else []
    listings += [of_ssh_config()] if usual else []
    listings += [of_ssh_config(ssh_config)] if ssh_config is not None else []
    listings += [of_hostfile(hostfile)] if hostfile is not None else []
    return listings + ([of_inventory(inventory, group)] if inventory is not None else [])


def _asked(out: Path) -> Listing:
    """What a person answers."""
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
    """Is somebody there who sees a question, and can answer?"""
    return sys.stdin.isatty() and sys.stderr.isatty()


def here() -> str:
    """What to call this machine: its own name."""
    import socket

    from evener.hosts.found import HERE, host_name

    own = socket.gethostname().partition(".")[0]
    return "here" if own.lower() in ("", *HERE) else host_name(own)


def _tell(out: Path, text: str, told: Listing, fleet: Fleet, advice: list[str]) -> None:
    """The file; on stderr what is different from what was read, and what comes next."""
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
    """What was not taken as it stood there; machines with one reason stand together."""
    whys: dict[str, list[str]] = {}
    for one in told.left_out:
        whys.setdefault(one.why, []).append(one.name)
    return [*told.notes, *(f"left out: {', '.join(names)}: {why}" for why, names in whys.items())]


def _advice(fleet: Fleet) -> list[str]:
    """What may be missing."""
    if any(host.is_local for host in fleet.hosts.values()):
        return []
    own = here()
    same = [name for name, host in fleet.hosts.items() if host.address.lower().partition(".")[0] == own.lower()]
    if same:
        return [f'{same[0]} has the name of this machine: if it is this one, give it address = "local"']
    return [f'this machine is not in it; if it trains, too: [hosts.{own}] with address = "local"']


def _as_object(out: Path, hosts: Mapping[str, Host], told: Listing, fleet: Fleet) -> dict[str, Any]:
    """The one JSON object."""
    import msgspec

    return {
        "file": str(out),
        "hosts": {name: msgspec.to_builtins(host) for name, host in hosts.items()},
        "left_out": msgspec.to_builtins(told.left_out),
        "notes": told.notes,
        "next": f"evener doctor{fleet.flag}",
    }
