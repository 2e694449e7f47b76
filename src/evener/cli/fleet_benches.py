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
from evener.bench.setups import Setup
from evener.cli import fleet_run, fleets, follow
from evener.cli.terminal import console, say, table
from evener.core.errors import EvenerError, UsageError
from evener.core.fleet import Fleet, load_fleet, only
from evener.core.plan import Plan, find_plan
from evener.core.resolve import resolve
from evener.core.rundir import RunDir
from evener.core.spec import EvalSpec, ModelSpec, RunSpec, TrainSpec
from evener.hosts.session import connect
from evener.launch import fleet as launcher
from evener.launch.follow import follow as follow_run
from evener.plan.cluster import NotMeasuredError, cluster_of
from evener.plan.search import predict
from evener.report import compare
from evener.report.compare import Compared, Kind
from evener.report.page import write_page
from evener.report.picture import speeds_png, tradeoff_png
from evener.report.summary import Summary, as_result, summarize

STEPS = 10_000  # more than fit in any --seconds: the time limit ends a run
NO_EVALUATION = EvalSpec(eval_every=0, eval_tokens=1)  # only one block, at the end


def fleet(path: str, hosts: str | None, data: str, out: str | None, seconds: float, model: str, batch: int,
          as_json: bool) -> int:  # fmt: skip
    """Train on each host alone and on all together; compare tokens/s and all-reduce time."""
    base = _base(data, model, TrainSpec(steps=STEPS, batch=batch, max_s=seconds, warmup=20), NO_EVALUATION)
    bench = _Bench("fleet", Path(out or "runs/fleet"), path, hosts, base, as_json)
    bench.measure_what_is_missing()
    with connect(bench.fleet) as (sessions, errors):
        places = launcher.prepare(bench.fleet, sessions, errors, "bench").places
    for place in places:
        for setup in setups.alone(base, place.name, place.cores, len(place.gpus)):
            bench.train(setup)
    if not bench.runs:
        raise UsageError(
            "no host could train", hint="evener doctor --fleet " + path, output="\n".join(bench.failed.values())
        )
    bench.base = bench.fastest()
    by_speed = sorted(bench.fleet.hosts, key=lambda name: -bench.best_of(name))
    for setup in setups.together(base, by_speed, [place.name for place in places if place.gpus]):
        bench.train(setup)
    return bench.tell()


def strategies(path: str, hosts: str | None, data: str, out: str | None, steps: int, syncs: str | None, model: str,
               batch: int, as_json: bool) -> int:  # fmt: skip
    """Train the same steps with each sync strategy and on the fastest host alone; compare tokens/s with loss."""
    base = _base(data, model, TrainSpec(steps=steps, batch=batch), EvalSpec(eval_every=0))
    bench = _Bench("strategies", Path(out or "runs/strategies"), path, hosts, base, as_json)
    if len(bench.fleet.hosts) < 2:
        raise UsageError(f"{path}: comparing sync strategies needs two hosts", hint="a second [hosts.NAME]")
    names = None if syncs is None else [name.strip() for name in syncs.split(",")]
    setups.by_strategy(bench.job, "", list(bench.fleet.hosts), names)  # report mistakes before measuring
    bench.measure_what_is_missing()
    for setup in setups.by_strategy(bench.job, bench.foreseen(), list(bench.fleet.hosts), names):
        bench.base = bench.base or setup.label
        bench.train(setup)
    return bench.tell()


def _base(data: str, model: str, train: TrainSpec, evaluation: EvalSpec) -> RunSpec:
    """Return the spec that all runs share; without dropout, so that their losses can be compared."""
    spec = RunSpec(model=ModelSpec(model=model, dropout=0.0, compile="off"), train=train, eval=evaluation)
    return msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, data=data))


def show(where: Console, kind: Kind, runs: Mapping[str, Summary], base: Summary | None) -> None:
    """Print the table that compares the runs."""
    titles = (compare.TITLES[kind], *compare.COLUMNS[kind])
    spare = [title for title in ("wait", "exposed", "predicted", "sends") if title in titles]
    table(where, titles, compare.rows(kind, runs, base), spare=spare)


