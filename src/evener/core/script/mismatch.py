"""Compare the collectives that the ranks of a program called: all ranks of a group must call the same, in one order.

Two mistakes stop a program, or make it mix up unrelated tensors:

    different calls    the k-th collective of a group differs between two ranks: another operation, or another size
    a rank that left   its program ended after k collectives, and another rank has called one more
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evener.core.script.call_ring import RankCalls, RecordedCall

# Operations in which all ranks must pass tensors of one size and type; in others, sizes may differ by rank.
SAME_SIZE = {
    "all_reduce", "DDP's all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter_tensor", "reduce_scatter_single",
}  # fmt: skip
SAME_CALL_HINT = (
    "all ranks must call the same collectives in the same order: is one behind `if rank == 0`, or has one rank fewer "
    "batches than the others?"
)


@dataclass(frozen=True)
class CollectiveMismatch:
    """Two ranks of one group that did not call the same."""

    rank: int
    other: int
    call: RecordedCall  # of `rank`
    other_call: RecordedCall | None  # of `other`; None: its program has ended

    def describe(self) -> str:
        """Return what is wrong as a sentence whose subject is `rank`, for a message that begins with its name."""
        if self.other_call is None:
            return f"called {self.call.describe()}, which needs all ranks, and rank {self.other} has ended its program"
        return f"called {self.call.describe()}, while rank {self.other} called {self.other_call.describe()}"


def find_mismatch(ranks: Mapping[int, RankCalls]) -> CollectiveMismatch | None:
    """Return the first mismatch between the calls of all ranks; None if what is known of them agrees.

    Numbers of calls are compared by group. A group that only some ranks belong to is compared between those.
    """
    by_group: dict[str, dict[int, dict[int, RecordedCall]]] = {}
    for rank, known in sorted(ranks.items()):
        for call in known.calls:
            by_group.setdefault(call.group, {}).setdefault(rank, {})[call.number] = call
    for calls in by_group.values():
        first, *others = calls
        for other in others:
            for number in sorted(calls[first].keys() & calls[other].keys()):
                mine, theirs = calls[first][number], calls[other][number]
                if _signature(mine) != _signature(theirs):
                    return CollectiveMismatch(first, other, mine, theirs)
        for left in calls:
            last = max(calls[left])
            for rank in calls:
                if ranks[left].has_ended and not ranks[rank].has_ended and last + 1 in calls[rank]:
                    return CollectiveMismatch(rank, left, calls[rank][last + 1], None)
    return None


def find_laggard(ranks: Mapping[int, RankCalls]) -> int | None:
    """Return the rank that has called fewest collectives of a group in which another one waits; None if none waits."""
    for group in sorted({call.group for known in ranks.values() for call in known.calls}):
        last = {
            rank: max((call.number for call in known.calls if call.group == group), default=0)
            for rank, known in ranks.items()
        }
        members = [rank for rank, number in last.items() if number or not ranks[rank].calls]
        behind = min(members, key=lambda rank: (last[rank], rank))
        if last[behind] < max(last.values()) and not ranks[behind].has_ended:
            return behind
    return None


def _signature(call: RecordedCall) -> tuple[str, int, str]:
    """Return what must be equal on all ranks."""
    operation = "all_reduce" if call.operation == "DDP's all_reduce" else call.operation
    return (operation, call.num_elements, call.dtype) if call.operation in SAME_SIZE else (operation, 0, "")
