"""A checkpoint restores every tensor of the model bit for bit, or is not there at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from evener.core.base.errors import CheckpointError, RunError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.run.membership_epoch import CHECKPOINT_REQUEST_FILE
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.worker.state.checkpoint import (
    load,
    load_weights,
    named_weights,
    read_safetensors,
    save,
    write_safetensors,
)
from evener.worker.state.replica_hashes import hash_tensors

from ..conftest import ENV, wait_until
from ..in_process import time_limit
from ..tiers import exhaustive


def write(folder, weights, step=1, states=None):
    return save(
        RunWriter(folder), weights, states or {}, step=step, val_loss=None,
        rng_states=[], replica_hashes=[list(hash_tensors(weights.items()).values())],
    )  # fmt: skip


class Odd(nn.Module):
    """Every kind of tensor that a module may keep."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(4, 6)
        self.register_buffer("whole", base)
        self.register_buffer("row", base[1])  # a view of the other
        self.register_buffer("turned", torch.randn(3, 5).T)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0, 7))
        self.register_buffer("mask", torch.full((3, 3), -float("inf")).triu(1))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.first = nn.Linear(6, 6)
        self.again = self.first  # tied
        self.norm = nn.BatchNorm1d(6)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.spectral(self.norm(self.again(self.first(x))))


def test_every_tensor_kind_round_trips(tmp_path):
    torch.manual_seed(1)
    module = Odd()
    module(torch.randn(5, 6))  # moves the buffers of the norms
    folder = write(tmp_path, named_weights(module))

    torch.manual_seed(2)
    other = Odd()
    scratch = other.scratch.clone()
    load_weights(folder, other)
    theirs = other.state_dict()
    assert theirs.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(theirs[name], value), name
    assert torch.equal(other.scratch, scratch)  # as state_dict leaves it
    assert torch.equal(other.row, other.whole[1])

    saved = load(folder).weights
    assert "first.weight" in saved
    assert "again.weight" not in saved  # one tensor, once
    assert read_checkpoint(folder).tensor_names == list(named_weights(module))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 2, bias=False)), "0.bias is not in the model"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), "1.weight is not in it"),
        (lambda: nn.Sequential(nn.Linear(4, 3)), r"0.weight is (2, 4) there and (3, 4) in the model"),
        (lambda: nn.Sequential(nn.Linear(4, 2)).double(), "0.weight is torch.float32 there and torch.float64"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named_and_nothing_is_changed(tmp_path, make, message):
    folder = write(tmp_path, named_weights(nn.Sequential(nn.Linear(4, 2))))
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, module)
    assert message in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_module_extra_state_is_refused():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 3}

    with pytest.raises(UsageError, match=r"0\._extra_state"):
        named_weights(nn.Sequential(Extra(2, 2)))


