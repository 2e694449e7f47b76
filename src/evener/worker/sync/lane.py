"""Queue buckets for algorithms of more than one collective each, on a communication thread.

Every bucket is a job; the jobs run in the order in which DDP's reducer completes buckets, which is the same on all
ranks. Backward continues meanwhile.

    backward       bucket 0 ─── bucket 1 ──────── bucket 2 ─ wait_all() ─────────────────────┐
    comm thread        └─ encode, exchange, add ─ encode, exchange, add ─ encode, …, add ────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.plan.collectives import ring_all_reduce_bytes
from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import Exchanged, Traits
from evener.worker.sync.buckets import nothing_to_wait_for
from evener.worker.sync.jobs import Jobs
from evener.worker.sync.sparse import Rows


@dataclass(frozen=True)
class Slots:
    """The gradients of one bucket that one algorithm reduces."""

    bucket: int  # its index in the step
    parameters: tuple[nn.Parameter, ...]
    views: list[Tensor]  # their flat gradients, views of the bucket
    is_rehearsal: bool  # its residuals and factors may not be kept

    @property
    def num(self) -> int:
        return sum(len(view) for view in self.views)

    def offsets(self) -> list[tuple[nn.Parameter, int, int]]:
        """Return (parameter, begin, end) of each gradient in their concatenation."""
        offsets, position = [], 0
        for parameter, view in zip(self.parameters, self.views, strict=True):
            offsets.append((parameter, position, position + len(view)))
            position += len(view)
        return offsets


SAMPLE, COMPARED_EVERY = 1 << 16, 5  # numbers of a bucket; sampled steps between comparisons
LEAST = 1e-30


class Exchange(Protocol):
    """An all-reduce algorithm; it runs on the communication thread, in the same order on all ranks."""

    traits: Traits

    def run(self, slots: Slots) -> int:
        """Replace these gradients by their sums; return the bytes that this rank sent."""

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        """See `CommHook`."""

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """See `CommHook`."""

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        """See `CommHook`."""


def run_and_compare(group: Group, exchange: Exchange, slots: Slots) -> tuple[int, Tensor]:
    """Run the algorithm and sum a sample exactly; return (bytes that this rank sent in both, (error, cosine)).

    Neither error nor cosine is finite where the sum is 0, as that of frozen parameters.
    """
    sample = max(slots.views, key=len)[:SAMPLE]
    exact = sample.clone()
    dist.all_reduce(exact, group=group.gradients)
    num_bytes = exchange.run(slots) + ring_all_reduce_bytes(exact.nbytes, group.world_size)
    norm = exact.norm()
    cosine = torch.dot(sample / sample.norm().clamp_min(LEAST), exact / norm)
    return num_bytes, torch.stack([(sample - exact).norm() / norm, cosine])


class Lane:
    """A `CommHook` whose reductions overlap with backward: embedding tables sparsely, all else by `algorithm`."""

    def __init__(self, group: Group, clock: Clock, exchange: Exchange, tables: frozenset[nn.Parameter]) -> None:
        self._group, self._clock, self._exchange, self._tables = group, clock, exchange, tables
        self._rows = Rows(group)
        self._is_new = True  # no pass has been reduced yet
        self.traits = exchange.traits
        self._jobs = Jobs(group.device)
        self._going: list[Future[None]] = []  # buckets that the current pass has started
        self._has_failed = False
        self._bytes = 0
        self._fidelity: Tensor | None = None
        self._num_buckets = 1
        self._samples, self._num_sampled = False, 0  # whether the current step is sampled; how many were
        self._exchanged: list[Exchanged] = []

    def start(self, bucket: dist.GradBucket, *, is_rehearsal: bool, samples: bool) -> torch.futures.Future[Tensor]:
        parameters: Sequence[Any] = bucket.parameters()
        views = [gradient.view(-1) for gradient in bucket.gradients()]
        index, size, self._samples = bucket.index(), bucket.buffer().nbytes, samples
        may_densify = is_rehearsal or self._is_new

        def job() -> None:
            begin, bytes_before = self._clock.mark(), self._bytes
            dense = []
            for parameter, view in zip(parameters, views, strict=True):
                if parameter in self._tables:
                    sent_bytes, was_dense = self._rows.run(view.view(parameter.shape))
                    self._bytes += sent_bytes
                    if was_dense and may_densify:  # the head is tied to it, or it has few rows: sparse never pays
                        self._tables -= {parameter}
                else:
                    dense.append((parameter, view))
            if dense:
                grads = Slots(index, tuple(held for held, _ in dense), [view for _, view in dense], is_rehearsal)
                self._run(grads, samples)
            self._exchanged.append(Exchanged(index, begin, self._clock.mark(), size, self._bytes - bytes_before))

        self._going.append(self._jobs.submit(job))
        return nothing_to_wait_for(bucket)

    def _run(self, slots: Slots, samples: bool) -> None:
        """Run the algorithm; every few sampled steps compare a sample of one bucket, a different one each time."""
        turn, is_turn = divmod(self._num_sampled, COMPARED_EVERY)
        if not (samples and self.traits.is_lossy and not is_turn and slots.bucket == turn % self._num_buckets):
            self._bytes += self._exchange.run(slots)
            return
        num_bytes, self._fidelity = run_and_compare(self._group, self._exchange, slots)
        self._bytes += num_bytes

    def finish(self) -> None:
        self._jobs.wait(self._going)
        self._num_buckets, self._num_sampled = max(1, len(self._going)), self._num_sampled + self._samples
        self._going, self._is_new = [], False

    def abandon(self) -> None:
        self._has_failed = self._has_failed or bool(self._going)
        going, self._going = self._going, []
        wait(going)

    def take_bytes(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken

    def take_fidelity(self) -> Tensor | None:
        taken, self._fidelity = self._fidelity, None
        return taken

    def take_exchanged(self) -> list[Exchanged]:
        taken, self._exchanged = self._exchanged, []
        return taken

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        # After a failed pass it is unknown which residuals were sent, so all of them are dropped.
        return [] if self._has_failed else self._exchange.left_over()

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return self._exchange.own_state(names)

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._exchange.load_own_state(states, parameters)
