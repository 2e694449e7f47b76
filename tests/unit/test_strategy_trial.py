"""A trial finds the fastest strategy in noise, and prefers exact ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import PlanOption
from evener.plan.choice.strategy_trial import StrategyTrial, num_trial_steps, plausible_options

from .planner import cluster_of, job_of, priced

JOB = job_of(preset_shape("char", 65), batch=16, dtype="bf16", steps=2000)
HOSTS = cluster_of(3400.0, 3400.0, wire=LinkModel(latency_s=1e-4, bandwidth_Bps=1e8))
DILOCO = "diloco:10:int8:streamed"


def options(predicted_s: dict[str, float], penalty: float = 0.004) -> list[PlanOption]:
    found = []
    for sync, step_s in predicted_s.items():
        option = priced(JOB, HOSTS, sync)
        found.append(msgspec.structs.replace(option, step_s=step_s, tokens_per_s=4096 / step_s,
                                             loss_penalty=0.0 if option.is_exact else penalty))  # fmt: skip
    return found


def tried(candidates: Sequence[PlanOption], measured_s: dict[str, float], noise: float = 0.0, drift: float = 0.0,
          seed: int = 0) -> tuple[StrategyTrial, list[str]]:  # fmt: skip
    """A trial over, and the strategy of each of its steps. The machine becomes slower by `drift` a step."""
    trial, draw, visited = StrategyTrial(candidates), random.Random(seed), []
    while trial.comparison is None:
        sync = str(trial.current.roster.sync)
        round_s = 0.3 if sync == DILOCO and len(visited) % 10 == 0 else 0.0  # where a round ends
        took_s = measured_s[sync] * (1 + drift * len(visited)) * (1 + draw.gauss(0, noise)) + round_s
        visited.append(sync)
        trial.observe_step([took_s, 0.9 * took_s])
        assert len(visited) < 1000
    return trial, visited


def test_only_plausible_strategies_are_tried_exact_ones_first():
    predicted = {DILOCO: 1.0, "int8": 1.1, "ddp": 1.3, "packed": 1.2, "diloco:30:int8": 0.99, "int4": 1.6}
    assert [option.name for option in plausible_options(options(predicted))] == ["packed", "int8", "diloco:30:int8"]
    assert [option.name for option in plausible_options(options({"ddp": 1.0, "packed": 2.0}))] == ["ddp"]
    assert plausible_options([]) == []


@pytest.mark.parametrize("fastest", ["ddp", "packed", DILOCO])
def test_measured_fastest_strategy_wins_whatever_was_predicted(fastest):
    candidates = options({"ddp": 1.0, "packed": 1.05, DILOCO: 1.1})
    measured_s = {sync: 1.2 if sync == fastest else 1.6 for sync in ("ddp", "packed", DILOCO)}
    trial, visited = tried(candidates, measured_s, noise=0.03)
    assert trial.comparison.chosen == fastest
    assert trial.comparison.measured[0].sync == fastest
    assert len(visited) == num_trial_steps(candidates) == 2 * (2 + 8) + 10 + 30
    figures = {one.sync: one for one in trial.comparison.measured}
    assert figures["ddp"].measured_s == pytest.approx(measured_s["ddp"], rel=0.05)
    assert figures[DILOCO].measured_s == pytest.approx(measured_s[DILOCO] + 0.03, rel=0.05)
    assert figures["packed"].predicted_s == 1.05


def test_lossy_strategy_must_be_clearly_faster():
    candidates = options({"ddp": 1.0, "int8": 0.9})
    assert tried(candidates, {"ddp": 1.04, "int8": 1.0})[0].comparison.chosen == "ddp"  # 4 %
    assert tried(candidates, {"ddp": 1.08, "int8": 1.0})[0].comparison.chosen == "int8"
    free = options({"ddp": 1.0, "int8": 0.9}, penalty=-0.01)
    assert tried(free, {"ddp": 1.04, "int8": 1.0})[0].comparison.chosen == "int8"


def test_unclear_pair_is_measured_again_and_pattern_of_rounds_is_no_noise():
    candidates = options({"ddp": 1.0, DILOCO: 0.9})
    _, clear = tried(candidates, {"ddp": 1.3, DILOCO: 1.0}, noise=0.02)
    assert clear == ["ddp"] * 10 + [DILOCO] * 40
    _, unclear = tried(candidates, {"ddp": 1.1, DILOCO: 1.0}, noise=0.1)
    assert len(unclear) == 3 * 50  # it gives up
    assert unclear[50:100] == clear


def test_choice_does_not_flip_with_noise():
    """Gains of 15 % in noise of 5 %, on a machine that becomes 2 % slower meanwhile: the same choice in all starts."""
    candidates = options({"ddp": 1.0, "packed": 1.0, DILOCO: 0.95})
    for fastest in ("packed", DILOCO):
        measured_s = {sync: 1.0 if sync == fastest else 1.18 for sync in ("ddp", "packed", DILOCO)}
        chosen = {tried(candidates, measured_s, noise=0.05, drift=0.0005, seed=seed)[0].comparison.chosen
                  for seed in range(40)}  # fmt: skip
        assert chosen == {fastest}


@pytest.mark.parametrize("stalled", [3, 12, 25, 35])
def test_one_stalled_step_does_not_decide(stalled):
    """A step of 5 s among steps of 0.1 s, with whichever strategy."""
    candidates = options({"ddp": 0.1, "packed": 0.1, DILOCO: 0.1})
    trial, num_steps = StrategyTrial(candidates), 0
    while trial.comparison is None:
        took_s = 0.1 if trial.current.roster.sync.drifts else 0.13
        trial.observe_step([took_s + 5.0 * (num_steps == stalled)] * 2)
        num_steps += 1
    assert trial.comparison.chosen == DILOCO
    assert trial.comparison.measured[0].measured_s < 0.13


def test_trial_keeps_to_its_steps():
    candidates = options({"ddp": 1.0, "packed": 1.0})
    for max_steps, expected in ((20, 20), (39, 20), (40, 40), (1000, 60)):
        trial, draw, num_steps = StrategyTrial(candidates, max_steps), random.Random(1), 0
        while trial.comparison is None:
            trial.observe_step([draw.gauss(1.0, 0.1)])
            num_steps += 1
        assert num_steps == expected
