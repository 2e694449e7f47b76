"""Compressed strategies give every rank the same sums, and keep what was not sent yet."""

from __future__ import annotations

import json
import re
import shutil
import types
from itertools import pairwise
from statistics import fmean

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from evener.core.base.errors import UsageError
from evener.core.run.roster import DDP, Member, Roster, parse_sync
from evener.core.run.rundir import RunDir
from evener.plan.cost import penalty
from evener.report.read.event_log import describe_event
from evener.report.read.run_summary import summarize_run
from evener.worker.rank.clock import HostClock
from evener.worker.sync import CompressionTraits
from evener.worker.sync.allreduce_hook import AllReduceHook
from evener.worker.sync.bucket_queue import BucketQueue, GradBucketSlice
from evener.worker.sync.codecs import BlockwiseIntCodec
from evener.worker.sync.dense_rest import DenseAllReduce
from evener.worker.sync.gradient_sync import GradientSync
from evener.worker.sync.no_sync import NoSync
from evener.worker.sync.packed import PackedAllReduce
from evener.worker.sync.powersgd import PowerSGD
from evener.worker.sync.quantized import QuantizedAllReduce
from evener.worker.sync.sync_factory import make_sync

from ..tiers import exhaustive, exhaustively
from .test_cli import evener

LOSSY = ("bf16", "int8", "int4", "powersgd:2")
FLAGS = ("--steps", "40", "--batch", "12", "--verify-every", "10", "--eval-every", "0", "--lr", "0.002")
# d4's shape in small: value embeddings, and a head of its own
TABLES = ("--model", "d4", "--width", "64", "--num-heads", "2", "--num-layers", "2", "--block-size", "32")

