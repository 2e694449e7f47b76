"""How do numbers travel in fewer bytes, and what is lost on the way?

    bf16   2 bytes a number: its upper half, rounded
    int8   1 byte a number and a scale for every 256 of them
    int4   half a byte a number and a scale for every 64 of them

A code writes numbers into a payload and leaves what it lost in their place: the caller adds that to the next step's
numbers (error feedback).   [Seide et al. 2014; Karimireddy et al. 2019]

Only conversions, single products and single sums decode: IEEE 754 gives them the same bits on every machine. A block's
numbers do not lie side by side: a frame of the buffer, 2^18 numbers wherever it is coded, is seen as rows of blocks,
(BLOCK, C), so that its largest values and its products are vector operations over whole rows. A frame fits in a
processor's cache, a GPU works on many at once, and scratch memory is kept: fresh pages cost more than the arithmetic
(43 MB on one core of an AMD EPYC, int8: 90 ms written plainly, 8 ms so).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

FRAME = 1 << 18  # numbers: part of what travels, so the same on all devices
PIECE = {"cpu": FRAME, "cuda": 256 * FRAME}  # numbers worked on at a time: 1 MiB of fp32 stays in the L2 cache
LEAST = 1e-30  # a smaller scale is none: its reciprocal would be infinite
FOUR_BIT_ZERO = 8  # -7 … 7 are kept as 1 … 15
ABOVE = 1 + 2**-7  # a scale is kept in bf16: rounded down it must still cover the largest number


class Scratch:
    """Memory that one thread uses again and again; it grows to what was asked for most."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype, self._kept = dtype, torch.empty(0)

    def take(self, num: int, device: torch.device) -> Tensor:
        """So many numbers, uninitialized, until the next call."""
        if len(self._kept) < num or self._kept.device != device:
            self._kept = torch.empty(num, dtype=self._dtype, device=device)
        return self._kept[:num]

    def like(self, piece: Tensor) -> Tensor:
        """The same in the shape of `piece`."""
        return self.take(piece.numel(), piece.device).view(piece.shape)


class Code(Protocol):
    """One way to write numbers."""

    block: int  # buffers hold a multiple of so many numbers
    keeps_norm: bool  # what it loses is a few percent of the numbers' length at most

    def num_bytes(self, num: int) -> int:
        """Of the payload of so many numbers, scales included."""

    def encode(self, values: Tensor, payload: Tensor, kept: Tensor | None = None) -> None:
        """Write fp32 `values` (num,) into the uint8 `payload`; what was lost stays in `values`.

        `kept` (num,): what whoever decodes it will have, to the bit.
        """

    def add(self, payload: Tensor, total: Tensor) -> None:
        """Add the payload's numbers to fp32 `total` (num,)."""


class Bf16:
    """The nearest bf16."""

    block, keeps_norm = 1, True

    def __init__(self) -> None:
        self._scratch = Scratch()

    def num_bytes(self, num: int) -> int:
        return 2 * num

    def encode(self, values: Tensor, payload: Tensor, kept: Tensor | None = None) -> None:
        size = PIECE[values.device.type]
        sent = kept.split(size) if kept is not None else map(self._scratch.like, values.split(size))
        for (piece, coded), decoded in zip(self._pieces(values, payload), sent, strict=True):
            coded.copy_(piece)
            piece.sub_(decoded.copy_(coded))

    def add(self, payload: Tensor, total: Tensor) -> None:
        for piece, coded in self._pieces(total, payload):
            piece.add_(self._scratch.like(piece).copy_(coded))

    @staticmethod
    def _pieces(values: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = PIECE[values.device.type]
        return zip(values.split(size), payload.view(torch.bfloat16).split(size), strict=True)


class Scaled:
    """Whole numbers from -largest to largest, in 8 or 4 bits, times their block's scale, a bf16."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits, self._largest, self.block = bits, 2 ** (bits - 1) - 1, {8: 256, 4: 64}[bits]
        self.keeps_norm = bits == 8
        self._scratch, self._halves = Scratch(torch.float32), Scratch(torch.uint8)

    def num_bytes(self, num: int) -> int:
        return self._coded(num) + 2 * (num // self.block)

    def encode(self, values: Tensor, payload: Tensor, kept: Tensor | None = None) -> None:
        for low, high, coded, scales in self._pieces(values, payload):
            rows = self._rows(values[low:high])
            work = torch.abs(rows, out=self._scratch.like(rows))
            scales.copy_(work.amax(1).mul_(ABOVE / self._largest))
            scale = scales.float().clamp_min_(LEAST)[:, None]
            torch.mul(rows, scale.reciprocal(), out=work).round_()
            if kept is None:
                rows.addcmul_(work, scale, value=-1)
            else:
                rows.sub_(torch.mul(work, scale, out=kept[low:high].view(rows.shape)))
            if self._bits == 4:
                half = self.block // 2
                work = work[:, :half].add_(work[:, half:], alpha=16).add_(FOUR_BIT_ZERO * 17)
                coded.view(work.shape).copy_(work)
            else:
                coded.view(torch.int8).view(work.shape).copy_(work)

    def add(self, payload: Tensor, total: Tensor) -> None:
        for low, high, coded, scales in self._pieces(total, payload):
            rows = self._rows(total[low:high])
            work = self._scratch.like(rows)
            if self._bits == 4:
                half = self.block // 2
                two = coded.view(len(rows), half, -1)
                work[:, :half].copy_(torch.bitwise_and(two, 15, out=self._halves.like(two)))
                work[:, half:].copy_(torch.bitwise_right_shift(two, 4, out=self._halves.like(two)))
                work.sub_(FOUR_BIT_ZERO)
            else:
                work.copy_(coded.view(torch.int8).view(rows.shape))
            rows.add_(work.mul_(scales.float().clamp_min_(LEAST)[:, None]))

    def _coded(self, num: int) -> int:
        return num * self._bits // 8

    def _rows(self, values: Tensor) -> Tensor:
        """(frames, BLOCK, C): whole frames, or one that is shorter."""
        return values.view(max(1, len(values) // FRAME), self.block, -1)

    def _pieces(self, values: Tensor, payload: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(begin, end, bytes, scales (frames, C)) of numbers that are whole frames, or the last, shorter one."""
        num, size = len(values), PIECE[values.device.type]
        coded, scales = payload[: self._coded(num)], payload[self._coded(num) :].view(torch.bfloat16)
        whole = num // FRAME * FRAME
        for low, high in pairwise([*range(0, whole, size), whole, *([num] if num > whole else [])]):
            yield (
                low,
                high,
                coded[self._coded(low) : self._coded(high)],
                scales[low // self.block : high // self.block].view(max(1, (high - low) // FRAME), -1),
            )
