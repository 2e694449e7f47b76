"""Estimate clock offsets from collectives: the true offset lies within the reported error, which is small."""

from __future__ import annotations

import random

import pytest

from evener.core.run.step_spans import BucketSpan, PhaseSpan, StepSpans
from evener.report.read.clock_offsets import MAX_DRIFT, RankClocks


def one_step(step, clock, begun_s, exchanges, news=()):
    return StepSpans(step=step, epoch=0, clock=clock, begun_s=begun_s, laps=[PhaseSpan("compute_s", 0.0, 1.0)],
                     exchanges=[BucketSpan(bucket, begin, end, 8, 8) for bucket, begin, end in exchanges],
                     news=list(news))  # fmt: skip


def test_clock_offset_is_bounded_from_both_sides_by_two_collectives():
    """By hand: b's clock is 100 s behind. a comes last to bucket 0, 1 ms of transfer; b to bucket 1, 3 ms."""
    a = one_step(0, 5000.0, 200.0, [(0, 0.500, 0.501), (1, 0.600, 0.653)])
    b = one_step(0, 5100.0, 100.0, [(0, 0.400, 0.501), (1, 0.650, 0.653)])
    clocks = RankClocks({0: [a], 1: [b]}, {0: "a", 1: "b"})
    offset = clocks.offset(clocks.clock_of(0, a), clocks.clock_of(1, b), 200.0, 200.0)
    # a entered bucket 0 at 200.500, b left it at 100.501: 99.999 at least; a left bucket 1 at 200.653, b had entered it
    # at 100.650: 100.003 at most. Until 0.5 and 0.6 s before, when it was asked for, clocks may have drifted.
    assert MAX_DRIFT == 1e-4
    assert offset.add_s == pytest.approx((99.999 - 0.5e-4 + 100.003 + 0.6e-4) / 2, abs=1e-9)
    assert offset.error_s == pytest.approx((0.004 + 1.1e-4) / 2, abs=1e-9)
    back = clocks.offset(clocks.clock_of(1, b), clocks.clock_of(0, a), 100.0, 100.0)
    assert back.add_s == pytest.approx(-offset.add_s, abs=MAX_DRIFT)


def collectives(truth, drift, late, seed, num_steps=40, every=1):
    """Two ranks' spans. Rank 1's clock shows (t - truth) / (1 + drift) at t; `late(draw)`: how late each rank comes."""
    draw, spans, t = random.Random(seed), {0: [], 1: []}, 1000.0
    for step in range(0, num_steps * every, every):
        exchanges = {0: [], 1: []}
        for bucket in range(3):
            begins = [t + 0.1 * bucket + late(draw)[rank] for rank in range(2)]
            # A rank leaves when all have entered and its own transfer is through: not with the other to the moment.
            ends = [max(begins) + 2e-4 + draw.expovariate(1 / 1e-3) for _ in range(2)]
            for rank, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                exchanges[rank].append((bucket, begin, end))
        for rank in range(2):
            by = (lambda at: (at - truth) / (1 + drift)) if rank else (lambda at: at)
            begun = by(t)
            spans[rank].append(one_step(step, 7000.0 + 50.0 * rank, begun,
                                        [(bucket, by(begin) - begun, by(end) - begun)
                                         for bucket, begin, end in exchanges[rank]]))  # fmt: skip
        t += 0.5 * every
    return spans


def either(draw):
    return (draw.random() * 0.02, draw.random() * 0.02)


def rank_1(draw):
    return (0.0, 0.05 + draw.random() * 0.02)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("truth", "drift", "late", "most_s"), [
    (123_456.789, 0.0, either, 3e-3),
    (-9.5, 40e-6, either, 3e-3),
    (0.0, -40e-6, either, 3e-3),
    (7.0, 20e-6, rank_1, 40e-3),  # nobody ever waits for rank 0: as wide as rank 1 is late
])  # fmt: skip
def test_true_clock_offset_is_within_reported_error(truth, drift, late, most_s, seed):
    spans = collectives(truth, drift, late, seed)
    clocks = RankClocks(spans, {0: "a", 1: "b"})
    for first, last in ((0, 0), (5, 20), (39, 39)):
        begin, end = spans[0][first].begun_s, spans[0][last].begun_s + 0.4
        offset = clocks.offset(clocks.clock_of(0, spans[0][0]), clocks.clock_of(1, spans[1][0]), begin, end)
        assert offset.error_s is not None
        assert offset.error_s < most_s
        for at in (begin, (begin + end) / 2, end):  # at every moment between
            true = at - (at - truth) / (1 + drift)
            assert abs(offset.add_s - true) <= offset.error_s


def test_unconnected_clocks_fall_back_to_wall_clock():
    a, b = one_step(0, 5000.0, 200.0, []), one_step(0, 5100.5, 99.0, [])
    clocks = RankClocks({0: [a], 1: [b]}, {0: "a", 1: "b"})
    offset = clocks.offset(clocks.clock_of(0, a), clocks.clock_of(1, b), 200.0, 201.0)
    assert (offset.add_s, offset.error_s) == (100.5, None)


def test_ranks_of_one_host_share_a_clock_until_reboot():
    first = [one_step(0, 5000.0, 200.0, []), one_step(1, 5000.002, 201.0, []), one_step(2, 5900.0, 20.0, [])]
    second = [one_step(0, 5000.0001, 200.0, [])]
    clocks = RankClocks({0: first, 1: second, 2: second}, {0: "a", 1: "a", 2: "b"})
    assert clocks.clock_of(0, first[0]) == clocks.clock_of(0, first[1]) == clocks.clock_of(1, second[0])
    assert len({clocks.clock_of(0, first[0]), clocks.clock_of(0, first[2]), clocks.clock_of(2, second[0])}) == 3
    offset = clocks.offset(clocks.clock_of(0, first[0]), clocks.clock_of(1, second[0]), 200.0, 201.0)
    assert (offset.add_s, offset.error_s) == (0.0, 0.0)
