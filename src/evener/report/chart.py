"""Draw charts as SVG and HTML that fit any width, light and dark pages, and need no library.

Lines are SVG, stretched to the available width. Labels are HTML text, placed in per cent, and so neither stretched nor
cut off. `page.js` shows the values under the pointer: it reads them off the lines.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from evener.core.units import count, percentile, seconds

UNITS = 10_000  # SVG coordinates along either axis
MOST_TICKS = 5
MOST_ROWS = 10  # of a chart's data table
IN_SIGHT = 0.98  # quantile of a band that the y axis covers: rarer values may lie beyond the edge
FURTHEST = 1e300  # magnitude that a scale is clipped to: sums and differences of such numbers are still finite


@dataclass(frozen=True)
class Line:
    """A named series of points: a line, or dots alone if not `joined`."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    dots: bool = False
    joined: bool = True
    faint: bool = False


@dataclass(frozen=True)
class Band:
    """The range from the smallest to the largest value that each point of a line stands for."""

    colour: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines over one x axis; stacked, each is the upper edge of a filled area."""

    lines: list[Line]
    x_title: str
    y_title: str
    y_range: tuple[float, float] | None = None  # None: the range of the values
    x_ticks: list[float] | None = None
    marks: dict[str, float] = field(default_factory=dict)  # named horizontal levels
    stacked: bool = False
    bands: list[Band] = field(default_factory=list)  # behind the lines


@dataclass(frozen=True)
class Bars:
    """One bar per label, made of segments end to end."""

    labels: list[str]
    parts: dict[str, list[float | None]]
    colours: dict[str, str]
    told: Callable[[float], str] = seconds
    predicted: list[float | None] | None = None  # a mark on each bar


@dataclass(frozen=True)
class Dots:
    """Named dots, with the names in a column on the right, ordered by height."""

    points: list[tuple[str, float, float]]
    colour: str
    x_title: str
    y_title: str


@dataclass(frozen=True)
class Layers:
    """Charts of which a selector shows one at a time."""

    charts: dict[str, Chart]


@dataclass(frozen=True)
class Piece:
    """One bar of a GanttChart, in the unit of its time axis."""

    name: str
    colour: str
    begin: float
    end: float
    title: str  # tooltip


@dataclass(frozen=True)
class Lanes:
    """Rows of bars over one time axis; a thin row belongs to the row above."""

    rows: list[tuple[str, bool, list[Piece]]]  # (label, is_thin, bars)
    x_title: str
    legend: dict[str, str]  # colour by name, in this order


Figure = Chart | Bars | Dots | Layers | Lanes


def draw(figure: Figure, *, in_figures: bool = False) -> Markup:
    """Return the chart with its legend; `with_table` adds a table of some points of each line, for screen readers."""
    if isinstance(figure, Layers):
        return _draw_layers(figure, in_figures=in_figures)
    if isinstance(figure, Chart) and in_figures:
        return _draw_chart(figure) + _in_figures(figure)
    if isinstance(figure, Lanes):
        return _draw_lanes(figure)
    if isinstance(figure, Bars):
        return _draw_bars(figure)
    return _draw_dots(figure) if isinstance(figure, Dots) else _draw_chart(figure)


def ticks(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Return about `max_ticks` round numbers from `low` to `high`.

    >>> ticks(0.0, 59.0), ticks(3.51, 4.18)
    ([0.0, 20.0, 40.0], [3.6, 3.8, 4.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{(first + i) * step:.12g}") for i in range(math.floor(high / step + 1e-9) - first + 1)]


def tick_text(value: float) -> str:
    """Format the number of an axis tick.

    >>> tick_text(15000.0), tick_text(0.0006), tick_text(3.6), tick_text(2.5e6)
    ('15k', '0.0006', '3.6', '2.5M')
    """
    for factor, prefix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{prefix}"
    return f"{value:.4g}"


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Maps values to SVG coordinates."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[int, int]:
        """Return coordinates from the top left corner; clip y to the chart."""
        return round(UNITS * _part(x, self.x)), round(UNITS * (1 - min(1.0, max(0.0, _part(y, self.y)))))

    def path(self, line: Line) -> str:
        """Return the SVG path of a line; a dot is a line of zero length with round ends."""
        points = [self.at(x, y) for x, y in zip(line.x, line.y, strict=True)]
        if not line.joined:
            return "".join(f"M{x} {y}h0" for x, y in points)
        return "M" + "L".join(f"{x} {y}" for x, y in points) if points else ""


def _part(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return (value - low) / (high - low) if high > low else 0.5


def _scale_of(chart: Chart) -> _Scale:
    xs = [x for line in chart.lines for x in line.x] or [0.0]
    ys = [y for line in chart.lines for y in line.y] or [0.0, 1.0]
    ys += [percentile(of_band, part) for band in chart.bands if band.x
           for of_band, part in ((band.low, 1 - IN_SIGHT), (band.high, IN_SIGHT))]  # fmt: skip
    low, high = (min(FURTHEST, max(-FURTHEST, y)) for y in (min(ys), max(ys)))
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return _Scale((min(xs), max(xs)), chart.y_range or (low - room, high + room))


def _draw_chart(chart: Chart) -> Markup:
    scale = _scale_of(chart)
    if chart.stacked:
        drawn = [_draw_area(top, scale) for top in reversed(_stacked(chart.lines))]
    else:
        drawn = [_draw_band(band, scale) for band in chart.bands]
        drawn += [_draw_line(line, scale) for line in chart.lines]
        drawn += [_draw_dots_of(line, scale) for line in chart.lines if line.dots or len(line.x) == 1]
    levels = [_draw_mark(name, value, scale) for name, value in chart.marks.items() if value <= scale.y[1]]
    field_ = _field(scale, chart.x_title, drawn, levels, ticks(*scale.y), stacked=chart.stacked)
    return Markup("{}{}").format(
        _legend([(line.name, line.colour, "dashed" * line.dashed or "faint" * line.faint) for line in chart.lines]),
        _framed(field_, scale, chart.x_title, chart.y_title, chart.x_ticks, Markup()),
    )


def _stacked(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with cumulative sums; a missing value counts as 0."""
    xs = sorted({x for line in lines for x in line.x})
    below, stacked = dict.fromkeys(xs, 0.0), []
    for line in lines:
        for x, y in zip(line.x, line.y, strict=True):
            below[x] += y
        stacked.append(Line(line.name, line.colour, xs, [below[x] for x in xs]))
    return stacked


