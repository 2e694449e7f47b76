"""Which gradients may leave, and when? torch's DDP reducer says so, bucket by bucket, while backward runs.

DDP decides at forward whether the backward that belongs to it exchanges gradients. A program may run several backwards,
and its rank may have no sequences at all; so forward runs on the bare module, and DDP's reducer is told right before
the one backward that exchanges. Of that it expects a gradient of every parameter. Those that got none get zeros, which
the reducer waits for; where no rank had one, the parameter keeps none, so that an optimizer leaves it alone as it would
on one rank.

DDP arranges its buckets once, in the order in which the gradients of one backward come, and a ring adds the ranks up in
an order that depends on a gradient's place in its bucket. Our own model's gradients always come alike. Those of a
program may come otherwise in the step from which it is resumed, so its buckets are arranged by a backward of zeros.

All ranks hand over the same buckets in the same order. How a bucket becomes its sum is a Reduction's business.
"""

# No `from __future__ import annotations`: torch looks at the hook's own.
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import LEFT_OF_GRADIENTS, Backward, Exchanged, Replica, Samples, Traffic, Traits

Future = torch.futures.Future
UNUSED = "unused"  # of LEFT_OF_GRADIENTS: what waits for a step that uses its parameter


class Reduction(Protocol):
    """What makes of each rank's bucket the sum over ranks, in place."""

    traits: Traits

    def start(self, bucket: dist.GradBucket, *, is_rehearsal: bool, samples: bool) -> "Future[Tensor]":
        """A bucket is complete on this rank. What a rehearsal sends is forgotten, and nothing may remember it.

        `samples`: compare some of the sums with the exact ones.
        """

    def finish(self) -> None:
        """Return when every bucket that was started holds its sum."""

    def abandon(self) -> None:
        """What is under way has failed: return when nothing is any more."""

    def take_bytes(self) -> int:
        """Bytes that this rank sent since the last call."""

    def take_fidelity(self) -> Tensor | None:
        """(error, cosine) of what was compared since the last call."""

    def take_exchanged(self) -> list[Exchanged]:
        """Each bucket's exchange since the last call."""

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What this rank has not sent yet of its parameters' gradients."""

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """What this rank alone remembers from step to step, by the names of its parameters."""

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        """Go on with this rank's, which comes first, and take over what ranks left that are no more."""


