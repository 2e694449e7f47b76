"""evener in a terminal that is none: a pseudo-terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

COLOUR = re.compile(r"\x1b\[[\d;]*\b(3\d|4\d|9\d|10[0-7])\b[\d;]*m")
ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def argv(*args: object) -> list[str]:
    return [sys.executable, "-m", "evener", *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """Without what this test's own terminal says of itself, and readline, which pytest imports, of 80 columns."""
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return own | {"TERM": "xterm-256color"} | more


def in_terminal(
    *args: object, columns: int = 80, cwd: Path | None = None, typed: str = "", status: int | None = None, **env: str
) -> str:
    """All that a command writes to a terminal, escape codes too, where somebody has typed this."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(argv(*args), stdin=its, stdout=its, stderr=its, cwd=cwd, env=environment(**env)) as process:
        os.close(its)
        os.write(ours, typed.encode())
        written = b""
        while True:
            try:
                new = os.read(ours, 65536)
            except OSError:  # the last one on the other side is gone
                break
            if not new:
                break
            written += new
        ended = process.wait(60)
    os.close(ours)
    assert status in (None, ended), written
    return written.decode().replace("\r\n", "\n")


def in_pipe(*args: object, cwd: Path | None = None, **env: str) -> str:
    """The same of a pipe, stderr below."""
    told = subprocess.run(argv(*args), capture_output=True, text=True, timeout=120, check=False, cwd=cwd,
                          env=environment(**env))  # fmt: skip
    return told.stdout + told.stderr
