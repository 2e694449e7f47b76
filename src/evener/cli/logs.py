"""evener logs: print the output of the ranks, once or as it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from evener.cli.trust import TRUST

if TYPE_CHECKING:
    from evener.transfer.mirror import RunMirror

EXAMPLES = "evener logs -f runs/mine --host attic"


def logs(
    run: str = typer.Argument(..., help="run directory, or a run's id"),
    follow: bool = typer.Option(False, "--follow", "-f", help="print new lines as they arrive; Ctrl-C ends only this"),
    host: list[str] | None = typer.Option(None, help="only this host; may be given again"),
    rank: list[int] | None = typer.Option(None, help="only this rank; may be given again"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print a JSON object for each line"),
) -> int:
    """Print the output of a run's ranks and launchers: time, rank, host, line.

    For a run that came from elsewhere, print only what is here; with --trust, contact its hosts.
    """
    from evener.cli import follow_output as follow_cli
    from evener.cli import logger_processes, run_output
    from evener.cli.trust import approve_run, not_contacted_text
    from evener.core.base.errors import UsageError, did_you_mean
    from evener.core.run.run_plan import read_plan
    from evener.core.run.rundir import RunDir
    from evener.core.run.trust import is_foreign_run
    from evener.launch import launcher
    from evener.launch.follow_run import follow_run

    rundir = RunDir(run_output.find_run(run))
    plan = read_plan(rundir)
    names = [member.name for member in plan.hosts]
    for name in host or []:
        if name not in names:
            raise UsageError(f"--host {name}: not a host of this run", hint=did_you_mean(name, names))
    lines = run_output.RankLogPrinter(rundir, plan, set(host) if host else None, set(rank) if rank else None)

    def show() -> None:
        lines.print_new_json() if as_json else lines.print_new(with_timestamps=True)

    def show_all(mirror: RunMirror) -> None:
        lines.add_hosts(mirror.plan)  # a host may have been added to the run
        show()

    if follow or trust:
        approve_run(rundir, trust)
    if not follow:
        if is_foreign_run(rundir):
            run_output.print_status(not_contacted_text(rundir))
        else:
            for error in launcher.mirror_once(rundir, plan).values():
                run_output.print_status(f"warning: {error}; printing what arrived before")
        show()
        if run_output.checkpoint_info(rundir, plan)["newer_checkpoint"]:
            run_output.print_checkpoint(rundir, plan)
        return 0
    try:
        with logger_processes.feed_loggers(rundir, logger_processes.select_loggers(None, rundir)) as feeding:
            observe = feeding(follow_cli.print_health_event)
            follow_run(rundir, plan, observe, show_all, notify=run_output.print_status)
    except KeyboardInterrupt:
        run_output.print_detached(rundir)
        return 130
    run_output.print_outputs(rundir, plan)
    return 0
