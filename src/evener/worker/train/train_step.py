"""Run one optimizer step of one rank: forward and backward over its micro-batches, then updates.

    micro_batches() ─▶ batch ─▶ forward ─▶ backward() ─▶ … ─▶ the last backward syncs gradients ─▶ update()

A program may run several backwards on a micro-batch, and only when its loop requests the next micro-batch is it known
which backward was the last. So the newest backward of a pass's last micro-batch is deferred until then: gradients are
complete when the loop over micro_batches() has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evener.core.base.errors import UsageError
from evener.core.run.peer_failure import PeersLostError
from evener.core.run.roster import Member, Roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.step_cost import BLOCKED
from evener.core.run.step_spans import FORWARD
from evener.worker.membership import Membership
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.stop_signals import StopRequest
from evener.worker.record.step_recorder import HostCopy, StepRecorder
from evener.worker.state.training_state import TrainingState, batch_norm_names
from evener.worker.sync import Sync
from evener.worker.train.buffers import BufferAverager
from evener.worker.train.datasets import Dataset, fingerprint_data
from evener.worker.train.warmup import WarmupStep


@dataclass
class TrainContext:
    """The parts of a run that all its steps use."""

    spec: RunSpec
    group: ProcessGroups
    dataset: Dataset
    training_state: TrainingState
    recorder: StepRecorder
    membership: Membership
    is_user_program: bool  # a program with its own data and loss, not evener's
    is_compiled: bool
    changed_buffers: set[str] = field(default_factory=set)  # names of buffers that forward mutates

    @property
    def sync(self) -> Sync:
        """The sync strategy in force."""
        return self.training_state.sync


SAMPLE_GRADIENTS_EVERY = 10  # steps between those whose gradients are measured: reading them costs half a percent


class DeferredBackward:
    """A backward that runs later than the program called it, with the same result.

    Meanwhile the program continues, and may freeze parameters: a GAN freezes its critic between the critic's backward
    and the generator's. Autograd reads `requires_grad` when it runs, so backward runs with the flags of the time of the
    call.
    """

    def __init__(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        self._loss, self._parameters = loss, parameters
        self._requires_grad = [parameter.requires_grad for parameter in parameters]

    def backward(self) -> None:
        flags_before = [parameter.requires_grad for parameter in self._parameters]
        self._set_requires_grad(self._requires_grad)
        self._loss.backward()
        self._set_requires_grad(flags_before)

    def _set_requires_grad(self, flags: list[bool]) -> None:
        for parameter, flag in zip(self._parameters, flags, strict=True):
            parameter.requires_grad = flag


@contextmanager
def scaled_learning_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Multiply learning rates by `factor` within the context, except those of torch's SGD and ASGD.

    Their steps are proportional to the gradient: the mean of replicas that take them moves as far as one process.
    """
    adaptive = [one for one in optimizers if not isinstance(one, (torch.optim.SGD, torch.optim.ASGD))]
    groups = [group for one in adaptive for group in one.param_groups if "lr" in group] if factor != 1.0 else []
    rates = [(group, group["lr"], group["lr"] * factor) for group in groups]
    for group, _, scaled in rates:
        group["lr"] = scaled
    try:
        yield
    finally:
        for group, rate, scaled in rates:
            if group["lr"] is scaled:  # the optimizer has not changed it in its step
                group["lr"] = rate


