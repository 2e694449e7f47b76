"""How does what was written or told become a value of a type?

msgspec learns a type at its first decoding and shows the half-learned type to other threads: two that decode the
first `Facts` at once end the process (SIGSEGV, msgspec 0.22). So the first decoding of every type stands behind a lock.
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
    """A decoder that has learned its type: any thread may use it."""
    with _LOCK:
        return msgspec.json.Decoder(kind)


def from_json(text: bytes | str, kind: type[T]) -> T:
    """The value of this type that the text holds; msgspec.MsgspecError says what is wrong with it."""
    return lines_from_json([text], kind)[0]


def lines_from_json(lines: Iterable[bytes | str], kind: type[T]) -> list[T]:
    """The same of each of these."""
    decoder = json_decoder(kind)
    try:
        return [decoder.decode(line) for line in lines]
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None


def from_msgpack(packed: bytes, kind: type[T]) -> T:
    """The same of MessagePack."""
    with _LOCK:
        decoder = msgspec.msgpack.Decoder(kind)
    return decoder.decode(packed)


def from_toml(text: str) -> dict[str, Any]:
    """The tables of a text; tomllib.TOMLDecodeError says what is wrong with it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # of a number or a date that Python cannot hold
        raise tomllib.TOMLDecodeError(str(error)) from None
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None


def from_tree(tree: Any, kind: type[T], *, strict: bool = True) -> T:
    """The same of dicts, lists and numbers, as TOML, a terminal or a host gives them."""
    with _LOCK:
        return msgspec.convert(tree, kind, strict=strict)