def _draw_line(line: Line, scale: _Scale) -> Markup:
    kind = ("line" + " dashed" * line.dashed + " faint" * line.faint) if line.joined else "dots"
    path = scale.path(line)
    return Markup('<path class="{}" stroke="{}" d="{}" data-name="{}"/>').format(kind, line.colour, path, line.name)


def _draw_area(top: Line, scale: _Scale) -> Markup:
    """Draw the area below a line."""
    if not top.x:
        return Markup()
    path = f"{scale.path(top)}V{UNITS}H{scale.at(top.x[0], 0.0)[0]}z"
    return Markup('<path class="area" fill="{}" d="{}" data-name="{}"/>').format(top.colour, path, top.name)


def _draw_band(band: Band, scale: _Scale) -> Markup:
    upper = [scale.at(x, y) for x, y in zip(band.x, band.high, strict=True)]
    lower = [scale.at(x, y) for x, y in zip(band.x, band.low, strict=True)]
    path = "M" + "L".join(f"{x} {y}" for x, y in upper + lower[::-1]) + "z" if upper else ""
    return Markup('<path class="area band" fill="{}" d="{}"/>').format(band.colour, path)


def _draw_dots_of(line: Line, scale: _Scale) -> Markup:
    dots = Line(line.name, line.colour, line.x, line.y, joined=False)
    return Markup('<path class="dots" stroke="{}" d="{}"/>').format(line.colour, scale.path(dots))


def _draw_mark(name: str, value: float, scale: _Scale) -> Markup:
    bottom = 100 * _part(value, scale.y)
    return Markup('<div class="mark" style="bottom:{}%"><span>{}</span></div>').format(f"{bottom:.1f}", name)


def _field(scale: _Scale, x_title: str, drawn: Sequence[Markup], levels: Sequence[Markup], y_ticks: Sequence[float],
           *, stacked: bool) -> Markup:  # fmt: skip
    grid = "".join(f"M0 {scale.at(0.0, y)[1]}H{UNITS}" for y in y_ticks)
    return Markup(
        '<div class="field" data-range="{} {} {} {}" data-x="{}"{}>'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">'
        '<path class="grid" d="{}"/>{}</svg>{}</div>'
    ).format(*(f"{bound:.6g}" for bound in (*scale.x, *scale.y)), x_title,
             Markup(' data-stacked=""') if stacked else "", UNITS, UNITS, grid, Markup().join(drawn),
             Markup().join(levels))  # fmt: skip


