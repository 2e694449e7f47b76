"""How do the runs of a bench compare, in one table?"""

from __future__ import annotations

from collections.abc import Sequence

from evener.core.units import count, seconds
from evener.report.summary import Summary

COLUMNS = (
    "processes",
    "threads each",
    "tokens/s",
    "speed-up",
    "efficiency",
    "step",
    "compute",
    "all-reduce p50 / p95",
    "exposed",
    "wait",
)


def rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """One row a run, in the order of COLUMNS; the first run is what the others are compared with."""
    base = summaries[0].tokens_per_s
    return [_row(summary, base) for summary in summaries]


def markdown(summaries: Sequence[Summary]) -> str:
    """The table for a page of text."""
    lines = [COLUMNS, tuple("---:" for _ in COLUMNS), *rows(summaries)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(summary: Summary, base: float | None) -> tuple[str, ...]:
    ranks = summary.manifest.world_size
    speedup = summary.tokens_per_s / base if summary.tokens_per_s and base else None
    alone = ranks == 1
    return (
        str(ranks),
        str(summary.threads),
        count(summary.tokens_per_s),
        "not measured" if speedup is None else f"{speedup:.2f}",
        "not measured" if speedup is None else f"{speedup / ranks:.0%}",
        seconds(summary.step_p50_s),
        seconds(summary.mean_part("compute_s")),
        "–" if alone else f"{seconds(summary.sync_p50_s)} / {seconds(summary.sync_p95_s)}",
        "–" if alone else seconds(summary.mean_part("exposed_sync_s")),
        "–" if alone else seconds(summary.mean_part("wait_s")),
    )
