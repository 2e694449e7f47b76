"""Span recorder: this rank's timeline of the last steps in memory, and of every 100th step on disk.

It keeps marks that are made anyway: the laps of the step, and both ends of each bucket's exchange. They are converted
to seconds when a step is written: every 100th step once it is LAST steps old, and all steps in memory at a checkpoint
and at the end. Every 100th step also has marks at the begin and the end of each group of layers.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from evener.core.base.file_io import LineFile
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_spans import (
    RECORD_EVERY_STEPS,
    RECORD_LAST_STEPS,
    BetweenStepsSpan,
    BucketCommEvent,
    BucketSpan,
    LayerGroupSpan,
    PhaseSpan,
    StepSpans,
)
from evener.worker.rank.clock import Clock
from evener.worker.record.profiler import Profiler

MAX_LAYER_GROUPS = 8  # into which a ModuleList or Sequential is split
ROUND_DIGITS = 7  # of seconds: 0.1 µs
LayerGroup = tuple[str, nn.Module, nn.Module]  # name, first layer and last layer


@dataclass
class StepMarks:
    """The marks of a step that are not yet converted to seconds."""

    step: int
    epoch: int
    laps: Sequence[tuple[str, Any]]  # phases, and the mark at which each ended
    exchanges: Sequence[BucketCommEvent]
    passes: Sequence[tuple[str, bool, Any, Any]]
    asides: list[tuple[str, float, float]] = field(default_factory=list)
    report_exchanges: list[tuple[float, float]] = field(default_factory=list)
    is_profiled: bool = False


class SpanRecorder:
    """Writes `spans/rank-R.jsonl`."""

    def __init__(self, rundir: RunWriter, rank: int, clock: Clock, profiler: Profiler | None = None) -> None:
        self._path, self._clock, self._profiler = rundir.spans_path(rank), clock, profiler
        self._pending: deque[StepMarks] = deque()
        self._asides: list[tuple[str, float, float]] = []  # since the newest step began
        self._origin = time.time() - time.perf_counter()

    def begin_step(self) -> None:
        """Begin a step."""
        self._asides = []
        if self._profiler is not None:
            self._profiler.begin_step()

    def end_step(self, marks: StepMarks) -> None:
        """Keep the marks of a step that has ended; write the oldest if it is due."""
        marks.asides = self._asides
        if self._profiler is not None:
            marks.is_profiled = self._profiler.end_step(marks.step, self._origin)
        self._pending.append(marks)
        if len(self._pending) > RECORD_LAST_STEPS:
            oldest = self._pending.popleft()
            if oldest.step % RECORD_EVERY_STEPS == 0 or oldest.is_profiled:
                self._write([oldest])

    def add_report_exchange(self, step: int, begin: float, end: float) -> None:
        """Record the interval of a step's exchange of step reports."""
        for kept in reversed(self._pending):
            if kept.step == step:
                kept.report_exchanges.append((begin, end))
                return

    @contextlib.contextmanager
    def record_span(self, name: str) -> Iterator[None]:
        """Record a span between the update of the newest step and the begin of the next one."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._asides.append((name, begin, time.perf_counter()))

    def flush(self) -> None:
        """Write all steps that are in memory."""
        kept, self._pending = [*self._pending], deque()
        if kept and self._asides is not kept[-1].asides:  # recorded since a step began that was then not taken
            kept[-1].asides, self._asides = kept[-1].asides + self._asides, []
        self._write(kept)

    def close(self) -> None:
        """Stop the profiler and write all steps."""
        try:
            if self._profiler is not None:
                self._profiler.close(self._origin)
        finally:
            self.flush()

    def _write(self, steps: Sequence[StepMarks]) -> None:
        if not steps:
            return
        with LineFile(self._path) as file:
            file.write(b"".join(msgspec.json.encode(self._to_step_spans(step)) + b"\n" for step in steps))

    def _to_step_spans(self, kept: StepMarks) -> StepSpans:
        """Convert marks to seconds."""
        marks = kept.laps
        first, seconds = marks[0][1], self._clock.elapsed_s
        begun_s = self._clock.host_time_s(first)

        def span(begin: Any, end: Any) -> tuple[float, float]:
            return round(seconds(first, begin), ROUND_DIGITS), round(seconds(first, end), ROUND_DIGITS)

        def host(begin: float, end: float) -> tuple[float, float]:
            return round(begin - begun_s, ROUND_DIGITS), round(end - begun_s, ROUND_DIGITS)

        return StepSpans(
            step=kept.step,
            epoch=kept.epoch,
            clock=self._origin,
            begun_s=round(begun_s, ROUND_DIGITS),
            laps=[PhaseSpan(part, *span(begin, end)) for (_, begin), (part, end) in pairwise(marks)],
            exchanges=[
                BucketSpan(event.bucket, *span(event.begin, event.end), event.size_bytes, event.sent_bytes)
                for event in kept.exchanges
            ],
            passes=[
                LayerGroupSpan(group, is_backward, *span(begin, end)) for group, is_backward, begin, end in kept.passes
            ],
            asides=[BetweenStepsSpan(what, *host(begin, end)) for what, begin, end in kept.asides],
            news=[host(begin, end) for begin, end in kept.report_exchanges],
        )


class LayerTracer:
    """Context manager that records a span for each forward and backward of a group of layers.

    A forward span lasts from the first module's forward to the end of the last one's. A backward span lasts until the
    next group's backward begins, or the lap ends.
    Compiled modules, and forwards recomputed in backward, are not traced.
    """

    def __init__(self, groups: Sequence[LayerGroup], clock: Clock) -> None:
        self._groups, self._clock = groups, clock
        self._hooks: list[Any] = []
        self._open: list[tuple[str, Any]] = []  # groups whose forward has begun
        self._backward: tuple[str, Any] | None = None
        self.spans: list[tuple[str, bool, Any, Any]] = []

    def __enter__(self) -> LayerTracer:
        for name, first, last in self._groups:
            self._hooks.append(first.register_forward_pre_hook(self._forward_pre_hook(name)))
            self._hooks.append(last.register_forward_hook(self._forward_hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def end_lap(self, mark: Any) -> None:
        """End the open backward span: none extends beyond the end of a lap."""
        if self._backward is not None:
            name, begin = self._backward
            self.spans.append((name, True, begin, mark))
            self._backward = None
        self._open.clear()

    def _forward_pre_hook(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._backward is None:
                self._open.append((name, self._clock.mark()))

        return hook

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            mark = self._clock.mark()
            if self._backward is None and any(name == group for group, _ in self._open):
                while True:  # drop spans that began within it and did not end: spans nest
                    group, begin = self._open.pop()
                    if group == name:
                        break
                self.spans.append((name, False, begin, mark))
            tensor = _differentiable(output)
            if tensor is not None:
                tensor.register_hook(lambda _: self._on_backward_begin(name))

        return hook

    def _on_backward_begin(self, name: str) -> None:
        mark = self._clock.mark()
        if self._backward is not None:
            group, begin = self._backward
            self.spans.append((group, True, begin, mark))
        self._backward = name, mark


def layer_groups(module: nn.Module) -> list[LayerGroup]:
    """Return the layer groups of a module: its children, and at most MAX_LAYER_GROUPS of a list; [] if compiled.

    >>> [name for name, *_ in layer_groups(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Sequential(nn.ReLU())}))]
    ['a', 'b.0']
    """
    if any(_is_compiled(part) for part in module.modules()):
        return []
    return list(_groups(module, "")) or [(type(module).__name__, module, module)]


def _groups(module: nn.Module, within: str) -> Iterator[LayerGroup]:
    children = [(within + name, child) for name, child in module.named_children()]
    size = -(-len(children) // MAX_LAYER_GROUPS) if isinstance(module, nn.ModuleList | nn.Sequential) else 1
    for begin in range(0, len(children), size or 1):
        (first, child), (last, other) = children[begin], children[min(begin + size, len(children)) - 1]
        if first != last:
            yield f"{first}-{last.rpartition('.')[2]}", child, other
        elif isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _groups(child, f"{first}.")
        else:
            yield first, child, child


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"  # torch._dynamo's class; importing it is slow
    )


def _differentiable(output: Any) -> Tensor | None:
    """Return the first output tensor with a grad_fn: its gradient marks the begin of the backward; None if none has."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else [output]
    return next((value for value in values if isinstance(value, Tensor) and value.grad_fn is not None), None)
