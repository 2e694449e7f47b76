"""Compare every predicted figure of a run with its measurement."""

from __future__ import annotations

import msgspec

from evener.core.base.units import format_bytes, format_count, format_seconds
from evener.core.run.prediction import PlanOption
from evener.core.run.step_cost import PHASE_NAMES
from evener.report.read.run_summary import RunSummary


class PredictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, predicted and measured."""

    name: str
    unit: str  # s, tokens/s, bytes
    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        """Measured minus predicted."""
        return None if self.predicted is None or self.measured is None else self.measured - self.predicted

    @property
    def relative(self) -> float | None:
        """The difference relative to the prediction.

        >>> PredictionRow(name="step", unit="s", predicted=2.0, measured=3.0).relative
        0.5
        """
        return self.difference / self.predicted if self.difference is not None and self.predicted else None


def step_prediction_cells(summary: RunSummary) -> tuple[str, str]:
    """Return the predicted step of a run, and the relative difference of the measured one, as text."""
    option = summary.predicted
    if option is None:
        return "not predicted", "–"
    row = step_rows(summary, option)[0]
    return prediction_cells(row)[1], format_relative_difference(row.relative)


def step_rows(summary: RunSummary, option: PlanOption) -> list[PredictionRow]:
    """Return the rows of the whole step: step time, throughput, bytes, memory."""
    result = summary.manifest.result
    peaks = result.peak_memory_bytes if result else []
    needs = [rank.memory_bytes for rank in option.ranks if rank.memory_bytes is not None]
    sent = [rank.bytes for rank in summary.ranks if rank.bytes is not None]
    return [
        PredictionRow(name="step", unit="s", predicted=option.step_s, measured=summary.step_p50_s),
        PredictionRow(name="tokens/s", unit="tokens/s", predicted=option.tokens_per_s, measured=summary.tokens_per_s),
        PredictionRow(name="bytes that a rank sends", unit="bytes", predicted=option.bytes_per_rank,
            measured=max(sent, default=None)),
        PredictionRow(name="peak memory of a rank", unit="bytes", predicted=max(needs, default=None),
            measured=max(peaks, default=0) or None),
    ]  # fmt: skip


def rank_rows(summary: RunSummary, option: PlanOption, rank: int) -> list[PredictionRow]:
    """Return the rows of one rank's step, phase by phase."""
    planned, took = option.ranks[rank], summary.ranks[rank]
    peaks = summary.manifest.result.peak_memory_bytes if summary.manifest.result else []
    parts = [
        PredictionRow(name=name, unit="s", predicted=getattr(planned.cost, part), measured=getattr(took.typical, part))
        for part, name in PHASE_NAMES.items()
    ]
    measured_s = took.typical.total_s if summary.step_p50_s else None
    return [
        *parts,
        PredictionRow(name="sum", unit="s", predicted=planned.cost.total_s, measured=measured_s),
        PredictionRow(name="communication in flight", unit="s", predicted=planned.sync_s, measured=took.sync_s),
        PredictionRow(name="bytes sent", unit="bytes", predicted=planned.bytes, measured=took.bytes),
        PredictionRow(name="peak memory", unit="bytes", predicted=planned.memory_bytes,
            measured=peaks[rank] or None if rank < len(peaks) else None),
    ]  # fmt: skip


def prediction_cells(row: PredictionRow) -> list[str]:
    """Format a row: name, predicted, measured, difference, difference in per cent."""
    difference = "–" if row.difference is None else _format_value(abs(row.difference), row.unit)
    if row.difference is not None:
        nothing = difference == _format_value(0.0, row.unit)
        difference = "0" if nothing else ("+" if row.difference > 0 else "−") + difference
    return [
        row.name,
        "not predicted" if row.predicted is None else _format_value(row.predicted, row.unit),
        "not measured" if row.measured is None else _format_value(row.measured, row.unit),
        difference,
        format_relative_difference(row.relative),
    ]


def format_relative_difference(relative: float | None) -> str:
    """Format a relative difference with its sign.

    >>> (format_relative_difference(0.981), format_relative_difference(-0.2), format_relative_difference(0.001),
    ...  format_relative_difference(67.81), format_relative_difference(None))
    ('+98%', '−20%', '0%', '69 times', '–')
    """
    if relative is None:
        return "–"
    if relative >= 9:
        return f"{1 + relative:.0f} times"
    rounded = round(100 * relative)
    return f"{'+' if rounded > 0 else '−' if rounded < 0 else ''}{abs(rounded)}%"


def _format_value(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else format_bytes(value) if unit == "bytes" else format_count(value)