class TrainStep:
    """One optimizer step of one rank."""

    def __init__(self, context: TrainContext, roster: Roster, index: int, *, is_first: bool) -> None:
        self._context, self._is_first = context, is_first
        train, every = context.spec.train, context.spec.eval.eval_every
        self.index = index
        self.val_loss: float | None = None
        self.is_eval_step = index + 1 == train.steps or (bool(every) and (index + 1) % every == 0)
        self._samples = context.dataset.global_batch(train.seed, index, train.batch)
        self._global_tokens = context.dataset.num_tokens(self._samples)
        if not self._global_tokens > 0:
            raise UsageError(f"step {index}: num_tokens of its batch is {self._global_tokens}: expected more than 0")
        self._take_share(roster)
        self._is_last_step = index + 1 == train.steps
        self._updated: set[int] = set()  # ids of optimizers
        self._is_finished = False  # `_finish` has run
        self._num_passes = 0
        self._in_micro_batch = self._is_last_micro_batch = False
        self.is_updated = False  # whether an optimizer has stepped since the last pass
        self._deferred_backward: DeferredBackward | None = None
        self._has_backward = False
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=context.group.device)
        self._global_loss_sum: float | None = None  # the loss summed over ranks, if `commit_gradients` returned it
        self._warmup_losses: list[Tensor] | None = None  # of each backward, during the warmup
        self._grad_norm: Tensor | None = None
        self._lr = 0.0

    def _take_share(self, roster: Roster) -> None:
        """Compute this rank's micro-batches, and the divisor of its losses, from the Roster."""
        self._roster, context = roster, self._context
        sizes, start = roster.micro_batch_sizes(context.group.rank), roster.first_sequence(context.group.rank)
        samples = self._samples[start : start + self.member.share]
        self._micro_batch_samples = np.split(samples, np.cumsum(sizes)[:-1]) if sizes else []
        self._tokens = float(sum(context.dataset.num_tokens(micro_batch) for micro_batch in self._micro_batch_samples))
        self._divisor = (self._tokens or 1.0) if context.sync.drifts else self._global_tokens
        # a drifting replica has only its own gradients
        self._has_gradients = self._tokens > 0 or not context.sync.drifts

    @property
    def member(self) -> Member:
        """This rank's entry in the Roster."""
        return self._roster.members[self._context.group.rank]

    def micro_batches(self) -> Iterator[Any]:
        """Yield the micro-batches of this rank's share of the global batch; a second call repeats them.

        In the first step after a start the loop first gets a few more micro-batches: the warmup (see warmup.py).
        """
        if self._num_passes and not self.is_updated:
            raise UsageError(
                "step.micro_batches() called again before step.update: gradients of the first pass are already summed",
                hint="go through the micro-batches once, and call step.backward for each loss of a micro-batch",
            )
        self.is_updated = False
        self._context.training_state.zero_grad()
        if self._is_first:
            yield from self._run_warmup()
        self._num_passes += 1
        membership, loss_before = self._context.membership, self._loss_sum.clone()
        while True:
            if membership.roster.epoch != self._roster.epoch:  # a regroup since the step began
                self._take_share(membership.roster.at_step(self.index))
            try:
                with self._context.recorder.trace_layers(self.index, self._context.training_state.module):
                    yield from self._run_micro_batches(self._micro_batch_samples)
                global_loss = membership.commit_gradients(self._loss_sum - loss_before)
                break
            except RuntimeError as error:
                self._deferred_backward = None
                if membership.recover_from(error):
                    global_loss = membership.last_result
                    break
                self._loss_sum = loss_before.clone()
                self._context.training_state.zero_grad()
        if global_loss is not None:
            self._global_loss_sum = global_loss + (self._global_loss_sum or 0.0)
            self._context.recorder.lap(BLOCKED)

    def backward(self, loss: Tensor, tokens: float | None = None) -> None:
        """Run backward on a *sum* of losses, divided by the tokens of the global batch, or of this rank's share where
        replicas drift.

        For a mean, `tokens` is the number it was taken over. May be called several times in a micro-batch. Raise
        UsageError outside of one, where gradients would not be synchronized.
        """
        if not self._in_micro_batch:
            raise UsageError(
                "step.backward outside of the loop over step.micro_batches(): its gradients would not be synchronized",
                hint="call it inside the loop, at least once for each micro-batch",
            )
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"step.backward: expected a scalar that requires grad, got a tensor of shape {tuple(loss.shape)}"
                f"{'' if loss.requires_grad else ' that does not require grad'}",
                hint="pass the sum of the losses of the micro-batch's samples",
            )
        loss_sum = (loss if tokens is None else loss * tokens).reshape(())
        self._loss_sum += loss_sum.detach()
        if self._warmup_losses is not None:
            self._warmup_losses.append(loss_sum.detach())
        self._has_backward = True
        self._run_deferred_backward()
        trained = self._context.training_state
        scaled = trained.scaler.scale(loss_sum / self._divisor)
        if self._is_last_micro_batch:
            self._deferred_backward = DeferredBackward(scaled, trained.parameters)
        else:
            self._context.recorder.lap(FORWARD)
            scaled.backward()
            self._context.recorder.lap("compute_s")

    def update(self, *optimizers: torch.optim.Optimizer) -> None:
        """Clip the global norm of these optimizers' gradients, and step with each.

        With `--sync diloco:H`, H up to 4, learning rates are larger during the step, 1.41 times with two equal
        replicas, because the mean of replicas moves less far than one process; those of torch's SGD are not.

        A drifting replica without a share does not step: its gradients are zeros.
        """
        context, clip = self._context, self._context.spec.train.clip
        self._check_update(optimizers)
        for optimizer in optimizers if self._has_gradients else ():
            context.training_state.scaler.unscale_(optimizer)
        if clip and self._has_gradients:
            groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
            norm = context.sync.clip_grad_norm([parameter for group in groups for parameter in group], clip)
            self._grad_norm = norm if self._grad_norm is None else torch.hypot(norm, self._grad_norm)
        self._lr = optimizers[0].param_groups[0]["lr"]
        factor = context.sync.learning_rate_factor(context.membership.roster.mean_shares)
        with scaled_learning_rates(optimizers, factor):
            for optimizer in optimizers if self._has_gradients else ():
                context.training_state.scaler.step(optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        context.training_state.is_learning = self._has_gradients
        context.sync.after_optimizer_step(self._tokens, self._global_tokens)
        self.is_updated = True
        self._updated |= {id(optimizer) for optimizer in optimizers}
        if not self._is_finished and len(self._updated) == len(context.training_state.optimizers):
            self._finish()
        context.recorder.lap("optimizer_s")
        context.recorder.stop_timers()

    def record_between_steps(self, name: str) -> AbstractContextManager[None]:
        """Return a context for work between steps that is not training; the timeline shows it by this name."""
        return self._context.recorder.spans.record_span(name)

    def end(self, *, stop_request: StopRequest, share_weight: float) -> None:
        """Record the step after the program's loop body has finished."""
        if not self.is_updated:
            problem = "there was no step.update" if self._num_passes else "no micro-batch was taken"
            raise UsageError(
                f"step {self.index}: {problem}: nothing was learned from its batch",
                hint="gradients of one step are accumulated already; a larger --batch has more micro-batches",
            )
        if not self._is_finished:
            self._finish()
            if self._context.sync.drifts:
                self._context.recorder.stop_timers()
        comm_stats = self._context.sync.take_comm_stats()
        gradient_stats = self._context.sync.take_gradient_stats()
        if self._context.training_state.scaler.is_enabled() and self._has_gradients:
            self._context.training_state.scaler.update()
        self._context.recorder.end_step(
            stop_request=stop_request,
            share_weight=share_weight,
            step=self.index,
            epoch=self._roster.epoch,
            tokens=self._tokens,
            global_tokens=self._global_tokens,
            sync_s=comm_stats.read_in_flight_s,
            bytes=comm_stats.sent_bytes,
            exchanges=comm_stats.exchanges,
            lr=self._lr,
            loss_sum=HostCopy(self._loss_sum),
            global_loss_sum=self._global_loss_sum,
            grad_norm=HostCopy.from_optional(self._grad_norm),
            local_grad_sq=HostCopy.from_optional(gradient_stats.local_grad_sq),
            global_grad_sq=HostCopy.from_optional(gradient_stats.global_grad_sq),
            fidelity=HostCopy.from_optional(gradient_stats.fidelity),
        )

    def _finish(self) -> None:
        """Run what is due after the step, once all optimizers have stepped or at the latest when the step ends."""
        self._is_finished = True
        sync, membership = self._context.sync, self._context.membership
        membership.retry_after_regroup(sync.merge_replicas) if self._is_last_step else membership.retry_after_regroup(
            sync.after_step, self.index
        )

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _run_micro_batches(self, micro_batches: list[np.ndarray]) -> Iterator[Any]:
        """Yield micro-batches; synchronize gradients after the last one, when the program requests another."""
        context = self._context
        averager = BufferAverager(context.training_state.module, sorted(context.changed_buffers))
        for i, samples in enumerate(micro_batches):
            if context.membership.is_epoch_lost:
                raise PeersLostError("another membership epoch has begun")
            batch = context.dataset.load(samples, context.group.device)
            context.recorder.lap("data_s")
            self._in_micro_batch, self._is_last_micro_batch = True, i + 1 == len(micro_batches)
            yield batch
            self._in_micro_batch = False
            if self._is_last_micro_batch:
                self._sync_gradients()
            averager.accumulate()
        if not micro_batches:
            self._sync_gradients()
        if context.changed_buffers:
            averager.average(context.sync.all_reduce_sum)
            context.recorder.lap("compute_s" if context.group.world_size == 1 else BLOCKED)

    def _sync_gradients(self) -> None:
        context, deferred = self._context, self._deferred_backward
        self._deferred_backward, self._is_last_micro_batch = None, False
        context.recorder.lap(FORWARD)
        samples = (
            self._num_passes == 1
            and self.index % SAMPLE_GRADIENTS_EVERY == 0
            and not context.training_state.scaler.is_enabled()
        )
        context.sync.backward(deferred, sample_gradients=samples)
        context.recorder.lap("compute_s" if context.group.world_size == 1 else BLOCKED)

    def _run_deferred_backward(self) -> None:
        """Run the deferred backward, which was not the last."""
        deferred, self._deferred_backward = self._deferred_backward, None
        if deferred is not None:
            self._context.recorder.lap(FORWARD)
            deferred.backward()
            self._context.recorder.lap("compute_s")

    def _run_warmup(self) -> Iterator[Any]:
        """Warm up: run the program's own loop on parts of the batch, and discard the results."""
        context = self._context
        warmup = WarmupStep(
            context.training_state,
            context.group,
            is_user_program=context.is_user_program,
            is_compiled=context.is_compiled,
        )
        loss_before = self._loss_sum.clone()
        for samples, is_last in warmup.micro_batches(*self._warmup_samples()):
            self._warmup_losses = []
            batch = context.dataset.load(samples, context.group.device)
            self._in_micro_batch, self._is_last_micro_batch = True, is_last
            yield batch
            self._in_micro_batch = False
            warmup.record_losses([float(loss) for loss in self._warmup_losses])
            if is_last:
                self._sync_gradients()
                context.sync.finish_warmup()
        context.sync.take_comm_stats()
        context.training_state.zero_grad()
        self._loss_sum, self._warmup_losses = loss_before, None
        data_fingerprint = fingerprint_data(context.dataset, self._samples) if context.is_user_program else None
        context.changed_buffers |= warmup.finish(self._has_backward, data_fingerprint)
        context.recorder.begin_step()

    def _warmup_samples(self) -> tuple[np.ndarray, list[int]]:
        """Return (samples, micro-batch sizes): this rank's share, or the fewest samples that suffice if it has none.

        With sharded weights one micro-batch, as on all other ranks.
        """
        if self.member.share:
            sizes = self._roster.micro_batch_sizes(self._context.group.rank)
            start = self._roster.first_sequence(self._context.group.rank)
            is_sharded = self._roster.sync.is_sharded
            return self._samples[start : start + self.member.share], [max(sizes)] if is_sharded else sizes
        num_samples = self.member.micro_batch if batch_norm_names(self._context.training_state.module) else 1
        return self._samples[:num_samples], [num_samples]

    def _check_update(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        if self._in_micro_batch or self._num_passes == 0:
            raise UsageError(
                "step.update inside the loop over step.micro_batches(), or without one: gradients are not complete",
                hint="call it once, after the loop",
            )
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._context.training_state.optimizers):
                raise UsageError(
                    f"step.update: this {type(optimizer).__name__} was not given to run.optimizer: it is not saved",
                    hint="optimizer = run.optimizer(…) before run.steps",
                )
