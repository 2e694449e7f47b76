"""Show the progress of a run that is followed: a live display on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evener.cli.terminal import make_console, print_text
from evener.core.base.decoding import json_decoder
from evener.core.base.escaped_output import print_escaped
from evener.core.base.file_io import follow_lines
from evener.core.base.shell import quote_command, quote_word
from evener.core.base.units import format_bytes, format_count, format_seconds, pluralize
from evener.core.model.shape import GPTShape
from evener.core.run.progress import WINDOW_STEPS, RunProgress, StragglerDetector
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import parse_sync
from evener.core.run.run_plan import Plan, read_plan_if_present
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import PHASE_NAMES, StepRecord
from evener.report.read.event_log import NOTICE_EVENTS, describe_notice

if TYPE_CHECKING:
    from rich.console import Console

    from evener.bench import scaling
    from evener.cli.live_display import LiveDisplay
    from evener.launch.follow_run import Observer
    from evener.report.read.run_summary import RunSummary

PLAIN_LINE_INTERVAL_S = 5.0
MAX_LOSS_IN_WORDS = 12.0  # a larger one is a diverged run's: no vocabulary has e^12 tokens
POLL_INTERVAL_S = 0.5
HEALTH_EVENTS = (
    "run.hang",
    "run.cut-off",
    "run.goes-on",
    "run.leaves",
    "run.split-brain",
    "host.failed",
    "supervisor.lost",
    "program.warning",
    "program.waiting",
    "program.note",
)


@contextlib.contextmanager
def display_run(resolved: ResolvedRun, plan: Plan, *, quiet: bool = False) -> Iterator[Observer]:
    """Print what is trained, then yield an observer that shows every record and event of the run."""
    spec = resolved.spec
    where = make_console(stderr=True, quiet=quiet)
    by_group = resolved.shape.params_by_group()  # with the frozen ones
    groups = [f"{group} {format_count(num)}" for group, num in by_group.items() if num]
    print_text(where, f"{format_count(sum(by_group.values()))} parameters: {', '.join(groups)}")
    most = "" if isinstance(resolved.shape, GPTShape) else "at most "
    tokens = f"{spec.train.batch} × {most}{resolved.shape.block_size} tokens a step"
    print_text(where, f"{pluralize(plan.world_size, 'process')}, {tokens} from {resolved.corpus.path}")
    print_text(where, f"run directory {spec.out}")
    with display_progress(resolved, where, plan) as observe:
        yield observe


@contextlib.contextmanager
def display_progress(resolved: ResolvedRun, console: Console, plan: Plan | None = None) -> Iterator[Observer]:
    """Yield an observer that shows progress: on a terminal a live display, elsewhere a plain line every few seconds.

    The live display adds a line for each host of the plan while the hosts are imbalanced.
    """
    from rich.live import Live

    from evener.cli.live_display import LiveDisplay, ProgressSnapshot

    spec = resolved.spec
    progress = RunProgress(spec.train.steps, resolved.step_size, spec.train.max_s)
    with contextlib.ExitStack() as stack:
        display = step_times = None
        if console.is_interactive and not console.quiet:
            display = LiveDisplay()
            stack.enter_context(Live(display, console=console, transient=True))
            step_times = (
                HostStepTimes(RunDir(spec.out), plan, display) if plan is not None and spec.out is not None else None
            )
        printed_at = time.monotonic()
        val_loss: float | None = None

        def observe(update: StepRecord | dict[str, Any]) -> None:
            nonlocal printed_at, progress, val_loss
            if isinstance(update, StepRecord):
                progress.add(update)
                if display is not None:
                    display.snapshot = ProgressSnapshot.from_progress(progress, val_loss)
                    if step_times is not None:
                        step_times.poll()
                elif time.monotonic() - printed_at > PLAIN_LINE_INTERVAL_S or progress.steps_done == spec.train.steps:
                    printed_at = time.monotonic()
                    print_text(console, progress.status_line())
                return
            if update["event"] == "start":
                progress = RunProgress(spec.train.steps, resolved.step_size, spec.train.max_s)
                progress.set_interval(parse_sync(update["sync"]).every)
            elif update["event"] == "rechosen":
                progress.set_interval(parse_sync(update["sync"]).every)
                if not update.get("is_trial"):
                    print_text(console, describe_notice(update))
            elif update["event"] == "evaluation":
                val_loss = update["val_loss"]
                print_text(console, f"step {update['step']}: validation loss {update['val_loss']:.4f}")
            elif update["event"] == "world" and update["number"]:
                if step_times is not None:
                    step_times.set_hosts(update["hosts"])
                print_text(console, _format_new_hosts(update))
            elif update["event"] in NOTICE_EVENTS and not update.get("is_trial"):
                print_text(console, describe_notice(update))
            elif update["event"] in HEALTH_EVENTS:
                console.print(format_health_event(update), soft_wrap=True)
            elif update["event"] == "run.diverged":
                print_text(console, f"step {update['step']}: the replicas differ")

        yield observe


class HostStepTimes:
    """The step times of all hosts, from the records of all their ranks."""

    def __init__(self, rundir: RunDir, plan: Plan, display: LiveDisplay) -> None:
        self._rundir, self._plan, self._display, self._hosts = rundir, plan, display, StragglerDetector()
        self._decoder = json_decoder(StepRecord)
        self._followers: dict[int, Iterator[list[bytes]]] = {}
        self._polled_at = 0.0

    def set_hosts(self, hosts: list[str]) -> None:
        """Set the hosts that take part now; reread the plan, which has the hosts that were added."""
        self._plan = read_plan_if_present(self._rundir) or self._plan
        self._hosts.retain_hosts(hosts)

    def poll(self) -> None:
        """Read new records, at most once per `POLL_INTERVAL_S`, and update the display."""
        if len(self._plan.hosts) < 2 or time.monotonic() - self._polled_at < POLL_INTERVAL_S:
            return
        self._polled_at = time.monotonic()
        for host in self._plan.hosts:
            for rank in range(host.first_rank, host.first_rank + host.num_ranks):
                follower = self._followers.setdefault(rank, follow_lines(self._rundir.steps_path(rank)))
                for line in next(follower)[-WINDOW_STEPS:]:  # older ones are outside the window
                    self._hosts.add(host.name, rank, self._decoder.decode(line))
        self._display.imbalanced_hosts = self._hosts.detect_imbalance()


def format_health_event(event: dict[str, Any]) -> str:
    """Return the text of a health event: the warning and its hint, or that the run recovered."""
    if event["event"] == "run.goes-on":
        return f"recovered {format_seconds(event['after_s'])} after that was reported"
    if event["event"] == "program.waiting":
        return f"waiting for rank {event['rank']}, which is in {event['where']}"
    if event["event"] == "program.note":
        return str(event["text"])
    if event["event"] == "program.warning":
        return f"warning: rank {event['rank']} on {event['host']}: {event['error']}\nhint:  {event['hint']}"
    return f"warning: {event['event']}: {event['error']}\nhint:  {event['hint']}"


def print_health_event(update: StepRecord | dict[str, Any]) -> None:
    """Print a health event of a run whose own output is shown, such as a hang or a failed host; ignore all else."""
    if isinstance(update, StepRecord):
        return
    if update["event"] in HEALTH_EVENTS:
        print_escaped(format_health_event(update), file=sys.stderr, flush=True)
    elif update["event"] == "world" and update["number"]:
        print_escaped(_format_new_hosts(update), file=sys.stderr, flush=True)


def _format_new_hosts(event: dict[str, Any]) -> str:
    """Return a line about the hosts with which a run goes on."""
    return f"step {event['step']}: going on with {', '.join(event['hosts'])}: {event['why']}"


@contextlib.contextmanager
def display_series(runs_by_corpus: dict[str, list[RunSpec]], console: Console) -> Iterator[scaling.ObserverFactory]:
    """Yield an observer factory for `train_series`: one bar over the time of all runs, or one line a run in a pipe."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    runs = [spec for specs in runs_by_corpus.values() for spec in specs]
    with Bar(
        BarColumn(20),
        TextColumn("{task.description}", markup=False, table_column=Column()),
        console=console,
        transient=True,
        disable=not console.is_interactive,
    ) as bar:
        task = bar.add_task("", total=len(runs))

        def begin(spec: RunSpec) -> Observer:
            name = f"{spec.data.data}, {pluralize(spec.machine.ranks, 'process')}"
            done, budget_s = runs.index(spec), spec.train.max_s or 1.0
            print_text(console, f"[{done + 1}/{len(runs)}] {name}")
            began: float | None = None

            def observe(update: StepRecord | dict[str, Any]) -> None:
                nonlocal began
                if isinstance(update, StepRecord):
                    began = began or update.ended
                    spent_s = update.ended - began
                    loss = "" if update.loss is None else f"loss {update.loss:.3f}, "
                    text = f"{name}: step {update.step + 1}, {loss}{format_seconds(max(0.0, budget_s - spent_s))} left"
                    bar.update(task, completed=done + min(1.0, spent_s / budget_s), description=text)

            return observe

        yield begin


