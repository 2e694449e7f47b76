"""How does a running job look in a terminal, and in a pipe?"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evener.cli.terminal import console, say
from evener.core.decoding import json_decoder
from evener.core.files import follow_lines
from evener.core.plan import Plan, find_plan
from evener.core.progress import WINDOW, Hosts, Progress
from evener.core.resolve import Resolved
from evener.core.roster import parse_sync
from evener.core.rundir import Manifest, RunDir
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.core.units import count, plural, seconds, size
from evener.report.events import CHANGES, change

if TYPE_CHECKING:
    from rich.console import Console

    from evener.bench import scaling
    from evener.cli.live import Display
    from evener.launch.follow import Observer
    from evener.report.summary import Summary

PLAIN_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
TROUBLE = ("run.hang", "run.cut-off", "run.goes-on", "run.leaves", "host.failed", "supervisor.lost")


@contextlib.contextmanager
def screen(resolved: Resolved, plan: Plan, *, quiet: bool = False) -> Iterator[Observer]:
    """What a run that is followed tells of every record and event, below what is trained."""
    spec = resolved.spec
    where = console(stderr=True, quiet=quiet)
    groups = [f"{group} {count(num)}" for group, num in resolved.shape.params_by_group().items() if num]
    say(where, f"{count(resolved.shape.num_params())} parameters: {', '.join(groups)}")
    tokens = f"{spec.train.batch} × {resolved.shape.block_size} tokens a step"
    say(where, f"{plural(plan.world_size, 'process')}, {tokens} from {resolved.corpus.path}")
    say(where, f"run directory {spec.out}")
    with bar(resolved, where, plan) as observe:
        yield observe


@contextlib.contextmanager
def bar(resolved: Resolved, where: Console, plan: Plan | None = None) -> Iterator[Observer]:
    """A bar on a terminal, with a line a host of the plan where one is unlike the others; plain lines elsewhere."""
    from rich.live import Live

    from evener.cli.live import Display, Now

    spec = resolved.spec
    tokens = spec.train.batch * resolved.shape.block_size
    progress = Progress(spec.train.steps, tokens, spec.train.max_s)
    with contextlib.ExitStack() as stack:
        shown = paces = None
        if where.is_interactive and not where.quiet:
            shown = Display()
            stack.enter_context(Live(shown, console=where, transient=True))
            paces = Paces(RunDir(spec.out), plan, shown) if plan is not None and spec.out is not None else None
        told = time.monotonic()
        val_loss: float | None = None

        def observe(news: StepRecord | dict[str, Any]) -> None:
            nonlocal told, progress, val_loss
            if isinstance(news, StepRecord):
                progress.add(news)
                if shown is not None:
                    shown.now = Now.of(progress, val_loss)
                    if paces is not None:
                        paces.look()
                elif time.monotonic() - told > PLAIN_EVERY_S or progress.done == spec.train.steps:
                    told = time.monotonic()
                    say(where, progress.line())
                return
            if news["event"] == "start":
                progress = Progress(spec.train.steps, tokens, spec.train.max_s, parse_sync(news["sync"]).every)
            elif news["event"] == "evaluation":
                val_loss = news["val_loss"]
                say(where, f"step {news['step']}: validation loss {news['val_loss']:.4f}")
            elif news["event"] == "world" and news["number"]:
                if paces is not None:
                    paces.changed(news["hosts"])
                say(where, f"step {news['step']}: going on with {', '.join(news['hosts'])}: {news['why']}")
            elif news["event"] in CHANGES and not news.get("is_trial"):
                say(where, change(news))
            elif news["event"] in TROUBLE:
                where.print(in_words(news), soft_wrap=True)
            elif news["event"] == "run.diverged":
                say(where, f"step {news['step']}: the replicas differ")

        yield observe


class Paces:
    """The hosts' paces, by the records that come home of all their ranks."""

    def __init__(self, rundir: RunDir, plan: Plan, shown: Display) -> None:
        self._rundir, self._plan, self._shown, self._hosts = rundir, plan, shown, Hosts()
        self._decoder = json_decoder(StepRecord)
        self._followers: dict[int, Iterator[list[bytes]]] = {}
        self._looked = 0.0

    def changed(self, hosts: list[str]) -> None:
        """These take part now; the plan has those that were added."""
        self._plan = find_plan(self._rundir) or self._plan
        self._hosts.keep(hosts)

    def look(self) -> None:
        """At what is new, now and then."""
        if len(self._plan.hosts) < 2 or time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for host in self._plan.hosts:
            for rank in range(host.first_rank, host.first_rank + host.num_ranks):
                follower = self._followers.setdefault(rank, follow_lines(self._rundir.steps_path(rank)))
                for line in next(follower)[-WINDOW:]:  # more are not looked at
                    self._hosts.add(host.name, rank, self._decoder.decode(line))
        self._shown.unlike = self._hosts.unlike()


