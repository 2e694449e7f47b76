"""Errors in a user's training program: print them as `error:` and `hint:` with the user's line; set the exit status."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from evener.core.errors import DataError, EvenerError, HopelessError, NoRoomError, RunError, UsageError
from evener.core.failure import is_consequence
from evener.core.world import FOLLOWS, NEEDS_FILE, NO_ROOM, OVER, REFUSED, REGROUP, hosts_come_and_go, told_meeting

OURS = str(Path(__file__).parents[1])


def tell_in_words() -> None:
    """Install an excepthook that prints an uncaught EvenerError as `error:`, `hint:` and `at:`, without a traceback.

    With dynamic membership the exit status tells the agents whether a regroup would help.
    """
    if sys.excepthook is sys.__excepthook__:  # never replace the user's own hook
        sys.excepthook = _tell


def exit_status(error: EvenerError) -> int:
    """Return the exit status of a rank that ends with this error.

    With dynamic membership it tells the agent whether a regroup would help, and without which host: an error of usage
    or data after others have trained is this host's own. For DiskSpaceError it writes the needed bytes to a file.
    """
    if not hosts_come_and_go():
        return error.exit_status
    if isinstance(error, RunError) and error.of_rank is not None:  # another rank's error
        return REGROUP
    if isinstance(error, UsageError | DataError) and not told_meeting().world.number:
        return OVER
    if isinstance(error, NoRoomError):
        with contextlib.suppress(OSError):
            Path(os.environ["EVENER_WORLD"]).with_name(Path(NEEDS_FILE).name).write_text(str(error.needed))
        return NO_ROOM
    if isinstance(error, UsageError | DataError):
        return REFUSED
    return OVER if isinstance(error, HopelessError) else 1


def in_words(error: EvenerError) -> str:
    """Format an error as `error: …` and `hint:  …`, as every command does."""
    return "\n".join([f"error: {error}", *([f"hint:  {error.hint}"] if error.hint else [])])


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, EvenerError):
        sys.__excepthook__(kind, error, trace)
        if hosts_come_and_go() and is_consequence(error):
            raise SystemExit(FOLLOWS)
        return
    print(in_words(error), file=sys.stderr)
    frames = list(itertools.takewhile(lambda frame: not frame.filename.startswith(OURS), traceback.extract_tb(trace)))
    if frames:  # the line that called us: the frames below may be torch's
        frame = frames[-1]
        print(f"at:    {frame.filename}:{frame.lineno}: {frame.line}", file=sys.stderr)
    if hosts_come_and_go():
        raise SystemExit(exit_status(error))  # raised in the hook, it becomes the program's exit status