EXCHANGES = """
import json, os, sys, types
import torch, torch.distributed as dist
from torch import nn
from evener.core.run.roster import parse_sync
from evener.worker.sync.sync_factory import make_algorithm
from evener.worker.sync.bucket_queue import GradBucketSlice

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
group = types.SimpleNamespace(rank=rank, world_size=n, gradient_group=dist.group.WORLD, backend="gloo",
                              device=torch.device("cpu"))

def found_of(name):
    exchange = make_algorithm(parse_sync(name), group)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((40, 70), (11,), (300,), (64, 64))]
    draw = torch.Generator().manual_seed(rank)
    given, same, sent = [torch.zeros(p.numel(), dtype=torch.float64) for p in parameters], True, 0
    got = [torch.zeros_like(one) for one in given]
    for step in range(20):
        views = [torch.randn(p.numel(), generator=draw) * 10.0 ** (step % 3) for p in parameters]
        if name == "packed":
            views = [view.bfloat16().float() if i % 2 else view for i, view in enumerate(views)]
        for total, view in zip(given, views):
            total += view
        sent += exchange.run(GradBucketSlice(0, tuple(parameters), views, is_warmup=False))
        for total, view in zip(got, views):
            total += view
        for view in views:
            others = [torch.empty_like(view) for _ in range(n)]
            dist.all_gather(others, view)
            same &= all(torch.equal(view, other) for other in others)
    names = {p: str(i) for i, p in enumerate(parameters)}
    left = [torch.zeros_like(one) for one in given]
    for kind, found in exchange.rank_state_dict(names).items():
        if kind != "factors":
            for i, tensor in found.items():
                left[int(i)] += tensor.reshape(-1)
    for total in (*given, *left):
        dist.all_reduce(total)
    worst = max(float((a - b - c).abs().max() / a.abs().max()) for a, b, c in zip(given, got, left))
    return {"same": same, "worst": worst, "sent": sent / 20, "num": sum(p.numel() for p in parameters)}

told = {name: found_of(name) for name in sys.argv[1:]}
if rank == 0:
    print(json.dumps(told), flush=True)
dist.barrier()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""


@pytest.mark.parametrize("ranks", [2, 3, *exhaustively(4)])
def test_error_feedback_conserves_the_gradient_sum(run_script, ranks):
    """Error feedback telescopes: over any number of steps Σ gradients = Σ results + what is left, on all ranks.

    Bytes: of P numbers 2 ranks send them once, more a part to each and back; int4 has half a byte and 1/32 for scales.
    """
    done = run_script(EXCHANGES, "ddp", "packed", *LOSSY, ranks=ranks)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {name: found["same"] for name, found in told.items()} == dict.fromkeys(("ddp", "packed", *LOSSY), True)
    assert max(found["worst"] for found in told.values()) < 1e-5
    for name, num_bytes in (("bf16", 2.0), ("int8", 1 + 2 / 256), ("int4", 1 / 2 + 2 / 64)):
        factor = 1 if ranks == 2 else 2 * (ranks - 1) / ranks
        stated = factor * num_bytes * told[name]["num"]
        in_blocks = stated * (1 + 256 * ranks / told[name]["num"])  # each part is whole blocks
        assert stated <= told[name]["sent"] <= in_blocks


@pytest.mark.parametrize(
    ("sync", "ranks"),
    [
        ("int8", 2),
        *exhaustively(
            ("bf16", 2), ("int4", 2), ("powersgd:2", 2), ("powersgd:2", 3), ("bf16", 3), ("int8", 3), ("int4", 3)
        ),
    ],
)
def test_lossy_run_stays_close_to_ddp_with_equal_replicas(shared_train, sync, ranks):
    plain = shared_train(*FLAGS, ranks=ranks).records(0)
    assert not any(record.fidelity for record in plain)
    run = shared_train(*FLAGS, "--sync", sync, ranks=ranks)
    assert run.manifest().result.replicas_agree is True
    assert sum(event["event"] == "replicas.agree" for event in run.events()) == 4
    losses = [record.loss for record in run.records(0)]
    assert losses != [record.loss for record in plain]
    assert losses[-1] == pytest.approx(plain[-1].loss, rel=0.05)
    assert losses[-1] < 0.9 * losses[0]
    assert run.records(1)[5].bytes < 0.6 * plain[5].bytes
    compared = [record.fidelity for record in run.records(0) if record.fidelity]
    assert len(compared) == 1  # of 40 steps every 10th is sampled, of these every 5th
    assert compared[0].error < {"bf16": 0.01, "int8": 0.02, "int4": 0.3, "powersgd:2": 1.0}[sync]
    assert compared[0].cosine > (0.3 if sync == "powersgd:2" else 0.95)


@pytest.mark.parametrize("dtype", ["fp32", *exhaustively("bf16")])
def test_packed_losses_equal_ddp_losses_bit_for_bit(shared_train, dtype):
    runs = [shared_train(*FLAGS, "--dtype", dtype, "--sync", sync, ranks=2) for sync in ("ddp", "packed")]
    plain, packed = ([record.loss for record in run.records(0)] for run in runs)
    assert packed == plain
    sent = [run.records(0)[5].bytes for run in runs]
    assert sent[1] < (0.6 if dtype == "bf16" else 1.001) * sent[0]


@exhaustive
@pytest.mark.parametrize(("sync", "ranks"), [("ddp+sparse", 3), *exhaustively(("ddp+sparse", 2), ("int8+sparse", 2))])
def test_sparse_embeddings_give_same_losses_as_dense(tmp_path, train, sync, ranks):
    flags = (*FLAGS, *TABLES)
    dense, sparse = (train(tmp_path / name, *flags, "--sync", name, ranks=ranks) for name in (sync[:-7], sync))
    assert sparse.manifest().result.replicas_agree is True
    losses = [[record.loss for record in run.records(0)] for run in (dense, sparse)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if sync == "ddp+sparse" else 0.02)


@pytest.mark.parametrize(
    ("sync", "ranks", "more"),
    [
        ("int4", 3, ()),
        *exhaustively(
            ("int8+sparse", 2, TABLES), ("bf16", 2, ("--dtype", "fp32")), ("int8", 2, ()), ("powersgd:2", 2, ())
        ),
    ],
)
def test_resumed_run_matches_bit_for_bit(tmp_path, train, sync, ranks, more):
    flags = (*FLAGS, *more, "--sync", sync, "--checkpoint-every", "15", "--warmup", "2")
    whole = train(tmp_path / "whole", *flags, ranks=ranks)
    train(tmp_path / "cut", *flags, "--max-s", "0", ranks=ranks)  # ends after its first step
    cut = train(tmp_path / "cut", *flags, "--resume", ranks=ranks)
    assert [record.loss for record in cut.records(0)] == [record.loss for record in whole.records(0)]


@pytest.mark.parametrize(
    ("sync", "before", "after", "is_lost"),
    [("int4", 3, 2, True), *exhaustively(("int4", 3, 2, False), ("powersgd:2", 2, 3, False))],
)
def test_residuals_of_removed_ranks_are_kept_or_reported_missing(tmp_path, train, sync, before, after, is_lost):
    flags = (*FLAGS, "--sync", sync)
    train(tmp_path / "run", *flags, "--max-s", "0", ranks=before)
    if is_lost:  # its machine is out of reach
        shutil.rmtree(tmp_path / "run" / "own" / "rank-2")
    run = train(tmp_path / "run", *flags, "--resume", ranks=after)
    assert run.manifest().result.replicas_agree is True
    assert [record.step for record in run.records(0)] == list(range(40))
    told = [
        describe_event(event, run.manifest()).description for event in run.events() if event["event"] == "own.missing"
    ]
    assert told == ["step 1: unsent gradients of 1 rank are missing: a host that saved them left the run"] * is_lost


BEYOND = """
import runpy, sys
from evener.plan.cost import penalty
from evener.worker.sync import bucket_queue
penalty.BF16_ROUNDING, bucket_queue.COMPARE_EVERY = 1e-4, 1
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


