"""All-reduce quantized gradients with error feedback: the encoding error is added to the next step's gradients.

P numbers are summed. With two ranks, each encodes all of its numbers once and sends them to the other: payload_bytes(P)
bytes. With n > 2 ranks, each encodes its numbers and sends the p-th chunk of them to rank p. Rank p sums the chunks in
fp32, in the order of the ranks, encodes the sums and sends them to all ranks. A rank then sends 2(n-1)/n ·
payload_bytes(P) bytes.

A rank keeps two residuals: the error of encoding its gradients, and the error of encoding the sums of its chunk.
[error feedback on both ways: Tang et al. 2019, DoubleSqueeze]

All ranks decode the same bytes in the same order, so that the sums are equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener.worker.rank.comm_thread import record_current_stream
from evener.worker.sync import CompressionTraits, RankGroup
from evener.worker.sync.bucket_queue import GradBucketSlice
from evener.worker.sync.codecs import Codec, ScratchBuffer
from evener.worker.sync.pairwise import pairwise_all_to_all


@dataclass
class _BucketResidual:
    """The residuals of one bucket."""

    parameters: tuple[nn.Parameter, ...]
    local: Tensor  # of this rank's gradients: (num_chunks · chunk size,), padded with zeros
    reduced: Tensor  # of the sums of this rank's chunk: (chunk size,); with two ranks (0,)
    chunk_begin: int  # index in `local` at which this rank's chunk begins


class QuantizedAllReduce:
    """An all-reduce algorithm that encodes with a codec, with error feedback."""

    def __init__(self, group: RankGroup, codec: Codec) -> None:
        self._group, self._codec = group, codec
        self.traits = CompressionTraits(
            is_lossy=True, preserves_norm=codec.preserves_norm, residual_kinds=("mine", "sums")
        )
        self._num_chunks = 1 if group.world_size == 2 else group.world_size
        self._outgoing, self._incoming = (
            [ScratchBuffer(torch.uint8) for _ in range(group.world_size)] for _ in range(2)
        )
        self._total = ScratchBuffer()
        self._residuals: dict[int, _BucketResidual] = {}  # by bucket
        # Residuals that no bucket has taken yet: from a checkpoint, `add_residuals`, or buckets that were rebuilt.
        self._unplaced_residuals: dict[str, dict[nn.Parameter, Tensor]] = {"mine": {}, "sums": {}}

    def run(self, grads: GradBucketSlice) -> int:
        residual = self._get_residual(grads)
        for (_, begin, end), view in zip(grads.offsets(), grads.views, strict=True):
            residual.local[begin:end].add_(view)
        total, sent_bytes = (
            self._exchange_with_peer(residual.local)
            if self._num_chunks == 1
            else self._reduce_scatter_all_gather(residual)
        )
        if total.device.type == "cpu" and not math.isfinite(float(total.sum())):  # on all ranks alike
            for left in (residual.local, residual.reduced):  # an overflow is sent once, and does not stay
                left.nan_to_num_(0.0, 0.0, 0.0)
        for (_, begin, end), view in zip(grads.offsets(), grads.views, strict=True):
            view.copy_(total[begin:end])
        return sent_bytes

    def residuals(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [item for by_parameter in self._residuals_by_parameter().values() for item in by_parameter.items()]

    def add_residuals(self, residuals: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Add residuals to this rank's own, so that they are sent with its next gradients."""
        pending = self._unplaced_residuals["mine"]
        for parameter, residual in residuals:
            pending[parameter] = pending[parameter] + residual if parameter in pending else residual

    def drop_residual(self, bucket_index: int) -> None:
        """Drop the residuals of a bucket whose exchange failed and counts as never begun.

        The encoding errors of earlier exchanges, which they contained, are lost.
        """
        self._residuals.pop(bucket_index, None)

    def rank_state_dict(self, names: dict[nn.Parameter, str]) -> dict[str, Any]:
        """Return the residuals of gradients ("mine") and of sums ("sums"), each by the names of the parameters.

        Residuals of sums are 0 outside of this rank's chunk. If the state is loaded with another number of ranks, whose
        chunks differ, what lies outside of the new chunk is added to the residuals of gradients, and is sent with them.
        """
        return {kind: {names[parameter]: residual.clone() for parameter, residual in by_parameter.items()}
                for kind, by_parameter in self._residuals_by_parameter().items()}  # fmt: skip

    def load_rank_state_dict(self, states: Sequence[dict[str, Any]], parameters: dict[str, nn.Parameter]) -> None:
        self._residuals.clear()
        self._unplaced_residuals = {"mine": {}, "sums": {}}
        for i, state in enumerate(states):
            for kind in ("mine", "sums"):  # the state of another strategy, saved before it was changed, has neither
                # residuals of departed ranks, of either kind, are added to those of this rank's gradients
                pending = self._unplaced_residuals[kind if i == 0 else "mine"]
                for name, saved in state.get(kind, {}).items():
                    parameter, residual = parameters[name], saved.to(parameters[name].device)
                    pending[parameter] = pending[parameter] + residual if parameter in pending else residual

    def _get_residual(self, grads: GradBucketSlice) -> _BucketResidual:
        """Return the bucket's residuals of earlier steps; for a warmup pass return zeros, which are not kept."""
        if grads.is_warmup:
            return self._zero_residual(grads)
        residual = self._residuals.get(grads.bucket_index)
        if residual is None or list(map(id, residual.parameters)) != list(map(id, grads.parameters)):
            if residual is not None:  # buckets were rebuilt: all residuals wait until their new buckets come
                self._unplaced_residuals, self._residuals = self._residuals_by_parameter(), {}
            residual = self._residuals[grads.bucket_index] = self._zero_residual(grads)
            for parameter, begin, end in grads.offsets():
                if (mine := self._unplaced_residuals["mine"].pop(parameter, None)) is not None:
                    residual.local[begin:end] = mine
                    record_current_stream(mine)
                if (sums := self._unplaced_residuals["sums"].pop(parameter, None)) is not None:
                    _place_reduced_residual(sums, begin, residual)
                    record_current_stream(sums)
        return residual

    def _zero_residual(self, grads: GradBucketSlice) -> _BucketResidual:
        # Chunks consist of whole blocks, so the last one may extend beyond the last number.
        chunk = -(-grads.numel // (self._num_chunks * self._codec.block)) * self._codec.block
        like = grads.views[0]
        return _BucketResidual(
            grads.parameters,
            local=like.new_zeros(self._num_chunks * chunk),
            reduced=like.new_zeros(chunk if self._num_chunks > 1 else 0),
            chunk_begin=chunk * self._group.rank if self._num_chunks > 1 else 0,
        )

    def _residuals_by_parameter(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        mine, sums = dict(self._unplaced_residuals["mine"]), dict(self._unplaced_residuals["sums"])
        for residual in self._residuals.values():
            reduced = torch.zeros_like(residual.local)
            reduced[residual.chunk_begin : residual.chunk_begin + len(residual.reduced)] = residual.reduced
            begin = 0
            for parameter in residual.parameters:
                end = begin + parameter.numel()
                mine[parameter] = residual.local[begin:end]
                if end > residual.chunk_begin and begin < residual.chunk_begin + len(residual.reduced):
                    sums[parameter] = reduced[begin:end]
                begin = end
        return {"mine": mine, "sums": sums}

    def _exchange_with_peer(self, mine: Tensor) -> tuple[Tensor, int]:
        """Exchange all numbers with the other of two ranks; return (sums, bytes sent).

        The sums have the same bits on both ranks, as a + b = b + a.
        """
        rank, total, payloads = self._group.rank, self._total.take_like(mine), self._payloads(self._incoming, mine)
        self._codec.encode(mine, payloads[rank], decoded_out=total)
        sent_bytes = pairwise_all_to_all(self._group, [payloads[rank]] * 2, payloads)
        self._codec.decode_add(payloads[1 - rank], total)
        return total, sent_bytes

    def _reduce_scatter_all_gather(self, residual: _BucketResidual) -> tuple[Tensor, int]:
        """Reduce-scatter and all-gather encoded chunks; return (sums, bytes sent)."""
        group, rank = self._group, self._group.rank
        chunks = residual.local.chunk(self._num_chunks)
        outgoing = self._payloads(self._outgoing, residual.reduced)
        incoming = self._payloads(self._incoming, residual.reduced)
        for peer, (chunk, payload) in enumerate(zip(chunks, outgoing, strict=True)):
            if peer != rank:
                self._codec.encode(chunk, payload)
        sent_bytes = pairwise_all_to_all(group, outgoing, incoming)
        total = self._total.take_like(residual.reduced).zero_()
        for peer, payload in enumerate(incoming):
            if peer == rank:  # its own chunk was not encoded
                total.add_(chunks[rank])
                chunks[rank].zero_()
            else:
                self._codec.decode_add(payload, total)
        residual.reduced.add_(total)
        self._codec.encode(residual.reduced, incoming[rank])
        sent_bytes += pairwise_all_to_all(group, [incoming[rank]] * len(chunks), incoming)
        sums = self._total.take_like(residual.local).zero_()
        for payload, chunk in zip(incoming, sums.chunk(self._num_chunks), strict=True):
            self._codec.decode_add(payload, chunk)
        return sums, sent_bytes

    def _payloads(self, scratch: list[ScratchBuffer], values: Tensor) -> list[Tensor]:
        """Return an uninitialized payload for each rank, large enough for len(values) numbers."""
        return [buffer.take(self._codec.payload_bytes(len(values)), values.device) for buffer in scratch]


def _place_reduced_residual(sums: Tensor, begin: int, residual: _BucketResidual) -> None:
    """Move the residual of a parameter's sums, whose numbers begin at `begin` in the bucket, to the bucket's residuals.

    What lies in this rank's chunk remains a residual of sums; the rest is added to the residual of gradients.
    """
    low, high = max(begin, residual.chunk_begin), min(begin + len(sums), residual.chunk_begin + len(residual.reduced))
    if low < high:
        own_chunk = sums[low - begin : high - begin]
        residual.reduced[low - residual.chunk_begin : high - residual.chunk_begin] = own_chunk
        own_chunk.zero_()
    residual.local[begin : begin + len(sums)].add_(sums)
