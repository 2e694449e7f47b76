"""A folder on a disk that loses power: what was not flushed by fsync is taken back, as POSIX allows.

A file's content is durable once the file was flushed, its name once the folder was. Both are recorded when `os.fsync`
is called, so that the code under test decides what survives. Linux alone.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest


class VolatileDisk:
    """A folder and what of it is durable; in the beginning all of it is."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}  # by inode
        self._entries: dict[int, dict[str, int]] = {}  # by inode of the folder: the inode of each name
        self._pins: dict[int, int] = {}  # descriptors of these inodes: the kernel uses no inode number again meanwhile
        self._real_fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)
        self.flush()

    def flush(self) -> None:
        """Make all of it durable."""
        for folder, _, files in os.walk(self._root):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                descriptor = os.open(path, os.O_RDONLY)
                self._record(descriptor)
                os.close(descriptor)

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(self._root):
            self._record(descriptor)
        else:
            self._real_fsync(descriptor)

    def _record(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._pin(status.st_ino, descriptor)
        if not stat.S_ISDIR(status.st_mode):
            self._contents[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            return
        entries = {}
        for entry in os.scandir(descriptor):
            entries[entry.name] = entry.inode()
            name = os.open(entry.name, os.O_RDONLY, dir_fd=descriptor)
            self._pin(entry.inode(), name)
            os.close(name)
        self._entries[status.st_ino] = entries
        self._forget_removed()

    def _pin(self, inode: int, descriptor: int) -> None:
        if inode not in self._pins:
            self._pins[inode] = os.dup(descriptor)

    def _forget_removed(self) -> None:
        """Forget the inodes that have no name, neither now nor durably."""
        named = {inode for entries in self._entries.values() for inode in entries.values()}
        for inode, pin in list(self._pins.items()):
            if inode not in named and os.fstat(pin).st_nlink == 0:
                os.close(pin)
                del self._pins[inode]
                self._contents.pop(inode, None)
                self._entries.pop(inode, None)

    def lose_power(self) -> None:
        """Put back what is durable: a file that was never flushed is empty, a folder's unflushed names are gone."""
        inode = self._root.stat().st_ino
        restored = self._root.with_name(f".{self._root.name}.restored")
        self._restore(inode, restored)
        self.close()
        for child in self._root.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        for child in restored.iterdir():
            child.rename(self._root / child.name)
        restored.rmdir()
        self.flush()

    def _restore(self, folder: int, to: Path) -> None:
        to.mkdir()
        for name, inode in self._entries.get(folder, {}).items():
            if stat.S_ISDIR(os.fstat(self._pins[inode]).st_mode):
                self._restore(inode, to / name)
            else:
                (to / name).write_bytes(self._contents.get(inode, b""))

    def close(self) -> None:
        """Forget all that was recorded."""
        for pin in self._pins.values():
            os.close(pin)
        self._pins, self._contents, self._entries = {}, {}, {}
