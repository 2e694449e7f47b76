"""Report what is wrong with a launched program, as an event of its run; an error also ends it.

The launcher shows the failure that a rank reports before any other, so the cause stands first also where ranks of other
hosts fail because of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from evener.core.run.membership_epoch import EXIT_RUN_FAILED, has_dynamic_membership
from evener.core.run.runwriter import RunWriter
from evener.core.script.variables import FIRST_RANK_VARIABLE

EXIT_STATUS = 2  # as of a wrong request


def run_folder() -> Path | None:
    """Return the folder of the run on this host; None if the program was not launched."""
    path = os.environ.get("EVENER_JOINED")
    return None if path is None else Path(path).parents[1]


def launched_rank() -> int:
    """Return the rank in the process group, as the launcher set it."""
    return int(os.environ.get("RANK", "0"))


def run_rank() -> int:
    """Return the rank's number in the run, by which its files are named: it stays when other hosts are lost."""
    first = os.environ.get(FIRST_RANK_VARIABLE)
    return launched_rank() if first is None else int(first) + int(os.environ.get("LOCAL_RANK", "0"))


def warn(error: str, hint: str) -> None:
    """Report a probable mistake: the launcher prints it, or this process if evener did not launch it."""
    if run_folder() is None:
        print(f"warning: {error}\nhint:  {hint}", file=sys.stderr)
    _add_event("program.warning", error=error, hint=hint)


def note(text: str) -> None:
    """Report a fact: the launcher prints it."""
    _add_event("program.note", text=text)


def end_program(error: str, hint: str) -> NoReturn:
    """Report a mistake that makes the run useless, and end this process at once; callable from any thread."""
    _add_event("failure", error=error, hint=hint, kind="UsageError")
    print(f"error: {error}\nhint:  {hint}", file=sys.stderr)
    with contextlib.suppress(Exception):  # the program may have closed or replaced it
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RUN_FAILED if has_dynamic_membership() else EXIT_STATUS)


def _add_event(event: str, **facts: str) -> None:
    folder, rank = run_folder(), run_rank()
    if folder is not None:
        host = os.environ.get("EVENER_HOST", "")
        with contextlib.suppress(OSError):  # a full disk
            RunWriter(folder).add_event(event, rank=rank, host=host, **facts)
