"""A run that was stopped, killed or moved to other ranks resumes without loss."""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import time

import psutil
import pytest

from evener.core.base.errors import CheckpointError
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.report.read.run_summary import summarize_run

from ..conftest import TIMEOUT_S, wait_until
from ..tiers import exhaustive, exhaustively

STEPS = ("--steps", "40", "--checkpoint-every", "10", "--eval-every", "20", "--dropout", "0.1")


def weights(run):
    folder = run.checkpoint_path(run.checkpoint_steps()[-1])
    return {name: (folder / name).read_bytes() for name in ("weights.safetensors", "state.safetensors")}


def newest(run):
    return max(run.checkpoint_steps(), default=0)


@pytest.mark.parametrize("ranks", [2, *exhaustively(1, 3)])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, train, start, ranks):
    whole = train(tmp_path / "whole", *STEPS, ranks=ranks)
    started = start(tmp_path / "parts", *STEPS, ranks=ranks)
    started.wait_for_step(12)
    children = psutil.Process(started.process.pid).children()
    for worker in children or [psutil.Process(started.process.pid)]:
        worker.send_signal(signal.SIGTERM)
    assert started.wait() == 0, started.text()
    stopped = started.dir.manifest()
    assert stopped.verdict == "stopped"
    assert 13 <= stopped.result.steps < 40
    assert started.dir.checkpoint_steps()[-1] == stopped.result.steps

    parts = train(tmp_path / "parts", *STEPS, "--resume", ranks=ranks)

    assert [r.loss for r in parts.records(0)] == [r.loss for r in whole.records(0)]
    assert [r.step for r in parts.records(0)] == list(range(40))
    assert weights(parts) == weights(whole)
    assert parts.manifest().verdict == "finished"


@exhaustive
def test_resume_on_other_rank_count_matches_within_rounding(tmp_path, train):
    flags = [word for word in STEPS if word not in ("--dropout", "0.1")]
    whole = train(tmp_path / "whole", *flags)
    train(tmp_path / "parts", *flags, "--max-s", "0", ranks=2)  # stops after its first step
    assert train(tmp_path / "parts", *flags, "--resume", ranks=3).manifest().world_size == 3
    parts = [r.loss for r in whole.__class__(tmp_path / "parts").records(0)]
    assert parts == pytest.approx([r.loss for r in whole.records(0)], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "now", "since"),
    [
        ((), ("--lr", "0.001", "--eval-every", "0"), 0),
        ((), ("--shares", "3:1"), 8),
        *exhaustively(
            (("--batch", "8"), (), 8),
            ((), ("--micro-batch", "2"), 8),
            ((), ("--dtype", "bf16"), 8),
            ((), ("--threads", "2"), 8),
        ),
    ],
)
def test_summary_covers_only_steps_since_settings_changed(tmp_path, train, before, now, since):
    """Stopped after 8 steps, and resumed twice: with other flags, and with these again."""
    train(tmp_path / "run", *before, "--steps", "8", ranks=2)
    for steps in ("20", "28"):
        run = train(tmp_path / "run", *now, "--steps", steps, "--resume", ranks=2)
        assert run.manifest().since == since
    both = [[record for record in run.records(rank) if record.step >= since + 3] for rank in range(2)]
    assert both[0][-1].step == 27
    found, step_s = summarize_run(run), statistics.median(record.wall_s for record in both[0])
    assert (found.num_steps, found.step_p50_s) == (28, step_s)
    assert found.tokens_per_step == sum(of_rank[-1].tokens for of_rank in both)
    assert found.tokens_per_s == found.tokens_per_step / step_s
    assert [rank.tokens for rank in found.ranks] == [of_rank[-1].tokens for of_rank in both]
    assert found.sync_p50_s == statistics.median(min(a.sync_s, b.sync_s) for a, b in zip(*both, strict=True))


@exhaustive
def test_kill_9_at_any_moment_leaves_the_last_good_checkpoint(tmp_path, start, train):
    random_s = random.Random(0)
    flags = ("--steps", "100000", "--checkpoint-every", "1", "--keep", "1", "--eval-every", "0", "--verify-every", "0")
    resumed_from = []
    for attempt in range(3):
        started = start(tmp_path / "run", *flags, *(["--resume"] if attempt else []))
        first = newest(started.dir)
        wait_until(lambda s=started, f=first: newest(s.dir) > f + 3, started.text)
        time.sleep(random_s.uniform(0, 0.1))  # where in a step the blow falls
        os.kill(started.process.pid, signal.SIGKILL)
        started.process.wait()
        saved = newest(started.dir)
        assert read_checkpoint(started.dir.checkpoint_path(saved)).step == saved
        resumed_from.append(saved)
    assert resumed_from == sorted(set(resumed_from))


def test_interrupted_checkpoint_removal_leaves_no_partial_checkpoint(tmp_path, train, monkeypatch):
    """As if killed between two files of the old checkpoint: the next start neither sees nor keeps what is left."""
    run = train(tmp_path / "run", "--steps", "4", "--checkpoint-every", "2", "--eval-every", "0")
    assert run.checkpoint_steps() == [2, 4]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors: (path / "state.json").unlink())
        RunWriter(run.path).prune_checkpoints(keep=1, best=None)
    assert run.checkpoint_steps() == [4]
    train(tmp_path / "run", "--steps", "6", "--checkpoint-every", "2", "--eval-every", "0", "--resume")
    assert {path.name for path in run.checkpoints_path.iterdir()} == {"step-000004", "step-000006"}


