"""Encode numbers in fewer bytes: bf16, or block-wise int8 and int4.

    bf16   2 bytes a number: its upper half, rounded
    int8   1 byte a number and a scale for every 256 of them
    int4   half a byte a number and a scale for every 64 of them

A codec writes numbers into a payload and leaves the encoding error in their place: the caller adds it to the next
step's numbers (error feedback).   [Seide et al. 2014; Karimireddy et al. 2019]

Decoding uses only conversions, single products and single sums: IEEE 754 gives them the same bits on every machine. The
numbers of a block are not adjacent in memory: a frame of the buffer, 2^18 numbers on every device, is viewed as C
columns of a block each, (BLOCK, C): maxima and products are vector operations over whole rows. A frame fits in a CPU's
cache, a GPU works on many at once, and scratch memory is reused: fresh pages cost more than the arithmetic (43 MB on
one core of an AMD EPYC, int8: 90 ms in plain PyTorch, 8 ms this way).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

FRAME_NUMEL = 1 << 18  # numbers: it determines the payload layout, so it is the same on all devices
# numbers worked on at a time: 1 MiB of fp32 stays in the L2 cache
CHUNK_NUMEL = {"cpu": FRAME_NUMEL, "cuda": 256 * FRAME_NUMEL}
MIN_SCALE = 1e-30  # the least scale: the reciprocal of a smaller one would be infinite
INT4_ZERO_POINT = 8  # -7 … 7 are stored as 1 … 15
SCALE_MARGIN = 1 + 2**-7  # a scale is stored in bf16: rounded down it must still cover the largest number


class ScratchBuffer:
    """A buffer that one thread reuses; it grows to the largest size requested."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype, self._buffer = dtype, torch.empty(0)

    def take(self, num: int, device: torch.device) -> Tensor:
        """Return `num` uninitialized numbers, valid until the next call."""
        if len(self._buffer) < num or self._buffer.device != device:
            self._buffer = torch.empty(num, dtype=self._dtype, device=device)
        return self._buffer[:num]

    def take_like(self, tensor: Tensor) -> Tensor:
        """Return a buffer of the shape of `tensor`, valid until the next call."""
        return self.take(tensor.numel(), tensor.device).view(tensor.shape)


class Codec(Protocol):
    """A codec for fp32 numbers."""

    block: int  # numbers that share a scale; buffers hold a multiple of it
    preserves_norm: bool  # the encoding error is at most a few percent of the norm

    def payload_bytes(self, num: int) -> int:
        """Return the bytes of a payload of `num` numbers, scales included."""

    def encode(self, values: Tensor, payload: Tensor, decoded_out: Tensor | None = None) -> None:
        """Encode fp32 `values` (num,) into the uint8 `payload`; the encoding error stays in `values`.

        `decoded_out` (num,) receives what every receiver decodes, to the bit.
        """

    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        """Decode the payload and add it to fp32 `total` (num,)."""


class Bf16Codec:
    """Round to the nearest bf16."""

    block, preserves_norm = 1, True

    def __init__(self) -> None:
        self._scratch = ScratchBuffer()

    def payload_bytes(self, num: int) -> int:
        return 2 * num

    def encode(self, values: Tensor, payload: Tensor, decoded_out: Tensor | None = None) -> None:
        size = CHUNK_NUMEL[values.device.type]
        decoded_chunks = (
            decoded_out.split(size) if decoded_out is not None else map(self._scratch.take_like, values.split(size))
        )
        for (chunk, coded), decoded in zip(self._chunks(values, payload), decoded_chunks, strict=True):
            coded.copy_(chunk)
            chunk.sub_(decoded.copy_(coded))

    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        for chunk, coded in self._chunks(total, payload):
            chunk.add_(self._scratch.take_like(chunk).copy_(coded))

    @staticmethod
    def _chunks(values: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = CHUNK_NUMEL[values.device.type]
        return zip(values.split(size), payload.view(torch.bfloat16).split(size), strict=True)


class BlockwiseIntCodec:
    """Block-wise quantization: integers from -qmax to qmax, in 8 or 4 bits, times the bf16 scale of their block."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits, self._qmax, self.block = bits, 2 ** (bits - 1) - 1, {8: 256, 4: 64}[bits]
        self.preserves_norm = bits == 8
        self._scratch, self._nibbles = ScratchBuffer(torch.float32), ScratchBuffer(torch.uint8)

    def payload_bytes(self, num: int) -> int:
        return self._code_bytes(num) + 2 * (num // self.block)

    def encode(self, values: Tensor, payload: Tensor, decoded_out: Tensor | None = None) -> None:
        for low, high, coded, scales in self._chunks(values, payload):
            rows = self._as_frames(values[low:high])
            work = torch.abs(rows, out=self._scratch.take_like(rows))
            scales.copy_(work.amax(1).mul_(SCALE_MARGIN / self._qmax))
            scale = scales.float().clamp_min_(MIN_SCALE)[:, None]
            torch.mul(rows, scale.reciprocal(), out=work).round_()
            if decoded_out is None:
                rows.addcmul_(work, scale, value=-1)
            else:
                rows.sub_(torch.mul(work, scale, out=decoded_out[low:high].view(rows.shape)))
            if self._bits == 4:
                half = self.block // 2
                work = work[:, :half].add_(work[:, half:], alpha=16).add_(INT4_ZERO_POINT * 17)
                coded.view(work.shape).copy_(work)
            else:
                coded.view(torch.int8).view(work.shape).copy_(work)

    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        for low, high, coded, scales in self._chunks(total, payload):
            rows = self._as_frames(total[low:high])
            work = self._scratch.take_like(rows)
            if self._bits == 4:
                half = self.block // 2
                packed = coded.view(len(rows), half, -1)
                work[:, :half].copy_(torch.bitwise_and(packed, 15, out=self._nibbles.take_like(packed)))
                work[:, half:].copy_(torch.bitwise_right_shift(packed, 4, out=self._nibbles.take_like(packed)))
                work.sub_(INT4_ZERO_POINT)
            else:
                work.copy_(coded.view(torch.int8).view(rows.shape))
            rows.add_(work.mul_(scales.float().clamp_min_(MIN_SCALE)[:, None]))

    def _code_bytes(self, num: int) -> int:
        return num * self._bits // 8

    def _as_frames(self, values: Tensor) -> Tensor:
        """View as (frames, BLOCK, C): whole frames, or one shorter frame."""
        return values.view(max(1, len(values) // FRAME_NUMEL), self.block, -1)

    def _chunks(self, values: Tensor, payload: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield (begin, end, bytes, scales (frames, C)) of chunks of whole frames, then of the last, shorter frame."""
        num, size = len(values), CHUNK_NUMEL[values.device.type]
        coded, scales = payload[: self._code_bytes(num)], payload[self._code_bytes(num) :].view(torch.bfloat16)
        whole = num // FRAME_NUMEL * FRAME_NUMEL
        for low, high in pairwise([*range(0, whole, size), whole, *([num] if num > whole else [])]):
            yield (
                low,
                high,
                coded[self._code_bytes(low) : self._code_bytes(high)],
                scales[low // self.block : high // self.block].view(max(1, (high - low) // FRAME_NUMEL), -1),
            )
