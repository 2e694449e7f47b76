"""Tabulate the runs of a bench: figures down, runs across, which fits a terminal and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.core.step import StepCost
from evener.core.units import count, seconds
from evener.report.predicted import against
from evener.report.ranks import first_done
from evener.report.summary import Summary


def rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return one row per figure: its name, then its value in each run; the first run is the baseline.

    The phases of a step are those of the rank that waits most: there they sum to the step, and waiting shows.
    """
    base = summaries[0].tokens_per_s

    def speedup(summary: Summary) -> float | None:
        return summary.tokens_per_s / base if summary.tokens_per_s and base else None

    def efficiency(summary: Summary) -> str:
        ratio = speedup(summary)
        return "not measured" if ratio is None else f"{ratio / summary.manifest.world_size:.0%}"

    def of_several(figure: Callable[[Summary], float | None]) -> Callable[[Summary], str]:
        return lambda summary: "–" if summary.manifest.world_size == 1 else seconds(figure(summary))

    def cost(summary: Summary) -> StepCost:
        return first_done(summary).typical

    figures: list[tuple[str, Callable[[Summary], str]]] = [
        ("processes", lambda summary: str(summary.manifest.world_size)),
        ("threads of each", lambda summary: str(summary.threads)),
        ("tokens/s", lambda summary: count(summary.tokens_per_s)),
        ("speed-up", lambda summary: "not measured" if (ratio := speedup(summary)) is None else f"{ratio:.2f}"),
        ("efficiency", efficiency),
        ("step", lambda summary: seconds(summary.step_p50_s)),
        ("predicted step", lambda summary: against(summary)[0]),
        ("  difference", lambda summary: against(summary)[1]),
        ("  compute", lambda summary: seconds(cost(summary).compute_s)),
        ("  exposed communication", of_several(lambda summary: cost(summary).exposed_sync_s)),
        ("  wait for another rank", of_several(lambda summary: cost(summary).wait_s)),
        ("  optimizer", lambda summary: seconds(cost(summary).optimizer_s)),
        ("all-reduce p50", of_several(lambda summary: summary.sync_p50_s)),
        ("all-reduce p95", of_several(lambda summary: summary.sync_p95_s)),
    ]
    return [(name, *(figure(summary) for summary in summaries)) for name, figure in figures]
