"""Print text whose control characters are escaped: it may come from a run directory, a host or a program there.

A terminal obeys what it is sent: an escape sequence in a host's name or in a log can set the title, move the cursor
over an earlier line, or write to the clipboard. All output on plain streams goes through `print_escaped`, and all
output of rich through a console of cli/terminal.py.
"""

from __future__ import annotations

import re
from typing import TextIO

# C0 and C1 but newline and tab, what turns the direction of text or is invisible, and halves of a UTF-16 pair
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def escape_controls(text: str) -> str:
    r"""Return text with its control characters written as Python escapes; newlines and tabs stay.

    >>> print(escape_controls("\x1b]0;title\x07 caf\u00e9 \u202egpj.exe"))
    \x1b]0;title\x07 café \u202egpj.exe
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def print_escaped(*values: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print like `print`, with control characters escaped."""
    print(*(escape_controls(str(value)) for value in values), end=end, file=file, flush=flush)
