"""Train a single replica without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from evener.core.run.roster import Roster
from evener.worker.sync import GRADIENT_RESIDUAL_KINDS, CommStats, EqualReplicas, GradientStats, SupportsBackward


class NoSync(EqualReplicas):
    """The Sync of a single rank. It is also the fake of a Sync for tests: it needs no process group."""

    rounding_depends_on_cpu_model = False

    def __init__(self) -> None:
        self._residuals: list[tuple[nn.Parameter, Tensor]] = []
        self._is_warmup = True  # until `finish_warmup`

    def wrap(self, module: nn.Module, all_params_used: bool, *, is_under_way: bool = False) -> None:
        self._parameters = dict(module.named_parameters())

    def unwrap(self) -> None:
        pass

    def backward(self, loss: SupportsBackward | None, *, sample_gradients: bool = False) -> None:
        if loss is not None:
            loss.backward()
        if self._residuals and not self._is_warmup:
            for parameter, flat in self._residuals:
                residual = flat.view(parameter.shape)
                parameter.grad = residual if parameter.grad is None else parameter.grad + residual
            self._residuals = []

    def finish_warmup(self) -> None:
        self._is_warmup = False

    def abort(self) -> None:
        pass

    def adopt_roster(self, roster: Roster, joining_ranks: Sequence[int] = ()) -> None:
        pass

    def take_comm_stats(self) -> CommStats:
        return CommStats()

    def take_gradient_stats(self) -> GradientStats:
        return GradientStats()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def rank_state_dict(self) -> dict[str, Any]:
        return {}

    def load_rank_state_dict(self, state: dict[str, Any], departed_states: Sequence[dict[str, Any]]) -> None:
        """Add the residuals of all ranks to the next gradients. States of drifting replicas hold no gradient residuals
        and are skipped.
        """
        for saved in (state, *departed_states):
            for kind in GRADIENT_RESIDUAL_KINDS if "agreed" not in saved else ():
                for name, residual in saved.get(kind, {}).items():
                    parameter = self._parameters[name]
                    self._residuals.append((parameter, residual.to(parameter.device)))
