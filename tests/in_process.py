"""Run a verb of `evener` in the process of the tests, in a fraction of the time that a process of its own takes."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest import mock

from evener.cli.main import main


def run_verb(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `evener args` in `cwd`; return what `subprocess.run` would for its process. A traceback is an exception."""
    words, out, err = [str(arg) for arg in args], io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.object(sys, "argv", ["evener", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exited:
            return subprocess.CompletedProcess(words, int(exited.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main() returns by exiting")
