"""Compare every predicted figure of a run with its measurement."""

from __future__ import annotations

import msgspec

from evener.core.prediction import Option
from evener.core.units import count, seconds, size
from evener.report.figures import PART_NAMES
from evener.report.summary import Summary


class Row(msgspec.Struct, frozen=True, kw_only=True):
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

        >>> Row(name="step", unit="s", predicted=2.0, measured=3.0).relative
        0.5
        """
        return self.difference / self.predicted if self.difference is not None and self.predicted else None


def against(summary: Summary) -> tuple[str, str]:
    """Return the predicted step of a run, and the relative difference of the measured one, as text."""
    option = summary.predicted
    if option is None:
        return "not predicted", "–"
    row = step_rows(summary, option)[0]
    return cells(row)[1], percent(row.relative)


def step_rows(summary: Summary, option: Option) -> list[Row]:
    """Return the rows of the whole step: step time, throughput, bytes, memory."""
    result = summary.manifest.result
    peaks = result.peak_memory_bytes if result else []
    needs = [rank.memory_bytes for rank in option.ranks if rank.memory_bytes is not None]
    sent = [rank.bytes for rank in summary.ranks if rank.bytes is not None]
    return [
        Row(name="step", unit="s", predicted=option.step_s, measured=summary.step_p50_s),
        Row(name="tokens/s", unit="tokens/s", predicted=option.tokens_per_s, measured=summary.tokens_per_s),
        Row(name="bytes that a rank sends", unit="bytes", predicted=option.bytes_per_rank,
            measured=max(sent, default=None)),
        Row(name="peak memory of a rank", unit="bytes", predicted=max(needs, default=None),
            measured=max(peaks, default=0) or None),
    ]  # fmt: skip


def rank_rows(summary: Summary, option: Option, rank: int) -> list[Row]:
    """Return the rows of one rank's step, phase by phase."""
    planned, took = option.ranks[rank], summary.ranks[rank]
    peaks = summary.manifest.result.peak_memory_bytes if summary.manifest.result else []
    parts = [
        Row(name=name, unit="s", predicted=getattr(planned.cost, part), measured=getattr(took.typical, part))
        for part, name in PART_NAMES.items()
    ]
    measured_s = took.typical.total_s if summary.step_p50_s else None
    return [
        *parts,
        Row(name="sum", unit="s", predicted=planned.cost.total_s, measured=measured_s),
        Row(name="communication in flight", unit="s", predicted=planned.sync_s, measured=took.sync_s),
        Row(name="bytes sent", unit="bytes", predicted=planned.bytes, measured=took.bytes),
        Row(name="peak memory", unit="bytes", predicted=planned.memory_bytes,
            measured=peaks[rank] or None if rank < len(peaks) else None),
    ]  # fmt: skip


def cells(row: Row) -> list[str]:
    """Format a row: name, predicted, measured, difference, difference in per cent."""
    difference = "–" if row.difference is None else _told(abs(row.difference), row.unit)
    if row.difference is not None:
        nothing = difference == _told(0.0, row.unit)
        difference = "0" if nothing else ("+" if row.difference > 0 else "−") + difference
    return [
        row.name,
        "not predicted" if row.predicted is None else _told(row.predicted, row.unit),
        "not measured" if row.measured is None else _told(row.measured, row.unit),
        difference,
        percent(row.relative),
    ]


def percent(relative: float | None) -> str:
    """Format a relative difference with its sign.

    >>> percent(0.981), percent(-0.2), percent(0.001), percent(67.81), percent(None)
    ('+98%', '−20%', '0%', '69 times', '–')
    """
    if relative is None:
        return "–"
    if relative >= 9:
        return f"{1 + relative:.0f} times"
    rounded = round(100 * relative)
    return f"{'+' if rounded > 0 else '−' if rounded < 0 else ''}{abs(rounded)}%"


def _told(value: float, unit: str) -> str:
    return seconds(value) if unit == "s" else size(value) if unit == "bytes" else count(value)
