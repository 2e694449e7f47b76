"""evener doctor: can these machines train together?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from evener.cli.fleets import fleet_path

if TYPE_CHECKING:
    from rich.console import Console

    from evener.core.finding import Finding
    from evener.hosts.doctor import Survey
    from evener.hosts.pairs import Pair

PATIENCE_S = 5.0  # with a host that lets one in and then says nothing
MATRIX = 16  # hosts, up to which a pair has a cell
CELL, ROW_HEAD = 20, 14  # columns of one that tells figures
NONE, UNREACHED, BLOCKED, STALLS, SHUT = "none", "not reached", "blocked", "stalls", "✗"
STYLES = dict.fromkeys((UNREACHED, BLOCKED, STALLS, SHUT), "red")
COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}


EXAMPLES = "evener doctor --fleet fleet.toml\nevener doctor --fleet local"


def doctor(
    fleet: str | None = typer.Option(None, "--fleet", help="hosts; local: this machine alone [fleet.toml if here]"),
    quick: bool = typer.Option(False, "--quick", help="leave out goodput: what train and launch look at before a run"),
    private: bool = typer.Option(
        False, "--private", help="do firewalls keep all but these hosts from a run's ports? Gives the command"
    ),
    port: int = typer.Option(29500, min=1, max=65535, help="of the rendezvous"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Can these machines train together, and if not, what is the command that mends it?

    Looks at every host (versions, memory, GPUs, what else runs there) and connects every host to every other, both
    ways, as a run would. Changes nothing. Exit status 1 when there is an error.
    """
    import json

    from evener.cli.terminal import console
    from evener.core.fleet import Fleet, Host, load_fleet
    from evener.core.spec import MachineSpec
    from evener.hosts.doctor import survey
    from evener.hosts.session import connect

    path, machine = fleet_path(fleet), MachineSpec(private=private)
    known = load_fleet(path) if path is not None else Fleet(hosts={"local": Host(address="local")})
    with _progress(quiet=as_json) as told:
        told("connecting")
        with connect(known, patience_s=PATIENCE_S) as (sessions, errors):
            found = survey(known, sessions, errors, quick=quick, port=port, machine=machine, told=told)
    if as_json:
        print(json.dumps(as_object(found), ensure_ascii=False))
    else:
        show(console(markup=True), found)
    return 1 if found.errors else 0


def as_object(found: Survey) -> dict[str, Any]:
    """The one JSON object."""
    import msgspec

    hosts: dict[str, Any] = {}
    for name in found.hosts:
        facts = found.facts.get(name)
        way = found.ways.get(name)
        hosts[name] = {
            "reached": facts is not None,
            "way": msgspec.to_builtins(way),
            "facts": msgspec.to_builtins(facts),
        }
    return {
        "findings": msgspec.to_builtins(found.findings),
        "hosts": hosts,
        "pairs": msgspec.to_builtins(found.pairs),
        "took_s": round(found.took_s, 3),
    }


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """One line on stderr that goes away; nothing where nobody watches."""
    from evener.cli.terminal import console

    screen = console(stderr=True)
    if quiet or not screen.is_interactive:
        yield lambda text: None
        return
    with screen.status("looking") as status:
        yield lambda text: status.update(f"{text} …")


def show(screen: Console, found: Survey) -> None:
    """Hosts, links, findings, verdict, on a console that reads markup."""
    from evener.cli.terminal import say

    _hosts_table(screen, found)
    for line in _whys(found):
        say(screen, line, style="dim")
    if found.pairs:
        screen.print()
        has_figures = ROW_HEAD + CELL * len(found.ways) <= screen.width
        if len(found.ways) <= MATRIX:
            _matrix(screen, found, has_figures)
        for line in [] if has_figures else _ranges(found):
            say(screen, line)
    for finding in found.findings:
        screen.print()
        _show_finding(screen, finding)
    screen.print()
    screen.print(_verdict(found))


def _hosts_table(screen: Console, found: Survey) -> None:
    from evener.cli.terminal import table
    from evener.core.units import size

    rows = []
    for name in found.hosts:
        facts, way = found.facts.get(name), found.ways.get(name)
        if facts is None:
            rows.append([name, "", UNREACHED, *[""] * 5])
            continue
        gpus = f"{len(facts.gpus)} × {facts.gpus[0]}" if facts.gpus else "none"
        rows.append([
            name,
            way.interface if way else NONE,
            way.address if way else "",
            facts.python_version or NONE,
            facts.torch_version or NONE,
            str(facts.cores),
            "not known" if facts.memory_free_bytes is None else size(facts.memory_free_bytes),
            gpus,
        ])  # fmt: skip
    titles = ("host", "interface", "address", "python", "torch", "cores", "memory free", "GPUs")
    table(screen, titles, rows, left=titles, text=True, spare=("python", "interface"), styles=STYLES)


