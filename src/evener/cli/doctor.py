"""evener doctor: check that hosts can train together, and print findings with their fixes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from evener.core.cluster.finding import Finding
    from evener.doctor.connectivity import PairConnectivity
    from evener.doctor.preflight import PreflightReport

CONNECT_TIMEOUT_S = 5.0  # for a host that accepts the connection and then does not answer
MAX_MATRIX_HOSTS = 16  # hosts; more than that get no matrix
CELL_WIDTH, ROW_HEADER_WIDTH = 20, 14  # columns, if cells have figures
MISSING, UNREACHABLE, BLOCKED, STALLED, CLOSED_MARK = "none", "not reached", "blocked", "stalls", "✗"
CELL_STYLES = dict.fromkeys((UNREACHABLE, BLOCKED, STALLED, CLOSED_MARK), "red")


EXAMPLES = "evener doctor --fleet fleet.toml\nevener doctor --fleet local"


def doctor(
    fleet: str | None = typer.Option(None, "--fleet", help="hosts; local: this machine alone [fleet.toml if here]"),
    quick: bool = typer.Option(False, "--quick", help="leave out goodput: the checks of train and launch"),
    private: bool = typer.Option(
        False, "--private", help="also check that firewalls block all other hosts from a run's ports; prints the fix"
    ),
    port: int = typer.Option(29500, min=1, max=65535, help="of the rendezvous"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Check whether these machines can train together; if not, print the command that fixes it.

    Inspects every host (versions, memory, GPUs, other processes) and connects every host to every other in both
    directions, as a run would. Changes nothing. Exit status 1 if there is an error.
    """
    import json

    from evener.cli.terminal import make_console
    from evener.cli.trust import approve_fleet
    from evener.core.cluster.fleet_file import Fleet, HostConfig, fleet_path, load_fleet
    from evener.core.run.run_spec import MachineSpec
    from evener.doctor.preflight import run_preflight
    from evener.ssh.session import connect

    path, machine = fleet_path(fleet), MachineSpec(private=private)
    known = load_fleet(path) if path is not None else Fleet(hosts={"local": HostConfig(address="local")})
    approve_fleet(known, trust)
    with _progress(quiet=as_json) as notify:
        notify("connecting")
        with connect(known, connect_timeout_s=CONNECT_TIMEOUT_S) as (sessions, errors):
            preflight = run_preflight(known, sessions, errors, quick=quick, port=port, machine=machine, notify=notify)
    if as_json:
        print_escaped(json.dumps(preflight_to_dict(preflight)))
    else:
        print_preflight(make_console(), preflight)
    return 1 if preflight.blocking_findings else 0


def preflight_to_dict(preflight: PreflightReport) -> dict[str, Any]:
    """Return the JSON object of --json."""
    import msgspec

    hosts: dict[str, Any] = {}
    for name in preflight.hosts:
        facts = preflight.facts.get(name)
        interface = preflight.interfaces.get(name)
        hosts[name] = {
            "reached": facts is not None,
            "way": msgspec.to_builtins(interface),
            "facts": msgspec.to_builtins(facts),
        }
    return {
        "findings": msgspec.to_builtins(preflight.findings),
        "hosts": hosts,
        "pairs": msgspec.to_builtins(preflight.pairs),
        "took_s": round(preflight.took_s, 3),
    }


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows a transient status line on a terminal, and nothing elsewhere."""
    from evener.cli.terminal import make_console

    screen = make_console(stderr=True)
    if quiet or not screen.is_interactive:
        yield lambda text: None
        return
    from rich.text import Text

    with screen.status("looking") as status:
        yield lambda text: status.update(Text(f"{text} …"))  # a str would be markup


def print_preflight(console: Console, preflight: PreflightReport) -> None:
    """Print hosts, connectivity, findings and verdict."""
    from evener.cli.terminal import print_text

    _print_hosts(console, preflight)
    for line in _interface_reasons(preflight):
        print_text(console, line, style="dim")
    if preflight.pairs:
        console.print()
        has_figures = ROW_HEADER_WIDTH + CELL_WIDTH * len(preflight.interfaces) <= console.width
        if len(preflight.interfaces) <= MAX_MATRIX_HOSTS:
            _print_connectivity_matrix(console, preflight, has_figures)
        for line in [] if has_figures else _connectivity_summary(preflight):
            print_text(console, line)
    for finding in preflight.findings:
        console.print()
        _print_finding(console, finding)
    console.print()
    console.print(_format_verdict(preflight))


def _print_hosts(screen: Console, preflight: PreflightReport) -> None:
    from evener.cli.terminal import print_table
    from evener.core.base.units import format_bytes

    rows = []
    for name in preflight.hosts:
        facts, interface = preflight.facts.get(name), preflight.interfaces.get(name)
        if facts is None:
            rows.append([name, "", UNREACHABLE, *[""] * 5])
            continue
        gpus = f"{len(facts.gpus)} × {facts.gpus[0]}" if facts.gpus else "none"
        rows.append([
            name,
            interface.interface if interface else MISSING,
            interface.address if interface else "",
            facts.python_version or MISSING,
            facts.torch_version or MISSING,
            str(facts.cores),
            "not known" if facts.memory_free_bytes is None else format_bytes(facts.memory_free_bytes),
            gpus,
        ])  # fmt: skip
    titles = ("host", "interface", "address", "python", "torch", "cores", "memory free", "GPUs")
    print_table(
        screen, titles, rows, left_aligned=titles, wrap_last=True, droppable=("python", "interface"), styles=CELL_STYLES
    )


def _interface_reasons(preflight: PreflightReport) -> list[str]:
    """Return why each host uses its interface, one line for all hosts with the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in preflight.hosts:
        if name in preflight.interfaces:
            groups.setdefault((preflight.interfaces[name].interface, preflight.interfaces[name].why), []).append(name)
    return [
        f"{'all' if len(hosts) == len(preflight.hosts) > 1 else ', '.join(hosts)} by {interface}: {why}"
        for (interface, why), hosts in groups.items()
    ]


