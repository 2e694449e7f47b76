"""Which sync strategies a user's program can be launched with: those that are a communication hook of DDP."""

from __future__ import annotations

from evener.core.base.errors import UsageError
from evener.core.run.roster import SyncKind, parse_sync

SCRIPT_KINDS: tuple[SyncKind, ...] = ("ddp", "packed", "bf16", "int8", "int4", "powersgd")


def script_sync_options(sync: str) -> list[str]:
    """Return the option of `evener.worker.script` for a strategy: [] for DDP's own all-reduce.

    Raise UsageError if there is no such strategy, or if it is none for a program of the user's own.
    """
    spec = parse_sync(sync)
    if spec.kind not in SCRIPT_KINDS or spec.sparse:
        raise UsageError(
            f"--sync {sync}: not for a program of your own", hint=f"--sync {', '.join(SCRIPT_KINDS[:-1])} or powersgd:4"
        )
    return [] if spec.kind == "ddp" else [f"sync={spec}"]
