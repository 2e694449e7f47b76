"""evener leave, evener add: take a host out of a run that goes on, and let one take part in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evener.core.plan import Plan
    from evener.core.rundir import RunDir

LEAVE_EXAMPLES = "evener leave runs/mine --host laptop"
ADD_EXAMPLES = "evener add runs/mine --host laptop\nevener add runs/mine --host friend --fleet fleet.toml"

RUN = typer.Argument(..., help="run directory, or a run's id")
HOST = typer.Option(..., "--host", metavar="NAME", help="as the fleet file calls it")
FLEET = typer.Option(None, "--fleet", metavar="FILE", help="that names a host which is new to the run [the run's own]")


def leave(run: str = RUN, host: str = HOST) -> int:
    """Take a host out of a run that goes on without it: for a laptop that is wanted elsewhere.

    Its step is finished first, and nothing that all agreed on is lost. A run that began with --membership fixed can't.
    """
    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.launch import fleet as launcher
    from evener.launch import members

    rundir, plan = _run_of(run)
    if all(one.name != host for one in plan.hosts):
        raise UsageError(f"{host} is no host of {rundir}, which has {', '.join(one.name for one in plan.hosts)}")
    left = [name for name in rundir.manifest().roster.hosts if name != host] if rundir.is_run() else []
    if not left:
        raise UsageError(f"{host} alone trains {rundir}", hint=f"evener stop {rundir} ends it")
    fleets.say(f"{host} leaves; its step is finished first")
    state = members.leave(rundir, plan, host)
    launcher.catch_up(rundir, plan)
    if state.get("status") == 0:
        fleets.say(f"the run ended before {host} left it")
    else:
        fleets.say(f"{host} has left; {', '.join(left)} go on\nlet it in again:  evener add {rundir} --host {host}")
    return 0


def add(run: str = RUN, host: str = HOST, fleet: str | None = FLEET) -> int:
    """Let a host take part in a run that goes on: one that left it, was down, or never was in it.

    A host that is new to the run must stand in the fleet file and be set up (evener setup). It gets the corpus, makes
    its ranks ready while the others train, and is let in between two steps.
    """
    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.core.fleet import DEFAULT_FLEET, load_fleet
    from evener.launch import members

    rundir, plan = _run_of(run)
    if any(one.name == host for one in plan.hosts):
        members.rejoin(rundir, plan, host)
    else:
        known = load_fleet(fleet or plan.fleet_file or DEFAULT_FLEET)
        if host not in known.hosts:
            hint = f"[hosts.{host}] with its address there; then evener setup{known.flag} --hosts {host}"
            raise UsageError(f"{known.file} names no host {host}, but {', '.join(known.hosts)}", hint=hint)
        members.admit(rundir, known, host, fleets.say)
    agent = plan.hosts[0].agent
    when = "between two steps, as soon as its ranks are ready" if agent and agent.lives else "at the next checkpoint"
    fleets.say(f"{host} is let in {when}\nsee it:  evener logs -f {rundir}")
    return 0


def _run_of(run: str) -> tuple[RunDir, Plan]:
    """A run that goes on, whose hosts may come and go, as far as it has come home."""
    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.core.plan import read_plan
    from evener.core.rundir import RunDir
    from evener.launch import fleet as launcher

    rundir = RunDir(fleets.find_run(run))
    plan = read_plan(rundir)
    launcher.catch_up(rundir, plan)
    if rundir.is_run() and (verdict := rundir.manifest().verdict) != "running":
        hint = f"evener train --resume {rundir} goes on with it, with --fleet FILE on other hosts"
        raise UsageError(f"{rundir} has ended: {verdict}: nobody leaves it or comes back", hint=hint)
    if not plan.outlives_hosts:
        began = "on one host" if len(plan.hosts) == 1 else "with --membership fixed"
        hint = f"evener stop {rundir}, then evener train --resume {rundir} --membership auto --fleet FILE"
        raise UsageError(f"{rundir} began {began}: hosts neither leave it nor come", hint=hint)
    return rundir, plan
