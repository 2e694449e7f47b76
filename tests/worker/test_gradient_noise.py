"""The measured gradient noise scale matches that of gradients with a known distribution."""

from __future__ import annotations

import json

import pytest

from ..tiers import exhaustively

PROGRAM = """
import json, sys
import torch
from torch import nn
import evener

SIZE, MEAN_SQ = 300, 4.0

class Draws(torch.utils.data.Dataset):
    '''Samples whose gradients are N(mean, 1) in each of SIZE numbers.'''
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.rows = torch.randn(20000, SIZE, generator=draw) + (MEAN_SQ / SIZE) ** 0.5
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.rows[i]

with evener.join(evener.parse_args(sys.argv[1:])) as run:
    model = run.model(nn.Linear(SIZE, 1, bias=False))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in run.steps(Draws()):
        for rows in step.micro_batches():
            step.backward(model(rows).sum())
        step.update(optimizer)
"""


@pytest.mark.parametrize("shares", ["3:1", *exhaustively("1:1")])
def test_noise_scale_matches_gradient_distribution(tmp_path, run_script, shares):
    """tr Σ = SIZE, |G|² = MEAN_SQ: a scale of 75 samples."""
    flags = ("--steps", "400", "--batch", "64", "--shares", shares, "--threads", "1", "--clip", "0",
             "--verify-every", "0", "--checkpoint-every", "0")  # fmt: skip
    done = run_script(PROGRAM, *flags, "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "steps" / "rank-1.jsonl").read_text().splitlines()]
    found = [record["noise"] for record in records if record["noise"]]
    assert len(found) == 40
    trace, norm_sq = (sum(one[name] for one in found) / len(found) for name in ("trace", "norm_sq"))
    assert trace == pytest.approx(300, rel=0.1)
    assert norm_sq == pytest.approx(4.0, rel=0.2)
