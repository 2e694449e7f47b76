"""evener logs: print the output of the ranks, once or as it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evener.launch.mirror import Mirror

EXAMPLES = "evener logs -f runs/mine --host attic"


def logs(
    run: str = typer.Argument(..., help="run directory, or a run's id"),
    follow: bool = typer.Option(False, "--follow", "-f", help="print new lines as they arrive; Ctrl-C ends only this"),
    host: list[str] | None = typer.Option(None, help="only this host; may be given again"),
    rank: list[int] | None = typer.Option(None, help="only this rank; may be given again"),
    as_json: bool = typer.Option(False, "--json", help="print a JSON object for each line"),
) -> int:
    """Print the output of a run's ranks and launchers: time, rank, host, line."""
    from evener.cli import fleets, loggers
    from evener.cli import follow as follow_cli
    from evener.core.errors import UsageError, did_you_mean
    from evener.core.plan import read_plan
    from evener.core.rundir import RunDir
    from evener.launch import fleet as launcher
    from evener.launch.follow import follow as follow_run

    rundir = RunDir(fleets.find_run(run))
    plan = read_plan(rundir)
    names = [member.name for member in plan.hosts]
    for name in host or []:
        if name not in names:
            raise UsageError(f"--host {name}: not a host of this run", hint=did_you_mean(name, names))
    lines = fleets.Lines(rundir, plan, set(host) if host else None, set(rank) if rank else None)

    def show() -> None:
        lines.print_new_json() if as_json else lines.print_new(stamps=True)

    def show_all(mirror: Mirror) -> None:
        lines.add(mirror.plan)  # a host may have been added to the run
        show()

    if not follow:
        for error in launcher.catch_up(rundir, plan).values():
            fleets.say(f"warning: {error}; printing what arrived before")
        show()
        if fleets.weights(rundir, plan)["newer_checkpoint"]:
            fleets.tell_weights(rundir, plan)
        return 0
    try:
        with loggers.fed(rundir, loggers.chosen(None, rundir)) as feeding:
            observe = feeding(follow_cli.tell_trouble)
            follow_run(rundir, plan, observe, fleets.on_lost, show_all, say=fleets.say)
    except KeyboardInterrupt:
        fleets.left_alone(rundir)
        return 130
    fleets.tell_made(rundir, plan)
    return 0
