"""Run one optimizer step of one rank: forward and backward over its micro-batches, then updates.

    micro_batches() ─▶ batch ─▶ forward ─▶ backward() ─▶ … ─▶ the last backward syncs gradients ─▶ update()

A program may run several backwards on a micro-batch, and only when its loop requests the next micro-batch is it known
which backward was the last. So the newest backward of a pass's last micro-batch is deferred until then: gradients are
complete when the loop over micro_batches() has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evener.core.errors import UsageError
from evener.core.roster import Member, Roster
from evener.core.spans import FORWARD
from evener.core.spec import RunSpec
from evener.core.step import BLOCKED
from evener.worker.buffers import MovingBuffers
from evener.worker.datasets import Dataset, fingerprint
from evener.worker.group import Group
from evener.worker.membership import Membership
from evener.worker.record import OnHost, Recorder
from evener.worker.rehearsal import Rehearsal
from evener.worker.sync import Sync
from evener.worker.trained import Trained, batch_norms


@dataclass
class Engine:
    """What all steps of a run share."""

    spec: RunSpec
    group: Group
    dataset: Dataset
    trained: Trained
    sync: Sync
    recorder: Recorder
    membership: Membership
    is_own: bool  # a program with its own data and loss, not evener's
    is_compiled: bool
    moved: set[str] = field(default_factory=set)  # names of buffers that forward mutates


SAMPLED_EVERY = 10  # steps between those whose gradients are measured: reading them costs half a percent


class Held:
    """A deferred backward, which later runs as it would have run at once.

    The program continues meanwhile: a GAN freezes its critic between the critic's backward and the generator's.
    Autograd reads `requires_grad` when it runs, so its values at the time of the call are restored.
    """

    def __init__(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        self._loss, self._parameters = loss, parameters
        self._requires_grad = [parameter.requires_grad for parameter in parameters]

    def backward(self) -> None:
        flags_before = [parameter.requires_grad for parameter in self._parameters]
        self._set(self._requires_grad)
        self._loss.backward()
        self._set(flags_before)

    def _set(self, flags: list[bool]) -> None:
        for parameter, flag in zip(self._parameters, flags, strict=True):
            parameter.requires_grad = flag


class Step:
    """One optimizer step of one rank."""

    def __init__(self, engine: Engine, roster: Roster, index: int, *, is_first: bool) -> None:
        self._engine, self._is_first = engine, is_first
        train, every = engine.spec.train, engine.spec.eval.eval_every
        self.index = index
        self.val_loss: float | None = None
        self.evaluates = index + 1 == train.steps or (bool(every) and (index + 1) % every == 0)
        self._samples = engine.dataset.global_batch(train.seed, index, train.batch)
        self._global_tokens = engine.dataset.num_tokens(self._samples)
        if not self._global_tokens > 0:
            raise UsageError(f"step {index}: num_tokens of its batch is {self._global_tokens}: expected more than 0")
        self._divide(roster)
        self._is_last_step = index + 1 == train.steps
        self._updated: set[int] = set()  # ids of optimizers
        self._is_over = False  # `_finish` has run
        self._num_passes = 0
        self._in_micro_batch = self._is_last = False
        self.is_updated = False  # whether an optimizer has stepped since the last pass
        self._held: Held | None = None
        self._has_backward = False
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=engine.group.device)
        self._of_all: float | None = None  # the loss summed over ranks, if `commit_gradients` returned it
        self._losses: list[Tensor] | None = None  # of each backward, during the warmup
        self._grad_norm: Tensor | None = None
        self._lr = 0.0

    def _divide(self, roster: Roster) -> None:
        """Compute this rank's micro-batches and its divisor from the Roster."""
        self._roster, context = roster, self._engine
        sizes, start = self.member.micro_batches, roster.first_sequence(context.group.rank)
        samples = self._samples[start : start + self.member.share]
        self._parts = np.split(samples, np.cumsum(sizes)[:-1]) if sizes else []
        self._tokens = float(sum(context.dataset.num_tokens(micro_batch) for micro_batch in self._parts))
        is_drifting = context.sync.replica == "drifting"
        self._divisor = (self._tokens or 1.0) if is_drifting else self._global_tokens
        self._learns = self._tokens > 0 or not is_drifting  # a drifting replica has only its own gradients

    @property
    def member(self) -> Member:
        """This rank's entry in the Roster."""
        return self._roster.members[self._engine.group.rank]

    def micro_batches(self) -> Iterator[Any]:
        """Yield the micro-batches of this rank's share of the global batch; a second call repeats them.

        In the first step after a start the loop first gets a few more micro-batches: the warmup (see rehearsal.py).
        """
        if self._num_passes and not self.is_updated:
            raise UsageError(
                "step.micro_batches() called again before step.update: gradients of the first pass are already summed",
                hint="compute both losses in one pass: step.backward may be called several times in a micro-batch",
            )
        self.is_updated = False
        self._engine.trained.zero_grad()
        if self._is_first:
            yield from self._rehearse()
        self._num_passes += 1
        membership, loss_before = self._engine.membership, self._loss_sum.clone()
        while True:
            if membership.roster.epoch != self._roster.epoch:  # a regroup since the step began
                self._divide(membership.roster.at(self.index))
            try:
                with self._engine.recorder.watching(self.index, self._engine.trained.module):
                    yield from self._run(self._parts)
                global_loss = membership.agree(self._loss_sum - loss_before)
                break
            except RuntimeError as error:
                self._held = None
                if membership.is_behind(error):
                    global_loss = membership.result
                    break
                self._loss_sum = loss_before.clone()
                self._engine.trained.zero_grad()
        if global_loss is not None:
            self._of_all = global_loss + (self._of_all or 0.0)
            self._engine.recorder.lap(BLOCKED)

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
        if self._losses is not None:
            self._losses.append(loss_sum.detach())
        self._has_backward = True
        self._release()
        trained = self._engine.trained
        scaled = trained.scaler.scale(loss_sum / self._divisor)
        if self._is_last:
            self._held = Held(scaled, trained.parameters)
        else:
            self._engine.recorder.lap(FORWARD)
            scaled.backward()
            self._engine.recorder.lap("compute_s")

    def update(self, *optimizers: torch.optim.Optimizer) -> None:
        """Clip the global norm of these optimizers' gradients, and step with each.

        A drifting replica without a share does not step: its gradients are zeros.
        """
        context, clip = self._engine, self._engine.spec.train.clip
        self._check_update(optimizers)
        for optimizer in optimizers if self._learns else ():
            context.trained.scaler.unscale_(optimizer)
        if clip and self._learns:
            groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
            norm = nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group], clip)
            self._grad_norm = norm if self._grad_norm is None else torch.hypot(norm, self._grad_norm)
        self._lr = optimizers[0].param_groups[0]["lr"]
        for optimizer in optimizers:
            if self._learns:
                context.trained.scaler.step(optimizer)
            optimizer.zero_grad()
        context.trained.learns = self._learns
        context.sync.after_update(self._tokens, self._global_tokens)
        self.is_updated = True
        self._updated |= {id(optimizer) for optimizer in optimizers}
        if not self._is_over and len(self._updated) == len(context.trained.optimizers):
            self._finish()
        context.recorder.lap("optimizer_s")
        context.recorder.pause()

    def during(self, what: str) -> AbstractContextManager[None]:
        """Return a context for work between steps that is not training; the timeline shows it by this name."""
        return self._engine.recorder.spans.during(what)

    def end(self, *, wish: float, weight: float) -> None:
        """Record the step after the program's loop body has finished."""
        if not self.is_updated:
            problem = "there was no step.update" if self._num_passes else "no micro-batch was taken"
            raise UsageError(
                f"step {self.index}: {problem}: nothing was learned from its batch",
                hint="gradients of one step are accumulated already; a larger --batch has more micro-batches",
            )
        if not self._is_over:
            self._finish()
            if self._engine.sync.replica == "drifting":
                self._engine.recorder.pause()
        comm_stats = self._engine.sync.take_cost()
        gradient_stats = self._engine.sync.take_samples()
        if self._engine.trained.scaler.is_enabled() and self._learns:
            self._engine.trained.scaler.update()
        self._engine.recorder.end(
            wish=wish,
            weight=weight,
            step=self.index,
            epoch=self._roster.epoch,
            tokens=self._tokens,
            global_tokens=self._global_tokens,
            sync_s=comm_stats.in_flight_s,
            bytes=comm_stats.bytes,
            exchanges=comm_stats.exchanges,
            lr=self._lr,
            loss_sum=OnHost(self._loss_sum),
            of_all=self._of_all,
            grad_norm=OnHost.of(self._grad_norm),
            mine_sq=OnHost.of(gradient_stats.mine_sq),
            whole_sq=OnHost.of(gradient_stats.whole_sq),
            fidelity=OnHost.of(gradient_stats.fidelity),
        )

    def _finish(self) -> None:
        """Run what is due after the step, once all optimizers have stepped or at the latest when the step ends."""
        self._is_over = True
        sync, membership = self._engine.sync, self._engine.membership
        membership.again(sync.conclude) if self._is_last_step else membership.again(sync.after_step, self.index)

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _run(self, parts: list[np.ndarray]) -> Iterator[Any]:
        """Yield micro-batches; synchronize gradients when the program requests one more."""
        context = self._engine
        averager = MovingBuffers(context.trained.module, sorted(context.moved))
        for i, samples in enumerate(parts):
            if context.membership.is_lost:
                raise RuntimeError("remote process exit: another membership epoch has begun")
            batch = context.dataset.load(samples, context.group.device)
            context.recorder.lap("data_s")
            self._in_micro_batch, self._is_last = True, i + 1 == len(parts)
            yield batch
            self._in_micro_batch = False
            if self._is_last:
                self._exchange()
            averager.take()
        if not parts:
            self._exchange()
        if context.moved:
            averager.settle(context.sync.total)
            context.recorder.lap("compute_s" if context.group.world_size == 1 else BLOCKED)

    def _exchange(self) -> None:
        context, deferred = self._engine, self._held
        self._held, self._is_last = None, False
        context.recorder.lap(FORWARD)
        samples = self._num_passes == 1 and self.index % SAMPLED_EVERY == 0 and not context.trained.scaler.is_enabled()
        context.sync.backward(deferred, samples=samples)
        context.recorder.lap("compute_s" if context.group.world_size == 1 else BLOCKED)

    def _release(self) -> None:
        """Run the deferred backward, which was not the last."""
        deferred, self._held = self._held, None
        if deferred is not None:
            self._engine.recorder.lap(FORWARD)
            deferred.backward()
            self._engine.recorder.lap("compute_s")

    def _rehearse(self) -> Iterator[Any]:
        """Warm up: run the program's own loop on parts of the batch, and discard the results."""
        context = self._engine
        warmup = Rehearsal(context.trained, context.group, is_own=context.is_own, is_compiled=context.is_compiled)
        loss_before = self._loss_sum.clone()
        for samples, is_last in warmup.parts(*self._to_rehearse()):
            self._losses = []
            batch = context.dataset.load(samples, context.group.device)
            self._in_micro_batch, self._is_last = True, is_last
            yield batch
            self._in_micro_batch = False
            warmup.note([float(loss) for loss in self._losses])
            if is_last:
                self._exchange()
                context.sync.settle()
        context.sync.take_cost()
        context.trained.zero_grad()
        self._loss_sum, self._losses = loss_before, None
        data_fingerprint = fingerprint(context.dataset, self._samples) if context.is_own else None
        context.moved |= warmup.end(self._has_backward, data_fingerprint)
        context.recorder.begin()

    def _to_rehearse(self) -> tuple[np.ndarray, list[int]]:
        """Return (samples, micro-batch sizes): this rank's share, or the fewest samples that suffice if it has none."""
        if sizes := self.member.micro_batches:
            start = self._roster.first_sequence(self._engine.group.rank)
            return self._samples[start : start + self.member.share], sizes
        num_samples = self.member.micro_batch if batch_norms(self._engine.trained.module) else 1
        return self._samples[:num_samples], [num_samples]

    def _check_update(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        if self._in_micro_batch or self._num_passes == 0:
            raise UsageError(
                "step.update inside the loop over step.micro_batches(), or without one: gradients are not complete",
                hint="call it once, after the loop",
            )
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._engine.trained.optimizers):
                raise UsageError(
                    f"step.update: this {type(optimizer).__name__} was not given to run.optimizer: it is not saved",
                    hint="optimizer = run.optimizer(…) before run.steps",
                )
