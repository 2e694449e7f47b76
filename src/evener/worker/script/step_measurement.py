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

import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from evener.core.run.step_cost import Fidelity, StepCost, StepRecord
from evener.worker.script.module_changer import ModuleChange
from evener.worker.script.step_exchange import StepExchange

OTHERS_UNTIL_NEW_LEADER = 8  # updates by other optimizers after which the one that ended steps has been replaced


class StepMeasurement:
    """The clocks of the step that the program is in."""

    def __init__(self, exchange: StepExchange) -> None:
        self._exchange = exchange
        self._thread = threading.main_thread().ident
        self._leader: weakref.ref[Any] | None = None  # the optimizer whose updates end steps
        self._num_others = 0  # updates by others since its last one
        self._is_off = False  # the program measures itself, or evener cannot
        self._step, self._began = 0, 0.0
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._counts_samples = False  # whether a DataLoader was seen before the first update
        self._blocked_depth = 0
        self._ready_at: float | None = None  # when DDP's newest bucket was ready
        self._has_batch = False  # the program has taken a batch since the newest step ended
        self._update_depth = 0  # an optimizer's step may call another's
        self._in_closure = False
        self._updating_since = self._not_updating_s = 0.0
        self._loss: float | None = None
        self._newest: StepRecord | None = None  # the step that has just ended: its loss may be logged after it
        self._has_backward = False  # in the current step
        self._clear()

    def _clear(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._data_s = self._blocked_s = self._optimizer_s = 0.0
        self._samples, self._sent_bytes = 0, 0
        self._fidelity: Fidelity | None = None

    def log(self, loss: float) -> None:
        """Take a loss that the program states: of this step or, before its first backward, of the one before."""
        if self._newest is not None and not (self._has_backward or self._has_batch):
            self._newest = msgspec.structs.replace(self._newest, loss=loss)
        else:
            self._loss = loss

    def close(self) -> None:
        """Hand over the last step."""
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

    def blocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time on the main thread counts as communication."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or self._blocked_depth:
                return call(*args, **kwargs)
            began, self._blocked_depth = time.perf_counter(), 1
            try:
                return call(*args, **kwargs)
            finally:
                self._blocked_depth = 0
                self._blocked_s += time.perf_counter() - began

        return timed

    def backward(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return torch.autograd.backward with the time that it waits for DDP's last bucket."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> None:
            self._ready_at = None
            call(*args, **kwargs)
            self._has_backward = True
            self.close()
            if not self._in_closure:
                self._update_depth = 0  # no update is under way: one has raised if it did not end
            if self._ready_at is not None and threading.get_ident() == self._thread:
                self._blocked_s += time.perf_counter() - self._ready_at

        return timed

    def next_batch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a DataLoader's __next__ whose time counts as input, and whose samples are counted."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            began = time.perf_counter()
            try:
                batch = call(*args, **kwargs)
            finally:
                self._data_s += time.perf_counter() - began
            self._has_batch = True
            if _is_grad_enabled():  # else it evaluates
                self._samples += _batch_size(batch)
            return batch

        return timed

    def before_update(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Begin an update; return its arguments, with a closure whose time does not count as update."""
        self._update_depth += 1
        if self._is_off or self._update_depth > 1:
            return None
        if self._leader is None or self._leader() is None or self._num_others >= OTHERS_UNTIL_NEW_LEADER:
            self._leader = weakref.ref(optimizer)
            if self._step == 0 and not self._begin(optimizer):
                return None
        self._updating_since, self._not_updating_s = time.perf_counter(), self._blocked_s
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def timed_closure() -> Any:
            began, blocked_s, self._in_closure = time.perf_counter(), self._blocked_s, True
            try:
                return closure()
            finally:  # what it was blocked is left out anyway
                self._in_closure = False
                self._not_updating_s -= time.perf_counter() - began - (self._blocked_s - blocked_s)

        if len(args) > 1:
            return (args[0], timed_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": timed_closure}

    def _begin(self, optimizer: Any) -> bool:
        """Begin to record at the first update; return False if this program is not measured."""
        if "evener.worker.train.run" in sys.modules:  # the program uses evener.join, which measures by itself
            self._is_off = True
            return False
        self._counts_samples = self._samples > 0
        self._exchange.describe_model(optimizer, unit="samples" if self._counts_samples else "steps")
        return True

    def after_update(self, optimizer: Any, *_: Any) -> None:
        """End an update, and with that of the first optimizer the step."""
        now = time.perf_counter()
        self._update_depth -= 1
        if self._is_off or self._update_depth > 0:
            return
        self._optimizer_s += max(0.0, now - self._updating_since - (self._blocked_s - self._not_updating_s))
        if self._leader is None or id(self._leader()) != id(optimizer):
            self._num_others += 1
            return
        self._num_others = 0
        lr = optimizer.param_groups[0].get("lr")
        wall_s = now - self._began
        rest_s = wall_s - self._data_s - self._blocked_s - self._optimizer_s
        # The first step also holds what the program did before it.
        record = StepRecord(
            step=self._step,
            epoch=0,
            tokens=float(self._samples) if self._counts_samples else 1 / self._world_size,
            loss=self._loss,
            wall_s=wall_s,
            cost=StepCost(
                data_s=self._data_s,
                compute_s=max(0.0, rest_s),
                exposed_sync_s=self._blocked_s,  # until the other ranks' are known
                optimizer_s=self._optimizer_s,
            ),
            sync_s=None,
            cpu_s=time.process_time() - self._cpu_began,
            bytes=self._sent_bytes,
            members=self._world_size,
            lr=float(lr) if isinstance(lr, int | float) else 0.0,
            grad_norm=None,
            fidelity=self._fidelity,
            ended=time.time(),
        )
        self.close()
        self._newest = record
        self._step += 1
        self._loss, self._has_backward, self._has_batch = None, False, False
        self._clear()


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

    return {
        "torch.distributed.distributed_c10d": change_c10d,
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


def _is_grad_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()
