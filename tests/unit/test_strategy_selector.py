"""Choose another sync strategy when a link slows during a run, and never because of noise."""

from __future__ import annotations

import random

import pytest

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.plan.choice.cluster import with_scaled_links
from evener.plan.choice.options import predict_training
from evener.plan.choice.strategy_selector import WINDOW, StrategySelector
from evener.plan.cost import cost_model
from evener.plan.cost.cost_model import predict_step
from tests.unit.planner import cluster_of, costing, job_of

JOB = job_of(preset_shape("char", 65), batch=16, sync="ddp", dtype="bf16", loss_budget=0.0)
FAST = cluster_of(3400.0, 3400.0, wire=LinkModel(latency_s=1e-4, bandwidth_Bps=1e9), coding_Bps={"packed": 1e10})


def simulated(factors, noise=0.0, off=1.0, job=JOB, cluster=FAST):
    """Steps over a link that is `factors[step]` times as fast as the plan's: [(step, sync)] of what is chosen, the
    Roster at the end. Exchanges take `off` times what is predicted."""
    roster = predict_training(job, cluster).roster
    chooser, draw, found = StrategySelector(job, cluster, roster), random.Random(0), []
    known = {}
    for step, factor in enumerate(factors):
        key = (factor, roster.sync, roster.bucket_bytes)
        if key not in known:
            known[key] = predict_step(job, with_scaled_links(cluster, factor), roster).ranks[0].sync_s
        took_s = off * known[key] * (1 + draw.gauss(0, noise))
        choice = chooser.observe_step([took_s, 1.2 * took_s], roster)
        if choice is not None:
            roster = roster.with_sync(
                choice.option.roster.sync, choice.option.roster.bucket_bytes, step, why=choice.reason
            )
            found.append((step, str(roster.sync)))
    return found, roster


def test_strategy_changes_after_link_slows_and_stays_after_it_recovers():
    """43 MB at 1 GB/s hide behind backward; at 50 MB/s they do not, and half of them is faster. Back again: no more
    than ddp can, and no loss: it stays where it is."""
    found, roster = simulated([1.0] * 200 + [0.05] * 200)
    assert [sync for _, sync in found] == ["packed"]
    assert 200 + WINDOW // 2 <= found[0][0] <= 200 + WINDOW + 1
    assert "an exchange takes" in roster.why
    now = predict_step(JOB, with_scaled_links(FAST, 0.05), roster)
    before = predict_step(JOB, with_scaled_links(FAST, 0.05), predict_training(JOB, FAST).roster)
    assert f"predicted to be {now.tokens_per_s / before.tokens_per_s:.2f} times as fast as with ddp" in roster.why


def test_slow_link_is_detected_at_any_step():
    """Also in a window that would have been the measure of what is usual, of a link that is not the plan's either."""
    for off in (1.0, 8.0):
        for cut in range(0, 180, 12):
            found, _ = simulated([1.0] * cut + [0.05] * 160, off=off)
            assert [sync for _, sync in found] == ["packed"], (off, cut)
            assert found[0][0] <= cut + WINDOW + WINDOW // 2


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_noise_and_short_disturbance_do_not_change_strategy(noise):
    assert simulated([1.0] * 2000, noise=noise)[0] == []
    assert simulated(([1.0] * 100 + [0.1] * 20) * 10, noise=noise)[0] == []  # a backup, a download


def test_only_large_prediction_error_changes_strategy():
    assert simulated([0.6] * 300)[0] == []
    assert simulated([1.0] * 300, off=1.6)[0] == []
    ((step, sync),) = simulated([0.03] * 300)[0]
    assert (step, sync) == (WINDOW - 1, "packed")


def test_strategy_beyond_loss_budget_is_not_chosen(monkeypatch):
    monkeypatch.setattr(cost_model, "loss_penalty", costing({"int8": 0.02}))
    chosen = simulated([1.0] * 100 + [0.01] * 100)[0]
    assert chosen
    assert "int8" not in [sync for _, sync in chosen]


def test_strategy_is_unchanged_without_measurements():
    roster = predict_training(JOB, FAST).roster
    chooser = StrategySelector(JOB, FAST, roster)
    assert all(chooser.observe_step([float("nan"), 1.0], roster) is None for _ in range(200))
