"""Synchronize gradients bucket by bucket during backward, with the reducer of torch's DDP.

DDP decides at forward whether the backward that belongs to it synchronizes gradients. A program may run several
backwards, and its rank may have no sequences at all; so forward runs on the bare module, and the reducer is prepared
right before the one backward that synchronizes. It expects a gradient of every parameter. Parameters that got none get
zeros, which the reducer waits for. If no rank had a gradient of a parameter, its zeros are cleared again, so that the
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

from evener.core.run.roster import Roster, SyncSpec
from evener.core.run.step_spans import BucketCommEvent
from evener.plan.cost.sync_traffic import bucket_bytes
from evener.worker.rank import torch_private
from evener.worker.rank.clock import Clock
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.sync import (
    GRADIENT_RESIDUAL_KINDS,
    CommStats,
    CompressionTraits,
    EqualReplicas,
    GradientStats,
    SupportsBackward,
)

Future = torch.futures.Future
UNUSED_RESIDUAL = "unused"  # one of GRADIENT_RESIDUAL_KINDS: those that wait for a step that uses their parameter


class CommHook(Protocol):
    """A communication hook: it replaces a bucket by the sum over ranks, in place."""

    traits: CompressionTraits

    def start(self, bucket: dist.GradBucket, *, is_warmup: bool, sample_gradients: bool) -> "Future[Tensor]":
        """Start the reduction of a bucket that is complete on this rank. A warmup pass leaves no residuals or factors.

        `sample_gradients`: compare some of the sums with the exact ones.
        """

    def wait_all(self) -> None:
        """Wait until every bucket that was started holds its sum."""

    def abort(self) -> None:
        """Wait until the reductions in flight have failed."""

    def close(self) -> None:
        """End its threads; nothing is in flight."""

    def take_fidelity(self) -> Tensor | None:
        """Return (error, cosine) of the sums that were compared since the last call."""

    def take_comm_events(self) -> list[BucketCommEvent]:
        """Return the exchange of each bucket since the last call."""

    def residuals(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the residuals: what this rank has not sent yet of its parameters' gradients."""

    def rank_state_dict(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return this rank's state, with tensors by the names of their parameters."""

    def load_rank_state_dict(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        """Load this rank's state, `states[0]`, and take over the residuals of departed ranks, `states[1:]`."""


class GradientSync(EqualReplicas):
    """Synchronous data parallelism: every rank holds the sum of all gradients after the last backward of a pass."""

    def __init__(
        self,
        group: ProcessGroups,
        clock: Clock,
        lap: Callable[[str], None],
        roster: Roster,
        make_hook: Callable[[SyncSpec], CommHook],
    ) -> None:
        self._group, self._clock, self._lap, self._make_hook = group, clock, lap, make_hook
        self._set_strategy(roster)
        self._params_with_new_grad: set[Tensor] = set()  # parameters whose gradient has grown since the last exchange
        self._hooks: list[Any] = []
        self._is_arranging_buckets = False
        self._is_warmup = True  # until `finish_warmup`
        self._rebuilds_buckets_next = False  # rebuild new buckets in the order in which gradients became ready
        self._residuals: dict[nn.Parameter, Tensor] = {}  # flat residuals
        self._samples_gradients = False
        self._sampled_buffers: list[Tensor] = []  # of the step whose gradients are sampled
        self._local_grad_sq: list[Tensor] = []
        self._global_grad_sq: Tensor | None = None

    @property
    def rounding_depends_on_cpu_model(self) -> bool:
        return self._hook.traits.rounding_depends_on_cpu_model

    def _set_strategy(self, roster: Roster) -> None:
        self.spec, self.roster_bucket_bytes = roster.sync, roster.bucket_bytes
        self._hook, self._bucket_bytes = self._make_hook(roster.sync), bucket_bytes(roster)

    def adopt_roster(self, roster: Roster, joining_ranks: Sequence[int] = ()) -> None:
        """Use the Roster's strategy and bucket size from here on; the old residuals go out with the next gradients."""
        self._is_warmup = False
        self._add_residuals(self._hook.residuals())
        self._hook.close()
        self._set_strategy(roster)
        self._build_ddp(is_already_in_sync=True)
        self._rebuilds_buckets_next = self._all_params_used

    def abort(self) -> None:
        self._hook.abort()
        torch_private.remove_autograd_hooks(self._ddp)
        self._sampled_buffers.clear()
        self._local_grad_sq.clear()
        self._params_with_new_grad.clear()

    def wrap(self, module: nn.Module, all_params_used: bool, *, is_under_way: bool = False) -> None:
        self._module, self._all_params, self._all_params_used = module, list(module.parameters()), all_params_used
        self._is_warmup, self._rebuilds_buckets_next = not is_under_way, is_under_way and all_params_used
        self._build_ddp(is_already_in_sync=is_under_way)

    def unwrap(self) -> None:
        self._hook.close()
        torch_private.remove_autograd_hooks(self._ddp)
        self._remove_parameter_hooks()
        # Its reducer holds the communication hook, and so this object, in C++: a cycle that gc cannot see.
        del self._ddp

    def backward(self, loss: SupportsBackward | None, *, sample_gradients: bool = False) -> None:
        self._samples_gradients = sample_gradients and not self._is_warmup
        self._sampled_buffers.clear()
        if any(a is not b for a, b in zip_longest(self._parameters, self._trainable_params())):
            # The program has frozen or unfrozen parameters.
            self._build_ddp(is_already_in_sync=True)
        before = self._params_with_new_grad.copy()
        self._params_with_new_grad.clear()
        had_residuals = self._apply_residuals()
        torch_private.prepare_for_backward(self._ddp)
        if loss is not None:
            loss.backward()
        missing = [parameter for parameter in self._parameters if parameter not in self._params_with_new_grad]
        used = before | self._params_with_new_grad
        if missing:
            _add_zero_grads(missing)
        self._params_with_new_grad.clear()
        self._hook.wait_all()
        if self._rebuilds_buckets_next:
            self._rebuilds_buckets_next = False
            torch_private.rebuild_buckets(self._ddp)
        if self._sampled_buffers:
            self._global_grad_sq = _sum_of_squares(self._sampled_buffers)
            self._sampled_buffers.clear()
        if not self._all_params_used:
            self._clear_unused_grads(
                used, keep_sums_as_residual=had_residuals or (self._hook.traits.is_lossy and not self._is_warmup)
            )

    def finish_warmup(self) -> None:
        if self._all_params_used:
            torch_private.rebuild_buckets(self._ddp)
        self._is_warmup = False

    def take_comm_stats(self) -> CommStats:
        return comm_stats(self._hook.take_comm_events(), self._clock)

    def take_gradient_stats(self) -> GradientStats:
        local_sq = self._local_grad_sq
        global_sq = self._global_grad_sq
        self._local_grad_sq = []
        self._global_grad_sq = None
        fidelity = self._hook.take_fidelity()
        return GradientStats(torch.stack(local_sq).sum() if global_sq is not None else None, global_sq, fidelity)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group.control_group)
        return values

    def rank_state_dict(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        waiting = (
            {UNUSED_RESIDUAL: {names[parameter]: flat for parameter, flat in self._residuals.items()}}
            if self._residuals
            else {}
        )
        return self._hook.rank_state_dict(names) | waiting

    def load_rank_state_dict(self, state: dict[str, Any], departed_states: Sequence[dict[str, Any]]) -> None:
        parameters = dict(self._module.named_parameters())
        # Drifting replicas saved something else.
        states = [{} if "agreed" in saved else saved for saved in (state, *departed_states)]
        self._hook.load_rank_state_dict(states, parameters)
        # Residuals of another strategy, from before a change that was undone, go out with the next gradients.
        kinds = [kind for kind in GRADIENT_RESIDUAL_KINDS if kind not in self._hook.traits.residual_kinds]
        self._residuals = {}
        self._add_residuals([(parameters[name], flat.to(parameters[name].device))
                     for saved in states for kind in kinds for name, flat in saved.get(kind, {}).items()])  # fmt: skip

    def _add_residuals(self, residuals: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Keep residuals for the next gradients; add up those of one parameter (of its gradients and of its sums)."""
        for parameter, residual in residuals:
            flat = residual.reshape(-1)
            self._residuals[parameter] = self._residuals[parameter] + flat if parameter in self._residuals else flat

    def _trainable_params(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._all_params if parameter.requires_grad]

    def _build_ddp(self, is_already_in_sync: bool) -> None:
        self._parameters = self._trainable_params()
        self._ddp = DistributedDataParallel(
            self._module,
            device_ids=[self._group.device] if self._group.device.type == "cuda" else None,
            process_group=self._group.gradient_group,
            bucket_cap_mb=None if self._bucket_bytes is None else self._bucket_bytes >> 20,
            gradient_as_bucket_view=True,  # gradients are views of the buckets: one copy less each way
            forward_sync_buffers=False,  # see worker/train/buffers.py
            init_sync=not is_already_in_sync,
        )
        self._ddp.register_comm_hook(None, self._comm_hook)
        self._remove_parameter_hooks()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._params_with_new_grad.add)
            for parameter in self._parameters
        ]
        if not self._all_params_used:
            self._arrange_buckets()

    def _remove_parameter_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrange_buckets(self) -> None:
        """Arrange buckets in the order of the parameters, the last first, as in most backwards. Sends nothing."""
        without_grad = [parameter for parameter in self._parameters if parameter.grad is None]
        params_before = self._params_with_new_grad.copy()
        self._is_arranging_buckets = True
        torch_private.prepare_for_backward(self._ddp)
        _add_zero_grads(self._parameters)
        self._is_arranging_buckets = False
        torch_private.rebuild_buckets(self._ddp)
        for parameter in without_grad:
            parameter.grad = None
        self._params_with_new_grad.clear()
        self._params_with_new_grad |= params_before

    def _apply_residuals(self) -> bool:
        """Add the residuals of earlier steps to this rank's gradients; return whether there were any.

        Residuals of frozen parameters are kept until their parameter is unfrozen.
        """
        if self._is_warmup:
            return False
        trainable = set(self._parameters)
        residuals = {parameter: flat for parameter, flat in self._residuals.items() if parameter in trainable}
        self._residuals = {parameter: flat for parameter, flat in self._residuals.items() if parameter not in trainable}
        for parameter, flat in residuals.items():
            residual = flat.view(parameter.shape)
            parameter.grad = residual if parameter.grad is None else parameter.grad + residual
        return bool(residuals)

    def _clear_unused_grads(self, used: set[Tensor], *, keep_sums_as_residual: bool) -> None:
        """Clear the gradients of parameters that no rank used, so that the optimizer skips them as on one rank.

        If ranks had residuals of such a parameter, its gradient is now their sum: with `keep_sums_as_residual` each of
        n ranks keeps 1/n of it for a later step.
        """
        mask = torch.tensor([parameter in used for parameter in self._parameters], dtype=torch.uint8)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group.control_group)
        for parameter, is_used in zip(self._parameters, mask.tolist(), strict=True):
            if not is_used:
                if keep_sums_as_residual and parameter.grad is not None:
                    self._add_residuals([(parameter, parameter.grad / self._group.world_size)])
                parameter.grad = None

    def _comm_hook(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if self._is_arranging_buckets:
            return completed_future(bucket)
        if bucket.is_last():
            self._lap("compute_s")  # the last gradient is ready: from here on backward only waits
        if self._samples_gradients and self._hook.traits.preserves_norm:
            self._sampled_buffers.append(bucket.buffer())
            self._local_grad_sq.append(_sum_of_squares([bucket.buffer()]))
        return self._hook.start(bucket, is_warmup=self._is_warmup, sample_gradients=self._samples_gradients)


def completed_future(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return a completed future for the reducer: the bucket is done, or the caller waits for it elsewhere."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum_of_squares(buffers: list[Tensor]) -> Tensor:
    """Return the squared norm of all buffers together, without allocating memory of their size."""
    return torch.stack([torch.dot(buffer, buffer) for buffer in buffers]).sum()


def _add_zero_grads(parameters: list[nn.Parameter]) -> None:
    """Give each parameter a gradient of 0, the last one first, or add 0 to the one it has."""
    torch.stack([(parameter.flatten()[:1] * 0).sum().float() for parameter in parameters]).sum().backward()


def comm_stats(events: Sequence[BucketCommEvent], clock: Clock) -> CommStats:
    """Return the statistics of a step in which these exchanges were made."""

    def in_flight_s() -> float:
        if not events:
            return 0.0
        first = events[0].begin
        return union_length_s([(clock.elapsed_s(first, event.begin), clock.elapsed_s(first, event.end))
                        for event in events])  # fmt: skip

    return CommStats(sum(event.sent_bytes for event in events), in_flight_s, events)


def union_length_s(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> union_length_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
