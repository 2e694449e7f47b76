"""evener fetch: copy a run's results from its hosts to this machine."""

from __future__ import annotations

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

EXAMPLES = "evener fetch runs/mine"


def fetch(
    run: str = typer.Argument(..., help="run directory, or a run's id"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Copy a run's results here: records, logs, weights (newest and best checkpoint), files that a script wrote.

    A run that goes on is not disturbed. Afterwards its hosts are not needed to report, sample, verify or resume it. An
    interrupted fetch continues where it was.
    """
    import json

    from evener.cli import run_output
    from evener.cli.trust import approve_run
    from evener.core.base.errors import EvenerError, HostError
    from evener.core.run.run_plan import read_plan
    from evener.core.run.rundir import RunDir
    from evener.launch import launcher
    from evener.transfer import checkpoint_transfer
    from evener.transfer.script_outputs import fetch_outputs

    rundir = RunDir(run_output.find_run(run))
    plan = read_plan(rundir)
    approve_run(rundir, trust)
    errors: list[EvenerError] = [] if plan.is_local_run else list(launcher.mirror_once(rundir, plan).values())
    known = launcher.cached_states(rundir, plan)
    known |= {
        name: state for name, state in launcher.query_states(rundir, plan).items() if not isinstance(state, HostError)
    }
    if all(state.get("state") == "ended" for state in known.values()):
        launcher.record_outcome(rundir, plan, known)
    failed: list[EvenerError] = []
    try:
        copied = checkpoint_transfer.fetch_checkpoints(rundir, plan, run_output.print_status)
    except EvenerError as problem:
        copied, failed = [], [problem]
    files, lacking = fetch_outputs(rundir, plan, known, run_output.print_status)
    unreached = [error.host for error in errors if isinstance(error, HostError)]
    errors += [
        error
        for error in (*failed, *lacking)
        if not (isinstance(error, HostError) and error.check == "ssh.unreachable" and error.host in unreached)
    ]
    if as_json:
        result = {"run_dir": str(rundir), "came": copied, "files": [str(path) for path in files]}
        failures = [{"host": getattr(error, "host", None), "error": str(error), "hint": error.hint} for error in errors]
        print_escaped(json.dumps(result | run_output.checkpoint_info(rundir, plan) | {"errors": failures}))
        return 1 if errors else 0
    for error in errors:
        run_output.print_status(f"error: {error}\nhint:  {error.hint}")
    run_output.print_checkpoint(rundir, plan)
    if (folder := rundir.inside("files")).is_dir():
        run_output.print_status(f"files written by the script: {folder}")
    return 1 if errors else 0
