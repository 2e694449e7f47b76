"""Run a verb of `evener` in the process of the tests, in a fraction of the time that a process of its own takes."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from evener.cli.main import main

TIMEOUT_S = 60.0


def run_verb(*args: object, cwd: Path | None = None, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run `evener args` in `cwd`; return its exit status and what it printed. An unexpected error is raised."""
    words, out, err = [str(arg) for arg in args], io.StringIO(), io.StringIO()
    with (
        time_limit(timeout_s),
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.object(sys, "argv", ["evener", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exited,
    ):
        main()
    return subprocess.CompletedProcess(words, int(exited.value.code or 0), out.getvalue(), err.getvalue())


class TooLong(BaseException):
    """A block of `time_limit` took too long. No handler of errors may take it for one of its own."""


@contextlib.contextmanager
def time_limit(timeout_s: float) -> Iterator[None]:
    """Raise TooLong in a block that takes longer."""

    def raise_too_long(*_: Any) -> None:
        raise TooLong(f"more than {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, raise_too_long)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
