"""DiLoCo replicas train alone for H steps, and then agree bit for bit."""

from __future__ import annotations

import json
import shutil
import types

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from evener.core.base.errors import UsageError
from evener.core.cluster.host_info import local_host_info
from evener.core.run.roster import NO_SYNC, RankSlot, initial_roster, parse_sync
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.clock import HostClock
from evener.worker.state.rank_state import load_rank_state
from evener.worker.sync.streaming_diloco import StreamingDiLoCo
from tests.conftest import flags_of

from ..tiers import exhaustively

FLAGS = ("--steps", "40", "--batch", "12", "--verify-every", "10", "--eval-every", "0", "--lr", "0.002")
CODED = ("", ":int8", ":int4")

OUTER = """
import json, os, sys, types
import torch, torch.distributed as dist
from torch import nn
from evener.core.run.roster import parse_sync
from evener.plan.cost import sync_traffic as plan
from evener.worker.rank.clock import HostClock
from evener.worker.sync import diloco

plan.FRAGMENT_BYTES = 8000  # several fragments
rounds = 24
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
group = types.SimpleNamespace(rank=rank, world_size=n, gradient_group=dist.group.WORLD, control_group=dist.group.WORLD,
                              backend="gloo", device=torch.device("cpu"))

def gathered(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_gather(everyone, tensor.detach())
    return everyone

def found_of(spec):
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    module = nn.Sequential(nn.Linear(40, 70), nn.LayerNorm(70), nn.Linear(70, 30), nn.Linear(30, 11))
    sync = diloco.DiLoCo(group, HostClock(), lambda part: None, spec)
    sync.wrap(module, all_params_used=True)
    parameters = list(module.parameters())
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    outer = torch.optim.SGD(plain, momentum=0.5, nesterov=True)
    tokens = [0.0] * n  # since the last exchange
    same, worst, drifted, sent, compared = True, 0.0, 0.0, [], []

    for step in range(rounds * spec.every):
        with torch.no_grad():
            for parameter in parameters:
                if rank:
                    parameter.add_(torch.randn_like(parameter) * 1e-3)
        first = float(n == 2)  # of three, rank 0 has no share; the others' change
        in_step = [first] + [float(one * (1 + (step + one) % 3)) for one in range(1, n)]
        tokens = [had + more for had, more in zip(tokens, in_step)]
        sync.after_optimizer_step(in_step[rank], sum(in_step))
        if (step + 1) % spec.every == 0:
            for ours, theirs in zip(plain, parameters):
                parts = zip(gathered(theirs), tokens)
                ours.grad = sum((ours.detach() - one) * (weight / sum(tokens)) for one, weight in parts)
            done = step // spec.every  # the momentum grows; torch's optimizer has none to begin with where it is 0
            full = (1 - sum((one / sum(tokens)) ** 1.5 for one in tokens)) ** 0.5 if spec.has_outer_momentum else 0.0
            momentum = min(full, done / (done + diloco.MOMENTUM_WARMUP_ROUNDS))
            outer.param_groups[0].update(momentum=max(1e-30, momentum), lr=1 / (1 + momentum))
            outer.step()
            tokens = [0.0] * n
        else:
            drifted = max(drifted, float((parameters[0] - gathered(parameters[0])[0]).abs().max()))
        sync.after_step(step)
        sent.append(sync.take_comm_stats().sent_bytes)
        if (fidelity := sync.take_gradient_stats().fidelity) is not None:
            compared.append([step // spec.every, *fidelity.tolist()])
        if (step + 1) % spec.every == 0:
            for ours, theirs in zip(plain, parameters):
                same &= all(torch.equal(one, theirs) for one in gathered(theirs))
                worst = max(worst, float((ours - theirs).abs().max()))
    agreed, would = sync.is_synced(), sync.needs_merge()
    with torch.no_grad():
        for parameter in parameters:
            if rank:
                parameter.add_(torch.randn_like(parameter) * 1e-3)
    tokens = [float(one) for one in range(n)]
    sync.after_optimizer_step(tokens[rank], sum(tokens))
    left = {parameter: torch.zeros(parameter.numel()) for parameter in parameters}
    for parameter, more in sync._quantized.residuals() if sync._quantized else ():
        left[parameter] += more
    most_left = max(float(one.abs().max()) for one in left.values())
    mean = {parameter: sum(one * (weight / sum(tokens)) for one, weight in zip(gathered(parameter), tokens)) -
                       sum(gathered(left[parameter])).view(parameter.shape) for parameter in parameters}
    sync.merge_replicas()
    off = max(float((mean[parameter] - parameter).abs().max()) for parameter in parameters)
    saved = sync.synced_weights(dict(module.named_parameters()))
    same &= all(torch.equal(saved[name], parameter) for name, parameter in module.named_parameters())
    same &= agreed and sync.is_synced() and not sync.needs_merge()
    return {"same": same, "would": would, "worst": worst, "drifted": drifted, "sent": sent,
            "compared": compared, "off": off, "left": most_left, "fragments": len(sync._fragments),
            "num": sum(parameter.numel() for parameter in parameters)}

told = {name: found_of(parse_sync(name)) for name in sys.argv[1:]}
if rank == n - 1:
    print(json.dumps(told), flush=True)
dist.barrier()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""


@pytest.mark.parametrize("ranks", [2, *exhaustively(3)])
def test_replicas_match_torch_sgd_outer_step_bit_for_bit(run_script, ranks):
    syncs = ("diloco:3", *(f"diloco:6{code}" for code in CODED))  # short rounds have no momentum
    done = run_script(OUTER, *syncs, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for sync, found in json.loads(done.stdout).items():
        code, every = sync.removeprefix(sync[:8]), int(sync[7])
        assert found["fragments"] > 2
        assert found["same"]
        assert found["drifted"] > 1e-3  # between two outer steps they are apart
        assert found["worst"] < (1e-5 if not code else 1e-2)
        # At last it is the mean of the replicas by tokens, exactly, and what was left is sent with it: a run that ends
        # where replicas agree has that to send, too.
        assert found["would"] == bool(code)
        assert found["off"] < 3e-7
        assert (found["left"] > 1e-6) == bool(code)
        # Bytes: all in the step of the exchange, by the formula of the code.
        per_number = {"": 4.0, ":int8": 1 + 2 / 256, ":int4": 1 / 2 + 2 / 64}[code]
        factor = 1 if ranks == 2 else 2 * (ranks - 1) / ranks
        assert [bool(sent) for sent in found["sent"]] == [*[False] * (every - 1), True] * 24
        stated = found["num"] * per_number * factor
        assert stated <= found["sent"][-1] + 8 <= 1.4 * stated  # parts and blocks are whole
        # Every fifth is compared with the exact sum. Of normal numbers, of which the largest of a block is 2.8σ (256)
        # or 2.4σ (64), 2·127 and 2·7 steps leave an error of a step/√12: 0.64 % and 9.9 %. What was left of the
        # exchange before is sent with it, which is once more as much; and more than two ranks code the sums as well.
        assert [exchange for exchange, *_ in found["compared"]] == ([0, 5, 10, 15, 20] if code else [])
        for exchange, error, cosine in found["compared"]:
            times = (1 if ranks == 2 else 2) * (2 if exchange else 1)
            assert error == pytest.approx({":int8": 0.0064, ":int4": 0.099}[code] * times**0.5, rel=0.25)
            assert cosine == pytest.approx((1 - error**2) ** 0.5, abs=0.01)


KEPT = """
import json, os, sys, types
import torch, torch.distributed as dist
from torch import nn
from evener.core.run.roster import parse_sync
from evener.worker.rank.clock import HostClock
from evener.worker.sync.streaming_diloco import StreamingDiLoCo

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
group = types.SimpleNamespace(rank=rank, world_size=n, gradient_group=dist.group.WORLD, control_group=dist.group.WORLD,
                              backend="gloo", device=torch.device("cpu"))
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(40, 70), nn.LayerNorm(70), nn.Linear(70, 30), nn.Linear(30, 11))
sync = StreamingDiLoCo(group, HostClock(), lambda part: None, parse_sync(sys.argv[1]), momentum=lambda tokens: 0.0)
sync.wrap(module, all_params_used=True)
began = [parameter.detach().double() for parameter in module.parameters()]
learned = [torch.zeros_like(one) for one in began]
tokens = [float(rank + 1) for rank in range(n)]
torch.manual_seed(rank)
drifted = 0.0
for step in range(43):
    with torch.no_grad():
        for parameter, sums in zip(module.parameters(), learned):
            before = parameter.double()
            parameter.add_(torch.randn_like(parameter) * 1e-2)
            sums += parameter.double() - before
    sync.after_optimizer_step(tokens[rank], sum(tokens))
    sync.after_step(step)