def test_loaded_state_does_not_alias_the_file(tmp_path):
    folder = write(tmp_path, {"w": torch.ones(5)}, states={"mine": {"t": torch.arange(5)}})
    saved = load(folder)
    for file in folder.glob("*.safetensors"):  # a mapped tensor would see this
        file.write_bytes(bytes(file.stat().st_size))
    assert saved.weights["w"].tolist() == [1] * 5
    assert saved.states["mine"]["t"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_never_the_newest_checkpoint(tmp_path, bad):
    module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    write(tmp_path, named_weights(module), step=10)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with torch.no_grad():
        module[0].weight[1, 2] = bad
    with pytest.raises(RunError, match=r"after step 20: 0\.weight is not finite: 1 of 8 values"):
        write(tmp_path, named_weights(module), step=20)
    assert RunDir(tmp_path).checkpoint_steps() == [10]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_checkpoint_of_lost_epoch_is_replaced(tmp_path):
    write(tmp_path, {"w": torch.zeros(5)}, step=10)
    folder = write(tmp_path, {"w": torch.ones(5)}, step=10)
    assert load(folder).weights["w"].tolist() == [1] * 5
    RunWriter(tmp_path).prune_checkpoints(1, None)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_nan_running_mean_is_refused_but_infinite_mask_is_not(tmp_path):
    module = nn.BatchNorm1d(2)
    module.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    write(tmp_path, named_weights(module), step=10)
    module.running_mean[0] = float("nan")
    with pytest.raises(RunError, match="running_mean is not finite: 1 of 2 values"):
        write(tmp_path, named_weights(module), step=20)


def test_tensors_are_not_written_through_a_link_and_a_pipe_is_not_waited_for(tmp_path):
    kept, link, pipe = tmp_path / "kept", tmp_path / "link", tmp_path / "pipe"
    kept.write_bytes(b"kept")
    link.symlink_to(kept)
    write_safetensors(link, {"a": torch.ones(3)})
    assert (kept.read_bytes(), link.is_symlink()) == (b"kept", False)
    os.mkfifo(pipe)
    with time_limit(60), pytest.raises(OSError, match="not a file"):
        read_safetensors(pipe)


def test_unsaveable_state_leaves_no_partial_checkpoint(tmp_path):
    with pytest.raises(UsageError, match="state of 'mine' holds an object at x"):
        write(tmp_path, {"w": torch.ones(2)}, states={"user/mine": {"x": object()}})
    assert list(tmp_path.iterdir()) == []


FILLS = """
import sys, torch
from evener.core.base.errors import RunError
from evener.core.run.rundir import read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.core.run.runwriter import RunWriter
from evener.worker.state.checkpoint import save

run = RunWriter(sys.argv[1])
def write(step, num_bytes, **states):
    weights = {"w": torch.zeros(num_bytes // 4)}
    save(run, weights, states, step=step, val_loss=None, rng_states=[], replica_hashes=[[]])

write(1, 300_000)
for step, weights, state in ((2, 2_000_000, 0), (3, 300_000, 2_000_000)):  # full at the weights, at the states
    try:
        write(step, weights, mine={"t": torch.zeros(state // 4)})
    except RunError as error:
        print(error, error.hint, sep="|")
print(run.checkpoint_steps(), read_checkpoint(run.checkpoint_path(1)).step)
print([path.name for path in run.checkpoints_path.iterdir()])
write(4, 300_000)
print(run.checkpoint_steps())
"""


def with_small_disk(place, size_bytes: int, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `argv` where `place` is a disk of this size, which is gone afterwards."""
    place.mkdir()
    mount = f'mount -t tmpfs -o size={size_bytes} small "{place}" && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return subprocess.run(
        ["unshare", *user, "--mount", "sh", "-c", mount, "sh", *argv],
        capture_output=True, text=True, check=False, env=ENV, timeout=180,
    )  # fmt: skip


needs_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")


@exhaustive
@needs_unshare
def test_a_full_disk_leaves_the_last_complete_checkpoint(tmp_path):
    done = with_small_disk(tmp_path / "disk", 1_000_000, [sys.executable, "-c", FILLS, str(tmp_path / "disk")])
    assert done.returncode == 0, done.stderr
    weights, states, steps, names, later = done.stdout.splitlines()
    for line, step in ((weights, 2), (states, 3)):
        assert f"step-{step:06d}: " in line
        assert "No space left on device" in line
        assert "the last complete checkpoint is untouched" in line
    assert (steps, names, later) == ("[1] 1", "['step-000001']", "[1, 4]")


OWN_LOOP = """
import sys, numpy, torch, evener
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): return numpy.random.default_rng((seed, step)).normal(size=(num, 300))
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples).float()

with evener.join(parse_args(sys.argv[1:])) as run:
    model = run.model(torch.nn.Linear(300, 300))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            step.backward(model(batch).square().sum())
        step.update(optimizer)
"""


@needs_unshare
def test_run_with_full_disk_reports_it_and_resumes(tmp_path):
    """All its checkpoints are to be kept, 1.1 MB each, and the disk has room for four."""
    disk, kept, program = tmp_path / "disk", tmp_path / "kept", tmp_path / "program.py"
    program.write_text(OWN_LOOP)
    flags = "--batch 4 --threads 1 --steps 20 --checkpoint-every 2 --keep 99 --eval-every 0"
    script = f'"{sys.executable}" "{program}" --out "{disk}/run" {flags}; cp -r "{disk}/run" "{kept}"'
    done = with_small_disk(disk, 5_000_000, ["sh", "-c", script])
    assert done.returncode == 0, done.stderr
    run = RunDir(kept)
    steps = run.checkpoint_steps()
    assert 1 < len(steps) < 10
    assert all(read_checkpoint(run.checkpoint_path(step)).step == step for step in steps)
    assert len(list(run.checkpoints_path.iterdir())) == len(steps)  # no half one
    assert run.manifest().verdict == "failed"
    (failure,) = [event for event in run.events() if event["event"] == "failure"]
    assert failure["kind"] == "RunError"
    assert "No space left on device" in failure["error"]


@exhaustive
def test_requested_checkpoint_does_not_change_training(start, train, tmp_path):
    """On two ranks, in the middle of a run; what is learned is what an undisturbed run learns, to the bit."""
    flags = ["--steps", "60", "--batch", "4", "--checkpoint-every", "0", "--verify-every", "0"]
    asked = start(tmp_path / "asked", *flags, ranks=2)
    asked.wait_for_step(3)
    write_atomic(asked.dir.path / CHECKPOINT_REQUEST_FILE, b"")
    wait_until(lambda: asked.dir.last_saved_step() is not None, asked.text)
    assert 4 <= asked.dir.last_saved_step() < 60
    wait_until(lambda: not (asked.dir.path / CHECKPOINT_REQUEST_FILE).exists(), asked.text)
    assert asked.wait() == 0, asked.text()
    assert [event["step"] for event in asked.dir.events() if event["event"] == "checkpoint"][1:] == [60], "once"
    alone = train(tmp_path / "alone", *flags, ranks=2)
    assert [one.loss for one in asked.dir.records(0)] == [one.loss for one in alone.records(0)]
