"""The predicted memory of a rank matches closed forms."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.core.model.shape import GPTShape, preset_shape
from evener.core.run.roster import Member, Roster, parse_sync
from evener.plan.cost.memory import (
    ACTIVATION_PASSES,
    PROCESS_BYTES,
    MemoryBreakdown,
    faulted_bytes,
    peak_memory,
    saved_tensor_bytes,
)

CHAR = preset_shape("char", vocab_size=65)
GPT2 = preset_shape("gpt2", vocab_size=50257)
D8 = preset_shape("d8", vocab_size=32768)


def need(shape: GPTShape, *, sequences: int = 1, accumulates: bool = False, dtype: Any = "fp32", device: str = "cpu",
         sync: str = "none", num_ranks: int = 1, **change: Any) -> MemoryBreakdown:  # fmt: skip
    member = Member(rank=0, host="h", device=device, dtype=dtype, share=sequences * (1 + accumulates),
                    micro_batch=sequences)  # fmt: skip
    return peak_memory(shape, Roster(members=[member] * num_ranks, sync=parse_sync(sync), backend="gloo"), 0, **change)


def test_memory_total_is_sum_of_parts() -> None:
    one = need(CHAR, sequences=4)
    parts = (
        one.weights,
        one.gradients,
        one.optimizer,
        one.activations,
        one.buckets,
        one.sync,
        one.fragmentation,
        one.process,
    )
    assert one.total == sum(parts)
    assert min(parts) >= 0


def test_adam_training_needs_16_bytes_per_parameter() -> None:
    shape = preset_shape("d8", vocab_size=32768, block_size=8)
    one = need(shape)
    assert one.weights + one.gradients + one.optimizer == 16 * shape.num_params()
    assert one.activations < 0.01 * one.weights


def test_tied_head_keeps_its_gradient_until_embedding_backward() -> None:
    shape = preset_shape("gpt2", vocab_size=50257, block_size=8)
    table = 4 * 50257 * 768
    assert need(shape).activations == pytest.approx(2 * table, rel=0.01)
    assert need(shape, accumulates=True).activations == pytest.approx(3 * table, rel=0.01)


@pytest.mark.parametrize(
    ("name", "layer", "dtype_bytes", "per_width"),
    [
        ("gpt2", 0, 4, 64),  # norms 8, into products 4 + 4 + 4 + 16, q k v 12, GELU 16; attention's output is into out
        # all but the norms' half; in strips, of 1024 positions 576 are seen on average, with a weight for each head
        ("gpt2", 0, 2, 36 + 2 * 12 * 576 / 768),
        ("d8", 1, 4, 72),  # q and k before and after their norm; v with a value embedding
        ("d8", 0, 4, 80),  # without one v keeps the memory of q, k and v
        ("d8", 1, 2, 44),  # what enters the norms of q and k is fp32
        (
            "char",
            0,
            4,
            72 + 3 * 4 * 6 * 192 / 384,
        ),  # three masks of residuals; of 256 positions 192 are seen on average
    ],
)
def test_saved_activation_bytes_per_token_match_formula(
    name: str, layer: int, dtype_bytes: int, per_width: float
) -> None:
    shape = {"gpt2": GPT2, "d8": D8, "char": CHAR}[name]
    statistics = 4 * 4 if shape.norm == "layernorm" else 2 * 4
    in_strips = shape.dropout or (dtype_bytes == 2 and shape.block_size <= 1024)
    statistics += 0 if in_strips else 4 * shape.num_heads
    statistics += 2 * 4 * shape.num_heads if shape.qk_norm else 0
    tokens = shape.block_size
    assert sum(saved_tensor_bytes(shape, layer, tokens, dtype_bytes)) == tokens * (per_width * shape.width + statistics)


def test_large_vocabulary_peak_is_its_logits() -> None:
    shape = preset_shape("gpt2", vocab_size=50257, num_layers=1)
    on_gpu = need(shape, sequences=8, device="cuda:0")
    logits = 4 * 50257 * 8 * 1024
    assert 3 * logits < on_gpu.activations < 3.3 * logits  # log-softmax, its gradient, the logits' gradient
    assert on_gpu.gradients == 0  # there are none yet
    assert need(shape, sequences=8, device="cuda:0", accumulates=True).gradients > 0
    on_cpu = need(shape, sequences=8)  # holds a sixteenth of them
    assert logits / 16 < on_cpu.activations < logits / 2
    assert on_cpu.gradients >= 4 * 50257 * 768  # the head's come with the loss


def test_activations_grow_with_the_micro_batch() -> None:
    few, many = need(CHAR, sequences=8), need(CHAR, sequences=16)
    assert many.activations == pytest.approx(2 * few.activations, rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recompute_keeps_only_one_block_and_block_inputs(dtype: str) -> None:
    shape = preset_shape("char", vocab_size=65, num_layers=24)
    kept, again = (need(shape, sequences=16, dtype=dtype, recompute=recompute) for recompute in (False, True))
    assert again.activations < 0.15 * kept.activations
    assert again.total < kept.total


def test_strategy_memory_overheads_match_formulas() -> None:
    one = need(GPT2)
    weights = one.weights
    ddp = need(GPT2, sync="ddp", num_ranks=4)
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (weights, weights, 2 * weights)
    assert ddp.buckets == ddp.sync == 0  # the buckets are the gradients
    last = 4 * 768 * (50257 + 1024 + 2)  # of the tables and the first norm: the largest bucket
    assert need(GPT2, sync="packed", num_ranks=2).buckets == 2 * last  # goes and comes
    assert need(GPT2, sync="bf16", num_ranks=4).buckets == 2 * last  # sums; half of it goes, half comes
    assert need(GPT2, sync="int8", num_ranks=2).buckets == int(last * (1 + 2 * (1 + 2 / 256) / 4))
    assert need(D8, sync="int8+sparse", num_ranks=2).buckets < need(D8, sync="int8", num_ranks=2).buckets  # the head's
    for sync in ("bf16", "int8", "int4"):  # what was rounded off of gradients, and of a rank's part of the sums
        assert need(GPT2, sync=sync, num_ranks=2).sync == weights
        assert need(GPT2, sync=sync, num_ranks=4).sync == weights + weights // 4
    small = need(GPT2, sync="diloco:100:int8", num_ranks=2, sequences=1)
    assert small.activations >= 7 * weights  # of a checkpoint: all that is its own, and once more what it copies
    assert need(GPT2, sync="diloco:100", num_ranks=4).sync == 2 * weights
    table = 50257 * 768 * 4  # the largest fragment: sums, codes there and back, and when streamed what is on its way
    coded = need(GPT2, sync="diloco:100:int4", num_ranks=4).sync
    assert coded == 3 * weights + weights // 4 + int(table * (1 + 2 * 0.53125 / 4))
    assert need(GPT2, sync="diloco:100:int4:streamed", num_ranks=4).sync == coded + 2 * table
    low_rank = need(GPT2, sync="powersgd:4", num_ranks=4).sync - weights
    matrices = [(50257, 768), (1024, 768), *[(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12]
    assert low_rank == 4 * 4 * sum(rows + columns for rows, columns in matrices)
    assert need(GPT2, sync="ddp+sparse", num_ranks=4).sync == 4 * 1024 * 768 * 4


def test_sharded_strategies_divide_state_and_gather_parameters() -> None:
    """Gathered: by fsdp a few blocks, by zero1 all. A micro-batch before the last leaves whole gradients."""
    deep = preset_shape("d20", vocab_size=32768, block_size=8)
    one = need(deep)
    fsdp, zero1 = (need(deep, sync=sync, num_ranks=8) for sync in ("fsdp", "zero1"))
    for sharded in (fsdp, zero1):
        assert (sharded.weights, sharded.optimizer) == (one.weights // 8, one.optimizer // 8)
        assert sharded.gradients <= one.gradients // 8
    assert fsdp.sync < one.weights < zero1.sync < 2 * one.weights
    assert fsdp.total < one.total / 2
    several = need(deep, sync="fsdp", num_ranks=8, accumulates=True)
    assert several.gradients == one.gradients


@pytest.mark.parametrize("sync", ["fsdp", "zero1"])
def test_sharded_rank_keeps_freed_memory_only_where_all_ranks_of_its_host_fit_twice(sync: str) -> None:
    member = Member(rank=0, host="a", device="cpu", dtype="fp32", share=1, micro_batch=1)
    members = [msgspec.structs.replace(member, rank=rank) for rank in range(2)]
    roster = Roster(members=members, sync=parse_sync(sync), backend="gloo")
    unmapped = peak_memory(GPT2, roster, 0)
    assert unmapped.fragmentation == 0
    kept = peak_memory(GPT2, roster, 0, host_memory_bytes=10**12)
    assert kept.fragmentation > 0
    assert kept.total == unmapped.total + kept.fragmentation
    with_jemalloc = peak_memory(GPT2, roster, 0, has_jemalloc=True)  # holes are few: it keeps freed memory anywhere
    assert 0 < with_jemalloc.fragmentation < kept.fragmentation / 4
    for host_memory_bytes, expected in ((4 * kept.total, kept), (4 * kept.total - 1, unmapped)):
        assert peak_memory(GPT2, roster, 0, host_memory_bytes=host_memory_bytes) == expected


def test_sharded_rank_maps_weights_and_gradients_anew_where_it_unmaps_them() -> None:
    """Of P bytes, 2 ranks: 2P a gathering, 3.5P a reduction; fsdp gathers twice in each of two micro-batches."""
    member = Member(rank=0, host="a", device="cpu", dtype="fp32", share=2, micro_batch=1)
    members = [msgspec.structs.replace(member, rank=rank) for rank in range(2)]
    P = 4 * GPT2.num_params()
    for sync, num in (("zero1", 5.5), ("fsdp", 11.5)):
        roster = Roster(members=members, sync=parse_sync(sync), backend="gloo")
        need = peak_memory(GPT2, roster, 0)
        found = faulted_bytes(GPT2, roster, need)
        assert found - 2 * ACTIVATION_PASSES * need.activations == pytest.approx(num * P)
        assert faulted_bytes(GPT2, roster, msgspec.structs.replace(need, fragmentation=1)) == 0


def test_heap_fragmentation_is_predicted_for_cpu_only() -> None:
    assert need(CHAR).fragmentation > 0
    assert need(CHAR, device="cuda:0").fragmentation == 0
    assert need(CHAR, device="cuda:0").process == PROCESS_BYTES["cuda"]


def test_rank_without_share_keeps_model_but_no_activations() -> None:
    idle = need(CHAR, sequences=0)
    assert (idle.weights, idle.optimizer) == (need(CHAR).weights, need(CHAR).optimizer)
    assert idle.activations < 0.01 * need(CHAR, sequences=1).activations
