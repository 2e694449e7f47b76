"""Show simulated scaling as a table for a terminal and as two PNG charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evener.core.base.units import format_count, format_seconds
from evener.core.run.step_cost import PHASE_NAMES
from evener.plan.scaling.rule_of_thumb import RULE_OF_THUMB
from evener.plan.scaling.scaling_model import ScalingPoint
from evener.report.draw.run_charts import PHASE_COLOURS, SERIES_COLOURS
from evener.report.pages.png_charts import INK, LINE, SOFT, new_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patheffects import AbstractPathEffect

SCALING_COLUMNS = ("ranks", "tokens/s", "effic.", "step", "exposed", "wait", "fails", "saves", "with both")
OVERHEAD_NAME, OVERHEAD_COLOUR = "failures, checkpoints", "#8a8d93"
DASHES = (0, (4, 3))
SIMULATED_PHASES = [part for part in PHASE_NAMES if part != "data_s"]  # a scenario does not model input


def scaling_rows(points: Sequence[ScalingPoint]) -> list[tuple[str, ...]]:
    """Return one row per number of ranks, with the columns of SCALING_COLUMNS, narrow enough for a terminal."""
    return [
        (
            str(point.ranks),
            format_count(point.tokens_per_s),
            f"{point.efficiency:.1%}",
            _seconds_or_dash(point.step_p50_s),
            _seconds_or_dash(point.cost.exposed_sync_s),
            _seconds_or_dash(point.cost.wait_s),
            _format_interval(point.mtbf_s),
            _format_interval(point.checkpoint_every_s),
            "–" if point.mtbf_s is None else f"{point.goodput:.1%}",
        )
        for point in points
    ]


def efficiency_png(points: Sequence[ScalingPoint], path: str | Path, *, title: str) -> None:
    """Draw efficiency and tokens/s over ranks, with and without failures, and the rule of thumb."""
    canvas = _canvas(title)
    left, right = canvas.subplots(1, 2)
    ranks = [point.ranks for point in points]
    solo_rate = points[0].tokens_per_s / points[0].ranks / points[0].efficiency
    left.plot(ranks, [1.0] * len(ranks), color=SOFT, linestyle=DASHES, linewidth=1.5, label="if nothing were lost")
    right.plot(ranks, [solo_rate * num for num in ranks], color=SOFT, linestyle=DASHES, linewidth=1.5)
    rule = "rule of thumb: " + ", ".join(
        f"{low:.0%} to {high:.0%} at {num}" for num, (low, high) in RULE_OF_THUMB.items()
    )
    for num, (low, high) in RULE_OF_THUMB.items():
        if ranks[0] <= num <= ranks[-1]:
            place = [num / 1.35, num * 1.35]
            left.fill_between(place, low, high, color=SERIES_COLOURS[2], alpha=0.3, linewidth=0, label=rule)
            rule = "_"  # one legend entry is enough
    for name, values, colour, marker in _efficiency_curves(points):
        style = {
            "color": colour,
            "linewidth": 2.5,
            "marker": marker,
            "markersize": 6,
            "zorder": 4 if marker == "o" else 3,
        }
        left.plot(ranks, values, label=name, **style)
        right.plot(ranks, [solo_rate * num * value for num, value in zip(ranks, values, strict=True)], **style)
        below = len(_efficiency_curves(points)) > 1 and marker != "o"
        left.annotate(f"{values[-1]:.0%}", (ranks[-1], values[-1]), xytext=(0, -9 if below else 8),
                      textcoords="offset points", ha="center", va="top" if below else "bottom", fontsize=12,
                      fontweight="bold", color=colour, path_effects=_halo())  # fmt: skip
    _rank_axis(left, ranks, "tokens/s of a rank, against one rank alone")
    left.set_ylim(0, 1.1)
    left.yaxis.set_major_formatter("{x:.0%}")
    _rank_axis(right, ranks, "tokens/s of all ranks")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(lambda value, _: format_count(value).replace(".0", ""))
    right.minorticks_off()
    handles, labels = left.get_legend_handles_labels()
    canvas.legend(handles, labels, frameon=False, fontsize=11, labelcolor=INK, loc="outside lower left", ncols=4)
    save_png(canvas, path)


def breakdown_png(points: Sequence[ScalingPoint], path: str | Path, *, title: str) -> None:
    """Draw the breakdown of a mean step, one bar per number of ranks, with a whisker from p50 to p95.

    Bars show shares of the step if steps differ so much that the shorter could not be seen.
    """
    canvas = _canvas(title)
    axes = canvas.add_subplot()
    whole_s = [_step_with_failures_s(point) for point in points]
    is_share = max(whole_s) > 4 * min(whole_s)
    unit = 1e3 if max(whole_s) < 1 else 1.0
    factors = [100 / time_s if is_share else unit for time_s in whole_s]
    tops = [0.0] * len(points)
    for part, name, colour in _bar_layers(points):
        heights = [part(point) * factor for point, factor in zip(points, factors, strict=True)]
        axes.bar(
            range(len(points)), heights, 0.62, bottom=tops, color=colour, label=name, edgecolor="white", linewidth=0.6
        )
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for place, point in enumerate(points):
        p50, p95 = point.step_p50_s * unit, point.step_p95_s * unit
        if p95 > 1.005 * p50 and not is_share:
            axes.errorbar([place], [p50], yerr=[[0.0], [p95 - p50]], color=INK, linewidth=1.4, capsize=4,
                          label="_" if place else "a step: p50 to p95")  # fmt: skip
            tops[place] = max(tops[place], p95)
        axes.annotate(f"{point.goodput:.0%}" if point.goodput >= 0.1 else f"{point.goodput:.1%}", (place, tops[place]),
                      xytext=(0, 6), textcoords="offset points", ha="center", fontsize=11.5, fontweight="bold",
                      color=INK, path_effects=_halo())  # fmt: skip
    axes.set_ylim(0, 1.1 * max(tops))
    axes.set_xticks(range(len(points)), [str(point.ranks) for point in points])
    what = "percent of a step" if is_share else f"{'milliseconds' if unit > 1 else 'seconds'} of a step"
    _style_axes(axes, f"{what}; above a bar, tokens/s of a rank against one rank alone")
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles[::-1], labels[::-1], frameon=False, fontsize=11, labelcolor=INK, loc="outside right center")
    save_png(canvas, path)


def _canvas(title: str) -> Canvas:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    canvas = new_figure(12, 5.4)
    canvas.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.04))
    canvas.suptitle(title, x=0.012, ha="left", fontsize=14, color=INK)
    return canvas


def _halo() -> list[AbstractPathEffect]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=4, foreground="white")]


def _rank_axis(axes: Axes, ranks: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    every = -(-len(ranks) // 8)  # eight labels fit
    shown = [num for i, num in enumerate(ranks) if (len(ranks) - 1 - i) % every == 0]
    axes.set_xticks(shown, [str(num) for num in shown])
    axes.set_xlim(ranks[0] / 1.5, ranks[-1] * 1.5)
    _style_axes(axes, title)


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=SOFT, pad=10)
    axes.set_xlabel("ranks", fontsize=12, color=SOFT)
    axes.tick_params(labelsize=11.5, length=0, labelcolor=SOFT)
    axes.grid(axis="y", color=LINE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)


def _efficiency_curves(points: Sequence[ScalingPoint]) -> list[tuple[str, list[float], str, str]]:
    """Return (name, efficiency of each point, colour, marker) of each curve."""
    curves = [("simulated", [point.efficiency for point in points], SERIES_COLOURS[0], "o")]
    if any(point.mtbf_s is not None for point in points):
        lasting = [point.goodput for point in points]
        curves.append(("with failures and checkpoints", lasting, SERIES_COLOURS[1], "s"))
    return curves


def _bar_layers(points: Sequence[ScalingPoint]) -> list[tuple[Callable[[ScalingPoint], float], str, str]]:
    """Return (seconds of a point, name, colour) of each layer that is not 0 everywhere."""
    layers: list[tuple[Callable[[ScalingPoint], float], str, str]] = [
        (lambda point, part=part: getattr(point.cost, part) or 0.0, PHASE_NAMES[part], PHASE_COLOURS[part])  # type: ignore[misc]
        for part in SIMULATED_PHASES
    ]
    layers.append((lambda point: _step_with_failures_s(point) - point.step_s, OVERHEAD_NAME, OVERHEAD_COLOUR))
    return [layer for layer in layers if any(layer[0](point) > 0 for point in points)]


def _step_with_failures_s(point: ScalingPoint) -> float:
    """Return the wall time per useful step, with failures; if no work is useful, the step time alone."""
    return point.step_s / point.useful if point.useful else point.step_s


def _seconds_or_dash(value_s: float | None) -> str:
    return format_seconds(value_s) if value_s else "–"


def _format_interval(value_s: float | None) -> str:
    """Format an interval in its largest unit.

    >>> _format_interval(10 * 86400.0), _format_interval(5400.0), _format_interval(1380.0), _format_interval(None)
    ('10 d', '1.5 h', '23 min', '–')
    """
    if value_s is None:
        return "–"
    for unit_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value_s >= unit_s:
            return f"{value_s / unit_s:.{1 if value_s < 10 * unit_s and name != 'min' else 0}f} {name}".replace(
                ".0 ", " "
            )
    return format_seconds(value_s)
