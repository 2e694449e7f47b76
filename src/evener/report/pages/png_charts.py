"""Draw PNG charts for a README or a blog: tokens/s of benches by processes, set-ups and loss; learning curves and step
breakdowns of runs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evener.core.base.file_io import write_atomic
from evener.core.base.units import format_count, format_seconds, pluralize
from evener.core.run.step_cost import PHASE_NAMES, StepCost
from evener.report.draw.run_charts import (
    PHASE_COLOURS,
    SERIES_COLOURS,
    comparison_charts,
    curve_charts,
    ideal_points,
    measured_points,
    tradeoff_points,
)
from evener.report.draw.svg_charts import y_bounds
from evener.report.read.recorded_run import RecordedRun
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import fastest_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
INK, SOFT, LINE = "#1c1d1f", "#62656b", "#e4e4e1"


def save_png(figure: Figure, path: str | Path) -> None:
    """Write a figure as a PNG file, which replaces a file or link of that name."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomic(Path(path), content.getvalue())


def scaling_png(series: Mapping[str, Sequence[RunSummary]], path: str | Path) -> None:
    """Draw tokens/s over processes, a line per corpus; dashed, ideal scaling from the first run up to the cores.

    Omit runs without recorded steps; if none is left, the axes stay empty.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import EngFormatter

    figure, axes = _one_panel(5.0)
    axes.xaxis.set_major_formatter("{x:.0f}")
    measured = {corpus: points for corpus, runs in series.items() if (points := measured_points(runs))}
    for index, (corpus, points) in enumerate(measured.items()):
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        if ideal := ideal_points(series[corpus]):
            axes.plot(*zip(*ideal, strict=True), color=colour, linestyle=(0, (4, 3)), linewidth=1.5)
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=9, linewidth=2.5, label=corpus)
        for num, rate in points:
            rates_here = [other_rate for of_corpus in measured.values() for n, other_rate in of_corpus if n == num]
            below = len(rates_here) > 1 and rate == min(rates_here)
            label = axes.annotate(
                format_count(rate),
                (num, rate),
                xytext=(0, -12 if below else 11),
                textcoords="offset points",
                ha="center",
                va="top" if below else "bottom",
                color=colour,
                fontsize=13,
                fontweight="bold",
            )
            label.set_path_effects([withStroke(linewidth=4, foreground="white")])

    everything = [point for corpus, points in measured.items() for point in points + ideal_points(series[corpus])]
    counts = sorted({num for points in measured.values() for num, _ in points}) or [1]
    margin = 0.12 * (counts[-1] - counts[0] or 1)
    axes.set_xlim(counts[0] - margin, counts[-1] + margin)
    axes.set_ylim(0, 1.15 * max((rate for _, rate in everything), default=1.0))
    axes.set_xticks(counts)
    cores = {run.cores for runs in series.values() for run in runs}
    on = f" on {pluralize(cores.pop(), 'core')}" if len(cores) == 1 else ""
    axes.set_title(f"tokens/s by number of processes{on}", loc="left", fontsize=14, color=INK, pad=14)
    axes.set_xlabel("processes", fontsize=12, color=SOFT)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=LINE)
    axes.plot([], [], color=SOFT, linestyle=(0, (4, 3)), linewidth=1.5, label="if nothing were lost")
    axes.legend(frameon=False, fontsize=12, labelcolor=INK, loc="upper left")
    save_png(figure, path)


def throughput_png(runs: Mapping[str, RunSummary], path: str | Path) -> None:
    """Draw one bar of tokens/s per run, with a line at the planner's prediction."""
    figure, axes = _one_panel(0.8 + 0.5 * max(1, len(runs)))
    measured = {label: run for label, run in runs.items() if run.tokens_per_s}
    for y, run in enumerate(measured.values()):
        rate = run.tokens_per_s or 0.0
        axes.barh(y, rate, height=0.62, color=SERIES_COLOURS[0])
        axes.annotate(format_count(rate), (rate, y), xytext=(6, 0), textcoords="offset points", va="center", color=INK,
                      fontsize=11, fontweight="bold")  # fmt: skip
        if run.predicted is not None:
            axes.plot([run.predicted.tokens_per_s] * 2, [y - 0.38, y + 0.38], color=SERIES_COLOURS[1], linewidth=2.5)
    if any(run.predicted for run in measured.values()):
        axes.plot([], [], color=SERIES_COLOURS[1], linewidth=2.5, label="predicted")
        axes.legend(frameon=False, fontsize=11, labelcolor=INK, loc="lower right")
    axes.set_yticks(range(len(measured)), list(measured))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max((run.tokens_per_s or 0.0 for run in measured.values()), default=1.0))
    axes.set_title("tokens/s", loc="left", fontsize=14, color=INK, pad=14)
    axes.grid(axis="x", color=LINE)
    save_png(figure, path)


