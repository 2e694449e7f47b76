"""A file of the newest collectives that one rank called, readable at any moment and after the rank was killed.

The rank maps the file into its memory, so that a call costs a copy of a few bytes and no system call, and the kernel
keeps what was written however the process ends.

    HEADER   magic, calls so far, whether the program has ended, pid
    NUM_CALLS × CALL   number of the call in its group, start, end (0: not returned), elements, group, operation, dtype,
                       the line of the program

A reader may see one call half written: the newest. It is skipped where its number does not fit.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

import msgspec

from evener.core.base.file_io import create_file, make_folder, open_for_append, read_file

CALLS_FOLDER = "host/collectives"  # in the run's folder: a file a local rank
MAGIC = b"evencol1"
HEADER = struct.Struct("<8sQ?7xQ")
CALL = struct.Struct("<QddQ32s32s16s144s")
NUM_CALLS = 64
FILE_BYTES = HEADER.size + NUM_CALLS * CALL.size


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a collective."""

    group: str
    number: int  # of the calls in its group, from 1
    operation: str
    num_elements: int
    dtype: str
    where: str  # "train.py:12 in main"
    began: float  # Unix time
    is_pending: bool = False  # it has not returned

    def describe(self) -> str:
        """Return the call as text: "all_reduce of 4 float32 at train.py:12 in main"."""
        what = f"{self.operation} of {self.num_elements:,} {self.dtype}" if self.num_elements else self.operation
        return f"{what} at {self.where}" if self.where else what


class RankCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The newest collectives of one rank, oldest first."""

    calls: list[RecordedCall] = []
    num_calls: int = 0  # of all groups, since the program began
    has_ended: bool = False  # the program has come to its end


class CallRing:
    """Writes the file of one rank. Callable from any thread."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raise OSError if there is no room: a page without any would end the process."""
        make_folder(path.parent)
        with create_file(path) as file:
            file.write(bytes(FILE_BYTES))
        with open_for_append(path) as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self._lock = threading.Lock()
        self._num_calls, self._numbers = 0, dict[str, int]()
        self._write_header(has_ended=False)

    def begin(self, group: str, operation: str, num_elements: int, dtype: str, where: str) -> int:
        """Record a call that begins; return its place in the file."""
        with self._lock:
            number = self._numbers[group] = self._numbers.get(group, 0) + 1
            place = HEADER.size + self._num_calls % NUM_CALLS * CALL.size
            words = [text.encode(errors="replace") for text in (group, operation, dtype, where)]
            CALL.pack_into(self._memory, place, number, time.time(), 0.0, num_elements, *words)
            self._num_calls += 1
            self._write_header(has_ended=False)
        return place

    @property
    def num_calls(self) -> int:
        """The calls so far."""
        return self._num_calls

    def end(self, place: int) -> None:
        """Record that the call at a place has returned."""
        struct.pack_into("<d", self._memory, place + 16, time.time())

    def close(self) -> None:
        """Record that the program has ended by itself."""
        self._write_header(has_ended=True)

    def _write_header(self, *, has_ended: bool) -> None:
        HEADER.pack_into(self._memory, 0, MAGIC, self._num_calls, has_ended, os.getpid())


def read_calls(path: Path) -> RankCalls | None:
    """Read a rank's file; None if there is none, or if it is no such file."""
    try:
        content = read_file(path, FILE_BYTES)
    except OSError:
        return None
    if len(content) != FILE_BYTES:
        return None
    magic, num_calls, has_ended, _ = HEADER.unpack_from(content)
    if magic != MAGIC:
        return None
    calls = []
    for index in range(max(0, num_calls - NUM_CALLS), num_calls):
        number, began, ended, num_elements, *words = CALL.unpack_from(
            content, HEADER.size + index % NUM_CALLS * CALL.size
        )
        group, operation, dtype, where = (word.rstrip(b"\0").decode(errors="replace") for word in words)
        if number:
            calls.append(
                RecordedCall(
                    group=group, number=number, operation=operation, num_elements=num_elements, dtype=dtype,
                    where=where, began=began, is_pending=ended == 0.0,
                )
            )  # fmt: skip
    return RankCalls(calls=calls, num_calls=num_calls, has_ended=has_ended)
