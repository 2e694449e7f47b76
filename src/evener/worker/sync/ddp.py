"""How do replicas agree over a fast link? torch's DistributedDataParallel, summing, with its all-reduces timed.

A rank sends 2(n-1)/n · P bytes a step, P = bytes of the gradients (ring all-reduce).   [Patarasuk & Yuan 2009]

DDP decides at forward whether the backward that belongs to it exchanges gradients. A program may run several backwards,
and its rank may have no sequences at all; so forward runs on the bare module, and DDP's reducer is told right before
the one backward that exchanges. Of that it expects a gradient of every parameter. Those that got none get zeros, which
the reducer waits for; where no rank had one, the parameter keeps none, so that an optimizer leaves it alone as it would
on one rank.

DDP arranges its buckets once, in the order in which the gradients of one backward come, and a ring adds the ranks up in
an order that depends on a gradient's place in its bucket. Our own model's gradients always come alike. Those of a
program may come otherwise in the step from which it is resumed, so its buckets are arranged by a backward of zeros.
"""

# No `from __future__ import annotations`: torch looks at the hook's own.
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.plan.collectives import ring_all_reduce_bytes
from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import Backward, Replica


class DDP:
    """The hook replaces DDP's own all-reduce by the same one, summing instead of averaging, between two clock marks."""

    replica: Replica = "equal"

    def __init__(self, group: Group, clock: Clock, lap: Callable[[str], None]) -> None:
        self._group, self._clock, self._lap = group, clock, lap
        self._in_flight: list[tuple[Any, Any]] = []
        self._num_exchanges = 0
        self._done: set[Tensor] = set()  # parameters whose gradient this rank has added to since the last exchange
        self._hooks: list[Any] = []
        self._arranges = False

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        self._module, self._all, self._uses_all = module, list(module.parameters()), uses_all
        self._make(all_have_rank_0s_weights=False)

    def backward(self, loss: Backward | None) -> None:
        if any(a is not b for a, b in zip_longest(self._parameters, self._trained())):
            # The program has frozen parameters or thawed them.
            self._make(all_have_rank_0s_weights=True)
        before = self._done.copy()
        self._done.clear()
        self._ddp.reducer.prepare_for_backward([])
        if loss is not None:
            loss.backward()
        missing = [parameter for parameter in self._parameters if parameter not in self._done]
        used = before | self._done
        if missing:
            _add_zeros(missing)
        self._done.clear()
        if not self._uses_all:
            self._forget_unused(used)
        self._num_exchanges += 1

    def settle(self) -> None:
        if self._uses_all:
            self._ddp.reducer._rebuild_buckets()

    def after_update(self) -> None:
        pass

    def take_cost(self) -> tuple[int, Callable[[], float | None]]:
        spans, self._in_flight = self._in_flight, []
        num_exchanges, self._num_exchanges = self._num_exchanges, 0

        def in_flight_s() -> float:
            if not spans:
                return 0.0
            first = spans[0][0]
            return union_s([(self._clock.seconds(first, begin), self._clock.seconds(first, end))
                            for begin, end in spans])  # fmt: skip

        return num_exchanges * self._bytes, in_flight_s

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group.control)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        pass

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._all if parameter.requires_grad]

    def _make(self, all_have_rank_0s_weights: bool) -> None:
        self._parameters = self._trained()
        gradient_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self._bytes = ring_all_reduce_bytes(gradient_bytes, self._group.world_size)
        self._ddp = DistributedDataParallel(
            self._module,
            device_ids=[self._group.device] if self._group.device.type == "cuda" else None,
            process_group=self._group.gradients,
            gradient_as_bucket_view=True,  # the buckets are the gradients: a copy less each way
            forward_sync_buffers=False,  # see worker/buffers.py
            init_sync=not all_have_rank_0s_weights,
        )
        self._ddp.register_comm_hook(None, self._all_reduce)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._done.add) for parameter in self._parameters]
        if not self._uses_all:
            self._arrange()

    def _arrange(self) -> None:
        """Buckets in the order of the parameters, the last first, as in most backwards. Nothing is exchanged."""
        untouched = [parameter for parameter in self._parameters if parameter.grad is None]
        done = self._done.copy()
        self._arranges = True
        self._ddp.reducer.prepare_for_backward([])
        _add_zeros(self._parameters)
        self._arranges = False
        self._ddp.reducer._rebuild_buckets()
        for parameter in untouched:
            parameter.grad = None
        self._done.clear()
        self._done |= done

    def _forget_unused(self, used: set[Tensor]) -> None:
        """Parameters that no rank used have no gradient, as on one rank."""
        mask = torch.tensor([parameter in used for parameter in self._parameters], dtype=torch.uint8)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group.control)
        for parameter, is_used in zip(self._parameters, mask.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    def _all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if self._arranges:
            nothing_to_do: torch.futures.Future[Tensor] = torch.futures.Future()
            nothing_to_do.set_result(bucket.buffer())
            return nothing_to_do
        if bucket.is_last():
            self._lap("compute_s")  # the last gradient is there: from here on backward only waits
        begin, in_flight = self._clock.mark(), self._in_flight

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            in_flight.append((begin, self._clock.mark()))
            return future.value()[0]

        work = dist.all_reduce(bucket.buffer(), group=self._group.gradients, async_op=True)
        return work.get_future().then(done)


def _add_zeros(parameters: list[nn.Parameter]) -> None:
    """Give each parameter a gradient of 0, the last one first, or add 0 to what it has."""
    torch.stack([(parameter.flatten()[:1] * 0).sum().float() for parameter in parameters]).sum().backward()


def union_s(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> union_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
