"""evener fetch: copy a run's results from its hosts to this machine."""

from __future__ import annotations

import typer

EXAMPLES = "evener fetch runs/mine"


def fetch(
    run: str = typer.Argument(..., help="run directory, or a run's id"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Copy a run's results here: records, logs, weights (newest and best checkpoint), files that a script wrote.

    A run that goes on is not disturbed. Afterwards its hosts are not needed to report, sample, verify or resume it. An
    interrupted fetch continues where it was.
    """
    import json

    from evener.cli import fleets
    from evener.core.errors import EvenerError, HostError
    from evener.core.plan import read_plan
    from evener.core.rundir import RunDir
    from evener.launch import carry
    from evener.launch import fleet as launcher
    from evener.launch.written import bring_written

    rundir = RunDir(fleets.find_run(run))
    plan = read_plan(rundir)
    errors: list[EvenerError] = [] if plan.is_here else list(launcher.catch_up(rundir, plan).values())
    known = launcher.known_states(rundir, plan)
    known |= {name: state for name, state in launcher.states(rundir, plan).items() if not isinstance(state, HostError)}
    if all(state.get("state") == "ended" for state in known.values()):
        launcher.conclude(rundir, plan, known)
    failed: list[EvenerError] = []
    try:
        copied = carry.bring(rundir, plan, fleets.say)
    except EvenerError as problem:
        copied, failed = [], [problem]
    files, lacking = bring_written(rundir, plan, known, fleets.say)
    unreached = [error.host for error in errors if isinstance(error, HostError)]
    errors += [
        error
        for error in (*failed, *lacking)
        if not (isinstance(error, HostError) and error.check == "ssh.unreachable" and error.host in unreached)
    ]
    if as_json:
        result = {"run_dir": str(rundir), "came": copied, "files": [str(path) for path in files]}
        failures = [{"host": getattr(error, "host", None), "error": str(error), "hint": error.hint} for error in errors]
        print(json.dumps(result | fleets.weights(rundir, plan) | {"errors": failures}))
        return 1 if errors else 0
    for error in errors:
        fleets.say(f"error: {error}\nhint:  {error.hint}")
    fleets.tell_weights(rundir, plan)
    if (rundir.path / "files").is_dir():
        fleets.say(f"files written by the script: {rundir.path / 'files'}")
    return 1 if errors else 0
