"""evener runs: list runs with their state and results, and prune those that are worth nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped
from evener.core.base.shell import quote_word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from evener.core.run.rundir import RunDir
    from evener.report.read.run_table import RunRow
    from evener.transfer.prune_hosts import StoredEntry


EXAMPLES = (
    "evener runs\nevener runs gpt2 finished --sort best\nevener runs --prune --fewer-than 100\n"
    "evener runs --prune --fleet fleet.toml --max-size 20GB"
)


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
    older_than: float | None = typer.Option(
        None,
        min=0,
        metavar="DAYS",
        help="with --prune: also remove runs older than this; with --fleet: only what is older [7]",
    ),
    fleet: str | None = typer.Option(
        None,
        metavar="FILE",
        help="with --prune: remove what the hosts of this fleet file store of earlier runs; local: this machine",
    ),
    hosts: str | None = typer.Option(None, metavar="NAME,…", help="with --fleet: only these hosts [all]"),
    max_size: str | None = typer.Option(
        None,
        metavar="SIZE",
        help="with --fleet: remove the oldest only until each host stores at most this: 20GB [all that is old]",
    ),
    yes: bool = typer.Option(False, "--yes", help="with --prune: remove them"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """List the runs made here, those of benches too, and ask the hosts for the state of the runs that have not ended.

    The hosts of a run that came from elsewhere are not contacted.

    --prune removes no run that has finished, may still be running or belongs to a bench, and no files on other hosts.
    --prune --fleet FILE lists what the hosts store of earlier runs (their parts of ended runs, code and data), and with
    --yes removes it. It keeps runs that are active, were started on another machine, or whose results are not all here.
    """
    import json
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from evener.cli.run_output import find_run_dirs
    from evener.cli.terminal import make_console, print_text
    from evener.cli.trust import not_contacted_text
    from evener.core.base.errors import UsageError
    from evener.core.cluster.fleet_file import fleet_flag
    from evener.core.run.rundir import RunDir
    from evener.launch.launcher import NOT_CONTACTED
    from evener.report.read import run_table

    if not prune and (yes or fewer_than or older_than is not None):
        raise UsageError("--yes, --fewer-than and --older-than need --prune", hint="evener runs --prune")
    if fleet is None and (hosts is not None or max_size is not None):
        raise UsageError("--hosts and --max-size need --fleet", hint="evener runs --prune --fleet fleet.toml")
    if fleet is not None and (not prune or fewer_than is not None):
        raise UsageError(
            f"{fleet_flag(fleet)} needs --prune, without --fewer-than", hint=f"evener runs --prune {fleet_flag(fleet)}"
        )
    folder, words = _split_folder(words or [])
    if fleet is not None:
        return _prune_fleet(folder, fleet, hosts, older_than, max_size, yes, trust, as_json)
    run_table.sort_rows([], sort)
    with ThreadPoolExecutor(max_workers=16) as pool:
        rows = list(pool.map(_load_row, [RunDir(path) for path in find_run_dirs(folder)]))
    rows = run_table.sort_rows(run_table.filter_rows(rows, words), sort)
    if prune:
        return _prune(folder, rows, fewer_than, older_than, yes, as_json)
    if as_json:
        print_escaped(json.dumps({"runs": msgspec.to_builtins(rows)}))
        return 0
    screen = make_console()
    if not rows:
        print_text(screen, f"no runs in {folder}" + (f" with {' and '.join(words)}" if words else ""))
        return 0
    _print_table(screen, rows)
    for row in rows:
        if row.error is not None:
            print_text(screen, row.error if row.error.startswith(row.run) else f"{row.run}: {row.error}")
    for run in [row.run for row in rows if row.state == NOT_CONTACTED]:
        print_text(screen, not_contacted_text(RunDir(run)))
    if remote := [row.run for row in rows if row.newer_checkpoint]:
        print_text(screen, f"to copy weights from a host: evener fetch {quote_word(remote[0])}")
    return 0


def _split_folder(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Split the arguments into the folder to list and the words to filter by."""
    from evener.core.base.errors import UsageError

    folders = [word for word in words if "/" in word or Path(word).is_dir()]
    if len(folders) > 1:
        raise UsageError(f"{folders[1]}: expected one folder")
    folder = Path(folders[0] if folders else "runs")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", hint="evener train makes runs/")
    return folder, [word for word in words if word not in folders]


