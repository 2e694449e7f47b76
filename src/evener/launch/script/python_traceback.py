"""Find the exception that ended a Python program in what it printed.

A rank's stdout and stderr are two files, and what a program still has buffered for stdout is written after its
traceback: its last lines may have nothing to do with its end. Nor does every traceback end a program: Python and
libraries also print those of exceptions that they ignored, caught, or met in threads and at exit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

# A progress bar may stand before it on its line; "Original Traceback" and "| Traceback" are parts of others.
HEADER = re.compile(r"(?:^|[^\s|])Traceback \(most recent call last\):$")
ORIGINAL_HEADER = "Original Traceback (most recent call last):"  # of a DataLoader's worker, in the message
RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch puts it before each line while there is a process group
FRAME = re.compile(r'\s+File "(?P<file>[^"\n]+)", line (?P<line>\d+)')
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|/evener/worker/script/|^<")
NOT_THE_END = re.compile(r"Exception ignored|Error in atexit|Exception in thread|--- Logging error")  # before a header
MAX_LINES_AFTER = 40  # on stderr after the exception that ended the program: notes of libraries at exit
MAX_MESSAGE_LINES = 30


@dataclass(frozen=True)
class PrintedException:
    """An uncaught exception as Python prints it."""

    text: str  # the line of the exception: "ValueError: no such layer"
    where: str  # the innermost line outside of libraries, "train.py, line 12"; empty if there is none
    traceback: list[str]  # its lines, the whole message at the end


def last_exception(stderr: Sequence[str]) -> PrintedException | None:
    """Return the exception of the last traceback that may have ended a program with this stderr; None without one."""
    lines = [RANK_PREFIX.sub("", line, count=1) for line in stderr]
    headers = [i for i, line in enumerate(lines) if HEADER.search(line)]
    for start, following in reversed([*itertools.pairwise([*headers, len(lines)])]):
        if start and NOT_THE_END.match(lines[start - 1]):
            continue
        end = next((i for i in range(start + 1, following) if lines[i] and not lines[i].startswith(" ")), None)
        if end is None or not EXCEPTION.match(lines[end]):
            continue
        if len(lines) - end > MAX_LINES_AFTER and following == len(lines):
            return None  # the program went on after it
        message = lines[end : min(following, end + MAX_MESSAGE_LINES)]
        return _in_worker(lines[start:end], message) or PrintedException(
            lines[end].strip(), _own_line(lines[start:end]), lines[start:end] + message
        )
    return None


def _in_worker(traceback: list[str], message: list[str]) -> PrintedException | None:
    """Return the exception that a DataLoader's worker reported in the message of another one; None if there is none."""
    if ORIGINAL_HEADER not in message:
        return None
    inner = message[message.index(ORIGINAL_HEADER) :]
    end = next((i for i, line in enumerate(inner[1:], start=1) if line and not line.startswith(" ")), None)
    if end is None:
        return None
    return PrintedException(inner[end].strip(), _own_line(inner[:end]), traceback + message)


def _own_line(traceback: Sequence[str]) -> str:
    frames = [frame for line in traceback if (frame := FRAME.match(line)) is not None]
    own = [frame for frame in frames if not LIBRARIES.search(frame["file"])]
    return f"{PurePath(own[-1]['file']).name}, line {own[-1]['line']}" if own else ""