def print_summary(summary: RunSummary) -> None:
    """Print the last lines of a run: verdict, throughput, loss, replica agreement, memory, next command."""
    result, manifest = summary.manifest.result, summary.manifest
    if result is None:  # ended with --now
        print_escaped(
            f"{manifest.verdict} at once; earlier checkpoints: {summary.run_dir}/checkpoints", file=sys.stderr
        )
        return
    lines = [f"{manifest.verdict} after step {result.steps}"]
    if summary.tokens_per_s:
        rate = f"{format_count(summary.tokens_per_s)} {summary.unit}/s"
        lines[0] += f": {rate}, step {format_seconds(summary.step_p50_s)}"
    if result.loss is not None and result.val_loss is not None:
        lines.append(f"loss {result.loss:.4f}, validation loss {result.val_loss:.4f}{_loss_in_words(manifest)}")
    if helped := _describe_gain(summary):
        lines.append(helped)
    if result.replicas_agree:
        lines.append(f"{manifest.world_size} replicas agree to the bit")
    lines.append(f"peak memory {' + '.join(format_bytes(peak) for peak in result.peak_memory_bytes)}")
    run = quote_word(summary.run_dir)
    if result.steps < manifest.spec.train.steps:
        lines.append(f"resume:  evener train --resume {run}")
    elif manifest.shape is not None:
        further = ["evener", "train", "--resume", summary.run_dir, "--steps", str(2 * result.steps)]
        lines.append(f"go on:   {quote_command(further)}")
    if manifest.verdict != "stopped":
        lines.append(f"report:  evener report {run}")
    if manifest.shape is not None and manifest.corpus is not None:
        lines.append(f"talk:    evener sample {run}")
    print_escaped("\n".join(lines), file=sys.stderr)


