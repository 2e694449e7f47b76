"""How does Prometheus read a run? In its text format, a sample a run, gauges alone: a run can go back.   [0.0.4]"""

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
    ("evener_steps_wanted", "Optimizer steps asked for.",
     lambda reader: reader.manifest.spec.train.steps if reader.manifest else None),
    ("evener_loss", "Training loss of the newest step.",
     lambda reader: reader.curves.last.loss if reader.curves.last else None),
    ("evener_validation_loss", "Newest loss of the validation split.",
     lambda reader: next(iter(reversed(view.validation(reader).means)), None)),
    ("evener_tokens_per_second", "Of the newest steps; of a run that is over, of all.", view.tokens_per_s),
    ("evener_predicted_tokens_per_second", "What the planner said.",
     lambda reader: option.tokens_per_s if (option := predicted(reader)) else None),
    ("evener_step_seconds", "Of the newest steps.", view.step_s),
    ("evener_communication_ratio", "Share of the newest steps, waiting included.", view.communication),
    ("evener_left_seconds", "Until the run is over.", view.left_s),
    ("evener_learning_rate", "Of the newest step.",
     lambda reader: reader.curves.last.lr if reader.curves.last else None),
    ("evener_gradient_norm", "Of the newest step, before clipping.",
     lambda reader: reader.curves.last.grad_norm if reader.curves.last else None),
)  # fmt: skip


def exposition(readers: Mapping[str, Reader]) -> str:
    """All runs as text; what was not measured is left out."""
    now, lines = time.time(), []
    for name, told, value in GAUGES:
        samples = [(_labels(run=key), found) for key, reader in readers.items() if (found := value(reader)) is not None]
        lines += _family(name, told, samples)
    states = [(_labels(run=key, state=word), float(health(reader, now).word == word))
              for key, reader in readers.items() for word in WORDS]  # fmt: skip
    lines += _family("evener_state", "1 of the state that a run is in.", states)
    parts = [
        (_labels(run=key, rank=str(rank), part=part.removesuffix("_s")), value_s)
        for key, reader in readers.items() for rank in sorted(reader.curves.newest)
        for cost in (view.cost(reader, rank),)
        for part in PARTS if (value_s := getattr(cost, part)) is not None
    ]  # fmt: skip
    lines += _family("evener_step_part_seconds", "Where a rank's newest steps go.", parts)
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
    """With what the format wants escaped.

    >>> print(_labels(run='a"b'))
    {run="a\\"b"}
    """
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
