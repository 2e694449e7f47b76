"""`evener lab`: emulate hosts and links on this machine, to try runs before real hosts are used."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evener.cli.chaos import chaos
from evener.cli.drill import drill
from evener.cli.help import CliApp
from evener.core.base.escaped_output import print_escaped
from evener.core.base.shell import quote_word

if TYPE_CHECKING:
    from evener.lab.emulated_lab import EmulatedLab

app = CliApp(help="Emulate hosts on this machine: each with its own network, hostname, processes, files and sshd.")

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
LabName = Annotated[str | None, typer.Option("--name", help="which lab, if several are up")]


@app.command(epilog="evener lab up --hosts 2 --rate 1Gbit")
def up(
    spec_file: Annotated[
        Path | None, typer.Argument(metavar="LAB.toml", help="a lab as TOML; flags override it, for every host")
    ] = None,
    name: Annotated[str | None, typer.Option(help="its name [lab]")] = None,
    hosts: Annotated[int | None, typer.Option(metavar="N", help="number of hosts, named a, b, c … [2]")] = None,
    names: Annotated[str | None, typer.Option(help="names of the hosts, comma-separated", metavar="NAME,…")] = None,
    rate: Annotated[str | None, typer.Option(help="of each link, both directions: 1Gbit, 100Mbit [unlimited]")] = None,
    rate_up: Annotated[str | None, typer.Option(help="maximum rate at which a host sends [--rate]")] = None,
    rate_down: Annotated[str | None, typer.Option(help="maximum rate at which a host receives [--rate]")] = None,
    mtu: Annotated[int | None, typer.Option(help="largest packet [1500]")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU quota of a host, in cores [unlimited]")] = None,
    cores: Annotated[
        str | None, typer.Option(help="cores that all hosts are pinned to: 0,1 [each its own part]", metavar="N,N")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="memory limit of a host: 2GB [unlimited]")] = None,
    disk: Annotated[str | None, typer.Option(help="size of a host's home: 2GB [this machine's]")] = None,
    writeback_s: Annotated[
        float | None,
        typer.Option(
            "--writeback",
            metavar="SECONDS",
            help="power-off discards writes of the last SECONDS that were not flushed; needs gcc [none]",
        ),
    ] = None,
    interface: Annotated[str | None, typer.Option(help="name of a host's interface [eth0]")] = None,
    more_interfaces: Annotated[
        str | None,
        typer.Option(help="also docker0 (a bridge), tun0 (an overlay), wlan0 …", metavar="NAME,…"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="fleet file to write")] = Path("lab.toml"),
    as_json: AsJson = False,
) -> None:
    """Make a lab, wait until every host accepts ssh logins, and write its fleet file."""
    from evener.core.base.errors import UsageError
    from evener.core.base.units import format_seconds
    from evener.lab.emulated_lab import EmulatedLab
    from evener.lab.lab_spec import LabSpec, default_host_names, read_lab_spec, with_host_values

    if (hosts is not None) + (names is not None) + (spec_file is not None) > 1:
        raise UsageError("--hosts, --names and a TOML file each define the hosts", hint="give one of them")
    spec = read_lab_spec(spec_file) if spec_file else LabSpec()
    if hosts is not None or names is not None:
        host_names = default_host_names(hosts) if hosts is not None else _split_names(names)
        if len(set(host_names)) < len(host_names):
            raise UsageError(f"--names {names}: a name occurs twice")
        spec = LabSpec(name=spec.name, hosts=dict.fromkeys(host_names, next(iter(spec.hosts.values()))))
    values = {
        "rate": rate,
        "rate_up": rate_up,
        "rate_down": rate_down,
        "mtu": mtu,
        "cpus": cpus,
        "memory": memory,
        "disk": disk,
        "writeback_s": writeback_s,
        "interface": interface,
        "cores": _parse_cores(cores),
        "more_interfaces": _split_names(more_interfaces),
    }
    spec = with_host_values(spec, {key: value for key, value in values.items() if value not in (None, [])})
    if name is not None:
        spec = LabSpec(name=name, hosts=spec.hosts)
    started = time.monotonic()
    lab = EmulatedLab.up(spec, out=out)
    took_s = time.monotonic() - started
    if lab.rootless and any(host.cpus or host.memory or host.disk for host in spec.hosts.values()):
        print_escaped(
            "warning: without root a lab limits no cpus, no memory and no disks; cores are pinned", file=sys.stderr
        )
    if as_json:
        print_escaped(json.dumps(_lab_to_dict(lab)))
        return
    print_escaped(
        f"lab {lab.name} is up after {format_seconds(took_s)}: {', '.join(lab.state.hosts)}; its fleet file is {out}"
    )
    print_escaped(f"next: evener lab exec {quote_word(lab.hosts[0].name)} -- ip -brief address", file=sys.stderr)


@app.command(epilog="evener lab status")
def status(name: Annotated[str | None, typer.Argument(help="which one [all]")] = None, as_json: AsJson = False) -> None:
    """List your labs with their hosts and whether these are alive."""
    from evener.cli.terminal import make_console, print_table, print_text
    from evener.lab import state
    from evener.lab.emulated_lab import EmulatedLab

    names = [name] if name is not None else state.lab_names()
    labs = {key: EmulatedLab.find(key) if name or state.load(state.labs_root() / key) else None for key in names}
    if as_json:
        described = [_lab_to_dict(lab) if lab else {"name": key, "state": "half made"} for key, lab in labs.items()]
        print_escaped(json.dumps(described[0] if name is not None else {"labs": described}))
        return
    if not labs:
        print_escaped("no lab is up; `evener lab up` makes one", file=sys.stderr)
    screen = make_console()
    for key, lab in labs.items():
        if lab is None:
            print_text(
                screen,
                f"{key}: half made, or by another version of evener; `evener lab down {quote_word(key)}` cleans up",
            )
            continue
        fleet = f", fleet file {lab.state.fleet_file}" if lab.state.fleet_file else ""
        print_text(
            screen, f"{key}: {'up' if lab.is_alive() else 'crashed'}{', rootless' if lab.rootless else ''}{fleet}"
        )
        rows = []
        for host in _lab_to_dict(lab)["hosts"].values():
            limits = (
                _format_rate(host["up_bps"]),
                _format_rate(host["down_bps"]) + " policed" * host["policed"],
                host["mtu"],
                host["cpus"] or "all",
                ",".join(map(str, host["cores"])) or "all",
            )
            processes = host["processes"] or host["state"]
            rows.append((host["name"], host["address"], *map(str, limits), str(processes), str(host["pid"])))
        titles = ("host", "address", "up", "down", "mtu", "cpus", "cores", "processes", "pid")
        print_table(screen, titles, rows, left_aligned=titles, droppable=("pid", "mtu", "cores"))


@app.command(
    "exec",
    context_settings={"allow_interspersed_args": False},
    epilog="evener lab exec a -- ip -brief address",
)
def exec_(
    host: Annotated[str, typer.Argument(help="the host")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND …", help="the program and its arguments")],
    name: LabName = None,
) -> None:
    """Run a program in a host, entered directly without ssh. Exits with the program's status."""
    from evener.lab.emulated_lab import EmulatedLab
    from evener.lab.host import LabHost

    if command[0] == "--name" and len(command) > 2:  # given after the host, where flags belong to the program
        name, command = command[1], command[2:]
    inside: LabHost = EmulatedLab.find(name).host(host)
    inside.check_alive()
    if command[0] == "--":
        del command[0]
    sys.stdout.flush()
    argv = inside.argv(command)
    os.execvp(argv[0], argv)  # noqa: S606  no shell between