sync.merge_replicas()
off = 0.0
for parameter, first, sums in zip(module.parameters(), began, learned):
    sums *= tokens[rank] / sum(tokens)
    dist.all_reduce(sums)
    drifted = max(drifted, float(sums.abs().max()))
    off = max(off, float((first + sums - parameter.double()).abs().max()))
if rank == 0:
    print(json.dumps({"off": off, "moved": drifted, "fragments": len(sync._fragments)}), flush=True)
dist.barrier()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""


@pytest.mark.parametrize(("sync", "ranks"), [("diloco:5:streamed", 2), ("diloco:8:int8:streamed", 3)])
def test_streamed_updates_are_neither_lost_nor_counted_twice(run_script, sync, ranks):
    """Without an outer momentum the model ends where it began plus all that its replicas learned, by their tokens."""
    done = run_script(KEPT, sync, ranks=ranks)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fragments"] > 2
    assert found["moved"] > 0.1
    assert found["off"] < 2e-6  # rounding, 43 steps long


def test_exchange_in_flight_saved_without_its_difference_is_refused():
    def start():
        group = types.SimpleNamespace(rank=0, world_size=1, gradient_group=None, device=torch.device("cpu"))
        module = torch.nn.Linear(3, 3)
        sync = StreamingDiLoCo(group, HostClock(), lambda part: None, parse_sync("diloco:3:streamed"))
        sync.wrap(module, all_params_used=True, is_under_way=True)
        return sync

    sync = start()
    for step in range(3):
        sync.after_optimizer_step(1.0, 1.0)
        sync.after_step(step)
    state = sync.rank_state_dict()
    assert state.pop("differences")
    other = start()
    with pytest.raises(UsageError, match="saved by another version"):
        other.load_rank_state_dict(state, [])
    sync.unwrap()
    other.unwrap()


