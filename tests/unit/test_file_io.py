"""Append to files with a line cut short by a kill, and report a full disk."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from evener.core.base.file_io import LineFile


@pytest.mark.parametrize(("left", "kept"), [(b"", b""), (b"1\n2\n", b"1\n2\n"), (b"1\n2", b"1\n"), (b"1", b"")])
def test_partial_line_is_repaired_before_appending(tmp_path: Path, left: bytes, kept: bytes) -> None:
    """Whoever copies it as it grows sees that it is another file."""
    path = tmp_path / "steps" / "rank-0.jsonl"
    path.parent.mkdir()
    path.write_bytes(left)
    was = path.stat().st_ino
    with LineFile(path) as file:
        file.write(b"3\n")
    assert path.read_bytes() == kept + b"3\n"
    assert (path.stat().st_ino != was) == (left != kept)


def test_short_write_raises_no_space_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel's write(2) that comes back short nobody else would hear."""
    file = LineFile(tmp_path / "lines")
    monkeypatch.setattr(file, "_file", type("Short", (io.RawIOBase,), {"write": lambda self, lines: len(lines) - 1})())
    with pytest.raises(OSError, match="No space left") as raised:
        file.write(b"whole\n")
    assert raised.value.errno == errno.ENOSPC
