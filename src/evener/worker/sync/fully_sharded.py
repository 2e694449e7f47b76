"""Shard weights, gradients and optimizer state over the ranks: FSDP2, torch's `fully_shard`.

A module's parameters are sharded block by block, each along its first dimension. What is outside of the blocks,
embeddings and head, is one more block, the root. A block's weights are gathered from all ranks while it computes, the
next block's meanwhile, and its gradients are summed and scattered as soon as its backward is done.

    fsdp     gathers a block in every forward and in every backward, and frees it after both
    zero1    gathers a block once a step and keeps it from the first forward to the last backward   [ZeRO, 2020]
    hsdp     as fsdp, over the ranks of a host; each rank then sums its part with those of the same number on other
             hosts, which send nothing else between them   [torch's hybrid sharding, without its second mesh dimension]

Of P bytes of parameters in n ranks and m micro-batches a rank sends (n-1)/n · P a gathering or scattering: zero1 two of
them a step; fsdp 2m + 1 of the blocks, and m + 1 of the root, which its backward needs at once.

Keeping the weights from forward to backward would save fsdp a gathering: that is zero1, so it is no option of fsdp.

Gloo exchanges in pairs (pairwise.py), on a thread beside the computation. Where all ranks compute in bf16, weights are
gathered in bf16, in half the bytes: autocast would round those of matrix products anyway, and the modules compute in
fp32 with those of embeddings and norms, rounded. Each rank's part, and with it AdamW's, stays fp32. Gradients are sent
and summed in fp32, whatever the arithmetic, as DDP does. With several micro-batches each rank accumulates whole
gradients in fp32, which are scattered once a step.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from evener.core.base.errors import UsageError
from evener.core.run.roster import Backend, Roster, gather_dtype, why_not_hsdp
from evener.core.run.step_cost import BLOCKED
from evener.core.run.step_spans import FORWARD, BucketCommEvent
from evener.worker.rank.clock import Clock
from evener.worker.rank.precision import TORCH_DTYPES, rounding_class
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.sharded_tensors import local_part
from evener.worker.rank.torch_private import AllGather, ReduceScatter, broadcast_module
from evener.worker.sync import CommStats, EqualReplicas, GradientStats, RankGroup, SupportsBackward
from evener.worker.sync.gradient_sync import comm_stats
from evener.worker.sync.pairwise import PairwiseCollectives

MAX_REDUCTIONS = 2  # in flight: each holds the gradients of a block


def shard_module(module: nn.Module, group: ProcessGroups, roster: Roster) -> None:
    """Shard rank 0's weights over the ranks, in place: every module of a ModuleList by itself, the rest together.

    The parameters become DTensors, of which each rank holds the rows of its part. Make optimizers of them afterwards.
    """
    if any(member.dtype == "fp16" for member in roster.members):
        raise UsageError(f"--sync {roster.sync} with fp16: ranks would scale losses apart", hint="--dtype bf16 or fp32")
    if roster.backend == "gloo" and any(member.is_gpu for member in roster.members):
        raise UsageError(f"--sync {roster.sync}: not on GPUs over Gloo", hint="NCCL, with a GPU for every rank")
    if why := why_not_hsdp(roster):
        raise UsageError(why, hint="--sync fsdp")
    broadcast_module(module, group.gradient_group)
    if roster.sync.kind == "hsdp":
        if len(set(group.all_gather(rounding_class(group.device), str))) > 1:
            raise UsageError("--sync hsdp: these hosts round differently, so their copies of a part would drift apart",
                             hint="--sync fsdp, which has one copy")  # fmt: skip
        group.shard_within_hosts([member.host for member in roster.members])
    mesh = DeviceMesh.from_group(_shard_ranks(group).gradient_group, group.device.type)
    frees = roster.sync.kind != "zero1"
    precision = MixedPrecisionPolicy(
        TORCH_DTYPES[gather_dtype(roster)], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    blocks = [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]
    sharded = [fully_shard(block, mesh=mesh, reshard_after_forward=frees, mp_policy=precision) for block in blocks]
    root = fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    for this, following in zip([root, *sharded], sharded, strict=False):
        this.set_modules_to_forward_prefetch([following])


@dataclass(frozen=True)
class _HostRanks:
    """The ranks of this host."""

    device: torch.device
    backend: Backend
    gradient_group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.gradient_group.rank()

    @property
    def world_size(self) -> int:
        return self.gradient_group.size()


def _shard_ranks(group: ProcessGroups) -> RankGroup:
    """Return the ranks over which weights are sharded: with hsdp those of this host, else all."""
    return group if group.host_group is None else _HostRanks(group.device, group.backend, group.host_group)


class FullyShardedSync(EqualReplicas):
    """Synchronous data parallelism with sharded weights: the optimizer of each rank updates its own part of them."""

    rounding_depends_on_cpu_model = False

    def __init__(self, group: ProcessGroups, clock: Clock, lap: Callable[[str], None], roster: Roster) -> None:
        self._group, self._clock, self._lap, self.spec = group, clock, lap, roster.sync
        self._shards = _shard_ranks(group)
        self._pairwise = _MeasuredCollectives(self._shards, clock) if roster.backend == "gloo" else None
        self._comm_events: list[BucketCommEvent] = []
        self._reductions: deque[tuple[Future[None], Tensor]] = deque()  # in flight, and what they send
        self._is_between_steps = False
        self._samples_gradients = False
        self._local_grad_sq: list[Tensor] = []  # of a backward whose gradients are sampled
        self._summed_parts: list[Tensor] = []
        self._gradient_stats = GradientStats()

    def wrap(self, module: nn.Module, all_params_used: bool, *, is_under_way: bool = False) -> None:
        assert isinstance(module, FSDPModule), "run.model has sharded it"
        self._module: nn.Module = module
        self._root: FSDPModule = module
        self._modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for bucket, part in enumerate(self._modules):
            part.set_gradient_divide_factor(1.0)  # a sum, not a mean
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(_AllGather(self, bucket))
            part.set_custom_reduce_scatter(_ReduceScatter(self, bucket))
        self._set_last_backward(is_last=False)

    def unwrap(self) -> None:
        raise AssertionError("a run with sharded weights keeps its strategy")

    def adopt_roster(self, roster: Roster, joining_ranks: Sequence[int] = ()) -> None:
        raise AssertionError("a run with sharded weights keeps its strategy and its ranks")

    def _set_last_backward(self, *, is_last: bool) -> None:
        """Set whether the next backward is the last of its step, which exchanges gradients and frees the weights."""
        self._root.set_requires_gradient_sync(is_last)
        self._root.set_reshard_after_backward(is_last or self.spec.kind != "zero1")

    def backward(self, loss: SupportsBackward | None, *, sample_gradients: bool = False) -> None:
        assert loss is not None, "with sharded weights every rank has a micro-batch, if an empty one"
        self._samples_gradients = sample_gradients
        self._set_last_backward(is_last=True)
        loss.backward()
        self._set_last_backward(is_last=False)
        self._lap("compute_s")
        self._finish_reductions(0)
        if sample_gradients:
            total_sq = _sum_of_squares(self._summed_parts)
            dist.all_reduce(total_sq, group=self._shards.gradient_group)
            self._gradient_stats = GradientStats(torch.stack(self._local_grad_sq).sum(), total_sq)
        self._local_grad_sq.clear()
        self._summed_parts.clear()

    def finish_warmup(self) -> None:
        self._gradient_stats = GradientStats()

    def abort(self) -> None:
        pass  # the process ends

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        gradients = [gradient.to_local() for parameter in parameters if isinstance(gradient := parameter.grad, DTensor)]
        total = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(total, group=self._shards.gradient_group)
        norm = total.sqrt()
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def take_comm_stats(self) -> CommStats:
        events, self._comm_events = self._comm_events, []
        return comm_stats(events + (self._pairwise.take_events() if self._pairwise else []), self._clock)

    def take_gradient_stats(self) -> GradientStats:
        taken, self._gradient_stats = self._gradient_stats, GradientStats()
        return taken

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group.control_group)
        return values

    @torch.no_grad()
    def comparable_tensors(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield each rank's part of each weight: its own as this rank holds it, the others as it gathers them."""
        self._is_between_steps = True
        try:
            for part in self._modules:
                part.unshard()
                for name, gathered in self._module.named_parameters():
                    if not isinstance(gathered, DTensor):
                        parts = gathered.detach().chunk(self._shards.world_size)
                        for rank in range(self._shards.world_size):
                            received = parts[rank] if rank < len(parts) else gathered.detach()[:0]
                            own = local_part(weights[name]).to(received.dtype)
                            yield f"{name} (rank {rank}'s part)", own if rank == self._shards.rank else received
                part.reshard()
        finally:
            self._is_between_steps = False

    def rank_state_dict(self) -> dict[str, Any]:
        return {}

    def load_rank_state_dict(self, state: dict[str, Any], departed_states: Sequence[dict[str, Any]]) -> None:
        pass

    # --- exchanges --------------------------------------------------------------------------------------------------

    def all_gather(self, part: Tensor, whole: Tensor, bucket: int) -> dist.Work | None:
        """Gather the ranks' parts into `whole`, of which `part` is this rank's; the caller waits for the result."""
        if self._pairwise is not None:
            parts = list(whole.view(self._shards.world_size, -1))
            collectives = self._pairwise.for_bucket(bucket if self._is_in_pass else None)
            return _GatherWork(collectives.all_gather(part, parts)[0], self._wait)
        with self._measured(bucket, whole):
            dist.all_gather_single(whole, part, group=self._shards.gradient_group)
        return None

    def reduce_scatter(self, whole: Tensor, part: Tensor, bucket: int) -> None:
        """Sum the ranks' `whole` and keep this rank's part of the sum, which is complete when `backward` returns."""
        if self._samples_gradients:
            self._local_grad_sq.append(_sum_of_squares([whole]))
            self._summed_parts.append(part)
        if self._pairwise is not None:
            self._finish_reductions(MAX_REDUCTIONS - 1)
            parts = list(whole.view(self._shards.world_size, -1))
            collectives = self._pairwise.for_bucket(bucket)
            done = collectives.reduce_scatter(parts, part, is_mean=False)[0]
            if self._group.replica_group is not None:
                done = collectives.all_reduce_after(done, part, self._group.replica_group)
            self._reductions.append((done, whole))
            return
        replicas = self._group.replica_group
        with self._measured(bucket, whole, 0 if replicas is None else _ring_bytes(part, replicas)):
            dist.reduce_scatter_single(part, whole, group=self._shards.gradient_group)
            if replicas is not None:
                dist.all_reduce(part, group=replicas)

    @contextlib.contextmanager
    def _measured(self, bucket: int, whole: Tensor, sent_between_hosts: int = 0) -> Iterator[None]:
        begin, num = self._clock.mark(), self._shards.world_size
        yield
        sent_bytes = whole.nbytes * (num - 1) // num + sent_between_hosts
        if self._is_in_pass:
            self._comm_events.append(BucketCommEvent(bucket, begin, self._clock.mark(), whole.nbytes, sent_bytes))

    def _finish_reductions(self, num_left: int) -> None:
        """Wait until at most so many reductions are in flight."""
        while len(self._reductions) > num_left:
            done, _ = self._reductions.popleft()
            self._wait(done)

    @property
    def _is_in_pass(self) -> bool:
        """Return whether weights are gathered for a pass of training, neither to evaluate nor to compare them."""
        return self._module.training and not self._is_between_steps

    def _wait(self, done: Future[None]) -> None:
        """Wait for an exchange; within a step charge the time to communication."""
        is_exposed = self._is_in_pass and not done.done()
        if is_exposed:
            self._lap(FORWARD if torch.is_grad_enabled() else "compute_s")
        done.result()
        if is_exposed:
            self._lap(BLOCKED)