def _print_table(screen: Console, rows: Sequence[RunRow]) -> None:
    """Print the table of runs."""
    import time

    from evener.cli.terminal import print_table
    from evener.core.base.units import format_bytes, format_count
    from evener.report.read.run_table import format_age

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    now = time.time()
    columns = {
        "run": [row.run for row in rows],
        "state": [row.state for row in rows],
        "model": [row.model or "" for row in rows],
        "data": [row.data or "" for row in rows],
        "hosts": [_format_hosts(row.hosts, row.state) for row in rows],
        "ranks": ["" if row.ranks is None else str(row.ranks) for row in rows],
        "steps": [_format_steps(row) for row in rows],
        "loss": [number(row.loss) for row in rows],
        "val": [number(row.val_loss) for row in rows],
        "best": [number(row.best_val_loss) for row in rows],
        "tokens/s": ["" if row.tokens_per_s is None else format_count(row.tokens_per_s) for row in rows],
        "age": ["" if row.begun is None else format_age(now - row.begun) for row in rows],
        "size": [format_bytes(row.bytes) for row in rows],
        "weights": [_format_checkpoint(row) for row in rows],
    }
    print_table(
        screen,
        list(columns),
        list(zip(*columns.values(), strict=True)),
        left_aligned=("state", "model", "data", "hosts", "weights"),
        droppable=("weights", "ranks", "data", "val", "hosts", "size", "best", "model", "age"),
        styles={"failed": "red", "damaged": "red", "running": "green"},
    )


def _format_steps(row: RunRow) -> str:
    """Return the number of steps, or `done/requested` if fewer were done than requested."""
    if row.steps is None:
        return ""
    return str(row.steps) if row.asked_steps in (None, row.steps) else f"{row.steps}/{row.asked_steps}"


def _format_checkpoint(row: RunRow) -> str:
    if row.newer_checkpoint:
        return f"on {row.newer_checkpoint['host']}"
    return "here" if row.checkpoint else ""


def _format_hosts(states: dict[str, str], run_state: str) -> str:
    """List the hosts, or their number if more than three have the run's state; others with their own state.

    >>> (_format_hosts({"attic": "running", "laptop": "lost"}, "running"),
    ...  _format_hosts(dict.fromkeys("abcdef", "lost"), "lost"))
    ('attic, laptop lost', '6 hosts')
    """
    alike = [name for name, state in states.items() if state == run_state]
    others = [f"{name} {state}" for name, state in states.items() if state != run_state]
    return ", ".join([f"{len(alike)} hosts"] * (len(alike) > 3) + alike * (len(alike) <= 3) + others)


# --- rows of the table ------------------------------------------------------------------------------------------------


def _load_row(rundir: RunDir) -> RunRow:
    """Load one row of the table; that of a run whose files cannot be read says so, and the others are listed.

    A full disk of this machine is no fault of the run: NoRoomError.
    """
    from evener.core.base.errors import NoRoomError
    from evener.report.read.run_table import RunRow, disk_bytes

    try:
        return _load_sound_row(rundir)
    except NoRoomError:
        raise
    except OSError as error:
        if (full := NoRoomError.from_os_error(error)) is not None:
            raise full from None
        return RunRow(run=str(rundir), state="damaged", bytes=disk_bytes(rundir.path), error=str(error))
    except Exception as error:  # a file that came from elsewhere may cause any
        return RunRow(
            run=str(rundir), state="damaged", bytes=disk_bytes(rundir.path), error=str(error) or type(error).__name__
        )