CLOSED = """
import sys, numpy, torch, evener
from torch import nn
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): return numpy.random.default_rng((seed, step)).normal(size=(num, 8))
    def num_tokens(self, samples): return float(numpy.abs(samples).sum())
    def load(self, samples, device): return torch.from_numpy(samples).float()

spec = parse_args(["--out", sys.argv[1], "--batch", "7", "--steps", "12", "--threads", "1", "--clip", "0", "--shares",
                   sys.argv[3], "--sync", sys.argv[2], "--eval-every", "0", "--verify-every", "1"])
with evener.join(spec) as run:
    models = [run.model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))) for _ in range(2)]
    optimizers = [run.optimizer(torch.optim.SGD(model.parameters(), 0.05)) for model in models]
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            step.backward(sum((model(batch).square().sum(1) * batch.abs().sum(1)).sum() for model in models))
        for optimizer in optimizers:
            step.update(optimizer)
"""


@pytest.mark.parametrize(("ranks", "shares"), [(3, "4:0:3"), *exhaustively((2, "5:2"))])
def test_diloco_with_one_inner_step_equals_ddp(tmp_path, run_script, ranks, shares):
    """H = 1, plain SGD inside; tokens are what losses are weighed by."""
    runs = []
    for sync in ("ddp", "diloco:1"):
        done = run_script(CLOSED, str(tmp_path / sync), sync, shares, ranks=ranks)
        assert done.returncode == 0, done.stderr
        runs.append(RunDir(tmp_path / sync))
    plain, ours = ([record.loss for record in run.records(0)] for run in runs)
    assert plain[-1] < 0.9 * plain[0]
    assert ours == pytest.approx(plain, rel=1e-5)
    for name, weight in weights(runs[0]).items():
        torch.testing.assert_close(weights(runs[1])[name], weight, rtol=1e-4, atol=1e-6)
    assert sum(event["event"] == "replicas.agree" for event in runs[1].events()) == 12


