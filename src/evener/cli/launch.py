"""evener launch: run any program that torchrun can run, on a fleet or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from evener.core.plan import Plan
    from evener.core.rundir import RunDir
    from evener.launch.mirror import Mirror, State


EXAMPLES = "evener launch -- train.py --lr 1e-3"


def launch(
    program: list[str] = typer.Argument(..., metavar="-- SCRIPT.py …", help="a program; or -- -m MODULE …"),
    fleet: str | None = typer.Option(None, help="hosts to run on; local: this machine [fleet.toml if here]"),
    ranks: int | None = typer.Option(None, min=1, max=1024, help="processes on each host [one per GPU, else one]"),
    include: list[str] | None = typer.Option(None, help="a path to send although git ignores it; may be given again"),
    out: str | None = typer.Option(None, help="run directory [runs/DATE-SCRIPT]"),
    private: bool = typer.Option(
        False, "--private", help="start only if firewalls block all but the run's hosts from its ports"
    ),
    port: int | None = typer.Option(None, min=1, max=65535, help="of the rendezvous [29500, or another free port]"),
    detach: bool = typer.Option(False, "--detach", help="start the run, and return"),
    dry_run: bool = typer.Option(False, "--dry-run", help="print what each host would run, and start nothing"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object at the end"),
) -> int:
    """Run a script of your own on every host of the fleet, or on this machine alone, as torchrun would.

    The current folder is sent to the hosts (in a git repository: what git does not ignore), always to the same place,
    so that scripts find the files that they wrote before; `evener fetch` copies these here. Ranks get RANK, WORLD_SIZE,
    MASTER_ADDR and the right network interface. On this machine Ctrl-C ends the run; on a fleet it only stops watching.
    """
    import contextlib
    import os
    import time
    from pathlib import Path

    from evener.cli import fleets, follow
    from evener.core.errors import RunError, UsageError
    from evener.core.rundir import RunDir
    from evener.core.spec import MachineSpec
    from evener.launch import fleet as launcher
    from evener.launch import here
    from evener.launch.follow import follow as follow_run
    from evener.launch.tree import ignored, in_short

    path = fleets.fleet_path(fleet)
    project, argv = _program(program)
    name = Path(argv[1] if argv[0] == "-m" else argv[0]).stem
    rundir = RunDir(out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    if rundir.path.exists():
        raise UsageError(f"--out {rundir}: exists already", hint="another --out")
    with contextlib.ExitStack() as stack:
        if path is None:
            sessions = stack.enter_context(here.this_machine_connected())
            prepared = here.prepare_here(sessions, rundir, ranks=ranks, cwd=project)
        else:
            hosts, sessions, errors = stack.enter_context(fleets.connected(path))
            prepared = launcher.prepare(fleets.with_ranks(hosts, ranks), sessions, errors, rundir.path.name, port=port,
                                        machine=MachineSpec(private=private))  # fmt: skip
        fleets.tell_warnings(prepared)
        plan, trees = launcher.plan_script(prepared, project, argv, os.environ, include or [])
        if dry_run:
            fleets.print_plan(plan, as_json)
            return 0
        if trees and (skipped := ignored(project, trees[0])):
            fleets.say(f"not sent, because git ignores it: {in_short(skipped)}\nhint:  --include PATH sends it")
        launcher.deliver(trees, plan, sessions, fleets.say)
        fleets.tell_plan(plan)
        fleets.say(f"run directory {rundir}")
        lines = fleets.Lines(rundir, plan)

        def see(mirror: Mirror) -> None:
            if not as_json:
                lines.print_new()

        if plan.is_here and not detach:
            states = here.stay_with(rundir, plan, sessions, follow.tell_trouble, see)
        else:
            launcher.start(rundir, plan, sessions)
    if detach:
        fleets.left_alone(rundir)
        return 0
    if not plan.is_here:
        try:
            states = follow_run(rundir, plan, follow.tell_trouble, fleets.on_lost, see, say=fleets.say)
        except KeyboardInterrupt:
            fleets.left_alone(rundir)
            return 130
        except RunError:
            fleets.tell_made(rundir, plan)
            raise
    return _tell_end(rundir, plan, states, as_json)


def _tell_end(rundir: RunDir, plan: Plan, states: Mapping[str, State], as_json: bool) -> int:
    """Print the result of the run, and return the exit status."""
    import json

    import msgspec

    from evener.cli import fleets
    from evener.launch.failures import wants_gpus
    from evener.launch.written import written

    stopped = any(state.get("stopped") for state in states.values())
    if as_json:
        files = {name: msgspec.to_builtins(one) for name, one in written(plan, states).items()}
        result = {"run_dir": str(rundir), "stopped": stopped, "hosts": states, "written": files}
        print(json.dumps(result | fleets.weights(rundir, plan)))
    else:
        fleets.say(f"{'stopped' if stopped else 'finished'} on {', '.join(states)}; logs in {rundir}/logs")
        if not stopped and (line := wants_gpus(rundir, plan, states)):
            fleets.say(f"warning: the program succeeded, but printed: {line}\n"
                       "hint:  it expects GPUs; does it have an option for CPUs?")  # fmt: skip
        fleets.tell_made(rundir, plan)
    return 130 if stopped else 0


def _program(words: list[str]) -> tuple[Path, list[str]]:
    """Return the project's folder, and the program's arguments for torchrun relative to it."""
    from pathlib import Path

    from evener.core.errors import UsageError

    cwd = Path.cwd().resolve()
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m: expected a module after it", hint="evener launch -- -m package.module ARGS")
        return cwd, words
    script = Path(words[0]).resolve()
    if not script.is_file():
        raise UsageError(f"{words[0]}: no such script", hint="evener launch -- SCRIPT.py ARGS")
    project = cwd if script.is_relative_to(cwd) else script.parent
    return project, [script.relative_to(project).as_posix(), *words[1:]]
