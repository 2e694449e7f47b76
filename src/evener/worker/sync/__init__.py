"""How do replicas agree? A Sync sees to it, in one of two ways.

*Equal* replicas hold the same gradient after the last backward of a pass, the sum of all ranks', and so the same
weights. *Drifting* ones learn alone, each from its own gradient, and agree on weights every so many steps: the agreed
weights are what is compared and saved, and what the run ends with.

The training program runs forward on the bare module. `backward` of the Sync is the one that may exchange; whatever came
before it on this rank has added to the gradients and is exchanged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

Replica = Literal["equal", "drifting", "sharded"]
LEFT_OF_GRADIENTS = ("mine", "sums", "left", "unused")  # kinds of what a rank has not sent, in its own state


@dataclass(frozen=True)
class Traits:
    """Of what kind is an exchange of gradients?"""

    is_lossy: bool = False  # what it loses in one step is sent with another
    keeps_norm: bool = True  # sums are as long as the exact ones, within a few percent
    takes: tuple[str, ...] = ()  # of LEFT_OF_GRADIENTS, what it goes on with itself
    # Processors of different models, though they have the same units, round differently, and with other threads.
    rounds_by_model: bool = False


class Backward(Protocol):
    """A loss, as far as a Sync has to do with it."""

    def backward(self) -> None:
        """Add its gradients."""


@dataclass(frozen=True)
class Samples:
    """What was measured of a step's gradients beside the exchange; on the device, to be read later."""

    mine_sq: Tensor | None = None  # squared norm of this rank's part of the gradient
    whole_sq: Tensor | None = None  # of the sum over ranks
    fidelity: Tensor | None = None  # (error, cosine) of a lossy strategy


class Exchanged(NamedTuple):
    """One bucket, or fragment: the Clock's marks around its exchange, and what that was."""

    bucket: int
    begin: Any
    end: Any
    size_bytes: int  # of the numbers that were summed
    sent_bytes: int  # by this rank


@dataclass(frozen=True)
class Traffic:
    """What was exchanged in a step."""

    bytes: int = 0  # that this rank sent, by the strategy's formula
    in_flight_s: Callable[[], float | None] = lambda: None  # hidden or not; on a GPU known when the step is over
    exchanges: Sequence[Exchanged] = ()


class Sync(Protocol):
    """One strategy. Gradients are summed over ranks, not averaged: losses are already divided by the global count.

    Where replicas drift, each divides by its own.
    """

    replica: Replica

    @property
    def rounds_by_model(self) -> bool:
        """See Traits."""

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        """Synchronize this module's gradients from now on; every rank then has rank 0's weights.

        `uses_all`: every pass of a rank that has sequences uses every parameter, so that nobody needs to ask.
        """

    def backward(self, loss: Backward | None, *, samples: bool = False) -> None:
        """The last backward of a pass, and the exchange; None: this rank has nothing to add to it.

        `samples`: measure the gradients meanwhile, on all ranks alike.
        """

    def settle(self) -> None:
        """After the first exchange: the next ones may be arranged in the order in which its gradients came."""

    def after_update(self, tokens: float, of_all: float) -> None:
        """Optimizers have stepped, by what was learned from so many tokens: this rank's, and those of the batch."""

    def after_step(self, index: int) -> None:
        """Step `index` has had its updates: what is due after it, such as an outer step."""

    def conclude(self) -> None:
        """There is no next step: replicas that drift become one model."""

    def would_conclude(self) -> bool:
        """Does `conclude` change any of them? On all ranks alike."""

    def await_all(self) -> None:
        """Return when nothing is under way. All ranks are at the same step."""

    def abandon(self) -> None:
        """What is under way has failed, for ranks are gone: return when nothing is any more."""

    def take_cost(self) -> Traffic:
        """What was exchanged since the last call."""

    def take_samples(self) -> Samples:
        """What was measured since the last call."""

    def total(self, values: Tensor) -> Tensor:
        """The sum of a vector over the ranks that must agree on it, on the processor."""

    def agreed(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that replicas have in common, where this one holds `weights`: what is compared and saved."""

    def is_agreed(self) -> bool:
        """Is this replica what `agreed` says, so that what was measured of it holds for that?"""

    def state_dict(self) -> dict[str, Any]:
        """What all ranks remember alike from step to step; empty where that is nothing. "way": of which it is."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on with what was remembered."""

    def own_state(self) -> dict[str, Any]:
        """What this rank alone remembers, such as what it has not sent yet; empty where that is nothing."""

    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        """Go on with what this rank remembered, once `wrap` was called. `others`: of ranks that are no more."""
