"""evener runs: what is running where?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from evener.core.rundir import RunDir
    from evener.launch.mirror import State


EXAMPLES = "evener runs"


def runs(
    folder: str = typer.Argument("runs", help="where the run directories are"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """List the runs made here, those of benches too, and ask their hosts how those that have not ended are doing."""
    import json
    import time
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from evener.cli.terminal import console, say, table
    from evener.core.errors import UsageError
    from evener.core.rundir import RunDir
    from evener.core.units import count

    if not Path(folder).is_dir():
        raise UsageError(f"{folder}: no such folder", hint="evener train makes runs/")
    paths = {path.parent for depth in ("*", "*/*") for name in ("manifest.json", "plan.json")
             for path in Path(folder).glob(f"{depth}/{name}")}  # fmt: skip
    found = [RunDir(path) for path in sorted(paths)]
    with ThreadPoolExecutor(max_workers=16) as pool:
        rows = list(pool.map(_row, found))
    if as_json:
        print(json.dumps({"runs": rows}))
        return 0
    screen = console()
    if not found:
        say(screen, f"no runs in {folder}")
        return 0
    cells = []
    for row in rows:
        newer = row["newer_checkpoint"]
        cells.append([
            row["run"],
            "" if row["begun"] is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row["begun"])),
            row["model"] or "",
            row["state"],
            _hosts(row["hosts"], row["state"]),
            "" if row["steps"] is None else str(row["steps"]),
            "" if row["tokens_per_s"] is None else count(row["tokens_per_s"]),
            "" if row["loss"] is None else f"{row['loss']:.4f}",
            f"on {newer['host']}" if newer else "here" if row["checkpoint"] else "",
        ])  # fmt: skip
    titles = ("run", "begun", "model", "state", "hosts", "steps", "tokens/s", "loss", "weights")
    left = ("begun", "model", "state", "hosts", "weights")
    table(screen, titles, cells, left=left, spare=("begun", "model", "hosts", "weights"))
    if away := [row["run"] for row in rows if row["newer_checkpoint"]]:
        say(screen, f"weights that are not here come with: evener fetch {away[0]}")
    return 0


def _hosts(states: dict[str, str], of_run: str) -> str:
    """Those whose state is not the run's by name; of the others at most three.

    >>> _hosts({"attic": "running", "laptop": "lost"}, "running"), _hosts(dict.fromkeys("abcdef", "lost"), "lost")
    ('attic, laptop lost', '6 hosts')
    """
    alike = [name for name, state in states.items() if state == of_run]
    others = [f"{name} {state}" for name, state in states.items() if state != of_run]
    return ", ".join([f"{len(alike)} hosts"] * (len(alike) > 3) + alike * (len(alike) <= 3) + others)


def _row(rundir: RunDir) -> dict[str, Any]:
    """One run as the table shows it."""
    from evener.cli import fleets
    from evener.core.errors import HostError
    from evener.core.plan import find_plan
    from evener.launch import fleet as launcher
    from evener.report.summary import summarize

    row: dict[str, Any] = {
        "run": str(rundir), "begun": None, "model": None, "state": "started", "hosts": {}, "steps": None,
        "tokens_per_s": None, "loss": None,
    }  # fmt: skip
    plan = find_plan(rundir)
    if launched := [event["time"] for event in rundir.events() if event["event"] == "launched"]:
        row |= {"begun": launched[0], "model": "script"}
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
        worst = ["failed", "running", "unreachable", "lost"]
        if plan.outlives_hosts:  # it goes on without a host that has left it, or failed
            worst = ["running", "finished", "stopped", *worst]
        first = next((value for value in worst if value in values), values[0])
        row["state"] = first
    if rundir.is_run():
        summary = summarize(rundir)
        manifest = summary.manifest
        row |= {"begun": manifest.started, "model": manifest.spec.model.model if manifest.shape else "own"}
        row |= {"steps": summary.num_steps, "tokens_per_s": summary.tokens_per_s, "loss": summary.last_loss}
        if not row["hosts"]:
            row["state"] = manifest.verdict
            row["hosts"] = {machine.host: manifest.verdict for machine in manifest.hosts}
        elif row["state"] == "finished":
            row["state"] = manifest.verdict
            row["hosts"] = dict.fromkeys(row["hosts"], manifest.verdict)
    return row | fleets.weights(rundir, plan)


def _state(state: State) -> str:
    from evener.core.world import LEFT

    if state.get("lost"):
        return "lost"
    if state.get("state") == "ended":
        ended = {0: "finished", LEFT: "left"}
        return "stopped" if state.get("stopped") else ended.get(state.get("status") or 0, "failed")
    return str(state.get("state", "started"))
