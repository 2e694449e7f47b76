"""All-reduce gradients losslessly in half the bytes: numbers that fit in bf16 travel as bf16.

Under bf16 autocast the gradient of a linear layer's weight is computed in bf16 and only then written as fp32, where its
lower half is 0, as long as one backward alone has added to it. Embeddings, norms and sums of several micro-batches are
not like that. So each tensor is checked in every step, and each rank sends the others which of its tensors fit; what
does not fit travels as fp32.

Two ranks send each other all gradients, and the sums have the bits of DDP's. If all tensors fit in bf16, each rank
sends P/2 of the P bytes of fp32 gradients. With n > 2 ranks, each rank sends the p-th chunk to rank p, which adds the
chunks in fp32, in the order of the ranks, and sends the fp32 sums to all: (n-1)/n · (P/2 + P) bytes a rank.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from evener.worker.sync import RankGroup, StatelessReduction
from evener.worker.sync.bucket_queue import GradBucketSlice
from evener.worker.sync.codecs import CHUNK_NUMEL, ScratchBuffer
from evener.worker.sync.pairwise import FP32_LOW_HALF, pairwise_all_to_all

ALIGN_BYTES = 8


class PackedAllReduce(StatelessReduction):
    """An all-reduce algorithm that sends bf16 where that is exact."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._scratch = group, ScratchBuffer()
        self._outgoing, self._incoming = (
            [ScratchBuffer(torch.uint8) for _ in range(group.world_size)] for _ in range(2)
        )

    def run(self, grads: GradBucketSlice) -> int:
        if self._group.world_size == 2:
            peer = 1 - self._group.rank
            payloads, fits, sent_bytes = self._exchange_packed([grads.views, grads.views])
            for view, values in zip(grads.views, unpack_views(payloads[peer], fits[peer], grads.views), strict=True):
                self.add_unpacked(values, view)  # a + b is b + a
            return sent_bytes
        return self._reduce_scatter_all_gather(grads)

    def _reduce_scatter_all_gather(self, grads: GradBucketSlice) -> int:
        group, rank = self._group, self._group.rank
        bounds = [grads.numel * part // group.world_size for part in range(group.world_size + 1)]
        parts = [[view[max(0, low - begin) : max(0, high - begin)]
                  for (_, begin, end), view in zip(grads.offsets(), grads.views, strict=True)
                  if begin < high and end > low]
                 for low, high in pairwise(bounds)]  # fmt: skip
        payloads, fits, sent_bytes = self._exchange_packed(parts)
        local = [view.clone() for view in parts[rank]]
        for view in parts[rank]:
            view.zero_()
        for peer in range(group.world_size):
            received = local if peer == rank else unpack_views(payloads[peer], fits[peer], parts[rank])
            for view, values in zip(parts[rank], received, strict=True):
                self.add_unpacked(values, view)
        sums = [scratch.take(4 * (high - low), local[0].device if local else grads.views[0].device).view(torch.float32)
                for scratch, (low, high) in zip(self._incoming, pairwise(bounds), strict=True)]  # fmt: skip
        if parts[rank]:
            torch.cat(parts[rank], out=sums[rank])
        sent_bytes += pairwise_all_to_all(group, [sums[rank]] * group.world_size, sums)
        for part, total in zip(parts, sums, strict=True):
            position = 0
            for view in part:
                view.copy_(total[position : position + len(view)])
                position += len(view)
        return sent_bytes

    def _exchange_packed(self, parts: list[list[Tensor]]) -> tuple[list[Tensor], list[list[bool]], int]:
        """Send parts[peer] to each peer; return (each peer's payload, which of its tensors are bf16, bytes sent)."""
        group, own_part, device = self._group, parts[self._group.rank], self._group.device
        outgoing, fits_to_send = [], []
        for peer, (part, scratch) in enumerate(zip(parts, self._outgoing, strict=True)):
            sends = peer != group.rank
            payload = scratch.take(sum(_aligned_bytes(4 * len(view)) for view in part) if sends else 0, device)
            packed = self.pack_views(part, payload) if sends else [True] * len(part)
            outgoing.append(payload[: _packed_bytes(packed, part)])
            fits_to_send.append(torch.tensor(packed, dtype=torch.uint8, device=device))
        received_fits = [torch.empty(len(own_part), dtype=torch.uint8, device=device) for _ in parts]
        sent_bytes = pairwise_all_to_all(group, fits_to_send, received_fits)
        fits = [[bool(fit) for fit in fits.tolist()] for fits in received_fits]
        incoming = [scratch.take(_packed_bytes(packed, own_part) if peer != group.rank else 0, device)
                    for peer, (scratch, packed) in enumerate(zip(self._incoming, fits, strict=True))]  # fmt: skip
        return incoming, fits, sent_bytes + pairwise_all_to_all(group, outgoing, incoming)

    def pack_views(self, views: list[Tensor], payload: Tensor) -> list[bool]:
        """Write each view as bf16 where that is exact, else as fp32; return which are bf16."""
        all_fit, position = [], 0
        for view in views:
            fits = self._pack_if_bf16(view, payload[position : position + 2 * len(view)].view(torch.bfloat16))
            if not fits:
                payload[position : position + 4 * len(view)].view(torch.float32).copy_(view)
            all_fit.append(fits)
            position += _aligned_bytes((2 if fits else 4) * len(view))
        return all_fit

    def _pack_if_bf16(self, view: Tensor, coded: Tensor) -> bool:
        """Write `view` to `coded` if every lower half is 0; return whether all are. (Twice as fast as torch.equal.)"""
        if not len(view):  # a bucket with fewer numbers than ranks
            return True
        size = CHUNK_NUMEL[view.device.type]
        for piece, short in zip(view.split(size), coded.split(size), strict=True):
            lower = self._scratch.take_like(piece).view(torch.int32)
            if torch.bitwise_and(piece.view(torch.int32), FP32_LOW_HALF, out=lower).amax():
                return False
            short.copy_(piece)
        return True

    def add_unpacked(self, values: Tensor, view: Tensor) -> None:
        """Add received values, bf16 or fp32, to the gradient."""
        size = CHUNK_NUMEL[view.device.type]
        for received, chunk in zip(values.split(size), view.split(size), strict=True):
            chunk.add_(received if received.dtype == chunk.dtype else self._scratch.take_like(chunk).copy_(received))


def unpack_views(payload: Tensor, fits: list[bool], views: list[Tensor]) -> list[Tensor]:
    """Return the tensors of a payload, in the order of `views`."""
    tensors, position = [], 0
    for fit, view in zip(fits, views, strict=True):
        num_bytes = (2 if fit else 4) * len(view)
        tensors.append(payload[position : position + num_bytes].view(torch.bfloat16 if fit else torch.float32))
        position += _aligned_bytes(num_bytes)
    return tensors


def _packed_bytes(fits: list[bool], views: list[Tensor]) -> int:
    return sum(_aligned_bytes((2 if fit else 4) * len(view)) for fit, view in zip(fits, views, strict=True))


def _aligned_bytes(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
