"""Ranks may differ in share and device, and change their share during a run, without changing the losses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types

import msgspec
import pytest
import torch

from evener.core.run.roster import RankSlot, initial_roster, parse_sync
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import BLOCKED
from evener.worker.membership.fixed import FixedMembership
from evener.worker.rank.clock import HostClock
from evener.worker.record.span_recorder import SpanRecorder
from evener.worker.record.step_recorder import HostCopy, StepRecorder, StepReport

from ..tiers import exhaustive, exhaustively

STEPS = ("--steps", "40", "--batch", "16", "--eval-every", "20", "--lr", "0.001", "--dropout", "0")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, corpus):
    """The truth: one process, no division at all."""
    out = tmp_path_factory.mktemp("roster") / "one"
    flags = ["--data", str(corpus), "--model", "tiny", "--dtype", "fp32", "--threads", "1", "--eval-tokens", "2048"]
    argv = [sys.executable, "-m", "evener.worker", *flags, *STEPS, "--out", str(out)]
    subprocess.run(argv, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return RunDir(out)


def losses(run):
    return [record.loss for record in run.records(0)]


@pytest.mark.parametrize("shares", ["3:1", *exhaustively("1:0", "0:1")])
def test_unequal_shares_give_same_losses_as_one_process(tmp_path, train, one_rank, shares):
    run = train(tmp_path / "run", *STEPS, "--shares", shares, "--micro-batch", "5", ranks=2)
    assert losses(run) == pytest.approx(losses(one_rank), rel=1e-5)
    assert run.manifest().result.val_loss == pytest.approx(one_rank.manifest().result.val_loss, rel=1e-5)
    parts = [int(word) for word in shares.split(":")]
    for rank in range(2):
        assert {record.tokens for record in run.records(rank)} == {16 * 64 * parts[rank] / sum(parts)}
    assert run.manifest().roster.shares == [16 * part // sum(parts) for part in parts]
    assert run.manifest().result.replicas_agree is True


RESHARED = """
import sys
from evener.core.run.resolve import resolve
from evener.core.run.run_spec import parse_args
from evener.worker.train import loop
from evener.worker.train.run import Run

steps = Run.steps

def reweighing(run, dataset, *more):
    for step in steps(run, dataset, *more):
        if step.index == 19 and run.rank == 0:
            run.set_share_weight(24)  # rank 1 goes on to weigh 8, its share
        if step.index == 29 and run.rank == 1:
            run.set_share_weight(0)
        yield step

Run.steps = reweighing
loop.train(resolve(parse_args(sys.argv[1:])))
"""


def test_shares_change_at_the_same_step_on_all_ranks(tmp_path, corpus, run_script, one_rank):
    """One rank alone asks; both take it up at step 20, and again at step 30, where rank 1 has nothing left to do."""
    flags = ["--data", str(corpus), "--model", "tiny", "--dtype", "fp32", "--threads", "1", "--eval-tokens", "2048"]
    done = run_script(RESHARED, *flags, *STEPS, "--shares", "equal", "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(one_rank), rel=1e-5)
    for rank, expected in ((0, [8, 12, 16]), (1, [8, 4, 0])):
        records = run.records(rank)
        assert [record.epoch for record in records] == [0] * 20 + [1] * 10 + [2] * 10
        assert [records[step].tokens / 64 for step in (19, 20, 39)] == expected
    changes = [event for event in run.events() if event["event"] == "rebalanced"]
    assert [(event["step"], event["epoch"], event["shares"]) for event in changes] == [
        (20, 1, [12, 4]),
        (30, 2, [16, 0]),
    ]
    assert run.manifest().result.replicas_agree is True


TIMED = """
import sys
import msgspec
from evener.core.run.resolve import resolve
from evener.core.run.run_spec import parse_args
from evener.worker.train import loop
from evener.worker.record import step_recorder

row = step_recorder.StepReport.to_row

def as_if_timed(news):
    "Rank 1 takes as long as rank 0 for a sequence, three times as long in steps 10 to 24, and forty times from 25 on."
    import torch.distributed as dist
    share = shares[int(news.step)] if news.step >= 0 else 0
    slow = 1 if dist.get_rank() == 0 or news.step < 10 else 3 if news.step < 25 else 40
    return row(msgspec.structs.replace(news, work_s=0.01 * slow * share, optimizer_s=0.0))

