"""Show several runs: a table of all with their states, or a comparison of some, with their curves overlaid and their
differing settings listed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.core.base.units import format_count, format_seconds
from evener.report.draw.run_charts import COMPARISON_CHARTS, SERIES_COLOURS, comparison_charts
from evener.report.draw.svg_charts import render_svg
from evener.report.pages import bench_report, compare_setups
from evener.report.pages.compare_runs import breakdown, comparison_table, differences, outcome_rows
from evener.report.read.recorded_run import val_losses
from evener.report.read.run_state import MARK_SYMBOLS
from evener.watch import run_view
from evener.watch.page_fragments import Fragments, chart_fragments, count_states, render_template
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader

MAX_COMPARED = 2 * len(SERIES_COLOURS)  # the second half is dashed


def overview_fragments(readers: Mapping[str, RunReader], now: float) -> Fragments:
    """Render one row per run, newest first."""
    rows = [overview_row(key, reader, now) for key, reader in readers.items()]
    rows.sort(key=lambda row: -row["began"])
    benches: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        benches.setdefault(row["bench"], []).append(row)
    alone = benches.pop("", [])
    folded = [(name, count_states([row["health"].state for row in of_bench]), of_bench)
              for name, of_bench in benches.items()]  # fmt: skip
    return {
        "runs": render_template("runs.html", rows=alone, benches=folded),
        "counts": count_states([row["health"].state for row in rows]),
    }


def overview_row(key: str, reader: RunReader, now: float) -> dict[str, Any]:
    """Return the row of a run in the overview."""
    manifest, run_health, rate = reader.manifest, assess_health(reader, now), run_view.tokens_per_s(reader)
    last, loss = reader.curves.last_record, run_view.newest_loss(reader)
    best = min((val_loss for _, val_loss in val_losses(manifest, reader.events)), default=None)
    began = manifest.started if manifest else next((float(event["time"]) for event in reader.events), now)
    folder = Path(reader.rundir.path).parent
    is_of_bench = any((folder / index).is_file() for index in (bench_report.FILE_NAME, compare_setups.FILE_NAME))
    return {
        "key": key,
        "bench": folder.name if is_of_bench else "",  # its rows are folded
        "health": run_health,
        "sign": MARK_SYMBOLS[run_health.mark],
        "began": began,
        "begun": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        "steps": f"{reader.curves.steps_done:,}"
        + (f" of {manifest.planned_steps:,}" if manifest and manifest.planned_steps else ""),
        "loss": "–" if loss is None else f"{loss:.4f}",
        "val_loss": "–" if best is None else f"{best:.4f}",
        "rate": "–" if rate is None else format_count(rate),
        "left": format_seconds(run_view.time_left_s(reader)) if not run_health.is_over and last is not None else "–",
        "hosts": ", ".join(manifest.roster.hosts) if manifest else "",
    }


def comparison_fragments(readers: Mapping[str, RunReader], axis: str, now: float) -> Fragments:
    """Render the overlaid curves, the figures and the differences of the runs, as a report of them does."""
    recorded = {key: run_view.recorded_run(reader, assess_health(reader, now).state) for key, reader in readers.items()}
    runs = dict([(key, run) for key, run in recorded.items() if run is not None][:MAX_COMPARED])
    fragments = chart_fragments(COMPARISON_CHARTS, comparison_charts(runs, axis))
    if not runs:
        return fragments | {"figures": "", "parts": "", "differences": ""}
    bars, labels, differ = breakdown(runs), list(runs), differences(runs)
    same = [("no differences", ["" for _ in labels])]
    return fragments | {
        "figures": _table(*comparison_table(labels, outcome_rows(runs))),
        "parts": "" if bars is None else render_svg(bars),
        "differences": _table(*comparison_table(labels, differ or same)) if len(runs) > 1 else "",
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render_template("table.html", head=head, rows=rows)
