"""The register of what this user trusts on this machine: digests of what evener wrote here or the user approved.

    $XDG_STATE_HOME/evener/trusted     one digest a line, only ever appended to; readable by its owner alone

`core/run/trust.py` says which content of a run or a fleet file is registered.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

from evener.core.base.file_io import lock_file, open_file, state_folder

_LOCK = threading.Lock()
_unsaved: set[str] = set()  # what this process could not write to the register
_cached: tuple[object, frozenset[str]] = (None, frozenset())  # (identity of the register's file, its digests)
_write_error = ""


def digest(kind: str, content: bytes) -> str:
    """Return the digest of some content of a kind, such as "plan", as it stands in the register."""
    return hashlib.blake2b(kind.encode() + b"\0" + content, digest_size=32).hexdigest()


def is_trusted(one: str) -> bool:
    """Return whether a digest is in the register, or was added by this process, which could not write it there."""
    with _LOCK:
        return one in _read_register() or one in _unsaved


def trust(digests: Iterable[str]) -> None:
    """Add digests to the register. If it cannot be written, they count for this process alone: see `pop_write_error`.

    Safe from several processes: each entry is appended under a lock, and no process rewrites the file.
    """
    global _write_error
    with _LOCK:
        new = [one for one in dict.fromkeys(digests) if one not in _read_register()]
        try:
            if new:
                _append("".join(f"{one}\n" for one in new).encode())
        except OSError as error:
            _unsaved.update(new)
            _write_error = error.strerror or str(error)


def pop_write_error() -> str:
    """Return, once, why entries could not be written; "" if all were."""
    global _write_error
    reason, _write_error = _write_error, ""
    return reason


def _register_path() -> Path:
    return state_folder() / "trusted"


def _read_register() -> frozenset[str]:
    """Return the digests in the register; none if it cannot be read, or if another user could have written it."""
    global _cached
    try:
        with open_file(_register_path()) as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, _is_private(status))
            if _cached[0] != identity:
                lines = file.read().decode("ascii", "replace").split("\n") if _is_private(status) else []
                _cached = (identity, frozenset(lines[:-1]))
    except OSError:
        return frozenset()
    return _cached[1]


def _append(lines: bytes) -> None:
    """Append lines to the register, after the end of a line that a full disk cut short."""
    path = _register_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        path.parent.chmod(0o700)
    with lock_file(path, is_blocking=True, mode=0o600) as file:
        status = os.fstat(file.fileno())
        if not _is_private(status):
            raise OSError(errno.EPERM, "other users can write it, so it is not used")
        if status.st_size and os.pread(file.fileno(), 1, status.st_size - 1) != b"\n":
            lines = b"\n" + lines
        if file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file is a regular one that only this user can write."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
