"""Delete runs from the disk: each completely, and none that is in use."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import lock_file
from evener.core.run.rundir import RunDir

LOCKS = (
    "host/attached",
    "hosts/carry.lock",
    "hosts/add.lock",
    "resume.lock",
)  # of the programs that start, fetch or change a run
BENCH_FILES = ("bench.json", "compare.json")  # their pages need the runs that they name
RUN_MARKER_FILES = ("plan.json", "manifest.json")  # without them a folder is not a run


def is_protected(rundir: RunDir, folder: Path) -> bool:
    """Return whether the run is in use, part of a bench, or reached through a symbolic link below `folder`."""
    if rundir.path.resolve() != folder.resolve() / rundir.path.relative_to(folder):
        return True
    try:
        with _locked(rundir):
            return any((rundir.path.parent / name).exists() for name in BENCH_FILES)
    except (OSError, CheckpointError):  # locked, or no file to lock
        return True


def delete_run(rundir: RunDir) -> None:
    """Delete a run. After a crash, what is left no longer counts as a run. UsageError if it cannot be removed."""
    try:
        with _locked(rundir):
            for name in RUN_MARKER_FILES:
                rundir.inside(name).unlink(missing_ok=True)
            shutil.rmtree(rundir.path)
    except OSError as error:
        raise UsageError(f"{rundir}: cannot be removed: {error.strerror}: {error.filename}") from None


@contextlib.contextmanager
def _locked(rundir: RunDir) -> Iterator[None]:
    """Lock the run against being started, fetched or changed from here; BlockingIOError if it already is."""
    with contextlib.ExitStack() as stack:
        paths = [rundir.inside(name) for name in LOCKS]
        for path in [*paths, *rundir.glob("loggers/*.lock")]:  # and of those that report it to a logger
            if path.exists():
                stack.enter_context(lock_file(path, is_blocking=False))
        yield