def _load_sound_row(rundir: RunDir) -> RunRow:
    """Load one row from a run directory, its plan and, if it has not ended, its hosts."""
    from evener.cli import run_output
    from evener.core.run.run_plan import read_plan_if_present
    from evener.launch.launcher import query_run_state
    from evener.report.read.event_log import evaluations
    from evener.report.read.run_summary import summarize_run
    from evener.report.read.run_table import RunRow, disk_bytes

    row = RunRow(run=str(rundir), bytes=disk_bytes(rundir.path))
    plan, events = read_plan_if_present(rundir), rundir.events()
    if launched := [event["time"] for event in events if event["event"] == "launched"]:
        row.begun, row.model = launched[0], "script"
    if plan is not None and plan.hosts:
        row.hosts, row.state = query_run_state(rundir, plan)
        row.ranks = plan.world_size
        if plan.spec is not None:
            row.model, row.data = plan.spec.model.name, Path(plan.spec.data.data).name
    if rundir.is_run():
        summary = summarize_run(rundir)
        manifest = summary.manifest
        row.begun = manifest.started
        row.model = manifest.spec.model.name if manifest.shape else manifest.program or "own"
        row.data = manifest.corpus.name if manifest.corpus else None
        row.ranks, row.steps = manifest.world_size, summary.num_steps
        row.asked_steps = manifest.planned_steps
        row.tokens_per_s, row.loss = summary.tokens_per_s, summary.last_loss
        losses = [val_loss for _, val_loss in evaluations(events)]
        if manifest.result and manifest.result.val_loss is not None:
            losses.append(manifest.result.val_loss)
        if losses:
            row.val_loss, row.best_val_loss = losses[-1], min(losses)
        if not row.hosts:
            row.state = manifest.verdict
            row.hosts = {machine.host: manifest.verdict for machine in manifest.hosts}
        elif row.state == "finished" and manifest.program is None:
            row.state = manifest.verdict
            row.hosts = dict.fromkeys(row.hosts, manifest.verdict)
    weights = run_output.checkpoint_info(rundir, plan)
    row.checkpoint, row.newer_checkpoint = weights["checkpoint"], weights["newer_checkpoint"]
    return row


# --- prune ------------------------------------------------------------------------------------------------------------


def _prune(
    folder: Path, rows: Sequence[RunRow], fewer_than: int | None, older_than: float | None, yes: bool, as_json: bool
) -> int:
    """List the runs that can be pruned, with their sizes; remove them if `yes`."""
    import json
    import time

    from evener.cli.terminal import make_console, print_table, print_text
    from evener.core.base.units import format_bytes, pluralize
    from evener.core.run.rundir import RunDir
    from evener.launch import prune_runs
    from evener.report.read.run_table import prune_reason

    now = time.time()

    def why(row: RunRow) -> str | None:
        return prune_reason(row, now, fewer_than=fewer_than, older_than_days=older_than)

    prunable = [row for row in rows if why(row) is not None and not prune_runs.is_protected(RunDir(row.run), folder)]
    if yes:
        prunable = [row for row in prunable if why(_load_row(RunDir(row.run))) is not None]  # not resumed meanwhile
        for row in prunable:
            prune_runs.delete_run(RunDir(row.run))
    if as_json:
        print_escaped(json.dumps({"pruned": [{"run": row.run, "bytes": row.bytes, "why": why(row)} for row in prunable],
                          "removed": yes}))  # fmt: skip
        return 0
    screen = make_console()
    if not prunable:
        others = "" if fewer_than is None and older_than is None else ", and none is as short or as old as given"
        print_text(screen, f"nothing to prune: no run failed or was stopped without weights{others}")
        return 0
    print_table(
        screen,
        ("run", "size", "why"),
        [(row.run, format_bytes(row.bytes), why(row) or "") for row in prunable],
        wrap_last=True,
    )
    total = f"{pluralize(len(prunable), 'run')}, {format_bytes(sum(row.bytes for row in prunable))}"
    print_text(screen, f"removed: {total}" if yes else f"{total}; nothing is removed without --yes", style="bold")
    return 0


# --- prune hosts ------------------------------------------------------------------------------------------------------