ADAMW = """
import sys, torch, evener
from torch.utils.data import TensorDataset
with evener.join(evener.parse_args(sys.argv[1:])) as run:
    model = run.model(torch.nn.Linear(8, 1, bias=False))
    torch.nn.init.zeros_(model.weight)
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 0.25))
    for step in run.steps(TensorDataset(torch.ones(64, 8))):
        for (x,) in step.micro_batches():
            step.backward(model(x).sum())
        step.update(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.25
"""


def test_learning_rate_is_larger_in_rounds_of_up_to_four_steps(tmp_path, run_script):
    """AdamW's first step is as long as its learning rate, which is divided by Σ w·√w of the shares: here of 3 : 1."""
    first = {"ddp": 1.0, "diloco:1": 1 / (0.75**1.5 + 0.25**1.5), "diloco:6": 1.0}
    for sync, factor in first.items():
        flags = ["--steps", "1", "--batch", "8", "--threads", "1", "--shares", "3:1", "--out", str(tmp_path / sync)]
        done = run_script(ADAMW, *flags, "--sync", sync, ranks=2)
        assert done.returncode == 0, done.stderr
        assert weights(RunDir(tmp_path / sync))["weight"].mean() == pytest.approx(-0.25 * factor, rel=1e-5)
        assert RunDir(tmp_path / sync).records(0)[0].lr == 0.25


def weights(run):
    return load_file(run.checkpoint_path(run.checkpoint_steps()[-1]) / "weights.safetensors")


@pytest.mark.parametrize(("code", "ranks"), [(":streamed", 2), *exhaustively(("", 2), (":int8", 2), (":int4", 3))])
def test_diloco_loss_is_close_to_ddp(shared_train, code, ranks):
    flags = (*FLAGS, "--steps", "60")
    plain = shared_train(*flags, ranks=ranks)
    run = shared_train(*flags, "--sync", f"diloco:10{code}", ranks=ranks)
    assert run.manifest().result.replicas_agree is True
    assert sum(event["event"] == "replicas.agree" for event in run.events()) == 6
    losses, truth = ([record.loss for record in one.records(0)] for one in (run, plain))
    assert losses[0] == pytest.approx(truth[0], rel=1e-5)  # the same weights, the same batch
    assert losses[-1] < 0.8 * losses[0]
    found, truth = run.manifest().result.val_loss, plain.manifest().result.val_loss
    assert found == pytest.approx(truth, rel=0.05)


def test_step_parts_sum_to_wall_time_and_bytes_are_sent_at_outer_step(tmp_path, train):
    run = train(tmp_path / "run", *FLAGS, "--sync", "diloco:8:int8", "--shares", "3:1", ranks=2)
    for rank in (0, 1):
        records = run.records(rank)
        assert [bool(record.bytes) for record in records] == [(record.step + 1) % 8 == 0 for record in records]
        assert {record.tokens for record in records} == {9 * 64} if rank == 0 else {3 * 64}
        assert all(record.sync_s == 0 or record.bytes for record in records)
        assert [record.cost.total_s for record in records] == pytest.approx([record.wall_s for record in records])


@pytest.mark.parametrize(
    ("sync", "ranks"), [("diloco:16:int4:streamed", 2), *exhaustively(("diloco:7:int8", 2), ("diloco:7", 3))]
)
def test_resumed_run_matches_bit_for_bit(tmp_path, train, sync, ranks):
    """From a checkpoint between two outer steps, and from a stop, after which the replicas had become one model."""
    flags = (*FLAGS, "--sync", sync, "--checkpoint-every", "10", "--warmup", "2", "--dropout", "0.1",
             "--shares", ":".join("321"[:ranks]))  # fmt: skip
    whole = train(tmp_path / "whole", *flags, ranks=ranks)
    shutil.copytree(whole.path, tmp_path / "crashed")
    shutil.rmtree(tmp_path / "crashed" / "checkpoints" / "step-000040")  # the next one is two steps behind an outer one
    train(tmp_path / "stopped", *flags, "--max-s", "0", ranks=ranks)  # after its first steps
    for name in ("crashed", "stopped"):
        cut = train(tmp_path / name, *flags, "--resume", ranks=ranks)
        assert [record.loss for record in cut.records(0)] == [record.loss for record in whole.records(0)]
        assert_same_checkpoint(cut, whole, 40)


