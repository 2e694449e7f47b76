"""`evener lab`: hosts and links emulated on this machine, to try everything on before real machines see it."""

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
from evener.cli.help import App

if TYPE_CHECKING:
    from evener.lab.lab import Lab

app = App(help="Emulate hosts on this machine: each with its own network, hostname, processes, files and sshd.")

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
InLab = Annotated[str | None, typer.Option("--name", help="which lab, where several are up")]


@app.command(epilog="evener lab up --hosts 2 --rate 1Gbit")
def up(
    spec_file: Annotated[
        Path | None, typer.Argument(metavar="LAB.toml", help="a lab as TOML; flags win over it, in every host")
    ] = None,
    name: Annotated[str | None, typer.Option(help="its name [lab]")] = None,
    hosts: Annotated[int | None, typer.Option(metavar="N", help="so many, called a, b, c … [2]")] = None,
    names: Annotated[str | None, typer.Option(help="names of the hosts, with commas", metavar="NAME,…")] = None,
    rate: Annotated[str | None, typer.Option(help="of each link, both ways: 1Gbit, 100Mbit [unlimited]")] = None,
    rate_up: Annotated[str | None, typer.Option(help="what a host sends at most [--rate]")] = None,
    rate_down: Annotated[str | None, typer.Option(help="what a host receives at most [--rate]")] = None,
    mtu: Annotated[int | None, typer.Option(help="largest packet [1500]")] = None,
    cpus: Annotated[float | None, typer.Option(help="processor time of a host [unlimited]")] = None,
    cores: Annotated[str | None, typer.Option(help="cores that each host is pinned to: 0,1", metavar="N,N")] = None,
    memory: Annotated[str | None, typer.Option(help="of a host at most: 2GB [unlimited]")] = None,
    disk: Annotated[str | None, typer.Option(help="of a host, its home: 2GB [this machine's]")] = None,
    interface: Annotated[str | None, typer.Option(help="name of its interface [eth0]")] = None,
    more_interfaces: Annotated[
        str | None,
        typer.Option(help="also docker0 (a bridge), tun0 (an overlay), wlan0 …", metavar="NAME,…"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="fleet file to write")] = Path("lab.toml"),
    as_json: AsJson = False,
) -> None:
    """Make a lab, wait until every host takes ssh logins, and write its fleet file."""
    from evener.core.errors import UsageError
    from evener.core.units import seconds
    from evener.lab.lab import Lab
    from evener.lab.spec import LabSpec, default_names, read_spec, with_values

    if (hosts is not None) + (names is not None) + (spec_file is not None) > 1:
        raise UsageError("--hosts, --names and a TOML file each say which hosts there are", hint="give one of them")
    spec = read_spec(spec_file) if spec_file else LabSpec()
    if hosts is not None or names is not None:
        listed = default_names(hosts) if hosts is not None else _words(names)
        if len(set(listed)) < len(listed):
            raise UsageError(f"--names {names}: a name stands there twice")
        spec = LabSpec(name=spec.name, hosts=dict.fromkeys(listed, next(iter(spec.hosts.values()))))
    values = {
        "rate": rate, "rate_up": rate_up, "rate_down": rate_down, "mtu": mtu, "cpus": cpus, "memory": memory,
        "disk": disk, "interface": interface, "cores": _numbers(cores), "more_interfaces": _words(more_interfaces),
    }  # fmt: skip
    spec = with_values(spec, {key: value for key, value in values.items() if value not in (None, [])})
    if name is not None:
        spec = LabSpec(name=name, hosts=spec.hosts)
    started = time.monotonic()
    lab = Lab.up(spec, out=out)
    took_s = time.monotonic() - started
    if lab.rootless and any(host.cpus or host.memory or host.disk for host in spec.hosts.values()):
        print("warning: without root a lab limits no cpus, no memory and no disks; cores are pinned", file=sys.stderr)
    if as_json:
        print(json.dumps(_describe(lab)))
        return
    print(f"lab {lab.name} is up after {seconds(took_s)}: {', '.join(lab.state.hosts)}; its fleet file is {out}")
    print(f"next: evener lab exec {lab.hosts[0].name} -- ip -brief address", file=sys.stderr)


