"""The options of `evener launch` that instrument a user's program, as `evener.worker.script` takes them."""

from __future__ import annotations

import shlex

from evener.core.base.errors import UsageError
from evener.core.run.roster import parse_sync_and_shares


def check_options(sync: str, shares: str, *, independent: bool, no_compat: bool, no_measure: bool) -> None:
    """Raise UsageError if `script_options` will, or if "auto" follows from measuring, which is left out."""
    if "auto" in (sync, shares) and (independent or no_measure):
        flag = "--sync" if sync == "auto" else "--shares"
        raise UsageError(f"{flag} auto follows from what was measured", hint="without --no-measure and --independent")
    known = "ddp" if sync == "auto" else sync, "equal" if shares == "auto" else shares
    script_options(*known, independent=independent, no_compat=no_compat, no_measure=no_measure)


def script_options(sync: str, shares: str, *, independent: bool, no_compat: bool, no_measure: bool) -> list[str]:
    """Return the options for a program. Raise UsageError if a strategy or shares are none for it.

    >>> script_options("int8", "equal", independent=False, no_compat=True, no_measure=False)
    ['no-compat', 'sync=int8']
    """
    chosen = {"independent": independent, "no-compat": no_compat, "no-measure": no_measure}
    options = [name for name, is_set in chosen.items() if is_set]
    spec, weights = parse_sync_and_shares(sync, shares)
    if spec.kind != "ddp":
        options.append(f"sync={spec}")
    if weights is not None:
        if independent:
            raise UsageError(
                "--shares divides a batch, and --independent ranks have none in common", hint="one of them"
            )
        options.append(f"shares={shares}")
    return options


def script_resume_args(membership: str, resume_args: str, shares: str, *, no_measure: bool) -> list[str] | None:
    """Return the words that a program gets when it is restarted; None if the loss of a host ends the run.

    Raise UsageError if the words cannot be told apart, if nobody would see whether the program gets ahead, or if
    batches are divided among other ranks than those that would be left.

    >>> script_resume_args("restart", "--resume 'latest one'", "equal", no_measure=False)
    ['--resume', 'latest one']
    """
    if membership not in ("fixed", "restart"):
        raise UsageError(f"--membership {membership}: not for a program of your own", hint="fixed or restart")
    if membership == "fixed":
        if resume_args:
            raise UsageError("--resume-args needs --membership restart: nothing is restarted without it")
        return None
    if no_measure:
        raise UsageError(
            "--membership restart tells by the measured steps whether the program gets ahead",
            hint="without --no-measure and --independent",
        )
    if shares != "equal":
        raise UsageError(
            f"--shares {shares} is for these ranks, and --membership restart goes on with fewer", hint="one of them"
        )
    try:
        return shlex.split(resume_args)
    except ValueError as error:
        raise UsageError(f"--resume-args {resume_args}: {error}") from None
