"""Show several runs: a table of all with their states, or a comparison of some, with their curves overlaid and their
differing settings listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from evener.core.units import count, seconds
from evener.report.beside import cost, differences
from evener.report.chart import Chart, Line
from evener.report.figures import PART_NAMES, SERIES_COLOURS
from evener.report.smooth import averaged, smoothed
from evener.watch import view
from evener.watch.health import health
from evener.watch.pages import SIGNS, Pieces, plot, render, told_of_all
from evener.watch.reader import Reader
from evener.watch.series import Points
from evener.watch.view import Axis, Plot

MAX_COMPARED = 2 * len(SERIES_COLOURS)  # the second half is dashed


def overview_pieces(readers: Mapping[str, Reader], now: float) -> Pieces:
    """Render one row per run, newest first."""
    rows = [row_of(key, reader, now) for key, reader in readers.items()]
    rows.sort(key=lambda row: -row["began"])
    return {"runs": render("runs.html", rows=rows), "told": told_of_all([row["health"].word for row in rows])}


def row_of(key: str, reader: Reader, now: float) -> dict[str, Any]:
    """Return the row of a run in the overview."""
    manifest, run_health, rate = reader.manifest, health(reader, now), view.tokens_per_s(reader)
    last, vals = reader.curves.last, view.validation(reader)
    began = manifest.started if manifest else next((float(event["time"]) for event in reader.events), now)
    return {
        "key": key,
        "health": run_health,
        "sign": SIGNS[run_health.mark],
        "began": began,
        "begun": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        "steps": f"{reader.curves.done:,}" + (f" of {manifest.spec.train.steps:,}" if manifest else ""),
        "loss": newest[1] if (newest := view.newest_loss(reader)) else "–",
        "val_loss": f"{min(vals.means):.4f}" if len(vals) else "–",
        "rate": "–" if rate is None else count(rate),
        "left": seconds(view.left_s(reader)) if not run_health.is_over and last is not None else "–",
        "hosts": ", ".join(manifest.roster.hosts) if manifest else "",
    }


def compare_pieces(readers: Mapping[str, Reader], axis: str, now: float) -> Pieces:
    """Render the overlaid curves, the figures and the differences of the runs."""
    shown = dict(list(readers.items())[:MAX_COMPARED])
    return {
        "loss": plot("loss", _over(shown, axis, "loss, smoothed", _loss)),
        "validation": plot("validation", _over(shown, axis, "validation loss", view.validation)),
        "speed": plot("speed", _over(shown, axis, "tokens/s, smoothed", _speed, from_zero=True)),
        "figures": _known_columns(FIGURES, [_figures(key, reader, now) for key, reader in shown.items()]),
        "parts": render("table.html", head=["run", *PART_NAMES.values(), "sum"],
                        rows=[_parts(key, reader) for key, reader in shown.items()]),
        "differences": _differences(shown),
    }  # fmt: skip


def _loss(reader: Reader) -> Points:
    points = reader.curves.shared["loss"].points()
    return Points(points.steps, smoothed(points.means), points.lows, points.highs)


def _speed(reader: Reader) -> Points:
    points, tokens = reader.curves.shared["wall_s"].points(), view.tokens_per_step(reader)
    rates = [tokens / wall_s for wall_s in averaged(points.means)] if tokens else []
    return Points(points.steps if rates else [], rates, rates, rates)


def _over(readers: Mapping[str, Reader], axis: str, title: str, curve: Callable[[Reader], Points], *,
          from_zero: bool = False) -> Plot | None:  # fmt: skip
    """Plot one line per run."""
    lines, rows, title_x = [], [], "step"
    for i, (key, reader) in enumerate(readers.items()):
        points, x_axis = curve(reader), Axis(reader, axis)
        if not len(points):
            continue
        title_x = x_axis.title
        lines.append(Line(key, SERIES_COLOURS[i % len(SERIES_COLOURS)], x_axis.of(points.steps), points.means,
                          dashed=i >= len(SERIES_COLOURS)))  # fmt: skip
        value_text = count if from_zero else "{:.4f}".format
        rows.append([key, f"{points.steps[-1] + 1:,}", value_text(points.means[-1]), value_text(min(points.means)),
                     value_text(max(points.means))])  # fmt: skip
    if not lines:
        return None
    high = 1.15 * max(max(line.y) for line in lines)
    chart = Chart(lines, title_x, title, y_range=(0.0, high) if from_zero else None)
    return Plot(chart, ["run", "after step", "newest", "min", "max"], rows)


FIGURES = ["run", "state", "steps", "loss", "best validation loss", "tokens/s", "step", "communication", "processes",
           "hosts", "sync strategy", "training time", "electricity", "price"]  # fmt: skip


def _figures(key: str, reader: Reader, now: float) -> list[str]:
    manifest, vals, newest = reader.manifest, view.validation(reader), view.newest_loss(reader)
    share, rate, walls_s = view.communication(reader), view.tokens_per_s(reader), reader.curves.shared["wall_s"].sums
    plan, kwh, money = reader.plan, None, None
    if manifest is not None and plan is not None:
        kwh, money = cost(plan.prediction, manifest, sum(walls_s))
    return [
        key,
        health(reader, now).word,
        f"{reader.curves.done:,}",
        newest[1] if newest else "–",
        f"{min(vals.means):.4f}" if len(vals) else "–",
        "–" if rate is None else count(rate),
        seconds(view.step_s(reader)),
        "–" if share is None else f"{share:.0%}",
        str(manifest.world_size) if manifest else "–",
        ", ".join(manifest.roster.hosts) if manifest else "–",
        str(manifest.roster.sync) if manifest else "–",
        seconds(sum(walls_s)) if walls_s else "–",
        "–" if kwh is None else f"{kwh:.3g} kWh",
        "–" if money is None else f"{money:.2f}",
    ]


def _known_columns(head: list[str], rows: list[list[str]]) -> str:
    """Render a table without the columns that are unknown for every run."""
    columns = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    return render("table.html", head=[head[i] for i in columns], rows=[[row[i] for i in columns] for row in rows])


def _parts(key: str, reader: Reader) -> list[str]:
    """Return the step breakdown of the rank with the longest compute time, which the others wait for."""
    costs = [view.cost(reader, rank) for rank in reader.curves.newest]
    if not costs:
        return [key, *("–" for _ in PART_NAMES), "–"]
    cost = max(costs, key=lambda rank_cost: rank_cost.compute_s or 0.0)
    return [key, *(seconds(getattr(cost, phase)) for phase in PART_NAMES), seconds(cost.total_s)]


def _differences(readers: Mapping[str, Reader]) -> str:
    """Render the settings and machines that differ between the runs."""
    manifests = {key: reader.manifest for key, reader in readers.items() if reader.manifest is not None}
    if len(manifests) < 2:
        return ""
    rows = [[name, *values] for name, values in differences(list(manifests.values()))]
    return render(
        "table.html", head=["setting", *manifests], rows=rows or [["no differences", *("" for _ in manifests)]]
    )