def test_run_reports_error_beyond_measured_limit(tmp_path, corpus, run_script):
    """As if less than what bf16 rounds had been measured."""
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--dtype", "fp32",
             "--steps", "70", "--batch", "4", "--sync", "bf16"]  # fmt: skip
    done = run_script(BEYOND, *flags, "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    compared = [record for record in run.records(0) if record.fidelity]
    (told,) = [event for event in run.events() if event["event"] == "sync.fidelity"]
    assert told["step"] == compared[penalty.CompressionErrorMonitor.NUM_SAMPLES - 1].step
    assert told["error"] == sorted(record.fidelity.error for record in compared[:5])[2]
    assert 1e-3 < told["error"] < 2**-8  # what the nearest bf16 is off
    assert re.fullmatch(r"--sync bf16: the sums of gradients are 0\.\d% off the exact sums; .*", told["why"])
    assert f"step {told['step'] + 1}: {told['why']}" in done.stdout


def test_resume_with_other_strategy_is_refused(tmp_path, train, start):
    train(tmp_path / "run", *FLAGS, "--max-s", "0", ranks=2)
    refused = start(tmp_path / "run", *FLAGS, "--sync", "int8", "--resume")
    assert refused.wait() != 0
    assert "its sync strategy is ddp" in refused.text()
    assert "Traceback" not in refused.text()


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        ("int7", "--sync int7: no such strategy"),
        *exhaustively(("powersgd:0", "no such strategy")),
    ],
)
def test_invalid_strategy_is_a_one_line_error(tmp_path, start, sync, told):
    refused = start(tmp_path / "run", *FLAGS, "--sync", sync)
    assert refused.wait() == 2
    assert told in refused.text()
    assert "Traceback" not in refused.text()
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("sync", "dtype", "told"),
    [
        ("int8+sparse", "fp32", "no lookup-only embedding table"),
        ("powersgd:500", "fp32", "no matrix of this model"),
        ("int8", "fp16", "of another loss scale"),
    ],
)
def test_useless_or_harmful_strategy_is_refused(sync, dtype, told):
    member = Member(rank=0, host="a", device="cuda:0", dtype=dtype, share=1, micro_batch=1)
    roster = Roster(members=[member, member], sync=parse_sync(sync), backend="gloo")
    with pytest.raises(UsageError, match=told):
        make_sync(roster, None, None, lambda part: None, nn.Linear(100, 100))


