"""What can go wrong that a person can mend?

    EvenerError            one line for a person: what, where, the evidence; `hint` is the next step
    ├── UsageError         a flag, a file or a value that the user wrote is wrong      (exit status 2)
    │   └── NoRoomError    or a disk is too full for it                            (exit status 2)
    ├── DataError          a corpus that cannot be read or made                        (exit status 2)
    ├── CheckpointError    a checkpoint or a run directory that cannot be trusted      (exit status 2)
    ├── HostError          a machine that cannot be reached or cannot do what is asked (exit status 1)
    └── RunError           a run that started and failed                               (exit status 1)
        ├── NonFiniteError in a step that came to what is no number                (exit status 1)
        ├── DivergedError  since its replicas are not one model any more           (exit status 1)
        └── HopelessError  and would in any world, where hosts come and go         (exit status 2)

The command line catches EvenerError alone; any other traceback is a bug in evener.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class EvenerError(Exception):
    """An error that its reader can mend. `str(error)` is one line; `hint` says what to do next."""

    exit_status = 2

    def __init__(self, message: str, *, hint: str = "", output: str = "") -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
        self.hint = hint
        self.output = output  # what the program that failed printed last

    def as_line(self) -> str:
        """As a worker program reports it to the verb that called it, which raises it again: see launch.tool."""
        return json.dumps({"error": str(self), "hint": self.hint, "kind": type(self).__name__})


class UsageError(EvenerError):
    """A flag, a key or a value that the user wrote is wrong."""


class NoRoomError(UsageError):
    """What was asked for is more than a disk has room for now: it takes `needed` bytes."""

    needed = 0


class DataError(EvenerError):
    """A corpus cannot be read or made."""


class CheckpointError(EvenerError):
    """A checkpoint or a run directory cannot be trusted."""


class HostError(EvenerError):
    """A machine cannot be reached or cannot do what is asked; `check` is the finding's id, such as "ssh.auth"."""

    exit_status = 1

    def __init__(self, message: str, *, check: str, host: str, hint: str = "", output: str = "") -> None:
        super().__init__(message, hint=hint, output=output)
        self.check, self.host = check, host


class RunError(EvenerError):
    """A run started and failed; `of_rank` is the one that did, where another raises this."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "", output: str = "", of_rank: int | None = None) -> None:
        super().__init__(message, hint=hint, output=output)
        self.of_rank = of_rank


class NonFiniteError(RunError):
    """A step came to what is no number; all ranks raise this together."""

    def __init__(self, message: str, *, step: int, ranks: list[int], hint: str = "") -> None:
        super().__init__(message, hint=hint + "a smaller --lr, a longer --warmup, or --dtype fp32")
        self.step, self.ranks = step, ranks  # of the step, from 0; where it began


class DivergedError(RunError):
    """Replicas hold what they should not; all ranks raise this together."""

    def __init__(self, message: str, *, step: int, odd: list[int], hint: str, **facts: Any) -> None:
        super().__init__(message, hint=hint)
        self.step, self.odd = step, odd  # steps that were taken; ranks that are not as most are: [] where none can tell
        self.facts = facts  # for the event


class HopelessError(RunError):
    """A run failed as it would in any world: its agents are not to try another."""

    exit_status = 2


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'did you mean "steps"?' for a near miss, else the list of what is known.

    >>> did_you_mean("stesp", ["steps", "seed"])
    'did you mean "steps"?'
    >>> did_you_mean("zzz", ["steps", "seed"])
    'known: seed, steps'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{close[0]}"?' if close else "known: " + ", ".join(names)
