"""Ranks that shard weights and optimizer state learn what one process learns."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from evener.core.base.errors import UsageError
from evener.core.model.shape import preset_shape
from evener.core.run.roster import Member, Roster, check_sync_supported, parse_sync
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir
from evener.worker.rank.clock import HostClock
from evener.worker.sync import fully_sharded
from evener.worker.sync.fully_sharded import shard_module
from evener.worker.train import run as run_module

from ..conftest import flags_of
from ..tiers import exhaustive, exhaustively
from .test_cli import evener

STEPS = ("--steps", "12", "--batch", "8", "--lr", "0.001", "--warmup", "2", "--clip", "0.2", "--eval-every", "5",
         "--verify-every", "6", "--checkpoint-every", "0")  # fmt: skip


def losses(run: RunDir) -> list[float]:
    return [record.loss for record in run.records(0)]


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint_path(run.newest_checkpoint_step()) / "weights.safetensors")


def assert_same_run(run: RunDir, expected: RunDir) -> None:
    """Losses, validation losses and final weights are equal within 1e-5."""
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)
    evaluated = [[event["val_loss"] for event in one.events() if event["event"] == "evaluation"]
                 for one in (run, expected)]  # fmt: skip
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    ours, theirs = weights(run), weights(expected)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


@pytest.mark.parametrize(
    ("sync", "shares", "micro_batch"),
    [
        ("fsdp", "3:1", "2"),
        ("zero1", "2:1:1", "2"),
        *exhaustively(("zero1", "3:1", "2"), ("fsdp", "2:1:1", "1"), ("fsdp", "7:1", "1"), ("fsdp", "1:0", "8")),
    ],
)
def test_sharded_ranks_with_unequal_shares_match_one_process(tmp_path, train, shared_train, sync, shares, micro_batch):
    """With accumulation and clipping, in fp32."""
    alone = shared_train(*STEPS)
    assert max(record.grad_norm for record in alone.records(0)) > 0.2  # clipping is active
    flags = (*STEPS, "--sync", sync, "--shares", shares, "--micro-batch", micro_batch)
    run = train(tmp_path / "run", *flags, ranks=shares.count(":") + 1)
    assert_same_run(run, alone)
    norms = [[record.grad_norm for record in one.records(0)] for one in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert run.manifest().result.replicas_agree is True


@pytest.mark.parametrize("sync", ["fsdp", *exhaustively("zero1")])
def test_weights_gathered_in_bf16_train_as_one_process_in_bf16(tmp_path, train, shared_train, sync):
    """What one process computes in fp32 of embeddings and norms, and rounded weights, is all that differs."""
    flags = (*STEPS, "--eval-every", "0", "--dtype", "bf16")
    alone = shared_train(*flags)
    run = train(tmp_path / "run", *flags, "--sync", sync, "--shares", "3:1", "--micro-batch", "2", ranks=2)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-3)
    assert run.manifest().result.replicas_agree is True
    assert {weight.dtype for weight in weights(run).values()} == {torch.float32}


@pytest.mark.parametrize(
    "chain", ["fsdp:3 ddp:2 ddp:1 zero1:3 fsdp:2", *exhaustively("zero1:2 fsdp:3 fsdp:1 ddp:3 zero1:2")]
)
def test_run_resumes_with_other_strategies_and_ranks(tmp_path, train, shared_train, chain):
    """Each start takes one step, the last one the rest; AdamW's state goes along."""
    alone, out = shared_train(*STEPS), tmp_path / "run"
    starts = chain.split()
    for i, word in enumerate(starts):
        sync, _, ranks = word.partition(":")
        flags = [
            *STEPS,
            "--sync",
            sync,
            *(["--resume"] if i else []),
            *(["--max-s", "0"] if i + 1 < len(starts) else []),
        ]
        run = train(out, *flags, ranks=int(ranks))
        assert len(run.records(0)) == (i + 1 if i + 1 < len(starts) else 12)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = weights(run), weights(alone)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


