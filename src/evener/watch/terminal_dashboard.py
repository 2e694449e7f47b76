"""Terminal dashboard for 80 columns and 24 lines, over ssh: the page's figures, and the loss curve in braille.

Each phase of a step has a symbol as well as a colour, for terminals without colours and people who do not see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from evener.core.base.units import format_count, format_seconds
from evener.report.draw.run_charts import PHASE_COLOURS
from evener.report.draw.smoothing import local_linear_fit
from evener.report.read.run_state import MARK_SYMBOLS
from evener.watch import run_view
from evener.watch.multi_run import overview_row
from evener.watch.run_health import RunHealth, assess_health
from evener.watch.run_reader import RunReader
from evener.watch.run_view import StepStrip

PHASE_SYMBOLS = {
    "compute_s": ("█", "computing"), "exposed_sync_s": ("▓", "sending"), "wait_s": ("░", "waiting"),
    "optimizer_s": ("▒", "update"), "data_s": ("·", "input"),
}  # fmt: skip
MARK_STYLES = {"good": "green", "done": "green", "warn": "yellow", "bad": "bold red", "idle": "dim"}
CURVE_LINES = 7
RANK_NAME_WIDTH = 12  # columns for a rank's name
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a cell's dots


def render_frame(readers: Mapping[str, RunReader], width: int, height: int, now: float) -> Group:
    """Render one run, or a table of several."""
    if len(readers) != 1:
        return Group(*_overview_lines(readers, width, height, now))
    [(name, reader)] = readers.items()
    return Group(*_run_lines(name, reader, width, height, now))


def status_line(name: str, reader: RunReader, now: float) -> str:
    """Return the status of a run as one line, for a pipe or a log."""
    run_health, last, rate = assess_health(reader, now), reader.curves.last_record, run_view.tokens_per_s(reader)
    fields = [f"{name}: {run_health.state}, {run_health.message.removesuffix('.')}"]
    fields += [f"loss {last.loss:.4f}"] if last is not None and last.loss is not None else []
    fields += [_format_rate(reader, rate)] if rate and not run_health.is_over else []
    remaining_s = run_view.time_left_s(reader)
    fields += [f"left {format_seconds(remaining_s)}"] if remaining_s and not run_health.is_over else []
    return "  ".join([*fields, *([run_health.hint] if run_health.hint else [])])


def _format_rate(reader: RunReader, rate: float) -> str:
    unit = reader.manifest.counted_unit if reader.manifest is not None else "tokens"
    return f"{format_count(rate)} {unit}/s"


def _run_lines(name: str, reader: RunReader, width: int, height: int, now: float) -> list[Text]:
    run_health = assess_health(reader, now)
    lines = [
        _truncate(Text.assemble((name, "bold"), (f"  {' · '.join(run_view.run_descriptions(reader))}", "dim")), width)
    ]
    lines += _state_lines(run_health, width)
    share = run_view.progress_share(reader)
    if share is not None:
        lines.append(_progress_line(share, run_view.time_left_s(reader), run_health, width))
    lines += _key_figure_lines(reader, run_health, width)
    curve = _loss_curve_lines(reader, width)
    strips = run_view.rank_strips(reader)
    num_ranks = max(1, min(len(strips), height - len(lines) - len(curve) - 6))
    ranks = _rank_lines(strips[:num_ranks], len(strips) - num_ranks, width)
    lines += [*curve, *ranks]
    num_events = height - len(lines) - 1
    lines += [_truncate(Text(f"{event.since_start or '':>12}  {event.name}: {event.description}",
                        "red" if event.is_bad else ""), width)
              for event in run_view.event_texts(reader)[: max(0, num_events)]]  # fmt: skip
    return lines[: height - 1]


def _state_lines(health: RunHealth, width: int) -> list[Text]:
    """Render state, message and hint in at most three lines, and the command that resumes the run in one."""
    text = Text.assemble(
        (f"{MARK_SYMBOLS[health.mark]} {health.state}", MARK_STYLES[health.mark]), f"  {health.message}"
    )
    if health.hint:
        text.append(f" {health.hint}")
    lines = _wrap(text, width)[:3]
    if health.command:
        lines.append(_truncate(Text(f"resume with: {health.command}"), width))
    return lines


def _progress_line(share: float, left_s: float | None, health: RunHealth, width: int) -> Text:
    label = f" {share:4.0%}" + (f"  left {format_seconds(left_s)}" if left_s is not None and not health.is_over else "")
    room = max(4, width - len(label) - 1)
    full = round(share * room)
    return Text.assemble(("━" * full, MARK_STYLES[health.mark]), ("─" * (room - full), "dim"), label)


def _key_figure_lines(reader: RunReader, health: RunHealth, width: int) -> list[Text]:
    """Render each key figure with its name, as many per line as fit."""
    figures = [(fact.name, fact.value or "not measured", fact.note) for fact in run_view.key_figures(reader, health)
             if fact.name not in ("left", "took")]  # fmt: skip
    texts = [f"{name} {value}" + (f" ({remark})" if "predicted" in remark and "not" not in remark else "")
            for name, value, remark in figures]  # fmt: skip
    lines: list[str] = [""]
    for text in texts:
        if lines[-1] and len(lines[-1]) + 3 + len(text) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + text
    return [_truncate(Text(line), width) for line in lines if line]


def _loss_curve_lines(reader: RunReader, width: int) -> list[Text]:
    """Render the smoothed loss over steps; nothing for fewer than three points."""
    points = reader.curves.shared_series["loss"].points()
    if len(points) < 3:
        return []
    values = local_linear_fit(points.means)
    labels = [f"{max(values):.3g}", f"{min(values):.3g}"]
    margin = max(map(len, labels)) + 1
    cells = braille_plot(points.steps, values, max(8, width - margin - 1), CURVE_LINES)
    lines = [Text.assemble((f"{label:>{margin - 1}} ", "dim"), (row, "bright_blue"))
             for label, row in zip([labels[0], *[""] * (CURVE_LINES - 2), labels[1]], cells, strict=True)]  # fmt: skip
    return [Text("loss, smoothed, over steps", "dim"), *lines]


def braille_plot(xs: Sequence[float], ys: Sequence[float], width: int, height: int) -> list[str]:
    """Draw a curve as `height` lines of `width` braille cells, each of 2 × 4 dots.

    >>> braille_plot([0, 1, 2, 3], [0, 1, 2, 3], 2, 1)
    ['⡠⠊']
    """
    columns, rows = 2 * width, 4 * height
    low, high = min(ys), max(ys)
    at = np.interp(np.linspace(xs[0], xs[-1], columns), xs, ys)
    scaled = (at - low) / (high - low) if high > low else np.full(columns, 0.5)
    tops = np.rint((1 - scaled) * (rows - 1)).astype(int).tolist()
    cells = [[0] * width for _ in range(height)]
    previous = tops[0]
    for column, top in enumerate(tops):
        step = 1 if top > previous else -1
        for row in range(previous + step, top, step):
            cells[row // 4][column // 2] |= BRAILLE[row % 4][column % 2]  # steep segments have no gaps
        cells[top // 4][column // 2] |= BRAILLE[top % 4][column % 2]
        previous = top
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _rank_lines(strips: Sequence[StepStrip], num_more: int, width: int) -> list[Text]:
    """Render a bar per rank, to one scale: the mean of its newest steps, phase by phase."""
    if not strips:
        return []
    longest = max(strip.mean_cost.total_s for strip in strips) or 1.0
    room, lines = max(8, width - RANK_NAME_WIDTH - 11), []
    for strip in strips:
        bar, drawn, upto = Text(), 0, 0.0
        for phase, (symbol, _) in PHASE_SYMBOLS.items():
            upto += getattr(strip.mean_cost, phase) or 0.0
            num = round(room * upto / longest) - drawn
            bar.append(symbol * num, PHASE_COLOURS[phase])
            drawn += num
        bar.append(" " * (room - drawn))
        lines.append(
            Text.assemble(
                f"{strip.name[:RANK_NAME_WIDTH]:{RANK_NAME_WIDTH}} ",
                bar,
                f" {format_seconds(strip.mean_cost.total_s):>8}",
            )
        )
    legend = Text("a step: ", "dim")
    for phase, (symbol, name) in PHASE_SYMBOLS.items():
        if any(getattr(strip.mean_cost, phase) for strip in strips):
            legend.append(f"{symbol} ", PHASE_COLOURS[phase])
            legend.append(f"{name}  ", "dim")
    lines.append(_truncate(legend, width))
    if num_more:
        lines.append(Text(f"and {num_more} more ranks", "dim"))
    return lines


MIN_RUN_NAME_WIDTH = 12  # columns for a run's name; where space is short, other columns are dropped from the right


def _overview_lines(readers: Mapping[str, RunReader], width: int, height: int, now: float) -> list[Text]:
    """Render one line per run, newest first."""
    rows = sorted((overview_row(key, reader, now) for key, reader in readers.items()), key=lambda row: -row["began"])
    if not rows:
        return [Text("no runs yet")]
    num = height - 3 if len(rows) > height - 2 else len(rows)
    columns = [("state", [f"{row['sign']} {row['health'].state}" for row in rows[:num]])]
    columns += [(title, [row[key] for row in rows[:num]]) for title, key in
                (("steps", "steps"), ("loss", "loss"), ("tokens/s", "rate"), ("left", "left"))]  # fmt: skip
    widths = [max(map(len, [title, *cells])) for title, cells in columns]
    while len(widths) > 1 and sum(widths) + 2 * len(widths) + MIN_RUN_NAME_WIDTH > width:
        widths.pop()
    room = min(max(len(row["key"]) for row in rows[:num]), width - sum(widths) - 2 * len(widths))
    lines = [Text(f"{'run':{room}}", "bold")] + [_truncate(Text(f"{row['key']:{room}}"), room) for row in rows[:num]]
    for i, (size, (title, cells)) in enumerate(zip(widths, columns, strict=False)):
        lines[0].append(f"  {title:{'<' if i == 0 else '>'}{size}}")
        for line, cell, row in zip(lines[1:], cells, rows, strict=False):
            line.append(f"  {cell:{'<' if i == 0 else '>'}{size}}", MARK_STYLES[row["health"].mark] if i == 0 else "")
    return lines + [Text(f"and {len(rows) - num} more", "dim")] * (num < len(rows))


def _wrap(text: Text, width: int) -> list[Text]:
    """Wrap text between words."""
    return list(text.wrap(Console(width=width), width))


def _truncate(text: Text, width: int) -> Text:
    """Truncate text to one line."""
    text.truncate(width, overflow="ellipsis")
    return text