def _framed(field_: Markup, scale: _Scale, x_title: str, y_title: str, x_ticks: Sequence[float] | None,
            beside: Markup) -> Markup:  # fmt: skip
    """Return the plot area with its axes and titles."""
    ys = [Markup('<span style="bottom:{}%">{}</span>').format(f"{100 * _part(y, scale.y):.1f}", tick_text(y))
          for y in ticks(*scale.y)]  # fmt: skip
    at = [x for x in (x_ticks or ticks(*scale.x)) if scale.x[0] <= x <= scale.x[1]]
    if x_title == "step":  # no ticks between steps
        at = [x for x in at if x == round(x)]
    xs = [Markup('<span style="left:{}%">{}</span>').format(f"{100 * _part(x, scale.x):.1f}", tick_text(x)) for x in at]
    widest = max((len(tick_text(y)) for y in ticks(*scale.y)), default=1)
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><div class="frame" style="--wide:{}ch">'
        '<div class="ys">{}</div>{}{}<div class="xs">{}</div></div><p class="x-title">{}</p></figure>'
    ).format(y_title, widest, Markup().join(ys), field_, beside, Markup().join(xs), x_title)


def _legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """Return the legend if there are several entries of (name, colour, "dashed", "faint" or "")."""
    if len(entries) < 2:
        return Markup()
    rows = [Markup('<li><span class="swatch{}" style="color:{}"></span>{}</li>').format(
                " " + kind if kind else "", colour, name) for name, colour, kind in entries]  # fmt: skip
    return Markup('<ul class="legend">{}</ul>').format(Markup().join(rows))


def _in_figures(chart: Chart) -> Markup:
    """Return a table of a few points of each line; at an x that a long line lacks, show its previous point."""
    name = "after step" if chart.x_title == "step" else chart.x_title
    everywhere = sorted({x for line in chart.lines for x in line.x})
    shown = {everywhere[i] for i in spread(len(everywhere))}
    shown |= {line.x[i] for line in chart.lines for i in spread(len(line.x)) if len(line.x) <= MOST_ROWS}
    cell, head = Markup('<td class="number" data-label="{}">{}</td>'), Markup('<th class="number">{}</th>')
    rows = []
    for x in sorted(shown):
        cells = []
        for line in chart.lines:
            before = bisect.bisect_right(line.x, x) - 1
            is_near = before >= 0 and (line.x[before] == x or (len(line.x) > MOST_ROWS and x <= line.x[-1]))
            cells.append(cell.format(line.name, f"{line.y[before]:.4g}" if is_near else "–"))
        x_text = f"{x:,.0f}" if x == round(x) else f"{x:.4g}"
        rows.append(Markup("<tr><th>{}</th>{}</tr>").format(x_text, Markup().join(cells)))
    return Markup(
        '<details><summary>in figures</summary><table class="figures"><caption class="soft">{}</caption>'
        "<thead><tr><th>{}</th>{}</tr></thead><tbody>{}</tbody></table></details>"
    ).format(chart.y_title, name, Markup().join(head.format(line.name) for line in chart.lines),
             Markup().join(rows))  # fmt: skip


def spread(num: int) -> list[int]:
    """Return at most MAX_TABLE_ROWS indices spread evenly over `num`, including the first and the last.

    >>> spread(3), spread(1000)[:3]
    ([0, 1, 2], [0, 111, 222])
    """
    most = min(MOST_ROWS, num)
    return sorted({round(i * (num - 1) / max(1, most - 1)) for i in range(most)})


def _draw_layers(layers: Layers, *, in_figures: bool) -> Markup:
    names = list(layers.charts)
    layer = Markup('<div data-layer="{}"{}>{}</div>')
    drawn = [layer.format(name, Markup(" hidden") if i else "", draw(chart, in_figures=in_figures))
             for i, (name, chart) in enumerate(layers.charts.items())]  # fmt: skip
    choose = Markup()
    if len(names) > 1:
        options = Markup().join(Markup("<option>{}</option>").format(name) for name in names)
        choose = Markup('<label class="choose">show <select>{}</select></label>').format(options)
    return Markup('<div class="layers">{}{}</div>').format(choose, Markup().join(drawn))


# --- bars and dots ----------------------------------------------------------------------------------------------------


