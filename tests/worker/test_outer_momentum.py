"""Averaged replicas make as much progress as one process if gradients are mostly noise."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from evener.worker.sync.diloco import inner_lr_factor, outer_momentum
from evener.worker.train.train_step import scaled_learning_rates

from ..tiers import exhaustively

NUM = 5_000  # parameters, each with a gradient of its own
SIGNAL, NOISE = 0.1, 4.0  # of a sequence's gradient: a batch of 16 has a tenth of its noise
EVERY, ROUNDS = 10, 40


@functools.cache
def went(shares: tuple[int, ...], momentum: float, lr_factor: float = 1.0) -> float:
    """How far the weights go along the gradient in the second half of a run."""
    generator = torch.Generator().manual_seed(0)
    agreed, memory = torch.zeros(NUM), torch.zeros(NUM)
    replicas = [nn.Parameter(agreed.clone()) for _ in shares]
    optimizers = [
        torch.optim.AdamW([one], lr=lr_factor * 1e-3, betas=(0.9, 0.99), weight_decay=0.0) for one in replicas
    ]
    halfway = 0.0
    for number in range(ROUNDS):
        for _ in range(EVERY):
            for replica, optimizer, share in zip(replicas, optimizers, shares, strict=True):
                replica.grad = SIGNAL + NOISE / share**0.5 * torch.randn(NUM, generator=generator)
                optimizer.step()
        with torch.no_grad():
            weights = [share / sum(shares) for share in shares]
            delta = sum(weight * (agreed - one) for weight, one in zip(weights, replicas, strict=True))
            memory = momentum * memory + delta
            agreed = agreed - (delta + momentum * memory) / (1 + momentum)
            for replica in replicas:
                replica.copy_(agreed)
        if number == ROUNDS // 2 - 1:
            halfway = float(agreed.mean())
    return halfway - float(agreed.mean())


@pytest.mark.parametrize("shares", [(9, 5, 2), *exhaustively(((8, 8),), ((4, 4, 4, 4),))])
def test_outer_momentum_matches_single_process_progress(shares):
    alone = went((16,), 0.0)
    assert went(shares, 0.0) < 0.85 * alone  # their mean does not
    assert went(shares, outer_momentum(shares)) == pytest.approx(alone, rel=0.03)


@pytest.mark.parametrize("shares", [(8, 8), *exhaustively(((9, 5, 2),), ((4, 4, 4, 4),))])
def test_learning_rate_of_short_rounds_matches_single_process_progress(shares):
    assert went(shares, 0.0, inner_lr_factor(shares)) == pytest.approx(went((16,), 0.0), rel=0.03)


def test_learning_rate_is_scaled_for_the_step_alone_and_not_for_sgd():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    adamw = torch.optim.AdamW([{"params": parameters[:1], "lr": 0.25}, {"params": parameters[1:2], "lr": 0.5}])
    sgd = torch.optim.SGD(parameters[2:], lr=0.125)
    with scaled_learning_rates((adamw, sgd), 2.0):
        assert rates(adamw) == [0.5, 1.0]
        assert rates(sgd) == [0.125]
    assert rates(adamw) == [0.25, 0.5]
    assert rates(sgd) == [0.125]


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_single_learning_replica_gets_zero_outer_momentum():
    assert outer_momentum([16]) == outer_momentum([0, 16, 0]) == outer_momentum([0, 0]) == 0.0


def test_single_learning_replica_keeps_its_learning_rate():
    assert inner_lr_factor([16]) == inner_lr_factor([0, 16, 0]) == inner_lr_factor([0, 0]) == 1.0
