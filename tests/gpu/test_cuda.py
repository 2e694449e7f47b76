"""Train on GPUs: losses match the CPU's, replicas agree, and recorded step parts sum to the step time."""

from __future__ import annotations

import pytest
import torch

from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import PHASES
from evener.report.export.chrome_trace import write_trace
from evener.report.read.timeline import read_timeline
from evener.report.read.torch_profile import read_profiles

from .. import traces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_gpu_losses_match_cpu_and_step_parts_sum_to_step_time(tmp_path, train):
    flags = ("--steps", "20", "--micro-batch", "4", "--dtype", "fp32", "--compile", "off")
    cpu = train(tmp_path / "cpu", *flags, "--device", "cpu")
    gpu = train(tmp_path / "gpu", *flags, "--device", "cuda")
    assert [r.loss for r in gpu.records(0)] == pytest.approx([r.loss for r in cpu.records(0)], rel=1e-3)
    for record in gpu.records(0):
        assert all(getattr(record.cost, part) is not None for part in PHASES)
        assert record.cost.total_s == pytest.approx(record.wall_s, rel=0.01)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sync", ["ddp", "packed", "bf16", "int8", "int4", "powersgd:4", "fsdp", "zero1",
                                  "diloco:5:int8", "diloco:5:int4:streamed"])  # fmt: skip
def test_replicas_on_two_gpus_over_nccl_are_bit_equal(tmp_path, train, sync):
    run = train(tmp_path / "run", "--steps", "20", "--sync", sync, "--verify-every", "5", ranks=2)
    assert run.manifest().roster.backend == "nccl"
    assert run.manifest().result.replicas_agree is True
    exchanges = [record.sync_s > 0 for record in run.records(0)]
    assert sum(exchanges) >= 3 if sync.startswith("diloco:5") else all(exchanges)


def test_gloo_backend_option_moves_gpu_tensors(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "5", "--device", "cuda", "--backend", "gloo", ranks=2)
    assert run.manifest().roster.backend == "gloo"
    assert run.manifest().result.replicas_agree is True


MIXED = """
import os, runpy, sys
sys.argv += ["--device", "cuda" if os.environ["RANK"] == "0" else "cpu"]
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


@pytest.mark.parametrize("sync", ["ddp", "packed", "int8", "powersgd:4", "diloco:5"])
def test_replicas_on_gpu_and_cpu_stay_equal_over_gloo(tmp_path, corpus, run_script, sync):
    """Over Gloo; what test_unequal_ranks.py plays with two processors."""
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--sync", sync,
             "--shares", "3:1", "--steps", "30", "--verify-every", "10", "--out", str(tmp_path / "run")]  # fmt: skip
    done = run_script(MIXED, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    manifest = RunDir(tmp_path / "run").manifest()
    assert [member.device for member in manifest.roster.members] == ["cuda:0", "cpu"]
    assert manifest.roster.backend == "gloo"
    assert manifest.result.replicas_agree is True


def test_gpu_timeline_is_complete_and_sums_to_records(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "30", "--micro-batch", "4", "--compile", "off", "--device", "cuda",
                "--profile", "2")  # fmt: skip
    timeline = read_timeline(run)
    assert timeline.recorded_ranges == [(0, 0), (3, 4), (10, 29)]
    write_trace(run, timeline, tmp_path / "trace.json", read_profiles(run))
    trace = traces.read(tmp_path / "trace.json")
    records = {record.step: record.cost for record in run.records(0)}
    for step, parts in traces.step_parts_s(trace, "rank 0").items():
        for part, took_s in parts.items():
            assert took_s == pytest.approx(getattr(records[step], part), rel=0.01, abs=5e-6), (step, part)
    layers = {one.name for one in trace.of("rank 0", "layers")}
    assert layers >= {"blocks.0 forward", "blocks.0 backward"}
    assert any(one.cat == "kernel" for (_, track), found in trace.slices.items() if track.startswith("torch")
               for one in found)  # fmt: skip