class Buckets:
    """Every rank holds the sum of all ranks' gradients when the last backward of a pass is over."""

    replica: Replica = "equal"

    def __init__(
        self,
        group: Group,
        clock: Clock,
        lap: Callable[[str], None],
        reduction: Reduction,
        bucket_bytes: int | None = None,
    ) -> None:
        self._group, self._clock, self._lap, self._reduction = group, clock, lap, reduction
        self._bucket_MiB = None if bucket_bytes is None else bucket_bytes >> 20
        self._done: set[Tensor] = set()  # parameters whose gradient this rank has added to since the last exchange
        self._hooks: list[Any] = []
        self._arranges = False
        self._is_rehearsal = True  # until `settle`
        self._settles_next = False  # buckets that were made anew are put in the order in which gradients came
        self._left: dict[nn.Parameter, Tensor] = {}  # flat
        self._samples = False
        self._buffers: list[Tensor] = []  # of the step that is measured
        self._mine_sq: list[Tensor] = []
        self._whole_sq: Tensor | None = None

    @property
    def rounds_by_model(self) -> bool:
        return self._reduction.traits.rounds_by_model

    def change(self, reduction: Reduction, bucket_bytes: int | None) -> None:
        """Sums come about in another way, or among others, from here on; what has not been sent yet goes out first."""
        self._is_rehearsal = False
        self._leave(self._reduction.left_over())
        self._reduction = reduction
        self._bucket_MiB = None if bucket_bytes is None else bucket_bytes >> 20
        self._make(all_have_rank_0s_weights=True)
        self._settles_next = self._uses_all

    def await_all(self) -> None:
        pass

    def abandon(self) -> None:
        self._reduction.abandon()
        self._ddp._remove_autograd_hooks()
        self._buffers.clear()
        self._mine_sq.clear()
        self._done.clear()

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        self._module, self._all, self._uses_all = module, list(module.parameters()), uses_all
        self._make(all_have_rank_0s_weights=False)

    def backward(self, loss: Backward | None, *, samples: bool = False) -> None:
        self._samples = samples and not self._is_rehearsal
        self._buffers.clear()
        if any(a is not b for a, b in zip_longest(self._parameters, self._trained())):
            # The program has frozen parameters or thawed them.
            self._make(all_have_rank_0s_weights=True)
        before = self._done.copy()
        self._done.clear()
        had_left = self._add_left()
        self._ddp.reducer.prepare_for_backward([])
        if loss is not None:
            loss.backward()
        missing = [parameter for parameter in self._parameters if parameter not in self._done]
        used = before | self._done
        if missing:
            _add_zeros(missing)
        self._done.clear()
        self._reduction.finish()
        if self._settles_next:
            self._settles_next = False
            self._ddp.reducer._rebuild_buckets()
        if self._buffers:
            self._whole_sq = _squares(self._buffers)
            self._buffers.clear()
        if not self._uses_all:
            self._forget_unused(
                used, keeps_sums=had_left or (self._reduction.traits.is_lossy and not self._is_rehearsal)
            )

    def settle(self) -> None:
        if self._uses_all:
            self._ddp.reducer._rebuild_buckets()
        self._is_rehearsal = False

    def after_update(self, tokens: float, of_all: float) -> None:
        pass

    def after_step(self, index: int) -> None:
        pass

    def conclude(self) -> None:
        pass

    def would_conclude(self) -> bool:
        return False

    def take_cost(self) -> Traffic:
        exchanged = self._reduction.take_exchanged()

        def in_flight_s() -> float:
            if not exchanged:
                return 0.0
            first = exchanged[0].begin
            return union_s([(self._clock.seconds(first, one.begin), self._clock.seconds(first, one.end))
                            for one in exchanged])  # fmt: skip

        return Traffic(self._reduction.take_bytes(), in_flight_s, exchanged)

    def take_samples(self) -> Samples:
        mine, whole, self._mine_sq, self._whole_sq = self._mine_sq, self._whole_sq, [], None
        fidelity = self._reduction.take_fidelity()
        return Samples(torch.stack(mine).sum() if whole is not None else None, whole, fidelity)

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group.control)
        return values

    def agreed(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def is_agreed(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        waits = {UNUSED: {names[parameter]: flat for parameter, flat in self._left.items()}} if self._left else {}
        return self._reduction.own_state(names) | waits

    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        parameters = dict(self._module.named_parameters())
        # Replicas that drifted kept something else.
        states = [{} if "agreed" in one else one for one in (state, *others)]
        self._reduction.load_own_state(states, parameters)
        # What another way kept, before a change that was undone, goes out with the next gradients.
        kinds = [kind for kind in LEFT_OF_GRADIENTS if kind not in self._reduction.traits.takes]
        self._left = {}
        self._leave([(parameters[name], flat.to(parameters[name].device))
                     for one in states for kind in kinds for name, flat in one.get(kind, {}).items()])  # fmt: skip

    def _leave(self, left: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """For the next gradients of these parameters: of one it may be of its gradients, and of sums."""
        for parameter, more in left:
            flat = more.reshape(-1)
            self._left[parameter] = self._left[parameter] + flat if parameter in self._left else flat

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._all if parameter.requires_grad]

    def _make(self, all_have_rank_0s_weights: bool) -> None:
        self._parameters = self._trained()
        self._ddp = DistributedDataParallel(
            self._module,
            device_ids=[self._group.device] if self._group.device.type == "cuda" else None,
            process_group=self._group.gradients,
            bucket_cap_mb=self._bucket_MiB,
            gradient_as_bucket_view=True,  # the buckets are the gradients: a copy less each way
            forward_sync_buffers=False,  # see worker/buffers.py
            init_sync=not all_have_rank_0s_weights,
        )
        self._ddp.register_comm_hook(None, self._start)
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

    def _add_left(self) -> bool:
        """To this rank's gradients, what it has left of steps before; was there any? Frozen parameters' waits."""
        if self._is_rehearsal:
            return False
        trained = set(self._parameters)
        left = {parameter: flat for parameter, flat in self._left.items() if parameter in trained}
        self._left = {parameter: flat for parameter, flat in self._left.items() if parameter not in trained}
        for parameter, flat in left.items():
            more = flat.view(parameter.shape)
            parameter.grad = more if parameter.grad is None else parameter.grad + more
        return bool(left)

    def _forget_unused(self, used: set[Tensor], *, keeps_sums: bool) -> None:
        """Parameters that no rank used have no gradient, as on one rank.

        Where ranks had something left of them it is there now, summed: each rank keeps its part for another step.
        """
        mask = torch.tensor([parameter in used for parameter in self._parameters], dtype=torch.uint8)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group.control)
        for parameter, is_used in zip(self._parameters, mask.tolist(), strict=True):
            if not is_used:
                if keeps_sums and parameter.grad is not None:
                    self._leave([(parameter, parameter.grad / self._group.world_size)])
                parameter.grad = None

    def _start(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if self._arranges:
            return nothing_to_wait_for(bucket)
        if bucket.is_last():
            self._lap("compute_s")  # the last gradient is there: from here on backward only waits
        if self._samples and self._reduction.traits.keeps_norm:
            self._buffers.append(bucket.buffer())
            self._mine_sq.append(_squares([bucket.buffer()]))
        return self._reduction.start(bucket, is_rehearsal=self._is_rehearsal, samples=self._samples)


def nothing_to_wait_for(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """For the reducer: this bucket is as it shall be, or somebody else will wait for it."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _squares(buffers: list[Tensor]) -> Tensor:
    """Squared norm of all together, without memory of their size."""
    return torch.stack([torch.dot(buffer, buffer) for buffer in buffers]).sum()


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
