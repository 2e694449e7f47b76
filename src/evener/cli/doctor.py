"""evener doctor: check that hosts can train together, and print findings with their fixes."""

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

PATIENCE_S = 5.0  # for a host that accepts the connection and then does not answer
MATRIX = 16  # hosts; more than that get no matrix
CELL, ROW_HEAD = 20, 14  # columns, if cells have figures
NONE, UNREACHED, BLOCKED, STALLS, SHUT = "none", "not reached", "blocked", "stalls", "✗"
STYLES = dict.fromkeys((UNREACHED, BLOCKED, STALLS, SHUT), "red")
COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}


EXAMPLES = "evener doctor --fleet fleet.toml\nevener doctor --fleet local"


def doctor(
    fleet: str | None = typer.Option(None, "--fleet", help="hosts; local: this machine alone [fleet.toml if here]"),
    quick: bool = typer.Option(False, "--quick", help="leave out goodput: the checks of train and launch"),
    private: bool = typer.Option(
        False, "--private", help="also check that firewalls block all other hosts from a run's ports; prints the fix"
    ),
    port: int = typer.Option(29500, min=1, max=65535, help="of the rendezvous"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Check whether these machines can train together; if not, print the command that fixes it.

    Inspects every host (versions, memory, GPUs, other processes) and connects every host to every other in both
    directions, as a run would. Changes nothing. Exit status 1 if there is an error.
    """
    import json

    from evener.cli.terminal import console
    from evener.core.fleet import Fleet, Host, load_fleet
    from evener.core.spec import MachineSpec
    from evener.hosts.doctor import survey
    from evener.hosts.session import connect

    path, machine = fleet_path(fleet), MachineSpec(private=private)
    known = load_fleet(path) if path is not None else Fleet(hosts={"local": Host(address="local")})
    with _progress(quiet=as_json) as notify:
        notify("connecting")
        with connect(known, patience_s=PATIENCE_S) as (sessions, errors):
            preflight = survey(known, sessions, errors, quick=quick, port=port, machine=machine, told=notify)
    if as_json:
        print(json.dumps(as_object(preflight), ensure_ascii=False))
    else:
        show(console(markup=True), preflight)
    return 1 if preflight.errors else 0


def as_object(found: Survey) -> dict[str, Any]:
    """Return the JSON object of --json."""
    import msgspec

    hosts: dict[str, Any] = {}
    for name in found.hosts:
        facts = found.facts.get(name)
        interface = found.ways.get(name)
        hosts[name] = {
            "reached": facts is not None,
            "way": msgspec.to_builtins(interface),
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
    """Yield a callback that shows a transient status line on a terminal, and nothing elsewhere."""
    from evener.cli.terminal import console

    screen = console(stderr=True)
    if quiet or not screen.is_interactive:
        yield lambda text: None
        return
    with screen.status("looking") as status:
        yield lambda text: status.update(f"{text} …")


def show(screen: Console, found: Survey) -> None:
    """Print hosts, connectivity, findings and verdict on a console with markup."""
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
        facts, interface = found.facts.get(name), found.ways.get(name)
        if facts is None:
            rows.append([name, "", UNREACHED, *[""] * 5])
            continue
        gpus = f"{len(facts.gpus)} × {facts.gpus[0]}" if facts.gpus else "none"
        rows.append([
            name,
            interface.interface if interface else NONE,
            interface.address if interface else "",
            facts.python_version or NONE,
            facts.torch_version or NONE,
            str(facts.cores),
            "not known" if facts.memory_free_bytes is None else size(facts.memory_free_bytes),
            gpus,
        ])  # fmt: skip
    titles = ("host", "interface", "address", "python", "torch", "cores", "memory free", "GPUs")
    table(screen, titles, rows, left=titles, text=True, spare=("python", "interface"), styles=STYLES)


def _whys(found: Survey) -> list[str]:
    """Return why each host uses its interface, one line for all hosts with the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in found.hosts:
        if name in found.ways:
            groups.setdefault((found.ways[name].interface, found.ways[name].why), []).append(name)
    return [
        f"{'all' if len(hosts) == len(found.hosts) > 1 else ', '.join(hosts)} by {interface}: {why}"
        for (interface, why), hosts in groups.items()
    ]


def _matrix(screen: Console, found: Survey, wide: bool) -> None:
    """Print the connectivity matrix: rows send, columns receive. If not `wide`, columns have numbers for names."""
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
    """Return the figures that narrow cells omit: open pairs, and the ranges of round trip and goodput."""
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
    """Print severity, check and hosts; the evidence; the fix on one line, so that it can be pasted."""
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
    totals = ", ".join(
        f"{count} {severity}{'s' * (count > 1 and severity != 'info')}" for severity, count in counts.items() if count
    )
    many = len(found.hosts) > 1
    if counts["error"]:
        verdict = "these machines cannot train together yet" if many else "this machine cannot train yet"
    elif counts["warning"]:
        verdict = "a run can start; the warnings above may make it slow or end it early"
    else:
        verdict = "these machines can train together" if many else "this machine can train"
    return f"[bold]{verdict}[/]" + (f": {totals}" if totals else "")