# Four ranks as those of two hosts.
TWO_HOSTS = """
import os, runpy, sys
os.environ["EVENER_HOST"] = f"host{int(os.environ['RANK']) // 2}"
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


def test_weights_sharded_within_hosts_match_one_process(tmp_path, corpus, run_script, shared_train):
    """A rank sends half of what its host gathers and sums, and a ring's part of its shard to the other host."""
    alone, run = shared_train(*STEPS), RunDir(tmp_path / "run")
    flags = (*STEPS, "--sync", "hsdp", "--shares", "3:1:2:2", "--micro-batch", "3")
    ended = run_script(TWO_HOSTS, *flags_of(corpus, run.path), *flags, ranks=4)
    assert ended.returncode == 0, ended.stderr
    assert run.manifest().roster.hosts == ["host0", "host1"]
    assert_same_run(run, alone)
    norms = [[record.grad_norm for record in one.records(0)] for one in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert run.manifest().result.replicas_agree is True
    whole, root = 4 * preset_shape("tiny", 256).num_params(), 4 * (256 * 64 + 64 * 64 + 64)
    within, between = (3 * whole - root) / 2, 2 * (1 / 2) * whole / 2
    assert run.records(3)[-1].bytes == pytest.approx(within + between, abs=16)


@exhaustive
def test_run_resumes_with_weights_sharded_within_hosts(tmp_path, corpus, run_script, train, shared_train):
    alone, run = shared_train(*STEPS), RunDir(tmp_path / "run")
    for i, (sync, ranks) in enumerate((("ddp", 2), ("hsdp", 4), ("fsdp", 3))):
        flags = [*STEPS, "--sync", sync, *(["--resume"] if i else []), *(["--max-s", "0"] if i < 2 else [])]
        if sync == "hsdp":
            ended = run_script(TWO_HOSTS, *flags_of(corpus, run.path), *flags, ranks=ranks)
            assert ended.returncode == 0, ended.stderr
        else:
            train(run.path, *flags, ranks=ranks)
    assert len(run.records(0)) == 12
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


# Rank 1 gathers another number than rank 0 has sent.
CHANGED = """
import os, runpy, sys
from evener.worker.sync.pairwise import PairwiseCollectives
gather = PairwiseCollectives.all_gather
def changed(self, part, outputs):
    done, sent = gather(self, part, outputs)
    done.result()
    outputs[0][0] += 1e-6
    return done, sent
if os.environ["RANK"] == "1":
    PairwiseCollectives.all_gather = changed
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


@pytest.mark.parametrize("sync", ["zero1", *exhaustively("fsdp")])
def test_replica_check_finds_a_changed_shard(tmp_path, corpus, run_script, sync):
    flags = [*flags_of(corpus, tmp_path / "run"), *STEPS, "--batch", "6", "--sync", sync]
    failed = run_script(CHANGED, *flags, ranks=3)
    assert failed.returncode != 0
    said = "after step 6: the replicas differ: rank 1 in token_embedding.weight (rank 0's part) and 2 more tensors"
    assert said in failed.stderr


def test_sent_bytes_have_closed_forms(tmp_path, train):
    """Of P bytes in n ranks: zero1 2(n-1)/n · P a step; fsdp once more, but for the root, which backward needs at once.
    In bf16 each gathering takes half of that.

    [Rajbhandari et al. 2020, section 7; torch, reshard_after_forward]
    """
    shape = preset_shape("tiny", 256)
    root = 4 * sum(shape.params_by_group()[name] for name in ("token embeddings", "position embeddings", "head"))
    norm, whole = 4 * shape.width, 4 * shape.num_params()  # the last norm is in the root, too
    gathered = {"zero1": whole, "fsdp": 2 * whole - root - norm}
    for sync, dtype in (("zero1", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16")):
        flags = (*STEPS, "--eval-every", "0", "--sync", sync, "--dtype", dtype)
        run = train(tmp_path / f"{sync}-{dtype}", *flags, ranks=2)
        sent = {record.bytes for rank in range(2) for record in run.records(rank)}
        assert sent == {(gathered[sync] / (2 if dtype == "bf16" else 1) + whole) / 2}


@exhaustive
@pytest.mark.parametrize("sync", ["fsdp", "zero1"])
def test_gradient_noise_is_that_of_whole_replicas(train, shared_train, tmp_path, sync):
    """Each rank's gradient is measured before it is scattered; three ranks pad what they scatter."""
    flags = (*STEPS, "--shares", "3:1:2", "--micro-batch", "1")
    plain, sharded = shared_train(*flags, ranks=3), train(tmp_path / "run", *flags, "--sync", sync, ranks=3)
    found = [[(record.noise.trace, record.noise.norm_sq) for record in run.records(0) if record.noise]
             for run in (plain, sharded)]  # fmt: skip
    assert len(found[0]) == 2
    assert [pytest.approx(noise, rel=1e-3) for noise in found[0]] == found[1]


@exhaustive
@pytest.mark.parametrize("sync", ["fsdp", "zero1"])
def test_verbs_read_a_sharded_run(tmp_path, train, sync):
    run = train(tmp_path / "run", *STEPS, "--sync", sync, "--dtype", "bf16", "--recompute", ranks=2)
    first, last = losses(run)[0], losses(run)[-1]
    assert last < first
    verbs = {"verify run": "agree", "sample run --num-tokens 5": "", "export run --out hf": "",
             "report run": "holds a part of the weights"}  # fmt: skip
    for verb, told in verbs.items():
        ended = evener(tmp_path, *verb.split())
        assert ended.returncode == 0, ended.stderr
        assert told in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--sync", "fsdp", "--compile", "on"), "--sync fsdp: sharded weights are not compiled"),
        (("--sync", "zero1", "--contention"), "--contention: with --sync zero1 no rank can compute alone"),
        (("--sync", "fsdp:int8"), "--sync fsdp:int8: no such strategy"),
        (("--sync", "zero1+sparse"), "--sync zero1+sparse: no such strategy"),
        (("--sync", "diloco:5:fsdp"), "--sync diloco:5:fsdp: no such strategy"),
        (("--sync", "hsdp:2"), "--sync hsdp:2: no such strategy"),
    ],
)
def test_what_sharded_ranks_cannot_do_is_refused(flags, told):
    with pytest.raises(UsageError) as caught:
        check_sync_supported(parse_args(flags))
    assert str(caught.value).startswith(told)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("device", "dtype", "told"), [("cuda:0", "fp16", "with fp16"), ("cuda:0", "bf16", "not on GPUs over Gloo")]
)
def test_unsupported_ranks_are_refused_before_weights_are_sharded(device, dtype, told):
    member = Member(rank=0, host="a", device=device, dtype=dtype, share=1, micro_batch=1)
    roster = Roster(members=[member, member], sync=parse_sync("fsdp"), backend="gloo")
    with pytest.raises(UsageError, match=f"--sync fsdp.* {told}"):
        shard_module(torch.nn.Linear(2, 2), None, roster)


