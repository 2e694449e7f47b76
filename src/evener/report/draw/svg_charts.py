"""Draw charts as SVG and HTML that fit any width, light and dark pages, and need no library.

Lines are SVG, stretched to the available width. Labels are HTML text, placed in per cent, and so neither stretched nor
cut off. `page.js` shows the values under the pointer, which stand beside each line: its coordinates are clipped.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from markupsafe import Markup

from evener.core.base.units import format_count, format_seconds, percentile
from evener.report.draw.smoothing import without_spikes
from evener.report.read.downsampled_series import MAX_PLOTTABLE

PATH_UNITS = 10_000  # SVG coordinates along either axis
MAX_TICKS = 5
MAX_TABLE_ROWS = 10  # of a chart's data table
BAND_QUANTILE = 0.98  # quantile of a band that the y axis covers: rarer values may lie beyond the edge


@dataclass(frozen=True)
class ChartLine:
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
class ChartBand:
    """The range from the smallest to the largest value that each point of a line stands for."""

    colour: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class LineChart:
    """Lines over one x axis; stacked, each is the upper edge of a filled area."""

    lines: list[ChartLine]
    x_title: str
    y_title: str
    y_range: tuple[float, float] | None = None  # None: the range of the values
    x_ticks: list[float] | None = None
    marks: dict[str, float] = field(default_factory=dict)  # named horizontal levels
    stacked: bool = False
    bands: list[ChartBand] = field(default_factory=list)  # behind the lines
    note: str = ""  # below the chart


@dataclass(frozen=True)
class BarChart:
    """One bar per label, made of segments end to end."""

    labels: list[str]
    segments: dict[str, list[float | None]]
    colours: dict[str, str]
    format_value: Callable[[float], str] = format_seconds
    predicted: list[float | None] | None = None  # a mark on each bar


@dataclass(frozen=True)
class ScatterPlot:
    """Named dots, with the names in a column on the right, ordered by height."""

    points: list[tuple[str, float, float]]
    colour: str
    x_title: str
    y_title: str


@dataclass(frozen=True)
class ChartSelector:
    """Charts of which a selector shows one at a time."""

    charts: dict[str, LineChart]


@dataclass(frozen=True)
class GanttBar:
    """One bar of a GanttChart, in the unit of its time axis."""

    name: str
    colour: str
    begin: float
    end: float
    title: str  # tooltip


@dataclass(frozen=True)
class GanttChart:
    """Rows of bars over one time axis; a thin row belongs to the row above."""

    rows: list[tuple[str, bool, list[GanttBar]]]  # (label, is_thin, bars)
    x_title: str
    legend: dict[str, str]  # colour by name, in this order


Figure = LineChart | BarChart | ScatterPlot | ChartSelector | GanttChart


def render_svg(figure: Figure, *, with_table: bool = False) -> Markup:
    """Return the chart with its legend; `with_table` adds a table of some points of each line, for screen readers."""
    if isinstance(figure, ChartSelector):
        return _draw_selector(figure, with_table=with_table)
    if isinstance(figure, LineChart) and with_table:
        return _draw_chart(figure) + _data_table(figure)
    if isinstance(figure, GanttChart):
        return _draw_gantt(figure)
    if isinstance(figure, BarChart):
        return _draw_bars(figure)
    return _draw_scatter(figure) if isinstance(figure, ScatterPlot) else _draw_chart(figure)


def axis_ticks(low: float, high: float, max_ticks: int = MAX_TICKS) -> list[float]:
    """Return about `max_ticks` round numbers from `low` to `high`.

    >>> axis_ticks(0.0, 59.0), axis_ticks(3.51, 4.18)
    ([0.0, 20.0, 40.0], [3.6, 3.8, 4.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{(first + i) * step:.12g}") for i in range(math.floor(high / step + 1e-9) - first + 1)]


def format_tick(value: float) -> str:
    """Format the number of an axis tick.

    >>> format_tick(15000.0), format_tick(0.0006), format_tick(3.6), format_tick(2.5e6)
    ('15k', '0.0006', '3.6', '2.5M')
    """
    for factor, prefix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{prefix}"
    return f"{value:.4g}"


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AxisScale:
    """Maps values to SVG coordinates."""

    x: tuple[float, float]
    y: tuple[float, float]

    def to_svg(self, x: float, y: float) -> tuple[int, int]:
        """Return coordinates from the top left corner; clip y to the chart."""
        return round(PATH_UNITS * _fraction(x, self.x)), round(
            PATH_UNITS * (1 - min(1.0, max(0.0, _fraction(y, self.y))))
        )

    def path(self, line: ChartLine) -> str:
        """Return the SVG path of a line; a dot is a line of zero length with round ends."""
        points = [self.to_svg(x, y) for x, y in zip(line.x, line.y, strict=True)]
        if not line.joined:
            return "".join(f"M{x} {y}h0" for x, y in points)
        return "M" + "L".join(f"{x} {y}" for x, y in points) if points else ""


def _fraction(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return (value - low) / (high - low) if high > low else 0.5


def y_bounds(chart: LineChart) -> tuple[float, float]:
    """Return the range of a chart's y axis. A spike of a step or two goes beyond its edge."""
    return _scale_of(chart).y


def _scale_of(chart: LineChart) -> _AxisScale:
    xs = [x for line in chart.lines for x in line.x] or [0.0]
    ys = [y for line in chart.lines for y in (line.y if line.dots else without_spikes(line.y))] or [0.0, 1.0]
    ys += [percentile(of_band, part) for band in chart.bands if band.x
           for of_band, part in ((band.low, 1 - BAND_QUANTILE), (band.high, BAND_QUANTILE))]  # fmt: skip
    low, high = (min(MAX_PLOTTABLE, max(-MAX_PLOTTABLE, y)) for y in (min(ys), max(ys)))
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return _AxisScale((min(xs), max(xs)), chart.y_range or (low - room, high + room))


def _draw_chart(chart: LineChart) -> Markup:
    scale = _scale_of(chart)
    if chart.stacked:
        drawn = [_draw_area(top, line, scale) for top, line in reversed(_stack_lines(chart.lines))]
    else:
        drawn = [_draw_band(band, scale) for band in chart.bands]
        drawn += [_draw_line(line, scale) for line in chart.lines]
        drawn += [_draw_line_dots(line, scale) for line in chart.lines if line.dots or len(line.x) == 1]
    levels = [_draw_level(name, value, scale) for name, value in chart.marks.items() if value <= scale.y[1]]
    field_ = _plot_area(scale, chart.x_title, drawn, levels, axis_ticks(*scale.y))
    return Markup("{}{}{}").format(
        _legend([(line.name, line.colour, "dashed" * line.dashed or "faint" * line.faint) for line in chart.lines]),
        _with_axes(field_, scale, chart.x_title, chart.y_title, chart.x_ticks, Markup()),
        Markup('<p class="soft small">{}</p>').format(chart.note) if chart.note else "",
    )


def _stack_lines(lines: Sequence[ChartLine]) -> list[tuple[ChartLine, ChartLine]]:
    """Return (cumulative sums, the line itself) for each line at the x of all; a missing value counts as 0."""
    xs = sorted({x for line in lines for x in line.x})
    below, stacked = dict.fromkeys(xs, 0.0), []
    for line in lines:
        own = dict.fromkeys(xs, 0.0) | dict(zip(line.x, line.y, strict=True))
        below = {x: below[x] + own[x] for x in xs}
        stacked.append((replace(line, x=xs, y=[*below.values()]), replace(line, x=xs, y=[*own.values()])))
    return stacked


def _draw_line(line: ChartLine, scale: _AxisScale) -> Markup:
    kind = ("line" + " dashed" * line.dashed + " faint" * line.faint) if line.joined else "dots"
    path = scale.path(line)
    return Markup('<path class="{}" stroke="{}" d="{}"{}/>').format(kind, line.colour, path, _line_values(line))


def _draw_area(top: ChartLine, line: ChartLine, scale: _AxisScale) -> Markup:
    """Draw the area below the upper edge `top` of a line."""
    if not top.x:
        return Markup()
    path = f"{scale.path(top)}V{PATH_UNITS}H{scale.to_svg(top.x[0], 0.0)[0]}z"
    return Markup('<path class="area" fill="{}" d="{}"{}/>').format(top.colour, path, _line_values(line))


def _line_values(line: ChartLine) -> Markup:
    """Return the attributes from which `page.js` reads a line's name and values."""
    xs, ys = (" ".join(f"{value:.{digits}g}" for value in values) for values, digits in ((line.x, 10), (line.y, 4)))
    return Markup(' data-name="{}" data-xs="{}" data-ys="{}"').format(line.name, xs, ys)


def _draw_band(band: ChartBand, scale: _AxisScale) -> Markup:
    upper = [scale.to_svg(x, y) for x, y in zip(band.x, band.high, strict=True)]
    lower = [scale.to_svg(x, y) for x, y in zip(band.x, band.low, strict=True)]
    path = "M" + "L".join(f"{x} {y}" for x, y in upper + lower[::-1]) + "z" if upper else ""
    return Markup('<path class="area band" fill="{}" d="{}"/>').format(band.colour, path)


def _draw_line_dots(line: ChartLine, scale: _AxisScale) -> Markup:
    dots = ChartLine(line.name, line.colour, line.x, line.y, joined=False)
    return Markup('<path class="dots" stroke="{}" d="{}"/>').format(line.colour, scale.path(dots))


def _draw_level(name: str, value: float, scale: _AxisScale) -> Markup:
    bottom = 100 * _fraction(value, scale.y)
    return Markup('<div class="mark" style="bottom:{}%"><span>{}</span></div>').format(f"{bottom:.1f}", name)


def _plot_area(
    scale: _AxisScale,
    x_title: str,
    drawn: Sequence[Markup],
    levels: Sequence[Markup],
    y_ticks: Sequence[float],
) -> Markup:
    grid = "".join(f"M0 {scale.to_svg(0.0, y)[1]}H{PATH_UNITS}" for y in y_ticks)
    return Markup(
        '<div class="field" data-range="{} {} {} {}" data-x="{}">'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">'
        '<path class="grid" d="{}"/>{}</svg>{}</div>'
    ).format(*(f"{bound:.6g}" for bound in (*scale.x, *scale.y)), x_title,
             PATH_UNITS, PATH_UNITS, grid, Markup().join(drawn),
             Markup().join(levels))  # fmt: skip


def _with_axes(field_: Markup, scale: _AxisScale, x_title: str, y_title: str, x_ticks: Sequence[float] | None,
            side_column: Markup) -> Markup:  # fmt: skip
    """Return the plot area with its axes and titles."""
    ys = [Markup('<span style="bottom:{}%">{}</span>').format(f"{100 * _fraction(y, scale.y):.1f}", format_tick(y))
          for y in axis_ticks(*scale.y)]  # fmt: skip
    at = [x for x in (x_ticks or axis_ticks(*scale.x)) if scale.x[0] <= x <= scale.x[1]]
    if x_title == "step":  # no ticks between steps
        at = [x for x in at if x == round(x)]
    xs = [
        Markup('<span style="left:{}%">{}</span>').format(f"{100 * _fraction(x, scale.x):.1f}", format_tick(x))
        for x in at
    ]
    widest = max((len(format_tick(y)) for y in axis_ticks(*scale.y)), default=1)
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><div class="frame" style="--wide:{}ch">'
        '<div class="ys">{}</div>{}{}<div class="xs">{}</div></div><p class="x-title">{}</p></figure>'
    ).format(y_title, widest, Markup().join(ys), field_, side_column, Markup().join(xs), x_title)


def _legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """Return the legend if there are several entries of (name, colour, "dashed", "faint" or "")."""
    if len(entries) < 2:
        return Markup()
    rows = [Markup('<li><span class="swatch{}" style="color:{}"></span>{}</li>').format(
                " " + kind if kind else "", colour, name) for name, colour, kind in entries]  # fmt: skip
    return Markup('<ul class="legend">{}</ul>').format(Markup().join(rows))


def _data_table(chart: LineChart) -> Markup:
    """Return a table of a few points of each line; at an x that a long line lacks, show its previous point."""
    name = "after step" if chart.x_title == "step" else chart.x_title
    lines = list(chart.lines)
    for band in chart.bands:
        lines += [ChartLine("min", band.colour, band.x, band.low), ChartLine("max", band.colour, band.x, band.high)]
    everywhere = sorted({x for line in lines for x in line.x})
    shown = {everywhere[i] for i in _spread_indices(len(everywhere))}
    shown |= {line.x[i] for line in lines for i in _spread_indices(len(line.x)) if len(line.x) <= MAX_TABLE_ROWS}
    cell, head = Markup('<td class="number" data-label="{}">{}</td>'), Markup('<th class="number">{}</th>')
    rows = []
    for x in sorted(shown):
        cells = []
        for line in lines:
            before = bisect.bisect_right(line.x, x) - 1
            is_near = before >= 0 and (line.x[before] == x or (len(line.x) > MAX_TABLE_ROWS and x <= line.x[-1]))
            cells.append(cell.format(line.name, f"{line.y[before]:.4g}" if is_near else "–"))
        x_text = f"{x:,.0f}" if x == round(x) else f"{x:.4g}"
        rows.append(Markup("<tr><th>{}</th>{}</tr>").format(x_text, Markup().join(cells)))
    return Markup(
        '<details data-keep="{}"><summary>in figures</summary><table class="figures"><caption class="soft">{}</caption>'
        "<thead><tr><th>{}</th>{}</tr></thead><tbody>{}</tbody></table></details>"
    ).format(chart.y_title, chart.y_title, name, Markup().join(head.format(line.name) for line in lines),
             Markup().join(rows))  # fmt: skip


def _spread_indices(num: int) -> list[int]:
    """Return at most MAX_TABLE_ROWS indices spread evenly over `num`, including the first and the last.

    >>> _spread_indices(3), _spread_indices(1000)[:3]
    ([0, 1, 2], [0, 111, 222])
    """
    most = min(MAX_TABLE_ROWS, num)
    return sorted({round(i * (num - 1) / max(1, most - 1)) for i in range(most)})


def _draw_selector(layers: ChartSelector, *, with_table: bool) -> Markup:
    names = list(layers.charts)
    layer = Markup('<div data-layer="{}"{}>{}</div>')
    drawn = [layer.format(name, Markup(" hidden") if i else "", render_svg(chart, with_table=with_table))
             for i, (name, chart) in enumerate(layers.charts.items())]  # fmt: skip
    choose = Markup()
    if len(names) > 1:
        options = Markup().join(Markup("<option>{}</option>").format(name) for name in names)
        choose = Markup('<label class="choose">show <select>{}</select></label>').format(options)
    return Markup('<div class="layers">{}{}</div>').format(choose, Markup().join(drawn))


# --- bars and dots ----------------------------------------------------------------------------------------------------


def _draw_bars(bars: BarChart) -> Markup:
    sums = [sum(values[i] or 0.0 for values in bars.segments.values()) for i in range(len(bars.labels))]
    marks = bars.predicted or [None] * len(bars.labels)
    longest = max([*sums, *(mark for mark in marks if mark is not None)], default=0.0) or 1.0
    rows = []
    for i, label in enumerate(bars.labels):
        segments = [
            Markup('<span style="width:{}%;background:{}" title="{}"></span>').format(
                f"{100 * value / longest:.2f}", bars.colours[name], f"{name}: {bars.format_value(value)}"
            )
            for name, values in bars.segments.items()
            if (value := values[i])
        ]
        if (mark := marks[i]) is not None:
            segments.append(Markup('<i style="left:{}%" title="{}"></i>').format(
                f"{100 * mark / longest:.2f}", f"predicted: {bars.format_value(mark)}"))  # fmt: skip
        rows.append(Markup('<div class="row"><span class="label">{}</span><div class="track">{}</div>'
                           '<span class="value">{}</span></div>').format(
                    label, Markup().join(segments), bars.format_value(sums[i])))  # fmt: skip
    entries = [(name, bars.colours[name], "") for name in bars.segments]
    if bars.predicted is not None:
        entries.append(("predicted", "var(--ink)", ""))
    return Markup('{}<div class="bars">{}</div>').format(_legend(entries), Markup().join(rows))


def _draw_scatter(dots: ScatterPlot) -> Markup:
    points = sorted(dots.points, key=lambda point: -point[2])
    chart = LineChart(
        [ChartLine(dots.y_title, dots.colour, [x for _, x, _ in points], [y for *_, y in points], joined=False)],
        dots.x_title,
        dots.y_title,
    )
    high = max((x for _, x, _ in points), default=1.0)
    scale = _AxisScale((0.0, 1.05 * high), _scale_of(chart).y)
    places = [PATH_UNITS * (i + 0.5) / len(points) for i in range(len(points))]
    leaders = "".join(f"M{x} {y}L{PATH_UNITS} {place:.0f}" for (x, y), place in
                      zip([scale.to_svg(x, y) for _, x, y in points], places, strict=True))  # fmt: skip
    names = [Markup('<span style="top:{}%" title="{}">{}</span>').format(
                 f"{100 * place / PATH_UNITS:.1f}", f"{format_count(x)} {dots.x_title}, {dots.y_title} {y:.4f}", name)
             for place, (name, x, y) in zip(places, points, strict=True)]  # fmt: skip
    drawn = [Markup('<path class="leader" d="{}"/>').format(leaders), _draw_line(chart.lines[0], scale)]
    field_ = _plot_area(scale, dots.x_title, drawn, [], axis_ticks(*scale.y))
    longest = max((len(name) for name, *_ in points), default=0)
    column = Markup('<div class="names" style="--wide:{}ch">{}</div>').format(longest, Markup().join(names))
    return _with_axes(field_, scale, dots.x_title, dots.y_title, None, column)


# --- Gantt chart ------------------------------------------------------------------------------------------------------


def _draw_gantt(lanes: GanttChart) -> Markup:
    bars = [bar for _, _, of_row in lanes.rows for bar in of_row]
    bounds = (min((bar.begin for bar in bars), default=0.0), max((bar.end for bar in bars), default=1.0))

    def at(value: float) -> float:
        return 100 * _fraction(value, bounds)

    shown = axis_ticks(*bounds)
    rules = Markup().join(Markup('<i style="left:{}%"></i>').format(f"{at(x):.2f}") for x in shown)
    drawn = []
    for label, is_thin, of_row in lanes.rows:
        spans = [Markup('<span style="left:{}%;width:{}%;background:{}" title="{}"></span>').format(
                     f"{at(bar.begin):.3f}", f"{at(bar.end) - at(bar.begin):.3f}", bar.colour, bar.title)
                 for bar in of_row]  # fmt: skip
        row = Markup('<div class="row{}"><span class="label">{}</span><div class="lane">{}{}</div></div>')
        drawn.append(row.format(" thin" if is_thin else "", label, rules, Markup().join(spans)))
    xs = Markup().join(Markup('<span style="left:{}%">{}</span>').format(f"{at(x):.1f}", format_tick(x)) for x in shown)
    return Markup('<figure class="chart">{}<div class="lanes">{}<div class="row"><span></span><div class="xs">{}</div>'
                  '</div></div><p class="x-title">{}</p></figure>').format(
        _legend([(name, colour, "") for name, colour in lanes.legend.items()]), Markup().join(drawn), xs,
        lanes.x_title)  # fmt: skip
