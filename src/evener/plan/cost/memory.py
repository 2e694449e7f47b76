"""Peak memory: predict the bytes of a rank at the worst moment of a step, by cause.

    W  bytes of the weights in fp32    N  tokens of a micro-batch    T  positions    C  width    H  heads
    V  vocabulary    e  bytes of an element of the arithmetic: 4 in fp32, 2 in bf16 and fp16

The worst moment is the one with most bytes of gradients and activations together; weights and AdamW's two moments are
there throughout. The candidates are the loss (on a GPU: the end of forward, and the gradient of the logits), backward
through each block, and the last gradient.
Clipping and the fused update allocate nothing of their own (*measured*, torch 2.13: the profiler shows no allocation of
more than a scalar there), neither does writing a checkpoint.

The tensors that autograd saves were read from `torch.autograd.graph.saved_tensors_hooks` over `worker/train/model.py`,
each storage counted once; the moments were read from the profiler's memory events (torch 2.13, CPU, 2026-11-21). On a
GPU nothing of this was measured: there the formulas are an *assumption*. A compiled model keeps less, and its compiler
takes more.
"""

from __future__ import annotations

import math

import msgspec

from evener.core.model.fine_tuning import FineTuning
from evener.core.model.shape import MLP_EXPANSION, GPTShape
from evener.core.run.roster import Roster, gather_dtype
from evener.plan.cost.fine_tuning_memory import LIBRARY_BYTES, activation_bytes, base_bytes, heap_fragmentation
from evener.plan.cost.sync_traffic import (
    QUANTIZATION_BLOCK,
    bucket_sizes,
    dense_bucket_sizes,
    element_bytes,
    fragment_bytes,
    planned_bucket_bytes,
)
from evener.plan.cost.sync_traffic import gradient_tensors as in_their_order

FP32 = 4
# Resident bytes of a process with a minimal model: interpreter, torch, our worker, a process group. CPU: *measured*,
# 331 MB of one rank of tiny; 229 MB of it are there after `import torch`, 77 MB more once a model is built, for which
# torch imports its meta device (torch 2.13 for CPUs, Linux x86-64, 2026-11-21). GPU, its context and kernels: an
# *assumption*; torch.cuda.max_memory_allocated, which a run records there, does not count them.
PROCESS_BYTES = {"cpu": 330_000_000, "cuda": 500_000_000}
# of attention on a CPU with dropout or in bf16, as in evener.worker.train.model
STRIP_ROWS, MAX_BF16_STRIP_POSITIONS = 128, 1024
# of the logits that a CPU holds at once, as in evener.worker.rank.linear_cross_entropy
LOSS_CHUNK_ROWS, LOSS_CHUNK_LOGITS = 512, 1 << 21

BF16_BYTES = 12_000_000  # extra after the first bf16 matmul on a CPU: oneDNN's kernels (*measured*, as above)

