"""evener trace: write the timeline of a run's steps for trace viewers."""

from __future__ import annotations

import typer

from evener.core.base.escaped_output import print_escaped

EXAMPLES = """
evener trace runs/mine
evener trace runs/mine --steps 100:110
"""
MAX_DEFAULT_STEPS = 60  # steps without --steps: all of the last ones, and every hundredth before


def trace(
    run: str = typer.Argument(..., help="run directory"),
    steps: str | None = typer.Option(
        None, "--steps", metavar="A:B", help="steps A up to, not including, B, counted from 0 [the newest 60 recorded]"
    ),
    out: str | None = typer.Option(None, "--out", metavar="FILE", help="where to write it [RUN/trace.json]"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Write a timeline of a run's steps for trace viewers: what ran when, on every rank.

    Ranks record every 100th step and the last 20 before a checkpoint or the end. Each rank is a process with its steps,
    their phases, groups of layers, and the all-reduce of each bucket with its bytes and bandwidth. Arrows lead from the
    slowest rank to those that waited. The predicted step is shown below, and the trace of torch's profiler if the run
    had --profile. Open it at https://ui.perfetto.dev, which reads the file in the browser and sends it nowhere.
    """
    import json
    from pathlib import Path

    from evener.cli.terminal import make_console, print_text
    from evener.core.run.rundir import RunDir
    from evener.report.export.chrome_trace import format_clock_error, write_trace
    from evener.report.read.timeline import format_ranges, missing_ranges, read_timeline
    from evener.report.read.torch_profile import read_profiles

    rundir = RunDir(run)
    requested = None if steps is None else _parse_steps(steps)
    profiles = read_profiles(rundir)
    profiled = {step for profile in profiles.values() for step in profile.clock_sync.steps}
    timeline = read_timeline(rundir, requested, None if requested else MAX_DEFAULT_STEPS, profiled)
    path = Path(out) if out is not None else rundir.inside("trace.json")
    num_events = write_trace(rundir, timeline, path, profiles)
    missing = missing_ranges(timeline.recorded_ranges, timeline.num_steps)
    if as_json:
        print_escaped(
            json.dumps(
                {
                    "trace": str(path),
                    "events": num_events,
                    "shown": timeline.shown_ranges,
                    "recorded": timeline.recorded_ranges,
                    "not_recorded": missing,
                    "clock_error_s": {str(rank): one for rank, one in timeline.clock_error_s.items()},
                }
            )
        )
        return 0
    screen = make_console(stderr=True)
    print_text(screen, f"steps {format_ranges(timeline.shown_ranges)}")
    if timeline.shown_ranges != timeline.recorded_ranges:
        print_text(screen, f"recorded: {format_ranges(timeline.recorded_ranges)}")
    print_text(screen, f"not recorded: {format_ranges(missing) or 'none'}")
    names = rundir.manifest().roster
    for rank, error_s in timeline.clock_error_s.items():
        if error_s != 0:
            print_text(screen, f"clock of {names.rank_label(rank)}: {format_clock_error(error_s)}")
    print_text(screen, "open https://ui.perfetto.dev and drop the file there; it stays in your browser")
    print_escaped(path)
    return 0


def _parse_steps(text: str) -> range:
    """Parse `100:110` or a single step; raise UsageError for anything else."""
    from evener.core.base.errors import UsageError

    first, colon, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not colon)):
        raise UsageError(f"--steps {text}: expected A:B", hint="--steps 100:110, of steps counted from 0")
    steps = range(int(first), int(last) if colon else int(first) + 1)
    if not steps:
        raise UsageError(f"--steps {text}: there is no step from {first} to before {last}")
    return steps
