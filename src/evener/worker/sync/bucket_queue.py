"""Queue gradient buckets for all-reduce algorithms of several collectives each, on a communication thread.

Every bucket is a job; the jobs run in the order in which DDP's reducer completes buckets, which is the same on all
ranks. Backward continues meanwhile.

    backward       bucket 0 ─── bucket 1 ──────── bucket 2 ─ wait_all() ─────────────────────┐
    comm thread        └─ encode, exchange, add ─ encode, exchange, add ─ encode, …, add ────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.core.run.step_spans import BucketCommEvent
from evener.plan.cost.collective_cost import ring_all_reduce_bytes
from evener.worker.rank.clock import Clock
from evener.worker.rank.comm_thread import CommThread
from evener.worker.sync import CompressionTraits, RankGroup
from evener.worker.sync.gradient_sync import completed_future
from evener.worker.sync.sparse import SparseAllReduce


@dataclass(frozen=True)
class GradBucketSlice:
    """The gradients of one bucket that one algorithm reduces."""

    bucket_index: int  # its index in the step
    parameters: tuple[nn.Parameter, ...]
    views: list[Tensor]  # their flat gradients, views of the bucket
    is_warmup: bool  # its residuals and factors may not be kept

    @property
    def numel(self) -> int:
        return sum(len(view) for view in self.views)

    def offsets(self) -> list[tuple[nn.Parameter, int, int]]:
        """Return (parameter, begin, end) of each gradient in their concatenation."""
        offsets, position = [], 0
        for parameter, view in zip(self.parameters, self.views, strict=True):
            offsets.append((parameter, position, position + len(view)))
            position += len(view)
        return offsets


SAMPLE_NUMEL, COMPARE_EVERY = 1 << 16, 5  # numbers compared in a bucket; one sampled step in this many compares
MIN_NORM = 1e-30


class AllReduceAlgorithm(Protocol):
    """An all-reduce algorithm; it runs on the communication thread, in the same order on all ranks."""

    traits: CompressionTraits

    def run(self, grads: GradBucketSlice) -> int:
        """Replace these gradients by their sums; return the bytes that this rank sent."""

    def residuals(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the residuals: what this rank has not sent yet of its parameters' gradients."""

    def rank_state_dict(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return this rank's state, with tensors by the names of their parameters."""

    def load_rank_state_dict(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        """Load this rank's state, `states[0]`, and take over the residuals of departed ranks, `states[1:]`."""


def run_and_measure_error(
    group: RankGroup, algorithm: AllReduceAlgorithm, grads: GradBucketSlice
) -> tuple[int, Tensor]:
    """Run the algorithm, and compare a sample of its sums with their exact all-reduce.

    Return (bytes that this rank sent for both, (error, cosine)): the norm of the sample's error relative to that of the
    exact sums, and the cosine between the two. Neither is finite where the exact sums are 0, as for frozen parameters.
    """
    sample = max(grads.views, key=len)[:SAMPLE_NUMEL]
    exact = sample.clone()
    dist.all_reduce(exact, group=group.gradient_group)
    num_bytes = algorithm.run(grads) + ring_all_reduce_bytes(exact.nbytes, group.world_size)
    norm = exact.norm()
    cosine = torch.dot(sample / sample.norm().clamp_min(MIN_NORM), exact / norm)
    return num_bytes, torch.stack([(sample - exact).norm() / norm, cosine])


class BucketQueue:
    """A `CommHook` that overlaps with backward. It reduces embedding tables sparsely, all else by `algorithm`."""

    def __init__(
        self,
        group: RankGroup,
        clock: Clock,
        algorithm: AllReduceAlgorithm,
        embedding_tables: frozenset[nn.Parameter],
    ) -> None:
        self._group, self._clock, self._algorithm, self._embedding_tables = group, clock, algorithm, embedding_tables
        self._sparse_all_reduce = SparseAllReduce(group)
        self._is_first_pass = True  # no pass has been reduced yet
        self.traits = algorithm.traits
        self._comm_thread = CommThread(group.device)
        self._pending: list[Future[None]] = []  # buckets that the current pass has started
        self._has_failed = False
        self._fidelity: Tensor | None = None
        self._num_buckets = 1
        self._samples_gradients, self._num_sampled = False, 0  # whether the current step is sampled; how many were
        self._comm_events: list[BucketCommEvent] = []

    def start(
        self, bucket: dist.GradBucket, *, is_warmup: bool, sample_gradients: bool
    ) -> torch.futures.Future[Tensor]:
        self.submit(bucket, is_warmup=is_warmup, sample_gradients=sample_gradients)
        return completed_future(bucket)

    def submit(self, bucket: dist.GradBucket, *, is_warmup: bool, sample_gradients: bool) -> Future[None]:
        """Queue the reduction of a bucket; return its job, after which the bucket holds its sum."""
        parameters: Sequence[Any] = bucket.parameters()
        views = [gradient.view(-1) for gradient in bucket.gradients()]
        index, size, self._samples_gradients = bucket.index(), bucket.buffer().nbytes, sample_gradients
        may_densify = is_warmup or self._is_first_pass

        def job() -> None:
            begin, total_bytes, dense = self._clock.mark(), 0, []
            for parameter, view in zip(parameters, views, strict=True):
                if parameter in self._embedding_tables:
                    sent_bytes, was_dense = self._sparse_all_reduce.run(view.view(parameter.shape))
                    total_bytes += sent_bytes
                    if was_dense and may_densify:  # a head is tied to it, or it has few rows: sparse never pays
                        self._embedding_tables -= {parameter}
                else:
                    dense.append((parameter, view))
            if dense:
                grads = GradBucketSlice(index, tuple(held for held, _ in dense), [view for _, view in dense], is_warmup)
                total_bytes += self._run_algorithm(grads, sample_gradients)
            self._comm_events.append(BucketCommEvent(index, begin, self._clock.mark(), size, total_bytes))

        self._pending.append(self._comm_thread.submit(job))
        return self._pending[-1]

    def run_before_next(self, job: Callable[[], None]) -> Future[None]:
        """Run a job on the communication thread before the buckets that are submitted later."""
        return self._comm_thread.submit(job)

    def _run_algorithm(self, grads: GradBucketSlice, sample_gradients: bool) -> int:
        """Run the algorithm; return the bytes that this rank sent.

        In one of COMPARE_EVERY sampled steps, measure the error of one bucket, a different one each time.
        """
        turn, is_turn = divmod(self._num_sampled, COMPARE_EVERY)
        if not (
            sample_gradients and self.traits.is_lossy and not is_turn and grads.bucket_index == turn % self._num_buckets
        ):
            return self._algorithm.run(grads)
        num_bytes, self._fidelity = run_and_measure_error(self._group, self._algorithm, grads)
        return num_bytes

    def wait_all(self) -> None:
        self._comm_thread.wait(self._pending)
        self._num_buckets, self._num_sampled = max(1, len(self._pending)), self._num_sampled + self._samples_gradients
        self._pending, self._is_first_pass = [], False

    def abort(self) -> None:
        self._has_failed = self._has_failed or bool(self._pending)
        going, self._pending = self._pending, []
        wait(going)

    def close(self) -> None:
        self._comm_thread.close()

    def take_fidelity(self) -> Tensor | None:
        taken, self._fidelity = self._fidelity, None
        return taken

    def take_comm_events(self) -> list[BucketCommEvent]:
        taken, self._comm_events = self._comm_events, []
        return taken

    def residuals(self) -> list[tuple[nn.Parameter, Tensor]]:
        # After a failed pass it is unknown which residuals were sent, so all of them are dropped.
        return [] if self._has_failed else self._algorithm.residuals()

    def rank_state_dict(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return self._algorithm.rank_state_dict(names)

    def load_rank_state_dict(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._algorithm.load_rank_state_dict(states, parameters)
