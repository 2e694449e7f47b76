"""All-reduce quantized gradients with error feedback: the encoding error is added to the next step's gradients.

Two ranks send each other everything, encoded once: payload_bytes(P) each. More ranks reduce-scatter: each sends the
p-th chunk of its numbers to rank p, which sums all of them, in fp32 and in the order of the ranks, encodes the sums and
sends them to all: 2(n-1)/n · payload_bytes(P) each. A rank keeps the error of encoding its gradients and the error of
encoding the sums of its chunk. [error feedback on both ways: Tang et al. 2019, DoubleSqueeze]

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
    """The residuals of one bucket."""

    parameters: tuple[nn.Parameter, ...]
    mine: Tensor  # of this rank's gradients: (chunks · chunk,), 0 behind the last number
    sums: Tensor  # of the sums of this rank's chunk: (chunk,); with two ranks: (0,)
    begin: int  # of this rank's chunk


class Narrow:
    """An all-reduce algorithm that encodes with a codec, with error feedback."""

    def __init__(self, group: Group, code: Code) -> None:
        self._group, self._code = group, code
        self.traits = Traits(is_lossy=True, keeps_norm=code.keeps_norm, takes=("mine", "sums"))
        self._num_parts = 1 if group.world_size == 2 else group.world_size
        self._outgoing, self._incoming = ([Scratch(torch.uint8) for _ in range(group.world_size)] for _ in range(2))
        self._total = Scratch()
        self._left: dict[int, _Left] = {}  # by bucket
        # Residuals of parameters whose bucket has not come yet: from a checkpoint, or from earlier buckets.
        self._loaded: dict[str, dict[nn.Parameter, Tensor]] = {"mine": {}, "sums": {}}

    def run(self, slots: Slots) -> int:
        residual = self._begin(slots)
        for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True):
            residual.mine[begin:end].add_(view)
        total, sent_bytes = self._direct(residual.mine) if self._num_parts == 1 else self._by_parts(residual)
        for (_, begin, end), view in zip(slots.offsets(), slots.views, strict=True):
            view.copy_(total[begin:end])
        return sent_bytes

    def left_over(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [item for by_parameter in self._by_parameter().values() for item in by_parameter.items()]

    def add_left(self, left: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Send these residuals too, as this rank's own."""
        pending = self._loaded["mine"]
        for parameter, residual in left:
            pending[parameter] = pending[parameter] + residual if parameter in pending else residual

    def forget(self, bucket: int) -> None:
        """Drop the residuals of a bucket whose exchange failed and counts as never begun; those of earlier steps are
        lost.
        """
        self._left.pop(bucket, None)

    def own_state(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return the residuals of gradients ("mine") and of sums ("sums", 0 outside of this rank's chunk) by parameter.

        With another number of ranks chunks differ, and a rank then adds residuals of sums to its own: they are sent all
        the same.
        """
        return {kind: {names[parameter]: residual.clone() for parameter, residual in by_parameter.items()}
                for kind, by_parameter in self._by_parameter().items()}  # fmt: skip

    def load_own_state(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._left.clear()
        self._loaded = {"mine": {}, "sums": {}}
        for i, state in enumerate(states):
            for kind in ("mine", "sums"):  # another strategy's state, from before a change, has none
                pending = self._loaded[kind if i == 0 else "mine"]  # residuals of departed ranks join this rank's own
                for name, saved in state.get(kind, {}).items():
                    parameter, residual = parameters[name], saved.to(parameters[name].device)
                    pending[parameter] = pending[parameter] + residual if parameter in pending else residual

    def _begin(self, slots: Slots) -> _Left:
        """Return the residuals of the earlier steps; a warmup pass gets zeros, and its residuals are not kept."""
        if slots.is_rehearsal:
            return self._empty(slots)
        residual = self._left.get(slots.bucket)
        if residual is None or list(map(id, residual.parameters)) != list(map(id, slots.parameters)):
            if residual is not None:  # buckets were rebuilt: all residuals wait for their new place
                self._loaded, self._left = self._by_parameter(), {}
            residual = self._left[slots.bucket] = self._empty(slots)
            for parameter, begin, end in slots.offsets():
                if (mine := self._loaded["mine"].pop(parameter, None)) is not None:
                    residual.mine[begin:end] = mine
                    keep_for_this_stream(mine)
                if (sums := self._loaded["sums"].pop(parameter, None)) is not None:
                    _take_over(sums, begin, residual)
                    keep_for_this_stream(sums)
        return residual

    def _empty(self, slots: Slots) -> _Left:
        # Whole blocks in each chunk; the last ends behind the last number.
        chunk = -(-slots.num // (self._num_parts * self._code.block)) * self._code.block
        like = slots.views[0]
        return _Left(
            slots.parameters,
            mine=like.new_zeros(self._num_parts * chunk),
            sums=like.new_zeros(chunk if self._num_parts > 1 else 0),
            begin=chunk * self._group.rank if self._num_parts > 1 else 0,
        )

    def _by_parameter(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        mine, sums = dict(self._loaded["mine"]), dict(self._loaded["sums"])
        for residual in self._left.values():
            reduced = torch.zeros_like(residual.mine)
            reduced[residual.begin : residual.begin + len(residual.sums)] = residual.sums
            begin = 0
            for parameter in residual.parameters:
                end = begin + parameter.numel()
                mine[parameter] = residual.mine[begin:end]
                if end > residual.begin and begin < residual.begin + len(residual.sums):
                    sums[parameter] = reduced[begin:end]
                begin = end
        return {"mine": mine, "sums": sums}

    def _direct(self, mine: Tensor) -> tuple[Tensor, int]:
        """Exchange everything with the one other rank; return (sums, bytes sent). Sums are equal, as a + b is b + a."""
        rank, total, payloads = self._group.rank, self._total.like(mine), self._payloads(self._incoming, mine)
        self._code.encode(mine, payloads[rank], kept=total)
        sent_bytes = swap(self._group, [payloads[rank]] * 2, payloads)
        self._code.add(payloads[1 - rank], total)
        return total, sent_bytes

    def _by_parts(self, residual: _Left) -> tuple[Tensor, int]:
        """Reduce-scatter and all-gather encoded chunks; return (sums, bytes sent)."""
        group, rank = self._group, self._group.rank
        chunks = residual.mine.chunk(self._num_parts)
        outgoing, incoming = (
            self._payloads(self._outgoing, residual.sums),
            self._payloads(self._incoming, residual.sums),
        )
        for peer, (chunk, payload) in enumerate(zip(chunks, outgoing, strict=True)):
            if peer != rank:
                self._code.encode(chunk, payload)
        sent_bytes = swap(group, outgoing, incoming)
        total = self._total.like(residual.sums).zero_()
        for peer, payload in enumerate(incoming):
            if peer == rank:  # its own chunk was not encoded
                total.add_(chunks[rank])
                chunks[rank].zero_()
            else:
                self._code.add(payload, total)
        residual.sums.add_(total)
        self._code.encode(residual.sums, incoming[rank])
        sent_bytes += swap(group, [incoming[rank]] * len(chunks), incoming)
        sums = self._total.like(residual.mine).zero_()
        for payload, chunk in zip(incoming, sums.chunk(self._num_parts), strict=True):
            self._code.add(payload, chunk)
        return sums, sent_bytes

    def _payloads(self, scratch: list[Scratch], values: Tensor) -> list[Tensor]:
        """Return one payload a rank, each for len(values) numbers."""
        return [buffer.take(self._code.num_bytes(len(values)), values.device) for buffer in scratch]


def _take_over(sums: Tensor, begin: int, residual: _Left) -> None:
    """Place the residual of a parameter's sums: what lies in this rank's chunk stays one of sums, the rest becomes one
    of gradients.
    """
    low, high = max(begin, residual.begin), min(begin + len(sums), residual.begin + len(residual.sums))
    if low < high:
        own_chunk = sums[low - begin : high - begin]
        residual.sums[low - residual.begin : high - residual.begin] = own_chunk
        own_chunk.zero_()
    residual.mine[begin : begin + len(sums)].add_(sums)