@app.command("power-off", epilog="evener lab power-off b")
def power_off(
    host: Annotated[str, typer.Argument(help="which host")], name: LabName = None, as_json: AsJson = False
) -> None:
    """Power a host off without warning: its processes end, and the others receive nothing. Its home stays.

    With `evener lab up --writeback SECONDS` the home loses the latest writes that were not flushed by fsync, as a disk
    does.
    """
    from evener.lab.emulated_lab import EmulatedLab

    lab = EmulatedLab.find(name)
    lab.host(host).power_off()
    print_escaped(json.dumps({"off": host}) if as_json else f"{host} is off")
    if not as_json:
        print_escaped(f"next: evener lab boot {quote_word(host)} --name {quote_word(lab.name)}", file=sys.stderr)


@app.command(epilog="evener lab boot b")
def boot(
    host: Annotated[str, typer.Argument(help="which host")], name: LabName = None, as_json: AsJson = False
) -> None:
    """Boot a host again, and wait until it accepts ssh logins: same addresses, home, host key, limits and rates."""
    from evener.lab.emulated_lab import EmulatedLab

    EmulatedLab.find(name).host(host).boot()
    print_escaped(json.dumps({"booted": host}) if as_json else f"{host} accepts logins")


@app.command(epilog="evener lab down")
def down(
    name: Annotated[str | None, typer.Argument(help="which one [the only one, or lab]")] = None,
    every: Annotated[bool, typer.Option("--all", help="every lab of yours")] = False,
    as_json: AsJson = False,
) -> None:
    """End a lab and remove all of it: processes, networks, cgroups, files. Safe to repeat."""
    from evener.core.base.errors import UsageError
    from evener.lab import state
    from evener.lab.emulated_lab import default_lab_name, take_down

    labs = state.lab_names()
    if every:
        names = labs
    elif name is not None:
        names = [name]
    elif (only := default_lab_name(labs)) is not None or not labs:
        names = [only] if only else []
    else:
        raise UsageError(f"which lab? {', '.join(labs)}", hint="evener lab down --all ends them all")
    ended = [lab for lab in names if take_down(lab)]
    if as_json:
        print_escaped(json.dumps({"down": ended}))
    else:
        print_escaped(
            f"down: {', '.join(ended)}" if ended else f"no lab {name or ''}".rstrip() + " is up: nothing to do"
        )


