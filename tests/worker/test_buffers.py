"""Running statistics are averaged over all micro-batches, whichever rank computed them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.worker.train.buffers import BufferAverager


def test_running_statistics_average_over_micro_batches():
    """Closed form: with momentum m, one step moves the running mean to (1-m)·r + m·(mean of the batches' means)."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3, momentum=0.3)
    batches = torch.randn(4, 8, 3) * 2 + 1
    before = norm.running_mean.clone()
    ranks = [BufferAverager(norm, ["num_batches_tracked", "running_mean"]) for _ in range(2)]
    for i, batch in enumerate(batches):  # rank 0 has three of them
        norm(batch)
        ranks[i == 3].accumulate()
        assert torch.equal(norm.running_mean, before)
    sums = [rank._total for rank in ranks]
    for rank in ranks:
        rank.average(lambda own: sums[0] + sums[1])
        expected = 0.7 * before + 0.3 * batches.mean(dim=(0, 1))
        assert norm.running_mean.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
        assert norm.num_batches_tracked == 1


class Average(nn.Module):
    """Puts another tensor in a buffer's place, and grows a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.cache = torch.ones(len(x))


def test_buffer_that_a_module_reassigns_is_averaged_in_place():
    torch.manual_seed(0)
    module = nn.Sequential(Average())
    buffer, batches = module[0].mean, torch.randn(4, 8, 2)
    moving = BufferAverager(module, ["0.mean", "0.cache"])
    for batch in batches:
        module(batch.requires_grad_())
        moving.accumulate()
        assert module[0].mean is buffer
        assert buffer.tolist() == [1.0, 2.0]
    moving.average(lambda own: own)
    expected = 0.9 * torch.tensor([1.0, 2.0]) + 0.1 * batches.mean(dim=(0, 1))
    assert module[0].mean is buffer
    assert buffer.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert module[0].cache.tolist() == [0.0]  # of another size it says nothing about the next batch
