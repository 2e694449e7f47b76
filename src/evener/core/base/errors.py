"""The exception tree: errors that the user can fix.

    EvenerError                  one line for the user: what, where, the evidence; `hint` is the next step
    ├── UsageError               a wrong flag, file or value from the user                  (exit status 2)
    │   ├── NoRoomError          the disk is too full                                       (exit status 2)
    │   └── UntrustedError       a run or a fleet file from elsewhere names what would run  (exit status 2)
    ├── DataError                a corpus that cannot be read or made                       (exit status 2)
    ├── CheckpointError          a damaged or unsuitable checkpoint or run directory        (exit status 2)
    ├── HostError                a host that cannot be reached or cannot do what is needed  (exit status 1)
    └── RunError                 a run that started and failed                              (exit status 1)
        ├── NonFiniteError       a step with a NaN or infinite value                        (exit status 1)
        ├── DivergedError        replicas that are not identical                            (exit status 1)
        └── HopelessError        a failure that would recur in any membership epoch         (exit status 2)

The command line catches EvenerError alone; any other traceback is a bug in evener.
"""

from __future__ import annotations

import difflib
import errno
import json
from collections.abc import Callable, Iterable
from typing import Any


class EvenerError(Exception):
    """An error that the user can fix. `str(error)` is one line; `hint` says what to do next."""

    exit_status = 2

    def __init__(self, message: str, *, hint: str = "", output: str = "") -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
        self.hint = hint
        self.output = output  # the last output of the failed program

    def to_json_line(self) -> str:
        """Encode the error as a line of JSON, from which the command that started this program raises it again."""
        return json.dumps({"error": str(self), "hint": self.hint, "kind": type(self).__name__})


class UsageError(EvenerError):
    """A flag, key or value from the user is wrong."""


class NoRoomError(UsageError):
    """A disk is too full for the request, which needs `needed_bytes`."""

    needed_bytes = 0

    @classmethod
    def from_os_error(cls, error: OSError) -> NoRoomError | None:
        """Return the error that says which disk of this machine is full; None if `error` has another cause."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return None
        where = f"{error.filename}: " if error.filename else ""
        return cls(
            f"{where}{error.strerror}",
            hint="make room there, then run it again; a run that was started goes on, and evener runs lists it",
        )


def file_error(error: OSError) -> EvenerError | None:
    """Return the error that says what is wrong with a file or disk of this machine; None if `error` names no file."""
    full = NoRoomError.from_os_error(error)
    return full or (UsageError(f"{error.filename}: {error.strerror}") if error.filename is not None else None)


class UntrustedError(UsageError):
    """A run or a fleet file from elsewhere would have hosts contacted or programs started; `output` shows which."""


class DataError(EvenerError):
    """A corpus cannot be read or made."""


class CheckpointError(EvenerError):
    """A checkpoint or a run directory is damaged or unsuitable."""


class HostError(EvenerError):
    """A host cannot be reached or cannot do what is needed; `check` is the finding's id, such as "ssh.auth"."""

    exit_status = 1

    def __init__(self, message: str, *, check: str, host: str, hint: str = "", output: str = "") -> None:
        super().__init__(message, hint=hint, output=output)
        self.check, self.host = check, host


class RunError(EvenerError):
    """A run started and failed; `failed_rank` is the rank that failed, if another one raises this."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "", output: str = "", failed_rank: int | None = None) -> None:
        super().__init__(message, hint=hint, output=output)
        self.failed_rank = failed_rank


class NonFiniteError(RunError):
    """A step produced a NaN or infinite value; all ranks raise this together."""

    def __init__(self, message: str, *, step: int, ranks: list[int], hint: str = "") -> None:
        super().__init__(message, hint=hint + "a smaller --lr, a longer --warmup, or --dtype fp32")
        self.step, self.ranks = step, ranks  # the step, counted from 0; the ranks on which the value first appeared


class DivergedError(RunError):
    """Replicas that should be identical are not; all ranks raise this together."""

    def __init__(self, message: str, *, step: int, outlier_ranks: list[int], hint: str, **facts: Any) -> None:
        super().__init__(message, hint=hint)
        # steps taken; ranks that differ from the majority, [] if there is no majority
        self.step, self.outlier_ranks = step, outlier_ranks
        self.facts = facts  # further keys of the event


class HopelessError(RunError):
    """A run failed in a way that would recur in any membership epoch, so its agents must not retry."""

    exit_status = 2


def exit_status_of(program: Callable[[], object]) -> int:
    """Run a program and return its exit status; print an EvenerError as JSON, see `EvenerError.to_json_line`."""
    try:
        program()
    except EvenerError as error:
        print(error.to_json_line(), flush=True)
        return error.exit_status
    return 0


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return 'did you mean "steps"?' for a close match, else the list of known words.

    >>> did_you_mean("stesp", ["steps", "seed"])
    'did you mean "steps"?'
    >>> did_you_mean("zzz", ["steps", "seed"])
    'known: seed, steps'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{close[0]}"?' if close else "known: " + ", ".join(names)
