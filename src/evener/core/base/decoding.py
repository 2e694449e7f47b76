"""Decode JSON, MessagePack and TOML into typed values, thread-safely.

msgspec builds its description of a type at the first decoding and exposes the unfinished one to other threads: two that
decode the first `Facts` at once crash the process (SIGSEGV, msgspec 0.22). So decoders are created behind a lock.
"""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_LOCK = threading.RLock()


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...  # of several types: A | B
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder whose type description is complete, so that any thread may use it."""
    with _LOCK:
        return msgspec.json.Decoder(kind)


def from_json(text: bytes | str, kind: type[T]) -> T:
    """Decode JSON into a value of this type. Raise msgspec.MsgspecError, which says what is wrong."""
    return from_json_lines([text], kind)[0]


def from_json_lines(lines: Iterable[bytes | str], kind: type[T]) -> list[T]:
    """Decode each line of JSON. Raise msgspec.MsgspecError, which says what is wrong."""
    decoder = json_decoder(kind)
    try:
        return [decoder.decode(line) for line in lines]
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None


def from_msgpack(packed: bytes, kind: type[T]) -> T:
    """Decode MessagePack into a value of this type. Raise msgspec.MsgspecError, which says what is wrong."""
    with _LOCK:
        decoder = msgspec.msgpack.Decoder(kind)
    return decoder.decode(packed)


def from_toml(text: str) -> dict[str, Any]:
    """Decode TOML into tables. Raise tomllib.TOMLDecodeError, which says what is wrong."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # a number or date out of Python's range
        raise tomllib.TOMLDecodeError(str(error)) from None
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None


def from_builtins(tree: Any, kind: type[T], *, strict: bool = True) -> T:
    """Convert dicts, lists and scalars, as from TOML or the command line, into a value of this type.

    Raise msgspec.ValidationError, which says what is wrong.
    """
    with _LOCK:
        return msgspec.convert(tree, kind, strict=strict)
