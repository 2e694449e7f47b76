"""How are buckets exchanged by more than one collective each? One after the other, by a thread of their own.

Every bucket is a job; the jobs run in the order in which DDP's reducer hands buckets over, which is the same on all
ranks. Meanwhile backward goes on.

    backward    bucket 0 ─── bucket 1 ──────── bucket 2 ─ finish() ───────────┐
    lane            └─ encode, swap, add ─ encode, swap, add ─ encode, …, add ┘
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
    """The part of a bucket that one exchange is for."""

    bucket: int  # its number in the step
    parameters: tuple[nn.Parameter, ...]
    views: list[Tensor]  # their gradients, flat, in the bucket's memory
    is_rehearsal: bool  # nothing of it may be remembered

    @property
    def num(self) -> int:
        """Numbers in all."""
        return sum(len(view) for view in self.views)

    def offsets(self) -> list[tuple[nn.Parameter, int, int]]:
        """(parameter, begin, end) where all of them lie one behind the other."""
        found, reached = [], 0
        for parameter, view in zip(self.parameters, self.views, strict=True):
            found.append((parameter, reached, reached + len(view)))
            reached += len(view)
        return found


SAMPLE, COMPARED_EVERY = 1 << 16, 5  # numbers of a bucket; sampled steps from one comparison to the next
LEAST = 1e-30


class Exchange(Protocol):
    """How gradients become their sum over ranks, on the lane's thread, in the same order on all ranks."""

    traits: Traits

    def run(self, slots: Slots) -> int:
        """Replace these gradients by their sums; returns the bytes that this rank sent."""

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        """See Reduction."""

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """See Reduction."""

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        """See Reduction."""


def run_and_compare(group: Group, exchange: Exchange, slots: Slots) -> tuple[int, Tensor]:
    """Run the exchange, and sum a piece exactly beside it: (bytes that this rank sent in both, (error, cosine)).

    Neither is finite where the sum is 0, as of frozen parameters.
    """
    piece = max(slots.views, key=len)[:SAMPLE]
    exact = piece.clone()
    dist.all_reduce(exact, group=group.gradients)
    num_bytes = exchange.run(slots) + ring_all_reduce_bytes(exact.nbytes, group.world_size)
    size = exact.norm()
    cosine = torch.dot(piece / piece.norm().clamp_min(LEAST), exact / size)
    return num_bytes, torch.stack([(piece - exact).norm() / size, cosine])


class Lane:
    """A Reduction whose exchanges run beside backward. `tables` go row by row, all else by `exchange`."""

    def __init__(self, group: Group, clock: Clock, exchange: Exchange, tables: frozenset[nn.Parameter]) -> None:
        self._group, self._clock, self._exchange, self._tables = group, clock, exchange, tables
        self._rows = Rows(group)
        self._is_new = True  # no pass has been exchanged yet
        self.traits = exchange.traits
        self._jobs = Jobs(group.device)
        self._going: list[Future[None]] = []  # what the present pass has started
        self._has_failed = False
        self._bytes = 0
        self._fidelity: Tensor | None = None
        self._num_buckets = 1
        self._samples, self._num_sampled = False, 0  # is the present step sampled, and how many were?
        self._exchanged: list[Exchanged] = []

    def start(self, bucket: dist.GradBucket, *, is_rehearsal: bool, samples: bool) -> torch.futures.Future[Tensor]:
        parameters: Sequence[Any] = bucket.parameters()
        views = [gradient.view(-1) for gradient in bucket.gradients()]
        index, size, self._samples = bucket.index(), bucket.buffer().nbytes, samples
        sorts_out = is_rehearsal or self._is_new

        def job() -> None:
            begin, before = self._clock.mark(), self._bytes
            dense = []
            for parameter, view in zip(parameters, views, strict=True):
                if parameter in self._tables:
                    sent, was_whole = self._rows.run(view.view(parameter.shape))
                    self._bytes += sent
                    if was_whole and sorts_out:  # a head reads it too, or it is short: no rows to choose from
                        self._tables -= {parameter}
                else:
                    dense.append((parameter, view))
            if dense:
                slots = Slots(index, tuple(one for one, _ in dense), [view for _, view in dense], is_rehearsal)
                self._run(slots, samples)
            self._exchanged.append(Exchanged(index, begin, self._clock.mark(), size, self._bytes - before))

        self._going.append(self._jobs.submit(job))
        return nothing_to_wait_for(bucket)

    def _run(self, slots: Slots, samples: bool) -> None:
        """The exchange; now and then, of one bucket, another each time, a piece beside its exact sum."""
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
        # Of a pass that is done again nobody knows what of it was sent: what was left of those before goes with it.
        return [] if self._has_failed else self._exchange.left_over()

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return self._exchange.own_state(names)

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._exchange.load_own_state(states, parameters)