@pytest.mark.parametrize("sync", ["packed", "ddp+sparse", "int8", "powersgd:4"])
def test_non_fp32_weights_are_refused_except_by_ddp(sync):
    """What packs, codes or copies them would round them, each rank what it got."""
    member = Member(rank=0, host="a", device="cpu", dtype="fp32", share=1, micro_batch=1)
    module = nn.Sequential(nn.Embedding(30, 20), nn.Linear(20, 20)).double()
    roster = Roster(members=[member, member], sync=parse_sync(sync), backend="gloo")
    group = types.SimpleNamespace(world_size=2)
    with pytest.raises(UsageError, match=r"0\.weight is torch\.float64"):
        make_sync(roster, group, None, lambda part: None, module)
    ddp = msgspec.structs.replace(roster, sync=parse_sync("ddp"))
    assert isinstance(make_sync(ddp, group, HostClock(), lambda part: None, module), GradientSync)


# The strategy changes at the steps that the first argument names.
CHANGES = """
import sys
from evener.core.run.roster import parse_sync
from evener.worker.membership.fixed import FixedMembership
pairs = [pair.split("=") for pair in sys.argv.pop(1).split(",") if pair]
CHANGES = {int(step): parse_sync(name) for step, name in pairs}
def update_roster(self, reports, next_step):
    if next_step not in CHANGES:
        return None
    self.roster = self.roster.with_sync(CHANGES[next_step], 0, next_step, why="it was asked for")
    return self.roster
FixedMembership.update_roster = update_roster
"""
CHANGING = (
    CHANGES
    + """
import runpy
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""
)


@pytest.mark.parametrize("ranks", [3, *exhaustively(2)])
def test_strategy_change_between_steps_keeps_replicas_equal(tmp_path, corpus, run_script, ranks):
    """As exactly as each way is, with equal replicas; what one has not sent the next one sends."""
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--dtype", "fp32",
             "--shares", "equal", "--steps", "50", "--batch", "6", "--verify-every", "5", "--lr", "3e-4"]  # fmt: skip
    runs = {}
    for what, changes in (("stay", ""), ("change", "10=packed,20=int8,30=powersgd:4,40=ddp")):
        done = run_script(CHANGING, changes, *flags, "--out", str(tmp_path / what), ranks=ranks)
        assert done.returncode == 0, done.stderr
        runs[what] = RunDir(tmp_path / what)
    assert all(run.manifest().result.replicas_agree is True for run in runs.values())
    told = [(event["step"], event["sync"], event["was"]) for event in runs["change"].events()
            if event["event"] == "rechosen"]  # fmt: skip
    ways = ["ddp", "packed", "int8", "powersgd:4", "ddp"]
    assert told == [(10 * i + 10, way, was) for i, (was, way) in enumerate(pairwise(ways))]
    assert str(runs["change"].manifest().roster.sync) == "ddp"
    stayed, changed = ([record.loss for record in runs[what].records(0)] for what in ("stay", "change"))
    assert changed[:20] == pytest.approx(stayed[:20], rel=1e-5)
    assert changed == pytest.approx(stayed, rel=0.02)
    sent = [record.bytes for record in runs["change"].records(0)]
    assert [len(set(sent[low + 1 : low + 10])) for low in (0, 10, 20, 30, 40)] == [1] * 5
    assert sent[35] < sent[25] < sent[5] == sent[45]
    assert runs["change"].manifest().since == 40
    assert summarize_run(runs["change"]).ranks[0].bytes == sent[45]


THERE_AND_BACK = ("10=diloco:5:int8:streamed,30=packed,35=int8,40=ddp,41=diloco:5,56=ddp,61=diloco:4:streamed", 70)


@exhaustive
@pytest.mark.parametrize("ranks", [2, *exhaustively(3, 4)])
def test_change_between_equal_and_drifting_replicas_keeps_learning(tmp_path, corpus, run_script, ranks):
    """Also where an exchange is in flight, in the middle of a round, and with residuals of both kinds."""
    changes, steps = THERE_AND_BACK
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--dtype", "fp32",
             "--shares", "equal", "--steps", str(steps), "--batch", "12", "--verify-every", "5", "--sync", "auto",
             "--dropout", "0", "--lr", "3e-4"]  # fmt: skip
    runs = {}
    for what, of_run in (("stays", ""), ("changes", changes)):
        done = run_script(CHANGING, of_run, *flags, "--out", str(tmp_path / what), ranks=ranks)
        assert done.returncode == 0, done.stderr
        runs[what] = RunDir(tmp_path / what)
    assert all(run.manifest().result.replicas_agree is True for run in runs.values())
    told = [f"{event['step']}={event['sync']}" for event in runs["changes"].events() if event["event"] == "rechosen"]
    assert ",".join(told) == changes
    stays, now = ([record.loss for record in runs[what].records(0)] for what in ("stays", "changes"))
    assert len(now) == steps
    assert now[:11] == pytest.approx(stays[:11], rel=1e-5)
    assert now == pytest.approx(stays, rel=0.1)
    assert sum(now[-10:]) == pytest.approx(sum(stays[-10:]), rel=0.03)
    val = [run.manifest().result.val_loss for run in runs.values()]
    assert val[1] == pytest.approx(val[0], rel=0.03)


@exhaustive
def test_run_that_changes_loses_no_more_than_one_that_always_drifts(tmp_path, corpus, run_script):
    """Neither the merges nor an outer momentum that starts at 0 costs more than drifting replicas do.

    In the mean of three seeds: with one, rounding alone moves the loss by 1 % (from one kind of processor to another).
    """
    flags = ["--data", str(corpus), "--model", "tiny", "--threads", "1", "--dtype", "fp32", "--shares", "equal",
             "--steps", "400", "--batch", "12", "--sync", "auto", "--dropout", "0", "--lr", "2e-3"]  # fmt: skip
    losses = {}
    for name, changes in (("ddp", ""), ("drifts", "1=diloco:10"),
                          ("changes", "50=diloco:10,150=ddp,200=diloco:10,350=ddp,360=diloco:10")):  # fmt: skip
        training, validation = [], []
        for seed in ("1", "2", "3"):
            out = tmp_path / f"{name}-{seed}"
            done = run_script(CHANGING, changes, *flags, "--seed", seed, "--out", str(out), ranks=2)
            assert done.returncode == 0, done.stderr
            training += [record.loss for record in RunDir(out).records(0)[-50:]]
            validation.append(RunDir(out).manifest().result.val_loss)
        losses[name] = fmean(training), fmean(validation)
    for ddp, drifts, changes in zip(*losses.values(), strict=True):
        assert changes < 1.005 * max(ddp, drifts)


@exhaustive
def test_run_that_changed_to_drifting_replicas_resumes_bit_for_bit(tmp_path, corpus, run_script):
    """Resumed from a checkpoint among drifting steps: as if it had not been stopped, though another strategy was in
    force when it was.
    """
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--dtype", "fp32",
             "--shares", "equal", "--batch", "4", "--sync", "auto", "--dropout", "0", "--ranks", "2", "--steps", "24",
             "--checkpoint-every", "12"]  # fmt: skip
    for name, later in (("whole", ""), ("run", ",18=ddp")):
        done = run_script(CHANGING, "4=diloco:5:int8:streamed" + later, *flags, "--out", str(tmp_path / name), ranks=2)
        assert done.returncode == 0, done.stderr
    run, whole = RunDir(tmp_path / "run"), RunDir(tmp_path / "whole")
    shutil.rmtree(run.checkpoint_path(24))
    resumed = evener(tmp_path, "train", "--resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step 12" in resumed.stderr
    for rank in (0, 1):
        assert [record.loss for record in run.records(rank)] == [record.loss for record in whole.records(rank)]
    assert run.manifest().result.val_loss == whole.manifest().result.val_loss


SGD = (
    CHANGES
    + """
import torch, evener
from torch.utils.data import TensorDataset
with evener.join(evener.parse_args(sys.argv[1:])) as run:
    model = run.model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.05))
    draw = torch.Generator().manual_seed(0)
    for step in run.steps(TensorDataset(torch.randn(64, 8, generator=draw), torch.randn(64, 1, generator=draw))):
        for x, y in step.micro_batches():
            step.backward((model(x) - y).square().sum())
        step.update(optimizer)
