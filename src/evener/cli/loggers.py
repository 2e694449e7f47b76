"""How are loggers told of a run while it is followed? Each by a process of its own that reads the run's files."""

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

NOTED_S = 2.0  # after which a logger that has not heard all is worth a word
PATIENCE_S = 60.0  # it goes on by itself, but whoever reads on finds it unfinished


def chosen(given: Sequence[str] | None, rundir: RunDir | None) -> list[str]:
    """The loggers asked for; of a run that is resumed those that were told of it before."""
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
    """Gives an observer that has these loggers told of the run from its first news on, until this is left."""
    from evener.report.feed import remember

    feeders: dict[str, subprocess.Popen[bytes]] = {}
    broken: set[str] = set()

    def look() -> None:
        for name, feeder in feeders.items():
            if name not in broken and feeder.poll():
                broken.add(name)
                _tell_broken(rundir, name)

    def observing(observe: Observer) -> Observer:
        def also(news: StepRecord | dict[str, Any]) -> None:
            if names and not feeders:
                remember(rundir, list(names))
                feeders.update((name, _start(rundir, name)) for name in names)
            look()
            observe(news)

        return also

    try:
        yield observing
    except BaseException:
        for feeder in feeders.values():
            _let_go(feeder)  # it tells what there is, and ends
        raise
    for feeder in feeders.values():
        _let_go(feeder)
    _wait(feeders)
    look()


def leave(rundir: RunDir, names: Sequence[str]) -> None:
    """Of a run that nobody follows: who follows it next tells them."""
    from evener.cli import fleets
    from evener.report.feed import remember

    remember(rundir, list(names))
    if names:
        fleets.say(f"{', '.join(names)}: told by whoever follows the run, or at its end: "
                   f"evener report {rundir} --log {','.join(names)}")  # fmt: skip


def _start(rundir: RunDir, name: str) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for the run, and a terminal that is closed ends only its input."""
    with (rundir.path / "loggers" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "evener.report.feed", str(rundir.path), name],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _let_go(feeder: subprocess.Popen[bytes]) -> None:
    assert feeder.stdin is not None
    feeder.stdin.close()


def _wait(feeders: dict[str, subprocess.Popen[bytes]]) -> None:
    """Until all have told the rest, with a word about those that take long."""
    from evener.cli import fleets

    began = time.monotonic()
    for patience_s, told in ((NOTED_S, "is told the rest"), (PATIENCE_S, "goes on by itself until it was told all")):
        late = []
        for name, feeder in feeders.items():
            try:
                feeder.wait(max(0.0, patience_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                late.append(name)
        if late:
            fleets.say(f"{', '.join(late)}: {told}")


def _tell_broken(rundir: RunDir, name: str) -> None:
    from evener.cli import fleets
    from evener.core.files import read_file

    log = rundir.path / "loggers" / f"{name}.log"
    lines = [line.strip() for line in read_file(log).decode(errors="replace").splitlines() if line.strip()]
    fleets.say(f"warning: {name}: {lines[-1] if lines else 'it ended'}; the run goes on without it\n"
               f"hint:  {log} says more; evener report {rundir} --log {name} tells it the rest")  # fmt: skip


def tell_now(rundir: RunDir, names: Sequence[str]) -> None:
    """Tell loggers what they were not told of a run yet; RunError where one cannot hear it."""
    from evener.cli import fleets
    from evener.core.errors import EvenerError, RunError
    from evener.core.units import plural
    from evener.report.feed import feed, told_of

    rundir.manifest()  # what is no run is refused before anything is written there
    for name in names:
        try:
            steps = feed(rundir, name)
        except EvenerError:
            raise
        except Exception as error:  # whatever the package of somebody else raises
            why = str(error).strip().splitlines() or [type(error).__name__]
            hint = f"once that is mended, the same command tells it the rest: evener report {rundir} --log {name}"
            raise RunError(f"{name}: {why[0]}", hint=hint) from None
        if steps is None:
            fleets.say(f"{name}: whoever follows {rundir} is telling it")
        else:
            fleets.say(f"{name}: told {plural(steps, 'step')} of {rundir}, {told_of(rundir, name).steps} in all")
