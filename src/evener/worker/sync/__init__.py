"""Synchronize replicas: the `Sync` protocol, with one implementation a strategy.

*Equal* replicas hold the same gradient after the last backward of a pass, the sum over ranks, and so the same weights.
*Drifting* replicas take local steps, each with its own gradient, and synchronize weights every so many steps; those
global weights are what is compared and saved, and what the run ends with. See `SyncSpec.drifts`.

The training program runs forward on the bare module. `Sync.backward` is the backward that may communicate; gradients
that earlier backwards accumulated on this rank are included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evener.core.run.roster import NO_SYNC, Backend, Roster, SyncSpec
from evener.core.run.step_spans import BucketCommEvent

GRADIENT_RESIDUAL_KINDS = ("mine", "sums", "left", "unused")  # residuals in a rank's own state


@dataclass(frozen=True)
class CompressionTraits:
    """Properties of a gradient compression."""

    is_lossy: bool = False  # what encoding loses in one step is sent in a later one
    preserves_norm: bool = True  # the norm of the sums is exact within a few percent
    residual_kinds: tuple[str, ...] = ()  # those of GRADIENT_RESIDUAL_KINDS that it loads itself
    # CPUs of different models round differently even with the same vector units, and so do other thread counts.
    rounding_depends_on_cpu_model: bool = False


class RankGroup(Protocol):
    """The ranks among which gradients are summed; `ProcessGroups` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def gradient_group(self) -> Any:
        """The process group of torch.distributed."""


class SupportsBackward(Protocol):
    """The part of a loss that a Sync needs."""

    def backward(self) -> None:
        """Accumulate the loss's gradients."""


@dataclass(frozen=True)
class GradientStats:
    """Gradient statistics measured during the exchange; they stay on the device, to be read later."""

    local_grad_sq: Tensor | None = None  # squared norm of this rank's gradient
    global_grad_sq: Tensor | None = None  # squared norm of the sum over ranks
    fidelity: Tensor | None = None  # (error, cosine) of a lossy strategy


@dataclass(frozen=True)
class CommStats:
    """Communication statistics of one step."""

    sent_bytes: int = 0  # sent by this rank, by the strategy's formula
    # seconds with an exchange in flight, overlapped with computation or not; on a GPU known when the step is over
    read_in_flight_s: Callable[[], float | None] = lambda: None
    exchanges: Sequence[BucketCommEvent] = ()


class Sync(Protocol):
    """A sync strategy. Gradients are summed over ranks, not averaged: losses are already divided by the global count.

    Losses of drifting replicas are divided by the replica's own token count instead.
    """

    drifts: bool  # whether replicas drift
    spec: SyncSpec  # the strategy
    roster_bucket_bytes: int  # as in the Roster; 0: the strategy's default

    @property
    def rounding_depends_on_cpu_model(self) -> bool:
        """Return whether a CPU's model or its number of threads changes how the strategy rounds."""

    def wrap(self, module: nn.Module, all_params_used: bool, *, is_under_way: bool = False) -> None:
        """Synchronize this module's gradients from now on, after broadcasting rank 0's weights to all ranks.

        `all_params_used`: every pass of a rank that has sequences uses every parameter, so no search for unused ones is
        needed. `is_under_way`: the run trains already; all ranks have the same weights, and there is no warmup.
        """

    def unwrap(self) -> None:
        """Stop synchronizing the module; nothing is in flight."""

    def backward(self, loss: SupportsBackward | None, *, sample_gradients: bool = False) -> None:
        """Run the last backward of a pass and synchronize gradients; `loss` is None on a rank without sequences.

        `sample_gradients`: measure gradient statistics meanwhile; it must be the same on all ranks.
        """

    def finish_warmup(self) -> None:
        """End the warmup after its first exchange: buckets may be rebuilt in the order in which its gradients became
        ready.
        """

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients so that their norm over all of these parameters is at most `max_norm`; return the norm."""

    def learning_rate_factor(self, shares: Sequence[float]) -> float:
        """Return the factor of the program's learning rate in an optimizer step, from the ranks' shares of a batch."""

    def after_optimizer_step(self, local_tokens: float, global_tokens: float) -> None:
        """Count the tokens of an optimizer step: this rank's, and those of the global batch."""

    def after_step(self, index: int) -> None:
        """Do what is due after all updates of step `index`, such as an outer step."""

    def merge_replicas(self) -> None:
        """Merge drifting replicas into one model after the last step."""

    def needs_merge(self) -> bool:
        """Return whether `merge_replicas` would change any replica; the answer is the same on all ranks."""

    def wait_all(self) -> None:
        """Wait until no exchange is in flight. All ranks call it at the same step."""

    def abort(self) -> None:
        """Wait until the exchanges in flight have failed, after ranks were lost."""

    def adopt_roster(self, roster: Roster, joining_ranks: Sequence[int] = ()) -> None:
        """Continue among the ranks of this Roster and with its strategy. All ranks call it.

        Drifting replicas keep their strategy, and continue from the newest global weights that any rank has.
        `joining_ranks`: the ranks of this group that will receive their state by a transfer.
        """

    def take_comm_stats(self) -> CommStats:
        """Return the communication statistics since the last call."""

    def take_gradient_stats(self) -> GradientStats:
        """Return the gradient statistics since the last call."""

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """All-reduce a CPU vector over the ranks that must hold the same sum."""

    def synced_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the synchronized weights that are compared and saved, given this replica's `weights`."""

    def comparable_tensors(self, weights: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Yield, by name, what must have the same bits on all ranks, given the synchronized weights. Collective."""

    def is_synced(self) -> bool:
        """Return whether this replica's weights are the synchronized ones, so that its loss is also theirs."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks, or an empty dict. Its key "way" names the strategy."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load what `state_dict` returned."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, such as its residuals, or an empty dict."""

    def load_rank_state_dict(self, state: dict[str, Any], departed_states: Sequence[dict[str, Any]]) -> None:
        """Load this rank's own state after `wrap`. `departed_states`: states of ranks that no longer take part."""


class StatelessReduction:
    """The part of a communication hook or algorithm that is lossless and keeps nothing from step to step."""

    traits = CompressionTraits()

    def residuals(self) -> list[tuple[nn.Parameter, Tensor]]:
        return []

    def rank_state_dict(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        return {}

    def load_rank_state_dict(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        pass


class EqualReplicas:
    """The part of a Sync that is the same for all strategies without drift: there is nothing to merge."""

    drifts = False
    spec, roster_bucket_bytes = NO_SYNC, 0

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def learning_rate_factor(self, shares: Sequence[float]) -> float:
        return 1.0

    def after_optimizer_step(self, local_tokens: float, global_tokens: float) -> None:
        pass

    def after_step(self, index: int) -> None:
        pass

    def merge_replicas(self) -> None:
        pass

    def needs_merge(self) -> bool:
        return False

    def wait_all(self) -> None:
        pass

    def synced_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def comparable_tensors(self, weights: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return weights.items()

    def is_synced(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        pass
