"""The timeline of a launched program's steps on one rank, and the order in which backward completes its gradients.

Timelines are those of evener's own runs: the last steps and every hundredth one, which also has marks around groups of
layers of the DDP model. In one early step hooks on the parameters note when each gradient is complete; from that, the
planner predicts the program with other strategies, links and hosts.
"""

from __future__ import annotations

import math
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
    """Records timelines of this rank's steps; of rank 0 also one step's gradients."""

    def __init__(
        self,
        rundir: RunWriter,
        optimizer: Any,
        ddp_models: Mapping[Any, bool],
        on_gradients: Callable[[list[GradientTensor]], None],
    ) -> None:
        """`on_gradients` is called once, with the gradients in the order in which backward completed them."""
        self._clock = HostClock()
        self._spans = SpanRecorder(rundir, run_rank(), self._clock)
        self._optimizer, self._ddp_models, self._on_gradients = weakref.ref(optimizer), ddp_models, on_gradients
        self._num_steps = 0
        self._layers: LayerTracer | None = None  # of a step with marks around groups of layers
        self._gradients: _GradientTimes | None = None  # of the step in which gradients are timed
        self._backward = (0.0, 0.0)  # begin and end of the newest

    def end_backward(self, began: float, ended: float) -> None:
        """Note the newest backward pass, without what it waited for."""
        self._backward = began, ended
        if self._layers is not None:
            self._layers.end_lap(ended)

    def end_step(self, number: int, laps: Sequence[tuple[str, float]], buckets: Sequence[BucketCommEvent]) -> None:
        """Record the step of this number; `buckets` may still grow."""
        passes: Sequence[Any] = []
        if self._layers is not None:
            self._layers.__exit__()
            passes, self._layers = self._layers.spans, None
        self._spans.begin_step()
        self._spans.end_step(StepMarks(number, 0, laps, buckets, passes))
        if self._gradients is not None:
            self._on_gradients(self._gradients.close(*self._backward))
            self._gradients = None
        self._num_steps += 1
        if self._num_steps == TRACED_STEP and launched_rank() == 0:
            self._gradients = _GradientTimes(self._optimizer(), self._ddp_models)
        if (number + 1) % RECORD_EVERY_STEPS == 0:
            groups = [group for model in list(self._ddp_models) for group in layer_groups(model.module)]
            self._layers = LayerTracer(groups, self._clock)
            self._layers.__enter__()

    def close(self) -> None:
        """Write what is in memory."""
        self._spans.flush()


class _GradientTimes:
    """Times when the gradients of an optimizer's parameters are complete, by hooks."""

    def __init__(self, optimizer: Any, ddp_models: Mapping[Any, bool]) -> None:
        names = {
            id(parameter): name for model in list(ddp_models) for name, parameter in model.module.named_parameters()
        }
        groups = optimizer.param_groups if optimizer is not None else []
        tensors = [tensor for group in groups for tensor in group["params"] if tensor.requires_grad and tensor.is_leaf]
        self._names = [names.get(id(tensor), f"tensor {i}") for i, tensor in enumerate(tensors)]
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._at: dict[int, float] = {}
        self._hooks = [tensor.register_post_accumulate_grad_hook(self._note(i)) for i, tensor in enumerate(tensors)]

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
