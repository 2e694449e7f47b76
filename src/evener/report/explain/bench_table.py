"""Tabulate the runs of a bench: figures down, runs across, which fits a terminal and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.core.base.units import format_count, format_seconds
from evener.core.run.step_cost import StepCost
from evener.report.explain.predicted_vs_measured import step_prediction_cells
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import fastest_rank


def bench_rows(summaries: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return one row per figure: its name, then its value in each run; the first run is the baseline.

    The phases of a step are those of the rank that waits most: there they sum to the step, and waiting shows.
    """
    base = summaries[0].tokens_per_s

    def speedup(summary: RunSummary) -> float | None:
        return summary.tokens_per_s / base if summary.tokens_per_s and base else None

    def efficiency(summary: RunSummary) -> str:
        ratio = speedup(summary)
        return "not measured" if ratio is None else f"{ratio / summary.manifest.world_size:.0%}"

    def of_several(figure: Callable[[RunSummary], float | None]) -> Callable[[RunSummary], str]:
        return lambda summary: "–" if summary.manifest.world_size == 1 else format_seconds(figure(summary))

    def cost(summary: RunSummary) -> StepCost:
        return fastest_rank(summary).typical

    figures: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("processes", lambda summary: str(summary.manifest.world_size)),
        ("threads of each", lambda summary: summary.thread_range),
        ("tokens/s", lambda summary: format_count(summary.tokens_per_s)),
        ("speed-up", lambda summary: "not measured" if (ratio := speedup(summary)) is None else f"{ratio:.2f}"),
        ("efficiency", efficiency),
        ("step", lambda summary: format_seconds(summary.step_p50_s)),
        ("predicted step", lambda summary: step_prediction_cells(summary)[0]),
        ("  difference", lambda summary: step_prediction_cells(summary)[1]),
        ("  compute", lambda summary: format_seconds(cost(summary).compute_s)),
        ("  exposed communication", of_several(lambda summary: cost(summary).exposed_sync_s)),
        ("  wait for another rank", of_several(lambda summary: cost(summary).wait_s)),
        ("  optimizer", lambda summary: format_seconds(cost(summary).optimizer_s)),
        ("all-reduce p50", of_several(lambda summary: summary.sync_p50_s)),
        ("all-reduce p95", of_several(lambda summary: summary.sync_p95_s)),
    ]
    return [(name, *(figure(summary) for summary in summaries)) for name, figure in figures]
