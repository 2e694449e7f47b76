"""Which runs belong to a bench? What its folder says, read with care: a person may have touched it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from evener.core.decoding import from_json
from evener.core.errors import CheckpointError


class Stored(Protocol):
    """Whatever says of which format it is."""

    @property
    def format(self) -> int:
        """Of the file."""


File = TypeVar("File", bound=Stored)


def read_stored(path: Path, kind: type[File], form: int) -> File:
    """What a JSON file of this format holds; CheckpointError where it is damaged, or of another one."""
    try:
        found = from_json(path.read_bytes(), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if found.format != form:
        raise CheckpointError(f"{path}: format {found.format}, this evener reads {form}")
    return found
