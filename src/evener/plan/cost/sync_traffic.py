"""Sync traffic: the collectives, encoded bytes and copied bytes of each sync strategy in one step.

n  ranks    P  parameters    T  tokens of a rank in one step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from evener.core.cluster.collective_results import Collective
from evener.core.model.fine_tuning import ModelShape
from evener.core.model.gradients import GradientTensor, ProgramModel
from evener.core.model.shape import MLP_EXPANSION, GPTShape
from evener.core.run.prediction import Job
from evener.core.run.roster import Member, Roster, SyncKind, SyncSpec, gather_dtype
from evener.plan.cost.collective_cost import protocol_overhead_bytes, ring_all_reduce_bytes

INDEX_BYTES = 4  # index of a row of a table
GRADIENT_BYTES = 4  # fp32 in any arithmetic: weights and gradients are fp32
SUMMED_BYTES = 4  # of an element of sharded gradients on the wire; published runs summed them in bf16
BUCKET_BYTES = 25 << 20  # DDP's bucket_cap_mb; the first bucket closes at 1 MiB, so that sending starts early
FIRST_BUCKET_BYTES = 1 << 20
# Compressed strategies: nothing hides the last bucket, so all of them are small.
COMPRESSED_BUCKET_BYTES = 4 << 20
FRAGMENT_BYTES = 25 << 20  # weights that DiLoCo synchronizes at a time; its temporary buffers are that large
MAX_FRAGMENTS = 10  # of streamed DiLoCo, at most: smaller ones are applied sooner after sending, larger ones are fewer
MAX_LAYERS = 512  # modeled one by one; in deeper models neighbouring layers are merged
QUANTIZATION_BLOCK = {8: 256, 4: 64}  # elements that share a scale, by their bits


CollectiveScope = Literal["all", "host", "hosts"]


class CollectiveCall(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a step."""

    collective: Collective
    size_bytes: float  # of the whole buffer
    ready: float  # fraction of backward that is done when it may start; negative: at the start of forward
    num: int = 1  # number of identical calls, one after another
    # all ranks; the ranks of a host; or one rank of each host, those with the same shard
    scope: CollectiveScope = "all"


class SyncWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a sync strategy in one step, besides forward, backward and update."""

    transfers: list[CollectiveCall]  # in order; each starts when it is ready and the previous one has ended
    after_update: list[CollectiveCall] = []  # after backward and update
    encoded_bytes: float = 0.0  # gradients that a rank encodes and decodes in an exchange
    copied_bytes: float = 0.0  # memory traffic of all other work on gradients
    every: int = 1  # steps between two exchanges
    row_bytes: float = 0.0  # bytes that a rank sends for each row that its tokens look up, over all tables
    bf16_saved_bytes: float = 0.0  # saved by a rank whose gradients fit into bf16, where those of others do not
    is_hidden: bool = False  # the exchange overlaps the next steps' computation
    is_interleaved: bool = False  # computation waits for communication layer by layer: neither hides all of the other
    update_fraction: float = 1.0  # fraction of the parameters that a rank updates itself


@lru_cache(maxsize=64)
def gradient_tensors(shape: ModelShape) -> tuple[GradientTensor, ...]:
    """Return all gradient tensors in the order in which backward completes them: head, last block … first block,
    embeddings; those of a pretrained model in the order of its files, those of a user's program as they were measured.

    A tensor is ready when the FLOPs before it are done: in backward a matrix of N parameters costs 4·N FLOPs a token,
    and the attention of each layer 8·W·T.   [6·N + 12·L·W·T, PaLM, appendix B]

    >>> from evener.core.model.shape import preset_shape
    >>> found = gradient_tensors(preset_shape("char", vocab_size=65))
    >>> sum(g.num_params for g in found) == preset_shape("char", vocab_size=65).num_params(), found[-1].name
    (True, 'token embedding')
    """
    if not isinstance(shape, GPTShape):
        return shape.gradients
    width, vocab, hidden = shape.width, shape.vocab_size, MLP_EXPANSION * shape.width
    bias, has_norms = int(shape.bias), shape.norm == "layernorm"
    order: list[tuple[str, int, int, float]] = []  # name, rows, columns, FLOPs of backward up to it, per token
    order.append(("head", 0 if shape.tied_head else vocab, width, 4.0 * vocab * width))
    norms = (1 + bias) if has_norms else 0
    order.append(("norm", norms, width, 0.0))
    group_size = -(-shape.num_layers // MAX_LAYERS)
    for end in range(shape.num_layers, 0, -group_size):
        layers = range(max(0, end - group_size), end)
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
    tensors, done = [], 0.0
    for name, rows, columns, flops in order:
        done += flops
        if rows:
            is_lookup = name.endswith("value embedding") or (name == "token embedding" and not shape.tied_head)
            is_linear = name == "head" or name.split()[-1] in ("down", "up", "out", "qkv")
            tensors.append(
                GradientTensor(
                    name=name, rows=rows, columns=columns, ready=done / total, is_lookup=is_lookup, is_linear=is_linear
                )
            )
    return tuple(tensors)


@lru_cache(maxsize=64)
def dense_gradient_tensors(shape: ModelShape) -> tuple[GradientTensor, ...]:
    """Return the gradient tensors except those of lookup tables."""
    return tuple(tensor for tensor in gradient_tensors(shape) if not tensor.is_lookup)


def densely_sent_tensors(shape: ModelShape, sync: SyncSpec) -> tuple[GradientTensor, ...]:
    """Return the gradient tensors that are sent whole and not row by row."""
    return dense_gradient_tensors(shape) if sync.sparse else gradient_tensors(shape)


def bucket_bytes(roster: Roster) -> int | None:
    """Return the size at which a bucket closes; None for DDP's default sizes. The last tensor may exceed it."""
    is_plain = roster.sync.kind in ("ddp", "zero1") and not roster.sync.sparse
    return roster.bucket_bytes or (None if is_plain else COMPRESSED_BUCKET_BYTES)


def planned_bucket_bytes(shape: ModelShape, roster: Roster) -> int | None:
    """Return the same for a model: in a user's program DDP has its default sizes, whatever the strategy."""
    return None if isinstance(shape, ProgramModel) else bucket_bytes(roster)


def averaging_efficiency(tokens: Sequence[float]) -> float:
    """Return the progress of averaged replicas relative to one process, from the tokens of each replica.

    AdamW of a replica sees a fraction w of the batch. Once noise dominates the gradient, as it soon does, the replica
    progresses √w as far as with the whole batch [square-root rule: Malladi et al. 2022], and the mean of the replicas
    Σ w·√w as far. 0 where there are no tokens.

    >>> [round(averaging_efficiency(tokens), 2) for tokens in ([9], [9, 0], [9, 9], [2, 1], [9, 9, 9, 9])]
    [1.0, 1.0, 0.71, 0.74, 0.5]
    """
    total = math.fsum(tokens)
    if not total:
        return 0.0
    weights = [count / total for count in tokens]
    # Only products, square roots and fsum: they round identically on every processor and Python.
    return math.fsum(weight * math.sqrt(weight) for weight in weights)


