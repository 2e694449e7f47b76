"""How does the scaling picture for a README or a manifest look? A PNG: tokens/s over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.core.units import count, plural
from evener.report.figures import SERIES_COLOURS, ideal_points, measured_points
from evener.report.summary import Summary

MARKERS = ("o", "s", "^", "D", "v", "P")
INK, SOFT, LINE = "#1c1d1f", "#62656b", "#e4e4e1"


def scaling_png(series: Mapping[str, Sequence[Summary]], path: str | Path) -> None:
    """Draw tokens/s over processes, a line a corpus; dashed, what the first run promises up to the cores.

    Runs without recorded steps are left out; with none at all the axes stay empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    measured = {corpus: points for corpus, runs in series.items() if (points := measured_points(runs))}
    for index, (corpus, points) in enumerate(measured.items()):
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        if ideal := ideal_points(series[corpus]):
            axes.plot(*zip(*ideal, strict=True), color=colour, linestyle=(0, (4, 3)), linewidth=1.5)
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=9, linewidth=2.5, label=corpus)
        for num, rate in points:
            beside = [other for of_corpus in measured.values() for n, other in of_corpus if n == num]
            below = len(beside) > 1 and rate == min(beside)
            label = axes.annotate(
                count(rate),
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
    on = f" on {plural(cores.pop(), 'core')}" if len(cores) == 1 else ""
    axes.set_title(f"tokens/s by number of processes{on}", loc="left", fontsize=14, color=INK, pad=14)
    axes.set_xlabel("processes", fontsize=12, color=SOFT)
    axes.tick_params(labelsize=12, length=0, labelcolor=SOFT)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=LINE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.plot([], [], color=SOFT, linestyle=(0, (4, 3)), linewidth=1.5, label="if nothing were lost")
    axes.legend(frameon=False, fontsize=12, labelcolor=INK, loc="upper left")
    figure.savefig(path)
