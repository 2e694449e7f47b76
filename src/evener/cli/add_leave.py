"""evener leave, evener add: remove a host from a running job, and add one to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from evener.cli.trust import TRUST
from evener.core.base.shell import quote_word

if TYPE_CHECKING:
    from evener.core.run.run_plan import Plan
    from evener.core.run.rundir import RunDir

LEAVE_EXAMPLES = "evener leave runs/mine --host laptop"
ADD_EXAMPLES = "evener add runs/mine --host laptop\nevener add runs/mine --host friend --fleet fleet.toml"

RUN_ARGUMENT = typer.Argument(..., help="run directory, or a run's id")
HOST_OPTION = typer.Option(..., "--host", metavar="NAME", help="its name in the fleet file")
FLEET_OPTION = typer.Option(
    None, "--fleet", metavar="FILE", help="fleet file with a host that is new to the run [the run's]"
)


def leave(run: str = RUN_ARGUMENT, host: str = HOST_OPTION, trust: bool = TRUST) -> int:
    """Remove a host from a run, which continues without it: for a laptop that is needed elsewhere.

    The host finishes its step first, and no synchronized step is lost. Not possible with --membership fixed.
    """
    from evener.cli import run_output
    from evener.core.base.errors import UsageError
    from evener.launch import add_remove_hosts, launcher

    rundir, plan = _load_elastic_run(run, trust)
    if all(one.name != host for one in plan.hosts):
        raise UsageError(f"{host} is not a host of {rundir}, which has {', '.join(one.name for one in plan.hosts)}")
    remaining = [name for name in rundir.manifest().roster.hosts if name != host] if rundir.is_run() else []
    if not remaining:
        raise UsageError(f"{host} is the only host of {rundir}", hint=f"evener stop {quote_word(rundir)} ends it")
    run_output.print_status(f"{host} leaves; its step is finished first")
    state = add_remove_hosts.remove_host(rundir, plan, host)
    launcher.mirror_once(rundir, plan)
    if state.get("status") == 0:
        run_output.print_status(f"the run ended before {host} left it")
    else:
        run_output.print_status(
            f"{host} has left; {', '.join(remaining)} go on\n"
            f"add it again:  evener add {quote_word(rundir)} --host {quote_word(host)}"
        )
    return 0


def add(run: str = RUN_ARGUMENT, host: str = HOST_OPTION, fleet: str | None = FLEET_OPTION, trust: bool = TRUST) -> int:
    """Add a host to a running job: one that left, was down, or is new to the run.

    A new host must be in the fleet file and set up (evener setup). It receives the corpus and starts its ranks while
    the others train, and joins between two steps. A host of the run that has a new disk receives all that it lacks.
    """
    from evener.cli import run_output
    from evener.cli.trust import approve_fleet
    from evener.core.base.errors import UsageError
    from evener.core.cluster.fleet_file import DEFAULT_FLEET, load_fleet, select_hosts
    from evener.launch import add_remove_hosts

    rundir, plan = _load_elastic_run(run, trust)
    if plan.roster is not None and plan.roster.sync.is_sharded:
        run = quote_word(rundir)
        raise UsageError(
            f"{rundir} shards its weights ({plan.roster.sync}): no host joins it while it runs",
            hint=f"evener stop {run}, then evener train --resume {run} --fleet FILE",
        )
    if any(one.name == host for one in plan.hosts):
        add_remove_hosts.rejoin_host(rundir, plan, host, run_output.print_status)
    else:
        known = load_fleet(fleet or plan.fleet_file or DEFAULT_FLEET)
        if host not in known.hosts:
            hint = f"[hosts.{host}] with its address there; then evener setup{known.cli_flag} --host {quote_word(host)}"
            raise UsageError(f"{known.file} names no host {host}, but {', '.join(known.hosts)}", hint=hint)
        approve_fleet(select_hosts(known, host), trust)
        add_remove_hosts.add_host(rundir, known, host, run_output.print_status)
    agent = plan.hosts[0].agent
    when = (
        "between two steps, as soon as its ranks are ready" if agent and agent.is_elastic else "at the next checkpoint"
    )
    run_output.print_status(f"{host} joins {when}\nfollow:  evener logs -f {quote_word(rundir)}")
    return 0


def _load_elastic_run(run: str, trust: bool) -> tuple[RunDir, Plan]:
    """Fetch the records of a running job; return it and its plan. UsageError if it has ended or its hosts are fixed."""
    from evener.cli import run_output
    from evener.cli.trust import approve_run
    from evener.core.base.errors import UsageError
    from evener.core.run.run_plan import read_plan
    from evener.core.run.rundir import RunDir
    from evener.launch import launcher

    rundir = RunDir(run_output.find_run(run))
    plan = read_plan(rundir)
    approve_run(rundir, trust)
    launcher.mirror_once(rundir, plan)
    if rundir.is_run() and (verdict := rundir.manifest().verdict) != "running":
        hint = f"evener train --resume {quote_word(rundir)} resumes it, with --fleet FILE on other hosts"
        raise UsageError(f"{rundir} has ended ({verdict}): hosts can neither leave nor join", hint=hint)
    if plan.kind == "launch":
        raise UsageError(f"{rundir} runs a program of your own: hosts can neither leave nor join by command",
                         hint=f"evener stop {quote_word(rundir)}, and launch it again on other hosts")  # fmt: skip
    if not plan.has_dynamic_membership:
        began = "on one host" if len(plan.hosts) == 1 else "with --membership fixed"
        run = quote_word(rundir)
        hint = f"evener stop {run}, then evener train --resume {run} --membership auto --fleet FILE"
        raise UsageError(f"{rundir} was started {began}: hosts can neither leave nor join", hint=hint)
    return rundir, plan
