"""Predicted memory matches what autograd saves and the kernel's peak of real runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from evener.core.model.corpus import CorpusMeta
from evener.core.model.shape import preset_shape
from evener.core.run.roster import Member, Roster, parse_sync
from evener.core.run.rundir import RunDir
from evener.plan.cost import memory as plan
from evener.plan.cost.sync_traffic import COMPRESSED_BUCKET_BYTES, bucket_sizes, fragment_bytes, gradient_tensors
from evener.worker.rank import linear_cross_entropy
from evener.worker.rank.clock import HostClock
from evener.worker.sync import packed, quantized, sync_factory
from evener.worker.sync.bucket_queue import GradBucketSlice
from evener.worker.sync.diloco import DiLoCo, split_into_fragments
from evener.worker.train import model as worker
from evener.worker.train.model import GPT

from ..conftest import module_argv
from ..tiers import exhaustive

ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def test_planner_and_worker_attention_strips_are_equal():
    assert plan.STRIP_ROWS == worker.STRIP_ROWS
    assert plan.MAX_BF16_STRIP_POSITIONS == worker.MAX_BF16_STRIP_POSITIONS


def test_planner_and_worker_chunks_of_logits_are_equal():
    assert plan.LOSS_CHUNK_ROWS == linear_cross_entropy.CHUNK_ROWS
    assert plan.LOSS_CHUNK_LOGITS == linear_cross_entropy.CHUNK_LOGITS


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("preset", "change"),
    [("tiny", {}), ("char", {}), ("char", {"dropout": 0.0}), ("gpt2", {"dropout": 0.1}), ("gpt2", {}), ("d4", {})],
)
def test_saved_activation_bytes_match_autograd_exactly(preset, change, dtype):
    size = {"num_layers": 2, "num_heads": 2, "width": 64, "block_size": 160}  # a whole strip and a part
    shape = preset_shape(preset, 256, **(size | change))
    module = GPT(shape)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    tokens = torch.zeros(2, shape.block_size, dtype=torch.int64)
    rotary = worker.rotary_angles(160, 32, tokens.device) if shape.positions == "rotary" else None
    for layer, block in enumerate(module.blocks):
        kept.clear()
        x = torch.randn(2, 160, 64, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            block(x, tokens, rotary)
        shared = {tensor.untyped_storage().data_ptr() for tensor in rotary or ()} | {tokens.data_ptr()}
        casts = 2 * 12 * 64 * 64 if dtype == "bf16" else 0
        biases = {place for place, tensor in kept.items() if tensor.dtype == torch.bfloat16 and tensor.dim() == 1}
        found = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in shared | biases)
        assert found - casts == sum(plan.saved_tensor_bytes(shape, layer, 2 * 160, 4 if dtype == "fp32" else 2))


SMALL = preset_shape("gpt2", 6000, 64, num_layers=2, num_heads=4, width=256)


def of_strategy(sync: str, num_ranks: int) -> plan.MemoryBreakdown:
    members = [Member(rank=rank, host="a", device="cpu", dtype="fp32", share=1, micro_batch=1)
               for rank in range(num_ranks)]  # fmt: skip
    return plan.peak_memory(SMALL, Roster(members=members, sync=parse_sync(sync), backend="gloo"), 0)


def echo(group: Any, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> int:
    """A swap with ranks that send what they are sent."""
    for there, back in zip(outgoing[1:], incoming[1:], strict=True):
        back.copy_(there)
    return 0


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sync", ["packed", "bf16", "int8", "int4"])
def test_predicted_exchange_buffer_bytes_match_allocated(monkeypatch, sync, num_ranks):
    for module in (packed, quantized):
        monkeypatch.setattr(module, "pairwise_all_to_all", echo)
    group = types.SimpleNamespace(rank=0, world_size=num_ranks, device=torch.device("cpu"))
    exchange: Any = sync_factory.make_algorithm(parse_sync(sync), group)
    for i, (size, _) in enumerate(bucket_sizes(gradient_tensors(SMALL), COMPRESSED_BUCKET_BYTES)):
        gradient = torch.randn(size // 4 // num_ranks * num_ranks)
        exchange.run(GradBucketSlice(i, (torch.nn.Parameter(gradient),), [gradient], is_warmup=False))
    kept = [*exchange._outgoing, *exchange._incoming, *([] if sync == "packed" else [exchange._total])]
    held = sum(scratch._buffer.nbytes for scratch in kept)
    if sync == "packed" and num_ranks > 2:
        held += gradient.nbytes // num_ranks  # its own part, beside the sums; the last bucket is the largest
    assert of_strategy(sync, num_ranks).buckets == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("sync", ["diloco:4", "diloco:5"])
def test_predicted_outer_state_bytes_match_allocated(sync):
    group = types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    replica = DiLoCo(group, HostClock(), lambda part: None, parse_sync(sync))
    replica.wrap(GPT(SMALL), all_params_used=True, is_under_way=True)
    held = [fragment.global_params.nbytes for fragment in replica._fragments]
    held += [fragment.momentum.nbytes for fragment in replica._fragments if fragment.momentum is not None]
    assert of_strategy(sync, 2).sync == sum(held)


@pytest.mark.parametrize("sync", ["diloco:4:streamed", "diloco:30:streamed"])
def test_streaming_diloco_needs_twice_its_largest_fragment_more(sync):
    parameters = list(GPT(SMALL).parameters())
    found = split_into_fragments(parameters, fragment_bytes(parse_sync(sync), sum(one.nbytes for one in parameters)))
    largest = max(sum(one.nbytes for one in several) for several in found)
    assert (
        of_strategy(sync, 2).sync - of_strategy(sync.removesuffix(":streamed"), 2).sync == 2 * largest
    )  # the difference, and its weighted copy


def random_corpus(folder: Path, vocab_size: int) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        draw.integers(vocab_size, size=4000, dtype=np.uint16).tofile(folder / f"{split}.bin")
    (folder / "tokenizer.json").write_text("{}\n")
    meta = CorpusMeta(
        format=1,
        name=folder.name,
        tokenizer="bpe",
        vocab_size=vocab_size,
        dtype="uint16",
        train_tokens=4000,
        val_tokens=4000,
        content_hash="none",
        tokenizer_hash="sha256:" + hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        num_documents=1,
        text_bytes=1,
        recipe={},
    )
    (folder / "meta.json").write_bytes(msgspec.json.encode(meta))
    return folder


def peak(out: Path, vocab_size: int, flags: str, ranks: int, env: dict[str, str]) -> tuple[Any, int]:
    """(manifest, bytes) of a short run.

    A shell stands between: a process that is executed inherits the peak of the one that executes it as the least of its
    own (Linux, ru_maxrss), and this one has torch and other tests in its memory.
    """
    data = random_corpus(out.with_name(f"data-{out.name}"), vocab_size)
    args = ["--data", str(data), "--out", str(out), "--steps", "3", "--eval-tokens", "256", "--threads", "1"]
    argv = module_argv(ranks, "evener.worker", [*args, *flags.split()])
    done = subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", *argv], env=env, capture_output=True, text=True,
                          timeout=180, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = RunDir(out).manifest()
    return manifest, max(manifest.result.peak_memory_bytes)


def predict(manifest: Any) -> plan.MemoryBreakdown:
    return plan.peak_memory(manifest.shape, manifest.roster, 0, recompute=manifest.spec.model.recompute,
                            host_memory_bytes=manifest.hosts[0].memory_bytes,
                            has_jemalloc=manifest.hosts[0].has_jemalloc)  # fmt: skip


CHAR = "--model char --block-size 256"
D4 = "--model d4 --block-size 256"
NARROW = "--model gpt2 --block-size 256 --width 256 --num-heads 4 --num-layers 4"
DEEP = "--model gpt2 --block-size 256 --width 512 --num-heads 8 --num-layers 8 --dtype fp32 --micro-batch 2"
RUNS = [
    (f"{CHAR} --dtype fp32 --batch 4 --micro-batch 4", 256, 1),
    (f"{CHAR} --dtype bf16 --batch 4 --micro-batch 2", 256, 1),
    (f"{CHAR} --dtype fp32 --batch 2 --micro-batch 2 --recompute", 256, 1),
    (f"{D4} --dtype bf16 --batch 4 --micro-batch 2", 4096, 2),
    (f"{NARROW} --dtype fp32 --batch 2 --micro-batch 2", 16384, 1),
    ("--model d8 --block-size 512 --dtype bf16 --batch 2 --micro-batch 2", 32768, 1),  # tables, logits of 64 MB
    (f"{DEEP} --batch 4 --sync fsdp", 4096, 2),  # 27M parameters
    (f"{DEEP} --batch 4 --sync zero1", 4096, 2),
    (f"{DEEP} --batch 8 --sync fsdp", 4096, 2),  # two micro-batches
    (f"{DEEP} --batch 8 --sync zero1", 4096, 2),
    (f"{DEEP} --dtype bf16 --batch 4 --sync fsdp", 4096, 2),
    (f"{DEEP} --dtype bf16 --batch 4 --sync zero1", 4096, 2),
]


@exhaustive
@pytest.mark.alone
@pytest.mark.usefixtures("quiet_machine")  # the kernel takes back memory of a process that waits for a processor
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the base and glibc's heap were measured on Linux")
@pytest.mark.parametrize(("flags", "vocab_size", "ranks"), RUNS, ids=[flags[8:] for flags, _, _ in RUNS])
def test_predicted_peak_memory_is_within_15_percent(tmp_path, flags, vocab_size, ranks):
    manifest, measured = peak(tmp_path / "run", vocab_size, flags, ranks, ENV)
    assert predict(manifest).total == pytest.approx(measured, rel=0.15)


@exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_predicted_peak_without_fragmentation_is_within_3_percent(tmp_path):
    """What torch needs itself depends on the processor: it is taken from a run of a model of a few megabytes."""
    needs, measured = [], []
    for name, flags in (("small", "--model tiny"), ("large", f"{CHAR} --num-layers 3")):
        flags += " --dtype fp32 --batch 2 --micro-batch 2"
        manifest, found = peak(tmp_path / name, 256, flags, 1, ENV | {"MALLOC_MMAP_THRESHOLD_": "131072"})
        needs.append(predict(manifest).total - predict(manifest).fragmentation)
        measured.append(found)
    assert needs[0] - plan.PROCESS_BYTES["cpu"] < 10e6
    assert needs[1] - needs[0] == pytest.approx(measured[1] - measured[0], abs=0.03 * measured[1])