app.command("drill", epilog="evener lab drill --list\nevener lab drill net.firewall")(drill)
app.command("chaos", epilog="evener lab chaos --list\nevener lab chaos --seed 1 --minutes 10")(chaos)


def _lab_to_dict(lab: EmulatedLab) -> dict[str, Any]:
    """Return a lab and its hosts as a JSON object."""
    return {
        "name": lab.name,
        "state": "up" if lab.is_alive() else "crashed",
        "rootless": lab.rootless,
        "fleet_file": lab.state.fleet_file,
        "state_dir": str(lab.path),
        "hosts": {
            host.name: {
                "name": host.name, "state": "up" if host.is_alive() else "off" if host.is_off() else "dead",
                "address": host.address, "address6": host.address6, "pid": host.pid,
                "processes": len(host.pids()), "interface": host.spec.interface,
                "up_bps": host.spec.up_bps, "down_bps": host.spec.down_bps, "policed": host.spec.policed,
                "mtu": host.spec.mtu, "cpus": host.spec.cpus, "cores": list(host.spec.cores or ()),
            }
            for host in lab.hosts
        },
    }  # fmt: skip


def _format_rate(bps: int | None) -> str:
    from evener.core.base.units import format_si

    return "unlimited" if bps is None else f"{format_si(bps)}bit"


def _split_names(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _parse_cores(text: str | None) -> list[int]:
    from evener.core.base.errors import UsageError

    try:
        return [int(word) for word in _split_names(text)]
    except ValueError:
        raise UsageError(f"--cores {text}: expected comma-separated whole numbers", hint="--cores 0,1") from None
