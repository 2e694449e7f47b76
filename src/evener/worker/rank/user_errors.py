"""Errors in a user's training program: print them as `error:` and `hint:` with the user's line; set the exit status."""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from pathlib import Path
from types import TracebackType

from evener.core.base.errors import DataError, EvenerError, HopelessError, NoRoomError, RunError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.run.membership_epoch import (
    EXIT_DISK_FULL,
    EXIT_HOST_NOT_RETRYABLE,
    EXIT_PEER_FAILED,
    EXIT_REGROUP,
    EXIT_RUN_FAILED,
    NEEDED_BYTES_FILE,
    has_dynamic_membership,
    host_file_path,
    read_rendezvous,
)
from evener.core.run.peer_failure import is_peer_failure

PACKAGE_DIR = str(Path(__file__).parents[2])


def install_excepthook() -> None:
    """Install an excepthook that prints an uncaught EvenerError as `error:`, `hint:` and `at:`, without a traceback.

    With dynamic membership the exit status tells the agents whether a regroup would help.
    """
    if sys.excepthook is sys.__excepthook__:  # never replace the user's own hook
        sys.excepthook = _excepthook


def rank_exit_status(error: EvenerError) -> int:
    """Return the exit status of a rank that ends with this error.

    With dynamic membership the status tells the agent whether a regroup would help, and without which host. A
    UsageError or DataError in the first epoch ends the run; in a later one, when other hosts have trained, it excludes
    this host alone. For NoRoomError also write the needed bytes to a file.
    """
    if not has_dynamic_membership():
        return error.exit_status
    if isinstance(error, RunError) and error.failed_rank is not None:  # another rank's error
        return EXIT_REGROUP
    if isinstance(error, UsageError | DataError) and not read_rendezvous().epoch.number:
        return EXIT_RUN_FAILED
    if isinstance(error, NoRoomError):
        with contextlib.suppress(OSError):
            write_atomic(host_file_path(NEEDED_BYTES_FILE), str(error.needed_bytes).encode())
        return EXIT_DISK_FULL
    if isinstance(error, UsageError | DataError):
        return EXIT_HOST_NOT_RETRYABLE
    return EXIT_RUN_FAILED if isinstance(error, HopelessError) else 1


def format_error(error: EvenerError) -> str:
    """Format an error as `error: …` and `hint:  …`, as every command does."""
    return "\n".join([f"error: {error}", *([f"hint:  {error.hint}"] if error.hint else [])])


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, EvenerError):
        sys.__excepthook__(kind, error, trace)
        if has_dynamic_membership() and is_peer_failure(error):
            raise SystemExit(EXIT_PEER_FAILED)
        return
    print(format_error(error), file=sys.stderr)
    frames = list(
        itertools.takewhile(lambda frame: not frame.filename.startswith(PACKAGE_DIR), traceback.extract_tb(trace))
    )
    if frames:  # the line that called us: the frames below may be torch's
        frame = frames[-1]
        print(f"at:    {frame.filename}:{frame.lineno}: {frame.line}", file=sys.stderr)
    if has_dynamic_membership():
        raise SystemExit(rank_exit_status(error))  # raised in the hook, it becomes the program's exit status
