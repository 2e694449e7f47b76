"""evener leave, evener add: take a host out of a run that goes on, and let it take part again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evener.core.plan import Plan
    from evener.core.rundir import RunDir

LEAVE_EXAMPLES = "evener leave runs/mine --host laptop"
ADD_EXAMPLES = "evener add runs/mine --host laptop"

RUN = typer.Argument(..., help="run directory, or a run's id")
HOST = typer.Option(..., "--host", metavar="NAME", help="as the fleet file calls it")


def leave(run: str = RUN, host: str = HOST) -> int:
    """Take a host out of a run that goes on without it: for a laptop that is wanted elsewhere.

    The step is finished and saved first, so nothing is lost. The run must have begun with --membership restart.
    """
    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.launch import fleet as launcher
    from evener.launch import members

    rundir, plan = _run_of(run, host)
    left = [name for name in rundir.manifest().roster.hosts if name != host] if rundir.is_run() else []
    if not left:
        raise UsageError(f"{host} alone trains {rundir}", hint=f"evener stop {rundir} ends it")
    fleets.say(f"{host} leaves; the step is finished and saved first")
    state = members.leave(rundir, plan, host)
    launcher.catch_up(rundir, plan)
    if state.get("status") == 0:
        fleets.say(f"the run ended before {host} left it")
    else:
        fleets.say(f"{host} has left; {', '.join(left)} go on\nlet it in again:  evener add {rundir} --host {host}")
    return 0


def add(run: str = RUN, host: str = HOST) -> int:
    """Let a host take part again that has left a run, or was down; it is let in at the next checkpoint."""
    from evener.cli import fleets
    from evener.launch import members

    rundir, plan = _run_of(run, host)
    members.rejoin(rundir, plan, host)
    fleets.say(f"{host} waits to be let in at the next checkpoint\nsee it:  evener logs -f {rundir}")
    return 0


def _run_of(run: str, host: str) -> tuple[RunDir, Plan]:
    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.core.plan import read_plan
    from evener.core.rundir import RunDir
    from evener.launch import fleet as launcher

    rundir = RunDir(fleets.find_run(run))
    plan = read_plan(rundir)
    names = [one.name for one in plan.hosts]
    if host not in names:
        hint = f"evener stop {rundir}, then evener train --resume {rundir} --fleet FILE takes others"
        raise UsageError(f"{host} is no host of {rundir}, which has {', '.join(names)}", hint=hint)
    if not plan.outlives_hosts:
        hint = f"evener stop {rundir}, then evener train --resume {rundir} --membership restart"
        raise UsageError(f"{rundir} began with --membership fixed: its hosts neither leave nor come back", hint=hint)
    launcher.catch_up(rundir, plan)
    if rundir.is_run() and (verdict := rundir.manifest().verdict) != "running":
        hint = f"evener train --resume {rundir} goes on with it"
        raise UsageError(f"{rundir} has ended: {verdict}: nobody leaves it or comes back", hint=hint)
    return rundir, plan
