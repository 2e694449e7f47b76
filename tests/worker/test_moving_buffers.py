"""Running statistics do not depend on who ran which micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.worker.buffers import MovingBuffers


def test_running_statistics_are_those_of_the_mean_over_micro_batches():
    """Closed form: with momentum m, one step moves the running mean to (1-m)·r + m·(mean of the batches' means)."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3, momentum=0.3)
    batches = torch.randn(4, 8, 3) * 2 + 1
    before = norm.running_mean.clone()
    ranks = [MovingBuffers([norm.running_mean, norm.num_batches_tracked]) for _ in range(2)]
    for i, batch in enumerate(batches):  # rank 0 has three of them
        norm(batch)
        ranks[i == 3].take()
        assert torch.equal(norm.running_mean, before)
    sums = [rank._total for rank in ranks]
    for rank in ranks:
        rank.settle(lambda own: sums[0] + sums[1])
        expected = 0.7 * before + 0.3 * batches.mean(dim=(0, 1))
        assert norm.running_mean.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
        assert norm.num_batches_tracked == 1