def test_half_written_checkpoint_of_killed_rank_is_removed_at_the_next_start(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "2", "--eval-every", "0")
    partial = run.checkpoints_path / ".step-000009.tmp"
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"x" * 1000)
    train(tmp_path / "run", "--steps", "4", "--eval-every", "0", "--resume")
    assert {path.name for path in run.checkpoints_path.iterdir()} == {"step-000002", "step-000004"}


@exhaustive
def test_killed_rank_ends_the_others_and_leaves_no_process(tmp_path, start):
    started = start(tmp_path / "run", "--steps", "100000", "--eval-every", "0", ranks=2)
    started.wait_for_step(3)
    workers = psutil.Process(started.process.pid).children()
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)
    assert started.wait() != 0
    psutil.wait_procs(workers, timeout=TIMEOUT_S)
    assert not any(worker.is_running() for worker in workers)


def test_last_k_and_best_checkpoints_are_kept(tmp_path, train):
    flags = ("--steps", "30", "--checkpoint-every", "5", "--eval-every", "5", "--keep", "2", "--lr", "0.01")
    run = train(tmp_path / "run", *flags)
    saved = [e for e in run.events() if e["event"] == "checkpoint"]
    assert len(saved) == 6
    best = min(saved, key=lambda event: event["val_loss"])["step"]
    assert run.checkpoint_steps() == sorted({25, 30, best})


@pytest.mark.parametrize("file", ["weights.safetensors", "state.safetensors", "rng.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, train, start, file):
    run = train(tmp_path / "run", "--steps", "2")
    path = run.checkpoint_path(2) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=file):
        read_checkpoint(run.checkpoint_path(2))


def test_checkpoint_of_other_shape_is_refused(tmp_path, train, start):
    train(tmp_path / "run", "--steps", "2")
    started = start(tmp_path / "run", "--steps", "4", "--width", "32", "--resume")
    assert started.wait() == 2
    assert "its model has another shape" in started.text()
    assert "Traceback" not in started.text()


OWN_LOOP = """
import sys, numpy, torch, evener
from torch import nn
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): return numpy.random.default_rng((seed, step)).normal(size=(num, 8))
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples).float()

spec = parse_args(["--out", sys.argv[1], "--batch", "5", "--steps", sys.argv[2], "--threads", "1",
                   "--shares", "equal"])
with evener.join(spec, resume=len(sys.argv) > 3) as run:
    model = run.model(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), 1e-2))
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            step.backward(model(batch).square().sum())
        step.update(optimizer)
"""


def test_custom_loop_resumes_bit_for_bit(tmp_path, run_script):
    def run(out, *args):
        done = run_script(OWN_LOOP, str(tmp_path / out), *args, ranks=2)
        assert done.returncode == 0, done.stderr
        return RunDir(tmp_path / out)

    whole = run("whole", "30")
    run("parts", "15")
    parts = run("parts", "30", "resume")
    assert [r.loss for r in parts.records(1)] == [r.loss for r in whole.records(1)]
    assert weights(parts) == weights(whole)


STOPS = """
import os, sys, evener, torch
from torch import nn
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): return torch.ones(num, 2).numpy()
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples)

out = f"{sys.argv[1]}/host-{os.environ['RANK']}"
flags = ["--out", out, "--steps", "9", "--batch", "2", "--checkpoint-every", "1", "--threads", "1"]
with evener.join(parse_args(flags)) as run:
    model = run.model(nn.Linear(2, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 1e-3))
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            step.backward(model(batch).sum())
        if step.index == 4 and run.rank == 1:
            run._stop_signals.is_requested = True
        step.update(optimizer)
"""


def test_ranks_with_separate_disks_stop_at_checkpoint_step(tmp_path, run_script):
    """Only rank 0 finds the checkpoint on its disk: both must know that it was made."""
    done = run_script(STOPS, str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "host-0")
    assert run.manifest().verdict == "stopped"
    assert run.checkpoint_steps()[-1] == 5
    assert not RunDir(tmp_path / "host-1").checkpoint_steps()


KILLED_AS_IT_SAVES = """
import os, signal, sys
from evener.core.run.run_spec import parse_args
from evener.core.run.resolve import resolve
from evener.worker.state import checkpoint
from evener.worker.train.loop import train

save = checkpoint.save
def save_and_die(*args, **kwargs):
    save(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save = save_and_die
train(resolve(parse_args(sys.argv[1:])))
"""


def test_rank_killed_after_checkpoint_keeps_records_of_all_its_steps(tmp_path, corpus, run_script):
    """A resumed run never repeats those steps: what is not written by then is lost."""
    out = tmp_path / "run"
    flags = ["--data", str(corpus), "--model", "tiny", "--out", str(out), "--steps", "20", "--checkpoint-every", "5"]
    run_script(KILLED_AS_IT_SAVES, *flags, "--eval-every", "0", "--threads", "1", ranks=2)
    assert RunDir(out).checkpoint_steps() == [5]
    for rank in (0, 1):
        assert [record.step for record in RunDir(out).records(rank)] == [0, 1, 2, 3, 4]
