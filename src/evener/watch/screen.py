"""How does the page look in a terminal of 80 columns and 24 lines, over ssh? The same figures, and a curve of braille.

Parts of a step have a sign of their own beside their colour, for terminals and people that have or see none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from evener.core.units import count, seconds
from evener.report.figures import PART_COLOURS
from evener.report.smooth import smoothed
from evener.watch import view
from evener.watch.compare import row_of
from evener.watch.health import Health, health
from evener.watch.pages import SIGNS
from evener.watch.reader import Reader
from evener.watch.view import Strip

PARTS = {
    "compute_s": ("█", "computing"), "exposed_sync_s": ("▓", "sending"), "wait_s": ("░", "waiting"),
    "optimizer_s": ("▒", "update"), "data_s": ("·", "input"),
}  # fmt: skip
STYLES = {"good": "green", "done": "green", "warn": "yellow", "bad": "bold red", "idle": "dim"}
CURVE_LINES = 7
NAME = 12  # columns of a rank's name
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a cell's dots


def frame(readers: Mapping[str, Reader], width: int, height: int, now: float) -> Group:
    """What the terminal shows now: one run, or all of them in a table."""
    if len(readers) != 1:
        return Group(*_table(readers, width, height, now))
    [(name, reader)] = readers.items()
    return Group(*_of_one(name, reader, width, height, now))


def line(name: str, reader: Reader, now: float) -> str:
    """The same for a pipe or a log."""
    found, last, rate = health(reader, now), reader.curves.last, view.tokens_per_s(reader)
    words = [f"{name}: {found.word}, {found.told.removesuffix('.')}"]
    words += [f"loss {last.loss:.4f}"] if last is not None and last.loss is not None else []
    words += [f"{count(rate)} tokens/s"] if rate and not found.is_over else []
    left = view.left_s(reader)
    words += [f"left {seconds(left)}"] if left and not found.is_over else []
    return "  ".join([*words, *([found.hint] if found.hint else [])])


def _of_one(name: str, reader: Reader, width: int, height: int, now: float) -> list[Text]:
    found = health(reader, now)
    lines = [_cut(Text.assemble((name, "bold"), (f"  {' · '.join(view.what(reader))}", "dim")), width)]
    lines += _state(found, width)
    lines.append(_bar(view.progress(reader), view.left_s(reader), found, width))
    lines += _facts(reader, found, width)
    curve = _curve(reader, width)
    strips = view.strips(reader)
    num_ranks = max(1, min(len(strips), height - len(lines) - len(curve) - 6))
    ranks = _ranks(strips[:num_ranks], len(strips) - num_ranks, width)
    lines += [*curve, *ranks]
    left = height - len(lines) - 1
    lines += [_cut(Text(f"{told.since_start or '':>12}  {told.name}: {told.what}", "red" if told.is_bad else ""), width)
              for told in view.events(reader)[: max(0, left)]]  # fmt: skip
    return lines[: height - 1]


def _state(found: Health, width: int) -> list[Text]:
    """In two lines at most; of what is wrong in four."""
    text = Text.assemble((f"{SIGNS[found.mark]} {found.word}", STYLES[found.mark]), f"  {found.told}")
    if found.hint:
        text.append(f" {found.hint}")
    lines = _wrapped(text, width)[:3]
    if found.command:
        lines.append(_cut(Text(f"goes on with: {found.command}"), width))
    return lines


def _bar(share: float, left_s: float | None, found: Health, width: int) -> Text:
    told = f" {share:4.0%}" + (f"  left {seconds(left_s)}" if left_s is not None and not found.is_over else "")
    room = max(4, width - len(told) - 1)
    full = round(share * room)
    return Text.assemble(("━" * full, STYLES[found.mark]), ("─" * (room - full), "dim"), told)


def _facts(reader: Reader, found: Health, width: int) -> list[Text]:
    """Each figure with its name, as many in a line as there is room for."""
    words = [(fact.name, fact.value or "not measured", fact.remark) for fact in view.facts(reader, found)
             if fact.name not in ("left", "took")]  # fmt: skip
    told = [f"{name} {value}" + (f" ({remark})" if "predicted" in remark and "not" not in remark else "")
            for name, value, remark in words]  # fmt: skip
    lines: list[str] = [""]
    for one in told:
        if lines[-1] and len(lines[-1]) + 3 + len(one) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + one
    return [_cut(Text(one), width) for one in lines if one]


def _curve(reader: Reader, width: int) -> list[Text]:
    """The loss, smoothed, over steps; nothing of two steps or less."""
    points = reader.curves.shared["loss"].points()
    if len(points) < 3:
        return []
    values = smoothed(points.means)
    labels = [f"{max(values):.3g}", f"{min(values):.3g}"]
    margin = max(map(len, labels)) + 1
    cells = plotted(points.steps, values, max(8, width - margin - 1), CURVE_LINES)
    lines = [Text.assemble((f"{label:>{margin - 1}} ", "dim"), (row, "bright_blue"))
             for label, row in zip([labels[0], *[""] * (CURVE_LINES - 2), labels[1]], cells, strict=True)]  # fmt: skip
    return [Text("loss, smoothed, over steps", "dim"), *lines]


def plotted(xs: Sequence[float], ys: Sequence[float], width: int, height: int) -> list[str]:
    """A curve in so many columns and lines of braille, whose cells have 2 × 4 dots.

    >>> plotted([0, 1, 2, 3], [0, 1, 2, 3], 2, 1)
    ['⡠⠊']
    """
    columns, rows = 2 * width, 4 * height
    low, high = min(ys), max(ys)
    at = np.interp(np.linspace(xs[0], xs[-1], columns), xs, ys)
    scaled = (at - low) / (high - low) if high > low else np.full(columns, 0.5)
    tops = np.rint((1 - scaled) * (rows - 1)).astype(int).tolist()
    cells = [[0] * width for _ in range(height)]
    before = tops[0]
    for column, top in enumerate(tops):
        step = 1 if top > before else -1
        for row in range(before + step, top, step):
            cells[row // 4][column // 2] |= BRAILLE[row % 4][column % 2]  # what is steep has no gap
        cells[top // 4][column // 2] |= BRAILLE[top % 4][column % 2]
        before = top
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _ranks(strips: Sequence[Strip], num_more: int, width: int) -> list[Text]:
    """A bar each of its newest steps' mean, part after part, to one scale."""
    if not strips:
        return []
    longest = max(strip.now.total_s for strip in strips) or 1.0
    room, lines = max(8, width - NAME - 11), []
    for strip in strips:
        bar, drawn, upto = Text(), 0, 0.0
        for part, (sign, _) in PARTS.items():
            upto += getattr(strip.now, part) or 0.0
            num = round(room * upto / longest) - drawn
            bar.append(sign * num, PART_COLOURS[part])
            drawn += num
        bar.append(" " * (room - drawn))
        lines.append(Text.assemble(f"{strip.name[:NAME]:{NAME}} ", bar, f" {seconds(strip.now.total_s):>8}"))
    legend = Text("a step: ", "dim")
    for part, (sign, name) in PARTS.items():
        if any(getattr(strip.now, part) for strip in strips):
            legend.append(f"{sign} ", PART_COLOURS[part])
            legend.append(f"{name}  ", "dim")
    lines.append(_cut(legend, width))
    if num_more:
        lines.append(Text(f"and {num_more} more ranks", "dim"))
    return lines


