"""Open, read, append to, lock, replace and hash files of this host: the twin of core/base/file_io.py, for bare hosts.

Standard library only, Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import threading
from typing import AnyStr, BinaryIO

BLOCK_BYTES = 1 << 20
MAX_FILE_BYTES = 256 << 20  # of a file that is read as a whole


def absolute_path(path: str) -> str:
    """Return a path without "~" and relative parts."""
    return os.path.abspath(os.path.expanduser(path))


def path_inside(folder: str, *names: str) -> str:
    """Return the path of a file in a folder. Raise OSError if a symbolic link, ".." or "/" in it leads out of it.

    The folder itself may be a symbolic link.
    """
    path, root = os.path.join(folder, *names), os.path.realpath(folder)
    if os.path.commonpath([os.path.realpath(path), root]) != root:
        raise OSError(errno.ELOOP, f"leads out of {folder}", path)
    return path


def open_regular_file(path: AnyStr) -> BinaryIO:
    """Open a regular file for reading; OSError for a pipe, which would block, or a device, which has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", os.fsdecode(path))
    return os.fdopen(descriptor, "rb")


def open_own_file(path: str, flags: int) -> int:
    """Open a regular file with one name that this user, or the owner of its folder, owns; return its descriptor.

    Raise OSError for anything else: a link leads to another file, a pipe would block. `os.O_CREAT` creates a missing
    file. `os.O_TRUNC` is not for this: use `create_file`.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    owners = os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid  # some network disks give all files one owner
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid not in owners:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file of this user with one name", path)
    return descriptor


def create_file(path: AnyStr) -> BinaryIO:
    """Create a file and open it for reading and writing; a file or link of its name is removed, not written to."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w+b")


def read_bytes(path: str) -> bytes | None:
    """Return the content of a file, or None if it cannot be read or has more than `MAX_FILE_BYTES`."""
    try:
        with open_regular_file(path) as file:
            return file.read() if os.fstat(file.fileno()).st_size <= MAX_FILE_BYTES else None
    except (OSError, ValueError):
        return None


def read_text(path: str) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    content = read_bytes(path)
    return None if content is None else content.decode(errors="replace")


def read_link(path: str) -> str | None:
    """Return the target of a symbolic link, or None if there is none."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def write_atomic(path: str, content: bytes, *, is_durable: bool = True) -> None:
    """Replace a file atomically. With `is_durable`, flush it and its name to disk: it survives a power loss."""
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        with create_file(temporary) as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if is_durable:
        fsync_folder(os.path.dirname(path) or ".")


def make_folder(folder: str, mode: int = 0o777) -> None:
    """Create a folder and its missing parents durably; do nothing if it exists. `mode` is of the last one alone."""
    if not os.path.isdir(folder):
        parent = os.path.dirname(os.path.abspath(folder))
        make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode)
        fsync_folder(parent)


def remove_entry(path: str) -> None:
    """Remove a folder with all in it, or a file or link, which is not followed; do nothing if there is none."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def copy_durably(source: str, target: str) -> None:
    """Replace `target` atomically by a copy of `source`, and flush it and its name to disk."""
    with open_regular_file(source) as reader, create_file(target + ".tmp") as writer:
        shutil.copyfileobj(reader, writer, BLOCK_BYTES)
        writer.flush()
        os.fsync(writer.fileno())
    os.replace(target + ".tmp", target)
    fsync_folder(os.path.dirname(target))


def fsync_folder(folder: str) -> None:
    """Flush the names in a folder to disk: files that were created, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_digest(content: bytes) -> str:
    """Return the blake2b digest (32 bytes, as hex) of some content."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def file_digest(file: BinaryIO, size: int | None = None) -> str:
    """Return the blake2b digest (32 bytes, as hex) of the next `size` bytes of an open file, or of its rest."""
    digest = hashlib.blake2b(digest_size=32)
    while size is None or size:
        block = file.read(BLOCK_BYTES if size is None else min(BLOCK_BYTES, size))
        if not block:
            break
        digest.update(block)
        size = None if size is None else size - len(block)
    return digest.hexdigest()
