"""Quote what stands in a command that is printed for a user to type: the one way in which messages do so.

The result is one line without control characters, for bash, zsh and ksh. Bytes of a path that are not UTF-8 are kept.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable


def quote_word(value: object) -> str:
    r"""Return a path or name as one operand of a command: one that begins with "-" gets "./" before it.

    >>> print(*map(quote_word, ["runs/a", "my lab's $(x)", "-rf", "two\nlines", "caf\udce9"]))
    runs/a 'my lab'"'"'s $(x)' ./-rf $'two\nlines' $'caf\351'
    """
    text = str(value)
    return _quote(f"./{text}" if text.startswith("-") else text)


def quote_command(argv: Iterable[str]) -> str:
    """Return a command line of these words.

    >>> quote_command(["evener", "report", "--out", "a b"])
    "evener report --out 'a b'"
    """
    return " ".join(map(_quote, argv))


def _quote(text: str) -> str:
    if text.startswith("="):  # zsh would replace =ls by the path of ls
        return f"''{shlex.quote(text)}"
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escape, text))}'"


def _escape(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character == "\n":
        return "\\n"
    if character.isprintable():
        return character
    # Three octal digits end the escape, as two hexadecimal ones do not where a digit follows.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
