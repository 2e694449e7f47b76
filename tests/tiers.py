"""Which tier runs a test: `make check`, `make test` or `make test-all`?

A test that `make test` leaves to `make test-all` carries the marker `exhaustive`; CONTRIBUTING.md says what each tier
holds. Of many seeds or a matrix of parameters the fast tiers run a part that these functions choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive  # of a test, or of one of its parameters: `make test-all` alone
# Set by conftest.py before any test module is imported.
RUNS_EXHAUSTIVE = False
TIMES = 1  # as many seeds and random examples as `make test-all` tries: --times


def num_examples(in_test: int, in_test_all: int) -> int:
    """Return how many random examples a test of this tier tries."""
    return TIMES * in_test_all if RUNS_EXHAUSTIVE else in_test


def seeds(num: int, fast: int = 1) -> list[Any]:
    """Return `num` seeds, of which the first `fast` ones are in the fast tiers."""
    return [seed if seed < fast else pytest.param(seed, marks=exhaustive) for seed in range(TIMES * num)]


def exhaustively(*values: object) -> list[Any]:
    """Return values of a parameter that `make test-all` alone tries; a tuple has one for each of several parameters."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=exhaustive) for one in values]


def thinned(values: Sequence[object], every: int) -> list[Any]:
    """Return all values of one parameter, of which every nth is in the fast tiers."""
    return [one if i % every == 0 else pytest.param(one, marks=exhaustive) for i, one in enumerate(values)]


def pairwise(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations; the fast tiers run a set that has each pair of values of two axes.

    >>> mark = pairwise(ranks=[1, 2, 3], sync=["ddp", "int8"], dtype=["fp32", "bf16"])
    >>> combinations = mark.args[1]
    >>> len(combinations), sum(not one.marks for one in combinations)
    (12, 6)
    """
    combinations = list(itertools.product(*axes.values()))
    fast = set(_covering(combinations, range(len(axes))))
    return pytest.mark.parametrize(
        tuple(axes), [pytest.param(*one, marks=() if i in fast else exhaustive) for i, one in enumerate(combinations)]
    )


def _covering(combinations: Sequence[tuple[object, ...]], axes: Iterable[int]) -> Iterable[int]:
    """Yield indices of combinations, greedily, until they have every pair of values of two axes."""
    pairs = list(itertools.combinations(axes, 2)) or [(axis, axis) for axis in axes]

    def covers(one: tuple[object, ...]) -> set[object]:
        return {(i, j, repr(one[i]), repr(one[j])) for i, j in pairs}

    missing: set[object] = set().union(*map(covers, combinations))
    left: Mapping[int, set[object]] = {i: covers(one) for i, one in enumerate(combinations)}
    while missing:
        best = max(left, key=lambda i: len(left[i] & missing))
        missing -= left[best]
        yield best
