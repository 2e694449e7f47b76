"""How does one replica agree with itself? There is nothing to exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from evener.worker.sync import Backward, Replica, Samples


class Alone:
    """A world of one."""

    replica: Replica = "equal"

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        pass

    def backward(self, loss: Backward | None, *, samples: bool = False) -> None:
        if loss is not None:
            loss.backward()

    def settle(self) -> None:
        pass

    def after_update(self, tokens: float, of_all: float) -> None:
        pass

    def after_step(self, index: int) -> None:
        pass

    def conclude(self) -> None:
        pass

    def take_cost(self) -> tuple[int, Callable[[], float | None]]:
        return 0, lambda: None

    def take_samples(self) -> Samples:
        return Samples()

    def total(self, values: Tensor) -> Tensor:
        return values

    def agreed(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        pass