def _prune_fleet(folder: Path, file: str, names: str | None, older_than: float | None, max_size: str | None, yes: bool,
                 trust: bool, as_json: bool) -> int:  # fmt: skip
    """List what hosts store and need no longer; remove it if `yes`. Exit status 1 if one cannot be reached."""
    import json

    import msgspec

    from evener.cli.run_output import find_run_dirs, print_status
    from evener.cli.trust import approve_fleet
    from evener.core.base.errors import HostError
    from evener.core.base.units import parse_bytes
    from evener.core.cluster.fleet_file import Fleet, HostConfig, fleet_path, load_fleet, select_hosts
    from evener.ssh.session import RemoteError, connect, parallel_map
    from evener.transfer import prune_hosts
    from evener.transfer.mirror import to_host_error

    path, max_bytes = fleet_path(file), None if max_size is None else parse_bytes(max_size, "--max-size")
    whole = Fleet(hosts={"local": HostConfig(address="local")}) if path is None else load_fleet(path)
    chosen = approve_fleet(select_hosts(whole, names), trust)
    known = prune_hosts.known_runs(find_run_dirs(folder))

    with connect(chosen) as (sessions, errors):

        def prune_host(name: str) -> tuple[prune_hosts.HostPruning, int] | HostError:
            workdir, session = chosen.hosts[name].workdir, sessions[name]
            try:
                found = prune_hosts.plan_pruning(
                    session, workdir, known, older_than_days=older_than, max_bytes=max_bytes
                )
                if not (yes and found.prunable):
                    return found, 0
                freed, stayed = prune_hosts.prune(session, workdir, found.prunable)
                gone = [entry for entry in found.prunable if entry.name not in stayed]
                kept = [msgspec.structs.replace(entry, why=stayed[entry.name])
                        for entry in found.prunable if entry.name in stayed]  # fmt: skip
                return prune_hosts.HostPruning(gone, [*found.kept, *kept]), freed
            except RemoteError as error:
                return to_host_error(error, chosen)
            except HostError as error:
                return error

        results = parallel_map(sessions, prune_host)
    errors |= {name: result for name, result in results.items() if isinstance(result, HostError)}
    pruned = [result for result in results.values() if not isinstance(result, HostError)]
    prunable = [entry for found, _ in pruned for entry in found.prunable]
    kept = [entry for found, _ in pruned for entry in found.kept]
    freed_bytes = sum(freed for _, freed in pruned)
    if as_json:
        failures = [{"host": name, "error": str(error), "hint": error.hint} for name, error in errors.items()]
        print_escaped(json.dumps({"pruned": msgspec.to_builtins(prunable), "kept": msgspec.to_builtins(kept),
                          "removed": yes, "freed_bytes": freed_bytes, "errors": failures}))  # fmt: skip
        return 1 if errors else 0
    for error in errors.values():
        print_status(f"error: {error}\nhint:  {error.hint}")
    _print_pruned_hosts(prunable, kept, freed_bytes if yes else None)
    return 1 if errors else 0


def _print_pruned_hosts(prunable: Sequence[StoredEntry], kept: Sequence[StoredEntry], freed_bytes: int | None) -> None:
    """Print the table of what is, or was, removed from hosts; None: nothing was."""
    from evener.cli.terminal import make_console, print_table, print_text
    from evener.core.base.units import format_bytes, pluralize

    screen = make_console()
    for entry in kept:
        print_text(screen, f"kept on {entry.host}: {entry.name}, {format_bytes(entry.bytes)}: {entry.why}")
    if not prunable:
        print_text(screen, "nothing to prune on the hosts: all they store is in use, new, or not here")
        return
    rows = [(entry.host, entry.kind, entry.name, format_bytes(entry.bytes), entry.why) for entry in prunable]
    print_table(screen, ("host", "kind", "name", "size", "why"), rows, left_aligned=("kind", "name"), wrap_last=True)
    total = f"{pluralize(len(prunable), 'item')}, {format_bytes(sum(entry.bytes for entry in prunable))}"
    line = f"{total}; nothing is removed without --yes" if freed_bytes is None else (
        f"removed: {total}; {format_bytes(freed_bytes)} freed")  # fmt: skip
    print_text(screen, line, style="bold")
