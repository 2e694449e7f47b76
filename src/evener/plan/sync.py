"""How do replicas agree, and what does each way send? One row a strategy: bytes and extra work.

n  ranks    P  parameters    T  tokens that a rank takes in a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from evener.core.collective import Collective
from evener.core.prediction import Job
from evener.core.roster import Kind, Member, Roster, SyncSpec
from evener.core.shape import MLP_EXPANSION, GPTShape
from evener.plan.collectives import ring_all_reduce_bytes, words_bytes

INDEX_BYTES = 4  # of a table's row
GRADIENT_BYTES = 4  # fp32, whatever the arithmetic: weights and gradients are fp32
BUCKET_BYTES = 25 << 20  # DDP's bucket_cap_mb; the first bucket closes at 1 MiB, so that something leaves early
FIRST_BUCKET_BYTES = 1 << 20
# What is coded before it travels: the last bucket hides behind nothing, so all of them are small.
CODED_BUCKET_BYTES = 4 << 20
FRAGMENT_BYTES = 25 << 20  # of weights that DiLoCo agrees upon at a time: what is held beside them is that large
FRAGMENTS = 10  # when streamed, at most: smaller ones are taken up sooner after they were sent, larger ones are fewer
MOST_LAYERS = 512  # that are looked at one by one: of deeper models neighbours count as one
BLOCKS = {8: 256, 4: 64}  # numbers that share a scale, by their bits


Scope = Literal["all", "host", "hosts"]


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
    num: int = 1  # so many alike, one after another
    scope: Scope = "all"  # among all ranks; those of a host; or those that hold the same part, one on each host


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy does in one step beside forward, backward and update."""

    transfers: list[Transfer]  # in their order; each starts when it is ready and the one before has ended
    after: list[Transfer] = []  # not before backward and update are over
    coded_bytes: float = 0.0  # gradients that a rank makes small and large again, in an exchange
    moved_bytes: float = 0.0  # memory traffic of what else it does with them
    every: int = 1  # steps between two exchanges
    row_bytes: float = 0.0  # that a rank sends for each row that its tokens look up, of all tables
    fewer_bytes: float = 0.0  # that a rank sends whose gradients fit into bf16, where those of others do not
    hidden: bool = False  # it runs beside the next steps' computing
    interleaved: bool = False  # computing waits for it layer by layer: neither hides all of the other
    update_share: float = 1.0  # of the parameters that a rank updates itself