class _Bench:
    """The runs of one bench. Runs that have finished in its folder are reused, so a bench can be restarted."""

    def __init__(self, kind: Kind, out: Path, path: str, hosts: str | None, base: RunSpec, as_json: bool) -> None:
        self.kind, self.out, self.path, self.as_json = kind, out, path, as_json
        self.fleet: Fleet = only(load_fleet(path), hosts)
        self.console = console(stderr=True, quiet=as_json)
        self.runs: dict[str, Summary] = {}
        self.failed: dict[str, str] = {}
        self.base: str | None = None  # label of the baseline
        self._names: dict[str, str] = {}
        self.resolved = resolve(base)  # report mistakes before measuring
        self.job = self.resolved.job
        if out.exists() and any(out.iterdir()) and not compare.is_comparison(out):
            raise UsageError(f"{out}: exists and is not a bench", hint="another --out")
        if compare.is_comparison(out) and compare.read(out).kind != kind:
            raise UsageError(f"{out}: contains another bench", hint="another --out")

    def measure_what_is_missing(self) -> None:
        """Probe hosts and links that were not measured, to predict each run; write the results to the fleet file."""
        from evener.cli import probe

        try:
            cluster_of(self.fleet, self.job)
        except NotMeasuredError as missing:
            self.say(f"{missing}: measuring hosts and links first")
            with contextlib.redirect_stdout(sys.stderr):
                if len(self.fleet.hosts) > 1:
                    probe.wire(fleet=self.path, seconds=1.0, no_iperf3=True, no_trials=True)
                probe.host(fleet=self.path, model=self.job.model)
            self.fleet = only(load_fleet(self.path), ",".join(self.fleet.hosts))

    def train(self, setup: Setup) -> None:
        """Run a setup to its end, or reuse its finished run. A failure is recorded, and the bench continues."""
        rundir = RunDir(self.out / setup.name)
        spec = msgspec.structs.replace(setup.spec, out=str(rundir))
        self._names[setup.label] = setup.name
        self.console.print()
        self.say(setup.label)
        try:
            if self._is_there(rundir, spec, setup.hosts):
                self.say("finished already")
            else:
                self._train(setup, spec, rundir)
            summary = summarize(rundir)
            if not summary.tokens_per_s:
                raise UsageError("no step was recorded")
            self.runs[setup.label] = summary
        except EvenerError as error:
            self.failed[setup.label] = str(error)
            self.say(f"failed: {error}")
        self._write()

    def best_of(self, host: str) -> float:
        """Return the highest tokens/s of the runs on this host alone, 0 if there are none."""
        return max((run.tokens_per_s or 0.0 for run in self.runs.values()
                    if run.manifest.roster.hosts == [host]), default=0.0)  # fmt: skip

    def fastest(self) -> str:
        """Return the label of the run with the highest tokens/s."""
        return max(self.runs, key=lambda label: self.runs[label].tokens_per_s or 0.0)

    def foreseen(self) -> str:
        """Return the host predicted to be fastest alone, or the first of the file if too little was measured."""
        with contextlib.suppress(UsageError):
            options = predict(self.job, cluster_of(self.fleet, self.job)).options
            alone = [option for option in options if len(option.roster.hosts) == 1]
            return max(alone, key=lambda option: option.tokens_per_s).roster.hosts[0]
        return next(iter(self.fleet.hosts))

    def say(self, text: str) -> None:
        """Print one status line."""
        say(self.console, text)

    def tell(self) -> int:
        """Write the picture and the page, and print the table and its explanation; return the exit status."""
        draw = speeds_png if self.kind == "fleet" else tradeoff_png
        draw(self.runs, self.out / f"{self.kind}.png")
        for run in self.runs.values():
            write_page(RunDir(run.run_dir))
        page = write_page(RunDir(self.out))
        base = self.runs.get(self.base) if self.base else None
        sentences = compare.explain(self.kind, self.runs, self.base)
        if self.as_json:
            result = {
                "out": str(self.out),
                "report": str(page),
                "base": self.base,
                "runs": {label: as_result(run) for label, run in self.runs.items()},
                "failed": self.failed,
                "explanation": sentences,
            }
            json.dump(result, sys.stdout)
            print()
            return int(bool(self.failed))
        self.console.print()
        show(self.console, self.kind, self.runs, base)
        self.console.print()
        for label, why in self.failed.items():
            self.say(f"{label}: {why}")
        for sentence in sentences:
            self.say(sentence)
        self.console.print(f"\npicture: {self.out / self.kind}.png\nreport:  ", end="", soft_wrap=True)
        print(page)
        return int(bool(self.failed))

    def _is_there(self, rundir: RunDir, spec: RunSpec, hosts: Sequence[str]) -> bool:
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

    def _train(self, setup: Setup, spec: RunSpec, rundir: RunDir) -> None:
        self._write()  # marks the folder as a bench
        if (begun := find_plan(rundir)) is not None:  # still running, if the terminal of this bench was closed
            launcher.stop(rundir, begun, now=True)
        shutil.rmtree(rundir.path, ignore_errors=True)
        resolved = resolve(spec)
        hosts = fleets.with_ranks(only(self.fleet, ",".join(setup.hosts)), setup.ranks)
        with connect(hosts) as (sessions, errors):
            plan, trees, prepared = fleet_run.planned(hosts, sessions, errors, resolved, as_asked=True)
            fleet_run.begin(plan, trees, prepared, sessions, resolved)
        with self._ending_it_on_ctrl_c(rundir, plan), follow.bar(resolved, self.console, plan) as observe:
            follow_run(rundir, plan, observe, fleets.on_lost, carries=False)

    @contextlib.contextmanager
    def _ending_it_on_ctrl_c(self, rundir: RunDir, plan: Plan) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.say(f"stopping; finished runs stay in {self.out}, and the same command continues the bench")
            launcher.stop(rundir, plan)
            shutil.rmtree(rundir.path)
            raise

    def _write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        names = {label: self._names[label] for label in self.runs}
        base = self.base if self.base in self.runs else None
        compare.write(self.out, Compared(kind=self.kind, base=base, runs=names, failed=self.failed))
