"""What does one optimizer step of one rank consist of? Passes over its share of the batch, and updates.

    micro_batches() ─▶ batch ─▶ forward ─▶ backward() ─▶ … ─▶ the last backward exchanges gradients ─▶ update()

A program may run several backwards on a micro-batch, and only when its loop asks for the next one is it known which was
the last. So the newest backward of a pass's last micro-batch is held until then: gradients are complete when the loop
over micro_batches() has ended.
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
    """What every step of a run is made with."""

    spec: RunSpec
    group: Group
    dataset: Dataset
    trained: Trained
    sync: Sync
    recorder: Recorder
    membership: Membership
    is_own: bool  # the program's own data and loss, not evener's
    is_compiled: bool
    moved: set[str] = field(default_factory=set)  # buffers that forward changes


SAMPLED_EVERY = 10  # steps from one whose gradients are measured to the next: reading them costs half a percent


class Held:
    """A backward that waits, and then runs as it would have run at once.

    The program goes on meanwhile: a GAN freezes its critic between the critic's backward and the generator's. Autograd
    looks at `requires_grad` when it runs.
    """

    def __init__(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        self._loss, self._parameters = loss, parameters
        self._requires_grad = [parameter.requires_grad for parameter in parameters]

    def backward(self) -> None:
        now = [parameter.requires_grad for parameter in self._parameters]
        self._set(self._requires_grad)
        self._loss.backward()
        self._set(now)

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
        self._is_over = False  # what is due after it has been done
        self._num_passes = 0
        self._in_micro_batch = self._is_last = False
        self.is_updated = False  # since the last pass
        self._held: Held | None = None
        self._has_backward = False
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=engine.group.device)
        self._of_all: float | None = None  # the sum of all ranks' losses, where these have told it already
        self._losses: list[Tensor] | None = None  # of each backward, while it is rehearsed
        self._grad_norm: Tensor | None = None
        self._lr = 0.0

    def _divide(self, roster: Roster) -> None:
        """Take this rank's share of the batch."""
        self._roster, engine = roster, self._engine
        sizes, start = self.member.micro_batches, roster.first_sequence(engine.group.rank)
        mine = self._samples[start : start + self.member.share]
        self._parts = np.split(mine, np.cumsum(sizes)[:-1]) if sizes else []
        self._tokens = float(sum(engine.dataset.num_tokens(part) for part in self._parts))
        drifts = engine.sync.replica == "drifting"
        self._divisor = (self._tokens or 1.0) if drifts else self._global_tokens
        self._learns = self._tokens > 0 or not drifts  # one that drifts has no gradients but its own

    @property
    def member(self) -> Member:
        """This rank's part."""
        return self._roster.members[self._engine.group.rank]

    def micro_batches(self) -> Iterator[Any]:
        """This rank's share of the global batch, micro-batch by micro-batch; called again, the same samples once more.

        In the first step of a start its loop sees a few micro-batches more: the rehearsal (see rehearsal.py).
        """
        if self._num_passes and not self.is_updated:
            raise UsageError(
                "step.micro_batches() again, before step.update: the ranks have exchanged the first pass's gradients",
                hint="both losses in one pass: step.backward may be called several times in a micro-batch",
            )
        self.is_updated = False
        self._engine.trained.zero_grad()
        if self._is_first:
            yield from self._rehearse()
        self._num_passes += 1
        who, before = self._engine.membership, self._loss_sum.clone()
        while True:
            if who.roster.epoch != self._roster.epoch:  # the world has changed since the step began
                self._divide(who.roster.at(self.index))
            try:
                with self._engine.recorder.watching(self.index, self._engine.trained.module):
                    yield from self._run(self._parts)
                of_all = who.agree(self._loss_sum - before)
                break
            except RuntimeError as error:
                self._held = None
                if who.is_behind(error):
                    of_all = who.result
                    break
                self._loss_sum = before.clone()
                self._engine.trained.zero_grad()
        if of_all is not None:
            self._of_all = of_all + (self._of_all or 0.0)
            self._engine.recorder.lap(BLOCKED)

    def backward(self, loss: Tensor, tokens: float | None = None) -> None:
        """Backward of a *sum* of losses, divided by what the losses of the global batch are weighed by; of a replica
        that drifts, those of its own share.

        Of a mean, `tokens` says over how many it was taken. May be called several times in a micro-batch.
        UsageError outside of one, where nothing would be exchanged.
        """
        if not self._in_micro_batch:
            raise UsageError(
                "step.backward outside of the loop over step.micro_batches(): its gradients would stay on this rank",
                hint="call it inside of the loop, once for each micro-batch or more often",
            )
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"step.backward: expected one number that depends on parameters, got a tensor of {tuple(loss.shape)}"
                f"{'' if loss.requires_grad else ' that depends on none'}",
                hint="the sum of the losses of the micro-batch's samples",
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

        A replica that drifts and has no share steps with none: zeros are no gradients.
        """
        engine, clip = self._engine, self._engine.spec.train.clip
        self._check_update(optimizers)
        for optimizer in optimizers if self._learns else ():
            engine.trained.scaler.unscale_(optimizer)
        if clip and self._learns:
            groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
            norm = nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group], clip)
            self._grad_norm = norm if self._grad_norm is None else torch.hypot(norm, self._grad_norm)
        self._lr = optimizers[0].param_groups[0]["lr"]
        for optimizer in optimizers:
            if self._learns:
                engine.trained.scaler.step(optimizer)
            optimizer.zero_grad()
        engine.trained.learns = self._learns
        engine.sync.after_update(self._tokens, self._global_tokens)
        self.is_updated = True
        self._updated |= {id(optimizer) for optimizer in optimizers}
        if not self._is_over and len(self._updated) == len(engine.trained.optimizers):
            self._finish()
        engine.recorder.lap("optimizer_s")
        engine.recorder.pause()

    def during(self, what: str) -> AbstractContextManager[None]:
        """What is done in this context, after the update, is no training; the timeline shows it by this name."""
        return self._engine.recorder.spans.during(what)

    def end(self, *, wish: float, weight: float) -> None:
        """The training program's step is over: record it."""
        if not self.is_updated:
            what = "there was no step.update" if self._num_passes else "no micro-batch was taken"
            raise UsageError(
                f"step {self.index}: {what}: nothing was learned from its batch",
                hint="micro-batches of one step are accumulated already; a larger --batch has more of them",
            )
        if not self._is_over:
            self._finish()
            if self._engine.sync.replica == "drifting":
                self._engine.recorder.pause()
        traffic = self._engine.sync.take_cost()
        samples = self._engine.sync.take_samples()
        if self._engine.trained.scaler.is_enabled() and self._learns:
            self._engine.trained.scaler.update()
        self._engine.recorder.end(
            wish=wish,
            weight=weight,
            step=self.index,
            epoch=self._roster.epoch,
            tokens=self._tokens,
            global_tokens=self._global_tokens,
            sync_s=traffic.in_flight_s,
            bytes=traffic.bytes,
            exchanges=traffic.exchanges,
            lr=self._lr,
            loss_sum=OnHost(self._loss_sum),
            of_all=self._of_all,
            grad_norm=OnHost.of(self._grad_norm),
            mine_sq=OnHost.of(samples.mine_sq),
            whole_sq=OnHost.of(samples.whole_sq),
            fidelity=OnHost.of(samples.fidelity),
        )

    def _finish(self) -> None:
        """Once all optimizers have stepped, or at the latest when the step ends: what is due after it."""
        self._is_over = True
        sync, who = self._engine.sync, self._engine.membership
        who.again(sync.conclude) if self._is_last_step else who.again(sync.after_step, self.index)

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _run(self, parts: list[np.ndarray]) -> Iterator[Any]:
        """The micro-batches, one after the other; when the program asks for one more, the exchange."""
        engine = self._engine
        moving = MovingBuffers(engine.trained.module, sorted(engine.moved))
        for i, part in enumerate(parts):
            if engine.membership.is_lost:
                raise RuntimeError("remote process exit: another world has begun")
            batch = engine.dataset.load(part, engine.group.device)
            engine.recorder.lap("data_s")
            self._in_micro_batch, self._is_last = True, i + 1 == len(parts)
            yield batch
            self._in_micro_batch = False
            if self._is_last:
                self._exchange()
            moving.take()
        if not parts:
            self._exchange()
        if engine.moved:
            moving.settle(engine.sync.total)
            engine.recorder.lap("compute_s" if engine.group.world_size == 1 else BLOCKED)

    def _exchange(self) -> None:
        engine, held = self._engine, self._held
        self._held, self._is_last = None, False
        engine.recorder.lap(FORWARD)
        samples = self._num_passes == 1 and self.index % SAMPLED_EVERY == 0 and not engine.trained.scaler.is_enabled()
        engine.sync.backward(held, samples=samples)
        engine.recorder.lap("compute_s" if engine.group.world_size == 1 else BLOCKED)

    def _release(self) -> None:
        """Run the backward that was held: it was not the last."""
        held, self._held = self._held, None
        if held is not None:
            self._engine.recorder.lap(FORWARD)
            held.backward()
            self._engine.recorder.lap("compute_s")

    def _rehearse(self) -> Iterator[Any]:
        """Run the program's own loop on parts of the batch, and forget what it did."""
        engine = self._engine
        rehearsal = Rehearsal(engine.trained, engine.group, is_own=engine.is_own, is_compiled=engine.is_compiled)
        before = self._loss_sum.clone()
        for part, exchanges in rehearsal.parts(*self._to_rehearse()):
            self._losses = []
            batch = engine.dataset.load(part, engine.group.device)
            self._in_micro_batch, self._is_last = True, exchanges
            yield batch
            self._in_micro_batch = False
            rehearsal.note([float(loss) for loss in self._losses])
            if exchanges:
                self._exchange()
                engine.sync.settle()
        engine.sync.take_cost()
        engine.trained.zero_grad()
        self._loss_sum, self._losses = before, None
        data = fingerprint(engine.dataset, self._samples) if engine.is_own else None
        engine.moved |= rehearsal.end(self._has_backward, data)
        engine.recorder.begin()

    def _to_rehearse(self) -> tuple[np.ndarray, list[int]]:
        """(samples, sizes of micro-batches): this rank's share; where it has none, as little as does."""
        if sizes := self.member.micro_batches:
            start = self._roster.first_sequence(self._engine.group.rank)
            return self._samples[start : start + self.member.share], sizes
        least = self.member.micro_batch if batch_norms(self._engine.trained.module) else 1
        return self._samples[:least], [least]

    def _check_update(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        if self._in_micro_batch or self._num_passes == 0:
            raise UsageError(
                "step.update inside of the loop over step.micro_batches(), or without one: gradients are not complete",
                hint="call it once, after the loop",
            )
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._engine.trained.optimizers):
                raise UsageError(
                    f"step.update: this {type(optimizer).__name__} was not given to run.optimizer, nor will be saved",
                    hint="optimizer = run.optimizer(…) before run.steps",
                )