def assert_same_checkpoint(ours, theirs, step):
    for file in ("weights.safetensors", "state.safetensors"):
        assert (ours.checkpoint_path(step) / file).read_bytes() == (theirs.checkpoint_path(step) / file).read_bytes()


@pytest.mark.parametrize("drops", ["a rank", *exhaustively("all but one", "a file")])
def test_different_rank_count_resumes_from_agreed_weights(tmp_path, train, drops):
    flags = (*FLAGS, "--sync", "diloco:6", "--eval-every", "10")
    stopped = train(tmp_path / "run", *flags, "--max-s", "0", ranks=3).manifest().result.steps
    ranks = {"a rank": 2, "all but one": 1, "a file": 3}[drops]
    if drops == "a file":
        shutil.rmtree(tmp_path / "run" / "own" / "rank-1")
    run = train(tmp_path / "run", *flags, "--resume", ranks=ranks)
    assert run.manifest().result.replicas_agree is (None if ranks == 1 else True)
    assert [record.step for record in run.records(0)] == list(range(40))
    assert run.records(0)[-1].loss < 0.9 * run.records(0)[0].loss
    assert [event["step"] for event in run.events() if event["event"] == "own.dropped"] == [stopped]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("diloco:6:int8:streamed", "diloco:30"),
        *exhaustively(
            ("int8", "diloco:30"),
            ("diloco:6:streamed", "diloco:30:streamed"),
            ("diloco:30:streamed", "diloco:6:streamed"),
        ),
    ],
)
def test_per_rank_state_of_other_strategy_is_dropped(tmp_path, train, was, now):
    """The run's newest manifest is of a rank alone, which ended before its first checkpoint."""
    train(tmp_path / "run", *FLAGS, "--sync", was, "--max-s", "0", ranks=2)
    run = RunWriter(tmp_path / "run")
    manifest = run.manifest()
    alone = msgspec.structs.replace(manifest.roster, sync=NO_SYNC)
    run.write_manifest(msgspec.structs.replace(manifest, roster=alone))
    train(tmp_path / "run", *FLAGS, "--sync", now, "--resume", ranks=2)
    assert run.manifest().result.replicas_agree is True
    assert [record.step for record in run.records(0)] == list(range(40))
    assert len([event for event in run.events() if event["event"] == "own.dropped"]) == 1


def test_checkpoints_of_a_rank_that_is_alone_for_a_while_name_the_strategy_of_before(tmp_path, train):
    train(tmp_path / "run", *FLAGS, "--sync", "diloco:6", "--max-s", "0", ranks=2)
    train(tmp_path / "run", *FLAGS, "--sync", "auto", "--resume")
    run = RunWriter(tmp_path / "run")
    assert run.manifest().roster.sync == NO_SYNC
    newest = read_checkpoint(run.checkpoint_path(run.newest_checkpoint_step()))
    assert (newest.step, str(newest.sync)) == (40, "diloco:6")


@pytest.mark.parametrize(("budget", "num"), [("0", 1), ("3", 0)])
def test_resume_reports_when_auto_would_choose_another_strategy(tmp_path, corpus, server, budget, num):
    """Among more replicas, or with a smaller budget than before: theirs go on drifting."""
    flags = f"--batch 64 --steps 2000 --eval-every 0 --max-s 0 --loss-budget {budget} --sync".split()
    flags = ["--width", "128", "--num-layers", "4", *flags]  # as large as what was measured, about
    spec = parse_args([*flags, "diloco:10:int8:streamed"])
    slot = RankSlot(host=local_host_info().host, device="cpu")
    (tmp_path / "roster.json").write_bytes(msgspec.json.encode(initial_roster(spec, [slot] * 2, 64)))
    env = {"EVENER_ROSTER": str(tmp_path / "roster.json")}
    argv = [*flags_of(corpus, tmp_path / "run"), *flags, "auto"]
    ended = server.run(tmp_path / "said", argv, 2, env, module="evener.worker")
    assert ended.statuses == [0, 0], ended.said("err")
    told = [event["what"] for event in RunDir(tmp_path / "run").events() if event["event"] == "remark"]
    assert len([what for what in told if "--sync auto would not choose" in what]) == num
    assert all(what.endswith("with 2 ranks: not exact, and no loss may be spent") for what in told if num)


def test_final_model_is_equal_on_all_replicas_at_any_last_step(tmp_path, train):
    """38 = 3 · 12 + 2 steps: one more outer step, of two steps."""
    run = train(tmp_path / "run", *FLAGS, "--steps", "38", "--sync", "diloco:12", ranks=2)
    assert run.manifest().result.replicas_agree is True
    assert [record.step for record in run.records(0) if record.bytes] == [11, 23, 35, 37]


def test_saved_loss_belongs_to_saved_weights(tmp_path, train):
    """At step 12 all replicas are what was agreed on; at step 6 they have gone on from there for two steps."""
    flags = (
        *FLAGS,
        "--sync",
        "diloco:4",
        "--steps",
        "14",
        "--checkpoint-every",
        "6",
        "--eval-every",
        "6",
        "--keep",
        "9",
    )
    run = train(tmp_path / "run", *flags, ranks=2)
    losses = [read_checkpoint(run.checkpoint_path(step)).val_loss for step in (6, 12, 14)]
    assert losses[0] is None
    assert losses[1] == next(event["val_loss"] for event in run.events() if event.get("step") == 12)
    assert losses[2] == run.manifest().result.val_loss


def test_stop_at_checkpoint_step_gives_one_model(tmp_path, train):
    flags = (*FLAGS, "--sync", "diloco:30", "--checkpoint-every", "1", "--shares", "3:1")
    run = train(tmp_path / "run", *flags, "--max-s", "0", ranks=2)  # stops after its first step
    assert run.checkpoint_steps() == [1]
    own = [load_rank_state(run, rank, 1)["sync"]["weights"] for rank in (0, 1)]
    for name, weight in weights(run).items():
        torch.testing.assert_close(weight, 0.75 * own[0][name] + 0.25 * own[1][name], rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])


def test_replica_without_share_keeps_up_with_streamed_weights(tmp_path, train):
    """It has nothing of its own that half of its weights could keep."""
    flags = (*FLAGS, "--sync", "diloco:4:streamed", "--steps", "14", "--checkpoint-every", "10", "--shares", "1:0")
    run = train(tmp_path / "run", *flags, ranks=2)
    own = load_rank_state(run, 1, 10)["sync"]
    assert own["weights"].keys() == own["agreed"].keys()
    assert all(torch.equal(own["weights"][name], agreed) for name, agreed in own["agreed"].items())
    busy = load_rank_state(run, 0, 10)["sync"]
    assert not any(torch.equal(busy["weights"][name], agreed) for name, agreed in busy["agreed"].items())


def test_checkpoint_has_optimizer_state_of_a_rank_with_a_share(tmp_path, train):
    """Rank 1 learns all, as one process does that is alone."""
    flags = (*FLAGS, "--steps", "12", "--checkpoint-every", "6", "--threads", "1")
    alone = train(tmp_path / "alone", *flags)
    run = train(tmp_path / "run", *flags, "--sync", "diloco:4", "--shares", "0:1", ranks=2)
    for step in (6, 12):
        ours, theirs = (load_file(one.checkpoint_path(step) / "state.safetensors") for one in (run, alone))
        moments = [name for name in theirs if name.startswith("optimizer")]
        assert moments
        for name in moments:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("sync", "ranks"), [("diloco:12:int4:streamed", 3), *exhaustively(("diloco:12:streamed", 2))])
def test_streamed_fragments_agree_to_the_bit_after_every_step(tmp_path, train, sync, ranks):
    run = train(tmp_path / "run", *FLAGS, "--verify-every", "1", "--sync", sync, ranks=ranks)
    assert run.manifest().result.replicas_agree is True
    assert sum(event["event"] == "replicas.agree" for event in run.events()) == 40
    records = run.records(ranks - 1)
    assert sum(record.bytes > 0 for record in records) > 12  # three rounds, and several fragments in each
    assert records[-1].loss < 0.9 * records[0].loss


def test_single_rank_diloco_equals_plain_training(tmp_path, train):
    plain, run = (train(tmp_path / sync[:4], *FLAGS, "--steps", "10", "--sync", sync) for sync in ("ddp", "diloco:3"))
    assert [record.loss for record in run.records(0)] == [record.loss for record in plain.records(0)]
