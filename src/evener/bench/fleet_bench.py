"""Benches of a fleet: train set-ups one after the other, each a run on some of its hosts.

    BENCH/compare.json   the finished runs, by label
    BENCH/SETUP/         the run directory of a set-up

A stopped bench continues where it was: runs that have finished in its folder are reused.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from evener.bench import setups
from evener.bench.setups import BenchSetup
from evener.core.base.errors import EvenerError, UntrustedError, UsageError
from evener.core.cluster.fleet_file import Fleet, select_hosts
from evener.core.run.resolve import ResolvedRun, resolve
from evener.core.run.run_plan import Plan, read_plan_if_present
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir
from evener.launch import launcher
from evener.launch.follow_run import Observer, follow_run
from evener.launch.prepare_hosts import connect_hosts, prepare_hosts
from evener.launch.start_run import PlannedRun, started
from evener.launch.start_training import plan_on_hosts
from evener.plan.choice.cluster import NotMeasuredError, build_cluster
from evener.plan.choice.search import predict
from evener.report.pages import compare_setups
from evener.report.pages.compare_setups import BenchKind, SetupComparison
from evener.report.read.run_summary import RunSummary, summarize_run


class BenchDisplay(Protocol):
    """Shows a bench to its user."""

    def print_status(self, text: str) -> None:
        """Print one status line of the bench."""

    def print_run_status(self, text: str) -> None:
        """Print one status line of a run."""

    def approve_run(self, rundir: RunDir) -> None:
        """Return if the hosts of an earlier run may be contacted. UntrustedError if it came from elsewhere."""

    def print_warnings(self, run: PlannedRun) -> None:
        """Print the warnings of a run's preflight."""

    def show_progress(self, resolved: ResolvedRun, plan: Plan) -> AbstractContextManager[Observer]:
        """Return a context with an observer that shows the progress of a run."""


class FleetBench:
    """The runs of one bench."""

    def __init__(self, kind: BenchKind, out: Path, fleet: Fleet, base: RunSpec, display: BenchDisplay) -> None:
        self.kind, self.out, self.fleet, self.display = kind, out, fleet, display
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

    def missing_measurement(self) -> str | None:
        """Return what must be measured of the hosts before the runs can be predicted; None if nothing is missing."""
        try:
            build_cluster(self.fleet, self.job)
        except NotMeasuredError as missing:
            return str(missing)
        return None

    def run_hosts(self) -> None:
        """Train on each host alone, on its CPUs and GPUs, and then on the fastest ones together."""
        with connect_hosts(self.fleet) as connected:
            places = prepare_hosts(connected, RunDir("bench")).hosts
        for place in places:
            for setup in setups.single_host_setups(self.job.spec, place.name, place.cores, len(place.gpus)):
                self._run_setup(setup)
        if not self.runs:
            raise UsageError(
                "no host could train",
                hint=f"evener doctor{self.fleet.cli_flag}",
                output="\n".join(self.failed.values()),
            )
        self.base = max(self.runs, key=lambda label: self.runs[label].tokens_per_s or 0.0)
        by_speed = sorted(self.fleet.hosts, key=lambda name: -self._best_tokens_per_s(name))
        for setup in setups.multi_host_setups(self.job.spec, by_speed, [place.name for place in places if place.gpus]):
            self._run_setup(setup)

    def strategy_setups(self, syncs: Sequence[str] | None) -> list[BenchSetup]:
        """Return the fastest host alone, and all hosts with each sync strategy; UsageError if one does not apply."""
        return setups.strategy_setups(self.job, self._predicted_fastest_host(), list(self.fleet.hosts), syncs)

    def run_strategies(self, syncs: Sequence[str] | None) -> None:
        """Train the same steps on the fastest host alone and on all hosts with each sync strategy."""
        for setup in self.strategy_setups(syncs):
            self.base = self.base or setup.label
            self._run_setup(setup)

    def _run_setup(self, setup: BenchSetup) -> None:
        """Run a setup to its end, or reuse its finished run. A failure is recorded, and the bench continues."""
        rundir = RunDir(self.out / setup.name)
        spec = msgspec.structs.replace(setup.spec, out=str(rundir))
        self._names[setup.label] = setup.name
        self.display.print_status(f"\n{setup.label}")
        try:
            if self._is_finished(rundir, spec, setup.hosts):
                self.display.print_status("finished already")
            else:
                self._train_setup(setup, spec, rundir)
            summary = summarize_run(rundir)
            if not summary.tokens_per_s:
                raise UsageError("no step was recorded")
            self.runs[setup.label] = summary
        except UntrustedError:
            raise  # for the user to decide: no other setup is measured meanwhile
        except EvenerError as error:
            self.failed[setup.label] = str(error)
            self.display.print_status(f"failed: {error}")
        self._write_index()

    def _best_tokens_per_s(self, host: str) -> float:
        """Return the highest tokens/s of the runs on this host alone, 0 if there are none."""
        return max((run.tokens_per_s or 0.0 for run in self.runs.values()
                    if run.manifest.roster.hosts == [host]), default=0.0)  # fmt: skip

    def _predicted_fastest_host(self) -> str:
        """Return the host predicted to be fastest alone, or the first of the file if too little was measured."""
        with contextlib.suppress(UsageError):
            options = predict(self.job, build_cluster(self.fleet, self.job)).options
            alone = [option for option in options if len(option.roster.hosts) == 1]
            return max(alone, key=lambda option: option.tokens_per_s).roster.hosts[0]
        return next(iter(self.fleet.hosts))

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
            self.display.approve_run(rundir)
            launcher.stop(rundir, begun, now=True)
        shutil.rmtree(rundir.path, ignore_errors=True)
        resolved = resolve(spec)
        with contextlib.ExitStack() as attachment:
            with connect_hosts(select_hosts(self.fleet, ",".join(setup.hosts))) as hosts:
                run = plan_on_hosts(
                    hosts.with_ranks(setup.ranks), resolved, self.display.print_run_status, as_requested=True
                )
                self.display.print_warnings(run)
                attachment.enter_context(started(run, hosts.sessions, self.display.print_run_status))
            attachment.enter_context(self._stop_on_interrupt(rundir, run.plan))
            observe = attachment.enter_context(self.display.show_progress(resolved, run.plan))
            follow_run(rundir, run.plan, observe, notify=self.display.print_run_status, fetches_checkpoints=False)

    @contextlib.contextmanager
    def _stop_on_interrupt(self, rundir: RunDir, plan: Plan) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.display.print_status(
                f"stopping; finished runs stay in {self.out}, and the same command continues the bench"
            )
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
