"""The collectives that a program itself calls in a step, besides those of DDP: what another link would make of them.

A program that calls them after backward, and waits for each, takes as much longer as they take together. Of one that
computes meanwhile, a step does not show how much of them that hides.
"""

from __future__ import annotations

from typing import NamedTuple

from evener.core.cluster.collective_results import Collective
from evener.core.model.gradients import OwnCollective, OwnCollectives

MAX_CALLS = 1000  # of a step that are kept
MIN_SHARE = 0.01  # of a step's bytes: smaller calls, as for a sum of losses, are left out (assumption)
# By the beginning of torch.distributed's names; the buffer of the second kind is that of all ranks.
KINDS: dict[str, Collective] = {"all_reduce": "all_reduce", "broadcast": "broadcast", "all_to_all": "all_to_all"}
KINDS_OF_PARTS: dict[str, Collective] = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}


class _Call(NamedTuple):
    name: str
    what: OwnCollective | None  # None: there is no formula of its time
    size_bytes: float
    took_s: float
    obstacle: str


class StepCollectives:
    """Collects the calls of the step that the program is in."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._num_early = 0  # before the last backward of the step had ended

    def add(
        self, name: str, num_bytes: float, num_ranks: int, took_s: float, *, sent_in_pairs: int | None, obstacle: str
    ) -> None:
        """Add a call of torch.distributed's `name` with a tensor of so many bytes.

        `sent_in_pairs`: the bytes that it sent, if it was exchanged in pairs; `obstacle`: as of an `OwnCollectives`.
        """
        size_bytes, kind = num_bytes, next((one for start, one in KINDS.items() if name.startswith(start)), None)
        if kind is None:
            size_bytes *= num_ranks
            kind = next((one for start, one in KINDS_OF_PARTS.items() if name.startswith(start)), None)
        if sent_in_pairs is not None:
            size_bytes, kind = sent_in_pairs * num_ranks / max(1, num_ranks - 1), "swap"
        what = None if kind is None else OwnCollective(collective=kind, size_bytes=size_bytes)
        if len(self._calls) < MAX_CALLS:
            self._calls.append(_Call(name, what, size_bytes, took_s, obstacle))

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        self._num_early = len(self._calls)

    def end_step(self) -> tuple[OwnCollectives, float | None]:
        """Return the calls of the step and their seconds, and begin the next; None if nothing was called that counts,
        or if other work may have gone on meanwhile.
        """
        least = MIN_SHARE * sum(call.size_bytes for call in self._calls)
        counted = [(i, call) for i, call in enumerate(self._calls) if call.size_bytes > least]
        obstacle = next((text for i, call in counted if (text := self._obstacle(i, call))), "")
        if len(self._calls) == MAX_CALLS:
            obstacle = f"it calls collectives {MAX_CALLS} times a step or more"
        self._calls, self._num_early = [], 0
        if obstacle or not counted:
            return OwnCollectives(obstacle=obstacle), None
        calls = tuple(call.what for _, call in counted if call.what is not None)
        return OwnCollectives(calls=calls), sum(call.took_s for _, call in counted)

    def _obstacle(self, i: int, call: _Call) -> str:
        if call.obstacle:
            return call.obstacle
        if call.what is None:
            return f"it calls {call.name}, of whose time there is no formula"
        if i < self._num_early:
            return f"it calls {call.name} before backward has ended, and what it computes meanwhile is unknown"
        return ""
