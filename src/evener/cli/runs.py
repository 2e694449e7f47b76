"""evener runs, logs and stop: what is running where; read it, end it."""

from __future__ import annotations

from typing import Any

import typer


def runs(
    folder: str = typer.Argument("runs", help="where the run directories are"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """List the runs made here, and ask the hosts how those on a fleet are doing.

    Example: `evener runs`.
    """
    import json
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from evener.core.errors import UsageError
    from evener.core.rundir import RunDir

    if not Path(folder).is_dir():
        raise UsageError(f"{folder}: no such folder", hint="evener train makes runs/")
    found = [RunDir(path) for path in sorted(Path(folder).iterdir())
             if (path / "manifest.json").exists() or (path / "plan.json").exists()]  # fmt: skip
    with ThreadPoolExecutor(max_workers=16) as pool:
        rows = list(pool.map(_row, found))
    if as_json:
        print(json.dumps({"runs": rows}))
        return 0
    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "hosts", "steps", "loss"):
        table.add_column(title, justify="right" if title in ("steps", "loss") else "left")
    for row in rows:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        hosts = ", ".join(f"{name} {state}" if state != row["state"] else name for name, state in row["hosts"].items())
        table.add_row(row["run"], row["state"], hosts, "" if row["steps"] is None else str(row["steps"]), loss)
    console = Console(highlight=False)
    console.print(table if rows else f"no runs in {folder}")
    return 0


def logs(
    run: str = typer.Argument(..., help="run directory, or a run's id"),
    follow: bool = typer.Option(False, "--follow", "-f", help="go on as lines come; Ctrl-C leaves the run alone"),
    host: list[str] | None = typer.Option(None, help="only this host; may be given twice"),
    rank: list[int] | None = typer.Option(None, help="only this rank; may be given twice"),
) -> int:
    """Print what the ranks and launchers of a run on a fleet printed: time, rank, host, line.

    Example: `evener logs -f runs/mine --host attic`.
    """
    from evener.cli import fleets
    from evener.core.errors import UsageError, did_you_mean
    from evener.core.plan import read_plan
    from evener.core.rundir import RunDir
    from evener.launch import fleet as launcher

    rundir = RunDir(fleets.find_run(run))
    plan = read_plan(rundir)
    names = [one.name for one in plan.hosts]
    for name in host or []:
        if name not in names:
            raise UsageError(f"--host {name}: not a host of this run", hint=did_you_mean(name, names))
    lines = fleets.Lines(rundir, plan, set(host) if host else None, set(rank) if rank else None)
    if not follow:
        for error in launcher.catch_up(rundir, plan).values():
            fleets.say(f"warning: {error}; what came home before is printed")
        lines.print_new(stamps=True)
        return 0
    try:
        launcher.follow(rundir, plan, lambda news: None, fleets.on_lost, lambda mirror: lines.print_new(stamps=True))
    except KeyboardInterrupt:
        fleets.left_alone(rundir)
        return 130
    return 0


def stop(
    run: str | None = typer.Argument(None, help="run directory, or a run's id"),
    stale: bool = typer.Option(False, "--stale", help="end what earlier runs left behind on the fleet's hosts"),
    fleet: str | None = typer.Option(None, help="fleet file, for --stale [fleet.toml]"),
    now: bool = typer.Option(False, "--now", help="do not let the ranks finish their step and save"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """End a run on all its hosts. evener's own worker finishes its step and saves; no process is left behind.

    Example: `evener stop runs/mine`.
    """
    from evener.core.errors import UsageError

    if stale and run is None:
        return _stop_stale(fleet, as_json)
    if run is None or stale:
        raise UsageError("which run?", hint="evener stop runs/NAME; evener runs lists them")
    return _stop(run, now, as_json)


def _stop(run: str, now: bool, as_json: bool) -> int:
    import json

    from evener.cli import fleets
    from evener.core.errors import HostError
    from evener.core.plan import read_plan
    from evener.core.rundir import RunDir
    from evener.launch import fleet as launcher

    rundir = RunDir(fleets.find_run(run))
    plan = read_plan(rundir)
    if not as_json:
        fleets.say(f"stopping on {', '.join(host.name for host in plan.hosts)}")
    ended = launcher.stop(plan, now=now)
    launcher.catch_up(rundir, plan)
    unreached = {name: one for name, one in ended.items() if isinstance(one, HostError)}
    if as_json:
        told = {name: {"error": str(one)} if isinstance(one, HostError) else one for name, one in ended.items()}
        print(json.dumps({"run_dir": str(rundir), "hosts": told}))
    else:
        for name, one in ended.items():
            fleets.say(f"error: {one}\nhint:  {one.hint}" if isinstance(one, HostError) else f"{name}: ended")
    return 1 if unreached else 0


def _stop_stale(fleet: str | None, as_json: bool) -> int:
    import json

    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.hosts.session import for_each

    path = fleets.fleet_path(fleet)
    if path is None:
        raise UsageError("there is no fleet.toml here", hint="--fleet FILE")
    with fleets.connected(path) as (_, sessions, errors):
        ended = for_each(sessions, lambda name: sessions[name].call("facts", "end_stale"))
    if as_json:
        print(json.dumps({"hosts": ended | {name: {"error": str(error)} for name, error in errors.items()}}))
        return 1 if errors else 0
    for name, processes in ended.items():
        for process in processes:
            fleets.say(f"{name}: ended pid {process['pid']} of run {process['run']}: {process['command']}")
        if not processes:
            fleets.say(f"{name}: nothing was left behind")
    for error in errors.values():
        fleets.say(f"error: {error}\nhint:  {error.hint}")
    return 1 if errors else 0


def _row(rundir: Any) -> dict[str, Any]:
    """One run as the table shows it."""
    from evener.core.errors import HostError
    from evener.core.plan import plan_path, read_plan
    from evener.launch import fleet as launcher

    row: dict[str, Any] = {"run": str(rundir), "state": "started", "hosts": {}, "steps": None, "loss": None}
    if plan_path(rundir).exists():
        plan = read_plan(rundir)
        told = launcher.known_states(rundir, plan)
        if any(state.get("state") != "ended" for state in told.values()):
            asked = launcher.states(plan)
            told = {
                name: {"state": "unreachable"} if isinstance(one, HostError) else one for name, one in asked.items()
            }
            if not any(isinstance(one, HostError) for one in asked.values()):
                launcher.catch_up(rundir, plan)
        row["hosts"] = {name: _state(state) for name, state in told.items()}
        values = list(row["hosts"].values())
        first = next((value for value in ("failed", "running", "unreachable", "lost") if value in values), values[0])
        row["state"] = first
    if rundir.is_run():
        manifest = rundir.manifest()
        records = rundir.records(0)
        row["steps"] = records[-1].step + 1 if records else 0
        row["loss"] = records[-1].loss if records else None
        if not row["hosts"]:
            row["state"] = manifest.verdict
            row["hosts"] = {machine.host: manifest.verdict for machine in manifest.hosts}
        elif row["state"] == "ended":
            row["state"] = manifest.verdict
            row["hosts"] = dict.fromkeys(row["hosts"], manifest.verdict)
    return row


def _state(state: dict[str, Any]) -> str:
    if state.get("lost"):
        return "lost"
    if state.get("state") == "ended":
        return "stopped" if state.get("stopped") else "ended" if state.get("status") == 0 else "failed"
    return str(state.get("state", "started"))
