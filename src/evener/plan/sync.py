"""How do replicas agree, and what does each way send? One row a strategy: bytes and extra work.

n  ranks    P  parameters    T  tokens that a rank takes in a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from evener.core.collective import Collective
from evener.core.roster import Kind, Roster, SyncSpec
from evener.core.shape import MLP_EXPANSION, GPTShape
from evener.plan.collectives import ring_all_reduce_bytes

INDEX_BYTES = 4  # of a table's row
GRADIENT_BYTES = 4  # fp32, whatever the arithmetic: weights and gradients are fp32
BUCKET_BYTES = 25 << 20  # DDP's bucket_cap_mb; the first bucket closes at 1 MiB, so that something leaves early
FIRST_BUCKET_BYTES = 1 << 20
# What is coded before it travels: the last bucket hides behind nothing, so all of them are small.
CODED_BUCKET_BYTES = 4 << 20
FRAGMENT_BYTES = 25 << 20  # of weights that DiLoCo agrees upon at a time: what is held beside them is that large
FRAGMENTS = 10  # when streamed, at most: smaller ones are taken up sooner after they were sent, larger ones are fewer
BLOCKS = {8: 256, 4: 64}  # numbers that share a scale, by their bits


class Gradient(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor's gradient, in the order in which backward completes them."""

    name: str
    rows: int
    columns: int
    ready: float  # share of backward that is over when it is there
    is_lookup: bool = False  # a table of which a step touches the rows of its tokens alone
    is_linear: bool = False  # the weight of a linear layer, and nothing else

    @property
    def num_params(self) -> int:
        """Elements."""
        return self.rows * self.columns


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a step."""

    collective: Collective
    size_bytes: float  # of the whole buffer
    ready: float  # share of backward that is over when it may start; negative: when computing begins


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy does in one step beside forward, backward and update."""

    transfers: list[Transfer]  # in their order; each starts when it is ready and the one before has ended
    after: list[Transfer] = []  # not before backward and update are over
    coded_bytes: float = 0.0  # gradients that a rank makes small and large again, in an exchange
    moved_bytes: float = 0.0  # memory traffic of what else it does with them
    every: int = 1  # steps between two exchanges
    hidden: bool = False  # it runs beside the next steps' computing
    update_share: float = 1.0  # of the parameters that a rank updates itself


def gradients(shape: GPTShape) -> list[Gradient]:
    """All tensors in the order of backward: head, last block … first block, embeddings.

    A tensor is ready when the arithmetic before it is done: backward costs each matrix the same per parameter, and each
    layer's attention 8·W·T FLOPs a token where a matrix of N parameters costs 4·N.   [6·N + 12·L·W·T, PaLM, appendix B]

    >>> from evener.core.shape import preset_shape
    >>> found = gradients(preset_shape("char", vocab_size=65))
    >>> sum(g.num_params for g in found) == preset_shape("char", vocab_size=65).num_params(), found[-1].name
    (True, 'token embedding')
    """
    width, vocab, hidden = shape.width, shape.vocab_size, MLP_EXPANSION * shape.width
    bias, has_norms = int(shape.bias), shape.norm == "layernorm"
    order: list[tuple[str, int, int, float]] = []  # name, rows, columns, FLOPs of backward up to it, per token
    order.append(("head", 0 if shape.tied_head else vocab, width, 4.0 * vocab * width))
    tables = [vocab * shape.has_value_embedding(layer) for layer in range(shape.num_layers)]
    norm = [("norm", (1 + bias) if has_norms else 0, width, 0.0)]
    order += norm
    for layer in reversed(range(shape.num_layers)):
        order += [  # of a linear layer the bias comes first
            (f"{layer} down bias", bias, width, 0.0),
            (f"{layer} down", width, hidden, 4.0 * width * hidden),
            (f"{layer} up bias", bias, hidden, 0.0),
            (f"{layer} up", hidden, width, 4.0 * width * hidden),
            *norm,
            (f"{layer} out bias", bias, width, 0.0),
            (f"{layer} out", width, width, 4.0 * width * width),
            (f"{layer} value embedding", tables[layer], width, 8.0 * width * shape.block_size),
            (f"{layer} qkv bias", bias, 3 * width, 0.0),
            (f"{layer} qkv", 3 * width, width, 12.0 * width * width),
            *norm,
        ]
    order.append(("position embedding", shape.block_size if shape.positions == "learned" else 0, width, 0.0))
    order.append(("token embedding", vocab, width, 0.0))
    total = math.fsum(flops for *_, flops in order)
    found, done = [], 0.0
    for name, rows, columns, flops in order:
        done += flops
        if rows:
            is_lookup = name.endswith("value embedding") or (name == "token embedding" and not shape.tied_head)
            is_linear = name == "head" or name.split()[-1] in ("down", "up", "out", "qkv")
            found.append(
                Gradient(
                    name=name, rows=rows, columns=columns, ready=done / total, is_lookup=is_lookup, is_linear=is_linear
                )
            )
    return found


