"""The timeline of a launched program's steps on one rank, and the order in which backward completes its gradients.

Timelines are those of evener's own runs: the last steps and every hundredth one, which also has marks around groups of
layers of DDP models. In one early step hooks on the parameters note when each gradient is complete; from that, the
planner predicts the program with other strategies, links and hosts.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from evener.core.model.gradients import GradientTensor
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_spans import RECORD_EVERY_STEPS, BucketCommEvent
from evener.worker.rank.clock import HostClock
from evener.worker.record.span_recorder import LayerTracer, SpanRecorder, StepMarks, layer_groups
from evener.worker.script.report import launched_rank, run_rank

TRACED_STEP = 2  # since the program started, in which gradients are timed: DDP has then arranged its buckets


class StepTimeline:
    """Records timelines of this rank's steps; of rank 0 also one step's gradients.

    The program goes on, whatever is odd: then nothing more is recorded.
    """

    def __init__(
        self,
        rundir: RunWriter,
        optimizer: Any,
        models: Mapping[Any, bool],
        on_gradients: Callable[[list[GradientTensor]], None],
    ) -> None:
        """`models`: the DDP models that train; `on_gradients` is called once, with the gradients that they exchange, or
        a single rank's optimizer updates, in the order in which backward completed them.
        """
        self._clock = HostClock()
        self._spans = SpanRecorder(rundir, run_rank(), self._clock)
        self._optimizer, self._models, self._on_gradients = weakref.ref(optimizer), models, on_gradients
        self._num_steps, self._is_off = 0, False
        self._traces_layers = False  # whether this step has marks around groups of layers
        self._layers: list[LayerTracer] = []  # of its forward passes
        self._gradients: _GradientTimes | None = None  # of the step in which gradients are timed
        self._backward = (0.0, 0.0)  # begin and end of the newest

    def trace_forward(self, model: Any) -> contextlib.AbstractContextManager[object]:
        """Return a context for a forward pass of a DDP model. Its hooks are there only meanwhile: a program may copy or
        save the model between two passes.
        """
        if not self._traces_layers or self._is_off:
            return contextlib.nullcontext()
        with contextlib.suppress(Exception):
            self._layers.append(LayerTracer(layer_groups(model.module), self._clock))
            return self._layers[-1]
        return contextlib.nullcontext()

    def end_backward(self, began: float, ended: float) -> None:
        """Note the newest backward pass, without what it waited for."""
        self._backward = began, ended
        for layers in self._layers:
            layers.end_lap(ended)

    def end_step(self, number: int, laps: Sequence[tuple[str, float]], buckets: Sequence[BucketCommEvent]) -> None:
        """Record the step of this number; `buckets` may still grow. Without laps it is left out."""
        if self._is_off:
            return
        try:
            self._end_step(number, laps, buckets)
        except Exception:  # a full disk; tensors of an unknown kind
            self._is_off = True

    def _end_step(self, number: int, laps: Sequence[tuple[str, float]], buckets: Sequence[BucketCommEvent]) -> None:
        passes = [span for layers in self._layers for span in layers.spans]
        self._layers = []
        if laps:
            self._spans.begin_step()
            self._spans.end_step(StepMarks(number, 0, laps, buckets, passes))
        if self._gradients is not None:
            gradients, self._gradients = self._gradients.close(*self._backward), None
            self._on_gradients(gradients)
        self._num_steps += 1
        if self._num_steps == TRACED_STEP and launched_rank() == 0:
            self._gradients = _GradientTimes(self._exchanged_parameters())
        self._traces_layers = (number + 1) % RECORD_EVERY_STEPS == 0

    def _exchanged_parameters(self) -> list[tuple[str, Any]]:
        """Return the parameters by name whose gradients DDP exchanges; with a single rank those of the optimizer."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            groups = getattr(self._optimizer(), "param_groups", [])
            return [(f"tensor {i}", one) for i, one in enumerate(one for group in groups for one in group["params"])]
        return [
            (name, parameter)
            for model in list(self._models)
            for name, parameter in model.module.named_parameters()
            if name not in model.parameters_to_ignore
        ]

    def close(self) -> None:
        """Write what is in memory."""
        with contextlib.suppress(Exception):
            self._spans.flush()


class _GradientTimes:
    """Times when the gradients of parameters are complete, by hooks."""

    def __init__(self, parameters: Sequence[tuple[str, Any]]) -> None:
        named = [(name, one) for name, one in parameters if one.requires_grad and one.is_leaf]
        self._names = [name for name, _ in named]
        self._shapes = [tuple(tensor.shape) for _, tensor in named]
        self._at: dict[int, float] = {}
        self._hooks = [tensor.register_post_accumulate_grad_hook(self._note(i)) for i, (_, tensor) in enumerate(named)]

    def _note(self, i: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._at[i] = time.perf_counter()

        return hook

    def close(self, began: float, ended: float) -> list[GradientTensor]:
        """Remove the hooks; return the gradients of the backward between these times."""
        for hook in self._hooks:
            hook.remove()
        took_s = max(ended - began, 1e-9)
        return [
            GradientTensor(
                name=self._names[i],
                rows=shape[0] if len(shape) > 1 else 1,
                columns=math.prod(shape[1:] if len(shape) > 1 else shape),
                ready=min(1.0, (at - began) / took_s),
            )
            for i, at in sorted(self._at.items(), key=lambda item: item[1])
            if at >= began and math.prod(shape := self._shapes[i])
        ]
