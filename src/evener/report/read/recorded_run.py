"""Gather what pages and tables show of a run, whether all its records are read at once or as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import StepRecord, align_steps
from evener.report.read.event_log import evaluations
from evener.report.read.run_curves import RunCurves
from evener.report.read.run_summary import RunSummary, read_records, summarize_records


@dataclass(frozen=True)
class RecordedRun:
    """The figures and the curves of one run."""

    summary: RunSummary
    curves: RunCurves
    val_losses: list[tuple[int, float]]  # (steps taken, validation loss)
    state: str

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one global batch; 0 if unknown."""
        return self.summary.tokens_per_step

    @property
    def best_val_loss(self) -> float | None:
        """The lowest validation loss."""
        return min((loss for _, loss in self.val_losses), default=None)


def read_recorded_run(rundir: RunDir) -> RecordedRun:
    """Read all records of a run."""
    records = read_records(rundir)
    return record_run(rundir, align_steps(records), records, rundir.events())


def record_run(
    rundir: RunDir,
    steps: Sequence[dict[int, StepRecord]],
    records: Mapping[int, list[StepRecord]],
    events: list[dict[str, Any]],
) -> RecordedRun:
    """Gather the figures and curves of a run from its events and records; `steps` are the records, aligned."""
    summary = summarize_records(rundir, steps, records, events)
    manifest = summary.manifest
    return RecordedRun(summary, RunCurves.from_steps(steps), val_losses(manifest, events), manifest.verdict)


def val_losses(manifest: Manifest | None, events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (steps taken, validation loss) of all evaluations, including the one at the end of the run."""
    losses = dict(evaluations(events))
    result = manifest.result if manifest is not None else None
    if result is not None and result.val_loss is not None:
        losses[result.steps] = result.val_loss
    return sorted(losses.items())