def fragment_bytes(sync: SyncSpec, num_bytes: int) -> int:
    """Return the size at which a DiLoCo fragment of `num_bytes` of weights closes; its last tensor may exceed it."""
    return -(-num_bytes // min(MAX_FRAGMENTS, sync.every)) if sync.streamed else FRAGMENT_BYTES


def bucket_sizes(tensors: Sequence[GradientTensor], max_bytes: int | None = None) -> list[tuple[int, float]]:
    """Return DDP's buckets as (bytes, fraction of backward after which it is complete).

    A bucket closes with the tensor that fills it.   [torch, reducer.cpp]

    >>> from evener.core.model.shape import preset_shape
    >>> [round(size / 1e6, 1) for size, _ in bucket_sizes(gradient_tensors(preset_shape("char", vocab_size=65)))]
    [2.4, 28.3, 12.3]
    """
    return [(GRADIENT_BYTES * sum(tensor.num_params for tensor in bucket), bucket[-1].ready)
            for bucket in assign_buckets(tensors, max_bytes)]  # fmt: skip


@lru_cache(maxsize=256)
def dense_bucket_sizes(shape: ModelShape, sparse: bool, max_bytes: int | None) -> list[tuple[int, float]]:
    """Return the `bucket_sizes` of all tensors that are sent whole: with `sparse`, those that are no lookup tables."""
    return bucket_sizes(dense_gradient_tensors(shape) if sparse else gradient_tensors(shape), max_bytes)


def assign_buckets(tensors: Sequence[GradientTensor], max_bytes: int | None = None) -> list[list[GradientTensor]]:
    """Return the tensors of each of DDP's buckets."""
    result: list[list[GradientTensor]] = []
    size, limit = 0, max_bytes or FIRST_BUCKET_BYTES
    for tensor in tensors:
        if size == 0:
            result.append([])
        result[-1].append(tensor)
        size += GRADIENT_BYTES * tensor.num_params
        if size >= limit:
            size, limit = 0, max_bytes or BUCKET_BYTES
    return result


def sync_workload(job: Job, roster: Roster) -> SyncWorkload:
    """Return the work of the Roster's strategy in one step of the busiest rank.

    >>> from evener.core.run.roster import Member, parse_sync
    >>> from evener.core.model.shape import preset_shape
    >>> from evener.core.run.run_spec import RunSpec
    >>> job = Job(spec=RunSpec(), shape=preset_shape("d8", 32768))
    >>> own = {"device": "cpu", "dtype": "fp32", "share": 1, "micro_batch": 1}
    >>> members = [Member(rank=rank, host=host, **own) for rank, host in enumerate("ab")]
    >>> for name in ("ddp", "ddp+sparse"):
    ...     found = sync_workload(job, Roster(members=members, sync=parse_sync(name), backend="gloo"))
    ...     print(round(sum(transfer.size_bytes for transfer in found.transfers) / 1e6, 1))
    503.3
    209.8
    """
    work = STRATEGY_TRAFFIC[roster.sync.kind](job.shape, roster)
    if not roster.sync.sparse:
        return work
    tables = [tensor for tensor in gradient_tensors(job.shape) if tensor.is_lookup]
    touched = job.embedding_rows(max(roster.shares))
    sent = [_sparse_table_call(tensor, touched, roster.world_size) for tensor in tables]
    transfers = sorted([*work.transfers, *sent], key=lambda transfer: transfer.ready)
    row_bytes = sum(_row_bytes(tensor) for tensor, call in zip(tables, sent, strict=True) if call.collective == "swap")
    scan_bytes = 2.0 * GRADIENT_BYTES * sum(table.num_params for table in tables)  # a scan for the maximum and minimum
    return msgspec.structs.replace(work, transfers=transfers, row_bytes=(roster.world_size - 1) * row_bytes,
                                   copied_bytes=work.copied_bytes + scan_bytes)  # fmt: skip


def _none(shape: ModelShape, roster: Roster) -> SyncWorkload:
    return SyncWorkload(transfers=[])


def _all_reduces(sizes: Sequence[tuple[int, float]], factor: float = 1.0) -> list[CollectiveCall]:
    return [CollectiveCall(collective="all_reduce", size_bytes=factor * size, ready=ready) for size, ready in sizes]


def _ddp(shape: ModelShape, roster: Roster) -> SyncWorkload:
    if isinstance(shape, ProgramModel) and shape.collectives:
        calls = [
            CollectiveCall(collective=one.collective, size_bytes=one.size_bytes, ready=1.0) for one in shape.collectives
        ]
        return SyncWorkload(transfers=calls)
    return SyncWorkload(
        transfers=_all_reduces(_roster_bucket_sizes(shape, roster)), copied_bytes=_bucket_copy_bytes(shape)
    )


def _bucket_copy_bytes(shape: ModelShape) -> float:
    """Return the memory traffic of copying each gradient into its bucket.

    *Measured*, gradient_as_bucket_view, nothing sent: 14.5 ms for 147 MB that a plain copy takes 11.8 ms for, 3.9 and
    2.6 for 43 MB. Backward allocates a new gradient where there is none, and DDP copies it.
    """
    return 2.0 * GRADIENT_BYTES * shape.num_params()


def _roster_bucket_sizes(shape: ModelShape, roster: Roster) -> list[tuple[int, float]]:
    return dense_bucket_sizes(shape, roster.sync.sparse, planned_bucket_bytes(shape, roster))


def _sparse_table_call(table: GradientTensor, touched: float, num_ranks: int) -> CollectiveCall:
    """Return the exchange of a lookup table: the touched rows and their indices, or the whole table if that is less."""
    size, whole = touched * _row_bytes(table), GRADIENT_BYTES * table.num_params
    if (num_ranks - 1) * size > ring_all_reduce_bytes(whole, num_ranks):
        return CollectiveCall(collective="all_reduce", size_bytes=float(whole), ready=table.ready)
    return _pairwise_exchange(size, table.ready, num_ranks)


def _row_bytes(table: GradientTensor) -> float:
    return float(GRADIENT_BYTES * table.columns + INDEX_BYTES)


def _pairwise_exchange(sent_bytes: float, ready: float, num_ranks: int) -> CollectiveCall:
    """Return a pairwise exchange in which each rank sends `sent_bytes` to every other one."""
    return CollectiveCall(collective="swap", size_bytes=num_ranks * sent_bytes, ready=ready)


def _pairwise_all_reduces(sizes: Sequence[tuple[float, float, float]], num_ranks: int) -> list[CollectiveCall]:
    """Return the pairwise exchanges that all-reduce buckets.

    `sizes` are the bytes of each bucket before and after summation, and the fraction of backward when it is complete.
    Two ranks send each other the whole bucket; more ranks scatter parts of it and gather the sums.
    """
    if num_ranks == 2:
        return [_pairwise_exchange(parts, ready, num_ranks) for parts, _, ready in sizes]
    return [
        _pairwise_exchange(size / num_ranks, ready, num_ranks) for parts, sums, ready in sizes for size in (parts, sums)
    ]


def _packed(shape: ModelShape, roster: Roster) -> SyncWorkload:
    """Return the work of "packed": ranks that compute in bf16 with one micro-batch send gradients of linear layers in
    bf16. All else is sent in fp32, sums too.
    """
    all_fit, sizes, total_saved = all(map(gradients_fit_bf16, roster.members)), [], 0.0
    for bucket in assign_buckets(densely_sent_tensors(shape, roster.sync), planned_bucket_bytes(shape, roster)):
        size = _gradient_bytes(bucket)
        saved_bytes = sum(2.0 * tensor.num_params for tensor in bucket if tensor.is_linear)
        sizes.append((size - saved_bytes if all_fit else size, size, bucket[-1].ready))
        total_saved += saved_bytes
    num_ranks = roster.world_size
    saved_per_rank = total_saved if num_ranks == 2 else total_saved * (num_ranks - 1) / num_ranks
    return SyncWorkload(
        transfers=_pairwise_all_reduces(sizes, num_ranks),
        encoded_bytes=_encoded_gradient_bytes(shape, roster),
        copied_bytes=_bucket_copy_bytes(shape),
        bf16_saved_bytes=0.0 if all_fit else saved_per_rank,
    )


def gradients_fit_bf16(member: Member) -> bool:
    """Return whether gradients of linear layers are exact in bf16; those of several micro-batches are fp32 sums."""
    return member.dtype == "bf16" and member.num_micro_batches <= 1


def element_bytes(bits: int, block: int) -> float:
    """Return the bytes of an element of so many bits, including its part of the bf16 scale of a block.

    >>> element_bytes(16, 1), element_bytes(4, 64)
    (2.0, 0.53125)
    """
    return bits / 8 + (2 / block if bits < 16 else 0.0)


def _quantized(bits: int, block: int) -> Callable[[ModelShape, Roster], SyncWorkload]:
    """Return a function for the work of gradients sent in `bits` bits with error feedback.

    Below 16 bits, each `block` of elements has a bf16 scale.
    """

    def narrow(shape: ModelShape, roster: Roster) -> SyncWorkload:
        factor = element_bytes(bits, block) / GRADIENT_BYTES
        sizes = [(factor * size, factor * size, ready) for size, ready in _roster_bucket_sizes(shape, roster)]
        return SyncWorkload(
            transfers=_pairwise_all_reduces(sizes, roster.world_size),
            encoded_bytes=_encoded_gradient_bytes(shape, roster),
            copied_bytes=_bucket_copy_bytes(shape),
        )

    return narrow


def _powersgd(shape: ModelShape, roster: Roster) -> SyncWorkload:
    """Return the work of PowerSGD, which sends each matrix of a bucket as two low-rank factors.

    First it sends a bucket's left factors and vectors, then the right factors. These are so small that Gloo's protocol
    overhead matters.   [Vogels et al. 2019]
    """
    rank, overhead_bytes = roster.sync.rank, protocol_overhead_bytes(roster.backend, roster.world_size)
    transfers = []
    for bucket in assign_buckets(densely_sent_tensors(shape, roster.sync), planned_bucket_bytes(shape, roster)):
        low_rank = [tensor for tensor in bucket if is_low_rank_smaller(tensor.rows, tensor.columns, rank)]
        rest = sum(tensor.num_params for tensor in bucket) - sum(tensor.num_params for tensor in low_rank)
        left, right = (GRADIENT_BYTES * rank * sum(side) for side in
                       ([tensor.rows for tensor in low_rank], [tensor.columns for tensor in low_rank]))  # fmt: skip
        ready = bucket[-1].ready
        sizes = [left + GRADIENT_BYTES * rest, *([right] if low_rank else [])]
        transfers += _all_reduces([(size + overhead_bytes, ready) for size in sizes])
    return SyncWorkload(
        transfers=transfers,
        encoded_bytes=_encoded_gradient_bytes(shape, roster),
        copied_bytes=_bucket_copy_bytes(shape),
    )


def is_low_rank_smaller(rows: int, columns: int, rank: int) -> bool:
    """Return whether two factors of this rank are clearly smaller than the matrix."""
    return min(rows, columns) > 2 * rank


def _gradient_bytes(tensors: Sequence[GradientTensor]) -> float:
    return float(GRADIENT_BYTES * sum(tensor.num_params for tensor in tensors))


def _encoded_gradient_bytes(shape: ModelShape, roster: Roster) -> float:
    return _gradient_bytes(densely_sent_tensors(shape, roster.sync))


def _fsdp(shape: ModelShape, roster: Roster) -> SyncWorkload:
    """Return the work of FSDP, which gathers each layer's weights in forward and in backward of every micro-batch, with
    or without recomputation, and reduce-scatters gradients once a step.

    [PyTorch FSDP2, reshard_after_forward; *measured*, torch 2.13: 2L + 1 gathers with and without recomputing.] FSDP2
    gathers the parameters outside the layers once. On NCCL they count twice here: published runs of 7B over TCP took as
    long as that predicts, 15 % longer than with once.
    """
    passes = roster.num_passes(0, roster.shares)
    root_gathers = passes if roster.backend == "gloo" else 2 * passes
    return _sharded(shape, roster, roster.world_size, "all", root_gathers, 2 * passes)


def _hsdp(shape: ModelShape, roster: Roster) -> SyncWorkload:
    """Return the work of HSDP, which shards among the ranks of a host and all-reduces each shard across hosts.

    [PyTorch FSDP2 on a 2D device mesh]
    """
    assert isinstance(shape, GPTShape), "the layers of a program are not known"
    ranks_per_host = roster.world_size // len(roster.hosts)
    size = SUMMED_BYTES * shape.num_params()
    layers, passes = shape.num_layers + 1, roster.num_passes(0, roster.shares)
    # All ranks of a host reduce their shards at the same time over its network link: as if one reduced the whole.
    between = [CollectiveCall(collective="all_reduce", size_bytes=size / layers, ready=(i + 1) / layers, scope="hosts")
               for i in range(layers)]  # fmt: skip
    root_gathers = passes if roster.backend == "gloo" else 2 * passes
    return _sharded(shape, roster, ranks_per_host, "host", root_gathers, 2 * passes, between)


def _zero1(shape: ModelShape, roster: Roster) -> SyncWorkload:
    """Return the work of ZeRO-1: each rank updates its part of the weights, which are gathered once a step, and
    gradients are reduce-scattered.   [Rajbhandari et al. 2020; PyTorch FSDP2, reshard_after_forward=False]
    """
    return _sharded(shape, roster, roster.world_size, "all", 1, 1)


def _sharded(
    shape: ModelShape,
    roster: Roster,
    num_parts: int,
    scope: CollectiveScope,
    root_gathers: int,
    block_gathers: int,
    between: Sequence[CollectiveCall] = (),
) -> SyncWorkload:
    """Return the work of gathering the root so many times and each block so many times, and of reducing gradients.

    On Gloo both are exchanged in pairs (worker/sync/pairwise.py).
    """
    assert isinstance(shape, GPTShape), "the layers of a program are not known"
    layers, groups = shape.num_layers, shape.params_by_group()
    root = groups["token embeddings"] + groups["position embeddings"] + groups["head"]
    block = (shape.num_params() - root) / layers
    gathered = 2 if gather_dtype(roster) == "bf16" else GRADIENT_BYTES
    is_gloo = roster.backend == "gloo"
    gather: Collective = "swap" if is_gloo else "all_gather"
    reduce: Collective = "swap" if is_gloo else "reduce_scatter"

    def call(collective: Collective, size: float, ready: float, num: int = 1) -> CollectiveCall:
        return CollectiveCall(collective=collective, size_bytes=size, ready=ready, num=num, scope=scope)

    transfers = [
        call(gather, gathered * root, -1.0, root_gathers),
        call(gather, gathered * block, -1.0, block_gathers * layers),
        *(call(reduce, SUMMED_BYTES * block, (i + 1) / (layers + 1)) for i in range(layers)),
        call(reduce, SUMMED_BYTES * root, 1.0),
        *between,
    ]
    gathered_elements = root_gathers * root + block_gathers * layers * block
    copied = 2.0 * (gathered * gathered_elements + SUMMED_BYTES * shape.num_params())  # out of and into its buffers
    return SyncWorkload(transfers=sorted(transfers, key=lambda transfer: transfer.ready), update_fraction=1 / num_parts,
                    copied_bytes=copied if is_gloo else 0.0, is_interleaved=True)  # fmt: skip


def _diloco(shape: ModelShape, roster: Roster) -> SyncWorkload:
    """Return the work of DiLoCo, which exchanges weight differences after H local steps.

    Differences in fp32 are all-reduced; in fewer bits they are quantized and exchanged pairwise as gradients are.
    [Douillard et al. 2023; streamed: 2025]
    """
    sync, num_params = roster.sync, shape.num_params()
    if sync.bits == 32:
        transfers = _all_reduces([(GRADIENT_BYTES * num_params, 1.0)])
    else:
        size = num_params * element_bytes(sync.bits, QUANTIZATION_BLOCK[sync.bits])
        transfers = _pairwise_all_reduces([(size, size, 1.0)], roster.world_size)
    return SyncWorkload(
        transfers=transfers,
        encoded_bytes=_encoded_gradient_bytes(shape, roster) if sync.bits < 32 else 0.0,
        copied_bytes=num_params * GRADIENT_BYTES * 24.0,  # a dozen operations, each of which reads and writes
        every=sync.every,
        is_hidden=sync.streamed,
    )


STRATEGY_TRAFFIC: dict[SyncKind, Callable[[ModelShape, Roster], SyncWorkload]] = {
    "none": _none,
    "ddp": _ddp,
    "packed": _packed,
    "bf16": _quantized(16, 1),
    "int8": _quantized(8, QUANTIZATION_BLOCK[8]),
    "int4": _quantized(4, QUANTIZATION_BLOCK[4]),
    "powersgd": _powersgd,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "zero1": _zero1,
    "diloco": _diloco,
}
