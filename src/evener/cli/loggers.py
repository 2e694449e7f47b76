"""Feed experiment loggers while a run is followed: one process per logger, which reads the run's files."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.core.rundir import RunDir
    from evener.core.step import StepRecord
    from evener.launch.follow import Observer

NOTED_S = 2.0  # after this, print which loggers have not received all steps
PATIENCE_S = 60.0  # after this, leave a slow logger to finish in the background


def chosen(given: Sequence[str] | None, rundir: RunDir | None) -> list[str]:
    """Return the requested loggers; for a resumed run without a request those that it had before."""
    from evener.cli import fleets
    from evener.core.errors import UsageError
    from evener.report.feed import remembered
    from evener.report.loggers import parse_loggers

    if given:
        return parse_loggers(given)
    usable = []
    for name in remembered(rundir) if rundir is not None else []:
        try:
            usable += parse_loggers([name])
        except UsageError as error:
            fleets.say(f"warning: {error}; the run goes on without it\nhint:  {error.hint}")
    return usable


@contextlib.contextmanager
def fed(rundir: RunDir, names: Sequence[str]) -> Iterator[Callable[[Observer], Observer]]:
    """Yield a wrapper for observers: at the first update it starts a process for each logger.

    At exit the loggers receive the remaining steps.
    """
    from evener.report.feed import remember

    feeders: dict[str, subprocess.Popen[bytes]] = {}
    broken: set[str] = set()

    def look() -> None:
        for name, feeder in feeders.items():
            if name not in broken and feeder.poll():
                broken.add(name)
                _tell_broken(rundir, name)

    def observing(observe: Observer) -> Observer:
        def also(update: StepRecord | dict[str, Any]) -> None:
            if names and not feeders:
                remember(rundir, list(names))
                feeders.update((name, _start(rundir, name)) for name in names)
            look()
            observe(update)

        return also

    try:
        yield observing
    except BaseException:
        for feeder in feeders.values():
            _let_go(feeder)  # it sends the remaining steps, and exits
        raise
    for feeder in feeders.values():
        _let_go(feeder)
    _wait(feeders)
    look()


def leave(rundir: RunDir, names: Sequence[str]) -> None:
    """Remember the loggers of a detached run, and print how they receive its steps."""
    from evener.cli import fleets
    from evener.report.feed import remember

    remember(rundir, list(names))
    if names:
        fleets.say(f"{', '.join(names)}: fed while the run is followed, or at its end: "
                   f"evener report {rundir} --log {','.join(names)}")  # fmt: skip


def _start(rundir: RunDir, name: str) -> subprocess.Popen[bytes]:
    """Start a feeder in its own session: Ctrl-C does not reach it, and closing the terminal only ends its input."""
    with (rundir.path / "loggers" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "evener.report.feed", str(rundir.path), name],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _let_go(feeder: subprocess.Popen[bytes]) -> None:
    assert feeder.stdin is not None
    feeder.stdin.close()


def _wait(feeders: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait until all feeders have sent the rest, at most `LOGGER_TIMEOUT_S`; print which of them are late."""
    from evener.cli import fleets

    began = time.monotonic()
    for patience_s, text in ((NOTED_S, "sending the rest"), (PATIENCE_S, "continues to send in the background")):
        late = []
        for name, feeder in feeders.items():
            try:
                feeder.wait(max(0.0, patience_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                late.append(name)
        if late:
            fleets.say(f"{', '.join(late)}: {text}")


def _tell_broken(rundir: RunDir, name: str) -> None:
    from evener.cli import fleets
    from evener.core.files import read_file

    log = rundir.path / "loggers" / f"{name}.log"
    lines = [line.strip() for line in read_file(log).decode(errors="replace").splitlines() if line.strip()]
    fleets.say(f"warning: {name}: {lines[-1] if lines else 'it ended'}; the run goes on without it\n"
               f"hint:  {log} has its output; evener report {rundir} --log {name} sends it the rest")  # fmt: skip


def tell_now(rundir: RunDir, names: Sequence[str]) -> None:
    """Send loggers the steps of a run that they do not have yet; raise RunError if one fails."""
    from evener.cli import fleets
    from evener.core.errors import EvenerError, RunError
    from evener.core.units import plural
    from evener.report.feed import feed, told_of

    rundir.manifest()  # raises before anything is written if this is no run
    for name in names:
        try:
            steps = feed(rundir, name)
        except EvenerError:
            raise
        except Exception as error:  # third-party packages raise anything
            why = str(error).strip().splitlines() or [type(error).__name__]
            hint = f"once that is fixed, the same command sends it the rest: evener report {rundir} --log {name}"
            raise RunError(f"{name}: {why[0]}", hint=hint) from None
        if steps is None:
            fleets.say(f"{name}: another process that follows {rundir} feeds it")
        else:
            fleets.say(f"{name}: sent {plural(steps, 'step')} of {rundir}, {told_of(rundir, name).steps} in all")