shares = {}
made = loop.Run.steps

def steps(run, dataset, *more):
    for step in made(run, dataset, *more):
        shares[step.index] = step.member.share
        yield step

step_recorder.StepReport.to_row, loop.Run.steps = as_if_timed, steps
loop.train(resolve(parse_args(sys.argv[1:])))
"""


def test_shares_follow_rank_speed_without_changing_losses(tmp_path, corpus, run_script, one_rank):
    """What each rank tells of its time is written here; what follows from it is the run's own: a third of the share,
    none, and for a trial one sequence.
    """
    flags = ["--data", str(corpus), "--model", "tiny", "--dtype", "fp32", "--threads", "1", "--eval-tokens", "2048"]
    done = run_script(TIMED, *flags, *STEPS, "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(one_rank), rel=1e-5)
    changes = [event for event in run.events() if event["event"] == "rebalanced"]
    assert [(event["epoch"], event["shares"]) for event in changes] == [(1, [12, 4]), (2, [16, 0])]
    assert all(at < event["step"] <= at + 10 for at, event in zip((10, 25), changes, strict=True))
    assert changes[0]["why"] == (
        f"rank 1 on {run.manifest().hosts[0].host} takes 3.0 times as long as before: "
        "a step's slowest part takes 120 ms instead of 240 ms"
    )
    assert f"step {changes[0]['step'] + 1}: shares 12 : 4: {changes[0]['why']}" in done.stdout
    for rank in range(2):
        assert [record.tokens / 64 for record in run.records(rank)] == [
            [8, [12, 4][rank], [16, 0][rank]][sum(event["step"] <= step for event in changes)] for step in range(40)
        ]
    assert run.manifest().result.replicas_agree is True


@pytest.mark.parametrize("sync", ["packed", *exhaustively("ddp")])
def test_rebalanced_and_resumed_run_on_other_ranks_gives_same_losses(
    tmp_path, run_script, train, corpus, one_rank, sync
):
    """Two ranks, shares that change in the middle, a stop after step 24; then three ranks go on to the end."""
    flags = ["--data", str(corpus), "--model", "tiny", "--dtype", "fp32", "--threads", "1", "--eval-tokens", "2048"]
    stopped = TIMED.replace(
        "        yield step", "        if step.index == 24:\n            return\n        yield step"
    )
    done = run_script(stopped, *flags, *STEPS, "--sync", sync, "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert RunDir(tmp_path / "run").manifest().verdict == "stopped"
    run = train(tmp_path / "run", *STEPS, "--sync", sync, "--resume", ranks=3)
    assert losses(run) == pytest.approx(losses(one_rank), rel=1e-5)
    assert run.manifest().result.val_loss == pytest.approx(one_rank.manifest().result.val_loss, rel=1e-5)
    assert [event["shares"] for event in run.events() if event["event"] == "rebalanced"][:1] == [[12, 4]]
    assert [run.records(1)[step].tokens / 64 for step in (0, 23, 39)] == [8, 4, 5]
    assert run.manifest().result.replicas_agree is True


OWN = """
import os, sys
import msgspec, numpy, torch, evener
from torch import nn
from evener.worker.record import step_recorder

row, shares = step_recorder.StepReport.to_row, {}

def as_if_timed(news):
    "Rank 1 takes twice as long for a sequence as rank 0."
    share = shares[int(news.step)] if news.step >= 0 else 0
    slow = 2 if os.environ.get("RANK") == "1" else 1
    return row(msgspec.structs.replace(news, work_s=0.01 * slow * share, optimizer_s=0.0))

step_recorder.StepReport.to_row = as_if_timed
spec, normed = evener.parse_args(sys.argv[2:]), sys.argv[1] == "batch-norm"

class Numbers:
    def global_batch(self, seed, step, num): return numpy.random.default_rng((seed, step)).normal(size=(num, 8))
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples).float()

with evener.join(spec) as run:
    model = run.model(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if normed else nn.ReLU(), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 1e-2))
    for step in run.steps(Numbers()):
        shares[step.index] = step.member.share
        for batch in step.micro_batches():
            step.backward((model(batch) - batch.sum(1, keepdim=True)).square().sum())
        step.update(optimizer)
"""


@pytest.mark.parametrize(("kind", "expected"), [("plain", [11, 5]), ("batch-norm", [12, 4])])
def test_custom_program_is_rebalanced_without_changing_losses(tmp_path, run_script, kind, expected):
    """Of a model with BatchNorm whole micro-batches of one size move: other sizes would be another model."""
    flags = [kind, "--batch", "16", "--steps", "30", "--threads", "1", "--micro-batch", "4", "--eval-every", "0"]
    runs = {}
    for ranks in (1, 2):
        done = run_script(OWN, *flags, "--out", str(tmp_path / f"{ranks}"), ranks=ranks)
        assert done.returncode == 0, done.stderr
        runs[ranks] = RunDir(tmp_path / f"{ranks}")
    assert losses(runs[2]) == pytest.approx(losses(runs[1]), rel=1e-5)
    (change,) = [event for event in runs[2].events() if event["event"] == "rebalanced"]
    assert change["shares"] == expected


def news(*took_s, step=5, **of_rank_0):
    told = [StepReport(step=float(step), work_s=one) for one in took_s]
    return [msgspec.structs.replace(told[0], **of_rank_0), *told[1:]]


def heard(fixed, steps, *took_s):
    """The first Roster that follows from news of these steps."""
    return next((roster for step in steps if (roster := fixed.update_roster(news(*took_s, step=step), step + 1))), None)


def fixed_of(*flags):
    slots = [RankSlot(host=host, device="cpu") for host in "ab"]
    return FixedMembership(initial_roster(parse_args([*flags]), slots, 64))


def test_program_that_sets_its_weights_is_no_longer_rebalanced():
    fixed = fixed_of("--batch", "16")
    assert heard(fixed, range(30), 1.0, 2.0) is None  # nobody asked for it
    fixed.enable_balancing(fixed_micro_batch_size=False)
    assert heard(fixed, range(30, 60), 1.0, 2.0).shares == [11, 5]
    assert fixed.update_roster(news(1.0, 1.0, step=60, share_weight=5.0), 61).shares == [8, 8]  # 5 and the other's 5
    assert heard(fixed, range(61, 120), 1.0, 9.0) is None


def test_step_in_which_an_idle_rank_is_tried_measures_no_strategy():
    fixed, seen = fixed_of("--batch", "16"), []
    fixed._selector = types.SimpleNamespace(observe_step=lambda step, *_: seen.append(step), is_undecided=False)
    fixed._balancer = types.SimpleNamespace(observe_step=lambda *_: None, is_trying=True)
    heard(fixed, range(3), 1.0, 1.0)
    fixed._balancer.is_trying = False
    heard(fixed, range(3, 5), 1.0, 1.0)
    assert seen == [3, 4]


def test_shares_settle_while_strategies_are_compared():
    """A probe was disturbed: both machines seemed alike, and one has half the speed. The comparison begins again."""
    fixed, restarted = fixed_of("--batch", "16"), []
    fixed.enable_balancing(fixed_micro_batch_size=False)
    fixed._selector = types.SimpleNamespace(
        observe_step=lambda *_: None, is_undecided=True, adopt_shares=restarted.append
    )
    assert heard(fixed, range(15), 1.0, 2.0).shares == [11, 5]
    assert restarted == [fixed.roster.from_step]


def test_change_between_strategies_that_exchange_every_step_keeps_what_is_known_of_ranks():
    fixed = fixed_of("--batch", "16")
    fixed.enable_balancing(fixed_micro_batch_size=False)
    before = fixed._balancer
    fixed.roster = fixed.roster.replace_sync(parse_sync("int8"))
    fixed._rebuild_balancer()
    assert fixed._balancer is before
    fixed.roster = fixed.roster.replace_sync(parse_sync("diloco:10"))
    fixed._rebuild_balancer()
    assert fixed._balancer is not before


def test_weights_of_drifting_replicas_apply_per_step_not_per_round():
    fixed = fixed_of("--batch", "16", "--sync", "diloco:10")
    fixed.enable_balancing(fixed_micro_batch_size=False)
    roster = heard(fixed, range(30), 1.0, 2.0)
    assert roster.round_shares == [107, 53]
    # 5.3, and the other's 5.3
    assert fixed.update_roster(news(1.0, 1.0, step=30, share_weight=5.3), 31).shares == [8, 8]


def test_shares_stay_fixed_with_several_micro_batch_sizes():
    """Compiled for 9 and 8 sequences, it would be compiled again for others."""
    fixed = fixed_of("--batch", "32", "--shares", "17:15", "--micro-batch", "16")
    assert fixed.enable_balancing(fixed_micro_batch_size=True).startswith(
        "shares stay 17 : 15 whatever the ranks' speed: micro-batches of 8"
    )
    assert heard(fixed, range(60), 1.0, 9.0) is None
    fixed = fixed_of("--batch", "16")
    told = fixed.enable_balancing(fixed_micro_batch_size=True)  # one each: nothing to choose
    assert "micro-batches of 8 sequences" in told
    assert told.endswith("with --micro-batch 4 they would follow it")
    fixed = fixed_of("--batch", "32", "--micro-batch", "4")
    assert fixed.enable_balancing(fixed_micro_batch_size=True) == ""
    roster = heard(fixed, range(60), 1.0, 4.0)
    assert [member.micro_batch_sizes for member in roster.members] == [[4] * 7, [4]]


def test_compiled_model_starts_with_whole_micro_batches_when_possible():
    fixed = fixed_of("--batch", "16", "--shares", "11:5", "--micro-batch", "2")  # else [2, 2, 2, 2, 2, 1], [2, 2, 1]
    assert fixed.enable_balancing(fixed_micro_batch_size=True) == ""
    assert [member.micro_batch_sizes for member in fixed.roster.members] == [[2] * 6, [2] * 2]
    assert fixed.roster.epoch == fixed.roster.from_step == 0
    assert heard(fixed, range(60), 2.0, 0.5).shares == [6, 10]  # 167 and 125 ms a sequence
    fixed = fixed_of("--batch", "16", "--shares", "15:1", "--micro-batch", "4")  # nothing would be left for one
    assert fixed.enable_balancing(fixed_micro_batch_size=True).startswith("shares stay 15 : 1 ")
    assert fixed.roster.shares == [15, 1]


def recorder_of(folder, roster):
    rundir, clock = RunWriter(folder), HostClock()
    return StepRecorder(rundir, 0, roster, clock, None, SpanRecorder(rundir, 0, clock))


def test_flush_before_checkpoint_keeps_the_reported_weight(tmp_path):
    """On a GPU a step's news are a step late: what is flushed before a checkpoint must not take its place."""
    member = initial_roster(parse_args(["--batch", "4"]), [RankSlot(host="a", device="cuda:0")], None)
    recorder = recorder_of(tmp_path / "run", member)
    for step, weight in ((0, math.nan), (1, 2.0)):
        recorder.begin_step()
        recorder.receive_due_reports()
        recorder.stop_timers()
        recorder.end_step(
            share_weight=weight,
            sync_s=lambda: 0.0,
            step=step,
            epoch=0,
            tokens=2,
            global_tokens=4,
            bytes=0,
            lr=0.0,
            loss_sum=HostCopy(torch.tensor(1.0)),
            grad_norm=None,
        )
    assert recorder.flush() is False
    assert (recorder.reports[0].step, recorder.reports[0].share_weight) == (1.0, 2.0)


def test_lone_rank_without_share_records_step_of_unknown_loss(tmp_path):
    """Whoever had all of the batch is gone before it told."""
    told = initial_roster(parse_args(["--batch", "4"]), [RankSlot(host="a", device="cpu")], None)
    roster = msgspec.structs.replace(told, sync=parse_sync("diloco:10"))
    recorder = recorder_of(tmp_path / "run", roster)
    recorder.begin_step()
    recorder.stop_timers()
    recorder.end_step(sync_s=lambda: 0.0, step=0, epoch=0, tokens=0, global_tokens=4, bytes=0, lr=0.0,
                 loss_sum=HostCopy(torch.tensor(0.0)), grad_norm=None)  # fmt: skip
    recorder.begin_step()
    recorder.enter_epoch(roster, 0, None, -1)
    recorder.receive_all_reports()
    recorder.close()
    assert [(record.step, record.loss) for record in RunDir(tmp_path / "run").records(0)] == [(0, None)]


def test_reported_time_is_input_plus_compute_with_update_separate(tmp_path):
    roster = initial_roster(parse_args(["--batch", "4"]), [RankSlot(host="a", device="cpu")], None)
    recorder = recorder_of(tmp_path / "run", roster)
    recorder.begin_step()
    for part in ("data_s", "compute_s", BLOCKED, "data_s", "compute_s", "optimizer_s"):
        recorder.lap(part)
    recorder.stop_timers()
    recorder.end_step(sync_s=lambda: 0.0, step=0, epoch=0, tokens=2, global_tokens=4, bytes=0, lr=0.0,
                 loss_sum=HostCopy(torch.tensor(1.0)), grad_norm=None)  # fmt: skip
    recorder.receive_due_reports()
    cost = recorder.last_record.cost
    assert recorder.reports[0].work_s == pytest.approx(cost.data_s + cost.compute_s)
    assert recorder.reports[0].optimizer_s == pytest.approx(cost.optimizer_s)
    assert 0 < recorder.reports[0].work_s < recorder.last_record.wall_s
    recorder.close()


@exhaustive
def test_launcher_roster_is_used_and_roster_of_other_ranks_refused(tmp_path, start, monkeypatch):
    """EVENER_ROSTER names a file; what it says counts, whatever the flags say, as long as it is of these ranks."""
    from evener.core.cluster.host_info import local_host_info

    here = RankSlot(host=local_host_info().host, device="cpu")
    spec = parse_args(["--batch", "16", "--shares", "3:1", "--dtype", "fp32"])
    good, bad = (initial_roster(spec, [here, slot], 64) for slot in (here, RankSlot(host="laptop", device="cpu")))
    for name, roster in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(roster))

    monkeypatch.setitem(start.__globals__["ENV"], "EVENER_ROSTER", str(tmp_path / "good.json"))
    started = start(tmp_path / "run", "--steps", "2", ranks=2)
    assert started.wait() == 0, started.text()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["roster"] == msgspec.to_builtins(good)

    monkeypatch.setitem(start.__globals__["ENV"], "EVENER_ROSTER", str(tmp_path / "bad.json"))
    refused = start(tmp_path / "other", "--steps", "2", ranks=2)
    assert refused.wait() != 0
    assert "error: roster.mismatch: rank 1 was to be cpu on laptop, and is cpu on" in refused.text()


@exhaustive
def test_round_steps_may_differ_and_omit_no_sample(tmp_path, train, start, monkeypatch):
    """Where nothing is learned, a step's loss tells of which samples it was: those that one process has."""
    from evener.core.cluster.host_info import local_host_info

    flags = ("--steps", "12", "--batch", "11", "--lr", "1e-30", "--dropout", "0", "--micro-batch", "3")
    alone = train(tmp_path / "alone", *flags, ranks=1)
    spec = parse_args([*flags, "--sync", "diloco:4:int8", "--dtype", "fp32"])
    slot = RankSlot(host=local_host_info().host, device="cpu")
    roster = initial_roster(spec, [slot] * 3, 64).replace_shares([25, 17, 2])
    (tmp_path / "roster.json").write_bytes(msgspec.json.encode(roster))
    monkeypatch.setitem(start.__globals__["ENV"], "EVENER_ROSTER", str(tmp_path / "roster.json"))
    started = start(tmp_path / "run", *flags, "--sync", "diloco:4:int8", "--shares", "equal", ranks=3)
    assert started.wait() == 0, started.text()
    run = RunDir(tmp_path / "run")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)
    tokens = [[record.tokens / 64 for record in run.records(rank)] for rank in range(3)]
    assert [sum(of_rank[:4]) for of_rank in tokens] == [sum(of_rank[8:]) for of_rank in tokens] == [25, 17, 2]
    assert {sum(step) for step in zip(*tokens, strict=True)} == {11}
    assert set(tokens[2]) == {0, 1}


RECORDERS = """
import os, sys, torch
import torch.distributed as dist
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.rundir import RunDir
from evener.core.run.run_spec import parse_args
from evener.core.run.step_cost import BLOCKED
from evener.worker.rank.clock import HostClock
from evener.worker.record.step_recorder import HostCopy, StepRecorder
from evener.worker.record.span_recorder import SpanRecorder

class QueueClock(HostClock):
    "As of a device that is a step behind: asked for step k while step k + 1 has not been queued, it would wait."
    newest = None
    def elapsed_s(self, begin, end):
        self.check(end)
        return super().elapsed_s(begin, end)
    def check(self, moment):
        assert self.newest is None or moment < self.newest, "waits for the step that was just queued"

class Queued:
    "A number of the device, as of the moment in which it was queued."
    def __init__(self, value, clock):
        self.value, self.clock, self.queued = value, clock, clock.mark()
    def tensor(self):
        self.clock.check(self.queued)
        return torch.tensor(self.value, dtype=torch.float64)
    def __float__(self):
        return float(self.tensor())

dist.init_process_group("gloo")
rank = dist.get_rank()
slots = [RankSlot(host="a", device="cuda:0"), RankSlot(host="b", device="cpu")]
roster = initial_roster(parse_args(["--batch", "4"]), slots, None)
clock = QueueClock() if rank == 0 else HostClock()
rundir = RunDir(sys.argv[1])
recorder = StepRecorder(rundir, rank, roster, clock, dist.group.WORLD, SpanRecorder(rundir, rank, clock))
for step in range(5):
    recorder.begin_step()
    if rank == 0:
        clock.newest = clock.mark() if step else None
    recorder.receive_due_reports()
    for part in ("data_s", "compute_s", BLOCKED, "optimizer_s"):
        recorder.lap(part)
    recorder.stop_timers()
    held = [Queued(value, clock) if rank == 0 else HostCopy(torch.tensor(value, dtype=torch.float64))
            for value in (10.0 * step + rank, 2.0, 3.0, [0.5, 0.9])]
    begin, end = clock.mark(), clock.mark()
    recorder.end_step(sync_s=lambda begin=begin, end=end: clock.elapsed_s(begin, end), step=step,
                 epoch=0, tokens=2, global_tokens=4, bytes=0, lr=0.0, loss_sum=held[0], grad_norm=held[1],
                 local_grad_sq=held[2], global_grad_sq=held[1], fidelity=held[3])
clock.newest = None
recorder.flush()
recorder.close()
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""


def test_ranks_of_different_devices_report_with_equal_lag(tmp_path, run_script):
    """A GPU's records are a step behind, so all ranks' are: news of one step are added up, and no rank gathers alone.

    The queue's clock fails where a step is read before the next one was queued: then a GPU would stand still.
    """
    done = run_script(RECORDERS, str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        records = RunDir(tmp_path / "run").records(rank)
        assert [record.step for record in records] == list(range(5))
        assert [record.loss for record in records] == [(20.0 * step + 1) / 4 for step in range(5)]


DRIFTING = """
import os, sys, math, torch
import torch.distributed as dist
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.rundir import RunDir
from evener.core.run.run_spec import parse_args
from evener.worker.rank.clock import HostClock
from evener.worker.record.step_recorder import HostCopy, StepRecorder
from evener.worker.rank.stop_signals import StopRequest
from evener.worker.record.span_recorder import SpanRecorder

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("gloo")
rank = dist.get_rank()
slots = [RankSlot(host=host, device="cpu") for host in "ab"]
roster = initial_roster(parse_args(["--batch", "4", "--sync", "diloco:10"]), slots, None)
rundir, clock = RunDir(sys.argv[1]), HostClock()
recorder = StepRecorder(rundir, rank, roster, clock, dist.group.WORLD, SpanRecorder(rundir, rank, clock))
for step in range(4):
    recorder.begin_step()
    assert not recorder.receive_due_reports()
    recorder.stop_timers()
    if rank == 0:
        store.set(f"step {step}", "begun")
    elif step < 3:
        store.wait([f"step {step + 1}"])  # ends no step before the other has begun the next
    recorder.end_step(stop_request=StopRequest(4 * (step == 3 and rank == 0)),
                 share_weight=5.0 if step == 2 and rank == 1 else math.nan,
                 sync_s=lambda: 0.0, step=step, epoch=0, tokens=2, global_tokens=4, bytes=0, lr=0.0,
                 loss_sum=HostCopy(torch.tensor(10.0 * step + rank)), grad_norm=None)
assert recorder.flush()
assert [(news.step, news.share_weight) for news in recorder.reports][1] == (3.0, 5.0), recorder.reports
assert [record.step for record in recorder.completed] == [2, 3]
recorder.close()
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@exhaustive
def test_drifting_replicas_do_not_wait_for_slowest_rank(tmp_path, torchrun):
    """One is a step ahead all the while; what is heard late is heard all the same, and steps end complete."""
    done = torchrun(DRIFTING, str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert [record.loss for record in RunDir(tmp_path / "run").records(rank)] == [
            (20.0 * step + 1) / 4 for step in range(4)]  # fmt: skip