def _whys(found: Survey) -> list[str]:
    """Why each host uses that interface; hosts with one reason stand together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in found.hosts:
        if name in found.ways:
            groups.setdefault((found.ways[name].interface, found.ways[name].why), []).append(name)
    return [
        f"{'all' if len(hosts) == len(found.hosts) > 1 else ', '.join(hosts)} by {interface}: {why}"
        for (interface, why), hosts in groups.items()
    ]


def _matrix(screen: Console, found: Survey, wide: bool) -> None:
    """Rows send, columns receive; of many hosts these are numbers."""
    from evener.cli.terminal import table

    names = [name for name in found.hosts if name in found.ways]
    rows = []
    for number, source in enumerate(names, 1):
        cells = ["–" if source == target else _cell(found.pair(source, target), wide) for target in names]
        rows.append([source if wide else f"{number} {source}", *cells])
    heads = names if wide else [str(number) for number in range(1, len(names) + 1)]
    table(screen, ("from ↓  to →", *heads), rows, left=heads, styles=STYLES)


def _cell(pair: Pair | None, wide: bool) -> str:
    from evener.core.units import link_rate, seconds

    if pair is None:
        return "?"
    if not pair.is_open:
        return BLOCKED if wide else SHUT
    if pair.large == "stalled":
        return STALLS if wide else SHUT
    if not wide:
        return "ok"
    goodput = "" if pair.goodput_Bps is None else f", {link_rate(pair.goodput_Bps)}"
    return f"{seconds(pair.rtt_s)}{goodput}"


def _ranges(found: Survey) -> list[str]:
    """What the cells do not show of many hosts."""
    from evener.core.units import link_rate, seconds

    good = [pair for pair in found.pairs if pair.is_open and pair.large != "stalled"]
    lines = [
        f"{len(good)} of {len(found.pairs)} ordered pairs are open" + (", ✗ are not" * (len(good) < len(found.pairs)))
    ]
    trips = sorted(pair.rtt_s for pair in found.pairs if pair.rtt_s is not None)
    if trips:
        lines.append(f"round trips {seconds(trips[0])} to {seconds(trips[-1])} (n={len(trips)})")
    goodput = sorted(pair.goodput_Bps for pair in found.pairs if pair.goodput_Bps)
    if goodput:
        span = f"{link_rate(goodput[0])} to {link_rate(goodput[-1])} (n={len(goodput)})"
        lines.append(f"goodput between neighbours in the ring {span}")
    return lines


def _show_finding(screen: Console, finding: Finding) -> None:
    """Severity, id and where; the evidence; the fix, never broken into lines so that it can be pasted."""
    from rich.markup import escape

    from evener.cli.terminal import width_of, wrapped

    where = f"{finding.host} ↔ {finding.peer}" if finding.host and finding.peer else finding.host or "all hosts"
    color = COLORS[finding.severity]
    screen.print(f"[bold {color}]{finding.severity}[/]: {finding.check}  [bold]{escape(where)}[/]", soft_wrap=True)
    width = width_of(screen)
    for line in [finding.evidence] if width is None else wrapped(finding.evidence, width - 2):
        screen.print(f"  {escape(line)}", soft_wrap=True)
    if finding.fix:
        screen.print(f"  [green]fix:[/] {escape(finding.fix)}", soft_wrap=True)


def _verdict(found: Survey) -> str:
    counts = {severity: sum(one.severity == severity for one in found.findings) for severity in COLORS}
    told = ", ".join(
        f"{count} {severity}{'s' * (count > 1 and severity != 'info')}" for severity, count in counts.items() if count
    )
    many = len(found.hosts) > 1
    if counts["error"]:
        verdict = "these machines cannot train together yet" if many else "this machine cannot train yet"
    elif counts["warning"]:
        verdict = "a run can start; what is above may make it slow or end it early"
    else:
        verdict = "these machines can train together" if many else "this machine can train"
    return f"[bold]{verdict}[/]" + (f": {told}" if told else "")
