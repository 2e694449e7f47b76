"""Measure the steps of a launched program on one rank: what the clocks of its process can see without changing it.

A step ends when the program's first optimizer has updated. Its phases are those of evener's own steps:

    input           waiting for the next batch of a torch DataLoader
    update          between the hooks before and after the step of an optimizer
    communication   blocked in a collective, in `wait` of its work or future, or, with DDP, from the moment when the
                    last bucket of gradients was ready until backward returned
    compute         all the rest

Only the main thread counts. Ranks exchange the blocked time of their steps once a second through the store, beside the
program's own group, because waiting for a slower rank can be told from communication only by comparing ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import BLOCKED, PHASES, Fidelity, StepCost, StepRecord
from evener.core.run.step_spans import FORWARD, BucketCommEvent, phase_of
from evener.worker.record.step_collectives import StepCollectives
from evener.worker.script.module_changer import ModuleChange
from evener.worker.script.step_exchange import StepExchange

if TYPE_CHECKING:
    from evener.worker.record.flop_counter import FlopCounter
    from evener.worker.script.step_timeline import StepTimeline

BACKWARD = "compute_s"  # of laps: computing that is not FORWARD
MAX_LAPS, MAX_BUCKETS = 10_000, 1_000  # of a step that are kept: a program may never update
COLLECTIVES_STEP = 2  # whose own collectives are kept: before, a program may send its weights to all ranks
COUNTED_STEP = 1  # whose FLOPs are counted: the first one may make a model, and rates leave out both
OTHERS_UNTIL_NEW_LEADER = 8  # updates by another optimizer after which the one that ended steps has been replaced


class StepMeasurement:
    """The clocks of the step that the program is in: laps without gaps, each charged to one phase."""

    def __init__(self, exchange: StepExchange, rundir: RunWriter, models: Mapping[Any, bool]) -> None:
        self._exchange, self._dir, self._models = exchange, rundir, models
        self._thread = threading.main_thread().ident
        self._leader: weakref.ref[Any] | None = None  # the optimizer whose updates end steps
        self._others: Counter[int] = Counter()  # updates by others since its last one, by id
        self._is_off = False  # the program measures itself, or evener cannot
        self._step, self._has_begun = 0, False
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._can_divide = False  # whether --shares could divide the newest batch
        self._counts_samples = False  # whether a DataLoader was seen before the first update
        self._ready_at: float | None = None  # when DDP's newest bucket was ready
        self._num_buckets = 0  # that were ready in this backward pass
        self._has_batch = False  # the program has taken a batch since the newest step ended
        self._update_depth = 0  # an optimizer's step may call another's
        self._outer = FORWARD  # what the update interrupts
        self._in_closure = False
        self._loss: float | None = None
        self._newest: StepRecord | None = None  # the step that has just ended: its loss may be logged after it
        self._has_backward = False  # in the current step
        self._activity = FORWARD  # what the main thread does now: a phase, or FORWARD
        self._after_backward: list[weakref.WeakMethod[Callable[[], None]]] = []  # to be called then
        self._timeline: StepTimeline | None = None  # from the first update on, when torch is there
        self._buckets: list[BucketCommEvent] = []  # of the current step
        self.collectives = StepCollectives()  # of the current step
        self._flop_counter: FlopCounter | None = None  # until it has left no trace
        self._clear(time.perf_counter())

    def _clear(self, now: float) -> None:
        self._laps: list[tuple[str, float]] = [("", now)]  # phases, and when each ended
        self._began = now
        self._folded_s: dict[str, float] = {}  # of more laps than are kept
        self._cpu_began = time.process_time()
        self._samples, self._sent_bytes = 0, 0
        self._fidelity: Fidelity | None = None
        self._buckets = []

    def _lap(self, phase: str, until: float | None = None) -> None:
        """Charge the time since the last lap to a phase."""
        if self._is_off:
            return
        before, ended = self._laps[-1]
        until = time.perf_counter() if until is None else max(until, ended)
        if before == phase:
            self._laps[-1] = phase, until
        else:
            self._laps.append((phase, until))
        if len(self._laps) > MAX_LAPS:
            self._folded_s = self._phase_times_s(self._laps)
            self._laps = [("", until)]

    def _phase_times_s(self, laps: list[tuple[str, float]]) -> dict[str, float]:
        """Return the seconds of each phase in the current step."""
        times_s = dict.fromkeys((*PHASES, BLOCKED), 0.0) | self._folded_s
        for before, (phase, end) in pairwise(laps):
            times_s[phase_of(phase)] += end - before[1]
        return times_s

    def call_after_backward(self, method: Callable[[], None]) -> None:
        """Call a method of an object after each backward pass, as long as somebody else holds the object."""
        self._after_backward.append(weakref.WeakMethod(method))

    def _enter(self, activity: str) -> str:
        """Begin an activity; return the one that it interrupts, for `_leave`."""
        self._lap(self._activity)
        interrupted, self._activity = self._activity, activity
        return interrupted

    def _leave(self, interrupted: str) -> None:
        self._lap(self._activity)
        self._activity = interrupted

    def log(self, loss: float) -> None:
        """Take a loss that the program states: of this step or, before its first backward, of the one before."""
        if self._newest is not None and not (self._has_backward or self._has_batch):
            self._newest = msgspec.structs.replace(self._newest, loss=loss)
        else:
            self._loss = loss

    def close(self) -> None:
        """Hand over the last step, and write the timelines that are in memory."""
        if self._flop_counter is not None:
            self._flop_counter.stop()
        self._hand_over()
        if self._timeline is not None:
            self._timeline.close()

    def _hand_over(self) -> None:
        if self._newest is not None:
            self._exchange.add(self._newest)
            self._newest = None

    def set_fidelity(self, error: float, cosine: float) -> None:
        """Take the error of a lossy strategy's sums, where the exact ones are not 0."""
        if math.isfinite(error) and math.isfinite(cosine):
            self._fidelity = Fidelity(error=error, cosine=cosine)

    def add_sent(self, num_bytes: float) -> None:
        """Count bytes that this rank sends."""
        self._sent_bytes += int(num_bytes)

    def mark_bucket_ready(self) -> None:
        """Note that a bucket of DDP's gradients is ready."""
        self._ready_at = time.perf_counter()

    def time_bucket(self, work: Any, size_bytes: int, sent_bytes: int) -> None:
        """Note that the collective of a bucket of DDP's gradients has begun, and when it ends.

        `work`: None but on a CPU: elsewhere a future is done before the collective is.
        """
        self.mark_bucket_ready()
        begin, number, buckets = self._ready_at or 0.0, self._num_buckets, self._buckets
        self._num_buckets += 1

        def note(_: Any) -> None:
            if len(buckets) < MAX_BUCKETS:
                buckets.append(BucketCommEvent(number, begin, time.perf_counter(), size_bytes, sent_bytes))

        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without futures; no asynchronous work
            work.get_future().add_done_callback(note)

    def add_buckets(self, buckets: Iterable[BucketCommEvent]) -> None:
        """Take the times of buckets whose collectives have ended."""
        self._buckets += [*buckets][: MAX_BUCKETS - len(self._buckets)]

    def blocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time on the main thread counts as communication."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or self._activity == BLOCKED:
                return call(*args, **kwargs)
            interrupted = self._enter(BLOCKED)
            try:
                return call(*args, **kwargs)
            finally:
                self._leave(interrupted)

        return timed

    def backward(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return torch.autograd.backward with the time that it waits for DDP's last bucket."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> None:
            if threading.get_ident() != self._thread or self._activity == BACKWARD:  # checkpointing calls it inside
                return call(*args, **kwargs)
            if self._update_depth and not self._in_closure:  # an update has raised: it did not end
                self._update_depth, self._activity = 0, FORWARD
            self._ready_at, self._num_buckets = None, 0
            interrupted = self._enter(BACKWARD)
            began = self._laps[-1][1]
            try:
                call(*args, **kwargs)
            finally:
                if self._ready_at is not None:
                    self._lap(BACKWARD, self._ready_at)
                    self._activity = BLOCKED
                if self._timeline is not None:
                    self._timeline.end_backward(began, self._ready_at or time.perf_counter())
                self._leave(interrupted)
            self._has_backward = True
            self.collectives.end_backward()
            self._after_backward = [method for method in self._after_backward if method() is not None]
            for method in self._after_backward:
                if (call_after := method()) is not None:
                    call_after()
            self._hand_over()
            return None

        return timed

    def forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return DistributedDataParallel.forward with marks around groups of layers, in some steps."""

        @functools.wraps(call)
        def traced(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._timeline is None or sys.modules["torch"].compiler.is_compiling() or not _is_grad_enabled():
                return call(model, *args, **kwargs)
            with self._timeline.trace_forward(model):
                return call(model, *args, **kwargs)

        return traced

    def next_batch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a DataLoader's __next__ whose time counts as input, and whose samples are counted."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            interrupted = self._enter("data_s")
            try:
                batch = call(*args, **kwargs)
            finally:
                self._leave(interrupted)
            self._has_batch = True
            if _is_grad_enabled():  # else it evaluates
                self._samples += _batch_size(batch)
                self._can_divide = self._can_divide or _is_divisible(args[0])
            return batch

        return timed

    def before_update(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Begin an update; return its arguments, with a closure whose time does not count as update."""
        self._update_depth += 1
        if self._is_off or self._update_depth > 1:
            return None
        if self._leader is None or self._leader() is None or self._others[id(optimizer)] >= OTHERS_UNTIL_NEW_LEADER:
            self._leader = weakref.ref(optimizer)
            if not self._has_begun and not self._begin(optimizer):
                return None
        self._outer = self._enter("optimizer_s")
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def timed_closure() -> Any:
            interrupted, self._in_closure = self._enter(FORWARD), True
            try:
                return closure()
            finally:
                self._in_closure = False
                self._leave(interrupted)

        if len(args) > 1:
            return (args[0], timed_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": timed_closure}

    def _begin(self, optimizer: Any) -> bool:
        """Begin to record at the first update; return False if this program is not measured."""
        if "evener.worker.train.run" in sys.modules:  # the program uses evener.join, which measures by itself
            self._is_off = True
            return False
        from evener.worker.script.step_timeline import StepTimeline

        self._has_begun = True
        self._timeline = StepTimeline(self._dir, optimizer, self._models, self._exchange.set_gradients)
        self._counts_samples = self._samples > 0
        self._exchange.describe_model(optimizer, self._samples, can_divide=self._can_divide)
        return True

    def _count_flops(self, num_samples: float) -> None:
        """Count the FLOPs of one step, but not of its updates; `num_samples`: of the step that has ended.

        The program goes on, whatever is odd.
        """
        with contextlib.suppress(Exception):
            self._change_count(num_samples)

    def _change_count(self, num_samples: float) -> None:
        if self._step == COUNTED_STEP and threading.get_ident() == self._thread:
            from evener.worker.record.flop_counter import FlopCounter

            self._flop_counter = FlopCounter(self._is_counted)
            self._flop_counter.start()
        elif self._flop_counter is not None:
            has_left = self._flop_counter.stop()
            if self._step == COUNTED_STEP + 1:
                self._exchange.set_flops(self._flop_counter.flops(num_samples))
            if has_left:
                self._flop_counter = None

    def _is_counted(self) -> bool:
        """Return whether what the program computes now is a part of its training, and no update.

        An evaluation is told by DDP models, all in eval(), under no_grad: reentrant checkpoints and autograd.Function
        compute forward passes of the training without gradients, and a model without DDP is not known.
        """
        if self._activity == FORWARD and self._models and not _is_grad_enabled():
            return any(model.module.training for model in list(self._models))
        return self._activity in (FORWARD, BACKWARD)

    def after_update(self, optimizer: Any, *_: Any) -> None:
        """End an update, and with that of the first optimizer the step."""
        self._update_depth -= 1
        if self._is_off or self._update_depth > 0:
            return
        self._leave(self._outer)
        if self._leader is None or id(self._leader()) != id(optimizer):
            self._others[id(optimizer)] += 1
            return
        self._others.clear()
        lr = optimizer.param_groups[0].get("lr")
        laps = _after_last_backward(self._laps)
        seconds, ended = self._phase_times_s(laps), laps[-1][1]
        own, own_s = self.collectives.end_step()
        if self._step == COLLECTIVES_STEP:
            self._exchange.set_collectives(own)
        # The first step also holds what the program did before it.
        record = StepRecord(
            step=self._step,
            epoch=0,
            tokens=float(self._samples) if self._counts_samples else 1.0,  # its part of the step
            loss=self._loss,
            wall_s=ended - self._began,
            cost=StepCost(
                data_s=seconds["data_s"],
                compute_s=seconds["compute_s"],
                exposed_sync_s=seconds[BLOCKED],  # until the other ranks' are known
                optimizer_s=seconds["optimizer_s"],
            ),
            sync_s=_union_s(self._buckets) or own_s,
            cpu_s=time.process_time() - self._cpu_began,
            bytes=self._sent_bytes,
            members=self._world_size,
            lr=float(lr) if isinstance(lr, int | float) else 0.0,
            grad_norm=None,
            fidelity=self._fidelity,
            ended=time.time(),
        )
        self._hand_over()
        self._newest = record
        if self._timeline is not None:
            is_whole = not self._folded_s
            self._timeline.end_step(self._exchange.step_number(self._step), laps if is_whole else [], self._buckets)
        self._step += 1
        self._count_flops(record.tokens)
        self._loss, self._has_backward, self._has_batch = None, False, False
        self._clear(ended)


def _union_s(buckets: Iterable[BucketCommEvent]) -> float | None:
    """Return the seconds in which some bucket was in flight; None if none was seen.

    >>> _union_s(BucketCommEvent(0, begin, end, 0, 0) for begin, end in ((1.0, 3.0), (2.0, 4.0), (5.0, 6.0)))
    4.0
    """
    total_s, until = 0.0, -math.inf
    spans = sorted((bucket.begin, bucket.end) for bucket in buckets)
    for begin, end in spans:
        total_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total_s if spans else None


def _after_last_backward(laps: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return laps in which what follows the last backward, such as clipping, is no forward.

    >>> _after_last_backward([("", 0.0), ("forward", 1.0), ("compute_s", 3.0), ("forward", 3.5), ("optimizer_s", 4.0)])
    [('', 0.0), ('forward', 1.0), ('compute_s', 3.0), ('compute_s', 3.5), ('optimizer_s', 4.0)]
    """
    last = max((i for i, (phase, _) in enumerate(laps) if phase == BACKWARD), default=0)
    return laps[: last + 1] + [(BACKWARD if phase == FORWARD else phase, at) for phase, at in laps[last + 1 :]]


def measure_modules(measurement: StepMeasurement, collectives: Iterable[str]) -> dict[str, ModuleChange]:
    """Return what to change in the modules of torch when each is imported."""

    def change_c10d(c10d: ModuleType) -> None:
        for name in collectives:
            if hasattr(c10d, name):
                setattr(c10d, name, measurement.blocked(getattr(c10d, name)))
        import torch

        for kind in (c10d.Work, torch._C.Future):
            _replace(kind, "wait", measurement.blocked)

    def change_autograd(autograd: ModuleType) -> None:
        _replace(autograd, "backward", measurement.backward)

    def change_optimizer(optimizer: ModuleType) -> None:
        optimizer.register_optimizer_step_pre_hook(measurement.before_update)
        optimizer.register_optimizer_step_post_hook(measurement.after_update)

    def change_loader(loader: ModuleType) -> None:
        _replace(loader._BaseDataLoaderIter, "__next__", measurement.next_batch)

    def change_ddp(distributed: ModuleType) -> None:
        _replace(distributed.DistributedDataParallel, "forward", measurement.forward)

    return {
        "torch.distributed.distributed_c10d": change_c10d,
        "torch.nn.parallel.distributed": change_ddp,
        "torch.autograd": change_autograd,
        "torch.optim.optimizer": change_optimizer,
        "torch.utils.data.dataloader": change_loader,
    }


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _batch_size(batch: Any) -> int:
    """Return the samples of a batch: the first dimension of its first tensor; 0 if there is none."""
    if shape := getattr(batch, "shape", ()):
        return int(shape[0])
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for one in inside if (size := _batch_size(one))), 0)


def _is_divisible(batches: Any) -> bool:
    """Return whether the batches of a DataLoader's iterator are from a DistributedSampler, or accelerate's shards."""
    sampler = getattr(batches, "_index_sampler", None)
    kinds = {kind.__name__ for one in (sampler, getattr(sampler, "sampler", None)) for kind in type(one).__mro__}
    return not kinds.isdisjoint({"DistributedSampler", "BatchSamplerShard"})


def _is_grad_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()
