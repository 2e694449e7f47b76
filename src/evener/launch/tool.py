"""How does a verb have something done that needs torch? By a worker program that prints a line for each piece of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from evener.core import errors
from evener.core.decoding import from_json
from evener.core.errors import EvenerError, RunError

ERROR = '{"error"'  # how a worker's own EvenerError begins


def lines_of(module: str, *args: str) -> Iterator[str]:
    """Lines that `python -m module args` prints, as they come.

    Raises the EvenerError that the program reports, RunError if it failed otherwise.
    """
    argv = [sys.executable, "-m", module, *args]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = ""
        try:
            for line in process.stdout:
                if line.startswith(ERROR):
                    told = line
                else:
                    yield line.rstrip("\n")
        except BaseException:
            process.terminate()  # the reader wants no more
            raise
    if told:
        error = from_json(told, dict[str, str])
        kind = getattr(errors, error["kind"])
        assert issubclass(kind, EvenerError)
        raise kind(error["error"], hint=error["hint"])
    if process.returncode != 0:
        raise RunError(f"{module} exited with status {process.returncode}", hint="its output stands above")