def _print_connectivity_matrix(screen: Console, preflight: PreflightReport, wide: bool) -> None:
    """Print the connectivity matrix: rows send, columns receive. If not `wide`, columns have numbers for names."""
    from evener.cli.terminal import print_table

    names = [name for name in preflight.hosts if name in preflight.interfaces]
    rows = []
    for number, source in enumerate(names, 1):
        cells = [
            "–" if source == target else _matrix_cell(preflight.find_pair(source, target), wide) for target in names
        ]
        rows.append([source if wide else f"{number} {source}", *cells])
    heads = names if wide else [str(number) for number in range(1, len(names) + 1)]
    print_table(screen, ("from ↓  to →", *heads), rows, left_aligned=heads, styles=CELL_STYLES)


def _matrix_cell(pair: PairConnectivity | None, wide: bool) -> str:
    from evener.core.base.units import format_bit_rate, format_seconds

    if pair is None:
        return "?"
    if not pair.is_open:
        return BLOCKED if wide else CLOSED_MARK
    if pair.large == "stalled":
        return STALLED if wide else CLOSED_MARK
    if not wide:
        return "ok"
    goodput = "" if pair.goodput_Bps is None else f", {format_bit_rate(pair.goodput_Bps)}"
    return f"{format_seconds(pair.rtt_s)}{goodput}"


def _connectivity_summary(preflight: PreflightReport) -> list[str]:
    """Return the figures that narrow cells omit: open pairs, and the ranges of round trip and goodput."""
    from evener.core.base.units import format_bit_rate, format_seconds

    good = [pair for pair in preflight.pairs if pair.is_open and pair.large != "stalled"]
    lines = [
        f"{len(good)} of {len(preflight.pairs)} ordered pairs are open"
        + (", ✗ are not" * (len(good) < len(preflight.pairs)))
    ]
    trips = sorted(pair.rtt_s for pair in preflight.pairs if pair.rtt_s is not None)
    if trips:
        lines.append(f"round trips {format_seconds(trips[0])} to {format_seconds(trips[-1])} (n={len(trips)})")
    goodput = sorted(pair.goodput_Bps for pair in preflight.pairs if pair.goodput_Bps)
    if goodput:
        span = f"{format_bit_rate(goodput[0])} to {format_bit_rate(goodput[-1])} (n={len(goodput)})"
        lines.append(f"goodput between neighbours in the ring {span}")
    return lines


def _print_finding(screen: Console, finding: Finding) -> None:
    """Print severity, check and hosts; the evidence; the fix on one line, so that it can be pasted."""
    from rich.text import Text

    from evener.cli.terminal import SEVERITY_COLORS, line_width, wrap_words

    where = f"{finding.host} ↔ {finding.peer}" if finding.host and finding.peer else finding.host or "all hosts"
    color = SEVERITY_COLORS[finding.severity]
    title = Text.assemble((finding.severity, f"bold {color}"), f": {finding.check}  ", (where, "bold"))
    screen.print(title, soft_wrap=True)
    width = line_width(screen)
    for line in [finding.evidence] if width is None else wrap_words(finding.evidence, width - 2):
        screen.print(f"  {line}", soft_wrap=True)
    if finding.fix:
        screen.print(Text.assemble("  ", ("fix:", "green"), f" {finding.fix}"), soft_wrap=True)


def _format_verdict(preflight: PreflightReport) -> Text:
    from rich.text import Text

    from evener.cli.terminal import SEVERITY_COLORS

    counts = {severity: sum(one.severity == severity for one in preflight.findings) for severity in SEVERITY_COLORS}
    totals = ", ".join(
        f"{count} {severity}{'s' * (count > 1 and severity != 'info')}" for severity, count in counts.items() if count
    )
    many = len(preflight.hosts) > 1
    if counts["error"]:
        verdict = "these machines cannot train together yet" if many else "this machine cannot train yet"
    elif counts["warning"]:
        verdict = "a run can start; the warnings above may make it slow or end it early"
    else:
        verdict = "these machines can train together" if many else "this machine can train"
    return Text.assemble((verdict, "bold"), f": {totals}" if totals else "")