# With glibc all blocks of the main thread come from one heap, which keeps freed memory (`disable_malloc_trim` in
# core/cluster/allocator.py), and the allocations of a step do not fit the holes that other sizes left. *Measured*
# (glibc 2.36, 2026-11): with MALLOC_MMAP_THRESHOLD_=131072, which maps and unmaps blocks one by one, the peaks of 16
# runs were the sum of the other causes within 1 %. In the heap, the memory that a step allocates and frees took 0.29 to
# 0.83 of its size more in 14 runs of char, gpt2, d4 and d8, median 0.55. So this is a *fit*, without a theory.
HEAP_FRAGMENTATION = 0.55
# Ranks with sharded weights keep freed memory, too, if the peaks of a host then fill at most half of its memory; else
# they unmap freed blocks (`unmap_freed_blocks`). Half is an *assumption*: the fit may be far off, and a host has other
# use. Of what a step allocates and frees, gathered weights included, fsdp and zero1 took 0.7 to 1.0 more in 5 runs of
# char and gpt2, median 0.8; fsdp 1.9 with 85M parameters and 64 tokens (*measured*, 2026-11-30).
SHARDED_FRAGMENTATION = 0.8
SHARDED_HEAP_FILL = 0.5
# jemalloc fits the tensors of a step into the holes of others: 0.0 to 0.24 in 8 runs of char, gpt2 and a Llama of 31M
# parameters, full and with LoRA, median 0.12 (jemalloc 5.3, *measured*, 2026-12-01).
JEMALLOC_FRAGMENTATION = 0.12
ACTIVATION_PASSES = 4  # bytes of new blocks in forward and backward of a micro-batch / activations: see faulted_bytes


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank at the worst moment of a step, by cause."""

    weights: int
    gradients: int
    optimizer: int  # AdamW's two moments
    activations: int  # tensors saved by autograd, cast copies of weights, logits and their gradient, temporaries
    buckets: int  # buffers of the largest bucket's exchange; gradients themselves are views into DDP's buckets
    sync: int  # of the strategy: error feedback, anchors, gathered layers
    fragmentation: int  # free, but held by the allocator between blocks in use
    process: int  # the process without a model

    @property
    def total(self) -> int:
        """The sum: on a CPU the peak resident set size, on a GPU the memory used."""
        return sum(getattr(self, field) for field in self.__struct_fields__)


def peak_memory(shape: GPTShape | FineTuning, roster: Roster, rank: int, *, recompute: bool = False,
                host_memory_bytes: int | None = None, has_jemalloc: bool = False) -> MemoryBreakdown:  # fmt: skip
    """Return the bytes, by cause, that a rank needs at the worst moment of its largest micro-batch.

    Forward runs with gradients in memory if a step has several micro-batches, or if the strategy keeps them in buckets.
    Where the host's memory is short or not known, ranks with sharded weights unmap freed blocks: no fragmentation.
    They do not where the host has jemalloc, which has little of it.

    >>> from evener.core.run.roster import NO_SYNC, Member
    >>> from evener.core.model.shape import preset_shape
    >>> gpt2 = preset_shape("gpt2", vocab_size=50257, block_size=256)
    >>> alone = Member(rank=0, host="attic", device="cpu", dtype="fp32", share=1, micro_batch=1)
    >>> need = peak_memory(gpt2, Roster(members=[alone], sync=NO_SYNC, backend="none"), 0)
    >>> need.weights, need.optimizer == 2 * need.weights
    (495399936, True)
    """
    sync, num_ranks, max_share = roster.sync, roster.world_size, math.ceil(roster.mean_shares[rank])
    member = msgspec.structs.replace(roster.members[rank], share=max_share)  # of its largest step
    device = "cuda" if member.is_gpu else "cpu"
    weights = FP32 * shape.num_params()
    num_passes = roster.num_passes(rank, roster.shares) if sync.is_sharded else member.num_micro_batches
    sequences = -(-member.share // num_passes) if num_passes else 0
    gradients_held = num_passes > 1 or sync.kind not in ("none", "fsdp", "hsdp", "zero1", "diloco")
    element_bytes, held_weights, libraries = 4 if member.dtype == "fp32" else 2, weights, 0
    gathered_bytes = 2 if gather_dtype(roster) == "bf16" else FP32
    fragmentation = HEAP_FRAGMENTATION
    if isinstance(shape, FineTuning):
        held_weights, libraries = weights + base_bytes(shape, element_bytes), LIBRARY_BYTES
        fragmentation = heap_fragmentation(shape)
        rows = max(LOSS_CHUNK_ROWS, LOSS_CHUNK_LOGITS // shape.model.vocab_size) if device == "cpu" else None
        candidates = activation_bytes(shape, sequences, element_bytes, recompute=recompute, chunk_rows=rows,
                                      gradients_held=gradients_held)  # fmt: skip
        moments = [_MemoryMoment(_gradient_bytes(shape), activations) for activations in candidates]
    else:
        # weights gathered in bf16 need no cast copies
        casts_weights = member.dtype != "fp32" and not (sync.is_sharded and gathered_bytes < FP32)
        micro_batch = _MicroBatchMemory(shape, sequences, element_bytes, device, casts_weights)
        moments = micro_batch.moments(recompute, gradients_held)
    if sync.is_sharded and not gradients_held:  # a block's gradients are scattered as soon as they are complete
        parts = _num_parts(roster)
        moments = [_MemoryMoment(moment.gradients // parts, moment.activations) for moment in moments]
    worst = max(moments, key=_MemoryMoment.total)
    gradients, activations = worst.gradients, worst.activations
    recycled = max(moment.activations for moment in moments) + _gradient_bytes(shape)
    heap_bytes = recycled
    extra = bucket = copies = 0  # of these, saving: copies that a checkpoint of the per-rank state makes
    optimizer = 2 * weights
    largest = max(size for size, _ in dense_bucket_sizes(shape, sync.sparse, planned_bucket_bytes(shape, roster)))
    if sync.kind == "packed":
        bucket = 2 * largest  # send and receive buffers, where no part of it fits into bf16
    elif sync.kind in ("bf16", "int8", "int4"):
        bucket = _codec_buffer_bytes(largest, {"bf16": 16, "int8": 8, "int4": 4}[sync.kind])
        extra = weights + (weights // num_ranks if num_ranks > 2 else 0)  # error feedback, of sums too
        copies = 2 * weights
    elif sync.kind == "powersgd":
        extra = weights + FP32 * sync.rank * sum(rows + columns for rows, columns in _matrix_shapes(shape))
        copies = weights
    elif sync.kind == "diloco":
        fragments = bucket_sizes(in_their_order(shape)[::-1], fragment_bytes(sync, weights))
        fragment = max(size for size, _ in fragments)  # exchanged at a time
        # global weights, outer momentum; the difference exists when gradients and activations are freed
        extra = weights * (1 + sync.has_outer_momentum)
        copies = 3 * weights + extra  # these, the rank's weights and its optimizer state
        if sync.bits < 32:  # error feedback
            copies += 2 * weights
            extra += weights + (weights // num_ranks if num_ranks > 2 else 0) + _codec_buffer_bytes(fragment, sync.bits)
        if sync.streamed:
            extra += 2 * fragment  # a difference in flight, and its weighted copy
    elif sync.is_sharded and isinstance(shape, GPTShape):
        # the last has a table if any has
        root, block = _root_bytes(shape), _block_gradient_bytes(shape, shape.num_layers - 1)
        # Weights gathered: all, and one block on its way; or the root, a block and one ahead. Gradients before they are
        # scattered: the root's; or a block's, too.
        whole = weights + block if sync.kind == "zero1" else root + 2 * block
        extra = whole * gathered_bytes // FP32 + root + (block if sync.kind != "zero1" else 0)
        heap_bytes, fragmentation = recycled + extra, SHARDED_FRAGMENTATION
        held_weights, optimizer = weights // _num_parts(roster), optimizer // _num_parts(roster)
    if sync.sparse and isinstance(shape, GPTShape):
        tables = 1 + shape.num_value_embeddings(shape.num_layers)
        extra += num_ranks * sequences * shape.block_size * FP32 * shape.width * tables  # touched rows of all ranks
    need = MemoryBreakdown(
        weights=held_weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=max(activations, copies),
        buckets=bucket,
        sync=extra,
        fragmentation=int(heap_bytes * (JEMALLOC_FRAGMENTATION if has_jemalloc else fragmentation)) * (device == "cpu"),
        process=PROCESS_BYTES[device] + libraries + (BF16_BYTES if device == "cpu" and member.dtype != "fp32" else 0),
    )
    num_local = sum(other.host == member.host for other in roster.members)
    is_short = num_local * need.total > SHARDED_HEAP_FILL * (host_memory_bytes or 0)
    if sync.is_sharded and is_short and not has_jemalloc:
        return msgspec.structs.replace(need, fragmentation=0)
    return need


def faulted_bytes(shape: GPTShape | FineTuning, roster: Roster, need: MemoryBreakdown) -> float:
    """Return the bytes that a sharded rank maps anew in a step because it unmapped them: 0 where it keeps freed memory.

    Of P bytes of weights a gathering fills 2P, or in bf16 P: what is received, and the weights. A reduction fills 2P,
    gradients and what is sent, and among n ranks (n+1)/n P: what is received, its sum and the part that is kept.
    Activations and temporaries were about 4 times the activations of the worst moment (*fit*, CPU time of char and
    gpt2, 2026-11-30).
    """
    if not roster.sync.is_sharded or need.fragmentation:
        return 0.0
    passes = roster.num_passes(0, roster.shares)
    gathers = (2 * passes if roster.sync.kind != "zero1" else 1) * (0.5 if gather_dtype(roster) == "bf16" else 1)
    parts = _num_parts(roster)
    weights = (2 * gathers + 2 + (parts + 1) / parts) * FP32 * shape.num_params()
    return weights + ACTIVATION_PASSES * passes * need.activations


def _num_parts(roster: Roster) -> int:
    """Return the number of ranks over which weights are sharded."""
    return roster.world_size // len(roster.hosts) if roster.sync.kind == "hsdp" else roster.world_size


def saved_tensor_bytes(
    shape: GPTShape, layer: int, num_tokens: int, element_bytes: int, device: str = "cpu"
) -> list[int]:
    """Return the sizes of the tensors that autograd saves for one block, without cast copies of weights.

    In fp32, bytes per token and unit of width C: both norms save their input (4 each) and their statistics; the matmuls
    save their input (qkv 4, up 4, down 16), attention its q, k, v and output (16), GELU its input (16): 64·C, and H + 4
    numbers.

    >>> from evener.core.model.shape import preset_shape
    >>> tiny = preset_shape("tiny", vocab_size=256)
    >>> sum(saved_tensor_bytes(tiny, 0, 1, 4)) == 4 * (16 * tiny.width + tiny.num_heads + 4)
    True
    """
    N, e, C, H, T = num_tokens, element_bytes, shape.width, shape.num_heads, shape.block_size
    narrow, stream, hidden = e * N * C, FP32 * N * C, e * N * MLP_EXPANSION * C
    statistics = [FP32 * N] * (2 if shape.norm == "layernorm" else 1)
    mask = [] if shape.dropout == 0 else [narrow if device == "cpu" else N * C]
    norms = [stream, *statistics] * 2
    mlp = [narrow, hidden, hidden, *mask]
    attention = [narrow, narrow, *mask]  # inputs of qkv and of out
    if shape.qk_norm:
        attention += [stream, FP32 * N * H] * 2  # in fp32: autocast keeps norms out of bf16
    if device == "cpu" and (shape.dropout or (e < FP32 and T <= MAX_BF16_STRIP_POSITIONS)):
        for start in range(0, T, STRIP_ROWS):  # the weights of each strip; with dropout its mask and their product
            end = min(start + STRIP_ROWS, T)
            attention += [e * N // T * H * (end - start) * end] * (3 if shape.dropout else 1)
        attention += [narrow] * 3  # q, k, v
    else:
        has_own_v = shape.has_value_embedding(layer)  # else v is a view, and keeps the storage of q, k, v alive
        changed = shape.positions == "rotary" or shape.qk_norm
        attention += [narrow if has_own_v else 3 * narrow, *([narrow] * 2 if changed else [2 * narrow] * has_own_v)]
        attention.append(FP32 * N * H)  # the sums of softmax
    return norms + attention + mlp


class _MemoryMoment(msgspec.Struct, frozen=True):
    """Bytes at one moment of a step, besides weights and optimizer."""

    gradients: int
    activations: int

    def total(self) -> int:
        return self.gradients + self.activations


class _MicroBatchMemory:
    """The memory of forward and backward of one micro-batch."""

    def __init__(self, shape: GPTShape, sequences: int, element_bytes: int, device: str, casts_weights: bool) -> None:
        self.shape, self.N, self.e, self.device = shape, sequences * shape.block_size, element_bytes, device
        self.casts_weights = casts_weights  # autocast keeps copies of them in the dtype of the arithmetic

    def moments(self, recompute: bool, gradients_held: bool) -> list[_MemoryMoment]:
        """Return the candidates for the worst moment, in order; `gradients_held`: gradients exist before this backward.

        Every second layer, backward frees and adds the same number of bytes, so the worst layer is one of the first two
        or the last two.
        """
        shape, N, e = self.shape, self.N, self.e
        C, V, num_layers = shape.width, shape.vocab_size, shape.num_layers
        stream, logits, table = FP32 * N * C, FP32 * N * V, FP32 * V * C
        casts = e * (3 + 1 + 2 * MLP_EXPANSION) * C * C if self.casts_weights else 0
        start = stream * ((shape.norm == "rmsnorm") + (shape.dropout > 0))
        head = stream + e * N * C + (e * V * C if self.casts_weights else 0)
        held = _gradient_bytes(shape) if gradients_held else 0

        def inside(layer: int) -> int:
            """Return the bytes that a block saves from its forward to its backward."""
            return sum(saved_tensor_bytes(shape, layer, N, e, self.device)) + casts

        def kept(layers: int) -> int:
            """Return the bytes kept by the first `layers` blocks; when recomputing, after autocast freed its copies."""
            if recompute:
                return layers * stream
            with_table = shape.num_value_embeddings(layers)
            last, other = inside(num_layers - 1), inside(max(0, num_layers - 2))
            return with_table * last + (layers - with_table) * other

        during = kept(num_layers) + (num_layers * casts if recompute else 0)  # until forward and autocast end
        after = kept(num_layers)
        if self.device == "cpu":  # the loss comes with its gradients, chunk by chunk
            rows = min(N, max(LOSS_CHUNK_ROWS, LOSS_CHUNK_LOGITS // V))
            of_loss = start + during + 3 * stream + e * rows * V + e * V * C * ((e < FP32) + self.casts_weights)
            moments = [_MemoryMoment(held or table, of_loss + (table if held else 0))]
        else:
            end_of_forward = start + during + head + e * N * V + (logits if e < FP32 else 0) + logits
            of_logits = start + after + head + 3 * logits  # log-softmax, its gradient, the logits' gradient
            of_head = start + after + head + e * N * V + (e * V * C if e < FP32 else 0)
            moments = [
                _MemoryMoment(held, end_of_forward),
                _MemoryMoment(held, of_logits),
                _MemoryMoment(held or table, of_head + (table if held else 0)),
            ]
        for layer in sorted({0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers)), reverse=True):
            waiting = table if held and shape.tied_head else 0  # the head's, until the embedding's is complete
            activations = start + kept(layer) + inside(layer) + waiting + sum(self._backward_temporaries())
            moments.append(_MemoryMoment(held or table + _gradient_bytes_from_layer(shape, layer + 1), activations))
        copies = (2 if e == FP32 else 1) if shape.tied_head else 0  # head's and embedding's, and in fp32 their sum
        moments.append(_MemoryMoment(_gradient_bytes(shape), stream + table * (copies + bool(held))))
        return moments

    def _backward_temporaries(self) -> list[int]:
        """Return the sizes of the temporaries at the worst moment of an MLP's backward, less what it freed by then."""
        N, C, e, hidden = self.N, self.shape.width, self.e, MLP_EXPANSION * self.shape.width
        masked = [e * N * C] if self.shape.dropout else []
        product = [FP32 * N * C, *masked, e * N * hidden, FP32 * C * hidden]
        powers = 3 if self.shape.activation == "relu2" else 1  # 2·relu(x) · gradient, step by step
        return max(product, [FP32 * N * C, *[e * N * hidden] * powers], key=sum)