def test_part_that_was_not_reduced_on_its_host_is_not_summed_over_hosts(monkeypatch):
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(fully_sharded.dist, "all_reduce", lambda part, group: summed.append(part))
    group = SimpleNamespace(device=torch.device("cpu"))
    collectives = fully_sharded._MeasuredCollectives(group, HostClock())
    failed, reduced = Future(), Future()
    failed.set_exception(RuntimeError("lost a peer"))
    reduced.set_result(None)
    replicas = SimpleNamespace(size=lambda: 2)
    with pytest.raises(RuntimeError, match="lost a peer"):
        collectives.all_reduce_after(failed, torch.ones(4), replicas).result()
    assert summed == []
    collectives.all_reduce_after(reduced, torch.ones(4), replicas).result()
    assert len(summed) == 1


def test_weights_are_not_sharded_within_one_host():
    member = Member(rank=0, host="a", device="cpu", dtype="fp32", share=1, micro_batch=1)
    roster = Roster(members=[member, member], sync=parse_sync("hsdp"), backend="gloo")
    with pytest.raises(UsageError, match="--sync hsdp needs several hosts with the same number of ranks"):
        shard_module(torch.nn.Linear(2, 2), None, roster)


@pytest.mark.parametrize(
    ("sync", "host_memory_bytes", "keeps"),
    [
        ("ddp", 10**9, True),
        ("fsdp", 10**12, True),
        ("fsdp", 10**9, False),
        ("zero1", 10**9, False),
        ("fsdp", None, False),
    ],
)
def test_rank_with_sharded_weights_keeps_freed_memory_only_where_there_is_plenty(
    monkeypatch, sync, host_memory_bytes, keeps
):
    monkeypatch.setattr(run_module, "local_host_info", lambda: SimpleNamespace(memory_bytes=host_memory_bytes))
    members = [Member(rank=rank, host="a", device="cpu", dtype="fp32", share=1, micro_batch=1) for rank in range(2)]
    run = SimpleNamespace(
        roster=Roster(members=members, sync=parse_sync(sync), backend="gloo"), rank=0, spec=parse_args([])
    )
    resolved = SimpleNamespace(shape=preset_shape("char", 256))
    assert run_module._keeps_freed_memory(run, resolved) == keeps


OWN = """
import sys, torch, evener
from evener.core.run.run_spec import parse_args
with evener.join(parse_args(sys.argv[1:])) as run:
    run.model(torch.nn.Linear(2, 2))
"""


def test_program_of_ones_own_is_refused(tmp_path, run_script):
    """It may run forward on parts of a model, which would gather nothing."""
    failed = run_script(OWN, "--sync", "fsdp", "--out", str(tmp_path / "run"), ranks=2)
    assert failed.returncode != 0
    assert "--sync fsdp: not for a program of your own" in failed.stderr
    assert "Traceback" not in failed.stderr
