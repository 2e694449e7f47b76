"""evener stop: stop a run on all its hosts, or end processes that earlier runs left behind."""

from __future__ import annotations

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

EXAMPLES = "evener stop runs/mine"


def stop(
    run: str | None = typer.Argument(None, help="run directory, or a run's id"),
    stale: bool = typer.Option(False, "--stale", help="end what earlier runs left behind on the fleet's hosts"),
    fleet: str | None = typer.Option(None, help="fleet file, for --stale [fleet.toml]"),
    now: bool = typer.Option(False, "--now", help="stop at once, without finishing the step or saving"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Stop a run on all its hosts. evener's own worker finishes its step and saves; no process is left behind."""
    from evener.core.base.errors import UsageError

    if stale and run is None:
        return _stop_stale(fleet, trust, as_json)
    if run is None or stale:
        raise UsageError("which run?", hint="evener stop runs/NAME; evener runs lists them")
    return _stop(run, now, trust, as_json)


def _stop(run: str, now: bool, trust: bool, as_json: bool) -> int:
    import json

    from evener.cli import run_output
    from evener.cli.trust import approve_run
    from evener.core.base.errors import EvenerError, HostError
    from evener.core.run.run_plan import read_plan
    from evener.core.run.rundir import RunDir
    from evener.launch import launcher
    from evener.transfer import checkpoint_transfer

    rundir = RunDir(run_output.find_run(run))
    plan = read_plan(rundir)
    approve_run(rundir, trust)
    if not as_json:
        waits = "; the step is finished and saved first" if plan.kind == "train" and not now else ""
        run_output.print_status(f"stopping on {', '.join(host.name for host in plan.hosts)}{waits}")
    before = launcher.cached_states(rundir, plan)
    ended = launcher.stop_and_record(rundir, plan, now=now)
    if not as_json:
        for name, one in ended.items():
            is_new = not isinstance(one, HostError) and one.get("stopped") and before[name].get("state") != "ended"
            status = "ended" if is_new else "had ended already"
            run_output.print_status(
                f"error: {one}\nhint:  {one.hint}" if isinstance(one, HostError) else f"{name}: {status}"
            )
    try:
        checkpoint_transfer.fetch_checkpoints(rundir, plan, run_output.print_status)
    except EvenerError as error:
        run_output.print_status(f"warning: {error}")
    if as_json:
        answers = {name: {"error": str(one)} if isinstance(one, HostError) else one for name, one in ended.items()}
        print_escaped(
            json.dumps({"run_dir": str(rundir), "hosts": answers, **run_output.checkpoint_info(rundir, plan)})
        )
    else:
        run_output.print_outputs(rundir, plan)
    return int(any(isinstance(one, HostError) for one in ended.values()))


def _stop_stale(fleet: str | None, trust: bool, as_json: bool) -> int:
    import json

    from evener.cli import run_output
    from evener.cli.trust import approve_fleet
    from evener.core.base.errors import UsageError
    from evener.core.cluster.fleet_file import fleet_path, load_fleet
    from evener.ssh.session import connect, parallel_map

    path = fleet_path(fleet)
    if path is None:
        raise UsageError("there is no fleet.toml here", hint="--fleet FILE")
    with connect(approve_fleet(load_fleet(path), trust)) as (sessions, errors):
        ended = parallel_map(sessions, lambda name: sessions[name].call("facts", "kill_stale_processes"))
    if as_json:
        print_escaped(json.dumps({"hosts": ended | {name: {"error": str(error)} for name, error in errors.items()}}))
        return 1 if errors else 0
    for name, processes in ended.items():
        for process in processes:
            run_output.print_status(f"{name}: ended pid {process['pid']} of run {process['run']}: {process['command']}")
        if not processes:
            run_output.print_status(f"{name}: nothing was left behind")
    for error in errors.values():
        run_output.print_status(f"error: {error}\nhint:  {error.hint}")
    return 1 if errors else 0
