"""How does a running job look in a terminal, and in a pipe?"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evener.cli.terminal import console, say
from evener.core.progress import Progress
from evener.core.resolve import Resolved
from evener.core.roster import parse_sync
from evener.core.rundir import Manifest
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.core.units import count, plural, seconds, size

if TYPE_CHECKING:
    from rich.console import Console

    from evener.bench import scaling
    from evener.launch.follow import Observer
    from evener.report.summary import Summary

PLAIN_EVERY_S = 5.0
TROUBLE = ("run.hang", "run.cut-off", "run.goes-on", "host.failed", "supervisor.lost")


@contextlib.contextmanager
def screen(resolved: Resolved, *, quiet: bool = False, num_ranks: int | None = None) -> Iterator[Observer]:
    """What a run that is followed tells of every record and event, below what is trained."""
    spec = resolved.spec
    where = console(stderr=True, quiet=quiet)
    groups = [f"{group} {count(num)}" for group, num in resolved.shape.params_by_group().items() if num]
    say(where, f"{count(resolved.shape.num_params())} parameters: {', '.join(groups)}")
    num_ranks = num_ranks or spec.machine.ranks
    tokens = f"{spec.train.batch} × {resolved.shape.block_size} tokens a step"
    say(where, f"{plural(num_ranks, 'process')}, {tokens} from {resolved.corpus.path}")
    say(where, f"run directory {spec.out}")
    with bar(resolved, where) as observe:
        yield observe


@contextlib.contextmanager
def bar(resolved: Resolved, where: Console) -> Iterator[Observer]:
    """A bar on a terminal, plain lines elsewhere."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    spec = resolved.spec
    tokens = spec.train.batch * resolved.shape.block_size
    progress = Progress(spec.train.steps, tokens, spec.train.max_s)
    with contextlib.ExitStack() as stack:
        shown = None
        if where.is_interactive and not where.quiet:
            text = TextColumn(
                "{task.description}", table_column=Column()
            )  # of its own: in a narrow one it has two lines
            length = 20 if where.width > 100 else 6
            shown = stack.enter_context(Bar(SpinnerColumn(), BarColumn(length), text, console=where, transient=True))
            task = shown.add_task("starting", total=1.0)
        told = time.monotonic()

        def observe(news: StepRecord | dict[str, Any]) -> None:
            nonlocal told, progress
            if isinstance(news, StepRecord):
                progress.add(news)
                if shown is not None:
                    shown.update(task, completed=progress.share, description=progress.line())
                elif time.monotonic() - told > PLAIN_EVERY_S or progress.done == spec.train.steps:
                    told = time.monotonic()
                    say(where, progress.line())
            elif news["event"] == "start":
                progress = Progress(spec.train.steps, tokens, spec.train.max_s, parse_sync(news["sync"]).every)
            elif news["event"] == "evaluation":
                say(where, f"step {news['step']}: validation loss {news['val_loss']:.4f}")
            elif news["event"] == "world" and news["number"]:
                say(where, f"step {news['step']}: going on with {', '.join(news['hosts'])}: {news['why']}")
            elif news["event"] == "rechosen":
                say(where, f"step {news['step']}: {news['sync']} instead of {news['was']}: {news['why']}")
            elif news["event"] == "sync.fidelity":
                say(where, f"step {news['step']}: {news['why']}")
            elif news["event"] in TROUBLE:
                where.print(in_words(news), soft_wrap=True)
            elif news["event"] == "run.diverged":
                say(where, f"step {news['step']}: the replicas differ")

        yield observe


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
