"""Find the exception that ended a Python program in what it printed.

A rank's stdout and stderr are two files, and what a program still has buffered for stdout is written after its
traceback: its last lines may have nothing to do with its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

HEADER = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line while there is a process group
FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+)')
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")


@dataclass(frozen=True)
class PrintedException:
    """An uncaught exception as Python prints it."""

    text: str  # the line of the exception: "ValueError: no such layer"
    where: str  # the innermost line outside of libraries, "train.py, line 12"; empty if there is none
    traceback: list[str]  # its lines, the exception's last


def last_exception(stderr: Sequence[str]) -> PrintedException | None:
    """Return the exception of the last complete traceback in the lines of a program's stderr; None without one."""
    lines = [RANK_PREFIX.sub("", line) for line in stderr]
    for start in reversed([i for i, line in enumerate(lines) if line == HEADER]):
        for end in range(start + 1, len(lines)):
            if lines[end].startswith(" ") or not lines[end]:
                continue
            if not EXCEPTION.match(lines[end]):
                break
            frames = [frame for line in lines[start:end] if (frame := FRAME.match(line)) is not None]
            own = [frame for frame in frames if not LIBRARIES.search(frame["file"])]
            where = f"{PurePath(own[-1]['file']).name}, line {own[-1]['line']}" if own else ""
            return PrintedException(lines[end].strip(), where, lines[start : end + 1])
    return None
