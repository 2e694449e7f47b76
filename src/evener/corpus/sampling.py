"""Samplers: which items of a data set a step reads. Both are pure functions: there is no sampler state.

    uniform   every item of every step is drawn from all items, independently
    epochs    every item comes once before any comes again, in a new random order each epoch

Items are integers from 0, so that any indexable data set can be read as evener's loop reads a corpus. The items of a
step are

    epoch_indices(len(dataset), seed, first=step * batch, count=batch)

All randomness comes from Philox, keyed by the seed. Its counter has four words. It counts in the lowest word; the
highest holds the number of the step or of the epoch, and the word below that says which of the two it is. So streams
never overlap. Only Philox's raw words are used, whose stability numpy guarantees: draws of a numpy Generator may change
with numpy's version.
"""

from __future__ import annotations

import math

import numpy as np

STEP, EPOCH = 0, 1  # what the highest word of Philox's counter counts
FEISTEL_ROUNDS = 10  # as in NIST's FF1, a cipher for small domains


def uniform_indices(num_items: int, seed: int, step: int, count: int) -> np.ndarray:
    """Return the items of a step: (count,) int64 in [0, num_items), each equally likely, drawn with replacement.

    Draws of different steps, and of different seeds, are independent. (A remainder of 64 random bits prefers low items
    by less than num_items / 2**64.)
    """
    return (_philox_words(seed, STEP, step, count) % num_items).astype(np.int64)


def epoch_indices(num_items: int, seed: int, first: int, count: int) -> np.ndarray:
    """Return `count` items from the endless sequence of epochs, from number `first` on: (count,) int64 < num_items.

    Guaranteed:

    - Epoch e, numbers e·num_items … (e+1)·num_items - 1, is a permutation of all items: each comes exactly once.
    - The permutations of different epochs, and of different seeds, are independent.
    - The result depends on the four arguments alone, so the sequence can be computed in any chunks and any order.

    A batch may span the end of an epoch, or be longer than one. Memory grows with `count`, not with the data set.

    >>> sorted(epoch_indices(5, seed=1, first=10, count=5).tolist())
    [0, 1, 2, 3, 4]
    """
    epoch, item = divmod(np.arange(first, first + count, dtype=np.uint64), num_items)
    keys, _ = _epoch_keys(seed, epoch)
    return _permute(item, num_items, keys).astype(np.int64)


def epoch_positions(num_positions: int, block_size: int, seed: int, first: int, count: int) -> np.ndarray:
    """Return the start positions of `count` blocks, from number `first` on: (count,) int64 in [0, num_positions).

    Blocks are numbered through an endless sequence of epochs. In each epoch num_positions // block_size blocks (at
    least one) lie end to end and are read once each, in a random order as in `epoch_indices`. The offset of the first
    block is drawn anew for each epoch, uniformly from all offsets with which the blocks fit. So blocks begin elsewhere
    in each epoch, and any position may be drawn, the first and the last included. An epoch leaves out less than two
    blocks at the ends.
    """
    num_blocks = max(1, num_positions // block_size)
    num_offsets = num_positions - (num_blocks - 1) * block_size
    epoch, block = divmod(np.arange(first, first + count, dtype=np.uint64), num_blocks)
    keys, spare = _epoch_keys(seed, epoch)
    positions: np.ndarray = spare % num_offsets + _permute(block, num_blocks, keys) * block_size
    return positions.astype(np.int64)


def _philox_words(seed: int, kind: int, number: int, count: int) -> np.ndarray:
    """Return the first `count` words of the stream of this step or epoch: (count,) uint64."""
    return np.random.Philox(key=seed, counter=[0, 0, kind, number]).random_raw(count)


def _epoch_keys(seed: int, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the permutation keys (FEISTEL_ROUNDS, count) of ascending epochs (count,), and a spare word (count,)."""
    numbers, which = np.unique(epoch, return_inverse=True)
    by_epoch = [_philox_words(seed, EPOCH, int(number), FEISTEL_ROUNDS + 1) for number in numbers]
    words = np.array(by_epoch, dtype=np.uint64).reshape(-1, FEISTEL_ROUNDS + 1).T[:, which]
    return words[:FEISTEL_ROUNDS], words[FEISTEL_ROUNDS]


def _permute(items: np.ndarray, num_items: int, keys: np.ndarray) -> np.ndarray:
    """Permute each of `items` (count,) by the permutation of [0, num_items) that its column of `keys` gives.

    A Feistel network on the cells of a table with at least num_items cells, and less than a row more; an item that
    lands beyond num_items is mapped again. Both are bijections for any keys.   [Black & Rogaway 2002, methods 2 and 3]
    """
    num_columns = math.isqrt(num_items - 1) + 1
    num_rows = -(-num_items // num_columns)
    permuted = items.copy()
    walking = np.arange(len(items))
    while len(walking):
        row, column = divmod(permuted[walking], num_columns)
        for i in range(0, FEISTEL_ROUNDS, 2):
            row = (row + _mix(column + keys[i, walking]) % num_rows) % num_rows
            column = (column + _mix(row + keys[i + 1, walking]) % num_columns) % num_columns
        permuted[walking] = row * num_columns + column
        walking = walking[permuted[walking] >= num_items]
    return permuted


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix (count,) uint64: every output bit depends on all of x.   [SplitMix64's finalizer, Steele et al. 2014]"""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    mixed: np.ndarray = x ^ (x >> 31)
    return mixed
