"""Train a single replica without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from evener.worker.sync import LEFT_OF_GRADIENTS, Backward, Replica, Samples, Traffic


class Alone:
    """The Sync of a single rank."""

    replica: Replica = "equal"
    rounds_by_model = False

    def __init__(self) -> None:
        self._left: list[tuple[nn.Parameter, Tensor]] = []
        self._is_rehearsal = True  # until `finish_warmup`

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        self._parameters = dict(module.named_parameters())

    def backward(self, loss: Backward | None, *, samples: bool = False) -> None:
        if loss is not None:
            loss.backward()
        if self._left and not self._is_rehearsal:
            for parameter, flat in self._left:
                residual = flat.view(parameter.shape)
                parameter.grad = residual if parameter.grad is None else parameter.grad + residual
            self._left = []

    def settle(self) -> None:
        self._is_rehearsal = False

    def after_update(self, tokens: float, of_all: float) -> None:
        pass

    def after_step(self, index: int) -> None:
        pass

    def conclude(self) -> None:
        pass

    def would_conclude(self) -> bool:
        return False

    def await_all(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def take_cost(self) -> Traffic:
        return Traffic()

    def take_samples(self) -> Samples:
        return Samples()

    def total(self, values: Tensor) -> Tensor:
        return values

    def agreed(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def is_agreed(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        """Add the residuals of all ranks to the next gradients. States of drifting replicas hold no gradient residuals
        and are skipped.
        """
        for saved in (state, *others):
            for kind in LEFT_OF_GRADIENTS if "agreed" not in saved else ():
                for name, residual in saved.get(kind, {}).items():
                    parameter = self._parameters[name]
                    self._left.append((parameter, residual.to(parameter.device)))