LEAST_NAME = 12  # columns of a run's name; of the others the last go where there is less


def _table(readers: Mapping[str, Reader], width: int, height: int, now: float) -> list[Text]:
    """A line a run, the newest first."""
    rows = sorted((row_of(key, reader, now) for key, reader in readers.items()), key=lambda row: -row["began"])
    if not rows:
        return [Text("no runs yet")]
    num = height - 3 if len(rows) > height - 2 else len(rows)
    columns = [("state", [f"{row['sign']} {row['health'].word}" for row in rows[:num]])]
    columns += [(title, [row[key] for row in rows[:num]]) for title, key in
                (("steps", "steps"), ("loss", "loss"), ("tokens/s", "rate"), ("left", "left"))]  # fmt: skip
    widths = [max(map(len, [title, *cells])) for title, cells in columns]
    while len(widths) > 1 and sum(widths) + 2 * len(widths) + LEAST_NAME > width:
        widths.pop()
    room = min(max(len(row["key"]) for row in rows[:num]), width - sum(widths) - 2 * len(widths))
    lines = [Text(f"{'run':{room}}", "bold")] + [_cut(Text(f"{row['key']:{room}}"), room) for row in rows[:num]]
    for i, (size, (title, cells)) in enumerate(zip(widths, columns, strict=False)):
        lines[0].append(f"  {title:{'<' if i == 0 else '>'}{size}}")
        for line, cell, row in zip(lines[1:], cells, rows, strict=False):
            line.append(f"  {cell:{'<' if i == 0 else '>'}{size}}", STYLES[row["health"].mark] if i == 0 else "")
    return lines + [Text(f"and {len(rows) - num} more", "dim")] * (num < len(rows))


def _wrapped(text: Text, width: int) -> list[Text]:
    """Lines of whole words."""
    return list(text.wrap(Console(width=width), width))


def _cut(text: Text, width: int) -> Text:
    """In one line."""
    text.truncate(width, overflow="ellipsis")
    return text
