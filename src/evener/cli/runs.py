"""evener runs: list runs with their state and results, and prune those that are worth nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from evener.core.plan import Plan
    from evener.core.rundir import RunDir
    from evener.launch.mirror import State
    from evener.report.listing import Row


EXAMPLES = "evener runs\nevener runs gpt2 finished --sort best\nevener runs --prune --fewer-than 100"


def runs(
    words: list[str] | None = typer.Argument(
        None,
        help="only runs with this word in name, model, data, state or hosts; a folder: list its runs [runs]",
    ),
    sort: str = typer.Option("run", help="age, loss, best, tokens/s, size or another column; -loss: the highest first"),
    prune: bool = typer.Option(
        False, "--prune", help="list the runs that failed or were stopped and left no weights, with their sizes"
    ),
    fewer_than: int | None = typer.Option(None, min=1, help="with --prune: also those that ended after fewer steps"),
    older_than: float | None = typer.Option(None, min=0, help="with --prune: also older runs"),
    yes: bool = typer.Option(False, "--yes", help="with --prune: remove them"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """List the runs made here, those of benches too, and ask the hosts for the state of the runs that have not ended.

    --prune removes no run that has finished, may still be running or belongs to a bench, and no files on other hosts.
    """
    import json
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from evener.cli.terminal import console, say
    from evener.cli.watching import runs_in
    from evener.core.errors import UsageError
    from evener.core.rundir import RunDir
    from evener.report import listing

    if not prune and (yes or fewer_than or older_than is not None):
        raise UsageError("--yes, --fewer-than and --older-than need --prune", hint="evener runs --prune")
    folder, words = _where(words or [])
    listing.in_order([], sort)
    with ThreadPoolExecutor(max_workers=16) as pool:
        rows = list(pool.map(_row, [RunDir(path) for path in runs_in(folder)]))
    rows = listing.in_order(listing.found(rows, words), sort)
    if prune:
        return _prune(rows, fewer_than, older_than, yes, as_json)
    if as_json:
        print(json.dumps({"runs": msgspec.to_builtins(rows)}))
        return 0
    screen = console()
    if not rows:
        say(screen, f"no runs in {folder}" + (f" with {' and '.join(words)}" if words else ""))
        return 0
    _show(screen, rows)
    if remote := [row.run for row in rows if row.newer_checkpoint]:
        say(screen, f"to copy weights from a host: evener fetch {remote[0]}")
    return 0


def _where(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Split the arguments into the folder to list and the words to filter by."""
    from evener.core.errors import UsageError

    folders = [word for word in words if "/" in word or Path(word).is_dir()]
    if len(folders) > 1:
        raise UsageError(f"{folders[1]}: expected one folder")
    folder = Path(folders[0] if folders else "runs")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", hint="evener train makes runs/")
    return folder, [word for word in words if word not in folders]


def _show(screen: Console, rows: Sequence[Row]) -> None:
    """Print the table of runs."""
    import time

    from evener.cli.terminal import table
    from evener.core.units import count, size
    from evener.report.listing import age

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    now = time.time()
    columns = {
        "run": [row.run for row in rows],
        "state": [row.state for row in rows],
        "model": [row.model or "" for row in rows],
        "data": [row.data or "" for row in rows],
        "hosts": [_hosts(row.hosts, row.state) for row in rows],
        "ranks": ["" if row.ranks is None else str(row.ranks) for row in rows],
        "steps": [_steps(row) for row in rows],
        "loss": [number(row.loss) for row in rows],
        "val": [number(row.val_loss) for row in rows],
        "best": [number(row.best_val_loss) for row in rows],
        "tokens/s": ["" if row.tokens_per_s is None else count(row.tokens_per_s) for row in rows],
        "age": ["" if row.begun is None else age(now - row.begun) for row in rows],
        "size": [size(row.bytes) for row in rows],
        "weights": [_weights(row) for row in rows],
    }
    table(
        screen,
        list(columns),
        list(zip(*columns.values(), strict=True)),
        left=("state", "model", "data", "hosts", "weights"),
        spare=("weights", "ranks", "data", "val", "hosts", "size", "best", "model", "age"),
        styles={"failed": "red", "running": "green"},
    )


def _steps(row: Row) -> str:
    """Return the number of steps, or `done/requested` if fewer were done than requested."""
    if row.steps is None:
        return ""
    return str(row.steps) if row.asked_steps in (None, row.steps) else f"{row.steps}/{row.asked_steps}"


def _weights(row: Row) -> str:
    if row.newer_checkpoint:
        return f"on {row.newer_checkpoint['host']}"
    return "here" if row.checkpoint else ""


def _hosts(states: dict[str, str], of_run: str) -> str:
    """List the hosts, or their number if more than three have the run's state; others with their own state.

    >>> _hosts({"attic": "running", "laptop": "lost"}, "running"), _hosts(dict.fromkeys("abcdef", "lost"), "lost")
    ('attic, laptop lost', '6 hosts')
    """
    alike = [name for name, state in states.items() if state == of_run]
    others = [f"{name} {state}" for name, state in states.items() if state != of_run]
    return ", ".join([f"{len(alike)} hosts"] * (len(alike) > 3) + alike * (len(alike) <= 3) + others)


