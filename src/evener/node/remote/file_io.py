"""Read, replace and hash files of this host. Standard library only, Python 3.8 or newer, Linux or macOS."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from typing import BinaryIO

BLOCK_BYTES = 1 << 20


def absolute_path(path: str) -> str:
    """Return a path without "~" and relative parts."""
    return os.path.abspath(os.path.expanduser(path))


def open_regular_file(path: str) -> BinaryIO:
    """Open a regular file for reading; OSError for a pipe, which would block, or a device, which has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", path)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str) -> bytes | None:
    """Return the content of a file, or None if it cannot be read."""
    try:
        with open_regular_file(path) as file:
            return file.read()
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
    """Replace a file atomically. With `is_durable`, fsync it first: it is intact even after a power failure."""
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


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
