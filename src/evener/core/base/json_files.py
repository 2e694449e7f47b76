"""Read the JSON files that evener has written; the format number is checked before any other key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from evener.core.base.decoding import from_json, from_json_lines
from evener.core.base.errors import CheckpointError
from evener.core.base.file_io import MAX_FILE_BYTES, read_file, read_last_lines, read_lines

T = TypeVar("T")


class _FormatHeader(msgspec.Struct):
    format: int


def decode_versioned_json(
    text: bytes, kind: type[T], expected_format: int, path: Path, hints: Mapping[int, str] | None = None
) -> T:
    """Decode the JSON of a file of the expected format. `hints` says for other formats what the user can do.

    Raise CheckpointError if the file is damaged or of another format.
    """
    try:
        if (actual := from_json(text, _FormatHeader).format) != expected_format:
            raise CheckpointError(
                f"{path}: format {actual}, this evener reads {expected_format}", hint=(hints or {}).get(actual, "")
            )
        return from_json(text, kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def read_versioned_json(path: Path, kind: type[T], expected_format: int) -> T:
    """Read a JSON file of the expected format. Raise CheckpointError if that fails."""
    try:
        return decode_versioned_json(read_file(path), kind, expected_format, path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def read_json(path: Path, kind: type[T], max_bytes: int = MAX_FILE_BYTES) -> T:
    """Read a JSON file that one evener process wrote for another. Raise CheckpointError if that fails."""
    try:
        return from_json(read_file(path, max_bytes), kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def read_json_lines(path: Path, kind: type[T], tail_bytes: int | None = None) -> list[T]:
    """Read the lines of a JSON lines file, or only those in its last `tail_bytes`; none if the file does not exist.

    A half-written last line, which a kill leaves, is ignored. Raise CheckpointError if the file is damaged.
    """
    try:
        return from_json_lines(read_last_lines(path, tail_bytes) if tail_bytes else read_lines(path), kind)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
