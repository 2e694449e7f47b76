"""Exchange a different tensor with every other rank: a pairwise all-to-all, and collectives made of it.

It starts point-to-point messages with all ranks at once. With Gloo these fill a link in both directions, whereas Gloo's
all_gather and all_to_all hardly send while they receive. *Measured*, 40 MB each way over 1 Gbit/s:

    this                                336 ms    16 ms of CPU time
    all_gather                          573 ms    57 ms
    fp32 all-reduce, which also adds    348 ms    23 ms

Gloo's reduce-scatter is an all-reduce, of which each rank keeps its part: it sends twice as much as is needed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from evener.worker.rank.comm_thread import CommThread
from evener.worker.sync import RankGroup

if TYPE_CHECKING:
    from evener.worker.sync.codecs import Codec

FP32_LOW_HALF = 0xFFFF  # the half of an fp32 number that bf16 drops
PIECE_NUMEL = 1 << 16  # numbers of a reduce-scatter that are sent as bf16 or as fp32 together


def pairwise_all_to_all(group: RankGroup, outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> int:
    """Send outgoing[peer] to every other rank and fill incoming[peer] with what that rank sends; return the bytes sent.

    All ranks call it together; tensors are contiguous, None and empty tensors are skipped. Gloo sends from host memory
    only, so a GPU's tensors are staged through it.
    """
    staged, operations, received = is_staged_through_host(group), [], []
    for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing)):
        for peer, tensor in enumerate(tensors):
            if peer == group.rank or tensor is None or not tensor.numel():
                continue
            buffer = tensor
            if staged and operation is dist.irecv:
                buffer = torch.empty_like(tensor, device="cpu")
                received.append((tensor, buffer))
            elif staged:
                buffer = tensor.cpu()
            operations.append(dist.P2POp(operation, buffer, group=group.gradient_group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for tensor, host_copy in received:
        tensor.copy_(host_copy)
    return sum(tensor.nbytes for peer, tensor in enumerate(outgoing) if tensor is not None and peer != group.rank)


def is_staged_through_host(group: RankGroup) -> bool:
    """Return whether this rank's tensors must be staged through host memory."""
    return group.backend == "gloo" and group.device.type == "cuda"


