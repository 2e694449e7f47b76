"""How does a run leave the disk, so that none is taken away under somebody who is at it, and none is left half?"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator

from evener.core.errors import UsageError
from evener.core.rundir import RunDir

LOCKS = ("host/attached", "hosts/carry.lock", "hosts/add.lock")  # of the programs that start, fetch or change a run
BENCHES = ("bench.json", "compare.json")  # whose pages need the runs that they name
FIRST = ("plan.json", "manifest.json")  # by which a folder is a run


def is_kept(rundir: RunDir) -> bool:
    """Is somebody at it, is it part of a bench, or is it a link to another place?"""
    try:
        with _locked(rundir):
            return rundir.path.is_symlink() or any((rundir.path.parent / name).exists() for name in BENCHES)
    except BlockingIOError:
        return True


def remove(rundir: RunDir) -> None:
    """Take a run away. What a crash leaves of it is no run any more."""
    try:
        with _locked(rundir):
            for name in FIRST:
                (rundir.path / name).unlink(missing_ok=True)
            shutil.rmtree(rundir.path)
    except OSError as error:
        raise UsageError(f"{rundir}: cannot be removed: {error.strerror}: {error.filename}") from None


@contextlib.contextmanager
def _locked(rundir: RunDir) -> Iterator[None]:
    """As long as this lasts, nobody starts, fetches or changes it from here; BlockingIOError where somebody does."""
    with contextlib.ExitStack() as held:
        paths = [rundir.path / name for name in LOCKS]
        for path in [*paths, *(rundir.path / "loggers").glob("*.lock")]:  # and of those that tell a logger of it
            if path.exists():
                fcntl.flock(held.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