# --- rows of the table ------------------------------------------------------------------------------------------------


def _row(rundir: RunDir) -> Row:
    """Load one row of the table from a run directory, its plan and, if it has not ended, its hosts."""
    from evener.cli import fleets
    from evener.core.plan import find_plan
    from evener.report.events import evaluations
    from evener.report.listing import Row, disk_bytes
    from evener.report.summary import summarize

    row = Row(run=str(rundir), bytes=disk_bytes(rundir.path))
    plan, events = find_plan(rundir), rundir.events()
    if launched := [event["time"] for event in events if event["event"] == "launched"]:
        row.begun, row.model = launched[0], "script"
    if plan is not None and plan.hosts:
        row.hosts, row.state = _asked(rundir, plan)
        row.ranks = plan.world_size
        if plan.spec is not None:
            row.model, row.data = plan.spec.model.model, Path(plan.spec.data.data).name
    if rundir.is_run():
        summary = summarize(rundir)
        manifest = summary.manifest
        row.begun, row.model = manifest.started, manifest.spec.model.model if manifest.shape else "own"
        row.data = manifest.corpus.name if manifest.corpus else None
        row.ranks, row.steps, train = manifest.world_size, summary.num_steps, manifest.spec.train
        row.asked_steps = train.steps if train.max_s is None else None  # a time limit has no number of steps
        row.tokens_per_s, row.loss = summary.tokens_per_s, summary.last_loss
        losses = [val_loss for _, val_loss in evaluations(events)]
        if manifest.result and manifest.result.val_loss is not None:
            losses.append(manifest.result.val_loss)
        if losses:
            row.val_loss, row.best_val_loss = losses[-1], min(losses)
        if not row.hosts:
            row.state = manifest.verdict
            row.hosts = {machine.host: manifest.verdict for machine in manifest.hosts}
        elif row.state == "finished":
            row.state = manifest.verdict
            row.hosts = dict.fromkeys(row.hosts, manifest.verdict)
    weights = fleets.weights(rundir, plan)
    row.checkpoint, row.newer_checkpoint = weights["checkpoint"], weights["newer_checkpoint"]
    return row


def _asked(rundir: RunDir, plan: Plan) -> tuple[dict[str, str], str]:
    """Return the state of each host of a run, asking the hosts unless all are known to have ended, and of the run."""
    from evener.core.errors import HostError
    from evener.launch import fleet as launcher

    states = launcher.known_states(rundir, plan)
    if any(state.get("state") != "ended" for state in states.values()):
        answers = launcher.states(rundir, plan)
        states = {
            name: {"state": "unreachable"} if isinstance(answer, HostError) else answer
            for name, answer in answers.items()
        }
        if not any(isinstance(answer, HostError) for answer in answers.values()):
            launcher.catch_up(rundir, plan)
    hosts = {name: _state(state) for name, state in states.items()}
    worst = ["failed", "running", "unreachable", "lost"]
    if plan.outlives_hosts:  # the run continues without a host that has left or failed
        worst = ["running", "finished", "stopped", *worst]
    values = list(hosts.values())
    return hosts, next((value for value in worst if value in values), values[0])


def _state(state: State) -> str:
    from evener.core.world import LEFT

    if state.get("lost"):
        return "lost"
    if state.get("state") == "ended":
        ended = {0: "finished", LEFT: "left"}
        return "stopped" if state.get("stopped") else ended.get(state.get("status") or 0, "failed")
    return str(state.get("state", "started"))


# --- prune ------------------------------------------------------------------------------------------------------------


def _prune(rows: Sequence[Row], fewer_than: int | None, older_than: float | None, yes: bool, as_json: bool) -> int:
    """List the runs that can be pruned, with their sizes; remove them if `yes`."""
    import json
    import time

    from evener.cli.terminal import console, say, table
    from evener.core.rundir import RunDir
    from evener.core.units import plural, size
    from evener.launch import pruned
    from evener.report.listing import why_pruned

    now = time.time()

    def why(row: Row) -> str | None:
        return why_pruned(row, now, fewer_than=fewer_than, older_than_days=older_than)

    prunable = [row for row in rows if why(row) is not None and not pruned.is_kept(RunDir(row.run))]
    if yes:
        prunable = [row for row in prunable if why(_row(RunDir(row.run))) is not None]  # not resumed meanwhile
        for row in prunable:
            pruned.remove(RunDir(row.run))
    if as_json:
        print(json.dumps({"pruned": [{"run": row.run, "bytes": row.bytes, "why": why(row)} for row in prunable],
                          "removed": yes}))  # fmt: skip
        return 0
    screen = console()
    if not prunable:
        others = "" if fewer_than is None and older_than is None else ", and none is as short or as old as given"
        say(screen, f"nothing to prune: no run failed or was stopped without weights{others}")
        return 0
    table(screen, ("run", "size", "why"), [(row.run, size(row.bytes), why(row) or "") for row in prunable], text=True)
    total = f"{plural(len(prunable), 'run')}, {size(sum(row.bytes for row in prunable))}"
    say(screen, f"removed: {total}" if yes else f"{total}; nothing is removed without --yes", style="bold")
    return 0
