"""Print lines and tables that fit their output: a terminal of any width, a pipe, or a log.

On a terminal lines are wrapped between words. In a pipe lines are not wrapped, so that they can be searched, unless
COLUMNS sets a width. Colors come from rich, which respects NO_COLOR, FORCE_COLOR and TERM=dumb.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from evener.core.base.escaped_output import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from evener.core.cluster.finding import Finding

SEVERITY_COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}
COLUMN_GAP = 2  # between columns
MIN_TEXT_WIDTH = 26  # columns; if less is left to the right of a row, its text goes below it
CONTINUATION_INDENT = 4  # columns, indent of the second line of a row
MAX_TEXT_WIDTH = 100  # columns of prose: longer lines are hard to read
MAX_RULE_WIDTH = 80  # columns of the rule below titles in a pipe, at most
UNLIMITED_WIDTH = 10_000


@functools.cache
def escaped_console_class() -> type[Console]:
    """Return a class of rich consoles that escape the control characters of all text, but not those that rich adds."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class EscapedConsole(Console):
        def print(self, *objects: Any, **settings: Any) -> None:
            # rich itself drops some control characters without a trace
            texts = (escape_controls(item) if isinstance(item, str) else item for item in objects)
            super().print(*texts, **settings)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=escape_controls(segment.text))

    return EscapedConsole


def is_interactive() -> bool:
    """Return whether a person can see a question and answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def make_console(*, stderr: bool = False, quiet: bool = False, markup: bool = False) -> Console:
    """Make a rich console that prints text verbatim: without highlighting, emoji or, by default, markup."""
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")  # rich assumes 80 columns for these
    size = shutil.get_terminal_size() if dumb else None
    return escaped_console_class()(
        stderr=stderr,
        quiet=quiet,
        width=size and size.columns,
        height=size and size.lines,
        highlight=False,
        emoji=False,
        markup=markup,
    )


def line_width(console: Console) -> int | None:
    """Return the columns of a line; None: unlimited."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def print_text(console: Console, text: str, *, indent: int = 0, style: str | None = None) -> None:
    """Print wrapped text; with `indent`, the lines after the first are indented further."""
    width, margin = line_width(console), " " * indent
    first, *others = [text] if width is None else wrap_words(text, min(width, MAX_TEXT_WIDTH) - 2 * indent) or [""]
    for line in [first, *(margin + other for other in others)]:
        console.print(margin + line, style=style, soft_wrap=True)


def wrap_words(text: str, width: int) -> list[str]:
    """Wrap text at spaces; a word longer than the width is not broken.

    >>> wrap_words("end it: evener stop runs/a-long-name", 8)
    ['end it:', 'evener', 'stop', 'runs/a-long-name']
    """
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False)


def print_table(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left_aligned: Collection[str] = (),
    wrap_last: bool = False,
    droppable: Sequence[str] = (),
    bold_row: int | None = None,
    styles: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print rows below titles. Cells are never truncated or broken.

    left_aligned: columns aligned left, like the first. wrap_last: wrap the last column, beside its row, or below it if
    little room is left. droppable: columns to omit, in this order, while the table is too wide; if that is not enough,
    the first cell gets its own line. bold_row: the number of a bold row. styles: the style of a cell by its text.
    """
    from rich.cells import cell_len
    from rich.text import Text

    width = line_width(console)
    grid = [
        [cell.replace("\n", r"\n").replace("\t", r"\t") for cell in row] for row in (titles, *rows)
    ]  # no forged rows
    limit = width or UNLIMITED_WIDTH
    widths = [max(map(cell_len, column)) for column in zip(*grid, strict=True)]
    with_gaps = [widths[0], *(COLUMN_GAP + cells for cells in widths[1:])]
    shown = fit_columns(titles[: len(titles) - wrap_last], with_gaps, droppable, width)
    total = sum(with_gaps[i] for i in shown)
    room = limit - total - COLUMN_GAP
    is_beside = wrap_last and room >= min(MIN_TEXT_WIDTH, widths[-1])
    has_two_lines = total > limit
    across = total - has_two_lines * (widths[0] + COLUMN_GAP - CONTINUATION_INDENT)
    for number, row in enumerate(grid):
        line = Text(style="bold" if number == 0 or number - 1 == bold_row else "")
        for i in shown:
            blank = " " * (widths[i] - cell_len(row[i]))
            if i == 0 and has_two_lines:
                line.append(f"{row[i]}\n{'':{CONTINUATION_INDENT - COLUMN_GAP}}", styles.get(row[i]))
                continue
            line.append(" " * COLUMN_GAP if i else "")
            line.append(row[i] + blank if i == 0 or titles[i] in left_aligned else blank + row[i], styles.get(row[i]))
        if wrap_last and is_beside:
            line.append(" " * COLUMN_GAP + f"\n{'':{across + COLUMN_GAP}}".join(wrap_words(row[-1], room)))
        line.rstrip()
        if wrap_last and not is_beside:
            line.append(
                "".join(
                    f"\n{'':{CONTINUATION_INDENT}}{part}" for part in wrap_words(row[-1], limit - CONTINUATION_INDENT)
                )
            )
        console.print(line, soft_wrap=True)
        if number == 0:
            rule = across + is_beside * (COLUMN_GAP + min(room, widths[-1]))
            console.print("─" * min(rule, width or MAX_RULE_WIDTH), style="dim")
    print_omitted_columns(console, [title for title in droppable if titles.index(title) not in shown])


def fit_columns(titles: Sequence[str], widths: Sequence[int], droppable: Sequence[str], width: int | None) -> list[int]:
    """Return the indices of the columns that fit: droppable ones are omitted in order while the line is too wide.

    >>> fit_columns(["size", "count", "time"], [8, 9, 8], ["count", "time"], 20)
    [0, 2]
    """
    shown = list(range(len(titles)))
    for title in droppable:
        if sum(widths[i] for i in shown) > (width or UNLIMITED_WIDTH):
            shown.remove(titles.index(title))
    return shown


def print_omitted_columns(console: Console, titles: Sequence[str]) -> None:
    """Print the titles of the columns that were omitted."""
    if titles:
        print_text(console, f"not shown in {line_width(console)} columns: {', '.join(titles)}", style="dim")


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print each finding with its host and evidence, and its fix on one line, so that it can be pasted."""
    for finding in findings:
        where = " → ".join(name for name in (finding.host, finding.peer) if name)
        print_text(console, f"{finding.severity}: {finding.check}{'  ' + where if where else ''}: {finding.evidence}")
        console.print(f"hint:  {finding.fix}", soft_wrap=True)
