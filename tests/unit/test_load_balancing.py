"""The fastest shares match brute force over all divisions, and closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.run.roster import equal_shares
from evener.plan.shares.load_balancing import RankTimeModel, fastest_shares, fastest_shares_or_zero, slowest_rank_s

# Eighths and halves: sums of them are exact, so that the best of all divisions can be asked for to the bit.
PACES = st.builds(
    RankTimeModel,
    sequence_s=st.integers(1, 24).map(lambda n: n / 8),
    micro_batch_overhead_s=st.integers(0, 20).map(lambda n: n / 2),
    fixed_s=st.integers(0, 4).map(float),
    micro_batch=st.integers(1, 9),
    num_steps=st.sampled_from([1, 2, 4]),
)


def divisions(left: int, ranks: int, least: int) -> list[list[int]]:
    if ranks == 1:
        return [[left]] if left >= least else []
    return [[n, *rest] for n in range(least, left + 1) for rest in divisions(left - n, ranks - 1, least)]


@given(st.integers(4, 14), st.lists(PACES, min_size=1, max_size=4), st.integers(0, 1))
def test_fastest_shares_match_brute_force(num, paces, least):
    found = fastest_shares(num, paces, min_units=least)
    assert sum(found) == num
    assert min(found) >= least
    assert slowest_rank_s(found, paces) == min(
        slowest_rank_s(shares, paces) for shares in divisions(num, len(paces), least)
    )


@given(st.integers(1, 6), st.lists(PACES, min_size=1, max_size=3), st.sampled_from([2, 5]))
def test_fastest_micro_batch_shares_match_brute_force(num, paces, unit):
    found = fastest_shares(num * unit, paces, unit=unit)
    others = [[unit * n for n in shares] for shares in divisions(num, len(paces), 0)]
    assert all(share % unit == 0 for share in found)
    assert slowest_rank_s(found, paces) == min(slowest_rank_s(shares, paces) for shares in others)


@given(st.integers(50, 400), st.lists(PACES, min_size=2, max_size=6), st.integers(0, 8), st.sampled_from([1, 3]))
def test_large_batch_shares_match_greedy_assignment(num, paces, least, unit):
    one_by_one = [least * unit] * len(paces)
    for _ in range(num - sum(one_by_one) // unit):
        rank = min(range(len(paces)), key=lambda rank: (paces[rank].time_s(one_by_one[rank] + unit), rank))
        one_by_one[rank] += unit
    assert fastest_shares(num * unit, paces, min_units=least, unit=unit) == one_by_one


@given(st.integers(6, 14), st.lists(PACES, min_size=1, max_size=4), st.integers(1, 5))
def test_fastest_or_none_gives_zero_or_at_least_the_minimum_share(num, paces, least):
    found = fastest_shares_or_zero(num, paces, least)
    others = [shares for shares in divisions(num, len(paces), 0) if all(n == 0 or n >= least for n in shares)]
    assert found in others
    assert slowest_rank_s(found, paces) == min(slowest_rank_s(shares, paces) for shares in others)


def test_equal_speeds_get_equal_shares():
    assert fastest_shares(16, [RankTimeModel(sequence_s=1.0)] * 3) == equal_shares(16, 3)


def test_shares_are_proportional_to_speed_when_a_pass_has_no_fixed_cost():
    """n_r = B · v_r / Σ v, where that is whole."""
    assert fastest_shares(60, [RankTimeModel(sequence_s=1 / rate) for rate in (3.0, 2.0, 1.0)]) == [30, 20, 10]


@pytest.mark.parametrize(("pass_s", "expected"), [(0.0, [17, 7]), (1.0, [16, 8]), (5.0, [15, 9])])
def test_share_just_above_a_micro_batch_is_avoided_when_a_pass_has_fixed_cost(pass_s, expected):
    """17 in micro-batches of 16 are two passes, of 9 and 8: 27 with 5 for each, where 16 take 21."""
    paces = [
        RankTimeModel(sequence_s=1.0, micro_batch_overhead_s=pass_s, micro_batch=16),
        RankTimeModel(sequence_s=2.25, micro_batch=16),
    ]
    assert fastest_shares(24, paces) == expected


def test_rank_with_too_high_pass_cost_gets_no_share():
    paces = [RankTimeModel(sequence_s=1.0), RankTimeModel(sequence_s=1.0, micro_batch_overhead_s=30.0)]
    assert fastest_shares(24, paces) == [24, 0]
    assert fastest_shares(24, paces, min_units=1) == [23, 1]
