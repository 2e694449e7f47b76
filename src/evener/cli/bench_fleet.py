"""The benches of a fleet: train with several hosts or sync strategies, and print the comparison."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from evener.bench import setups
from evener.bench.setups import BenchSetup
from evener.cli import fleet_training, follow_output, start_run
from evener.cli.terminal import make_console, print_table, print_text
from evener.core.base.errors import EvenerError, UsageError
from evener.core.cluster.fleet_file import Fleet, load_fleet, select_hosts
from evener.core.run.resolve import resolve
from evener.core.run.run_plan import Plan, read_plan_if_present
from evener.core.run.run_spec import EvalSpec, ModelSpec, RunSpec, TrainSpec
from evener.core.run.rundir import RunDir
from evener.launch import launcher
from evener.launch.follow_run import follow_run
from evener.plan.choice.cluster import NotMeasuredError, build_cluster
from evener.plan.choice.search import predict
from evener.report.pages import compare_setups
from evener.report.pages.compare_setups import BenchKind, SetupComparison
from evener.report.pages.html_report import write_report
from evener.report.pages.png_charts import throughput_png, tradeoff_png
from evener.report.read.run_summary import RunSummary, summarize_run, summary_json
from evener.ssh.session import connect

MAX_STEPS = 10_000  # more than fit in any --seconds: the time limit ends a run
MINIMAL_EVALUATION = EvalSpec(eval_every=0, eval_tokens=1)  # only one block, at the end


def run_fleet_bench(path: str, hosts: str | None, data: str, out: str | None, seconds: float, model: str, batch: int,
          as_json: bool) -> int:  # fmt: skip
    """Train on each host alone and on all together; compare tokens/s and all-reduce time."""
    base = _base_spec(
        data, model, TrainSpec(steps=MAX_STEPS, batch=batch, max_s=seconds, warmup=20), MINIMAL_EVALUATION
    )
    bench = _FleetBench("fleet", Path(out or "runs/fleet"), path, hosts, base, as_json)
    bench.probe_missing()
    with connect(bench.fleet) as (sessions, errors):
        places = launcher.prepare_fleet(bench.fleet, sessions, errors, "bench").hosts
    for place in places:
        for setup in setups.single_host_setups(base, place.name, place.cores, len(place.gpus)):
            bench.run_setup(setup)
    if not bench.runs:
        raise UsageError(
            "no host could train", hint="evener doctor --fleet " + path, output="\n".join(bench.failed.values())
        )
    bench.base = bench.fastest_label()
    by_speed = sorted(bench.fleet.hosts, key=lambda name: -bench.best_tokens_per_s(name))
    for setup in setups.multi_host_setups(base, by_speed, [place.name for place in places if place.gpus]):
        bench.run_setup(setup)
    return bench.print_results()


def run_strategies_bench(
    path: str,
    hosts: str | None,
    data: str,
    out: str | None,
    steps: int,
    syncs: str | None,
    model: str,
    batch: int,
    as_json: bool,
) -> int:
    """Train the same steps with each sync strategy and on the fastest host alone; compare tokens/s with loss."""
    base = _base_spec(data, model, TrainSpec(steps=steps, batch=batch), EvalSpec(eval_every=0))
    bench = _FleetBench("strategies", Path(out or "runs/strategies"), path, hosts, base, as_json)
    if len(bench.fleet.hosts) < 2:
        raise UsageError(f"{path}: comparing sync strategies needs two hosts", hint="a second [hosts.NAME]")
    names = None if syncs is None else [name.strip() for name in syncs.split(",")]
    setups.strategy_setups(bench.job, "", list(bench.fleet.hosts), names)  # report mistakes before measuring
    bench.probe_missing()
    for setup in setups.strategy_setups(bench.job, bench.predicted_fastest_host(), list(bench.fleet.hosts), names):
        bench.base = bench.base or setup.label
        bench.run_setup(setup)
    return bench.print_results()


def _base_spec(data: str, model: str, train: TrainSpec, evaluation: EvalSpec) -> RunSpec:
    """Return the spec that all runs share; without dropout, so that their losses can be compared."""
    spec = RunSpec(model=ModelSpec(model=model, dropout=0.0, compile="off"), train=train, eval=evaluation)
    return msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, data=data))


def print_comparison(
    console: Console, kind: BenchKind, runs: Mapping[str, RunSummary], base: RunSummary | None
) -> None:
    """Print the table that compares the runs."""
    titles = (compare_setups.LABEL_TITLES[kind], *compare_setups.COLUMNS[kind])
    spare = [title for title in ("wait", "exposed", "predicted", "sends") if title in titles]
    print_table(console, titles, compare_setups.setup_rows(kind, runs, base), droppable=spare)


class _FleetBench:
    """The runs of one bench. Runs that have finished in its folder are reused, so a bench can be restarted."""

    def __init__(self, kind: BenchKind, out: Path, path: str, hosts: str | None, base: RunSpec, as_json: bool) -> None:
        self.kind, self.out, self.path, self.as_json = kind, out, path, as_json
        self.fleet: Fleet = select_hosts(load_fleet(path), hosts)
        self.console = make_console(stderr=True, quiet=as_json)
        self.runs: dict[str, RunSummary] = {}
        self.failed: dict[str, str] = {}
        self.base: str | None = None  # label of the baseline
        self._names: dict[str, str] = {}
        self.resolved = resolve(base)  # report mistakes before measuring
        self.job = self.resolved.job
        if out.exists() and any(out.iterdir()) and not compare_setups.is_comparison(out):
            raise UsageError(f"{out}: exists and is not a bench", hint="another --out")
        if compare_setups.is_comparison(out) and compare_setups.read_setups(out).kind != kind:
            raise UsageError(f"{out}: contains another bench", hint="another --out")

    def probe_missing(self) -> None:
        """Probe hosts and links that were not measured, to predict each run; write the results to the fleet file."""
        from evener.cli import probe

        try:
            build_cluster(self.fleet, self.job)
        except NotMeasuredError as missing:
            self.print_status(f"{missing}: measuring hosts and links first")
            with contextlib.redirect_stdout(sys.stderr):
                if len(self.fleet.hosts) > 1:
                    probe.wire(fleet=self.path, seconds=1.0, no_iperf3=True, no_trials=True)
                probe.host(fleet=self.path, model=self.job.model)
            self.fleet = select_hosts(load_fleet(self.path), ",".join(self.fleet.hosts))

    def run_setup(self, setup: BenchSetup) -> None:
        """Run a setup to its end, or reuse its finished run. A failure is recorded, and the bench continues."""
        rundir = RunDir(self.out / setup.name)
        spec = msgspec.structs.replace(setup.spec, out=str(rundir))
        self._names[setup.label] = setup.name
        self.console.print()
        self.print_status(setup.label)
        try:
            if self._is_finished(rundir, spec, setup.hosts):
                self.print_status("finished already")
            else:
                self._train_setup(setup, spec, rundir)
            summary = summarize_run(rundir)
            if not summary.tokens_per_s:
                raise UsageError("no step was recorded")
            self.runs[setup.label] = summary
        except EvenerError as error:
            self.failed[setup.label] = str(error)
            self.print_status(f"failed: {error}")
        self._write_index()

    def best_tokens_per_s(self, host: str) -> float:
        """Return the highest tokens/s of the runs on this host alone, 0 if there are none."""
        return max((run.tokens_per_s or 0.0 for run in self.runs.values()
                    if run.manifest.roster.hosts == [host]), default=0.0)  # fmt: skip

    def fastest_label(self) -> str:
        """Return the label of the run with the highest tokens/s."""
        return max(self.runs, key=lambda label: self.runs[label].tokens_per_s or 0.0)

    def predicted_fastest_host(self) -> str:
        """Return the host predicted to be fastest alone, or the first of the file if too little was measured."""
        with contextlib.suppress(UsageError):
            options = predict(self.job, build_cluster(self.fleet, self.job)).options
            alone = [option for option in options if len(option.roster.hosts) == 1]
            return max(alone, key=lambda option: option.tokens_per_s).roster.hosts[0]
        return next(iter(self.fleet.hosts))

    def print_status(self, text: str) -> None:
        """Print one status line."""
        print_text(self.console, text)

    def print_results(self) -> int:
        """Write the picture and the page, and print the table and its explanation; return the exit status."""
        draw = throughput_png if self.kind == "fleet" else tradeoff_png
        draw(self.runs, self.out / f"{self.kind}.png")
        for run in self.runs.values():
            write_report(RunDir(run.run_dir))
        page = write_report(RunDir(self.out))
        base = self.runs.get(self.base) if self.base else None
        sentences = compare_setups.explain_setups(self.kind, self.runs, self.base)
        if self.as_json:
            result = {
                "out": str(self.out),
                "report": str(page),
                "base": self.base,
                "runs": {label: summary_json(run) for label, run in self.runs.items()},
                "failed": self.failed,
                "explanation": sentences,
            }
            json.dump(result, sys.stdout)
            print()
            return int(bool(self.failed))
        self.console.print()
        print_comparison(self.console, self.kind, self.runs, base)
        self.console.print()
        for label, why in self.failed.items():
            self.print_status(f"{label}: {why}")
        for sentence in sentences:
            self.print_status(sentence)
        self.console.print(f"\npicture: {self.out / self.kind}.png\nreport:  ", end="", soft_wrap=True)
        print(page)
        return int(bool(self.failed))

    def _is_finished(self, rundir: RunDir, spec: RunSpec, hosts: Sequence[str]) -> bool:
        """Return whether this training has finished: same spec, corpus and hosts, to its last step or time limit."""
        if not rundir.is_run():
            return False
        manifest, corpus = rundir.manifest(), self.resolved.corpus.content_hash
        return (
            manifest.verdict == ("finished" if spec.train.max_s is None else "stopped")
            and (manifest.spec.train, manifest.spec.model) == (spec.train, spec.model)
            and manifest.corpus is not None
            and manifest.corpus.content_hash == corpus
            and set(manifest.roster.hosts) == set(hosts)
        )

    def _train_setup(self, setup: BenchSetup, spec: RunSpec, rundir: RunDir) -> None:
        self._write_index()  # marks the folder as a bench
        # still running, if the terminal of this bench was closed
        if (begun := read_plan_if_present(rundir)) is not None:
            launcher.stop(rundir, begun, now=True)
        shutil.rmtree(rundir.path, ignore_errors=True)
        resolved = resolve(spec)
        hosts = start_run.with_ranks(select_hosts(self.fleet, ",".join(setup.hosts)), setup.ranks)
        with connect(hosts) as (sessions, errors):
            plan, trees, prepared = fleet_training.plan_fleet_training(
                hosts, sessions, errors, resolved, as_requested=True
            )
            fleet_training.start_fleet_training(plan, trees, prepared, sessions, resolved)
        with (
            self._stop_on_interrupt(rundir, plan),
            follow_output.display_progress(resolved, self.console, plan) as observe,
        ):
            follow_run(rundir, plan, observe, start_run.print_connection_change, fetches_checkpoints=False)

    @contextlib.contextmanager
    def _stop_on_interrupt(self, rundir: RunDir, plan: Plan) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.print_status(f"stopping; finished runs stay in {self.out}, and the same command continues the bench")
            launcher.stop(rundir, plan)
            shutil.rmtree(rundir.path)
            raise

    def _write_index(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        names = {label: self._names[label] for label in self.runs}
        base = self.base if self.base in self.runs else None
        compare_setups.write_setups(
            self.out, SetupComparison(kind=self.kind, base=base, runs=names, failed=self.failed)
        )
