"""Overlap DiLoCo's exchanges with training, fragment by fragment: Streaming DiLoCo.

The H steps are divided among the fragments by bytes: each fragment's exchange has its own steps, and nearly always one
is in flight, so that a link never carries more than P/H bytes a step. A result is applied after a fixed step, the same
on all ranks; a rank waits for a late one.

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

from evener.core.step import BLOCKED
from evener.worker.sync.diloco import DiLoCo, Flight
from evener.worker.sync.jobs import Jobs


class Streamed(DiLoCo):
    """DiLoCo whose exchanges overlap with the next steps."""

    def _cut(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
        groups = super()._cut(parameters)
        self._slots = slots([sum(parameter.nbytes for parameter in parameters) for parameters in groups], self._every)
        return groups

    def wrap(self, module: nn.Module, uses_all: bool) -> None:
        self._jobs = Jobs(self._group.device)
        super().wrap(module, uses_all)

    @torch.no_grad()
    def after_step(self, index: int) -> None:
        position = (index + 1) % self._every
        self._lap("optimizer_s")
        for i, (_, end) in enumerate(self._slots):
            if end % self._every == position and i in self._flights:  # not so before its first exchange
                self._land(i)
        for i, (begin, _) in enumerate(self._slots):
            if begin == position and index > self._begun:
                self._start(i)
        self._begun = max(index, self._begun)

    @torch.no_grad()
    def conclude(self) -> None:
        for i in sorted(self._flights):
            self._land(i)
        super().conclude()

    def is_agreed(self) -> bool:
        return not self._flights and super().is_agreed()

    def state_dict(self) -> dict[str, Any]:
        self.await_all()
        exchanges = {str(i): flight for i, flight in self._flights.items()}
        return super().state_dict() | {"flights": {i: flight.delta for i, flight in exchanges.items()},
                                       "momenta": {i: flight.momentum for i, flight in exchanges.items()}}  # fmt: skip

    def own_state(self) -> dict[str, Any]:
        state = super().own_state()
        return state | {"sent": {i: (flight.sent, flight.came_of_it[0]) for i, flight in self._flights.items()}}

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        super().load_own_state(state, others)
        for i, (sent, num_bytes) in state["sent"].items():
            self._flights[i].sent, self._flights[i].came_of_it = sent.to(self._group.device), (num_bytes, None)

    def _take_up(self, state: dict[str, Any]) -> None:
        super()._take_up(state)
        if not self._takes(state):
            return
        self._flights = {int(i): Flight(delta.to(self._group.device), 0.0, self._fragments[int(i)].held(),
                                        state["momenta"][i], has_arrived=True)
                         for i, delta in state.get("flights", {}).items()}  # fmt: skip

    def _start(self, i: int) -> None:
        fragment = self._fragments[i]
        flight = self._flights[i] = self._depart(fragment)
        flight.sent = fragment.held()
        flight.going.append(self._jobs.submit(lambda: self._carry(i, flight)))

    def await_all(self) -> None:
        self._jobs.wait(job for flight in self._flights.values() for job in flight.going)

    def _land(self, i: int) -> None:
        self._jobs.wait(self._flights[i].going)
        self._lap(BLOCKED)
        super()._land(i)
        self._lap("optimizer_s")


def slots(sizes: Sequence[int], num_steps: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each fragment's exchange within `num_steps`, by its share of the bytes: at least one step.

    >>> slots([10, 10, 20, 20], 6), slots([50, 1, 49], 4)
    ([(0, 1), (1, 2), (2, 4), (4, 6)], [(0, 2), (2, 3), (2, 4)])
    """
    total, spans, bytes_before = sum(sizes), [], 0
    for size in sizes:
        begin, bytes_before = num_steps * bytes_before // total, bytes_before + size
        spans.append((begin, max(begin + 1, num_steps * bytes_before // total)))
    return spans
