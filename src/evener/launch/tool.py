"""How does a verb have something done that needs torch? By a worker program whose output is JSON lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec

from evener.core import errors
from evener.core.errors import EvenerError, RunError


def lines_of(module: str, *args: str) -> Iterator[str]:
    """Lines that `python -m module args` prints, as they come; the worker's own EvenerError where it reports one."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    try:
        for line in process.stdout:
            last = line.rstrip("\n")
            if not last.startswith('{"error"'):
                yield last
    finally:
        process.stdout.close()
        if process.poll() is None and sys.exc_info()[0] is not None:
            process.terminate()
        status = process.wait()
    if status == 0:
        return
    if last.startswith('{"error"'):
        told = msgspec.json.decode(last, type=dict[str, str])
        kind = getattr(errors, told["kind"])
        assert issubclass(kind, EvenerError)
        raise kind(told["error"], hint=told["hint"])
    raise RunError(f"{module} exited with status {status}", hint="what it printed above is a bug in evener")
