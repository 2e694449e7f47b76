"""Overlap DiLoCo's exchanges with training, fragment by fragment: Streaming DiLoCo.

The H steps of a round are divided among the fragments in proportion to their bytes, and a fragment is exchanged during
its steps. So nearly always one exchange is in flight, and a link carries about P/H of the model's P bytes a step. A
result is applied after a fixed step, the same on all ranks; a rank waits for a result that is late.

    steps          1   2   3   4   5   6   1   …         H = 6, fragments a, b, c
    in flight     a ────┐ b ────┐ c ────┐ a ────
    applied             a       b       c

A replica keeps training meanwhile. Its updates during an exchange are added to the result, and are part of what it
sends next. So nothing is lost or counted twice: without an outer momentum the replicas' mean is the start plus all of
their updates.   [Streaming DiLoCo, Douillard et al. 2025, mixes local and received weights half and half instead]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from evener.core.base.errors import UsageError
from evener.core.run.step_cost import BLOCKED
from evener.worker.rank.comm_thread import CommThread
from evener.worker.sync.diloco import DiLoCo, FragmentExchange


class StreamingDiLoCo(DiLoCo):
    """DiLoCo whose exchanges overlap with the next steps."""

    def _split_fragments(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
        groups = super()._split_fragments(parameters)
        self._schedule = schedule_exchanges(
            [sum(parameter.nbytes for parameter in parameters) for parameters in groups], self._every
        )
        return groups

    def wrap(self, module: nn.Module, all_params_used: bool, *, is_under_way: bool = False) -> None:
        self._comm_thread = CommThread(self._group.device)
        super().wrap(module, all_params_used, is_under_way=is_under_way)

    def unwrap(self) -> None:
        self._comm_thread.close()

    @torch.no_grad()
    def after_step(self, index: int) -> None:
        position = (index + 1) % self._every
        self._lap("optimizer_s")
        for i, (_, end) in enumerate(self._schedule):
            if end % self._every == position and i in self._exchanges:  # none before its first exchange
                self._apply_exchange(i)
        for i, (begin, _) in enumerate(self._schedule):
            if begin == position and index > self._last_exchange_step:
                self._start_exchange(i)
        self._last_exchange_step = max(index, self._last_exchange_step)

    @torch.no_grad()
    def merge_replicas(self) -> None:
        for i in sorted(self._exchanges):
            self._apply_exchange(i)
        super().merge_replicas()

    def is_synced(self) -> bool:
        return not self._exchanges and super().is_synced()

    def state_dict(self) -> dict[str, Any]:
        self.wait_all()
        exchanges = {str(i): flight for i, flight in self._exchanges.items()}
        return super().state_dict() | {"flights": {i: flight.delta for i, flight in exchanges.items()},
                                       "momenta": {i: flight.momentum for i, flight in exchanges.items()}}  # fmt: skip

    def rank_state_dict(self) -> dict[str, Any]:
        differences = {i: (flight.difference, flight.sum_result[0]) for i, flight in self._exchanges.items()}
        return super().rank_state_dict() | {"differences": differences}

    @torch.no_grad()
    def load_rank_state_dict(self, state: dict[str, Any], departed_states: Sequence[dict[str, Any]]) -> None:
        super().load_rank_state_dict(state, departed_states)
        differences = state.get("differences", {})
        if differences.keys() != self._exchanges.keys():
            raise UsageError(
                f"--resume: rank {self._group.rank}: its exchanges in flight were saved by another version of evener",
                hint="a new run from the weights of the checkpoint: --init-from …/weights.safetensors",
            )
        for i, (difference, num_bytes) in differences.items():
            self._exchanges[i].difference = difference.to(self._group.device)
            self._exchanges[i].sum_result = (num_bytes, None)

    def _load_outer_state(self, state: dict[str, Any]) -> None:
        super()._load_outer_state(state)
        if not self._is_of_same_strategy(state):
            return
        self._exchanges = {
            int(i): FragmentExchange(
                sum_of_all, 0.0, torch.zeros_like(sum_of_all), state["momenta"][i], is_complete=True
            )
            for i, delta in state.get("flights", {}).items()
            for sum_of_all in [delta.to(self._group.device)]
        }

    def _start_exchange(self, i: int) -> None:
        flight = self._exchanges[i] = self._begin_exchange(self._fragments[i])
        flight.difference = flight.delta
        flight.futures.append(self._comm_thread.submit(lambda: self._run_exchange(i, flight)))

    def wait_all(self) -> None:
        self._comm_thread.wait(job for flight in self._exchanges.values() for job in flight.futures)

    def _apply_exchange(self, i: int) -> None:
        self._comm_thread.wait(self._exchanges[i].futures)
        self._lap(BLOCKED)
        super()._apply_exchange(i)
        self._lap("optimizer_s")


def schedule_exchanges(sizes: Sequence[int], num_steps: int) -> list[tuple[int, int]]:
    """Return the steps (begin, end) of each fragment's exchange within `num_steps`, in proportion to `sizes` in bytes.

    Every exchange takes at least one step.

    >>> schedule_exchanges([10, 10, 20, 20], 6), schedule_exchanges([50, 1, 49], 4)
    ([(0, 1), (1, 2), (2, 4), (4, 6)], [(0, 2), (2, 3), (2, 4)])
    """
    total, spans, bytes_before = sum(sizes), [], 0
    for size in sizes:
        begin, bytes_before = num_steps * bytes_before // total, bytes_before + size
        spans.append((begin, max(begin + 1, num_steps * bytes_before // total)))
    return spans
