"""Show the benches of a fleet: hosts alone and together, or sync strategies."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from evener.bench.fleet_bench import FleetBench
from evener.cli import follow_output, probe, run_output
from evener.cli.terminal import make_console, print_table, print_text
from evener.cli.trust import approve_run
from evener.core.base.errors import UsageError
from evener.core.base.escaped_output import print_escaped
from evener.core.cluster.fleet_file import Fleet, load_fleet, select_hosts
from evener.core.run.resolve import ResolvedRun
from evener.core.run.run_plan import Plan
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir
from evener.launch.follow_run import Observer
from evener.launch.start_run import PlannedRun
from evener.report.pages import compare_setups
from evener.report.pages.compare_setups import BenchKind
from evener.report.pages.html_report import write_report
from evener.report.pages.png_charts import throughput_png, tradeoff_png
from evener.report.read.run_summary import RunSummary, summary_json


class TerminalDisplay:
    """Shows a bench on stderr; with --json only what its runs report."""

    def __init__(self, *, trust: bool, as_json: bool) -> None:
        self.console, self._trust = make_console(stderr=True, quiet=as_json), trust

    def print_status(self, text: str) -> None:
        print_text(self.console, text)

    def print_run_status(self, text: str) -> None:
        run_output.print_status(text)

    def approve_run(self, rundir: RunDir) -> None:
        approve_run(rundir, self._trust)

    def print_warnings(self, run: PlannedRun) -> None:
        run_output.print_warnings(run)

    def show_progress(self, resolved: ResolvedRun, plan: Plan) -> AbstractContextManager[Observer]:
        return follow_output.display_progress(resolved, self.console, plan)


def run_fleet_bench(fleet: Fleet, spec: RunSpec, out: str | None, trust: bool, as_json: bool) -> int:
    """Train on each host alone and on all together; compare tokens/s and all-reduce time."""
    display = TerminalDisplay(trust=trust, as_json=as_json)
    bench = FleetBench("fleet", Path(out or "runs/fleet"), fleet, spec, display)
    probe_missing(bench)
    bench.run_hosts()
    return print_results(bench, display.console, as_json)


def run_strategies_bench(
    fleet: Fleet, spec: RunSpec, syncs: str | None, out: str | None, trust: bool, as_json: bool
) -> int:
    """Train the same steps with each sync strategy and on the fastest host alone; compare both tokens/s and loss."""
    display = TerminalDisplay(trust=trust, as_json=as_json)
    bench = FleetBench("strategies", Path(out or "runs/strategies"), fleet, spec, display)
    if len(fleet.hosts) < 2:
        raise UsageError(f"{fleet.file}: comparing sync strategies needs two hosts", hint="a second [hosts.NAME]")
    names = None if syncs is None else [name.strip() for name in syncs.split(",")]
    bench.strategy_setups(names)  # report mistakes before measuring
    probe_missing(bench)
    bench.run_strategies(names)
    return print_results(bench, display.console, as_json)


def probe_missing(bench: FleetBench, host_seconds: float = 12.0) -> None:
    """Probe hosts and links that were not measured, to predict each run; write the results to the fleet file.

    `host_seconds` are of sustained training on each host.
    """
    missing, fleet = bench.missing_measurement(), bench.fleet
    if missing is None:
        return
    assert fleet.file is not None
    bench.display.print_status(f"{missing}: measuring hosts and links first")
    with contextlib.redirect_stdout(sys.stderr):
        if len(fleet.hosts) > 1:
            probe.wire(fleet=fleet.file, seconds=1.0, no_iperf3=True, no_trials=True)
        probe.host(fleet=fleet.file, model=bench.job.model, seconds=host_seconds)
    bench.fleet = select_hosts(load_fleet(fleet.file), ",".join(fleet.hosts))


def print_comparison(
    console: Console, kind: BenchKind, runs: Mapping[str, RunSummary], base: RunSummary | None
) -> None:
    """Print the table that compares the runs."""
    titles = (compare_setups.LABEL_TITLES[kind], *compare_setups.COLUMNS[kind])
    spare = [title for title in ("wait", "exposed", "predicted", "sends") if title in titles]
    print_table(console, titles, compare_setups.setup_rows(kind, runs, base), droppable=spare)


def print_results(bench: FleetBench, console: Console, as_json: bool) -> int:
    """Write the picture and the page, and print the table and its explanation; return the exit status."""
    picture = bench.out / f"{bench.kind}.png"
    (throughput_png if bench.kind == "fleet" else tradeoff_png)(bench.runs, picture)
    for run in bench.runs.values():
        write_report(RunDir(run.run_dir))
    page = write_report(RunDir(bench.out))
    sentences = compare_setups.explain_setups(bench.kind, bench.runs, bench.base)
    if as_json:
        result = {
            "out": str(bench.out),
            "report": str(page),
            "base": bench.base,
            "runs": {label: summary_json(run) for label, run in bench.runs.items()},
            "failed": bench.failed,
            "explanation": sentences,
        }
        print_escaped(json.dumps(result))
        return int(bool(bench.failed))
    console.print()
    print_comparison(console, bench.kind, bench.runs, bench.runs.get(bench.base) if bench.base else None)
    console.print()
    for label, why in bench.failed.items():
        print_text(console, f"{label}: {why}")
    for sentence in sentences:
        print_text(console, sentence)
    console.print(f"\npicture: {picture}\nreport:  ", end="", soft_wrap=True)
    print_escaped(page)
    return int(bool(bench.failed))