def _draw_bars(bars: Bars) -> Markup:
    sums = [sum(values[i] or 0.0 for values in bars.parts.values()) for i in range(len(bars.labels))]
    marks = bars.predicted or [None] * len(bars.labels)
    longest = max([*sums, *(mark for mark in marks if mark is not None)], default=0.0) or 1.0
    rows = []
    for i, label in enumerate(bars.labels):
        segments = [
            Markup('<span style="width:{}%;background:{}" title="{}"></span>').format(
                f"{100 * value / longest:.2f}", bars.colours[name], f"{name}: {bars.told(value)}"
            )
            for name, values in bars.parts.items()
            if (value := values[i])
        ]
        if (mark := marks[i]) is not None:
            segments.append(Markup('<i style="left:{}%" title="{}"></i>').format(
                f"{100 * mark / longest:.2f}", f"predicted: {bars.told(mark)}"))  # fmt: skip
        rows.append(Markup('<div class="row"><span class="label">{}</span><div class="track">{}</div>'
                           '<span class="value">{}</span></div>').format(
                    label, Markup().join(segments), bars.told(sums[i])))  # fmt: skip
    entries = [(name, bars.colours[name], "") for name in bars.parts]
    if bars.predicted is not None:
        entries.append(("predicted", "var(--ink)", ""))
    return Markup('{}<div class="bars">{}</div>').format(_legend(entries), Markup().join(rows))


def _draw_dots(dots: Dots) -> Markup:
    points = sorted(dots.points, key=lambda point: -point[2])
    chart = Chart([Line(dots.y_title, dots.colour, [x for _, x, _ in points], [y for *_, y in points], joined=False)],
                  dots.x_title, dots.y_title)  # fmt: skip
    high = max((x for _, x, _ in points), default=1.0)
    scale = _Scale((0.0, 1.05 * high), _scale_of(chart).y)
    places = [UNITS * (i + 0.5) / len(points) for i in range(len(points))]
    leaders = "".join(f"M{x} {y}L{UNITS} {place:.0f}" for (x, y), place in
                      zip([scale.at(x, y) for _, x, y in points], places, strict=True))  # fmt: skip
    names = [Markup('<span style="top:{}%" title="{}">{}</span>').format(
                 f"{100 * place / UNITS:.1f}", f"{count(x)} {dots.x_title}, {dots.y_title} {y:.4f}", name)
             for place, (name, x, y) in zip(places, points, strict=True)]  # fmt: skip
    drawn = [Markup('<path class="leader" d="{}"/>').format(leaders), _draw_line(chart.lines[0], scale)]
    field_ = _field(scale, dots.x_title, drawn, [], ticks(*scale.y), stacked=False)
    longest = max((len(name) for name, *_ in points), default=0)
    column = Markup('<div class="names" style="--wide:{}ch">{}</div>').format(longest, Markup().join(names))
    return _framed(field_, scale, dots.x_title, dots.y_title, None, column)


# --- Gantt chart ------------------------------------------------------------------------------------------------------


def _draw_lanes(lanes: Lanes) -> Markup:
    bars = [bar for _, _, of_row in lanes.rows for bar in of_row]
    bounds = (min((bar.begin for bar in bars), default=0.0), max((bar.end for bar in bars), default=1.0))

    def at(value: float) -> float:
        return 100 * _part(value, bounds)

    shown = ticks(*bounds)
    rules = Markup().join(Markup('<i style="left:{}%"></i>').format(f"{at(x):.2f}") for x in shown)
    drawn = []
    for label, is_thin, of_row in lanes.rows:
        spans = [Markup('<span style="left:{}%;width:{}%;background:{}" title="{}"></span>').format(
                     f"{at(bar.begin):.3f}", f"{at(bar.end) - at(bar.begin):.3f}", bar.colour, bar.title)
                 for bar in of_row]  # fmt: skip
        row = Markup('<div class="row{}"><span class="label">{}</span><div class="lane">{}{}</div></div>')
        drawn.append(row.format(" thin" if is_thin else "", label, rules, Markup().join(spans)))
    xs = Markup().join(Markup('<span style="left:{}%">{}</span>').format(f"{at(x):.1f}", tick_text(x)) for x in shown)
    return Markup('<figure class="chart">{}<div class="lanes">{}<div class="row"><span></span><div class="xs">{}</div>'
                  '</div></div><p class="x-title">{}</p></figure>').format(
        _legend([(name, colour, "") for name, colour in lanes.legend.items()]), Markup().join(drawn), xs,
        lanes.x_title)  # fmt: skip
