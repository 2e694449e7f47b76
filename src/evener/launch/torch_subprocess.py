"""Run a worker program that needs torch in a subprocess, and yield the lines that it prints."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import IO, NoReturn, TextIO

from evener.core.base import errors
from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError, RunError
from evener.core.base.escaped_output import print_escaped

PRINT_TIMEOUT_S = 5.0  # for what a program has written to stderr before its end
ERROR_PREFIX = '{"error"'  # start of the line by which a worker reports an EvenerError


def raise_reported_error(line: str) -> NoReturn:
    """Raise the EvenerError that a worker reports by this line."""
    error = from_json(line, dict[str, str])
    kind = getattr(errors, error["kind"])
    assert issubclass(kind, EvenerError)
    raise kind(error["error"], hint=error["hint"])


def _print_lines(pipe: TextIO) -> None:
    """Print the lines of a pipe on stderr."""
    for line in pipe:
        print_escaped(line, end="", file=sys.stderr, flush=True)


def _send_next(inputs: Iterator[str], pipe: IO[str]) -> None:
    """Write the next input to a program, or close its standard input after the last one."""
    line = next(inputs, None)
    try:
        if line is not None:
            pipe.write(f"{line}\n")
            pipe.flush()
    except OSError:  # the program has ended, and reports why
        line = None
    if line is None:
        with contextlib.suppress(OSError):  # what it did not read
            pipe.close()


def program_lines(module: str, *args: str, inputs: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines that `python -P -m module args` prints, as they are printed.

    `inputs` are lines for its standard input: the first at once, each other one when the program has answered the one
    before with an empty line. Raises the EvenerError that the program reports, or RunError if it fails otherwise.
    """
    argv = [sys.executable, "-P", "-m", module, *args]  # -P: nothing is imported from the current folder
    remaining = iter(inputs)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        printer = threading.Thread(target=_print_lines, args=(process.stderr,), daemon=True)
        printer.start()
        error_line = ""
        try:
            _send_next(remaining, process.stdin)
            for line in process.stdout:
                if line.startswith(ERROR_PREFIX):
                    error_line = line
                    continue
                yield line.rstrip("\n")
                if line == "\n":
                    _send_next(remaining, process.stdin)
        except BaseException:
            process.terminate()  # the consumer stopped early
            raise
        finally:
            printer.join(PRINT_TIMEOUT_S)
    if error_line:
        raise_reported_error(error_line)
    if process.returncode != 0:
        raise RunError(f"{module} exited with status {process.returncode}", hint="its output is above")