def bucket_bytes(roster: Roster) -> int | None:
    """At most so much is in a bucket, what the tensor that fills it has aside; None: as DDP has them by itself."""
    is_plain = roster.sync.kind in ("ddp", "zero1") and not roster.sync.sparse
    return roster.bucket_bytes or (None if is_plain else CODED_BUCKET_BYTES)


def fragment_bytes(sync: SyncSpec, num_bytes: int) -> int:
    """So much of so many bytes of weights is in one of DiLoCo's fragments, what the tensor that fills it has aside."""
    return -(-num_bytes // min(FRAGMENTS, sync.every)) if sync.streamed else FRAGMENT_BYTES


def buckets(tensors: Sequence[Gradient], most_bytes: int | None = None) -> list[tuple[int, float]]:
    """DDP's buckets as (bytes, ready): each closes with the tensor that fills it.   [torch, reducer.cpp]

    >>> from evener.core.shape import preset_shape
    >>> [round(size / 1e6, 1) for size, _ in buckets(gradients(preset_shape("char", vocab_size=65)))]
    [2.4, 28.3, 12.3]
    """
    return [(GRADIENT_BYTES * sum(tensor.num_params for tensor in bucket), bucket[-1].ready)
            for bucket in bucketed(tensors, most_bytes)]  # fmt: skip


def bucketed(tensors: Sequence[Gradient], most_bytes: int | None = None) -> list[list[Gradient]]:
    """The tensors of each of DDP's buckets."""
    found: list[list[Gradient]] = []
    size, limit = 0, most_bytes or FIRST_BUCKET_BYTES
    for tensor in tensors:
        if size == 0:
            found.append([])
        found[-1].append(tensor)
        size += GRADIENT_BYTES * tensor.num_params
        if size >= limit:
            size, limit = 0, most_bytes or BUCKET_BYTES
    return found


def exchange(shape: GPTShape, roster: Roster) -> Exchange:
    """What the Roster's strategy does in one step of the rank that has most to do.

    >>> from evener.core.roster import Member, parse_sync
    >>> from evener.core.shape import preset_shape
    >>> shape, own = preset_shape("d8", 32768), {"device": "cpu", "dtype": "fp32", "share": 1, "micro_batch": 1}
    >>> members = [Member(rank=rank, host=host, **own) for rank, host in enumerate("ab")]
    >>> for name in ("ddp", "ddp+sparse"):
    ...     found = exchange(shape, Roster(members=members, sync=parse_sync(name), backend="gloo"))
    ...     print(round(sum(transfer.size_bytes for transfer in found.transfers) / 1e6, 1))
    503.3
    209.8
    """
    tensors = gradients(shape)
    if not roster.sync.sparse:
        return STRATEGIES[roster.sync.kind].exchange(shape, roster, tensors)
    work = STRATEGIES[roster.sync.kind].exchange(shape, roster, [tensor for tensor in tensors if not tensor.is_lookup])
    rows = [_rows(shape, roster, tensor) for tensor in tensors if tensor.is_lookup]
    transfers = sorted([*work.transfers, *rows], key=lambda transfer: transfer.ready)
    return msgspec.structs.replace(work, transfers=transfers)


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    exchange: Callable[[GPTShape, Roster, Sequence[Gradient]], Exchange]
    is_exact: bool = True  # up to the rounding of sums in another order


def _none(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    return Exchange(transfers=[])


def _all_reduces(found: Sequence[tuple[int, float]], factor: float = 1.0) -> list[Transfer]:
    return [Transfer(collective="all_reduce", size_bytes=factor * size, ready=ready) for size, ready in found]


def _ddp(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    return Exchange(transfers=_all_reduces(buckets(tensors, bucket_bytes(roster))))


def _rows(shape: GPTShape, roster: Roster, tensor: Gradient) -> Transfer:
    """A table that is only looked up: the rows that were touched, at most one a token, with their numbers.

    All of it where that is less to send.
    """
    touched = min(max(roster.shares) * shape.block_size, tensor.rows)
    size, whole = touched * (GRADIENT_BYTES * tensor.columns + INDEX_BYTES), GRADIENT_BYTES * tensor.num_params
    if (roster.world_size - 1) * size > ring_all_reduce_bytes(whole, roster.world_size):
        return Transfer(collective="all_reduce", size_bytes=float(whole), ready=tensor.ready)
    return _swap(float(size), tensor.ready, roster.world_size)


def _swap(sent_bytes: float, ready: float, num_ranks: int) -> Transfer:
    """Each rank sends so many bytes to each other one."""
    return Transfer(collective="swap", size_bytes=num_ranks * sent_bytes, ready=ready)


def _to_all_and_back(sizes: Sequence[tuple[float, float, float]], num_ranks: int) -> list[Transfer]:
    """(bytes there, bytes back, ready) of buckets: two ranks send each other all, more a part to each and back."""
    if num_ranks == 2:
        return [_swap(there, ready, num_ranks) for there, _, ready in sizes]
    return [_swap(size / num_ranks, ready, num_ranks) for there, back, ready in sizes for size in (there, back)]


def _packed(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    """Under bf16, with one micro-batch a rank, the gradients of linear layers in two bytes; sums in four."""
    fits = all(member.dtype == "bf16" and len(member.micro_batches) <= 1 for member in roster.members)
    sizes, narrow = [], {t.ready: 2.0 * t.num_params for t in tensors if fits and t.is_linear}
    begin = -math.inf
    for size, ready in buckets(tensors, bucket_bytes(roster)):
        saved = sum(half for at, half in narrow.items() if begin < at <= ready)
        sizes.append((size - saved, float(size), ready))
        begin = ready
    return Exchange(transfers=_to_all_and_back(sizes, roster.world_size), coded_bytes=_bytes_of(tensors))


def element_bytes(bits: int, block: int) -> float:
    """Of a number in so many bits, with its part of the bf16 scale that a block has.

    >>> element_bytes(16, 1), element_bytes(4, 64)
    (2.0, 0.53125)
    """
    return bits / 8 + (2 / block if bits < 16 else 0.0)


def _narrow(bits: int, block: int) -> Callable[[GPTShape, Roster, Sequence[Gradient]], Exchange]:
    """Gradients in fewer bits, a bf16 scale for each block, and error feedback."""

    def narrow(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
        factor = element_bytes(bits, block) / GRADIENT_BYTES
        sizes = [(factor * size, factor * size, ready) for size, ready in buckets(tensors, bucket_bytes(roster))]
        return Exchange(transfers=_to_all_and_back(sizes, roster.world_size), coded_bytes=_bytes_of(tensors))

    return narrow


def _powersgd(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    """Each matrix of a bucket as a product of two thin ones: the left factors and the vectors, then the right ones.

    [Vogels et al. 2019]
    """
    rank = roster.sync.rank
    transfers = []
    for bucket in bucketed(tensors, bucket_bytes(roster)):
        thin = [tensor for tensor in bucket if is_thin(tensor.rows, tensor.columns, rank)]
        rest = sum(tensor.num_params for tensor in bucket) - sum(tensor.num_params for tensor in thin)
        left, right = (GRADIENT_BYTES * rank * sum(side) for side in
                       ([tensor.rows for tensor in thin], [tensor.columns for tensor in thin]))  # fmt: skip
        ready = bucket[-1].ready
        transfers += _all_reduces([(left + GRADIENT_BYTES * rest, ready), *([(right, ready)] if thin else [])])
    return Exchange(transfers=transfers, coded_bytes=_bytes_of(tensors))


def is_thin(rows: int, columns: int, rank: int) -> bool:
    """Are two factors of this rank clearly smaller than the matrix?"""
    return min(rows, columns) > 2 * rank


def _bytes_of(tensors: Sequence[Gradient]) -> float:
    return float(GRADIENT_BYTES * sum(tensor.num_params for tensor in tensors))


def _fsdp(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    """Every micro-batch gathers each layer's weights in forward and again in backward; gradients are reduce-scattered.

    [PyTorch FSDP2, reshard_after_forward.] Gathers and reductions are in the arithmetic's type.
    """
    element = 4 if any(member.dtype == "fp32" for member in roster.members) else 2
    size = float(element * shape.num_params())
    num_passes = max(len(member.micro_batches) for member in roster.members)
    layers = shape.num_layers + 1
    gathers = [Transfer(collective="all_gather", size_bytes=size / layers, ready=-1.0)
               for _ in range(2 * num_passes * layers)]  # fmt: skip
    scatters = [Transfer(collective="reduce_scatter", size_bytes=size / layers, ready=(i + 1) / layers)
                for i in range(layers)]  # fmt: skip
    return Exchange(transfers=[*gathers, *scatters], update_share=1 / roster.world_size)


def _zero1(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    """DDP; then each rank updates its part of the weights and broadcasts it.   [torch, ZeroRedundancyOptimizer]"""
    part = GRADIENT_BYTES * shape.num_params() / roster.world_size
    return Exchange(
        transfers=_all_reduces(buckets(tensors, bucket_bytes(roster))),
        after=[Transfer(collective="broadcast", size_bytes=part, ready=1.0) for _ in range(roster.world_size)],
        update_share=1 / roster.world_size,
    )


def _diloco(shape: GPTShape, roster: Roster, tensors: Sequence[Gradient]) -> Exchange:
    """H steps alone, then an exchange of what they changed: all-reduced, or in fewer bits as gradients are.

    [Douillard et al. 2023; streamed: 2025]
    """
    sync, num_params = roster.sync, shape.num_params()
    if sync.bits == 32:
        transfers = _all_reduces([(GRADIENT_BYTES * num_params, 1.0)])
    else:
        size = num_params * element_bytes(sync.bits, BLOCKS[sync.bits])
        transfers = _to_all_and_back([(size, size, 1.0)], roster.world_size)
    return Exchange(
        transfers=transfers,
        coded_bytes=_bytes_of(tensors) if sync.bits < 32 else 0.0,
        moved_bytes=num_params * GRADIENT_BYTES * 24.0,  # a dozen operations, each read and written
        every=sync.every,
        hidden=sync.streamed,
    )


STRATEGIES: dict[Kind, Strategy] = {
    "none": Strategy(exchange=_none),
    "ddp": Strategy(exchange=_ddp),
    "packed": Strategy(exchange=_packed),
    "bf16": Strategy(exchange=_narrow(16, 1), is_exact=False),
    "int8": Strategy(exchange=_narrow(8, BLOCKS[8]), is_exact=False),
    "int4": Strategy(exchange=_narrow(4, BLOCKS[4]), is_exact=False),
    "powersgd": Strategy(exchange=_powersgd, is_exact=False),
    "fsdp": Strategy(exchange=_fsdp),
    "zero1": Strategy(exchange=_zero1),
    "diloco": Strategy(exchange=_diloco, is_exact=False),
}
