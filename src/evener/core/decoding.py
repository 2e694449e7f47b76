"""How does what was written or told become a value of a type?

msgspec learns a type at its first decoding and shows the half-learned type to other threads: two that decode the
first `Facts` at once end the process (SIGSEGV, msgspec 0.22). So the first decoding of every type stands behind a lock.
"""

from __future__ import annotations

import threading
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
    return json_decoder(kind).decode(text)


def from_tree(tree: Any, kind: type[T], *, strict: bool = True) -> T:
    """The same of dicts, lists and numbers, as TOML, a terminal or a host gives them."""
    with _LOCK:
        return msgspec.convert(tree, kind, strict=strict)
