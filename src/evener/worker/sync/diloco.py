"""Synchronize replicas over a slow link: DiLoCo, H local steps a replica, then one outer step on the global weights.

    inner      H steps of each replica's own optimizers, on its share of each global batch; no communication
    outer      Δ = Σ w · (global - local)        w = tokens that a replica trained on / tokens of all
      H > 4:   m = μ·m + Δ        global = global - (Δ + μ·m) / (1 + μ)        local = global
               μ grows to √(1 - Σ w·√w): see `outer_momentum`
      H ≤ 4:   global = global - Δ        local = global
               the learning rate is multiplied by 1 / Σ w·√w: see `inner_lr_factor`
    merge      global = global - Δ, in fp32: the mean of the replicas by tokens, with all residuals

A replica divides its loss by its own tokens, so its steps are as long as they would be alone, whatever its share: the
share counts in Δ. A replica without a share does not step, has w = 0 and takes part in outer steps. With H = 1 and
plain SGD inside, this is data-parallel SGD.   [Douillard et al. 2023; by tokens: FedAvg, McMahan et al. 2017]

Δ is exchanged in fragments, in fp32 by an all-reduce or in 8 or 4 bits with error feedback. It has the same bits on all
ranks, and so have m and the global weights: they are computed with single products and single sums only, no fused ones,
which CPUs may round differently. The global weights, not the drifting local ones, are what replicas are compared by and
what a checkpoint holds. All parameters are exchanged, as a frozen one may be unfrozen later.

Where ranks are lost and the others go on, all apply the result of a fragment's exchange that completed on any rank. Any
other exchange counts as never begun: the local weights still hold what it sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.core.base.errors import UsageError
from evener.core.run.roster import Roster, SyncSpec
from evener.core.run.step_cost import BLOCKED
from evener.core.run.step_spans import BucketCommEvent
from evener.plan.cost.collective_cost import ring_all_reduce_bytes
from evener.plan.cost.sync_traffic import averaging_efficiency, fragment_bytes
from evener.worker.rank.clock import Clock
from evener.worker.rank.comm_thread import record_current_stream
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.torch_private import broadcast_module
from evener.worker.sync import CommStats, GradientStats, SupportsBackward
from evener.worker.sync.bucket_queue import COMPARE_EVERY, GradBucketSlice, run_and_measure_error
from evener.worker.sync.codecs import BlockwiseIntCodec
from evener.worker.sync.quantized import QuantizedAllReduce

MOMENTUM_WARMUP_ROUNDS = 5  # μ grows: 0, 1/6, 2/7, 3/8, …  [growing momentum: Sutskever et al. 2013]


@dataclass
class Fragment:
    """Parameters that are synchronized together, concatenated."""

    parameters: tuple[nn.Parameter, ...]
    global_params: Tensor  # (n,)
    momentum: Tensor | None  # of the outer optimizer: (n,); None: it has none
    num_outer_steps: int = 0  # outer steps taken
    tokens_since_sync: float = 0.0  # trained on by this replica since the last exchange
    has_unsynced_updates: bool = False  # whether any replica has updated since, or may have

    def local_params(self) -> Tensor:
        """Return a flat copy of this replica's weights: (n,)."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def split_by_parameter(self, flat: Tensor) -> list[Tensor]:
        """Split `flat` (n,) into one flat view per parameter."""
        return list(flat.split([parameter.numel() for parameter in self.parameters]))

    def set_local_params(self, flat: Tensor) -> None:
        """Overwrite this replica's weights."""
        for parameter, view in zip(self.parameters, self.split_by_parameter(flat), strict=True):
            parameter.detach().copy_(view.view(parameter.shape))


@dataclass
class FragmentExchange:
    """The exchange of one fragment."""

    delta: Tensor  # global weights - this replica's; becomes the sum over ranks: (n,)
    tokens: float  # that this replica trained on since the fragment's last exchange
    difference: Tensor | None = None  # this replica's own `delta`: (n,); None: training waits for the exchange
    momentum: float = 0.0  # μ, from the tokens of all replicas
    futures: list[Future[None]] = field(default_factory=list)
    is_complete: bool = False
    sum_result: tuple[int, Tensor | None] = (0, None)  # (bytes sent, (error, cosine) or None)
    comm_events: list[BucketCommEvent] = field(default_factory=list)


class DiLoCoProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a replica."""

    last_exchange_step: int  # the newest step after which exchanges began
    num_outer_steps: list[int]  # of each fragment


class DiLoCo:
    """Replicas that take `spec.every` local steps between synchronizations."""

    drifts = True
    roster_bucket_bytes = 0
    rounding_depends_on_cpu_model = False

    def __init__(self, group: ProcessGroups, clock: Clock, lap: Callable[[str], None], spec: SyncSpec, *,
                 momentum: Callable[[Sequence[float]], float] | None = None) -> None:  # fmt: skip
        self._group, self._clock, self._lap, self.spec, self._every = group, clock, lap, spec, spec.every
        self._outer_momentum = momentum or outer_momentum
        self._quantized = self._make_quantized()
        self._final_residuals: list[tuple[nn.Parameter, Tensor]] = []  # residuals, for the final fp32 exchange
        self._fragments: list[Fragment] = []
        self._exchanges: dict[int, FragmentExchange] = {}
        self._completed_fragments: set[int] = set()  # fragments completed in the current synchronization
        self._last_exchange_step = -1  # the newest step after which exchanges began
        self._pending_state: dict[str, Any] = {}  # until `wrap`
        self._sent_bytes = 0
        self._comm_events: list[BucketCommEvent] = []
        self._fidelity: Tensor | None = None

    def wrap(self, module: nn.Module, all_params_used: bool, *, is_under_way: bool = False) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, name in self._names.items():
            if parameter.dtype != torch.float32:
                raise UsageError(
                    f"--sync diloco: {name} is {parameter.dtype}: it exchanges differences of fp32 weights",
                    hint="weights in fp32, and run.autocast() around forward; or --sync ddp",
                )
        if not is_under_way:
            broadcast_module(module, self._group.gradient_group)
        self._fragments = []
        for parameters in self._split_fragments(list(self._names)):
            fragment = Fragment(parameters, global_params=torch.empty(0), momentum=None)
            if self.spec.has_outer_momentum:
                fragment.momentum = torch.zeros_like(fragment.local_params())
            self._fragments.append(fragment)
        self._reset_fragments()

    def unwrap(self) -> None:
        pass

    def _reset_fragments(self) -> None:
        """Reset the global weights to the local ones, and load the pending state."""
        for fragment in self._fragments:
            fragment.global_params = fragment.local_params()
        self._load_outer_state(self._pending_state)
        self._pending_state = {}

    def _make_quantized(self) -> QuantizedAllReduce | None:
        return (
            QuantizedAllReduce(self._group, BlockwiseIntCodec(8 if self.spec.bits == 8 else 4))
            if self.spec.bits < 32
            else None
        )

    def backward(self, loss: SupportsBackward | None, *, sample_gradients: bool = False) -> None:
        if loss is not None:
            loss.backward()
        self._lap("compute_s")

    def finish_warmup(self) -> None:
        pass

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def learning_rate_factor(self, shares: Sequence[float]) -> float:
        return 1.0 if self.spec.has_outer_momentum else inner_lr_factor(shares)

    def after_optimizer_step(self, local_tokens: float, global_tokens: float) -> None:
        for fragment in self._fragments:
            fragment.tokens_since_sync += local_tokens
            fragment.has_unsynced_updates |= global_tokens > 0

    def after_step(self, index: int) -> None:
        if (index + 1) % self._every == 0:
            if index > self._last_exchange_step:
                self._exchange_all(self._outer_step)
                self._last_exchange_step = index
            self._completed_fragments.clear()

    def merge_replicas(self) -> None:
        if self._quantized:  # no later exchange could send the encoding error
            self._final_residuals, self._quantized = self._quantized.residuals(), None

        def step(fragment: Fragment, flight: FragmentExchange) -> None:
            fragment.num_outer_steps += 1  # it tells other ranks how far this replica is
            fragment.global_params.sub_(flight.delta)

        self._exchange_all(step)
        self._completed_fragments.clear()

    def needs_merge(self) -> bool:
        return not self.is_synced() or bool(self._quantized and self._quantized.residuals())

    @torch.no_grad()
    def _exchange_all(self, step: Callable[[Fragment, FragmentExchange], object]) -> None:
        """Exchange all fragments while this rank waits; a call after a failure exchanges those not completed yet."""
        self._lap("optimizer_s")
        for i, fragment in enumerate(self._fragments):
            if i not in self._completed_fragments and (fragment.has_unsynced_updates or self._final_residuals):
                flight = self._exchanges[i] = self._begin_exchange(fragment)
                self._lap("optimizer_s")
                self._run_exchange(i, flight, self._final_residuals)
                self._lap(BLOCKED)
                self._complete_exchange(i, step)
            fragment.set_local_params(fragment.global_params)
            self._completed_fragments.add(i)
            self._lap("optimizer_s")

    def _begin_exchange(self, fragment: Fragment) -> FragmentExchange:
        """Return an exchange of this replica's difference from the global weights; reset the token count."""
        flight = FragmentExchange(torch.empty_like(fragment.global_params), fragment.tokens_since_sync)
        views = map(fragment.split_by_parameter, (flight.delta, fragment.global_params))
        for parameter, delta, params in zip(fragment.parameters, *views, strict=True):
            shape = parameter.shape
            torch.sub(params.view(shape), parameter.detach(), out=delta.view(shape))
        fragment.tokens_since_sync, fragment.has_unsynced_updates = 0.0, False
        return flight

    def _run_exchange(
        self, i: int, exchange: FragmentExchange, residuals: Sequence[tuple[nn.Parameter, Tensor]] = ()
    ) -> None:
        """Weight this rank's difference by its tokens, add residuals of earlier exchanges, and all-reduce it."""
        begin, fragment, all_tokens = self._clock.mark(), self._fragments[i], self._gather_tokens(exchange.tokens)
        weight = exchange.tokens / (math.fsum(all_tokens) or 1.0)
        exchange.delta = exchange.delta.mul_(weight) if exchange.difference is None else exchange.delta * weight
        exchange.momentum = self._outer_momentum(all_tokens)
        views = dict(zip(fragment.parameters, fragment.split_by_parameter(exchange.delta), strict=True))
        for parameter, residual in residuals:
            if parameter in views:
                views[parameter].add_(residual)
        exchange.sum_result = self._all_reduce_delta(i, fragment, exchange.delta)
        exchange.comm_events.append(
            BucketCommEvent(i, begin, self._clock.mark(), exchange.delta.nbytes, exchange.sum_result[0])
        )
        exchange.is_complete = True

    def _gather_tokens(self, tokens: float) -> list[float]:
        """Gather the tokens of every rank."""
        if self._group.world_size == 1:
            return [tokens]
        device = self._group.device if self._group.backend == "nccl" else "cpu"
        local_tokens = torch.tensor([tokens], dtype=torch.float64, device=device)
        all_tokens = local_tokens.new_empty(self._group.world_size)
        dist.all_gather_single(all_tokens, local_tokens, group=self._group.gradient_group)
        return [float(num) for num in all_tokens.tolist()]

    def _complete_exchange(self, i: int, step: Callable[[Fragment, FragmentExchange], object]) -> FragmentExchange:
        """Complete the exchange of fragment `i` and apply its result to the global weights."""
        flight = self._exchanges.pop(i)
        self._add_comm_stats(*flight.sum_result)
        self._comm_events += flight.comm_events
        step(self._fragments[i], flight)
        return flight

    def wait_all(self) -> None:
        pass

    def abort(self) -> None:
        for flight in self._exchanges.values():
            wait(flight.futures)

    @torch.no_grad()
    def adopt_roster(self, roster: Roster, joining_ranks: Sequence[int] = ()) -> None:
        group = self._group
        for i in [i for i, flight in self._exchanges.items() if flight.is_complete]:
            self._apply_exchange(i)
        own_progress = DiLoCoProgress(
            last_exchange_step=self._last_exchange_step,
            num_outer_steps=[fragment.num_outer_steps for fragment in self._fragments],
        )
        progress = group.all_gather(own_progress, DiLoCoProgress)
        present = [rank for rank in range(group.world_size) if rank not in joining_ranks]
        self._last_exchange_step = max(progress[rank].last_exchange_step for rank in present)
        for i, fragment in enumerate(self._fragments):
            rounds = max(progress[rank].num_outer_steps[i] for rank in present)
            source = next(rank for rank in present if progress[rank].num_outer_steps[i] == rounds)
            behind = [rank for rank in present if progress[rank].num_outer_steps[i] < rounds]
            flight = self._exchanges.get(i)
            outer_state = [fragment.global_params, *([] if fragment.momentum is None else [fragment.momentum])]
            for rank in behind if group.rank == source else ():
                for tensor in outer_state:
                    dist.send(tensor, rank, group=group.control_group)
            if group.rank in behind:
                assert flight is not None  # no exchange completes anywhere before it has begun everywhere
                received = list(map(torch.empty_like, outer_state))
                for tensor in received:  # all of it or none: this epoch may be lost as well
                    dist.recv(tensor, source, group=group.control_group)
                decrease = fragment.global_params - received[0]
                for tensor, newest in zip(outer_state, received, strict=True):
                    tensor.copy_(newest)
                fragment.num_outer_steps = rounds
                self._follow_global_params(fragment, flight, decrease)
                if flight.difference is None:
                    self._completed_fragments.add(i)
            elif flight is not None:
                fragment.tokens_since_sync += flight.tokens
                if self._quantized:
                    self._quantized.drop_residual(i)
            self._exchanges.pop(i, None)
            fragment.has_unsynced_updates = True
        previous, self._quantized = self._quantized, self._make_quantized() if self._quantized else None
        if previous and self._quantized:
            self._quantized.add_residuals(previous.residuals())

    def _apply_exchange(self, i: int) -> None:
        """Apply a completed exchange to the global and the local weights."""
        flight = self._complete_exchange(i, self._outer_step)
        record_current_stream(flight.delta)
        self._follow_global_params(self._fragments[i], flight, flight.delta)

    def _follow_global_params(self, fragment: Fragment, exchange: FragmentExchange, decrease: Tensor) -> None:
        """Set local weights to the global ones, which `decrease` (n,) was subtracted from, plus the local updates since
        the exchange began.
        """
        if exchange.difference is None:
            fragment.set_local_params(fragment.global_params)
            return
        for parameter, view in zip(
            fragment.parameters, fragment.split_by_parameter(exchange.difference.sub_(decrease)), strict=True
        ):
            parameter.detach().add_(view.view(parameter.shape))

    def take_comm_stats(self) -> CommStats:
        num_bytes, events, clock = self._sent_bytes, self._comm_events, self._clock
        self._sent_bytes, self._comm_events = 0, []
        return CommStats(num_bytes, lambda: sum(clock.elapsed_s(event.begin, event.end) for event in events), events)

    def take_gradient_stats(self) -> GradientStats:
        fidelity, self._fidelity = self._fidelity, None
        return GradientStats(fidelity=fidelity)  # no rank holds the gradient of the global batch

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group.control_group)
        return values

    def synced_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters with their global values; buffers are the same on all ranks already."""
        synced = self._views_by_name("global_params")
        return {name: nn.Parameter(synced[name], requires_grad=False) if name in synced else tensor
                for name, tensor in weights.items()}  # fmt: skip

    def comparable_tensors(self, weights: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return weights.items()

    def is_synced(self) -> bool:
        return not any(fragment.has_unsynced_updates for fragment in self._fragments)

    def state_dict(self) -> dict[str, Any]:
        return {"way": str(self.spec), "momentum": self._views_by_name("momentum"),
                "rounds": [fragment.num_outer_steps for fragment in self._fragments]}  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._pending_state = dict(state)
        if self._fragments:  # joining a run: the global weights have been transferred
            self._reset_fragments()

    def rank_state_dict(self) -> dict[str, Any]:
        """Return all that this rank needs to resume, the global weights included.

        Those of a checkpoint do not suffice: the end of a run synchronizes once more, and a resumed run has not ended.
        """
        return self.state_dict() | {
            "weights": {name: parameter.detach() for parameter, name in self._names.items()},
            "agreed": self._views_by_name("global_params"),
            "tokens": [[fragment.tokens_since_sync, fragment.has_unsynced_updates] for fragment in self._fragments],
            "left": self._quantized.rank_state_dict(self._names) if self._quantized else {},
        }

    def _is_of_same_strategy(self, state: dict[str, Any]) -> bool:
        """Return whether the state was saved by the same strategy."""
        return state.get("way") == str(self.spec)

    @torch.no_grad()
    def load_rank_state_dict(self, state: dict[str, Any], departed_states: Sequence[dict[str, Any]]) -> None:
        for parameter, name in self._names.items():
            parameter.copy_(state["weights"][name])
        self._copy_by_name("global_params", state["agreed"])
        self._load_outer_state(state)
        for fragment, (tokens, is_behind) in zip(self._fragments, state["tokens"], strict=True):
            fragment.tokens_since_sync, fragment.has_unsynced_updates = tokens, is_behind
        if self._quantized:
            self._quantized.load_rank_state_dict(
                [state["left"]], {name: parameter for parameter, name in self._names.items()}
            )

    @torch.no_grad()
    def adopt_outer_state(self) -> None:
        """Take over rank 0's global weights, momentum and progress since the last exchange; all ranks call it."""
        for fragment in self._fragments:
            progress = fragment.global_params.new_tensor(
                [fragment.num_outer_steps, fragment.tokens_since_sync, fragment.has_unsynced_updates]
            )
            for tensor in (fragment.global_params, fragment.momentum, progress):
                if tensor is not None:
                    dist.broadcast(tensor, src=0, group=self._group.gradient_group)
            rounds, tokens, is_behind = progress.tolist()
            fragment.num_outer_steps, fragment.tokens_since_sync = int(rounds), tokens
            fragment.has_unsynced_updates = bool(is_behind)

    def _split_fragments(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
        return split_into_fragments(
            parameters, fragment_bytes(self.spec, sum(parameter.nbytes for parameter in parameters))
        )

    def _all_reduce_delta(self, index: int, fragment: Fragment, delta: Tensor) -> tuple[int, Tensor | None]:
        """All-reduce `delta` in place; return (bytes that this rank sent, (error, cosine) to the exact sum or None).

        The error is measured every few rounds, on one fragment, a different one each time.
        """
        if self._group.world_size == 1:
            return 0, None
        if self._quantized is None:
            dist.all_reduce(delta, group=self._group.gradient_group)
            return ring_all_reduce_bytes(delta.nbytes, self._group.world_size), None
        slots = GradBucketSlice(index, fragment.parameters, fragment.split_by_parameter(delta), is_warmup=False)
        num_compared, rest = divmod(fragment.num_outer_steps, COMPARE_EVERY)
        if rest or index != num_compared % len(self._fragments):
            return self._quantized.run(slots), None
        return run_and_measure_error(self._group, self._quantized, slots)

    def _add_comm_stats(self, num_bytes: int, fidelity: Tensor | None) -> None:
        self._sent_bytes += num_bytes
        if fidelity is not None:
            record_current_stream(fidelity)
            self._fidelity = fidelity

    def _outer_step(self, fragment: Fragment, exchange: FragmentExchange) -> None:
        """Take an outer step: SGD with Nesterov momentum, as in torch.optim.SGD. The delta becomes that step."""
        delta, rounds = exchange.delta, fragment.num_outer_steps
        if fragment.momentum is not None:
            momentum = min(exchange.momentum, rounds / (rounds + MOMENTUM_WARMUP_ROUNDS))
            fragment.momentum.mul_(momentum).add_(delta)
            delta.add_(fragment.momentum * momentum).mul_(1 / (1 + momentum))
        fragment.num_outer_steps += 1
        fragment.global_params.sub_(delta)

    def _views_by_name(self, attribute: str) -> dict[str, Tensor]:
        """Return each parameter's part of the attribute, as a view in the parameter's shape; none if it is None."""
        return {
            self._names[parameter]: view.view(parameter.shape)
            for fragment in self._fragments
            if (flat := getattr(fragment, attribute)) is not None
            for parameter, view in zip(fragment.parameters, fragment.split_by_parameter(flat), strict=True)
        }

    def _load_outer_state(self, state: dict[str, Any]) -> None:
        """Load the outer optimizer's state; that of another strategy is ignored."""
        if not self._is_of_same_strategy(state):
            return
        self._copy_by_name("momentum", state.get("momentum", {}))
        for fragment, rounds in zip(self._fragments, state.get("rounds", ()), strict=False):
            fragment.num_outer_steps = rounds

    def _copy_by_name(self, attribute: str, saved: dict[str, Tensor]) -> None:
        for name, view in self._views_by_name(attribute).items():
            if name in saved:
                view.copy_(saved[name])


def inner_lr_factor(shares: Sequence[float]) -> float:
    """Return the factor of the learning rate with which the mean of replicas progresses as far as one process.

    It makes up for `averaging_efficiency`, as `outer_momentum` does where rounds are longer. *Measured*, two replicas,
    text read once, one seed, training loss compared to one process: with H = 1 and 1.0M parameters +5 % with a momentum
    of 0.54, −1 % with this factor, at step 600; with H = 3, 10.7M and this factor +1.5 %, after 1000 steps. With 1.0M
    and a learning rate of 4e-3, int8 and streaming, it is +3.5 % ± 0.7 % after 2000 steps (two seeds).

    >>> [round(inner_lr_factor(shares), 2) for shares in ([9], [9, 0], [9, 9], [2, 1], [9, 9, 9, 9])]
    [1.0, 1.0, 1.41, 1.36, 2.0]
    """
    return 1 / (averaging_efficiency(shares) or 1.0)


def outer_momentum(tokens: Sequence[float]) -> float:
    """Return the outer momentum μ with which replicas that trained on `tokens` progress as far as one process.

    The mean of replicas progresses less: see `averaging_efficiency`, 0.71 for two equal ones. The outer optimizer is
    SGD with Nesterov momentum and a learning rate of 1 / (1 + μ): the newest difference counts once, and with the
    momentum, in the long run, 1 / (1 - μ²) times. This μ makes up for the mean, so that a learning rate has the effect
    that it has on one process; another μ would change it.

    *Measured*, 10.7M parameters, 2000 steps, two replicas, H = 10, int8, streaming; validation loss
    compared to one process:

        μ      progress  loss
        0.8    2.0 ×     +2.8 %, three seeds; one process with twice the learning rate +2.6 %, one seed
        0.54   1 ×       +0.8 %, three seeds
        0.3    0.8 ×     +0.4 %, three seeds
        0      0.7 ×     +0.2 %, one seed; 1.0M parameters, which then train too slowly, +7 %

    >>> [round(outer_momentum(tokens), 2) for tokens in ([9], [9, 0], [9, 9], [2, 1], [9, 9, 9, 9], [0, 0])]
    [0.0, 0.0, 0.54, 0.51, 0.71, 0.0]
    """
    efficiency = averaging_efficiency(tokens)
    return math.sqrt(max(0.0, 1 - efficiency)) if efficiency else 0.0


def split_into_fragments(parameters: Sequence[nn.Parameter], num_bytes: int) -> list[tuple[nn.Parameter, ...]]:
    """Split into runs of consecutive parameters; a run ends with the parameter that brings it to `num_bytes`.

    >>> [len(one) for one in split_into_fragments([nn.Parameter(torch.zeros(num)) for num in (3, 1, 9, 2)], 16)]
    [2, 1, 1]
    """
    runs: list[list[nn.Parameter]] = []
    size = num_bytes
    for parameter in parameters:
        if size >= num_bytes:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += parameter.nbytes
    return [tuple(run) for run in runs]