def _codec_buffer_bytes(size: int, bits: int) -> int:
    """Return the buffer bytes for encoding `size` bytes of fp32: the sums, and the payloads sent and received."""
    return int(size * (1 + 2 * element_bytes(bits, QUANTIZATION_BLOCK.get(bits, 1)) / FP32))


def _matrix_shapes(shape: GPTShape | FineTuning) -> list[tuple[int, int]]:
    if isinstance(shape, FineTuning):
        return [(tensor.rows, tensor.columns) for tensor in shape.gradients if tensor.columns > 1]
    tables = 1 + (not shape.tied_head) + shape.num_value_embeddings(shape.num_layers)
    positions = [(shape.block_size, shape.width)] if shape.positions == "learned" else []
    return [(shape.vocab_size, shape.width)] * tables + positions + _block_matrix_shapes(shape) * shape.num_layers


def _block_matrix_shapes(shape: GPTShape) -> list[tuple[int, int]]:
    C, hidden = shape.width, MLP_EXPANSION * shape.width
    return [(3 * C, C), (C, C), (hidden, C), (C, hidden)]


def _block_gradient_bytes(shape: GPTShape, layer: int) -> int:
    """Return the gradient bytes of one block."""
    groups = shape.params_by_group()
    table = shape.vocab_size * shape.width if shape.has_value_embedding(layer) else 0
    norms = 2 * groups["norms"] // (2 * shape.num_layers + 1)
    return FP32 * ((groups["attention"] + groups["MLP"]) // shape.num_layers + norms + table)


def _gradient_bytes_from_layer(shape: GPTShape, layer: int) -> int:
    """Return the gradient bytes of the blocks from `layer` on."""
    num = shape.num_layers - layer
    tables = shape.num_value_embeddings(shape.num_layers) - shape.num_value_embeddings(layer)
    table = FP32 * shape.vocab_size * shape.width
    plain = _block_gradient_bytes(shape, shape.num_layers - 1) - table * shape.has_value_embedding(shape.num_layers - 1)
    return num * plain + tables * table


def _gradient_bytes(shape: GPTShape | FineTuning) -> int:
    return FP32 * shape.num_params()


def _root_bytes(shape: GPTShape) -> int:
    groups = shape.params_by_group()
    return FP32 * (groups["token embeddings"] + groups["position embeddings"] + groups["head"])
