"""Synchronize replicas over a slow link: DiLoCo, H local steps a replica, then one outer step on the global weights.

    inner      H steps of each replica's own optimizers, on its share of each global batch; no communication
    outer      Δ = Σ w · (global - local)        w = tokens that a replica trained on / tokens of all
               m = μ·m + Δ        global = global - (Δ + μ·m) / (1 + μ)        local = global
               μ grows to √(1 - Σ w·√w): see `outer_momentum`
    merge      global = global - Δ, in fp32: the mean of the replicas by tokens, with all residuals

A replica divides its loss by its own tokens, so its steps are as long as they would be alone, whatever its share: the
share counts in Δ. A replica without a share does not step, has w = 0 and takes part in outer steps. With H = 1, η = 1,
μ = 0 and plain SGD inside, this is data-parallel SGD.   [Douillard et al. 2023; by tokens: FedAvg, McMahan et al. 2017]

Δ is exchanged in fragments, in fp32 by an all-reduce or in 8 or 4 bits with error feedback. It has the same bits on all
ranks, and so have m and the global weights: they are computed with single products and single sums only, no fused ones,
which CPUs may round differently. The global weights, not the drifting local ones, are what replicas are compared by and
what a checkpoint holds. All parameters are exchanged, as a frozen one may be unfrozen later.

Where ranks are lost and the others go on, all apply the result of a fragment's exchange that completed on any rank. Any
other exchange counts as never begun: the local weights still hold what it sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states

from evener.core.decoding import from_json
from evener.core.errors import UsageError
from evener.core.roster import SyncSpec
from evener.core.step import BLOCKED
from evener.plan.collectives import ring_all_reduce_bytes
from evener.plan.sync import fragment_bytes, way_of_mean
from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import Backward, Exchanged, Replica, Samples, Traffic
from evener.worker.sync.codes import Scaled
from evener.worker.sync.jobs import keep_for_this_stream
from evener.worker.sync.lane import COMPARED_EVERY, Slots, run_and_compare
from evener.worker.sync.narrow import Narrow

MOMENTUM_ROUNDS = 5  # μ grows: 0, 1/6, 2/7, 3/8, …  [growing momentum: Sutskever et al. 2013]


@dataclass
class Fragment:
    """Parameters that are synchronized together, concatenated."""

    parameters: tuple[nn.Parameter, ...]
    agreed: Tensor  # (n,)
    momentum: Tensor  # (n,)
    rounds: int = 0  # outer steps taken
    tokens: float = 0.0  # trained on by this replica since the last exchange
    is_behind: bool = False  # whether any replica has updated since, or may have

    def held(self) -> Tensor:
        """Return a flat copy of this replica's weights: (n,)."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of `flat`, flat."""
        return list(flat.split([parameter.numel() for parameter in self.parameters]))

    def put(self, flat: Tensor) -> None:
        """Overwrite this replica's weights."""
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.detach().copy_(view.view(parameter.shape))


