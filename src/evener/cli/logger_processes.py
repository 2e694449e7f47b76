"""Feed experiment loggers while a run is followed: one process per logger, which reads the run's files."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evener.cli.run_output import print_status
from evener.core.base.errors import EvenerError, RunError, UsageError
from evener.core.base.file_io import open_for_append, read_file
from evener.core.base.shell import quote_word
from evener.core.base.units import pluralize
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import StepRecord
from evener.launch.follow_run import Observer
from evener.report.export.experiment_loggers import parse_loggers
from evener.report.export.logger_feed import feed_logger, read_cursor, register_loggers, registered_loggers

SLOW_LOGGER_S = 2.0  # after this, print which loggers have not received all steps
LOGGER_TIMEOUT_S = 60.0  # after this, leave a slow logger to finish in the background


def select_loggers(given: Sequence[str] | None, rundir: RunDir | None) -> list[str]:
    """Return the requested loggers; for a resumed run without a request those that it had before."""
    if given:
        return parse_loggers(given)
    usable = []
    for name in registered_loggers(rundir) if rundir is not None else []:
        try:
            usable += parse_loggers([name])
        except UsageError as error:
            print_status(f"warning: {error}; the run goes on without it\nhint:  {error.hint}")
    return usable


@contextlib.contextmanager
def feed_loggers(rundir: RunDir, names: Sequence[str]) -> Iterator[Callable[[Observer], Observer]]:
    """Yield a wrapper for observers: at the first update it starts a process for each logger.

    At exit the loggers receive the remaining steps.
    """
    feeders: dict[str, subprocess.Popen[bytes]] = {}
    broken: set[str] = set()

    def look() -> None:
        for name, feeder in feeders.items():
            if name not in broken and feeder.poll():
                broken.add(name)
                _print_failure(rundir, name)

    def observing(observe: Observer) -> Observer:
        def also(update: StepRecord | dict[str, Any]) -> None:
            if names and not feeders:
                register_loggers(rundir, list(names))
                feeders.update((name, _start_feeder(rundir, name)) for name in names)
            look()
            observe(update)

        return also

    try:
        yield observing
    except BaseException:
        for feeder in feeders.values():
            _close_input(feeder)  # it sends the remaining steps, and exits
        raise
    for feeder in feeders.values():
        _close_input(feeder)
    _wait_for_feeders(feeders)
    look()


def defer_loggers(rundir: RunDir, names: Sequence[str]) -> None:
    """Remember the loggers of a detached run, and print how they receive its steps."""
    register_loggers(rundir, list(names))
    if names:
        print_status(f"{', '.join(names)}: fed while the run is followed, or at its end: "
                   f"evener report {quote_word(rundir)} --log {quote_word(','.join(names))}")  # fmt: skip


def _start_feeder(rundir: RunDir, name: str) -> subprocess.Popen[bytes]:
    """Start a feeder in its own session: Ctrl-C does not reach it, and closing the terminal only ends its input."""
    with open_for_append(rundir.inside("loggers", f"{name}.log")) as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "evener.report.export.logger_feed", str(rundir.path), name],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _close_input(feeder: subprocess.Popen[bytes]) -> None:
    assert feeder.stdin is not None
    feeder.stdin.close()


def _wait_for_feeders(feeders: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait until all feeders have sent the rest, at most `LOGGER_TIMEOUT_S`; print which of them are late."""
    began = time.monotonic()
    for patience_s, text in (
        (SLOW_LOGGER_S, "sending the rest"),
        (LOGGER_TIMEOUT_S, "continues to send in the background"),
    ):
        late = []
        for name, feeder in feeders.items():
            try:
                feeder.wait(max(0.0, patience_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                late.append(name)
        if late:
            print_status(f"{', '.join(late)}: {text}")


def _print_failure(rundir: RunDir, name: str) -> None:
    log = rundir.inside("loggers", f"{name}.log")
    lines = [line.strip() for line in read_file(log).decode(errors="replace").splitlines() if line.strip()]
    print_status(f"warning: {name}: {lines[-1] if lines else 'it ended'}; the run goes on without it\n"
               f"hint:  {log} has its output; evener report {quote_word(rundir)} --log {quote_word(name)} sends it "
               "the rest")  # fmt: skip


def backfill_loggers(rundir: RunDir, names: Sequence[str]) -> None:
    """Send loggers the steps of a run that they do not have yet; raise RunError if one fails."""
    rundir.manifest()  # raises before anything is written if this is no run
    for name in names:
        try:
            steps = feed_logger(rundir, name)
        except EvenerError:
            raise
        except Exception as error:  # third-party packages raise anything
            why = str(error).strip().splitlines() or [type(error).__name__]
            command = f"evener report {quote_word(rundir)} --log {quote_word(name)}"
            hint = f"once that is fixed, the same command sends it the rest: {command}"
            raise RunError(f"{name}: {why[0]}", hint=hint) from None
        if steps is None:
            print_status(f"{name}: another process that follows {rundir} feeds it")
        else:
            print_status(
                f"{name}: sent {pluralize(steps, 'step')} of {rundir}, {read_cursor(rundir, name).steps} in all"
            )