import gc
gc.collect()
of_ddp = torch.nn.parallel.DistributedDataParallel
print("modules:", sum(isinstance(one, of_ddp) for one in gc.get_objects()), flush=True)
"""
)
# Here gradients do not depend on the weights, so that their sum does not depend on the order of updates.
LINEAR = SGD.replace("torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)", "torch.nn.Linear(8, 64)")
LINEAR = LINEAR.replace("(model(x) - y).square().sum()", "(model(x) * y).sum()")


def test_replicas_that_merge_every_step_are_data_parallel_across_changes(tmp_path, run_script):
    """DiLoCo with H = 1 and plain SGD is data-parallel SGD: so is a run that changes."""
    flags = ["--steps", "30", "--batch", "8", "--threads", "1", "--clip", "0", "--shares", "3:1",
             "--checkpoint-every", "0"]  # fmt: skip
    losses = []
    for name, changes in (("ddp", ""), ("changes", "5=diloco:1,13=packed,18=ddp,20=diloco:1,27=ddp")):
        done = run_script(SGD, changes, *flags, "--out", str(tmp_path / name), ranks=2)
        assert done.returncode == 0, done.stderr
        assert set(re.findall(r"modules: \d+", done.stdout)) == {"modules: 1"}  # those of before hold no memory
        run = RunDir(tmp_path / name)
        assert run.manifest().result.replicas_agree is True
        losses.append([record.loss for record in run.records(0)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


HANDED_ON = """
import json, os, sys, types
import torch, torch.distributed as dist
from torch import nn
from evener.core.run.roster import Roster, parse_sync
from evener.worker.rank.clock import HostClock
from evener.worker.sync.sync_factory import make_sync

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
group = types.SimpleNamespace(rank=rank, world_size=n, gradient_group=dist.group.WORLD, control_group=dist.group.WORLD,
                              backend="gloo", device=torch.device("cpu"))

