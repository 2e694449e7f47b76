"""How does a program of the user's own end when evener refuses something? In words, at the line that asked for it."""

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
    """From now on an EvenerError that nobody catches is two lines and a place, not a traceback.

    Where hosts come and go, the program's exit status tells their agents whether another world would help.
    """
    if sys.excepthook is sys.__excepthook__:  # somebody's own hook knows better
        sys.excepthook = _tell


def exit_status(error: EvenerError) -> int:
    """Of a rank that ends with it. Where hosts come and go, it tells its agent whether another world would help, and
    without whom: what a host refuses after others have trained is its own. How much room it has too little is written
    down beside.
    """
    if not hosts_come_and_go():
        return error.exit_status
    if isinstance(error, RunError) and error.of_rank is not None:  # another one's
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
    """`error: …`, `hint:  …`, as every verb says it."""
    return "\n".join([f"error: {error}", *([f"hint:  {error.hint}"] if error.hint else [])])


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, EvenerError):
        sys.__excepthook__(kind, error, trace)
        if hosts_come_and_go() and is_consequence(error):
            raise SystemExit(FOLLOWS)
        return
    print(in_words(error), file=sys.stderr)
    theirs = list(itertools.takewhile(lambda frame: not frame.filename.startswith(OURS), traceback.extract_tb(trace)))
    if theirs:  # the line that called us: what lies below may be torch's
        print(f"at:    {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}", file=sys.stderr)
    if hosts_come_and_go():
        raise SystemExit(exit_status(error))  # from the hook it is the program's