def _loss_in_words(manifest: Manifest) -> str:
    """Return what a validation loss means: among how many tokens the model guesses, on average."""
    val_loss = None if manifest.result is None else manifest.result.val_loss
    if manifest.corpus is None or val_loss is None or not val_loss < MAX_LOSS_IN_WORDS:
        return ""
    what = {"char": "characters", "byte": "bytes"}.get(manifest.corpus.tokenizer, "tokens")
    return f": it guesses each of the {what} as if among {math.exp(val_loss):.3g} equally likely ones"


def print_measured_steps(summary: RunSummary) -> None:
    """Print what was measured of a program that `evener launch` started: its steps and their phases."""
    if not summary.num_steps or summary.step_p50_s is None:
        return
    rate = f", {format_count(summary.tokens_per_s)} {summary.unit}/s" if summary.tokens_per_s else ""
    print_escaped(
        f"{pluralize(summary.num_steps, 'step')} measured: {format_seconds(summary.step_p50_s)} each{rate}",
        file=sys.stderr,
    )
    for rank in summary.ranks:
        phases = {name: getattr(rank.typical, phase) for phase, name in PHASE_NAMES.items()}
        shares = [f"{name} {seconds / summary.step_p50_s:.0%}" for name, seconds in phases.items() if seconds]
        print_escaped(f"{summary.rank_label(rank)}: {', '.join(shares)}", file=sys.stderr)
    print_escaped(f"report:  evener report {quote_word(summary.run_dir)}", file=sys.stderr)


def _describe_gain(summary: RunSummary) -> str:
    """Return a sentence on whether the machines helped; empty for a run on one machine, or without a prediction."""
    predicted, hosts = summary.predicted, summary.manifest.roster.hosts
    if len(hosts) < 2 or predicted is None or not predicted.speedup_vs_best_host or not summary.tokens_per_s:
        return ""
    alone = predicted.tokens_per_s / predicted.speedup_vs_best_host
    gain = summary.tokens_per_s / alone
    return (
        f"{pluralize(len(hosts), 'machine')}: {gain:.2f} times as fast as the fastest alone would be "
        f"({format_count(alone)} tokens/s), predicted {predicted.speedup_vs_best_host:.2f}"
    )


def exit_status(manifest: Manifest) -> int:
    """Return 0, or 130 for a run that was stopped by hand before it was done."""
    return 130 if manifest.verdict == "stopped" and not manifest.was_time_up else 0
