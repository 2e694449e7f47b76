"""Samples are uniform and independent, epochs read every item once, and overlapping steps are detected.

Every statistic is of fixed seeds, so it comes out the same each time; the bounds are five standard deviations.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.corpus.sampling import epoch_indices, epoch_positions, uniform_indices

from ..tiers import exhaustively, num_examples

BATCHES = [3, 64, 4096, *exhaustively(1, 2, 12, 480)]
NUM_ITEMS = 50_000
Sampler = Callable[[int, int, int, int], np.ndarray]


def overlapping(num_items: int, seed: int, step: int, count: int) -> np.ndarray:
    """evener's first sampler, uniform-1: the step is where the counter begins, and the draws count on from there."""
    return np.random.Generator(np.random.Philox(key=seed, counter=step)).integers(num_items, size=count)


def drawn(sampler: Sampler, batch: int, seed: int = 1337, num_items: int = NUM_ITEMS) -> np.ndarray:
    """Steps of at least 20,000 samples in all: (steps, batch)."""
    return np.stack([sampler(num_items, seed, step, batch) for step in range(max(20, 20_000 // batch))])


def chi_squared_is_small(counts: np.ndarray) -> None:
    """Equally likely cells: chi² has one degree of freedom less than cells, and twice as much variance."""
    expected, freedom = counts.mean(), counts.size - 1
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - freedom) < 5 * math.sqrt(2 * freedom)


# Drawn uniformly


def distinct_as_by_chance(sampler: Sampler, batch: int) -> None:
    """Of n draws from P the distinct ones are P·(1 - a) on average, a = (1 - 1/P)^n."""
    samples = drawn(sampler, batch)
    P, n = NUM_ITEMS, samples.size
    a, both = (1 - 1 / P) ** n, (1 - 2 / P) ** n
    variance = P * a + P * (P - 1) * both - (P * a) ** 2
    assert abs(len(np.unique(samples)) - P * (1 - a)) < 5 * math.sqrt(variance)


def steps_share_as_by_chance(sampler: Sampler, batch: int) -> None:
    """Pairs of equal samples in steps k and k+1 … k+3: Poisson, batch²/P for each pair of steps."""
    samples = np.sort(drawn(sampler, batch), axis=1)
    for lag in (1, 2, 3):
        pairs = sum(
            int((np.searchsorted(b, a, "right") - np.searchsorted(b, a, "left")).sum())
            for a, b in zip(samples[:-lag], samples[lag:], strict=True)
        )
        expected = (len(samples) - lag) * batch**2 / NUM_ITEMS
        # Neighbouring pairs of steps have a step in common, which adds to the variance: at most twice batch³/P² each.
        variance = expected + 2 * len(samples) * batch**3 / NUM_ITEMS
        assert abs(pairs - expected) < 5 * math.sqrt(variance) + 1


def steps_are_uncorrelated(sampler: Sampler, batch: int) -> None:
    """The same place in the batch, one step later."""
    samples = drawn(sampler, batch)
    correlation = np.corrcoef(samples[:-1].ravel(), samples[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(samples[1:].size)


CHECKS = [distinct_as_by_chance, steps_share_as_by_chance, steps_are_uncorrelated]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("check", CHECKS)
def test_samples_of_different_steps_are_uncorrelated(check, batch):
    check(uniform_indices, batch)


# Batches up to 8 of the old sampler fitted into one count of the counter.
@pytest.mark.parametrize("batch", [12, *exhaustively(64, 480, 4096)])
@pytest.mark.parametrize("check", CHECKS[:2])
def test_overlapping_steps_are_caught(check, batch):
    with pytest.raises(AssertionError):
        check(overlapping, batch)


@pytest.mark.parametrize("batch", BATCHES)
def test_repeated_steps_are_detected(batch):
    with pytest.raises(AssertionError):
        steps_are_uncorrelated(lambda n, seed, step, count: uniform_indices(n, seed, step // 2, count), batch)


@pytest.mark.parametrize("batch", BATCHES)
def test_uniform_samples_cover_full_range_evenly(batch):
    samples = drawn(uniform_indices, batch, num_items=50)
    assert samples.dtype == np.int64
    counts = np.bincount(samples.ravel(), minlength=50)
    assert counts.size == 50
    chi_squared_is_small(counts)


@pytest.mark.parametrize("sampler", [uniform_indices, lambda n, seed, step, count: epoch_indices(n, seed, 0, count)])
def test_different_seeds_give_independent_samples(sampler):
    """Seeds next to each other agree in as many places as chance has it."""
    samples = np.stack([sampler(50, seed, 0, 50) for seed in range(400)])
    equal = int((samples[1:] == samples[:-1]).sum())
    assert abs(equal - 399) < 5 * math.sqrt(399)
    assert not np.array_equal(sampler(1000, 2**63 - 1, 0, 8), sampler(1000, 2**63 - 2, 0, 8))


def test_large_step_numbers_are_independent():
    late = [uniform_indices(NUM_ITEMS, 1, step, 4096) for step in (2**31 - 2, 2**31 - 1)]
    assert len(np.intersect1d(*late)) < 4096**2 / NUM_ITEMS + 5 * 4096 / math.sqrt(NUM_ITEMS)


# In epochs


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_items", [1, 2, 7, 1000, 1023])
def test_every_item_appears_once_per_epoch(num_items, batch):
    """Whether batches lie across the ends of epochs, or hold several."""
    num_epochs = 3
    steps = -(-num_epochs * num_items // batch)
    stream = np.concatenate([epoch_indices(num_items, 5, step * batch, batch) for step in range(steps)])
    assert stream.dtype == np.int64
    for epoch in stream[: num_epochs * num_items].reshape(num_epochs, num_items):
        assert np.array_equal(np.sort(epoch), np.arange(num_items))


@pytest.mark.parametrize("batch", [12, 64, 480])
def test_incomplete_epoch_is_detected(batch):
    """What was drawn, 2,000 samples of 2,000 items, misses some."""
    old = np.concatenate([overlapping(2000, 5, step, batch) for step in range(-(-2000 // batch))])[:2000]
    assert len(np.unique(old)) < 1200


@settings(deadline=None, max_examples=num_examples(25, 100))
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_any_number_of_items_is_permuted(num_items, seed, epoch):
    found = epoch_indices(num_items, seed, epoch * num_items, num_items)
    assert np.array_equal(np.sort(found), np.arange(num_items))


@settings(deadline=None, max_examples=num_examples(25, 100))
@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 100), st.integers(0, 100))
def test_split_range_equals_whole_range(num_items, first, count, more):
    whole = epoch_indices(num_items, 3, first, count + more)
    assert np.array_equal(whole[:count], epoch_indices(num_items, 3, first, count))
    assert np.array_equal(whole[count:], epoch_indices(num_items, 3, first + count, more))


def test_orders_are_equally_likely():
    """All 24 of four items, over epochs and over seeds."""
    place = np.array([64, 16, 4, 1])
    by_epoch = epoch_indices(4, 0, 0, 4 * 4800).reshape(-1, 4) @ place
    by_seed = np.stack([epoch_indices(4, seed, 0, 4) for seed in range(num_examples(1200, 4800))]) @ place
    for codes in (by_epoch, by_seed):
        _, counts = np.unique(codes, return_counts=True)
        assert counts.size == 24
        chi_squared_is_small(counts)


def test_item_positions_are_uniform():
    orders = epoch_indices(30, 0, 0, 30 * 1000).reshape(1000, 30)
    counts = np.stack([np.bincount(orders[:, place], minlength=30) for place in range(30)])
    chi_squared_is_small(counts)


def test_epoch_order_is_uncorrelated():
    """Items in a row, and the same place in two epochs: uncorrelated; who was at the same place or a neighbour before
    is so no more often than by chance, which has 1 and 2 of them an epoch."""
    n, num_epochs = 5000, 40
    orders = epoch_indices(n, 11, 0, n * num_epochs).reshape(num_epochs, n)
    deviation = 1 / math.sqrt(n * num_epochs)
    assert abs(np.corrcoef(orders[:, 1:].ravel(), orders[:, :-1].ravel())[0, 1]) < 5 * deviation
    assert abs(np.corrcoef(orders[1:].ravel(), orders[:-1].ravel())[0, 1]) < 5 * deviation
    assert abs(np.corrcoef(orders.ravel(), np.tile(np.arange(n), num_epochs))[0, 1]) < 5 * deviation
    same_place = int((orders[1:] == orders[:-1]).sum())
    neighbours = int((np.abs(np.diff(orders, axis=1)) == 1).sum())
    assert abs(same_place - num_epochs) < 5 * math.sqrt(num_epochs)
    assert abs(neighbours - 2 * num_epochs) < 5 * math.sqrt(2 * num_epochs)


def test_sampler_memory_does_not_grow_with_the_data():
    tracemalloc.start()
    few = epoch_indices(10**15, 1, 10**16, 480)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(few)) == 480
    assert few.max() > 9e14
    assert peak_bytes < 1e6


# Blocks of a text


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("num_positions", "block_size"), [(10_000, 64), (10_048, 64), (50, 64), (64, 64), (127, 64)])
def test_epoch_blocks_tile_the_data(num_positions, block_size, batch):
    num_blocks, num_epochs = max(1, num_positions // block_size), 3
    steps = -(-num_epochs * num_blocks // batch)
    stream = np.concatenate(
        [epoch_positions(num_positions, block_size, 9, step * batch, batch) for step in range(steps)]
    )
    epochs = np.sort(stream[: num_epochs * num_blocks].reshape(num_epochs, num_blocks), axis=1)
    assert (np.diff(epochs, axis=1) == block_size).all()
    assert epochs.min() >= 0
    assert epochs.max() < num_positions
    assert len(np.unique(epochs[:, 0])) > 1  # borders move


@pytest.mark.parametrize(("num_positions", "block_size"), [(23, 5), (4, 5), (1, 5), (640, 64)])
def test_block_offsets_are_uniform(num_positions, block_size):
    num_blocks = max(1, num_positions // block_size)
    positions = epoch_positions(num_positions, block_size, 9, 0, num_blocks * 3000).reshape(3000, num_blocks)
    assert positions.min() == 0
    assert positions.max() == num_positions - 1
    counts = np.bincount(positions.min(axis=1))
    assert counts.size == num_positions - (num_blocks - 1) * block_size
    if counts.size > 1:
        chi_squared_is_small(counts)


# A resumed run goes on with the very same samples


def test_samples_match_versioned_known_values():
    """epochs-1 and uniform-2 of rundir.SAMPLERS, on any machine and with any numpy."""
    assert uniform_indices(1_003_790, 1337, 7, 4).tolist() == [1268, 410095, 273842, 691919]
    assert epoch_positions(1_003_790, 64, 1337, 15_683, 4).tolist() == [325952, 442945, 676417, 45953]