@dataclass
class Flight:
    """The exchange of one fragment."""

    delta: Tensor  # becomes the sum over ranks: (n,)
    tokens: float  # of the fragment when the exchange began
    sent: Tensor | None = None  # this replica's weights then: (n,); None: training waits for it
    momentum: float = 0.0  # μ, from the tokens of all replicas
    going: list[Future[None]] = field(default_factory=list)
    has_arrived: bool = False
    came_of_it: tuple[int, Tensor | None] = (0, None)  # see `DiLoCo._all_reduce_delta`
    exchanged: list[Exchanged] = field(default_factory=list)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a replica."""

    begun: int  # the newest step after which exchanges began
    rounds: list[int]  # of each fragment


class DiLoCo:
    """Replicas that take `spec.every` local steps between synchronizations."""

    replica: Replica = "drifting"
    rounds_by_model = False

    def __init__(self, group: Group, clock: Clock, lap: Callable[[str], None], spec: SyncSpec, *,
                 momentum: Callable[[Sequence[float]], float] | None = None) -> None:  # fmt: skip
        self._group, self._clock, self._lap, self._spec, self._every = group, clock, lap, spec, spec.every
        self._momentum = momentum or outer_momentum
        self._narrow = self._new_narrow()
        self._last_left: list[tuple[nn.Parameter, Tensor]] = []  # residuals, for the final fp32 exchange
        self._fragments: list[Fragment] = []
        self._flights: dict[int, Flight] = {}
        self._arrived: set[int] = set()  # fragments completed in the current synchronization
        self._begun = -1  # the newest step after which exchanges began
        self._loaded: dict[str, Any] = {}  # until `wrap`
        self._bytes = 0
        self._exchanged: list[Exchanged] = []
        self._fidelity: Tensor | None = None

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, name in self._names.items():
            if parameter.dtype != torch.float32:
                raise UsageError(
                    f"--sync diloco: {name} is {parameter.dtype}: it exchanges differences of fp32 weights",
                    hint="weights in fp32, and run.autocast() around forward; or --sync ddp",
                )
        _sync_module_states(module, self._group.gradients, 250 << 20, 0, (), broadcast_buffers=True)
        self._fragments = []
        for parameters in self._cut(list(self._names)):
            fragment = Fragment(parameters, agreed=torch.empty(0), momentum=torch.empty(0))
            fragment.momentum = torch.zeros_like(fragment.held())
            self._fragments.append(fragment)
        self._set_out()

    def _set_out(self) -> None:
        """Reset the global weights to the local ones, and load the pending state."""
        for fragment in self._fragments:
            fragment.agreed = fragment.held()
        self._take_up(self._loaded)
        self._loaded = {}

    def _new_narrow(self) -> Narrow | None:
        return Narrow(self._group, Scaled(8 if self._spec.bits == 8 else 4)) if self._spec.bits < 32 else None

    def backward(self, loss: Backward | None, *, samples: bool = False) -> None:
        if loss is not None:
            loss.backward()
        self._lap("compute_s")

    def settle(self) -> None:
        pass

    def after_update(self, tokens: float, of_all: float) -> None:
        for fragment in self._fragments:
            fragment.tokens += tokens
            fragment.is_behind |= of_all > 0

    def after_step(self, index: int) -> None:
        if (index + 1) % self._every == 0:
            if index > self._begun:
                self._exchange(self._step)
                self._begun = index
            self._arrived.clear()

    def conclude(self) -> None:
        if self._narrow:  # no later exchange could send the encoding error
            self._last_left, self._narrow = self._narrow.left_over(), None

        def step(fragment: Fragment, flight: Flight) -> None:
            fragment.rounds += 1  # it tells other ranks how far this replica is
            fragment.agreed.sub_(flight.delta)

        self._exchange(step)
        self._arrived.clear()

    def would_conclude(self) -> bool:
        return not self.is_agreed() or bool(self._narrow and self._narrow.left_over())

    @torch.no_grad()
    def _exchange(self, step: Callable[[Fragment, Flight], object]) -> None:
        """Exchange all fragments while this rank waits; after a failure, those that are not completed yet."""
        self._lap("optimizer_s")
        for i, fragment in enumerate(self._fragments):
            if i not in self._arrived and (fragment.is_behind or self._last_left):
                flight = self._flights[i] = self._depart(fragment)
                self._lap("optimizer_s")
                self._carry(i, flight, self._last_left)
                self._lap(BLOCKED)
                self._arrive(i, step)
            fragment.put(fragment.agreed)
            self._arrived.add(i)
            self._lap("optimizer_s")

    def _depart(self, fragment: Fragment) -> Flight:
        """Return an exchange of this replica's difference from the global weights; reset the token count."""
        flight = Flight(fragment.agreed - fragment.held(), fragment.tokens)
        fragment.tokens, fragment.is_behind = 0.0, False
        return flight

    def _carry(self, i: int, flight: Flight, left: Sequence[tuple[nn.Parameter, Tensor]] = ()) -> None:
        """Weight this rank's difference by its tokens, add residuals of earlier exchanges, and all-reduce it."""
        begin, fragment, all_tokens = self._clock.mark(), self._fragments[i], self._ask(flight.tokens)
        flight.delta.mul_(flight.tokens / (math.fsum(all_tokens) or 1.0))
        flight.momentum = self._momentum(all_tokens)
        views = dict(zip(fragment.parameters, fragment.views(flight.delta), strict=True))
        for parameter, residual in left:
            if parameter in views:
                views[parameter].add_(residual)
        flight.came_of_it = self._sum(i, fragment, flight.delta)
        flight.exchanged.append(Exchanged(i, begin, self._clock.mark(), flight.delta.nbytes, flight.came_of_it[0]))
        flight.has_arrived = True

    def _ask(self, tokens: float) -> list[float]:
        """Gather the tokens of every rank."""
        if self._group.world_size == 1:
            return [tokens]
        device = self._group.device if self._group.backend == "nccl" else "cpu"
        local_tokens = torch.tensor([tokens], dtype=torch.float64, device=device)
        all_tokens = local_tokens.new_empty(self._group.world_size)
        dist.all_gather_single(all_tokens, local_tokens, group=self._group.gradients)
        return [float(num) for num in all_tokens.tolist()]

    def _arrive(self, i: int, step: Callable[[Fragment, Flight], object]) -> Flight:
        """Complete the exchange of fragment `i` and apply its result to the global weights."""
        flight = self._flights.pop(i)
        self._count(*flight.came_of_it)
        self._exchanged += flight.exchanged
        step(self._fragments[i], flight)
        return flight

    def await_all(self) -> None:
        pass

    def abandon(self) -> None:
        for flight in self._flights.values():
            wait(flight.going)

    @torch.no_grad()
    def regroup(self, lacks: Sequence[int]) -> None:
        """Continue among other ranks, from the newest global state that any rank has. All ranks call it.

        `joining_ranks`: the ranks of this group that will receive their state by a transfer.
        """
        group = self._group
        for i in [i for i, flight in self._flights.items() if flight.has_arrived]:
            self._land(i)
        own_progress = Standing(begun=self._begun, rounds=[fragment.rounds for fragment in self._fragments])
        progress = [from_json(text, Standing) for text in group.gather(msgspec.json.encode(own_progress))]
        present = [rank for rank in range(group.world_size) if rank not in lacks]
        self._begun = max(progress[rank].begun for rank in present)
        for i, fragment in enumerate(self._fragments):
            rounds = max(progress[rank].rounds[i] for rank in present)
            source = next(rank for rank in present if progress[rank].rounds[i] == rounds)
            behind = [rank for rank in present if progress[rank].rounds[i] < rounds]
            flight = self._flights.get(i)
            for rank in behind if group.rank == source else ():
                for tensor in (fragment.agreed, fragment.momentum):
                    dist.send(tensor, rank, group=group.control)
            if group.rank in behind:
                assert flight is not None  # no exchange completes anywhere before it has begun everywhere
                received = torch.empty_like(fragment.agreed), torch.empty_like(fragment.momentum)
                for tensor in received:  # all of it or none: this epoch may be lost as well
                    dist.recv(tensor, source, group=group.control)
                (fragment.agreed, fragment.momentum), fragment.rounds = received, rounds
                self._take_in(fragment, flight)
                if flight.sent is None:
                    self._arrived.add(i)
            elif flight is not None:
                fragment.tokens += flight.tokens
                if self._narrow:
                    self._narrow.forget(i)
            self._flights.pop(i, None)
            fragment.is_behind = True
        previous, self._narrow = self._narrow, self._new_narrow() if self._narrow else None
        if previous and self._narrow:
            self._narrow.add_left(previous.left_over())

    def _land(self, i: int) -> None:
        """Apply a completed exchange to the global and the local weights."""
        self._take_in(self._fragments[i], self._arrive(i, self._step))

    def _take_in(self, fragment: Fragment, flight: Flight) -> None:
        """Set local weights to the global ones, plus the local updates since the exchange began."""
        global_params = fragment.agreed
        fragment.put(global_params if flight.sent is None else fragment.held().sub_(flight.sent).add_(global_params))

    def take_cost(self) -> Traffic:
        num_bytes, events, clock = self._bytes, self._exchanged, self._clock
        self._bytes, self._exchanged = 0, []
        return Traffic(num_bytes, lambda: sum(clock.seconds(event.begin, event.end) for event in events), events)

    def take_samples(self) -> Samples:
        fidelity, self._fidelity = self._fidelity, None
        return Samples(fidelity=fidelity)  # no rank holds the gradient of the global batch

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self._group.control)
        return values

    def agreed(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters with their global values; buffers are the same on all ranks already."""
        synced = self._by_name("agreed")
        return {name: nn.Parameter(synced[name], requires_grad=False) if name in synced else tensor
                for name, tensor in weights.items()}  # fmt: skip

    def is_agreed(self) -> bool:
        return not any(fragment.is_behind for fragment in self._fragments)

    def state_dict(self) -> dict[str, Any]:
        return {"way": str(self._spec), "momentum": self._by_name("momentum"),
                "rounds": [fragment.rounds for fragment in self._fragments]}  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._loaded = dict(state)
        if self._fragments:  # joining a run: the global weights have been transferred
            self._set_out()

    def own_state(self) -> dict[str, Any]:
        """Return all that this rank needs to resume. It includes the global weights, as the end of a run synchronizes
        once more, and a resumed run has not ended.
        """
        return self.state_dict() | {
            "weights": {name: parameter.detach() for parameter, name in self._names.items()},
            "agreed": self._by_name("agreed"),
            "tokens": [[fragment.tokens, fragment.is_behind] for fragment in self._fragments],
            "left": self._narrow.own_state(self._names) if self._narrow else {},
        }

    def _takes(self, state: dict[str, Any]) -> bool:
        """Return whether the state was saved by the same strategy."""
        return state.get("way") == str(self._spec)

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        for parameter, name in self._names.items():
            parameter.copy_(state["weights"][name])
        self._put_all("agreed", state["agreed"])
        self._take_up(state)
        for fragment, (tokens, is_behind) in zip(self._fragments, state["tokens"], strict=True):
            fragment.tokens, fragment.is_behind = tokens, is_behind
        if self._narrow:
            self._narrow.load_own_state([state["left"]], {name: parameter for parameter, name in self._names.items()})

    def _cut(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
        return fragments(parameters, fragment_bytes(self._spec, sum(parameter.nbytes for parameter in parameters)))

    def _sum(self, index: int, fragment: Fragment, delta: Tensor) -> tuple[int, Tensor | None]:
        """All-reduce `delta` in place; return (bytes that this rank sent, (error, cosine) to the exact sum or None).

        The error is measured every few rounds, on one fragment, a different one each time.
        """
        if self._group.world_size == 1:
            return 0, None
        if self._narrow is None:
            dist.all_reduce(delta, group=self._group.gradients)
            return ring_all_reduce_bytes(delta.nbytes, self._group.world_size), None
        slots = Slots(index, fragment.parameters, fragment.views(delta), is_rehearsal=False)
        num_compared, rest = divmod(fragment.rounds, COMPARED_EVERY)
        if rest or index != num_compared % len(self._fragments):
            return self._narrow.run(slots), None
        return run_and_compare(self._group, self._narrow, slots)

    def _count(self, num_bytes: int, fidelity: Tensor | None) -> None:
        self._bytes += num_bytes
        if fidelity is not None:
            keep_for_this_stream(fidelity)
            self._fidelity = fidelity

    def _step(self, fragment: Fragment, flight: Flight) -> None:
        """Take an outer step: SGD with Nesterov momentum, as in torch.optim.SGD. It overwrites the delta."""
        delta, momentum = flight.delta, min(flight.momentum, fragment.rounds / (fragment.rounds + MOMENTUM_ROUNDS))
        fragment.rounds += 1
        fragment.momentum.mul_(momentum).add_(delta)
        delta.add_(fragment.momentum * momentum)
        fragment.agreed.sub_(delta.mul_(1 / (1 + momentum)))

    def _by_name(self, attribute: str) -> dict[str, Tensor]:
        """Return each parameter's part of the attribute, as a view in the parameter's shape."""
        return {
            self._names[parameter]: view.view(parameter.shape)
            for fragment in self._fragments
            for parameter, view in zip(fragment.parameters, fragment.views(getattr(fragment, attribute)), strict=True)
        }

    def _take_up(self, state: dict[str, Any]) -> None:
        """Load the outer optimizer's state; that of another strategy is ignored."""
        if not self._takes(state):
            return
        self._put_all("momentum", state.get("momentum", {}))
        for fragment, rounds in zip(self._fragments, state.get("rounds", ()), strict=False):
            fragment.rounds = rounds

    def _put_all(self, attribute: str, saved: dict[str, Tensor]) -> None:
        for name, view in self._by_name(attribute).items():
            if name in saved:
                view.copy_(saved[name])


def outer_momentum(tokens: Sequence[float]) -> float:
    """Return the outer momentum μ, from the tokens that each replica trained on, with which a run progresses as far as
    one process.

    The mean of replicas progresses less: see `averaging_efficiency`, 0.71 for two equal ones. The outer optimizer is
    SGD with Nesterov momentum and a learning rate of 1 / (1 + μ): the newest difference counts once, and with the
    momentum, in the long run, 1 / (1 - μ²) times. This μ makes up for the mean, so that a learning rate has the effect
    that it has on one process; another μ would change it.

    *Measured*, 10.7M parameters, 2000 steps, two replicas, H = 10, int8, streaming, validation loss compared to one:

        μ      progress  loss
        0.8    2.0 ×     +2.8 %, three seeds; one process with twice the learning rate +2.6 %, one seed
        0.54   1 ×       +0.8 %, three seeds
        0.3    0.8 ×     +0.4 %, three seeds
        0      0.7 ×     +0.2 %, one seed; 1.0M parameters, which then train too slowly, +7 %

    >>> [round(outer_momentum(tokens), 2) for tokens in ([9], [9, 0], [9, 9], [2, 1], [9, 9, 9, 9], [0, 0])]
    [0.0, 0.0, 0.54, 0.51, 0.71, 0.0]
    """
    efficiency = way_of_mean(tokens)
    return math.sqrt(max(0.0, 1 - efficiency)) if efficiency else 0.0


def fragments(parameters: Sequence[nn.Parameter], num_bytes: int) -> list[tuple[nn.Parameter, ...]]:
    """Split into runs of consecutive parameters; a run ends with the parameter that brings it to `num_bytes`.

    >>> [len(one) for one in fragments([nn.Parameter(torch.zeros(num)) for num in (3, 1, 9, 2)], 16)]
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
