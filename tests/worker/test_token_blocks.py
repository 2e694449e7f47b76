"""Blocks cover a corpus from the first token to the last; their statistics are tested in unit/test_sampling.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evener.core.model.corpus import load_corpus
from evener.worker.train.token_blocks import TokenBlocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("sampling", ["epochs", "uniform"])
@pytest.mark.parametrize("batch", [1, 12, 480, 4096])
def test_targets_are_inputs_shifted_by_one(corpus, sampling, batch):
    data = load_corpus(corpus)
    text = np.fromfile(data.split_path("val"), dtype=data.dtype).astype(np.int64)
    blocks = TokenBlocks(data, "val", 16, sampling)
    positions = blocks.global_batch(7, 3, batch)
    inputs, targets = blocks.load(positions, CPU)
    assert inputs.shape == targets.shape == (batch, 16)
    assert blocks.num_tokens(positions) == targets.numel()
    for position, x, y in zip(positions, inputs.numpy(), targets.numpy(), strict=True):
        assert np.array_equal(x, text[position : position + 16])
        assert np.array_equal(y, text[position + 1 : position + 17])


@pytest.mark.parametrize("sampling", ["epochs", "uniform"])
def test_first_and_last_token_are_used(corpus, sampling):
    data = load_corpus(corpus)
    blocks = TokenBlocks(data, "val", 16, sampling)
    last = data.val_tokens - 16 - 1
    positions = np.concatenate([blocks.global_batch(7, step, 512) for step in range(1000)])
    assert (positions.min(), positions.max()) == (0, last)
    text = np.fromfile(data.split_path("val"), dtype=data.dtype)
    assert blocks.load(np.array([last]), CPU)[1][0, -1] == text[-1]


@pytest.mark.parametrize("batch", [3, 64, 1000])
def test_epoch_covers_every_token_once(corpus, batch):
    """But those at the ends, fewer than two blocks."""
    data = load_corpus(corpus)
    blocks = TokenBlocks(data, "val", 16)
    num_blocks = (data.val_tokens - 16) // 16
    stream = np.concatenate([blocks.global_batch(7, step, batch) for step in range(-(-3 * num_blocks // batch))])
    for epoch in stream[: 3 * num_blocks].reshape(3, num_blocks):
        targets = np.sort((epoch[:, None] + 1 + np.arange(16)).ravel())
        assert np.array_equal(targets, np.arange(targets[0], targets[0] + 16 * num_blocks))
    assert 16 * num_blocks > data.val_tokens - 2 * 16
