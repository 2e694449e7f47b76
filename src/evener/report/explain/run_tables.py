"""Format the figures of runs as the cells of tables, for a terminal and for pages.

A cell function takes a run and the baseline that ratios are relative to. Phases are those of the rank that waits most:
there they sum to the step, and waiting shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.core.base.units import format_bytes, format_count, format_seconds
from evener.report.explain.predicted_vs_measured import step_prediction_cells
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import fastest_rank

Cell = Callable[[RunSummary, RunSummary | None], str]

MULTI_RANK_PHASES = ("exposed_sync_s", "wait_s")  # phases that exist only with several ranks
ROUNDING_TOLERANCE = 5e-4  # relative difference of losses that rounding alone explains


def speedup_over(run: RunSummary, base: RunSummary | None) -> float | None:
    """Return the throughput relative to `base`; None if either was not measured."""
    return run.tokens_per_s / base.tokens_per_s if base and base.tokens_per_s and run.tokens_per_s else None


def relative_val_loss(run: RunSummary, base: RunSummary | None) -> float | None:
    """Return the validation loss at the end relative to that of `base`, minus 1; None if either was not measured."""
    mine, theirs = final_val_loss(run), final_val_loss(base) if base else None
    return mine / theirs - 1 if mine is not None and theirs else None


def final_val_loss(run: RunSummary) -> float | None:
    """Return the validation loss at the end of the run."""
    return run.manifest.result.val_loss if run.manifest.result else None


# --- cells ------------------------------------------------------------------------------------------------------------


def loss_cell(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f}"


def penalty_cell(more: float | None) -> str:
    """Format a relative loss penalty.

    >>> penalty_cell(0.012), penalty_cell(-0.05), penalty_cell(1e-5), penalty_cell(None)
    ('+1.2%', '−5.0%', 'same', 'not measured')
    """
    if more is None:
        return "not measured"
    return "same" if abs(more) < ROUNDING_TOLERANCE else f"{more:+.1%}".replace("-", "−")


def speedup_cell(run: RunSummary, base: RunSummary | None) -> str:
    ratio = speedup_over(run, base)
    return "not measured" if ratio is None else f"{ratio:.2f}"


def efficiency_cell(run: RunSummary, base: RunSummary | None) -> str:
    ratio = speedup_over(run, base)
    return "not measured" if ratio is None else f"{ratio / run.manifest.world_size:.0%}"


def of_several(cell: Callable[[RunSummary], str]) -> Cell:
    """Return the cell of a figure that only a run with several ranks has."""
    return lambda run, base: "–" if run.manifest.world_size == 1 else cell(run)


def phase_cell(phase: str) -> Cell:
    """Return the cell of one phase of the typical step."""

    def cell(run: RunSummary) -> str:
        return format_seconds(getattr(fastest_rank(run).typical, phase)) if run.ranks else "not measured"

    return of_several(cell) if phase in MULTI_RANK_PHASES else lambda run, base: cell(run)


def sent_bytes(run: RunSummary) -> str:
    sent = max((rank.bytes for rank in run.ranks if rank.bytes is not None), default=None)
    return "not measured" if sent is None else format_bytes(sent)


def tokens_per_s_cell(run: RunSummary, base: RunSummary | None) -> str:
    return format_count(run.tokens_per_s)


def step_cell(run: RunSummary, base: RunSummary | None) -> str:
    return format_seconds(run.step_p50_s)


def predicted_cell(run: RunSummary, base: RunSummary | None) -> str:
    return step_prediction_cells(run)[0]


ALL_REDUCE_P50 = of_several(lambda run: format_seconds(run.sync_p50_s))

# --- the tables of benches --------------------------------------------------------------------------------------------

BENCH_ROWS: dict[str, Cell] = {
    "processes": lambda run, base: str(run.manifest.world_size),
    "threads of each": lambda run, base: run.thread_range,
    "tokens/s": tokens_per_s_cell,
    "speed-up": speedup_cell,
    "efficiency": efficiency_cell,
    "step": step_cell,
    "predicted step": predicted_cell,
    "  difference": lambda run, base: step_prediction_cells(run)[1],
    "  compute": phase_cell("compute_s"),
    "  exposed communication": phase_cell("exposed_sync_s"),
    "  wait for another rank": phase_cell("wait_s"),
    "  optimizer": phase_cell("optimizer_s"),
    "all-reduce p50": ALL_REDUCE_P50,
    "all-reduce p95": of_several(lambda run: format_seconds(run.sync_p95_s)),
}
SETUP_CELLS: dict[str, Cell] = {
    "tokens/s": tokens_per_s_cell,
    "×": lambda run, base: "–" if speedup_over(run, base) is None else speedup_cell(run, base),
    "step": step_cell,
    "predicted": predicted_cell,
    "all-reduce": ALL_REDUCE_P50,
    "exposed": phase_cell("exposed_sync_s"),
    "wait": phase_cell("wait_s"),
    "sends": of_several(sent_bytes),
    "loss": lambda run, base: loss_cell(final_val_loss(run)),
    "penalty": lambda run, base: "–" if run is base else penalty_cell(relative_val_loss(run, base)),
}


def bench_rows(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    """Return one row per figure: its name, then its value in each run; the first run is the baseline."""
    return [(name, *(cell(run, runs[0]) for run in runs)) for name, cell in BENCH_ROWS.items()]
