"""Open, read, append to, lock and replace files, atomically and durably where that matters.

Every file of a run directory goes through this module, and on hosts through its twin node/remote/file_io.py, because a
run directory may come from elsewhere. What it holds must not make evener write, truncate or delete outside of it,
block, or read without end:

    path_inside                           a path of a folder; refused if a symbolic link or ".." leads out of it
    open_file, read_file, read_lines      read a regular file: no pipe, no device, nothing larger than a limit
    open_for_append, lock_file, LineFile  open a regular file with one name, owned by this user; it is never truncated
    create_file, write_atomic             make a new file; a link in its place is replaced, not followed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path

from evener.core.base.errors import CheckpointError

MAX_FILE_BYTES = 256 << 20  # of a file that is read as a whole
MAX_LINE_BYTES = 16 << 20  # of a line


def path_inside(folder: Path, *names: str) -> Path:
    """Return the path of a file in a folder. Raise OSError if a symbolic link, ".." or "/" in it leads out of it.

    The folder itself may be a symbolic link.
    """
    path = folder.joinpath(*names)
    try:
        is_inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not is_inside:
        raise OSError(errno.ELOOP, f"leads out of {folder}", str(path))
    return path


def state_folder() -> Path:
    """Return the folder of what evener remembers of this user on this machine. OSError if there is no home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "evener"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def write_folder_atomic(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write(temporary)` fill a temporary folder, make it durable, then rename it to `folder` atomically."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    remove_entry(temporary)
    make_folder(temporary.parent)
    temporary.mkdir()
    try:
        write(temporary)
        for file in temporary.iterdir():
            fsync_path(file)
        fsync_path(temporary)
        rename_durably(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_entry(path: Path) -> None:
    """Remove a folder with all in it, or a file or link, which is not followed; do nothing if there is none."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_atomic(path: Path, content: bytes, *, mode: int = 0o666, is_durable: bool = True) -> None:
    """Replace a file atomically: readers see the old content or the new one. The umask applies to `mode`.

    With `is_durable`, flush it and its name to disk: after the return, only the new content survives a power loss.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with create_file(temporary, mode=mode) as file:
            file.write(content)
        if is_durable:
            fsync_path(temporary)
            rename_durably(temporary, path)
        else:
            temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed write does not say which file it was
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


def create_file(path: Path, *, mode: int = 0o666) -> BufferedWriter:
    """Create a file and open it for writing; a file or link of its name is removed, not written to."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def open_for_append(path: Path, *, mode: int = 0o666) -> FileIO:
    """Open a file for reading and appending, unbuffered; create it if missing, but not its folder.

    Raise OSError for anything but a regular file with one name that this user, or the owner of its folder, owns.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        _check_is_own(descriptor, path)
        return FileIO(descriptor, "a+")
    except BaseException:
        os.close(descriptor)
        raise


def append_bytes(path: Path, content: bytes) -> None:
    """Append to a file; create it and its folder if missing. OSError names the file that was not written completely."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_for_append(path) as file:
            while content:
                content = content[file.write(content) or 0 :]
    except OSError as error:
        error.filename = str(path)
        raise


def lock_file(path: Path, *, is_blocking: bool, mode: int = 0o666) -> FileIO:
    """Lock a file until it is closed, however this process ends. Its content is not changed.

    The file and its folder are created if missing. Raise BlockingIOError if another process holds the lock and
    `is_blocking` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_for_append(path, mode=mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if is_blocking else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


def _check_is_own(descriptor: int, path: Path) -> None:
    """Raise OSError for a pipe, device or folder, a file with hard links, or another user's file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "has another name too, a hard link: evener does not write to it", str(path))
    if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):  # some network disks give all files one owner
        raise OSError(errno.EPERM, "belongs to another user", str(path))


class LineFile:
    """A file to which one process appends lines.

    Opening it removes a last line that a full disk or a kill cut short. The file is then replaced by a new one (another
    inode), so that a program that copies it as it grows starts again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_for_append(path)
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.close()
            write_atomic(path, b"".join(line + b"\n" for line in read_lines(path)))
            self._file = open_for_append(path)

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


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file. Raise OSError if there is none, or if it has more than `max_bytes`."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB", str(path))
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, without their newlines; a file of any size is read in small pieces.

    Raise OSError if there is no file, or if a line has more than `MAX_LINE_BYTES`.
    """
    with open_file(path) as file:
        while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
            yield line[:-1]
        if len(line) > MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a line of more than {MAX_LINE_BYTES >> 20} MiB", str(path))


def file_digest(path: Path) -> str:
    """Return the blake2b digest (32 bytes, as hex) of a file's content, which verifies copied files."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def read_last_lines(path: Path, num_bytes: int) -> list[bytes]:
    """Return the complete lines in the last `num_bytes` of a file. Raise OSError if there is none."""
    with open_file(path) as file:
        begin = max(0, os.fstat(file.fileno()).st_size - num_bytes)
        file.seek(begin)
        lines = file.read(num_bytes).split(b"\n")[:-1]
    return lines[1:] if begin else lines


class LineReader:
    """Reads the complete lines that were appended to a file since the last read; all again if it was replaced."""

    def __init__(self, path: Path, inode: int | None = None, offset: int = 0) -> None:
        """To continue after an earlier reader, pass the `inode` of its file and the `offset` after its last line."""
        self.path, self.inode, self.offset = path, inode, offset
        self.was_replaced = False  # at the last read
        self._partial_size = -1  # size of the file at which its last line was incomplete

    def read(self, max_bytes: int = MAX_LINE_BYTES) -> bytes:
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
                chunk = file.read(min(max_bytes, status.st_size - self.offset))
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
    """Yield at each iteration the complete lines appended to a file since the last; all lines if it was replaced.

    Raise CheckpointError if a line has more than `MAX_LINE_BYTES`.
    """
    reader = LineReader(path)
    while True:
        new: list[bytes] = []
        while piece := reader.read():
            if not piece.endswith(b"\n"):
                raise CheckpointError(f"{path}: damaged: a line of more than {MAX_LINE_BYTES >> 20} MiB")
            new += piece.split(b"\n")[:-1]
        yield new


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
