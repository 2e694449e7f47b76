"""Synchronize gradients bucket by bucket during backward, with the reducer of torch's DDP.

DDP decides at forward whether the backward that belongs to it synchronizes gradients. A program may run several
backwards, and its rank may have no sequences at all; so forward runs on the bare module, and the reducer is prepared
right before the one backward that synchronizes. It expects a gradient of every parameter. Parameters that got none get
zeros, which the reducer waits for; where no rank had a gradient, the parameter's is cleared again, so that the
optimizer skips it as it would on one rank.

DDP arranges its buckets once, in the order in which gradients become ready in one backward, and a ring sums the ranks
in an order that depends on a gradient's place in its bucket. The gradients of our own model always become ready in the
same order. Those of a program may not in the step from which it is resumed, so its buckets are arranged by a backward
of zeros.

All ranks pass the same buckets in the same order. A `CommHook` turns each bucket into its sum.
"""

# No `from __future__ import annotations`: torch inspects the hook's annotations.
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
UNUSED = "unused"  # of LEFT_OF_GRADIENTS: residuals that wait for a step that uses their parameter


class Reduction(Protocol):
    """A communication hook: it replaces a bucket by the sum over ranks, in place."""

    traits: Traits

    def start(self, bucket: dist.GradBucket, *, is_rehearsal: bool, samples: bool) -> "Future[Tensor]":
        """Start the reduction of a bucket that is complete on this rank. Nothing of a warmup pass may be remembered.

        `sample_gradients`: compare some of the sums with the exact ones.
        """

    def finish(self) -> None:
        """Wait until every bucket that was started holds its sum."""

    def abandon(self) -> None:
        """Wait until the reductions in flight have failed."""

    def take_bytes(self) -> int:
        """Return the bytes that this rank sent since the last call."""

    def take_fidelity(self) -> Tensor | None:
        """Return (error, cosine) of the sums that were compared since the last call."""

    def take_exchanged(self) -> list[Exchanged]:
        """Return the exchange of each bucket since the last call."""

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the residuals: what this rank has not sent yet of its parameters' gradients."""

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return this rank's state by the names of its parameters."""

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        """Load this rank's state, which comes first, and take over the residuals of departed ranks."""


class Buckets:
    """Synchronous data parallelism: every rank holds the sum of all gradients after the last backward of a pass."""

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
        self._done: set[Tensor] = set()  # parameters whose gradient has grown since the last exchange
        self._hooks: list[Any] = []
        self._arranges = False
        self._is_rehearsal = True  # until `finish_warmup`
        self._settles_next = False  # rebuild new buckets in the order in which gradients became ready
        self._left: dict[nn.Parameter, Tensor] = {}  # flat residuals
        self._samples = False
        self._buffers: list[Tensor] = []  # of the step whose gradients are sampled
        self._mine_sq: list[Tensor] = []
        self._whole_sq: Tensor | None = None

    @property
    def rounds_by_model(self) -> bool:
        return self._reduction.traits.rounds_by_model

    def change(self, reduction: Reduction, bucket_bytes: int | None) -> None:
        """Use another hook or bucket size from here on; the old residuals go out with the next gradients."""
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
            # The program has frozen or unfrozen parameters.
            self._make(all_have_rank_0s_weights=True)
        before = self._done.copy()
        self._done.clear()
        had_residuals = self._add_left()
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
                used, keeps_sums=had_residuals or (self._reduction.traits.is_lossy and not self._is_rehearsal)
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
        events = self._reduction.take_exchanged()

        def in_flight_s() -> float:
            if not events:
                return 0.0
            first = events[0].begin
            return union_s([(self._clock.seconds(first, event.begin), self._clock.seconds(first, event.end))
                            for event in events])  # fmt: skip

        return Traffic(self._reduction.take_bytes(), in_flight_s, events)

    def take_samples(self) -> Samples:
        local_sq, global_sq, self._mine_sq, self._whole_sq = self._mine_sq, self._whole_sq, [], None
        fidelity = self._reduction.take_fidelity()
        return Samples(torch.stack(local_sq).sum() if global_sq is not None else None, global_sq, fidelity)

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
        waiting = {UNUSED: {names[parameter]: flat for parameter, flat in self._left.items()}} if self._left else {}
        return self._reduction.own_state(names) | waiting

    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        parameters = dict(self._module.named_parameters())
        # Drifting replicas saved something else.
        states = [{} if "agreed" in saved else saved for saved in (state, *others)]
        self._reduction.load_own_state(states, parameters)
        # Residuals of another strategy, from before a change that was undone, go out with the next gradients.
        kinds = [kind for kind in LEFT_OF_GRADIENTS if kind not in self._reduction.traits.takes]
        self._left = {}
        self._leave([(parameters[name], flat.to(parameters[name].device))
                     for saved in states for kind in kinds for name, flat in saved.get(kind, {}).items()])  # fmt: skip

    def _leave(self, left: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Keep residuals for the next gradients; a parameter may have one of its gradients and one of its sums."""
        for parameter, residual in left:
            flat = residual.reshape(-1)
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
            gradient_as_bucket_view=True,  # gradients are views of the buckets: one copy less each way
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
        """Arrange buckets in the order of the parameters, the last first, as in most backwards. Sends nothing."""
        without_grad = [parameter for parameter in self._parameters if parameter.grad is None]
        params_before = self._done.copy()
        self._arranges = True
        self._ddp.reducer.prepare_for_backward([])
        _add_zeros(self._parameters)
        self._arranges = False
        self._ddp.reducer._rebuild_buckets()
        for parameter in without_grad:
            parameter.grad = None
        self._done.clear()
        self._done |= params_before

    def _add_left(self) -> bool:
        """Add the residuals of earlier steps to this rank's gradients; return whether there were any. Those of frozen
        parameters wait.
        """
        if self._is_rehearsal:
            return False
        trainable = set(self._parameters)
        residuals = {parameter: flat for parameter, flat in self._left.items() if parameter in trainable}
        self._left = {parameter: flat for parameter, flat in self._left.items() if parameter not in trainable}
        for parameter, flat in residuals.items():
            residual = flat.view(parameter.shape)
            parameter.grad = residual if parameter.grad is None else parameter.grad + residual
        return bool(residuals)

    def _forget_unused(self, used: set[Tensor], *, keeps_sums: bool) -> None:
        """Clear the gradients of parameters that no rank used, as on one rank.

        Where ranks had residuals of them, these are now summed in the gradient: each rank keeps its part for a later
        step.
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
            self._lap("compute_s")  # the last gradient is ready: from here on backward only waits
        if self._samples and self._reduction.traits.keeps_norm:
            self._buffers.append(bucket.buffer())
            self._mine_sq.append(_squares([bucket.buffer()]))
        return self._reduction.start(bucket, is_rehearsal=self._is_rehearsal, samples=self._samples)


def nothing_to_wait_for(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return a completed future for the reducer: the bucket is done, or the caller waits for it elsewhere."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _squares(buffers: list[Tensor]) -> Tensor:
    """Return the squared norm of all buffers together, without allocating memory of their size."""
    return torch.stack([torch.dot(buffer, buffer) for buffer in buffers]).sum()


def _add_zeros(parameters: list[nn.Parameter]) -> None:
    """Give each parameter a gradient of 0, the last one first, or add 0 to the one it has."""
    torch.stack([(parameter.flatten()[:1] * 0).sum().float() for parameter in parameters]).sum().backward()


def union_s(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> union_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
