"""A replica that differs in one bit is detected, with its rank, step and tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from evener.core.base.errors import CheckpointError
from evener.core.run.rundir import RunDir
from evener.worker.compare_weights import compare_replicas
from evener.worker.state.replica_hashes import hash_tensor

from ..tiers import exhaustive, exhaustively

FLIP = """
import sys, numpy, torch, evener
from torch import nn
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): return numpy.random.default_rng(step).normal(size=(num, 8))
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples).float()

flags = ["--out", sys.argv[1], "--steps", "40", "--batch", "6", "--verify-every", "10", "--threads", "1"]
with evener.join(parse_args(flags)) as run:
    model = run.model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 1e-3))
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            step.backward(model(batch).square().sum())
        step.update(optimizer)
        if step.index == 14 and run.rank == 1:
            bits = run.module[1].weight.data.view(torch.int32)
            bits[0, 3] ^= 1 << 20
"""


@exhaustive
@pytest.mark.parametrize("ranks", [3, *exhaustively(2)])
def test_a_planted_bit_flip_is_reported_with_rank_step_and_tensor(tmp_path, run_script, ranks):
    done = run_script(FLIP, str(tmp_path / "run"), ranks=ranks)
    assert done.returncode != 0
    run = RunDir(tmp_path / "run")
    (event,) = [event for event in run.events() if event["event"] == "run.diverged"]
    assert event["step"] == 20  # the first check after step 15
    assert {"rank": 1, "tensor": "1.weight"} in event["differences"]
    assert {difference["rank"] for difference in event["differences"]} == {1}
    assert "rank 1 in" in done.stderr

    compared = subprocess.run(
        [sys.executable, "-m", "evener.worker.compare_weights", str(run)], capture_output=True, text=True, check=True
    )
    found = json.loads(compared.stdout)
    assert found["agree"] is False
    assert 0 < found["largest_difference"] < 1


def test_pipe_in_the_place_of_a_rank_state_is_reported_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "state-rank-0.pt")
    with pytest.raises(CheckpointError, match=r"state-rank-0\.pt: .*not a file"):
        compare_replicas(tmp_path)


def test_hash_depends_on_every_bit_and_position():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        tensor = (torch.randn(3, 1000) * 50).to(dtype)
        original = hash_tensor(tensor)
        assert hash_tensor(tensor.clone()) == original
        flipped = tensor.clone()
        flipped.view(torch.uint8)[2, -1] ^= 1
        assert hash_tensor(flipped) != original
        swapped = tensor.clone()
        swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
        assert tensor[0, 0] == tensor[0, 1] or hash_tensor(swapped) != original
    big = torch.zeros((1 << 20) + 7)
    changed = big.clone()
    changed[-1] = 1.0
    assert hash_tensor(big) != hash_tensor(changed)
    assert hash_tensor(torch.zeros(4)) != hash_tensor(torch.zeros(5))


def test_replicas_and_stored_weights_are_equal(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "3", ranks=2)
    compared = subprocess.run(
        [sys.executable, "-m", "evener.worker.compare_weights", str(run)], capture_output=True, text=True, check=True
    )
    found = json.loads(compared.stdout)
    assert found["agree"] is True
    assert found["largest_difference"] == 0.0


NOT_FINITE = FLIP.replace(
    "square().sum())", "square().sum() * (float('nan') if run.rank == 1 and step.index == 7 else 1))"
)


def test_a_loss_that_is_not_finite_names_its_rank(tmp_path, run_script):
    done = run_script(NOT_FINITE, str(tmp_path / "run"), ranks=2)
    assert done.returncode != 0
    (event,) = [event for event in RunDir(tmp_path / "run").events() if event["event"] == "run.nonfinite"]
    assert event["step"] == 7
    assert event["ranks"] == [1]