def roster(name):
    return Roster(members=[], sync=parse_sync(name), backend="gloo")

def off(name, by_turns):
    module = nn.ModuleList([nn.Linear(70, 40), nn.Linear(64, 64, bias=False)])
    sync = make_sync(roster(name), group, HostClock(), lambda part: None, module)
    sync.wrap(module, all_params_used=not by_turns)
    draw = torch.Generator().manual_seed(rank)
    parameters = list(module.parameters())
    given, got = ([torch.zeros(p.shape, dtype=torch.float64) for p in parameters] for _ in range(2))
    for step in range(9):
        if step == 8:
            sync.adopt_roster(roster("ddp"))
        module.zero_grad()
        gradients = [torch.randn(p.shape, generator=draw) for p in parameters]
        used = set(module[step % 2].parameters() if by_turns and 0 < step < 8 else parameters)
        sync.backward(sum((p * g).sum() for p, g in zip(parameters, gradients) if p in used))
        if step == 0:
            sync.finish_warmup()  # the rehearsal: nothing of it is remembered
            continue
        for total, g, parameter, summed in zip(given, gradients, parameters, got):
            assert (parameter.grad is not None) == (parameter in used)
            if parameter in used:
                total += g
                summed += parameter.grad
    for total in given:
        dist.all_reduce(total)
    return max(float((total - summed).abs().max()) for total, summed in zip(given, got))

told = {name: off(name, sys.argv[1] == "by turns") for name in sys.argv[2:]}
if rank == 0:
    print(json.dumps(told), flush=True)
dist.barrier()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""


