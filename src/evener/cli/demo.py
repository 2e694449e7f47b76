"""evener demo: two unequal machines on a slow link, emulated here: what plain DDP makes of them, and what evener."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evener.bench.fleet_bench import FleetBench
    from evener.lab.lab_spec import LabSpec

RATE, SLOW_CPUS = "100Mbit", 0.5  # the link, and the cores of the second machine
MODEL, BATCH, STEPS = "g4", 16, 24
DRILL = "net.firewall"
EXAMPLES = "evener demo\nevener demo --out runs/mine"


def demo(out: str = typer.Option("runs/demo", help="folder of the results; an earlier demo there is replaced")) -> int:
    """Train on two emulated machines over 100 Mbit/s: on one alone, on both by plain DDP, on both as evener chooses.

    One machine has a core, the other half of one. Then a firewall closes a port between two machines, and evener names
    it, with the command that opens it. Every figure is measured while you watch; it takes about four minutes. Where
    machines cannot be emulated, processes of this machine are compared instead.
    """
    from evener.bench.fleet_bench import FleetBench
    from evener.bench.setups import strategies_bench_spec
    from evener.cli import bench_fleet, drill
    from evener.cli.bench_local import DEFAULT_CORPORA, ensure_corpus
    from evener.core.base.errors import EvenerError
    from evener.core.cluster.fleet_file import load_fleet
    from evener.lab.drills.drill_catalog import DRILLS
    from evener.lab.emulated_lab import EmulatedLab
    from evener.lab.lab_requirements import check_machine
    from evener.report.pages import compare_setups

    spec = _lab_spec()
    try:
        if (os.cpu_count() or 1) < len(spec.hosts):
            raise EvenerError("one core cannot be two machines")
        check_machine(spec)
    except EvenerError as error:
        return _compare_processes(error, out)
    display = bench_fleet.TerminalDisplay(trust=False, as_json=False)
    corpus = ensure_corpus(DEFAULT_CORPORA[0])
    if compare_setups.is_comparison(Path(out)):  # an earlier demo; FleetBench refuses any other folder
        shutil.rmtree(out)
    with tempfile.TemporaryDirectory(prefix="evener-demo-") as folder:
        file = Path(folder) / "demo.toml"
        with EmulatedLab.up(spec, out=file) as lab:
            half = "one, as without root nothing limits it" if lab.rootless else "half of one"
            display.print_status(f"1. Two machines, emulated here: a has a core, b {half}; {RATE}/s between them")
            job = strategies_bench_spec(corpus, MODEL, BATCH, STEPS)
            bench = FleetBench("strategies", Path(out), load_fleet(file), job, display)
            bench_fleet.probe_missing(bench, host_seconds=3.0)
            choice = _chosen_sync(bench)
            display.print_status(
                f"\n2. Training {MODEL} on a alone, on both by plain DDP, and on both with {choice}, evener's choice"
            )
            bench.run_strategies(["ddp", choice])
            status = bench_fleet.print_results(bench, display.console, as_json=False)
    for line in _describe_outcome(bench, choice):
        display.print_status(line)
    display.print_status(f"\n3. Two machines that cannot talk: evener lab drill {DRILL}\n")
    if (lacking := DRILLS[DRILL].unsupported_reason()) is not None:
        display.print_status(f"left out: {lacking}")
        return status
    return drill.drill(name=DRILL, listed=False, every=False, short=True, as_json=False) or status


def _lab_spec() -> LabSpec:
    from evener.lab.lab_spec import HostSpec, LabSpec

    fast, slow = HostSpec(rate=RATE, cores=(0,)), HostSpec(rate=RATE, cores=(1,), cpus=SLOW_CPUS)
    return LabSpec(name=f"demo-{os.getpid()}", hosts={"a": fast, "b": slow})


def _chosen_sync(bench: FleetBench) -> str:
    """Return the strategy that `--sync auto` would take on both machines, by prediction."""
    import msgspec

    from evener.plan.choice.cluster import build_cluster
    from evener.plan.choice.search import choose_sync

    train = msgspec.structs.replace(bench.job.spec.train, sync="auto")
    job = msgspec.structs.replace(bench.job, spec=msgspec.structs.replace(bench.job.spec, train=train))
    return choose_sync(job, build_cluster(bench.fleet, job), may_leave_out=False).spec.train.sync


def _describe_outcome(bench: FleetBench, choice: str) -> list[str]:
    """Return what the runs have shown, in two sentences."""
    speeds = {label: run.tokens_per_s or 0.0 for label, run in bench.runs.items()}
    alone = speeds.get(bench.base or "", 0.0)
    if not alone:
        return []
    words = {"ddp": "Plain DDP on both machines", choice: f"evener's choice, {choice}, on both"}
    return [f"{text} is {speeds[label] / alone:.2f} times as fast as the faster one alone."
            for label, text in words.items() if label in speeds]  # fmt: skip


def _compare_processes(why: Exception, out: str) -> int:
    """Compare processes of this machine, as two machines cannot be emulated."""
    from evener.bench.setups import scaling_bench_spec
    from evener.cli import bench_local
    from evener.cli.run_output import print_status

    print_status(f"two machines cannot be emulated here: {why}; processes of this machine are compared instead")
    return bench_local.run_scaling_bench(scaling_bench_spec("char", 8, 20.0), None, out, None, True, False)
