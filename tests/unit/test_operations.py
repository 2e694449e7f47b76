"""The operations of a step sum to the closed form of its FLOPs, and the table names what it has left to win."""

from __future__ import annotations

import pytest

from evener.bench.compute import explain_table, table_of
from evener.core.model.compute_profile import ComputeBenchSpec, ComputeProfile, OperationTime
from evener.core.model.operations import step_operations
from evener.core.model.shape import PRESETS

CHAR = PRESETS["char"]


@pytest.mark.parametrize("name", ["tiny", "char", "gpt2", "gpt2-xl", "g4", "d4", "d8"])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_flops_of_operations_sum_to_flops_per_token(name, element_bytes):
    shape = PRESETS[name]
    operations = step_operations(shape, 3, element_bytes)
    assert sum(one.flops for one in operations) == 3 * shape.block_size * shape.flops_per_token()
    assert len({(one.name, one.phase) for one in operations}) == len(operations)


def test_causal_attention_needs_half_of_the_matrix_and_its_diagonal():
    forward, backward = (one for one in step_operations(CHAR, 1, 4) if one.name == "attention")
    assert forward.flops == 6 * 2 * 2 * 256 * 256 * 384  # two products in each of six layers
    assert forward.needed_flops * 2 * 256 == forward.flops * 257
    assert (backward.flops, backward.bytes) == (2 * forward.flops, 2 * forward.bytes)


def test_bytes_of_a_linear_layer_are_its_operands():
    forward, backward = (one for one in step_operations(CHAR, 2, 2) if one.name == "MLP up")
    tokens, matrix = 512, 384 * 1536
    assert forward.bytes == 6 * (2 * tokens * (384 + 1536) + 4 * matrix)
    assert backward.bytes == 6 * (2 * tokens * (384 + 1536 + 384) + 2 * 4 * matrix)


def profile_with(times: list[tuple[str, str, float]]) -> ComputeProfile:
    return ComputeProfile(
        device="cpu", device_name="made up", threads=1, torch="2", dtype="fp32", tokens=2048, num_steps=3, step_s=2.0,
        profiled_step_s=2.2, cpus=1.0, matmul_flops=1e11, matmul_shape=(1, 2, 3), memory_Bps=1e10,
        operations=[OperationTime(name=name, phase=phase, time_s=time_s) for name, phase, time_s in times],
    )  # fmt: skip


def test_table_names_the_operation_farthest_from_its_roof():
    profile = profile_with([("MLP up", "forward", 0.9), ("AdamW", "update", 0.7), ("norms", "backward", 0.1)])
    table = table_of(ComputeBenchSpec(shape=CHAR, batch=8, seconds=1.0), profile)
    assert table.unattributed_s == pytest.approx(0.5)
    assert table.mfu == pytest.approx(2048 * CHAR.flops_per_token() / 2.0 / 1e11)
    by_name = {(row.name, row.phase): row for row in table.rows}
    assert by_name["AdamW", "update"].roof_s == pytest.approx(28 * CHAR.num_params() / 1e10)
    assert by_name["MLP up", "forward"].roof_s == pytest.approx(2 * 2048 * 384 * 1536 * 6 / 1e11)
    assert explain_table(table) == (
        "Most is left to win in MLP up, forward: it takes 900 ms and its roof is 145 ms; at its roof a step would take "
        "34% less."
    )
