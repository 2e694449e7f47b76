"""Export runs to Prometheus: text format 0.0.4, one sample per run, gauges only because a run can roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from evener.core.step import PARTS
from evener.watch import view
from evener.watch.health import health, predicted
from evener.watch.reader import Reader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WORDS = ("starting", "healthy", "slow", "stuck", "no word", "failed", "stopped", "finished")

Gauge = tuple[str, str, Callable[[Reader], float | None]]
GAUGES: tuple[Gauge, ...] = (
    ("evener_steps", "Optimizer steps taken.", lambda reader: reader.curves.done),
    ("evener_steps_wanted", "Optimizer steps requested.",
     lambda reader: reader.manifest.spec.train.steps if reader.manifest else None),
    ("evener_loss", "Training loss of the newest step.",
     lambda reader: reader.curves.last.loss if reader.curves.last else None),
    ("evener_validation_loss", "Newest loss of the validation split.",
     lambda reader: next(iter(reversed(view.validation(reader).means)), None)),
    ("evener_tokens_per_second", "Tokens per second of the newest steps, or of all once the run ended.",
     view.tokens_per_s),
    ("evener_predicted_tokens_per_second", "Tokens per second predicted by the planner.",
     lambda reader: option.tokens_per_s if (option := predicted(reader)) else None),
    ("evener_step_seconds", "Typical time of the newest steps.", view.step_s),
    ("evener_communication_ratio", "Share of step time spent communicating or waiting.", view.communication),
    ("evener_left_seconds", "Estimated time until the run ends.", view.left_s),
    ("evener_learning_rate", "Learning rate of the newest step.",
     lambda reader: reader.curves.last.lr if reader.curves.last else None),
    ("evener_gradient_norm", "Gradient norm of the newest step, before clipping.",
     lambda reader: reader.curves.last.grad_norm if reader.curves.last else None),
)  # fmt: skip


def exposition(readers: Mapping[str, Reader]) -> str:
    """Return the metrics of all runs as text, without those that were not measured."""
    now, lines = time.time(), []
    for name, help_text, read in GAUGES:
        samples = [(_labels(run=key), value) for key, reader in readers.items() if (value := read(reader)) is not None]
        lines += _family(name, help_text, samples)
    states = [(_labels(run=key, state=state), float(health(reader, now).word == state))
              for key, reader in readers.items() for state in WORDS]  # fmt: skip
    lines += _family("evener_state", "1 for the state of the run, 0 for all other states.", states)
    phases = [
        (_labels(run=key, rank=str(rank), part=phase.removesuffix("_s")), value_s)
        for key, reader in readers.items() for rank in sorted(reader.curves.newest)
        for cost in (view.cost(reader, rank),)
        for phase in PARTS if (value_s := getattr(cost, phase)) is not None
    ]  # fmt: skip
    lines += _family("evener_step_part_seconds", "Mean time of each phase of a rank's newest steps.", phases)
    return "\n".join(lines) + "\n"


def _family(name: str, told: str, samples: list[tuple[str, float]]) -> list[str]:
    if not samples:
        return []
    return [
        f"# HELP {name} {told}",
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