class _MeasuredCollectives(PairwiseCollectives):
    """Pairwise collectives whose times are recorded."""

    def __init__(self, group: RankGroup, clock: Clock) -> None:
        super().__init__(group)
        self._clock = clock
        self._bucket: int | None = None
        self._comm_events: list[BucketCommEvent] = []

    def for_bucket(self, bucket: int | None) -> _MeasuredCollectives:
        """Record the next collective as one of this bucket; None: do not record it."""
        self._bucket = bucket
        return self

    def all_reduce_after(self, reduced: Future[None], part: Tensor, replicas: dist.ProcessGroup) -> Future[None]:
        """Sum a part over hosts, by Gloo's ring, once it is `reduced` on this one; raise what that has raised."""

        def job() -> None:
            reduced.result()
            dist.all_reduce(part, group=replicas)

        return self.submit(job, part.nbytes, _ring_bytes(part, replicas))

    def submit(self, job: Callable[[], None], num_bytes: int, sent_bytes: int) -> Future[None]:
        bucket = self._bucket

        def measured_job() -> None:
            begin = self._clock.mark()
            job()
            if bucket is not None:
                self._comm_events.append(BucketCommEvent(bucket, begin, self._clock.mark(), num_bytes, sent_bytes))

        return super().submit(measured_job, num_bytes, sent_bytes)

    def take_events(self) -> list[BucketCommEvent]:
        """Return the events since the last call; no collective is in flight."""
        taken, self._comm_events = self._comm_events, []
        return taken


def _ring_bytes(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Return the bytes that a rank sends in a ring all-reduce."""
    return 2 * (group.size() - 1) * tensor.nbytes // group.size()


class _GatherWork(dist.Work):
    """The work of a gathering, for which FSDP2 waits right before it uses the weights."""

    def __init__(self, done: Future[None], wait: Callable[[Future[None]], None]) -> None:
        super().__init__()
        self._done, self._wait = done, wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait(self._done)
        return True


class _Comm:
    """What FSDP2 calls instead of torch's collective, for one block."""

    def __init__(self, sync: FullyShardedSync, bucket: int) -> None:
        self._sync, self._bucket = sync, bucket

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return self._sync.all_gather(input_tensor, output_tensor, self._bucket)


class _ReduceScatter(_Comm, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._sync.reduce_scatter(input_tensor, output_tensor, self._bucket)


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.dot(tensor, tensor) for tensor in tensors]).sum()
