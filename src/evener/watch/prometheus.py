"""Export runs to Prometheus: text format 0.0.4, one sample per run, gauges only because a run can roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from evener.core.run.step_cost import PHASES
from evener.report.read.recorded_run import val_losses
from evener.report.read.run_state import STATE_MARKS
from evener.watch import run_view
from evener.watch.run_health import assess_health, current_prediction
from evener.watch.run_reader import RunReader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Gauge = tuple[str, str, Callable[[RunReader], float | None]]
GAUGES: tuple[Gauge, ...] = (
    ("evener_steps", "Optimizer steps taken.", lambda reader: reader.curves.steps_done),
    ("evener_steps_wanted", "Optimizer steps requested.",
     lambda reader: reader.manifest.planned_steps if reader.manifest else None),
    ("evener_loss", "Training loss of the newest step.",
     lambda reader: reader.curves.last_record.loss if reader.curves.last_record else None),
    ("evener_validation_loss", "Newest loss of the validation split.",
     lambda reader: next((loss for _, loss in reversed(val_losses(reader.manifest, reader.events))), None)),
    ("evener_tokens_per_second", "Tokens per second of the newest steps, or of all once the run ended.",
     run_view.tokens_per_s),
    ("evener_predicted_tokens_per_second", "Tokens per second predicted by the planner.",
     lambda reader: option.tokens_per_s if (option := current_prediction(reader)) else None),
    ("evener_step_seconds", "Typical time of the newest steps.", run_view.typical_step_s),
    ("evener_communication_ratio", "Share of step time spent communicating or waiting.", run_view.communication_share),
    ("evener_left_seconds", "Estimated time until the run ends.", run_view.time_left_s),
    ("evener_learning_rate", "Learning rate of the newest step.",
     lambda reader: reader.curves.last_record.lr if reader.curves.last_record else None),
    ("evener_gradient_norm", "Gradient norm of the newest step, before clipping.",
     lambda reader: reader.curves.last_record.grad_norm if reader.curves.last_record else None),
)  # fmt: skip


def exposition_text(readers: Mapping[str, RunReader]) -> str:
    """Return the metrics of all runs as text, without those that were not measured."""
    now, lines = time.time(), []
    for name, help_text, read in GAUGES:
        samples = [(_labels(run=key), value) for key, reader in readers.items() if (value := read(reader)) is not None]
        lines += _metric_family(name, help_text, samples)
    states = [(_labels(run=key, state=state), float(assess_health(reader, now).state == state))
              for key, reader in readers.items() for state in STATE_MARKS]  # fmt: skip
    lines += _metric_family("evener_state", "1 for the state of the run, 0 for all other states.", states)
    phases = [
        (_labels(run=key, rank=str(rank), part=phase.removesuffix("_s")), value_s)
        for key, reader in readers.items() for rank in sorted(reader.curves.newest)
        for cost in (run_view.rank_cost(reader, rank),)
        for phase in PHASES if (value_s := getattr(cost, phase)) is not None
    ]  # fmt: skip
    lines += _metric_family("evener_step_part_seconds", "Mean time of each phase of a rank's newest steps.", phases)
    return "\n".join(lines) + "\n"


def _metric_family(name: str, help_text: str, samples: list[tuple[str, float]]) -> list[str]:
    if not samples:
        return []
    return [
        f"# HELP {name} {help_text}",
        f"# TYPE {name} gauge",
        *(f"{name}{labels} {value!r}" for labels, value in samples),
    ]


def _labels(**values: str) -> str:
    """Format labels, escaped as the format requires.

    >>> print(_labels(run='a"b'))
    {run="a\\"b"}
    """
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