@lru_cache(maxsize=64)
def gradients(shape: GPTShape) -> tuple[Gradient, ...]:
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
    norms = (1 + bias) if has_norms else 0
    order.append(("norm", norms, width, 0.0))
    thick = -(-shape.num_layers // MOST_LAYERS)
    for end in range(shape.num_layers, 0, -thick):
        layers = range(max(0, end - thick), end)
        num, tables = len(layers), vocab * sum(map(shape.has_value_embedding, layers))
        order += [  # of a linear layer the bias comes first
            (f"{end - 1} {name}", tables if name == "value embedding" else num * rows, columns, num * flops)
            for name, rows, columns, flops in (
                ("down bias", bias, width, 0.0),
                ("down", width, hidden, 4.0 * width * hidden),
                ("up bias", bias, hidden, 0.0),
                ("up", hidden, width, 4.0 * width * hidden),
                ("norm", norms, width, 0.0),
                ("out bias", bias, width, 0.0),
                ("out", width, width, 4.0 * width * width),
                ("value embedding", vocab, width, 8.0 * width * shape.block_size),
                ("qkv bias", bias, 3 * width, 0.0),
                ("qkv", 3 * width, width, 12.0 * width * width),
                ("norm", norms, width, 0.0),
            )
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
    return tuple(found)


@lru_cache(maxsize=64)
def dense_gradients(shape: GPTShape) -> tuple[Gradient, ...]:
    """Without the tables that are only looked up."""
    return tuple(tensor for tensor in gradients(shape) if not tensor.is_lookup)


def exchanged(shape: GPTShape, sync: SyncSpec) -> tuple[Gradient, ...]:
    """What goes whole and not row by row."""
    return dense_gradients(shape) if sync.sparse else gradients(shape)


def bucket_bytes(roster: Roster) -> int | None:
    """At most so much is in a bucket, what the tensor that fills it has aside; None: as DDP has them by itself."""
    is_plain = roster.sync.kind in ("ddp", "zero1") and not roster.sync.sparse
    return roster.bucket_bytes or (None if is_plain else CODED_BUCKET_BYTES)


def way_of_mean(tokens: Sequence[float]) -> float:
    """How far the mean of replicas goes, of what one process goes, by what each of them learns from.

    A replica's AdamW sees w of the batch. Where noise is most of a gradient, as it soon is, it goes √w as far along
    what is to be learned as with all of it [square-root rule: Malladi et al. 2022], and the mean of replicas Σ w·√w as
    far. 0 where there are no tokens.

    >>> [round(way_of_mean(tokens), 2) for tokens in ([9], [9, 0], [9, 9], [2, 1], [9, 9, 9, 9])]
    [1.0, 1.0, 0.71, 0.74, 0.5]
    """
    of_all = math.fsum(tokens)
    if not of_all:
        return 0.0
    weights = [one / of_all for one in tokens]
    # Single products and roots, which every processor rounds alike, and sums that no Python rounds in between.
    return math.fsum(weight * math.sqrt(weight) for weight in weights)


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


@lru_cache(maxsize=256)
def buckets_of(shape: GPTShape, sparse: bool, most_bytes: int | None) -> list[tuple[int, float]]:
    """Of the tensors that go whole."""
    return buckets(dense_gradients(shape) if sparse else gradients(shape), most_bytes)


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


def exchange(job: Job, roster: Roster) -> Exchange:
    """What the Roster's strategy does in one step of the rank that has most to do.

    >>> from evener.core.roster import Member, parse_sync
    >>> from evener.core.shape import preset_shape
    >>> from evener.core.spec import RunSpec
    >>> job = Job(spec=RunSpec(), shape=preset_shape("d8", 32768))
    >>> own = {"device": "cpu", "dtype": "fp32", "share": 1, "micro_batch": 1}
    >>> members = [Member(rank=rank, host=host, **own) for rank, host in enumerate("ab")]
    >>> for name in ("ddp", "ddp+sparse"):
    ...     found = exchange(job, Roster(members=members, sync=parse_sync(name), backend="gloo"))
    ...     print(round(sum(transfer.size_bytes for transfer in found.transfers) / 1e6, 1))
    503.3
    209.8
    """
    work = STRATEGIES[roster.sync.kind].exchange(job.shape, roster)
    if not roster.sync.sparse:
        return work
    tables, touched = [tensor for tensor in gradients(job.shape) if tensor.is_lookup], job.rows(max(roster.shares))
    sent = [_rows(tensor, touched, roster.world_size) for tensor in tables]
    transfers = sorted([*work.transfers, *sent], key=lambda transfer: transfer.ready)
    by_rows = sum(_row_bytes(tensor) for tensor, one in zip(tables, sent, strict=True) if one.collective == "swap")
    looked_at = 2.0 * GRADIENT_BYTES * sum(table.num_params for table in tables)  # for the largest, and the least
    return msgspec.structs.replace(work, transfers=transfers, row_bytes=(roster.world_size - 1) * by_rows,
                                   moved_bytes=work.moved_bytes + looked_at)  # fmt: skip


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    exchange: Callable[[GPTShape, Roster], Exchange]
    is_exact: bool = True  # up to the rounding of sums in another order


def _none(shape: GPTShape, roster: Roster) -> Exchange:
    return Exchange(transfers=[])


def _all_reduces(found: Sequence[tuple[int, float]], factor: float = 1.0) -> list[Transfer]:
    return [Transfer(collective="all_reduce", size_bytes=factor * size, ready=ready) for size, ready in found]


def _ddp(shape: GPTShape, roster: Roster) -> Exchange:
    return Exchange(transfers=_all_reduces(_buckets(shape, roster)), moved_bytes=_into_buckets_bytes(shape))


def _into_buckets_bytes(shape: GPTShape) -> float:
    """Each gradient is copied into its bucket.

    *Measured*, gradient_as_bucket_view, nothing sent: 14.5 ms for 147 MB that a plain copy takes 11.8 ms for, 3.9 and
    2.6 for 43 MB. Backward makes a new gradient where there is none, and DDP takes it over.
    """
    return 2.0 * GRADIENT_BYTES * shape.num_params()


def _buckets(shape: GPTShape, roster: Roster) -> list[tuple[int, float]]:
    return buckets_of(shape, roster.sync.sparse, bucket_bytes(roster))


def _rows(table: Gradient, touched: float, num_ranks: int) -> Transfer:
    """A table that is only looked up: the rows that were touched, with their numbers. All of it where that is less."""
    size, whole = touched * _row_bytes(table), GRADIENT_BYTES * table.num_params
    if (num_ranks - 1) * size > ring_all_reduce_bytes(whole, num_ranks):
        return Transfer(collective="all_reduce", size_bytes=float(whole), ready=table.ready)
    return _swap(size, table.ready, num_ranks)


def _row_bytes(table: Gradient) -> float:
    return float(GRADIENT_BYTES * table.columns + INDEX_BYTES)


def _swap(sent_bytes: float, ready: float, num_ranks: int) -> Transfer:
    """Each rank sends so many bytes to each other one."""
    return Transfer(collective="swap", size_bytes=num_ranks * sent_bytes, ready=ready)


def _to_all_and_back(sizes: Sequence[tuple[float, float, float]], num_ranks: int) -> list[Transfer]:
    """(bytes there, bytes back, ready) of buckets: two ranks send each other all, more a part to each and back."""
    if num_ranks == 2:
        return [_swap(there, ready, num_ranks) for there, _, ready in sizes]
    return [_swap(size / num_ranks, ready, num_ranks) for there, back, ready in sizes for size in (there, back)]


def _packed(shape: GPTShape, roster: Roster) -> Exchange:
    """Under bf16, with one micro-batch a rank, the gradients of linear layers in two bytes; sums in four."""
    all_fit, sizes, total_saved = all(map(fits_bf16, roster.members)), [], 0.0
    for bucket in bucketed(exchanged(shape, roster.sync), bucket_bytes(roster)):
        size, saved = _bytes_of(bucket), sum(2.0 * tensor.num_params for tensor in bucket if tensor.is_linear)
        sizes.append((size - saved if all_fit else size, size, bucket[-1].ready))
        total_saved += saved
    num_ranks = roster.world_size
    one_saves = total_saved if num_ranks == 2 else total_saved * (num_ranks - 1) / num_ranks
    return Exchange(transfers=_to_all_and_back(sizes, num_ranks), coded_bytes=_coded(shape, roster),
                    moved_bytes=_into_buckets_bytes(shape), fewer_bytes=0.0 if all_fit else one_saves)  # fmt: skip


def fits_bf16(member: Member) -> bool:
    """Are the gradients of its linear layers numbers in bf16? Those of several micro-batches were summed in fp32."""
    return member.dtype == "bf16" and member.num_passes <= 1


def element_bytes(bits: int, block: int) -> float:
    """Of a number in so many bits, with its part of the bf16 scale that a block has.

    >>> element_bytes(16, 1), element_bytes(4, 64)
    (2.0, 0.53125)
    """
    return bits / 8 + (2 / block if bits < 16 else 0.0)


def _narrow(bits: int, block: int) -> Callable[[GPTShape, Roster], Exchange]:
    """Gradients in fewer bits, a bf16 scale for each block, and error feedback."""

    def narrow(shape: GPTShape, roster: Roster) -> Exchange:
        factor = element_bytes(bits, block) / GRADIENT_BYTES
        sizes = [(factor * size, factor * size, ready) for size, ready in _buckets(shape, roster)]
        return Exchange(transfers=_to_all_and_back(sizes, roster.world_size), coded_bytes=_coded(shape, roster),
                        moved_bytes=_into_buckets_bytes(shape))  # fmt: skip

    return narrow


def _powersgd(shape: GPTShape, roster: Roster) -> Exchange:
    """Each matrix of a bucket as a product of two thin ones: the left factors and the vectors, then the right ones.

    These are so small that what Gloo says beside them counts.   [Vogels et al. 2019]
    """
    rank, words = roster.sync.rank, words_bytes(roster.backend, roster.world_size)
    transfers = []
    for bucket in bucketed(exchanged(shape, roster.sync), bucket_bytes(roster)):
        thin = [tensor for tensor in bucket if is_thin(tensor.rows, tensor.columns, rank)]
        rest = sum(tensor.num_params for tensor in bucket) - sum(tensor.num_params for tensor in thin)
        left, right = (GRADIENT_BYTES * rank * sum(side) for side in
                       ([tensor.rows for tensor in thin], [tensor.columns for tensor in thin]))  # fmt: skip
        ready = bucket[-1].ready
        sizes = [left + GRADIENT_BYTES * rest, *([right] if thin else [])]
        transfers += _all_reduces([(size + words, ready) for size in sizes])
    return Exchange(transfers=transfers, coded_bytes=_coded(shape, roster), moved_bytes=_into_buckets_bytes(shape))


def is_thin(rows: int, columns: int, rank: int) -> bool:
    """Are two factors of this rank clearly smaller than the matrix?"""
    return min(rows, columns) > 2 * rank


def _bytes_of(tensors: Sequence[Gradient]) -> float:
    return float(GRADIENT_BYTES * sum(tensor.num_params for tensor in tensors))


def _coded(shape: GPTShape, roster: Roster) -> float:
    return _bytes_of(exchanged(shape, roster.sync))


def _fsdp(shape: GPTShape, roster: Roster) -> Exchange:
    """Every micro-batch gathers each layer's weights in forward and again in backward, whether or not that runs forward
    again; gradients are reduce-scattered once a step.

    [PyTorch FSDP2, reshard_after_forward; *measured*, torch 2.13: 2L + 1 gathers with and without recomputing.] What
    belongs to no layer is gathered once there. It counts twice here: published runs of 7B over TCP took as long as that
    says, and 15 % longer than with once. Gathers and reductions are in the arithmetic's type.
    """
    return _sharded(shape, roster, roster.world_size, "all", [])


def _hsdp(shape: GPTShape, roster: Roster) -> Exchange:
    """FSDP among the ranks of a host, and an all-reduce of what each holds with its like on the other hosts.

    [PyTorch FSDP2 on a mesh of two dimensions]
    """
    of_host = roster.world_size // len(roster.hosts)
    size = _element(roster) * shape.num_params()
    layers = shape.num_layers + 1
    # All ranks of a host reduce their parts at the same time over its connection: as if one reduced the whole.
    between = [Transfer(collective="all_reduce", size_bytes=size / layers, ready=(i + 1) / layers, scope="hosts")
               for i in range(layers)]  # fmt: skip
    return _sharded(shape, roster, of_host, "host", between)


def _sharded(shape: GPTShape, roster: Roster, num_parts: int, scope: Scope, between: Sequence[Transfer]) -> Exchange:
    element, layers = _element(roster), shape.num_layers
    groups = shape.params_by_group()
    root = element * (groups["token embeddings"] + groups["position embeddings"] + groups["head"])
    block = (element * shape.num_params() - root) / layers
    num_passes = max(member.num_passes for member in roster.members)
    transfers = [
        Transfer(collective="all_gather", size_bytes=root, ready=-1.0, num=2 * num_passes, scope=scope),
        Transfer(collective="all_gather", size_bytes=block, ready=-1.0, num=2 * num_passes * layers, scope=scope),
        *(Transfer(collective="reduce_scatter", size_bytes=block, ready=(i + 1) / (layers + 1), scope=scope)
          for i in range(layers)),
        Transfer(collective="reduce_scatter", size_bytes=root, ready=1.0, scope=scope),
        *between,
    ]  # fmt: skip
    return Exchange(transfers=sorted(transfers, key=lambda transfer: transfer.ready), update_share=1 / num_parts,
                    interleaved=True)  # fmt: skip


def _element(roster: Roster) -> float:
    """Bytes of a number as it travels."""
    return 4.0 if any(member.dtype == "fp32" for member in roster.members) else 2.0


def _zero1(shape: GPTShape, roster: Roster) -> Exchange:
    """DDP; then each rank updates its part of the weights and broadcasts it.   [torch, ZeroRedundancyOptimizer]"""
    part = GRADIENT_BYTES * shape.num_params() / roster.world_size
    return Exchange(
        transfers=_all_reduces(_buckets(shape, roster)),
        moved_bytes=_into_buckets_bytes(shape),
        after=[Transfer(collective="broadcast", size_bytes=part, ready=1.0) for _ in range(roster.world_size)],
        update_share=1 / roster.world_size,
    )


def _diloco(shape: GPTShape, roster: Roster) -> Exchange:
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
        coded_bytes=_coded(shape, roster) if sync.bits < 32 else 0.0,
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
    "hsdp": Strategy(exchange=_hsdp),
    "zero1": Strategy(exchange=_zero1),
    "diloco": Strategy(exchange=_diloco, is_exact=False),
}
