"""How do lines and tables fit where they are read: in a terminal of any width, in a pipe, in a log?

A terminal gets lines that end between words. A pipe gets every line whole, so that it can be searched, unless COLUMNS
says how wide its reader is. Colours are rich's, which knows NO_COLOR, FORCE_COLOR and TERM=dumb.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2  # between columns
LEAST_TEXT = 26  # columns; where less is left beside a row, its text stands below it
BELOW = 4  # columns, by which the second line of a row is indented
LONGEST = 100  # line of a sentence: the eye finds no way back from a longer one
RULE = 80  # the longest one of a pipe
UNLIMITED = 10_000


def console(*, stderr: bool = False, quiet: bool = False, markup: bool = False) -> Console:
    """Prints what it is given: nothing in it is taken for a number, for a smiley or, unless asked, for markup."""
    from rich.console import Console

    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")  # rich takes those for 80 columns, whatever they have
    size = shutil.get_terminal_size() if dumb else None
    return Console(
        stderr=stderr,
        quiet=quiet,
        width=size and size.columns,
        height=size and size.lines,
        highlight=False,
        emoji=False,
        markup=markup,
    )


def width_of(where: Console) -> int | None:
    """Columns of a line; None: as many as it likes."""
    return where.width if where.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def say(where: Console, text: str, *, indent: int = 0, style: str | None = None) -> None:
    """Print a sentence or more; of an item, which is indented, the lines after its first a little further."""
    width, margin = width_of(where), " " * indent
    first, *others = [text] if width is None else wrapped(text, min(width, LONGEST) - 2 * indent) or [""]
    for line in [first, *(margin + other for other in others)]:
        where.print(margin + line, style=style, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words; a word that is longer stays whole, too.

    >>> wrapped("end it: evener stop runs/a-long-name", 8)
    ['end it:', 'evener', 'stop', 'runs/a-long-name']
    """
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False)


def table(
    where: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str] = (),
    text: bool = False,
    spare: Sequence[str] = (),
    bold: int | None = None,
    styles: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print rows below titles. No cell is cut, none is broken.

    left: columns aligned left, as the first is. text: the last column has as many lines as it needs, beside its row, or
    below it where little room is left. spare: columns that are left out where all are too wide, the first one first;
    if that is not enough, each row begins on a line of its own. bold: the number of a row. styles: of cells that say
    this.
    """
    from rich.cells import cell_len
    from rich.text import Text

    width, grid = width_of(where), [titles, *rows]
    limit = width or UNLIMITED
    widths = [max(map(cell_len, column)) for column in zip(*grid, strict=True)]
    with_gaps = [widths[0], *(GAP + one for one in widths[1:])]
    shown = fitting(titles[: len(titles) - text], with_gaps, spare, width)
    total = sum(with_gaps[i] for i in shown)
    room = limit - total - GAP
    is_beside = text and room >= min(LEAST_TEXT, widths[-1])
    has_two_lines = total > limit
    across = total - has_two_lines * (widths[0] + GAP - BELOW)
    for number, row in enumerate(grid):
        line = Text(style="bold" if number == 0 or number - 1 == bold else "")
        for i in shown:
            blank = " " * (widths[i] - cell_len(row[i]))
            if i == 0 and has_two_lines:
                line.append(f"{row[i]}\n{'':{BELOW - GAP}}", styles.get(row[i]))
                continue
            line.append(" " * GAP if i else "")
            line.append(row[i] + blank if i == 0 or titles[i] in left else blank + row[i], styles.get(row[i]))
        if text and is_beside:
            line.append(" " * GAP + f"\n{'':{across + GAP}}".join(wrapped(row[-1], room)))
        line.rstrip()
        if text and not is_beside:
            line.append("".join(f"\n{'':{BELOW}}{one}" for one in wrapped(row[-1], limit - BELOW)))
        where.print(line, soft_wrap=True)
        if number == 0:
            rule = across + is_beside * (GAP + min(room, widths[-1]))
            where.print("─" * min(rule, width or RULE), style="dim")
    tell_spared(where, [title for title in spare if titles.index(title) not in shown])


def fitting(titles: Sequence[str], widths: Sequence[int], spare: Sequence[str], width: int | None) -> list[int]:
    """Numbers of the columns that stay where each takes so much of a line: the spare ones go, as many as it needs.

    >>> fitting(["size", "count", "time"], [8, 9, 8], ["count", "time"], 20)
    [0, 2]
    """
    shown = list(range(len(titles)))
    for title in spare:
        if sum(widths[i] for i in shown) > (width or UNLIMITED):
            shown.remove(titles.index(title))
    return shown


def tell_spared(where: Console, titles: Sequence[str]) -> None:
    """Name the columns that were left out."""
    if titles:
        say(where, f"not shown in {width_of(where)} columns: {', '.join(titles)}", style="dim")
