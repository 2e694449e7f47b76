"""Simulated scaling matches closed forms and published figures."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.link import LinkModel
from evener.core.run.prediction import Cluster, HostRates
from evener.plan.cost.collective_cost import build_ring, collective_s
from evener.plan.cost.sync_traffic import BUCKET_BYTES
from evener.plan.scaling.goodput import checkpoint_interval_s, useful_time_fraction
from evener.plan.scaling.rule_of_thumb import (
    RULE_OF_THUMB,
    describe_rule,
    explain_rule,
    nanogpt_scenario,
    required_bandwidth_Bps,
    required_jitter,
)
from evener.plan.scaling.scaling_model import (
    MaxDistribution,
    ScalingScenario,
    all_reduce_s,
    exposed_communication_s,
    simulate_scaling,
)
from evener.report.pages.simulated_scaling import SCALING_COLUMNS, breakdown_png, efficiency_png, scaling_rows

from ..cost import in_loops
from ..tiers import exhaustively

COUNTS = [2**i for i in range(13)]
INSTANT = LinkModel(latency_s=0.0, bandwidth_Bps=math.inf)
ETHERNET = LinkModel(latency_s=1e-4, bandwidth_Bps=125e6)
PLAIN = ScalingScenario(
    compute_s=1.0,
    sequences=16,
    micro_batch=4,
    sequence_tokens=1000,
    update_s=0.1,
    gradient_bytes=10**9,
    inner=INSTANT,
    outer=INSTANT,
)
REAL = msgspec.structs.replace(
    nanogpt_scenario(),
    jitter=0.02,
    slow_share=0.002,
    slow_factor=1.15,
    mtbf_s=300 * 86400.0,
    checkpoint_s=20.0,
    restart_s=300.0,
)


def changed(scenario=PLAIN, **fields):
    return msgspec.structs.replace(scenario, **fields)


# The maximum of n


@pytest.mark.parametrize("num", [1, 2, 8, 64, 4096])
def test_mean_of_slowest_exponential_is_harmonic_number(num):
    slowest = MaxDistribution(lambda x: num * math.log(-math.expm1(-x)))
    assert slowest.mean() == pytest.approx(math.fsum(1 / i for i in range(1, num + 1)), rel=1e-9)
    assert slowest.quantile(0.5) == pytest.approx(-math.log(-math.expm1(math.log(0.5) / num)), rel=1e-9)


def test_mean_of_slower_of_two_lognormals_matches_closed_form():
    """2·E[X]·Φ(σ/√2), from E[max(X, Y)] = 2·E[X; X > Y]."""
    point = simulate_scaling(changed(jitter=0.5), [2])[0]
    spread = math.sqrt(math.log1p(0.5**2))
    assert point.cost.compute_s + point.cost.wait_s == pytest.approx(1 + math.erf(spread / 2), rel=1e-9)


def test_single_rank_never_waits():
    for jitter in (0.01, 0.1, 1.0, 3.0):
        assert simulate_scaling(changed(jitter=jitter), [1])[0].cost.wait_s == pytest.approx(0.0, abs=1e-6)


def test_slowest_rank_integral_matches_simulation():
    scenario = changed(jitter=0.1, slow_share=0.05, slow_factor=1.5)
    draw = random.Random(42)
    variance = math.log1p(0.1**2)

    def rank_s():
        return draw.lognormvariate(-variance / 2, math.sqrt(variance)) * (1.5 if draw.random() < 0.05 else 1.0)

    drawn = sorted(max(rank_s() for _ in range(16)) for _ in range(4000))
    point = simulate_scaling(scenario, [16])[0]
    error = 4 * math.sqrt(sum((x - sum(drawn) / 4000) ** 2 for x in drawn)) / 4000
    assert point.cost.compute_s + point.cost.wait_s == pytest.approx(sum(drawn) / 4000, abs=error)
    assert point.step_p50_s - 0.1 == pytest.approx(drawn[2000], rel=0.03)
    assert point.step_p95_s - 0.1 == pytest.approx(drawn[3800], rel=0.03)


@pytest.mark.parametrize("num", [1, 3, 100])
def test_slow_rank_probability_matches_closed_form(num):
    """One of n is slow with probability 1 - (1-s)ⁿ, and then the step takes as long as it does."""
    point = simulate_scaling(changed(slow_share=0.01, slow_factor=2.0), [num])[0]
    assert point.cost.compute_s == pytest.approx(1.01)
    assert point.cost.compute_s + point.cost.wait_s == pytest.approx(2 - 0.99**num)
    nearly = simulate_scaling(changed(slow_share=0.01, slow_factor=2.0, jitter=1e-3), [num])[0]
    assert nearly.step_s == pytest.approx(point.step_s, rel=4e-3)


# Communication


def test_zero_overhead_gives_full_efficiency():
    for point in simulate_scaling(PLAIN, COUNTS):
        assert point.efficiency == point.goodput == 1.0
        assert (point.cost.exposed_sync_s, point.cost.wait_s) == (0.0, 0.0)
        assert point.tokens_per_s == pytest.approx(point.ranks * 16_000 / 1.1)


def test_exposed_communication_matches_formula():
    """Equal buckets, ready evenly: max(last bucket, all - backward·(1 - first part))."""
    for num in (1, 3, 20):
        for all_s in (0.1, 0.9, 1.0, 1.4, 5.0):
            transfers = [((i + 1) / num, all_s / num, "ring") for i in range(num)]
            assert exposed_communication_s(transfers, 1.0) == pytest.approx(max(all_s / num, all_s - (1 - 1 / num)))


def test_backward_of_the_last_micro_batch_hides_communication():
    size = 8 * BUCKET_BYTES
    wire = LinkModel(latency_s=0.0, bandwidth_Bps=size / 0.5)  # 0.5 s on two ranks
    slow = changed(gradient_bytes=size, inner=wire)
    blocking, hidden = (simulate_scaling(changed(slow, overlap=overlap), [2])[0] for overlap in (False, True))
    assert blocking.sync_s == hidden.sync_s == pytest.approx(0.5)
    assert blocking.cost.exposed_sync_s == pytest.approx(0.5)
    backward_s = 2 / 3 / 4  # one micro-batch of four
    assert hidden.cost.exposed_sync_s == pytest.approx(0.5 - backward_s * 7 / 8)


@pytest.mark.parametrize("per_node", [1, 2, 8])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 16])
@pytest.mark.parametrize("size", [1e4, 25e6, 1e9])
def test_all_reduce_cost_matches_planner(per_node, num_nodes, size):
    if per_node * num_nodes == 1:
        return
    inner, outer = LinkModel(latency_s=3e-6, bandwidth_Bps=230e9), LinkModel(latency_s=1e-5, bandwidth_Bps=50e9)
    names = [f"host{i}" for i in range(num_nodes)]
    rates = HostRates(tokens_per_s={}, sum_Bps=40e9, local=inner)
    wires = {a: {b: outer for b in names if a != b} for a in names}
    cluster = Cluster(slots=[], hosts=dict.fromkeys(names, rates), wires=wires)
    around = build_ring(cluster, [name for name in names for _ in range(per_node)])
    scenario = changed(inner=inner, outer=outer, per_node=per_node, sum_Bps=40e9)
    found_s, _ = all_reduce_s(size, per_node * num_nodes, scenario)
    assert found_s == pytest.approx(collective_s("all_reduce", size, around, "nccl"), rel=1e-9)


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    scenario = changed(inner=INSTANT, outer=LinkModel(latency_s=1e-5, bandwidth_Bps=50e9), per_node=1)
    assert all_reduce_s(1, 512, scenario) == (pytest.approx(2 * 9 * 1e-5, rel=0.01), "tree")
    assert all_reduce_s(1, 512, changed(scenario, has_trees=False)) == (pytest.approx(2 * 511 * 1e-5, rel=0.01), "ring")
    assert all_reduce_s(1e11, 512, scenario)[1] == "ring"


def test_inter_node_bus_bandwidth_matches_published_value():
    """4 nodes of 8 B200, eight adapters of 400 Gbit/s each, 16 GiB: 381.8 GB/s.   [ml-engineering]"""
    fabric = changed(
        inner=LinkModel(latency_s=3.4e-6, bandwidth_Bps=900e9), outer=LinkModel(latency_s=9.6e-6, bandwidth_Bps=400e9)
    )
    time_s, _ = all_reduce_s(16 * 2**30, 32, fabric)
    assert 2 * 31 / 32 * 16 * 2**30 / time_s == pytest.approx(381.8e9, rel=0.10)


# Shares


def test_strong_scaling_ends_at_one_sequence_per_rank():
    points = simulate_scaling(changed(kind="strong", update_s=0.0), [1, 2, 3, 16, 64])
    assert [point.share for point in points] == [16, 8, 6, 1, 1]
    assert [point.efficiency for point in points] == pytest.approx([1, 1, 16 / 18, 1, 0.25])
    assert points[3].tokens_per_s == points[4].tokens_per_s
    assert points[4].cost.wait_s == pytest.approx(3 / 4 / 16)


def test_simulated_throughput_is_tokens_over_step_time():
    for kind in ("weak", "strong"):
        for point in simulate_scaling(changed(REAL, kind=kind), COUNTS):
            tokens = 60 * 1024 * (point.ranks if kind == "weak" else 1)
            assert point.tokens_per_s == pytest.approx(tokens / point.step_s)
            assert 0 < point.goodput < point.efficiency <= 1
            assert point.step_p50_s <= point.step_p95_s


def test_more_ranks_never_make_a_rank_faster():
    points = simulate_scaling(REAL, COUNTS)
    assert all(after.efficiency <= before.efficiency for before, after in itertools.pairwise(points))
    assert [point.nodes for point in points] == [1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_4096_ranks_take_less_than_a_tenth_of_a_second():
    assert in_loops(lambda: simulate_scaling(REAL, COUNTS)) < 50  # 0.1 s


# Failures


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_checkpoint_interval_matches_daly(mtbf_min, published_min):
    """Checkpoints of 5 minutes, figures 3 to 5 of Daly 2006."""
    assert checkpoint_interval_s(5 * 60, mtbf_min * 60) / 60 == pytest.approx(published_min, rel=0.01)


@pytest.mark.parametrize("mtbf_s", [900.0, 21_600.0, 86_400.0])
def test_checkpoint_interval_maximizes_useful_time(mtbf_s):
    best = max(useful_time_fraction(every_s, 300.0, 600.0, mtbf_s) for every_s in range(30, 20_000, 10))
    assert useful_time_fraction(checkpoint_interval_s(300.0, mtbf_s), 300.0, 600.0, mtbf_s) == pytest.approx(
        best, rel=1e-3
    )


def test_checkpoint_overhead_matches_young():
    """Checkpoint and half an interval of lost work: √(2δ/M), to first order."""
    lost = 1 - useful_time_fraction(checkpoint_interval_s(1.0, 1e8), 1.0, 0.0, 1e8)
    assert lost == pytest.approx(math.sqrt(2 / 1e8), rel=0.01)


def test_mtbf_is_that_of_a_node_over_number_of_nodes():
    for point in simulate_scaling(REAL, COUNTS):
        assert point.mtbf_s == pytest.approx(300 * 86400 / point.nodes)
        assert point.checkpoint_every_s >= point.step_s
    hopeless = simulate_scaling(changed(mtbf_s=1.0, restart_s=1e6, checkpoint_s=1.0), [8])[0]
    assert hopeless.goodput == 0


# The rule of thumb


def test_required_bandwidth_gives_requested_efficiency():
    for overlap in (False, True):
        scenario = changed(nanogpt_scenario(), overlap=overlap)
        for ranks, (low, _) in RULE_OF_THUMB.items():
            found_Bps = required_bandwidth_Bps(scenario, ranks, low)
            wire = {"inner" if ranks == 8 else "outer": LinkModel(latency_s=3.4e-6, bandwidth_Bps=found_Bps)}
            assert simulate_scaling(changed(scenario, **wire), [ranks])[0].efficiency == pytest.approx(low, abs=2e-3)


def test_blocking_bandwidth_at_8_ranks_matches_closed_form():
    """Nothing hidden, no latency: 2·7/8·S/β = (1/e - 1)·step."""
    scenario = changed(nanogpt_scenario(), overlap=False, inner=LinkModel(latency_s=0.0, bandwidth_Bps=1e9))
    step_s = 60 * 1024 / 150_000 + scenario.update_s
    for efficiency in (0.8, 0.9):
        exact = 1.75 * 4 * 124_439_808 / ((1 / efficiency - 1) * step_s)
        assert required_bandwidth_Bps(scenario, 8, efficiency) == pytest.approx(exact, rel=1e-4)


def test_required_jitter_gives_requested_efficiency():
    found = required_jitter(nanogpt_scenario(), 64, 0.65)
    assert simulate_scaling(changed(nanogpt_scenario(), jitter=found), [64])[0].efficiency == pytest.approx(
        0.65, abs=1e-4
    )


def test_required_bandwidth_and_jitter_are_none_if_unreachable():
    assert required_bandwidth_Bps(changed(nanogpt_scenario(), jitter=0.5), 64, 0.7) is None
    assert required_jitter(changed(nanogpt_scenario(), inner=ETHERNET), 8, 0.8) is None


def test_overlap_needs_less_bandwidth_than_blocking():
    for reading in explain_rule(nanogpt_scenario()):
        for blocking, overlapped in zip(reading.blocking_Bps, reading.overlapped_Bps, strict=True):
            assert overlapped < blocking < 20e9
        assert reading.expected > 0.98


def test_scaling_rule_is_printed_with_assumptions():
    told = " ".join(describe_rule(nanogpt_scenario()))
    for part in ("5 micro-batches of 12 × 1024", "497.8 MB", "150k tokens/s", "80% to 90% at 8", "60% to 70% at 64"):
        assert part in told
    assert "no bandwidth" in " ".join(describe_rule(changed(nanogpt_scenario(), jitter=0.5)))


# What a person sees


def test_scaling_table_has_one_row_per_rank_count():
    table = scaling_rows(simulate_scaling(REAL, COUNTS))
    assert [row[0] for row in table] == [str(num) for num in COUNTS]
    assert {len(row) for row in table} == {len(SCALING_COLUMNS)}
    assert scaling_rows(simulate_scaling(PLAIN, [1]))[0][-3:] == ("–", "–", "–")


@pytest.mark.parametrize(
    ("scenario", "counts"),
    [(REAL, COUNTS), *exhaustively((changed(REAL, kind="strong"), COUNTS), (PLAIN, [1]), (REAL, [3, 100]))],
    ids=["weak", "strong", "alone", "two"],
)
def test_scaling_plots_are_written(tmp_path, scenario, counts):
    points = simulate_scaling(scenario, counts)
    for draw in (efficiency_png, breakdown_png):
        draw(points, tmp_path / "scale.png", title="a < b")
        assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compute_s", 0.0),
        ("compute_s", math.nan),
        ("jitter", -0.1),
        ("slow_share", 1.5),
        ("mtbf_s", 0.0),
        ("sequences", 0),
        ("gradient_bytes", -1),
        ("inner", LinkModel(latency_s=0.0, bandwidth_Bps=-1.0)),
        ("outer", LinkModel(latency_s=-1.0, bandwidth_Bps=1.0)),
    ],
)
def test_invalid_scenario_is_a_one_line_error(field, value):
    with pytest.raises(UsageError, match=field):
        simulate_scaling(changed(**{field: value}), [1])


def test_zero_ranks_are_refused():
    with pytest.raises(UsageError, match="0 ranks"):
        simulate_scaling(PLAIN, [1, 0])
