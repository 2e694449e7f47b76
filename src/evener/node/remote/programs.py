"""Find and run programs of this host. Standard library only, Python 3.8 or newer, Linux or macOS."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys

MORE_FOLDERS = "/usr/sbin:/sbin:/usr/bin:/usr/local/bin:/usr/local/cuda/bin"
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None  # loaded before any fork


def find_program(name: str) -> str | None:
    """Return a program's path, also from folders missing in the PATH of a session without a login shell."""
    return shutil.which(name) or shutil.which(name, path=MORE_FOLDERS)


def run_program(argv: list[str], timeout_s: float = 5) -> str | None:
    """Return a program's output: empty if it takes too long, None if it is not installed or fails."""
    output, error = run_with_error(argv, timeout_s)
    return output if error is None else None


def run_with_error(argv: list[str], timeout_s: float, env: dict[str, str] | None = None) -> tuple[str, str | None]:
    """Return (a program's output, its error); one that takes too long counts as no failure with empty output.

    `env` is its environment [this program's].
    """
    try:
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, cwd="/", check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return "", None
    except (OSError, ValueError) as error:
        return "", str(error)
    lines = process.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
    return process.stdout.decode(errors="replace"), "\n".join(lines[-3:]) if process.returncode else None


def count_allowed_cpus() -> int:
    """Return the number of CPUs on which a process may run here, by its affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """In a forked child, before its program starts: have the kernel kill it when its parent ends (Linux)."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