def in_words(event: dict[str, Any]) -> str:
    """A run that hangs, goes on, or cannot."""
    if event["event"] == "run.goes-on":
        return f"it goes on, {seconds(event['after_s'])} after that was told"
    return f"warning: {event['event']}: {event['error']}\nhint:  {event['hint']}"


def tell_trouble(news: StepRecord | dict[str, Any]) -> None:
    """What is told of a run while what it prints is shown: that it hangs, or that a host has failed."""
    if not isinstance(news, StepRecord) and news["event"] in TROUBLE:
        print(in_words(news), file=sys.stderr, flush=True)


@contextlib.contextmanager
def series(runs_of: dict[str, list[RunSpec]], where: Console) -> Iterator[scaling.Observer]:
    """What `bench.scaling.run` tells of: one bar over the seconds of all runs, or a line a run in a pipe."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    runs = [spec for specs in runs_of.values() for spec in specs]
    with Bar(
        BarColumn(20),
        TextColumn("{task.description}", table_column=Column()),
        console=where,
        transient=True,
        disable=not where.is_interactive,
    ) as bar:
        task = bar.add_task("", total=len(runs))

        def begin(spec: RunSpec) -> Observer:
            name = f"{spec.data.data}, {plural(spec.machine.ranks, 'process')}"
            done, budget_s = runs.index(spec), spec.train.max_s or 1.0
            say(where, f"[{done + 1}/{len(runs)}] {name}")
            began: float | None = None

            def observe(news: StepRecord | dict[str, Any]) -> None:
                nonlocal began
                if isinstance(news, StepRecord):
                    began = began or news.ended
                    spent_s = news.ended - began
                    loss = "" if news.loss is None else f"loss {news.loss:.3f}, "
                    text = f"{name}: step {news.step + 1}, {loss}{seconds(max(0.0, budget_s - spent_s))} left"
                    bar.update(task, completed=done + min(1.0, spent_s / budget_s), description=text)

            return observe

        yield begin


def tell_end(summary: Summary) -> None:
    """The last lines of a run."""
    result, manifest = summary.manifest.result, summary.manifest
    if result is None:  # ended at once
        print(f"{manifest.verdict} at once; what was saved before: {summary.run_dir}/checkpoints", file=sys.stderr)
        return
    lines = [f"{manifest.verdict} after step {result.steps}"]
    if summary.tokens_per_s:
        lines[0] += f": {count(summary.tokens_per_s)} tokens/s, step {seconds(summary.step_p50_s)}"
    if result.loss is not None and result.val_loss is not None:
        lines.append(f"loss {result.loss:.4f}, validation loss {result.val_loss:.4f}")
    if result.replicas_agree:
        lines.append(f"{manifest.world_size} replicas agree to the bit")
    lines.append(f"peak memory {' + '.join(size(peak) for peak in result.peak_memory_bytes)}")
    if manifest.verdict == "stopped":
        lines.append(f"goes on with: evener train --resume {summary.run_dir}")
    else:
        lines.append(f"look at it:   evener report {summary.run_dir}")
    print("\n".join(lines), file=sys.stderr)


def exit_status(manifest: Manifest) -> int:
    """0, or 130 for a run that was stopped by hand before it was done."""
    stopped_by_hand = manifest.verdict == "stopped" and manifest.spec.train.max_s is None
    return 130 if stopped_by_hand else 0
