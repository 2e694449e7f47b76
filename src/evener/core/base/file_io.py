"""Write files atomically and durably, append lines, and read regular files, also while they grow."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path


def write_folder_atomic(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write(temporary)` fill a temporary folder, make it durable, then rename it to `folder` atomically."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        write(temporary)
        for file in temporary.iterdir():
            fsync_path(file)
        fsync_path(temporary)
        rename_durably(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomic(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically and durably: readers see the old content or the new one, and after the return the new
    one alone, even after a power loss. The umask applies to `mode`.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
        fsync_path(temporary)
        rename_durably(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably; do nothing if it exists."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Replace `target` by `source`, in the same folder or another, and flush the new name to disk."""
    source.replace(target)
    fsync_path(target.parent)


class LineFile:
    """A file to which one process appends lines.

    Opening it removes a last line that a full disk or a kill cut short. The file is then replaced by a new one (another
    inode), so that a program that copies it as it grows starts again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.close()
            content = read_file(path)
            write_atomic(path, content[: content.rfind(b"\n") + 1])
            self._file = path.open("ab", buffering=0)

    def write(self, lines: bytes) -> None:
        """Append lines. Raise OSError if they could not be written completely."""
        if self._file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raise OSError for anything else, as pipes can block and devices never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Read a whole file. Raise OSError if there is none."""
    with open_file(path) as file:
        return file.read()


def file_digest(path: Path) -> str:
    """Return the blake2b digest (32 bytes, as hex) of a file's content, which verifies copied files."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


class LineReader:
    """Reads the complete lines that were appended to a file since the last read; all again if it was replaced."""

    def __init__(self, path: Path, inode: int | None = None, offset: int = 0) -> None:
        """To continue after an earlier reader, pass the `inode` of its file and the `offset` after its last line."""
        self.path, self.inode, self.offset = path, inode, offset
        self.was_replaced = False  # at the last read
        self._partial_size = -1  # size of the file at which its last line was incomplete

    def read(self, max_bytes: int = -1) -> bytes:
        """Return the new complete lines among the next `max_bytes`; b"" if there are none or the file cannot be read.

        A line of more than `max_bytes` is returned in pieces.
        """
        self.was_replaced = False
        try:
            with open_file(self.path) as file:
                status = os.fstat(file.fileno())
                if self.inode != status.st_ino or status.st_size < self.offset:
                    self.was_replaced = self.inode is not None
                    self.inode, self.offset = status.st_ino, 0
                file.seek(self.offset)
                chunk = file.read(max_bytes)
        except OSError:
            return b""
        is_one_line = len(chunk) == max_bytes and b"\n" not in chunk  # it would never end
        lines = chunk if is_one_line else chunk[: chunk.rfind(b"\n") + 1]
        self._partial_size = -1 if lines or not chunk else status.st_size
        self.offset += len(lines)
        return lines

    def unread_bytes(self) -> int:
        """Return the bytes of the lines that are not read yet; an incomplete last line does not count."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        return 0 if size == self._partial_size else size - self.offset


def follow_lines(path: Path) -> Iterator[list[bytes]]:
    """Yield at each iteration the complete lines appended to a file since the last; all lines if it was replaced."""
    reader = LineReader(path)
    while True:
        yield reader.read().split(b"\n")[:-1]


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
