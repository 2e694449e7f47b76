"""Show several runs: a table of all with their states, or a comparison of some, with their curves overlaid and their
differing settings listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from evener.core.base.units import format_count, format_seconds
from evener.core.run.step_cost import PHASE_NAMES
from evener.report.draw.run_charts import SERIES_COLOURS
from evener.report.draw.smoothing import kernel_average, local_linear_fit
from evener.report.draw.svg_charts import ChartLine, LineChart
from evener.report.pages.compare_runs import energy_and_price, setting_differences
from evener.watch import run_view
from evener.watch.downsampled_series import CurvePoints
from evener.watch.page_fragments import MARK_SYMBOLS, Fragments, count_states, plot_fragment, render_template
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader
from evener.watch.run_view import CurveAxis, PlotWithTable

MAX_COMPARED = 2 * len(SERIES_COLOURS)  # the second half is dashed


def overview_fragments(readers: Mapping[str, RunReader], now: float) -> Fragments:
    """Render one row per run, newest first."""
    rows = [overview_row(key, reader, now) for key, reader in readers.items()]
    rows.sort(key=lambda row: -row["began"])
    return {
        "runs": render_template("runs.html", rows=rows),
        "told": count_states([row["health"].state for row in rows]),
    }


def overview_row(key: str, reader: RunReader, now: float) -> dict[str, Any]:
    """Return the row of a run in the overview."""
    manifest, run_health, rate = reader.manifest, assess_health(reader, now), run_view.tokens_per_s(reader)
    last, vals = reader.curves.last_record, run_view.validation_points(reader)
    began = manifest.started if manifest else next((float(event["time"]) for event in reader.events), now)
    return {
        "key": key,
        "health": run_health,
        "sign": MARK_SYMBOLS[run_health.mark],
        "began": began,
        "begun": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        "steps": f"{reader.curves.steps_done:,}" + (f" of {manifest.spec.train.steps:,}" if manifest else ""),
        "loss": newest[1] if (newest := run_view.newest_loss(reader)) else "–",
        "val_loss": f"{min(vals.means):.4f}" if len(vals) else "–",
        "rate": "–" if rate is None else format_count(rate),
        "left": format_seconds(run_view.time_left_s(reader)) if not run_health.is_over and last is not None else "–",
        "hosts": ", ".join(manifest.roster.hosts) if manifest else "",
    }


def comparison_fragments(readers: Mapping[str, RunReader], axis: str, now: float) -> Fragments:
    """Render the overlaid curves, the figures and the differences of the runs."""
    shown = dict(list(readers.items())[:MAX_COMPARED])
    return {
        "loss": plot_fragment("loss", _overlay_plot(shown, axis, "loss, smoothed", _loss_points)),
        "validation": plot_fragment(
            "validation", _overlay_plot(shown, axis, "validation loss", run_view.validation_points)
        ),
        "speed": plot_fragment(
            "speed", _overlay_plot(shown, axis, "tokens/s, smoothed", _throughput_points, from_zero=True)
        ),
        "figures": _table_of_known_columns(
            FIGURE_COLUMNS, [_figure_row(key, reader, now) for key, reader in shown.items()]
        ),
        "parts": render_template(
            "table.html",
            head=["run", *PHASE_NAMES.values(), "sum"],
            rows=[_breakdown_row(key, reader) for key, reader in shown.items()],
        ),
        "differences": _differences_table(shown),
    }


def _loss_points(reader: RunReader) -> CurvePoints:
    points = reader.curves.shared_series["loss"].points()
    return CurvePoints(points.steps, local_linear_fit(points.means), points.lows, points.highs)


def _throughput_points(reader: RunReader) -> CurvePoints:
    points, tokens = reader.curves.shared_series["wall_s"].points(), run_view.tokens_per_step(reader)
    rates = [tokens / wall_s for wall_s in kernel_average(points.means)] if tokens else []
    return CurvePoints(points.steps if rates else [], rates, rates, rates)


def _overlay_plot(readers: Mapping[str, RunReader], axis: str, title: str, curve: Callable[[RunReader], CurvePoints], *,
          from_zero: bool = False) -> PlotWithTable | None:  # fmt: skip
    """Plot one line per run."""
    lines, rows, title_x = [], [], "step"
    for i, (key, reader) in enumerate(readers.items()):
        points, x_axis = curve(reader), CurveAxis(reader, axis)
        if not len(points):
            continue
        title_x = x_axis.title
        lines.append(
            ChartLine(
                key,
                SERIES_COLOURS[i % len(SERIES_COLOURS)],
                x_axis.positions(points.steps),
                points.means,
                dashed=i >= len(SERIES_COLOURS),
            )
        )
        value_text = format_count if from_zero else "{:.4f}".format
        rows.append([key, f"{points.steps[-1] + 1:,}", value_text(points.means[-1]), value_text(min(points.means)),
                     value_text(max(points.means))])  # fmt: skip
    if not lines:
        return None
    high = 1.15 * max(max(line.y) for line in lines)
    chart = LineChart(lines, title_x, title, y_range=(0.0, high) if from_zero else None)
    return PlotWithTable(chart, ["run", "after step", "newest", "min", "max"], rows)


FIGURE_COLUMNS = [
    "run",
    "state",
    "steps",
    "loss",
    "best validation loss",
    "tokens/s",
    "step",
    "communication",
    "processes",
    "hosts",
    "sync strategy",
    "training time",
    "electricity",
    "price",
]


def _figure_row(key: str, reader: RunReader, now: float) -> list[str]:
    manifest, vals, newest = reader.manifest, run_view.validation_points(reader), run_view.newest_loss(reader)
    share, rate, walls_s = (
        run_view.communication_share(reader),
        run_view.tokens_per_s(reader),
        reader.curves.shared_series["wall_s"].bucket_sums,
    )
    plan, kwh, money = reader.plan, None, None
    if manifest is not None and plan is not None:
        kwh, money = energy_and_price(plan.prediction, manifest, sum(walls_s))
    return [
        key,
        assess_health(reader, now).state,
        f"{reader.curves.steps_done:,}",
        newest[1] if newest else "–",
        f"{min(vals.means):.4f}" if len(vals) else "–",
        "–" if rate is None else format_count(rate),
        format_seconds(run_view.typical_step_s(reader)),
        "–" if share is None else f"{share:.0%}",
        str(manifest.world_size) if manifest else "–",
        ", ".join(manifest.roster.hosts) if manifest else "–",
        str(manifest.roster.sync) if manifest else "–",
        format_seconds(sum(walls_s)) if walls_s else "–",
        "–" if kwh is None else f"{kwh:.3g} kWh",
        "–" if money is None else f"{money:.2f}",
    ]


def _table_of_known_columns(head: list[str], rows: list[list[str]]) -> str:
    """Render a table without the columns that are unknown for every run."""
    columns = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    return render_template(
        "table.html", head=[head[i] for i in columns], rows=[[row[i] for i in columns] for row in rows]
    )


def _breakdown_row(key: str, reader: RunReader) -> list[str]:
    """Return the step breakdown of the rank with the longest compute time, which the others wait for."""
    costs = [run_view.rank_cost(reader, rank) for rank in reader.curves.newest]
    if not costs:
        return [key, *("–" for _ in PHASE_NAMES), "–"]
    cost = max(costs, key=lambda rank_cost: rank_cost.compute_s or 0.0)
    return [key, *(format_seconds(getattr(cost, phase)) for phase in PHASE_NAMES), format_seconds(cost.total_s)]


def _differences_table(readers: Mapping[str, RunReader]) -> str:
    """Render the settings and machines that differ between the runs."""
    manifests = {key: reader.manifest for key, reader in readers.items() if reader.manifest is not None}
    if len(manifests) < 2:
        return ""
    rows = [[name, *values] for name, values in setting_differences(list(manifests.values()))]
    return render_template(
        "table.html", head=["setting", *manifests], rows=rows or [["no differences", *("" for _ in manifests)]]
    )