@app.command(epilog="evener lab status")
def status(name: Annotated[str | None, typer.Argument(help="which one [all]")] = None, as_json: AsJson = False) -> None:
    """Every lab of yours: which hosts it has, and whether they live."""
    from evener.cli.terminal import console, say, table
    from evener.lab import state
    from evener.lab.lab import Lab

    names = [name] if name is not None else state.lab_names()
    labs = {one: Lab.find(one) if name or state.load(state.root() / one) else None for one in names}
    if as_json:
        described = [_describe(lab) if lab else {"name": one, "state": "half made"} for one, lab in labs.items()]
        print(json.dumps(described[0] if name is not None else {"labs": described}))
        return
    if not labs:
        print("no lab is up; `evener lab up` makes one", file=sys.stderr)
    screen = console()
    for one, lab in labs.items():
        if lab is None:
            say(screen, f"{one}: half made, or by another version of evener; `evener lab down {one}` cleans up")
            continue
        fleet = f", fleet file {lab.state.fleet_file}" if lab.state.fleet_file else ""
        say(screen, f"{one}: {'up' if lab.is_alive() else 'crashed'}{', rootless' if lab.rootless else ''}{fleet}")
        rows = []
        for host in _describe(lab)["hosts"].values():
            limits = (_rate(host["up_bps"]), _rate(host["down_bps"]) + " policed" * host["policed"], host["mtu"],
                      host["cpus"] or "all", ",".join(map(str, host["cores"])) or "all")  # fmt: skip
            lives = host["processes"] or host["state"]
            rows.append((host["name"], host["address"], *map(str, limits), str(lives), str(host["pid"])))
        titles = ("host", "address", "up", "down", "mtu", "cpus", "cores", "processes", "pid")
        table(screen, titles, rows, left=titles, spare=("pid", "mtu", "cores"))


@app.command(
    "exec",
    context_settings={"allow_interspersed_args": False},
    epilog="evener lab exec a -- ip -brief address",
)
def exec_(
    host: Annotated[str, typer.Argument(help="in which host")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND …", help="the program and its arguments")],
    name: InLab = None,
) -> None:
    """Run a program in a host, entering it directly. Its exit status is ours."""
    from evener.lab.host import Host
    from evener.lab.lab import Lab

    if command[0] == "--name" and len(command) > 2:  # behind the host, where everything is the program's
        name, command = command[1], command[2:]
    inside: Host = Lab.find(name).host(host)
    inside.check_alive()
    if command[0] == "--":
        del command[0]
    sys.stdout.flush()
    argv = inside.argv(command)
    os.execvp(argv[0], argv)  # noqa: S606  no shell between


@app.command("power-off", epilog="evener lab power-off b")
def power_off(
    host: Annotated[str, typer.Argument(help="which host")], name: InLab = None, as_json: AsJson = False
) -> None:
    """Pull a host's plug: its processes end, and the others hear nothing. Its home stays."""
    from evener.lab.lab import Lab

    lab = Lab.find(name)
    lab.host(host).power_off()
    print(json.dumps({"off": host}) if as_json else f"{host} is off")
    if not as_json:
        print(f"next: evener lab boot {host} --name {lab.name}", file=sys.stderr)


@app.command(epilog="evener lab boot b")
def boot(host: Annotated[str, typer.Argument(help="which host")], name: InLab = None, as_json: AsJson = False) -> None:
    """Switch a host on again, and wait until it takes ssh logins: same addresses, home, host key, limits and rates."""
    from evener.lab.lab import Lab

    Lab.find(name).host(host).boot()
    print(json.dumps({"booted": host}) if as_json else f"{host} takes logins")


@app.command(epilog="evener lab down")
def down(
    name: Annotated[str | None, typer.Argument(help="which one [the only one, or lab]")] = None,
    every: Annotated[bool, typer.Option("--all", help="every lab of yours")] = False,
    as_json: AsJson = False,
) -> None:
    """End a lab and remove every trace of it: processes, networks, cgroups, files. Twice does no harm."""
    from evener.core.errors import UsageError
    from evener.lab import state
    from evener.lab.lab import take_down, usual

    labs = state.lab_names()
    if every:
        names = labs
    elif name is not None:
        names = [name]
    elif (only := usual(labs)) is not None or not labs:
        names = [only] if only else []
    else:
        raise UsageError(f"which lab? {', '.join(labs)}", hint="evener lab down --all ends them all")
    ended = [one for one in names if take_down(one)]
    if as_json:
        print(json.dumps({"down": ended}))
    else:
        print(f"down: {', '.join(ended)}" if ended else f"no lab {name or ''}".rstrip() + " is up: nothing to do")


app.command("drill", epilog="evener lab drill --list\nevener lab drill net.firewall")(drill)
app.command("chaos", epilog="evener lab chaos --list\nevener lab chaos --seed 1 --minutes 10")(chaos)


def _describe(lab: Lab) -> dict[str, Any]:
    """A lab as JSON."""
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


def _rate(bps: int | None) -> str:
    from evener.core.units import metric

    return "unlimited" if bps is None else f"{metric(bps)}bit"


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _numbers(text: str | None) -> list[int]:
    from evener.core.errors import UsageError

    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise UsageError(f"--cores {text}: expected whole numbers with commas", hint="--cores 0,1") from None