def tradeoff_png(runs: Mapping[str, RunSummary], path: str | Path) -> None:
    """Draw a dot per run, tokens/s against validation loss: right is faster, low is better."""
    figure, axes = _one_panel(5.5)
    points = tradeoff_points(runs)
    rates, losses = [rate for _, rate, _ in points], [loss for *_, loss in points]
    axes.plot(rates, losses, "o", markersize=9, color=SERIES_COLOURS[0])
    # Names in a column on the right, by loss: dots of similar strategies lie close together.
    for place, (label, rate, loss) in enumerate(sorted(points, key=lambda point: -point[2])):
        axes.annotate(label, (rate, loss), xytext=(1.04, 1 - (place + 0.5) / len(points)), textcoords="axes fraction",
                      va="center", color=INK, fontsize=11,
                      arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.7, "shrinkB": 5})  # fmt: skip
    axes.set_xlim(0, 1.12 * max(rates, default=1.0))
    axes.margins(y=0.15)
    axes.set_title("validation loss over tokens/s: right is faster, low has learned more", loc="left", fontsize=13,
                   color=INK, pad=14)  # fmt: skip
    axes.set_xlabel("tokens/s", fontsize=12, color=SOFT)
    axes.grid(color=LINE)
    save_png(figure, path)


def comparison_png(runs: Mapping[str, RecordedRun], path: str | Path) -> None:
    """Draw losses over tokens read, and below them the step breakdown: by rank for one run, else by run."""
    from matplotlib.ticker import EngFormatter

    [(only, run)] = runs.items() if len(runs) == 1 else [("", None)]
    if run is None:
        costs = {label: fastest_rank(each.summary).typical for label, each in runs.items() if each.summary.step_p50_s}
    else:
        summary = run.summary
        costs = {summary.rank_label(rank): rank.typical for rank in summary.ranks} if summary.step_p50_s else {}
    figure, (axes, bars) = _two_panels(5.0, 0.9 + 0.42 * max(1, len(costs)))
    charts = comparison_charts(runs, "tokens") if run is None else curve_charts(run, "tokens")
    lines = [*(charts["loss"].lines if "loss" in charts else [])]
    dotted = charts["validation"].lines if "validation" in charts else [line for line in lines if line.dots]
    for band in charts["loss"].bands if lines else []:
        axes.fill_between(band.x, band.low, band.high, color=band.colour, alpha=0.2, linewidth=0)
    for line in lines:
        if line not in dotted:
            axes.plot(line.x, line.y, "--" if line.dashed else "-", color=line.colour,
                      linewidth=1 if line.faint else 2, alpha=0.35 if line.faint else 1.0,
                      label=None if line.faint else line.name.removesuffix(", smoothed"))  # fmt: skip
    for line in dotted:
        name = None if run is None else line.name
        axes.plot(line.x, line.y, "o", markersize=7, markeredgecolor="white", color=line.colour, label=name)
    if lines:
        bounds = [y_bounds(chart) for name, chart in charts.items() if name in ("loss", "validation")]
        axes.set_ylim(min(low for low, _ in bounds), max(high for _, high in bounds))
    title = "loss" if run is None else f"{only}: loss"
    dots = ", validation as dots" if run is None and dotted else ""
    axes.set_title(title + dots, loc="left", fontsize=14, color=INK, pad=12)
    axes.set_xlabel("tokens read", fontsize=11, color=SOFT)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=LINE)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=11, labelcolor=INK, loc="upper right")
    _draw_breakdown(bars, costs)
    save_png(figure, path)


def _draw_breakdown(axes: Axes, costs: Mapping[str, StepCost]) -> None:
    """Draw one bar per name: the phases of a step end to end."""
    from matplotlib.ticker import FuncFormatter

    for y, cost in enumerate(costs.values()):
        left = 0.0
        for part in PHASE_NAMES:
            value = getattr(cost, part) or 0.0
            axes.barh(y, value, left=left, height=0.62, color=PHASE_COLOURS[part])
            left += value
        axes.annotate(
            format_seconds(left),
            (left, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=11,
            fontweight="bold",
        )
    for part, name in PHASE_NAMES.items():
        if any(getattr(cost, part) for cost in costs.values()):
            axes.barh(0, 0, color=PHASE_COLOURS[part], label=name)
    axes.set_yticks(range(len(costs)), list(costs))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max((cost.total_s for cost in costs.values()), default=1.0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
    axes.set_title("where a step goes", loc="left", fontsize=14, color=INK, pad=34 if costs else 12)
    axes.grid(axis="x", color=LINE)
    if costs:
        axes.legend(frameon=False, fontsize=10, labelcolor=INK, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5,
                    handlelength=0.9, handletextpad=0.4, columnspacing=1.2, borderaxespad=0.1)  # fmt: skip


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, with matplotlib's own defaults.

    A matplotlibrc in the current folder, which may be somebody else's project, changes nothing and has no program run.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _two_panels(above: float, below: float) -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure of two panels, one above the other, of these heights in inches."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = new_figure(9, above + below)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.16))
    first, second = figure.subplots(2, 1, height_ratios=[above, below])
    for axes in (first, second):
        _style_axes(axes)
    return figure, (first, second)


def _style_axes(axes: Axes) -> None:
    axes.tick_params(labelsize=11, length=0, labelcolor=SOFT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)


def _one_panel(height: float) -> tuple[Figure, Axes]:
    """Return a figure with one empty panel."""
    from matplotlib.ticker import EngFormatter

    figure = new_figure(8, height)
    axes = figure.add_subplot()
    _style_axes(axes)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes
