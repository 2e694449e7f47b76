"""Who does what may differ between ranks and change in a run; what is learned stays the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest

from evener.core.roster import Seat, first_roster
from evener.core.rundir import RunDir
from evener.core.spec import parse_args

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


@pytest.mark.parametrize("shares", ["3:1", "1:0", "0:1"])
def test_unequal_shares_learn_what_one_process_learns(tmp_path, train, one_rank, shares):
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
from evener.core.resolve import resolve
from evener.core.spec import parse_args
from evener.worker import loop
from evener.worker.run import Run

steps = Run.steps

def reweighing(run, dataset):
    for step in steps(run, dataset):
        if step.index == 19 and run.rank == 0:
            run.weigh(24)  # rank 1 goes on to weigh 8, its share
        if step.index == 29 and run.rank == 1:
            run.weigh(0)
        yield step

Run.steps = reweighing
loop.train(resolve(parse_args(sys.argv[1:])))
"""


def test_shares_that_change_at_one_step_on_all_ranks(tmp_path, corpus, run_script, one_rank):
    """One rank alone asks; both take it up at step 20, and again at step 30, where rank 1 has nothing left to do."""
    flags = ["--data", str(corpus), "--model", "tiny", "--dtype", "fp32", "--threads", "1", "--eval-tokens", "2048"]
    done = run_script(RESHARED, *flags, *STEPS, "--out", str(tmp_path / "run"), ranks=2)
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


def test_the_launchers_roster_is_taken_and_one_of_other_ranks_refused(tmp_path, start, monkeypatch):
    """EVENER_ROSTER names a file; what it says counts, whatever the flags say, as long as it is of these ranks."""
    from evener.core.machine import this_machine

    here = Seat(host=this_machine().host, device="cpu")
    spec = parse_args(["--batch", "16", "--shares", "3:1", "--dtype", "fp32"])
    good, bad = (first_roster(spec, [here, seat], 64) for seat in (here, Seat(host="laptop", device="cpu")))
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


RECORDERS = """
import sys, torch
import torch.distributed as dist
from evener.core.roster import Seat, first_roster
from evener.core.rundir import RunDir
from evener.core.spec import parse_args
from evener.worker.clock import HostClock
from evener.worker.record import BLOCKED, OnHost, Recorder

class QueueClock(HostClock):
    "As of a device that is a step behind: asked for step k while step k + 1 has not been queued, it would wait."
    newest = None
    def seconds(self, begin, end):
        assert self.newest is None or end < self.newest, "waits for the step that was just queued"
        return super().seconds(begin, end)

dist.init_process_group("gloo")
rank = dist.get_rank()
seats = [Seat(host="a", device="cuda:0"), Seat(host="b", device="cpu")]
roster = first_roster(parse_args(["--batch", "4"]), seats, None)
clock = QueueClock() if rank == 0 else HostClock()
recorder = Recorder(RunDir(sys.argv[1]), rank, roster, clock, dist.group.WORLD)
for step in range(5):
    recorder.begin()
    if rank == 0:
        clock.newest = clock.mark() if step else None
    recorder.hear()
    for part in ("data_s", "compute_s", BLOCKED, "optimizer_s"):
        recorder.lap(part)
    recorder.pause()
    loss_sum = torch.tensor(10.0 * step + rank, dtype=torch.float64)
    recorder.end(want_stop=False, sync_s=lambda: 0.0, step=step, epoch=0, tokens=2, global_tokens=4, bytes=0, lr=0.0,
                 loss_sum=OnHost(loss_sum), grad_norm=None)
clock.newest = None
recorder.flush()
recorder.close()
dist.barrier()
"""


def test_ranks_of_different_devices_lag_alike(tmp_path, run_script):
    """A GPU's records are a step behind, so all ranks' are: news of one step are added up, and no rank gathers alone.

    The queue's clock fails where a step is read before the next one was queued: then a GPU would stand still.
    """
    done = run_script(RECORDERS, str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        records = RunDir(tmp_path / "run").records(rank)
        assert [record.step for record in records] == list(range(5))
        assert [record.loss for record in records] == [(20.0 * step + 1) / 4 for step in range(5)]
