"""evener runs: what is running where?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from evener.core.rundir import RunDir
    from evener.launch.mirror import State


def runs(
    folder: str = typer.Argument("runs", help="where the run directories are"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """List the runs made here, and ask their hosts how those that have not ended are doing.

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


def _row(rundir: RunDir) -> dict[str, Any]:
    """One run as the table shows it."""
    from evener.core.errors import HostError
    from evener.core.plan import find_plan
    from evener.launch import fleet as launcher

    row: dict[str, Any] = {"run": str(rundir), "state": "started", "hosts": {}, "steps": None, "loss": None}
    plan = find_plan(rundir)
    if plan is not None and plan.hosts:
        told = launcher.known_states(rundir, plan)
        if any(state.get("state") != "ended" for state in told.values()):
            asked = launcher.states(rundir, plan)
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


def _state(state: State) -> str:
    if state.get("lost"):
        return "lost"
    if state.get("state") == "ended":
        return "stopped" if state.get("stopped") else "ended" if state.get("status") == 0 else "failed"
    return str(state.get("state", "started"))
