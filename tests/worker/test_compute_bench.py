"""`evener bench --preset compute`: FLOPs by operation are those that torch counts, and times sum to the step."""

from __future__ import annotations

import collections
import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from evener.core.model.compute_profile import ComputeBenchSpec
from evener.core.model.operations import step_operations
from evener.core.model.shape import preset_shape
from evener.worker.probe.compute_bench import MODULE_OPERATIONS, StepProfiler

from ..conftest import ENV
from ..tiers import exhaustively

CPU = torch.device("cpu")


def profiler_of(model: str, **changes: object) -> tuple[ComputeBenchSpec, StepProfiler]:
    shape = preset_shape(model, **({"vocab_size": 256, "block_size": 64} | changes))
    spec = ComputeBenchSpec(shape=shape, batch=4, seconds=1.0, dtype="fp32")
    return spec, StepProfiler(spec, CPU)


def test_flops_of_each_operation_equal_torchs_counter():
    """With dropout attention is written out, one strip for 64 positions, so that torch counts it."""
    spec, profiler = profiler_of("tiny", dropout=0.1)
    with FlopCounterMode(display=False) as counter:
        profiler.train_step()
    counted: collections.Counter[str] = collections.Counter()
    parts = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    for name, flops in parts.items():  # of a module with all modules inside
        inner = sum(inside for other, inside in parts.items() if other.rpartition(".")[0] == name)
        operation = MODULE_OPERATIONS.get(name.rpartition(".")[2])
        if operation is not None and name.count("."):
            counted[operation] += flops - inner
    expected = collections.Counter()
    for one in step_operations(spec.shape, spec.batch, 4):
        expected[one.name] += one.flops
    total = spec.batch * spec.shape.block_size * spec.shape.flops_per_token()
    assert counter.get_total_flops() == total == sum(expected.values())
    for name in ("qkv", "attention", "attention output", "MLP up", "MLP down"):
        assert counted[name] == expected[name] > 0, name
    assert total - sum(counted.values()) == expected["head and loss"]


@pytest.mark.parametrize("model", ["tiny", *exhaustively("d4")])
def test_backward_time_belongs_to_the_operation_that_ran_forward(model):
    """An operation that is made slow in backward alone is the one whose backward is slow."""
    _, profiler = profiler_of(model)
    profiler.profile_step()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            big = torch.ones(400, 400)
            for _ in range(60):
                big = big @ big / 400
            return gradient + 0 * big[0, 0]

    for block in profiler.module.blocks:
        block.mlp.up.register_forward_hook(lambda _module, _args, out: Slow.apply(out))
    took_s, times = profiler.profile_step()
    assert max(times, key=times.__getitem__) == ("MLP up", "backward")
    assert 0.5 * took_s < sum(times.values()) <= took_s


def test_bench_prints_table_whose_rows_sum_to_the_step(tmp_path):
    argv = [sys.executable, "-m", "evener", "bench", "--preset", "compute", "--model", "tiny", "--threads", "1",
            "--seconds", "1", "--dtype", "fp32"]  # fmt: skip
    done = subprocess.run([*argv, "--json"], env=ENV, cwd=tmp_path, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    rows = result["operations"]
    assert {row["name"] for row in rows} >= {"embedding", "norms", "attention", "head and loss", "AdamW", "clipping"}
    assert all(row["time_s"] > 0 for row in rows)
    assert sum(row["time_s"] for row in rows) + result["unattributed_s"] == pytest.approx(result["profiled_step_s"])
    assert 0 <= result["unattributed_s"] < 0.5 * result["profiled_step_s"]  # 4 % on an idle machine
    assert result["flops"] == result["tokens"] * preset_shape("tiny", 256).flops_per_token()
    assert result["mfu"] == pytest.approx(result["flops"] / result["step_s"] / result["matmul_flops"])
    assert result["explanation"].startswith("Most is left to win in ")
    assert not [*tmp_path.iterdir()]


def test_bench_refuses_wrong_values(tmp_path):
    argv = [sys.executable, "-m", "evener", "bench"]
    for flags, error in (
        (["--preset", "compute", "--dtype", "fp64"], "error: --dtype fp64: expected auto, fp32 or bf16"),
        (
            ["--preset", "compute", "--model", "chat"],
            'error: --model chat: no such preset\nhint:  did you mean "char"?',
        ),
        (["--threads", "1"], "error: --threads: --preset scaling has its own\nhint:  only --preset compute takes it"),
    ):
        done = subprocess.run([*argv, *flags], env=ENV, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.strip()) == (2, error)
