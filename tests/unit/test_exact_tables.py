"""Shares, micro-batches and step parts match tables of exact answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.bench.scaling import process_counts
from evener.core.run.roster import Member, equal_shares
from evener.core.run.step_cost import PHASES, StepCost, split_blocked
from evener.plan.cost.collective_cost import ring_all_reduce_bytes


@given(st.integers(1, 10_000), st.integers(1, 512))
def test_shares_cover_the_batch_and_differ_by_one_at_most(num, ranks):
    shares = equal_shares(num, ranks)
    assert sum(shares) == num
    assert len(shares) == ranks
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 10_000), st.integers(1, 512))
def test_micro_batches_cover_share_with_minimal_count(share, largest):
    sizes = Member(rank=0, host="h", device="cpu", dtype="fp32", share=share, micro_batch=largest).micro_batch_sizes
    assert sum(sizes) == share
    assert max(sizes) <= largest
    assert len(sizes) == math.ceil(share / largest)
    assert len(set(sizes)) <= 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=16))
def test_blocked_time_splits_into_transfer_and_wait(blocked):
    split = split_blocked(blocked)
    assert len({exposed for exposed, _ in split}) == 1
    assert min(wait for _, wait in split) == 0
    for total, (exposed, wait) in zip(blocked, split, strict=True):
        assert exposed + wait == pytest.approx(total)


def test_step_cost_total_is_the_sum_of_its_parts():
    assert StepCost().total_s == 0
    assert StepCost(**dict.fromkeys(PHASES, 0.5)).total_s == 2.5


def test_ring_bytes_of_126m_model_on_two_ranks_match():
    assert ring_all_reduce_bytes(4 * 125_829_120, 2) == 503_316_480


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_benched_process_counts_end_with_core_count(cores, counts):
    assert process_counts(cores) == counts