class PairwiseCollectives:
    """Reduce-scatters and all-gathers of tensors on the CPU, in the order of the calls, on a thread of their own.

    All ranks call the same ones in the same order. A codec makes reduce-scatters of fp32 within an optimizer's step
    lossy: what encoding lost is added to the numbers of the same call in its next step (error feedback). Calls are told
    apart by their order within the step.

    With `packs`, other reduce-scatters of fp32 are lossless in fewer bytes: pieces of PIECE_NUMEL numbers, all of which
    fit in bf16, travel as bf16. So do the gradients of FSDP2 that are computed in bf16 and reduced in fp32.
    """

    def __init__(self, group: RankGroup, codec: Codec | None = None, *, packs: bool = False) -> None:
        self._group, self._codec, self._packs = group, codec, packs
        self._thread = CommThread(group.device)
        self._updates: list[tuple[object, Iterator[int]]] = []  # optimizers whose steps are under way, numbers of calls
        # of each optimizer, for each call in its step what no rank has been sent yet
        self._residuals: weakref.WeakKeyDictionary[object, dict[int, list[Tensor]]] = weakref.WeakKeyDictionary()

    def begin_update(self, optimizer: object) -> None:
        """Begin a step of an optimizer."""
        self._updates = [update for update in self._updates if update[0] is not optimizer]  # one that has raised
        self._updates.append((optimizer, itertools.count()))

    def end_update(self, optimizer: object) -> None:
        """End a step of an optimizer, and any within it that raised."""
        while self._updates and self._updates.pop()[0] is not optimizer:
            pass

    def reduce_scatter(self, parts: Sequence[Tensor], output: Tensor, *, is_mean: bool) -> tuple[Future[None], int]:
        """Sum parts[rank] over all ranks, in fp32 at least, into `output`; return (a future, the bytes sent).

        `parts`: one for each rank, of the size of `output`; they are read until the future is done.
        """
        flat, rank = [part.detach().reshape(-1) for part in parts], self._group.rank
        is_fp32 = output.dtype == torch.float32
        exchange: Callable[[], Tensor]
        if is_fp32 and self._codec is not None and self._updates:
            residuals = self._take_residuals(flat, self._codec)
            sent_bytes = (len(flat) - 1) * self._codec.payload_bytes(len(residuals[0]))
            exchange = functools.partial(self._exchange_encoded, flat, residuals, self._codec)
        elif is_fp32 and self._packs and output.numel() >= PIECE_NUMEL:
            fits = [pieces_in_bf16(part) for part in flat]
            packed_bytes = [fit.nbytes + _packed_bytes(fit, output.numel()) for fit in fits]
            sent_bytes = sum(packed_bytes) - packed_bytes[rank]
            exchange = functools.partial(self._exchange_packed, flat, fits)
        else:
            sent_bytes = (len(flat) - 1) * flat[0].nbytes
            exchange = functools.partial(self._exchange, flat)

        def job() -> None:
            total = exchange()
            if is_mean:
                total.div_(len(flat))
            with torch.inference_mode(output.is_inference()):
                output.copy_(total.view_as(output))

        return self.submit(job, output.nbytes * len(flat), sent_bytes), sent_bytes

    def all_gather(self, part: Tensor, outputs: Sequence[Tensor]) -> tuple[Future[None], int]:
        """Send `part` to all ranks and fill `outputs`, contiguous and one for each; return as `reduce_scatter`."""
        rank, own = self._group.rank, part.detach().contiguous()
        received = [output.detach() for output in outputs]

        def job() -> None:
            pairwise_all_to_all(self._group, [own] * len(received), received)
            if received[rank].data_ptr() != own.data_ptr():
                with torch.inference_mode(received[rank].is_inference()):
                    received[rank].copy_(own.view_as(received[rank]))

        sent_bytes = (len(received) - 1) * own.nbytes
        return self.submit(job, own.nbytes * len(received), sent_bytes), sent_bytes

    def submit(self, job: Callable[[], None], num_bytes: int, sent_bytes: int) -> Future[None]:
        """Run a collective of `num_bytes` over all ranks, of which this rank sends `sent_bytes`, after earlier ones."""
        return self._thread.submit(job)

    def _take_residuals(self, flat: Sequence[Tensor], codec: Codec) -> list[Tensor]:
        """Return what earlier calls at this place of a step have not sent yet: zeros if there was none of this size."""
        (optimizer, numbers), size = self._updates[-1], _padded(flat[0].numel(), codec)
        of_optimizer = self._residuals.setdefault(optimizer, {})
        number = next(numbers)
        if number not in of_optimizer or len(of_optimizer[number][0]) != size:
            with torch.inference_mode(False):
                of_optimizer[number] = [torch.zeros(size) for _ in flat]
        return of_optimizer[number]

    def _exchange(self, flat: Sequence[Tensor]) -> Tensor:
        """Return the sum of all ranks' tensors for this one, added in the order of the ranks."""
        received = [torch.empty_like(part) for part in flat]
        pairwise_all_to_all(self._group, [part.contiguous() for part in flat], received)
        received[self._group.rank] = flat[self._group.rank]
        return _sum_in_order(received)

    def _exchange_packed(self, flat: Sequence[Tensor], fits: Sequence[Tensor]) -> Tensor:
        """Return what `_exchange` does, to the bit; `fits`: of each part, which of its pieces fit in bf16."""
        rank, num = self._group.rank, flat[0].numel()
        received_fits = [torch.empty_like(fit) for fit in fits]
        pairwise_all_to_all(self._group, fits, received_fits)
        payloads = [
            None if peer == rank else _pack(part.contiguous(), fit)
            for peer, (part, fit) in enumerate(zip(flat, fits, strict=True))
        ]
        incoming = [
            torch.empty(0 if peer == rank else _packed_bytes(fit, num), dtype=torch.uint8)
            for peer, fit in enumerate(received_fits)
        ]
        pairwise_all_to_all(self._group, payloads, incoming)
        return _sum_in_order([
            flat[rank] if peer == rank else _unpack(payload, fit)
            for peer, (payload, fit) in enumerate(zip(incoming, received_fits, strict=True))
        ])  # fmt: skip

    def _exchange_encoded(self, flat: Sequence[Tensor], residuals: Sequence[Tensor], codec: Codec) -> Tensor:
        """Return the sum of all ranks' tensors for this one, of which others were encoded; update the residuals."""
        rank, num, num_bytes = self._group.rank, flat[0].numel(), codec.payload_bytes(len(residuals[0]))
        outgoing = [torch.empty(num_bytes, dtype=torch.uint8) for _ in flat]
        for peer, (part, residual) in enumerate(zip(flat, residuals, strict=True)):
            if peer != rank:
                residual[:num].add_(part)
                codec.encode(residual, outgoing[peer])
                residual.nan_to_num_(0.0, 0.0, 0.0)  # an overflow is sent once
        received = [torch.empty_like(payload) for payload in outgoing]
        pairwise_all_to_all(self._group, outgoing, received)
        total = torch.zeros_like(residuals[0])
        total[:num].add_(flat[rank])
        for peer, payload in enumerate(received):
            if peer != rank:
                codec.decode_add(payload, total)
        return total[:num]


def _padded(num: int, codec: Codec) -> int:
    """Return `num` rounded up to whole blocks of the codec."""
    return -(-num // codec.block) * codec.block


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order, in fp32 at least."""
    is_half = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if is_half else parts[0].dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total


def pieces_in_bf16(part: Tensor) -> Tensor:
    """Return for each PIECE_NUMEL numbers of an fp32 tensor whether bf16 holds them all exactly, as uint8."""
    return torch.tensor([_fits(piece[:64]) and _fits(piece) for piece in part.split(PIECE_NUMEL)], dtype=torch.uint8)


def _fits(numbers: Tensor) -> bool:
    return not torch.bitwise_and(numbers.view(torch.int32), FP32_LOW_HALF).any()


def _packed_bytes(fit: Tensor, num: int) -> int:
    """Return the bytes of `num` numbers whose pieces fit in bf16 or do not."""
    in_bf16 = int(fit.sum()) * PIECE_NUMEL - (-num % PIECE_NUMEL if fit[-1] else 0)
    return 4 * num - 2 * in_bf16


def _pack(part: Tensor, fit: Tensor) -> Tensor:
    """Return the bytes of an fp32 tensor, of whose pieces some are sent as bf16."""
    if not fit.any():
        return part.view(torch.uint8)
    return torch.cat([
        (piece.bfloat16() if fits else piece).view(torch.uint8)
        for piece, fits in zip(part.split(PIECE_NUMEL), fit.tolist(), strict=True)
    ])  # fmt: skip


def _unpack(payload: Tensor, fit: Tensor) -> Tensor:
    """Return the fp32 tensor that `_pack` made a payload of."""
    if not fit.any():
        return payload.view(torch.float32)
    sizes = [(2 if fits else 4) * PIECE_NUMEL for fits in fit.tolist()]
    sizes[-1] = len(payload) - sum(sizes[:-1])
    return torch.cat([
        piece.view(torch.bfloat16 if fits else torch.float32).float()
        for piece, fits in zip(payload.split(sizes), fit.tolist(), strict=True)
    ])  # fmt: skip
