"""How are gradients exchanged in fewer bits, and nothing lost for good? What a code loses is added to the next step's.

Two ranks send each other everything, coded once: num_bytes(P) each. More than two scatter: each sends the p-th part of
its numbers to rank p, which adds all of them up, in fp32 and in the order of the ranks, codes the sums and sends them
to everybody: 2(n-1)/n · num_bytes(P) each. A rank remembers what coding its gradients lost, and what coding its part's
sums lost.   [error feedback on both ways: Tang et al. 2019, DoubleSqueeze]

All ranks decode the same bytes in the same order, so that the sums are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.worker.group import Group
from evener.worker.sync import Traits
from evener.worker.sync.codes import Code, Scratch
from evener.worker.sync.jobs import keep_for_this_stream
from evener.worker.sync.lane import Slots
from evener.worker.sync.swap import swap


@dataclass
class _Left:
    """What coding a bucket has left to send."""

    parameters: tuple[nn.Parameter, ...]
    mine: Tensor  # of this rank's gradients: (parts · part,), and 0 behind the last
    sums: Tensor  # of the sums of this rank's part: (part,); of two ranks: (0,)
    begin: int  # of this rank's part


class Narrow:
    """An Exchange by a code, with error feedback."""

    def __init__(self, group: Group, code: Code) -> None:
        self._group, self._code = group, code
        self.traits = Traits(is_lossy=True, keeps_norm=code.keeps_norm, takes=("mine", "sums"))
        self._num_parts = 1 if group.world_size == 2 else group.world_size
        self._outgoing, self._incoming = ([Scratch(torch.uint8) for _ in range(group.world_size)] for _ in range(2))
        self._total = Scratch()
        self._left: dict[int, _Left] = {}  # by bucket
        # Of parameters whose bucket has not come yet: of a start before this one, or of buckets that are no more.
        self._loaded: dict[str, dict[nn.Parameter, Tensor]] = {"mine": {}, "sums": {}}

    def run(self, slots: Slots) -> int:
        left = self._begin(slots)
        for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True):
            left.mine[begin:end].add_(view)
        total, sent = self._direct(left.mine) if self._num_parts == 1 else self._by_parts(left)
        for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True):
            view.copy_(total[begin:end])
        return sent

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [item for found in self._by_parameter().values() for item in found.items()]

    def add_left(self, left: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Send this too, as this rank's own."""
        found = self._loaded["mine"]
        for parameter, more in left:
            found[parameter] = found[parameter] + more if parameter in found else more

    def forget(self, bucket: int) -> None:
        """Its exchange has failed, and shall be as if it had not begun; what was left of those before is lost."""
        self._left.pop(bucket, None)

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """What is left of the gradients ("mine") and of sums ("sums", 0 outside of this rank's part) by parameter.

        Another world cuts other parts, and a rank then adds what was left of sums to its own: it is sent just the same.
        """
        return {kind: {names[parameter]: left.clone() for parameter, left in found.items()}
                for kind, found in self._by_parameter().items()}  # fmt: skip

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._left.clear()
        self._loaded = {"mine": {}, "sums": {}}
        for i, state in enumerate(states):
            for kind in ("mine", "sums"):  # another way's, of before a change, has none
                found = self._loaded[kind if i == 0 else "mine"]  # what others left goes out with this rank's own
                for name, left in state.get(kind, {}).items():
                    parameter, here = parameters[name], left.to(parameters[name].device)
                    found[parameter] = found[parameter] + here if parameter in found else here

    def _begin(self, slots: Slots) -> _Left:
        """What is left of the steps before; of a rehearsal nothing is, or will be."""
        if slots.is_rehearsal:
            return self._empty(slots)
        left = self._left.get(slots.bucket)
        if left is None or list(map(id, left.parameters)) != list(map(id, slots.parameters)):
            if left is not None:  # buckets were made anew: what is in all of them waits for its new place
                self._loaded, self._left = self._by_parameter(), {}
            left = self._left[slots.bucket] = self._empty(slots)
            for parameter, begin, end in slots.offsets():
                if (mine := self._loaded["mine"].pop(parameter, None)) is not None:
                    left.mine[begin:end] = mine
                    keep_for_this_stream(mine)
                if (sums := self._loaded["sums"].pop(parameter, None)) is not None:
                    _take_over(sums, begin, left)
                    keep_for_this_stream(sums)
        return left

    def _empty(self, slots: Slots) -> _Left:
        # Whole blocks in each part; the last ends behind the last number.
        part = -(-slots.num // (self._num_parts * self._code.block)) * self._code.block
        like = slots.views[0]
        return _Left(
            slots.parameters,
            mine=like.new_zeros(self._num_parts * part),
            sums=like.new_zeros(part if self._num_parts > 1 else 0),
            begin=part * self._group.rank if self._num_parts > 1 else 0,
        )

    def _by_parameter(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        mine, sums = dict(self._loaded["mine"]), dict(self._loaded["sums"])
        for left in self._left.values():
            whole = torch.zeros_like(left.mine)
            whole[left.begin : left.begin + len(left.sums)] = left.sums
            begin = 0
            for parameter in left.parameters:
                end = begin + parameter.numel()
                mine[parameter] = left.mine[begin:end]
                if end > left.begin and begin < left.begin + len(left.sums):
                    sums[parameter] = whole[begin:end]
                begin = end
        return {"mine": mine, "sums": sums}

    def _direct(self, mine: Tensor) -> tuple[Tensor, int]:
        """Everything to the one other rank: (sums, bytes sent). What both decode is added: a + b is b + a."""
        rank, total, payloads = self._group.rank, self._total.like(mine), self._payloads(self._incoming, mine)
        self._code.encode(mine, payloads[rank], kept=total)
        sent = swap(self._group, [payloads[rank]] * 2, payloads)
        self._code.add(payloads[1 - rank], total)
        return total, sent

    def _by_parts(self, left: _Left) -> tuple[Tensor, int]:
        """Each rank its part of the sums, and then to everybody: (sums, bytes sent)."""
        group, rank = self._group, self._group.rank
        parts = left.mine.chunk(self._num_parts)
        outgoing, incoming = self._payloads(self._outgoing, left.sums), self._payloads(self._incoming, left.sums)
        for peer, (part, payload) in enumerate(zip(parts, outgoing, strict=True)):
            if peer != rank:
                self._code.encode(part, payload)
        sent = swap(group, outgoing, incoming)
        total = self._total.like(left.sums).zero_()
        for peer, payload in enumerate(incoming):
            if peer == rank:  # its own it has as they are
                total.add_(parts[rank])
                parts[rank].zero_()
            else:
                self._code.add(payload, total)
        left.sums.add_(total)
        self._code.encode(left.sums, incoming[rank])
        sent += swap(group, [incoming[rank]] * len(parts), incoming)
        sums = self._total.like(left.mine).zero_()
        for payload, part in zip(incoming, sums.chunk(self._num_parts), strict=True):
            self._code.add(payload, part)
        return sums, sent

    def _payloads(self, scratch: list[Scratch], values: Tensor) -> list[Tensor]:
        """One a rank, each for so many values."""
        return [one.take(self._code.num_bytes(len(values)), values.device) for one in scratch]


def _take_over(sums: Tensor, begin: int, left: _Left) -> None:
    """What was left of a parameter's sums: what lies in this rank's part now stays of sums, the rest is its own."""
    low, high = max(begin, left.begin), min(begin + len(sums), left.begin + len(left.sums))
    if low < high:
        here = sums[low - begin : high - begin]
        left.sums[low - left.begin : high - left.begin] = here
        here.zero_()
    left.mine[begin : begin + len(sums)].add_(sums)