@exhaustive
@pytest.mark.parametrize("which", ["all", "by turns"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_residual_is_sent_after_strategy_change(run_script, ranks, which):
    """All that optimizers got over eight steps, the last by ddp, is the sum of all gradients: to fp32's rounding.

    Also where two models are used by turns: what is left of one waits while the other learns.
    """
    done = run_script(HANDED_ON, which, *LOSSY, ranks=ranks)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == set(LOSSY)
    assert max(told.values()) < 1e-4


def test_single_rank_adds_residuals_of_several_ranks_to_first_gradient():
    module = nn.Linear(3, 2, bias=False)
    left = {name: torch.randn(6) for name in ("mine", "sums", "left", "unused")}
    alone = NoSync()
    alone.wrap(module, all_params_used=True)
    alone.load_rank_state_dict({"mine": {"weight": left["mine"]}, "sums": {"weight": left["sums"]}},
                         [{"left": {"weight": left["left"].view(2, 3)}, "factors": {"weight": torch.ones(1)}},
                          {"unused": {"weight": left["unused"]}}, {"agreed": {}, "left": {"mine": {}}}])  # fmt: skip
    for step in range(3):
        module.zero_grad()
        alone.backward(module(torch.ones(1, 3)).sum())
        expected = torch.ones(2, 3) + (sum(left.values()).view(2, 3) if step == 1 else 0.0)
        torch.testing.assert_close(module.weight.grad, expected)
        if step == 0:  # the rehearsal
            alone.finish_warmup()


def test_bucket_with_fewer_elements_than_ranks_is_packed():
    """Of a bucket with fewer numbers than ranks."""
    packed = PackedAllReduce(types.SimpleNamespace(world_size=4, rank=0))
    assert packed.pack_views([torch.zeros(0), torch.ones(1)], torch.zeros(16, dtype=torch.uint8)) == [True, True]


TWO_RANKS = Roster(members=[], sync=DDP, backend="gloo")
TAKES = [(DenseAllReduce, ()), (PackedAllReduce, ()), (QuantizedAllReduce, ("mine", "sums")), (PowerSGD, ("left",))]


@pytest.mark.parametrize(("exchange", "takes"), TAKES)
def test_residuals_of_other_strategy_are_sent_with_next_gradients(exchange, takes):
    """A run that died between a change of its way and the next checkpoint goes on from a state of the way before."""
    group = types.SimpleNamespace(world_size=2, rank=0, device=torch.device("cpu"))
    more = {QuantizedAllReduce: (BlockwiseIntCodec(8),), PowerSGD: (4,)}.get(exchange, ())
    lane = BucketQueue(group, HostClock(), exchange(group, *more), frozenset())
    buckets = GradientSync(group, HostClock(), lambda part: None, TWO_RANKS, lambda sync: lane)
    buckets._module = nn.ParameterDict({"weight": torch.zeros(40, 70)})
    parts = {kind: torch.full((40, 70) if kind == "left" else (2800,), 10.0**i)
             for i, kind in enumerate(("mine", "sums", "left", "unused"))}  # fmt: skip
    buckets.load_rank_state_dict({kind: {"weight": part} for kind, part in parts.items()}, [])
    kept = sum(float(flat.mean()) for flat in buckets._residuals.values())
    assert kept == sum(float(part.mean()) for kind, part in parts.items() if kind not in takes)
    assert kept + sum(float(flat.mean()) for _, flat in lane.residuals()) == 1111.0
    buckets.load_rank_state_dict({"agreed": {}, "left": {"mine": {}}}, [])  # replicas that drifted kept something else
    assert buckets._residuals == {}


def test_residuals_of_same_parameter_are_added():
    """As of a rank that had left something of its gradients and of sums before its way changed."""
    group = types.SimpleNamespace(world_size=2, rank=0)
    hook = AllReduceHook(group, HostClock())
    buckets = GradientSync(group, HostClock(), lambda part: None, TWO_RANKS, lambda sync: hook)
    buckets._module = nn.ParameterDict({"weight": torch.zeros(4)})
    weight = buckets._module["weight"]
    buckets._add_residuals([(weight, torch.ones(4)), (weight, 10 * torch.ones(4))])
    buckets.load_rank_state_dict(buckets.rank_state_dict(), [])
    assert sum(float(flat.sum()) for flat in buckets._residuals.values()) == 44.0


def test_dense_embedding_gradient_is_compressed_from_second_step_after_switch():
    """A change of the way has no rehearsal."""
    group = types.SimpleNamespace(world_size=2, rank=0, device=torch.device("cpu"))
    tables = [nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(6, 4))]
    coded: list[tuple[nn.Parameter, ...]] = []
    exchange = types.SimpleNamespace(traits=CompressionTraits(), run=lambda slots: coded.append(slots.parameters) or 0)
    lane = BucketQueue(group, HostClock(), exchange, frozenset(tables))
    lane._sparse_all_reduce = types.SimpleNamespace(run=lambda table: (0, len(table) == 6))
    gradients = torch.zeros(56)
    bucket = types.SimpleNamespace(
        parameters=lambda: tables, index=lambda: 0, buffer=lambda: gradients,
        gradients=lambda: [gradients[:32].view(8, 4), gradients[32:].view(6, 4)])  # fmt: skip
    for _ in range(2):
        lane.start(bucket, is_warmup=False, sample_gradients=False)
        lane.wait_all()
    assert coded == [(tables[1],)]


def test_zero_first_gradient_does_not_stop_powersgd():
    """As below a layer that begins with zeros: here of a table of whose first rows no token ever comes."""
    powersgd, table = PowerSGD(types.SimpleNamespace(world_size=1, rank=0), 2), nn.Parameter(torch.zeros(64, 32))
    gradient = torch.zeros(64, 32)
    for step in range(3):
        view = gradient.clone().view(-1)
        powersgd.run(GradBucketSlice(0, (table,), [view], is_warmup=False))
        assert bool(view.any()) == (step > 0)
        gradient[8:] = torch.randn(56, 32)


def test_state_of_other_strategy_is_ignored():
    """A run that died between a change of its way and the next checkpoint goes on from a state of the way before."""
    weight = {"weight": nn.Parameter(torch.zeros(40, 70))}
    group = types.SimpleNamespace(world_size=2, rank=0)
    of_narrow = {"mine": {"weight": torch.zeros(2800)}, "sums": {}}
    of_powersgd = {"left": {"weight": torch.zeros(40, 70)}, "factors": {"weight": torch.zeros(70, 4)}}
    narrow, powersgd = QuantizedAllReduce(group, BlockwiseIntCodec(8)), PowerSGD(group, 4)
    narrow.load_rank_state_dict([of_powersgd], weight)
    powersgd.load_rank_state_dict([of_narrow], weight)
    assert narrow.residuals() == powersgd.residuals() == []


@pytest.mark.parametrize("ranks", [2, *exhaustively(3)])
def test_no_update_is_lost_in_changes_of_strategy(tmp_path, run_script, ranks):
    """Not what int8 has not sent yet, nor what is in flight: the weights move as far as with ddp, up to rounding."""
    changes = "4=int8,9=ddp,10=diloco:4:int8:streamed,23=packed,26=int8,31=ddp,32=diloco:4:int8,38=ddp"
    flags = ["--steps", "40", "--batch", "12", "--threads", "1", "--clip", "0", "--sync", "auto"]
    weights = []
    for name, of_run in (("ddp", ""), ("changes", changes)):
        done = run_script(LINEAR, of_run, *flags, "--out", str(tmp_path / name), ranks=ranks)
        assert done.returncode == 0, done.stderr
        run = RunDir(tmp_path / name)
        (step,) = run.checkpoint_steps()
        loaded = load_file(run.checkpoint_path(step) / "weights.safetensors")
        weights.append(torch.cat([loaded[tensor].flatten() for tensor in sorted(loaded)]))
    moved = float((weights[0]).abs().max())
    assert float((weights[1] - weights[0]).abs().max()) < 1e-5 * moved
