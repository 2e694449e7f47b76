"""evener launch: run any program that torchrun can run, on a fleet or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from evener.core.run.run_plan import Plan
    from evener.core.run.rundir import RunDir
    from evener.transfer.mirror import SupervisorState


EXAMPLES = "evener launch -- train.py --lr 1e-3"


def launch(
    program: list[str] = typer.Argument(..., metavar="-- SCRIPT.py …", help="a program; or -- -m MODULE …"),
    fleet: str | None = typer.Option(None, help="hosts to run on; local: this machine [fleet.toml if here]"),
    ranks: int | None = typer.Option(None, min=1, max=1024, help="processes on each host [one per GPU, else one]"),
    include: list[str] | None = typer.Option(
        None, help="send this path even if git ignores it, or if it is a file or folder of secrets; may be given again"
    ),
    env: list[str] | None = typer.Option(
        None, metavar="NAME", help="a variable set here to pass to the hosts, a secret too; may be given again"
    ),
    out: str | None = typer.Option(None, help="run directory [runs/DATE-SCRIPT]"),
    private: bool = typer.Option(
        False, "--private", help="start only if firewalls block all but the run's hosts from its ports"
    ),
    port: int | None = typer.Option(None, min=1, max=65535, help="of the rendezvous [29500, or another free port]"),
    detach: bool = typer.Option(False, "--detach", help="start the run, and return"),
    trust: bool = TRUST,
    dry_run: bool = typer.Option(False, "--dry-run", help="print what each host would run, and start nothing"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object at the end"),
) -> int:
    """Run a script of your own on every host of the fleet, or on this machine alone, as torchrun would.

    The current folder is sent to the hosts (in a git repository: what git does not ignore), always to the same place,
    so that scripts find the files that they wrote before; `evener fetch` copies these here. Files that may hold secrets
    (.env, keys, credentials) are not sent unless --include names them. Ranks get RANK, WORLD_SIZE, MASTER_ADDR, the
    right network interface, and the variables of NCCL, torch, Hugging Face and W&B that are set here. Variables that
    may hold secrets are left out: --env NAME passes one, and its value is not written to the run directory. On this
    machine Ctrl-C ends the run; on a fleet it only stops watching.
    """
    import contextlib
    import os
    import time
    from pathlib import Path

    from evener.cli import follow_output, run_output
    from evener.cli.trust import approve_fleet
    from evener.core.base.errors import RunError, UsageError
    from evener.core.cluster.fleet_file import fleet_path, load_fleet
    from evener.core.run.run_spec import MachineSpec
    from evener.core.run.rundir import RunDir
    from evener.launch.follow_run import follow_run
    from evener.launch.prepare_hosts import connect_hosts, prepare_hosts
    from evener.launch.start_run import plan_script, started
    from evener.transfer.file_tree import ignored_file_sizes, summarize_largest

    path = fleet_path(fleet)
    project, argv = _parse_program(program)
    name = Path(argv[1] if argv[0] == "-m" else argv[0]).stem
    rundir = RunDir(out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    if rundir.path.exists():
        raise UsageError(f"--out {rundir}: exists already", hint="another --out")
    with contextlib.ExitStack() as attachment:
        with connect_hosts(None if path is None else approve_fleet(load_fleet(path), trust)) as hosts:
            machine = MachineSpec(private=private)
            prepared = prepare_hosts(hosts.with_ranks(ranks), rundir, machine, port=port, cwd=project)
            run = plan_script(prepared, rundir, project, argv, os.environ, include or [], env or [])
            plan = run.plan
            run_output.print_warnings(run)
            if dry_run:
                run_output.print_plan(plan, as_json)
                return 0
            if run.trees and (skipped := ignored_file_sizes(project, run.trees[0])):
                run_output.print_status(
                    f"not sent, because git ignores it: {summarize_largest(skipped)}\nhint:  --include PATH sends it"
                )
            attachment.enter_context(started(run, hosts.sessions, run_output.print_status, detach=detach))
        run_output.print_placement(plan)
        run_output.print_status(f"run directory {rundir}")
        if detach:
            run_output.print_detached(rundir)
            return 0
        lines = run_output.RankLogPrinter(rundir, plan)
        try:
            states = follow_run(
                rundir,
                plan,
                follow_output.print_health_event,
                lambda mirror: None if as_json else lines.print_new(),
                notify=run_output.print_status,
            )
        except KeyboardInterrupt:
            run_output.print_detached(rundir)
            return 130
        except RunError:
            if not plan.is_local_run:
                run_output.print_outputs(rundir, plan)
            raise
    return _print_result(rundir, plan, states, as_json)


def _print_result(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState], as_json: bool) -> int:
    """Print the result of the run, and return the exit status."""
    import json

    import msgspec

    from evener.cli import run_output
    from evener.launch.root_cause import missing_gpu_message
    from evener.transfer.script_outputs import find_outputs

    stopped = any(state.get("stopped") for state in states.values())
    if as_json:
        files = {name: msgspec.to_builtins(one) for name, one in find_outputs(rundir, plan, states).items()}
        result = {"run_dir": str(rundir), "stopped": stopped, "hosts": states, "written": files}
        print_escaped(json.dumps(result | run_output.checkpoint_info(rundir, plan)))
    else:
        run_output.print_status(f"{'stopped' if stopped else 'finished'} on {', '.join(states)}; logs in {rundir}/logs")
        if not stopped and (line := missing_gpu_message(rundir, plan, states)):
            run_output.print_status(f"warning: the program succeeded, but printed: {line}\n"
                       "hint:  it expects GPUs; does it have an option for CPUs?")  # fmt: skip
        run_output.print_outputs(rundir, plan)
    return 130 if stopped else 0


def _parse_program(argv: list[str]) -> tuple[Path, list[str]]:
    """Return the project's folder, and the program's arguments for torchrun relative to it."""
    from pathlib import Path

    from evener.core.base.errors import UsageError

    cwd = Path.cwd().resolve()
    if argv[0] == "-m":
        if len(argv) < 2:
            raise UsageError("-m: expected a module after it", hint="evener launch -- -m package.module ARGS")
        return cwd, argv
    script = Path(argv[0]).resolve()
    if not script.is_file():
        raise UsageError(f"{argv[0]}: no such script", hint="evener launch -- SCRIPT.py ARGS")
    project = cwd if script.is_relative_to(cwd) else script.parent
    return project, [script.relative_to(project).as_posix(), *argv[1:]]
