"""Is a file that evener wrote one that this evener reads? Its format is looked at before anything else in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from evener.core.decoding import from_json, lines_from_json
from evener.core.errors import CheckpointError
from evener.core.files import open_file, read_file

T = TypeVar("T")


class _Format(msgspec.Struct):
    format: int


def from_stored(text: bytes, kind: type[T], form: int, path: Path, hints: Mapping[int, str] | None = None) -> T:
    """What the JSON of a file of this format holds; CheckpointError where it is damaged, or of another one, of which
    a hint may say what to do.
    """
    try:
        if (found := from_json(text, _Format).format) != form:
            raise CheckpointError(
                f"{path}: format {found}, this evener reads {form}", hint=(hints or {}).get(found, "")
            )
        return from_json(text, kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def read_stored(path: Path, kind: type[T]) -> T:
    """What a file of JSON holds that one process of evener's wrote for another; CheckpointError where it is damaged, or
    can't be read.
    """
    try:
        return from_json(read_file(path), kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def stored_lines(path: Path, kind: type[T], tail_bytes: int | None = None) -> list[T]:
    """What a file of JSON lines holds [all], nothing where there is none; CheckpointError where it is damaged. A
    half-written last line, which a kill leaves, is passed over.
    """
    try:
        lines = _tail(path, tail_bytes) if tail_bytes else read_file(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        return lines_from_json(lines[:-1], kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def _tail(path: Path, num_bytes: int) -> list[bytes]:
    """Its last lines, with what stands behind them."""
    with open_file(path) as file:
        begin = max(0, os.fstat(file.fileno()).st_size - num_bytes)
        file.seek(begin)
        lines = file.read().split(b"\n")
    return lines[1:] if begin else lines
