"""The loss penalty of a sync strategy is what runs measured, and unknown beyond them."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evener.core.model.shape import preset_shape
from evener.core.run.roster import Member, Roster, parse_sync
from evener.core.run.run_spec import RunSpec, TrainSpec
from evener.plan.cost import penalty
from evener.plan.cost.penalty import LOSS_MEASUREMENTS, CompressionErrorMonitor, LossPenalty, loss_penalty
from tests.unit.planner import CHAR, SMALL, loss_measured

BENCH = Path(__file__).parents[2] / "bench"
ROWS = [json.loads(line) for line in (BENCH / "loss.jsonl").read_text().splitlines()]
TEN = "diloco:10:int8:streamed"


def equal(num_ranks: int) -> str:
    return ":".join("1" * num_ranks)


def runs_of(**fields) -> dict[int, dict]:
    """Runs by seed."""
    found = [row for row in ROWS if all(row[name] == value for name, value in fields.items())]
    by_seed = {row["seed"]: row for row in found}
    assert len(by_seed) == len(found)
    return by_seed


def test_planner_has_what_the_bench_measured():
    bench = runpy.run_path(str(BENCH / "loss.py"))
    assert bench["MEASUREMENTS"].read_text() == bench["format_measurements"](), "python bench/loss.py --write"


def test_bench_averages_over_seeds_and_pools_deviations_over_strategies():
    """One strategy's mean and standard error by numpy, from the lines of the file."""
    setup = {"corpus": "shakespeare", "shape": "char", "device": "cuda", "batch": 16, "steps": 2000, "lr": 1e-3}
    alone, by_sync = runs_of(**setup, sync="one process"), {}
    for sync in ("int8", "diloco:10", "diloco:5:int8:streamed", TEN, "diloco:10:int4:streamed"):
        by_sync[sync] = [row["train_loss"] / alone[seed]["train_loss"] - 1
                         for seed, row in runs_of(**setup, sync=sync).items()]  # fmt: skip
    cpu = setup | {"device": "cpu"}
    by_sync["9:5:2"] = [row["train_loss"] / alone[seed]["train_loss"] - 1
                        for seed, row in runs_of(**cpu, sync=TEN, shares="9:5:2").items()]  # fmt: skip
    residuals = [value - np.mean(values) for values in by_sync.values() for value in values]
    degrees = len(residuals) - len(by_sync)
    std = math.sqrt(np.sum(np.square(residuals)) / degrees)
    (row,) = (row for row in LOSS_MEASUREMENTS if row.sync == "diloco:5:int8:streamed")
    assert row.num_params == CHAR
    assert "training loss" in row.source
    assert row.penalty == pytest.approx(np.mean(by_sync[row.sync]), abs=1e-4)
    assert row.margin == pytest.approx(1.65 * std / math.sqrt(3), abs=1e-4)


def test_text_read_once_counts_before_text_read_several_times():
    (row,) = (row for row in LOSS_MEASUREMENTS if row.sync == TEN and row.shares == (1, 1) and row.num_params > CHAR)
    alone, mine = (runs_of(corpus="python", shape="char", sync=sync, seed=1)[1] for sync in ("one process", TEN))
    assert row.penalty == round(mine["train_loss"] / alone["train_loss"] - 1, 4)
    assert "text read once" in row.source
    alike = [other for other in LOSS_MEASUREMENTS
             if (other.task, other.sync, other.shares) == ("pretraining", TEN, (1, 1))]  # fmt: skip
    assert sorted(other.num_params for other in alike) == [SMALL, row.num_params]


def test_packed_loss_equals_ddp_bit_for_bit():
    packed, ddp = (runs_of(sync=sync, device="cpu", shape="small") for sync in ("packed", "ddp"))
    assert packed
    assert all(packed[key]["val_loss"] == ddp[key]["val_loss"] for key in packed.keys() & ddp.keys())


def test_penalty_of_unmeasured_model_size_is_log_interpolated(monkeypatch):
    rows = (
        loss_measured("diloco:30", 0.02, num_params=10**6, steps=1200),
        loss_measured("diloco:30", 0.01, num_params=10**8, steps=1200),
        loss_measured("diloco:30", 0.05, num_params=10**6, steps=1200, shares=equal(4)),
    )
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    diloco = parse_sync("diloco:30")
    assert [round(loss_penalty(diloco, 10**power, [8, 8])[0], 6) for power in (6, 7, 8, 9)] == [0.02, 0.015, 0.01, 0.01]
    assert loss_penalty(diloco, 10**8, [1] * 4)[0] == 0.05
    assert loss_penalty(diloco, 10**6, [1] * 3)[0] == pytest.approx(0.035)  # between two and four
    assert loss_penalty(diloco, 10**6, [1] * 5)[0] is None  # of more nobody said anything
    assert loss_penalty(diloco, 10**6, [8, 8], num_steps=1199)[0] is None  # and not of fewer outer steps
    assert loss_penalty(diloco, 10**6, [8, 8], num_steps=1200)[0] == 0.02


def test_penalty_is_unknown_for_fewer_tokens_per_step(monkeypatch):
    name = TEN
    rows = (
        loss_measured(name, 0.017, shares=equal(4)),
        loss_measured(name, -0.004, shares=equal(4), batch=32),
    )
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    diloco = parse_sync(name)
    less, least, more, twice = (
        loss_penalty(diloco, 10**6, [1] * 4, num_tokens=num) for num in (4095, 4096, 8191, 8192)
    )
    assert less == LossPenalty(None, "its loss was measured only with 4096 tokens a step and more")
    assert least == more
    assert least[0] > 0 > twice[0]  # as much for each as two have of 4096


def test_lowest_loss_of_runs_not_larger_is_used(monkeypatch):
    name = TEN
    rows = (loss_measured(name, 0.016, num_params=CHAR, shares=equal(4)),
            loss_measured(name, 0.033, num_params=CHAR, shares=equal(4), batch=32, steps=1000))  # fmt: skip
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    told = {(steps, tokens): loss_penalty(parse_sync(name), CHAR, [1] * 4, steps, tokens)
            for steps in (999, 1000, 2000) for tokens in (4096, 8192)}  # fmt: skip
    assert [told[key][0] for key in ((1000, 8192), (2000, 4096), (2000, 8192))] == [0.033, 0.016, 0.016]
    assert {told[999, tokens] for tokens in (4096, 8192)} == {
        LossPenalty(None, "its loss was measured only with 1000 steps and more")
    }
    assert told[1000, 4096] == LossPenalty(None, "its loss was measured only with 8192 tokens a step and more")


def test_penalty_does_not_fall_with_more_replicas(monkeypatch):
    """Four were measured with a small model alone, two with a larger one as well."""
    name = TEN
    rows = (
        loss_measured(name, 0.001),
        loss_measured(name, 0.009, num_params=CHAR),
        loss_measured(name, 0.004, shares=equal(4)),
        loss_measured(name, 0.5, shares=equal(8)),
    )
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    diloco = parse_sync(name)
    small, large = SMALL, CHAR
    for num_params, expected in ((small, [0.001, 0.0025, 0.004, 0.128, 0.5]),
                                 (large, [0.009, 0.009, 0.009, 0.13175, 0.5])):  # fmt: skip
        found = [loss_penalty(diloco, num_params, [1] * ranks)[0] for ranks in (2, 3, 4, 5, 8)]
        assert found == pytest.approx(expected)
    assert loss_penalty(diloco, large, [1] * 9)[0] is None
    told = [loss_penalty(diloco, small, shares)[1] for shares in ([9, 5, 2], [6, 5, 5], [1] * 3)]
    assert told == [rows[0].source, rows[0].source, rows[2].source]  # of the nearer number: worth 2.4, 2.98 and 3


def test_penalty_of_unequal_shares_uses_effective_replica_number():
    """A rank with nothing to learn from is none."""
    own = parse_sync("diloco:10:int8:streamed")
    assert loss_penalty(own, 35_000_000, [8, 0, 8]) == loss_penalty(own, 35_000_000, [1, 1])
    found = [loss_penalty(own, 10_745_088, shares)[0] for shares in ([12, 4], [8, 8], [9, 5, 2], [6, 5, 5], [4] * 4)]
    assert found[0] == found[1] <= found[2] < found[3] < found[4]


def test_small_model_measurement_overrides_larger_model_penalty(monkeypatch):
    """Two and four of the small one, 9 : 5 : 2 of the large one alone: of one between them these are on the line."""
    name = TEN
    rows = (loss_measured(name, 0.01), loss_measured(name, 0.05, shares=equal(4)),
            loss_measured(name, 0.006, num_params=CHAR, shares="9:5:2"))  # fmt: skip
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    small, large = SMALL, CHAR
    own = [loss_penalty(parse_sync(name), num, [9, 5, 2])[0] for num in (small, large // 3 + 1, large // 2, large)]
    assert own[0] == own[1] == own[2] == pytest.approx(0.01 + (penalty.equivalent_replicas([9, 5, 2]) - 2) / 2 * 0.04)
    assert own[3] == 0.01  # no less than two


def test_penalty_below_smallest_measured_model_is_unknown_for_drifting_replicas():
    """They lose more. Coded gradients do not."""
    small = SMALL
    for sync, ranks in (("diloco:10:int8:streamed", 2), ("diloco:10:int8:streamed", 4)):
        assert loss_penalty(parse_sync(sync), small // 2, [1] * ranks)[0] is not None
        assert loss_penalty(parse_sync(sync), small // 4, [1] * ranks)[1] == (
            "its loss was measured only of 1.0M parameters and more"
        )
    assert loss_penalty(parse_sync("diloco:30"), 10_745_088, [8] * 4)[0] is None  # measured of two replicas
    assert loss_penalty(parse_sync("int8"), small // 100, [8, 8]) == loss_penalty(parse_sync("int8"), small, [8, 8])


def test_negative_penalty_holds_only_near_measured_model_size(monkeypatch):
    gain, cost = -0.03, 0.004
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", (loss_measured("diloco:10", gain), loss_measured("int8", cost)))
    told = [loss_penalty(parse_sync("diloco:10"), num_params, [8, 8], 2000)
            for num_params in (10**5, 4 * 10**5, 10**6, 3 * 10**6, 4 * 10**6, 124 * 10**6)]  # fmt: skip
    assert [one.loss for one in told] == [None, gain, gain, gain, 0.0, 0.0]
    assert "exact" not in {one.source for one in told}
    assert loss_penalty(parse_sync("int8"), 124 * 10**6, [8, 8])[0] == cost  # a loss holds anywhere
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", (loss_measured("int8", gain, margin=0.04),))
    near, far = (loss_penalty(parse_sync("int8"), num_params, [8, 8]) for num_params in (SMALL, 124 * 10**6))
    assert (near.loss, near.upper_end, far.loss, far.upper_end) == pytest.approx((gain, 0.01, 0.0, 0.01))


def test_compression_penalty_does_not_depend_on_ranks_steps_or_sparsity():
    told = loss_penalty(parse_sync("bf16"), 10**8, [8, 8])
    assert told == loss_penalty(parse_sync("bf16"), 10**8, [1] * 16, num_steps=10)
    assert told == loss_penalty(parse_sync("bf16+sparse"), 10**8, [8, 8])


def test_measurements_of_one_task_say_nothing_of_another(monkeypatch):
    own = msgspec.structs.replace(loss_measured("int8", 0.004, max_error=0.05), task="fine-tuning")
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", (loss_measured("int8", 0.002, max_error=0.02), own))
    int8 = parse_sync("int8")
    assert [loss_penalty(int8, SMALL, [1, 1], task=task).loss for task in ("pretraining", "fine-tuning")] == [
        0.002, 0.004
    ]  # fmt: skip
    told = loss_penalty(int8, SMALL, [1, 1], task="LoRA")
    assert (told.loss, told.source) == (None, "nobody measured what it costs LoRA in loss")
    assert penalty.max_compression_error(int8, 2, "fine-tuning") > 0.05 > penalty.max_compression_error(int8, 2)


def test_error_beyond_measured_limit_is_reported_once_until_it_recovers():
    watch = CompressionErrorMonitor(parse_sync("int8"), 2)
    assert 0 < watch.max_error < 0.1
    within, beyond = watch.max_error / 2, 2 * watch.max_error
    errors = [within] * 8 + [beyond] * 9 + [within] * 5 + [beyond] * 5
    told = [i for i, error in enumerate(errors) if watch.add_sample(error) is not None]
    assert told == [10, 24]  # when most of the latest five are beyond
    assert all(watch.add_sample(error) is None for error in [within] * 5 + [beyond, within] * 2)


def test_no_bench_run_exceeds_its_own_error_limit():
    """Each of the bench's, of two ranks and of more, which code twice."""
    told = [(row["sync"], row["ranks"], error) for row in ROWS if row.get("errors")
            for watch in [CompressionErrorMonitor(parse_sync(row["sync"]), row["ranks"])] for error in row["errors"]
            if watch.add_sample(error) is not None]  # fmt: skip
    assert told == []
    assert {row["ranks"] for row in ROWS if row.get("errors") and row["sync"] == "int8"} == {2, 3}


def test_two_stage_compression_errors_add_in_quadrature():
    """Where more than two ranks were measured it may be more than that; where they were not, so much."""
    int4, int8 = parse_sync("int4"), parse_sync("int8")
    assert (
        penalty.max_compression_error(int4, 3)
        == penalty.max_compression_error(int4, 9)
        == 2**0.5 * penalty.max_compression_error(int4, 2)
    )
    assert (
        penalty.max_compression_error(int8, 5)
        == penalty.max_compression_error(int8, 3)
        >= 2**0.5 * penalty.max_compression_error(int8, 2)
    )
    powersgd = parse_sync("powersgd:16")  # its products are summed, not coded once more
    assert penalty.max_compression_error(powersgd, 5) == penalty.max_compression_error(powersgd, 2)


def test_bf16_penalty_is_the_one_measured_on_fp32_gradients():
    """Gradients of bf16 training are mostly bf16 numbers, which `--sync bf16` would not round."""
    penalty = loss_penalty(parse_sync("bf16"), 10**6, [8, 8])
    (row,) = (row for row in LOSS_MEASUREMENTS if row.sync == "bf16")
    assert (row.source, row.penalty) == (penalty.source, penalty.loss)
    alone, mine = (runs_of(dtype="fp32", corpus="shakespeare", sync=sync) for sync in ("one process", "bf16"))
    assert row.penalty == round(np.mean([mine[i]["train_loss"] / alone[i]["train_loss"] - 1 for i in mine]), 4)
    assert 0 < row.max_error < 2**-8


@pytest.mark.parametrize(
    ("ranks", "budget", "told"),
    [
        (3, 1.0, ""),
        (4, 1.0, "may cost 1.7% of loss, more than 1.0%"),
        (3, 0.0, "not exact, and no loss may be spent"),
        (5, 1.0, "its loss was measured only of 4 equal replicas and fewer"),
    ],
)
def test_more_replicas_than_measured_warn_about_loss_budget(monkeypatch, ranks, budget, told):
    name = TEN
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", tuple(loss_measured(name, cost, shares=equal(num))
                                                   for num, cost in ((3, 0.006), (4, 0.017))))  # fmt: skip
    train = TrainSpec(batch=16, steps=2000, loss_budget=budget)
    members = [Member(rank=rank, host="a", device="cpu", dtype="bf16", micro_batch=1, share=8) for rank in range(ranks)]
    roster = Roster(members=members, sync=parse_sync(name), backend="gloo")
    shape = preset_shape("char", 65, num_layers=5, num_heads=4, width=128)
    assert penalty.why_no_longer_chosen(roster, RunSpec(train=train), shape) == told


def test_unmeasured_strategy_has_no_error_limit():
    watch = CompressionErrorMonitor(parse_sync("powersgd:1"), 2)
    assert all(watch.add_sample(1e9) is None for _ in range(20))


def test_error_limit_depends_on_measured_replica_count(monkeypatch):
    name = TEN
    rows = tuple(loss_measured(name, 0.0, max_error=most, shares=equal(ranks))
                 for ranks, most in ((2, 0.01), (3, 0.02), (8, 0.012)))  # fmt: skip
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    found = [penalty.max_compression_error(parse_sync(name), ranks) for ranks in (2, 3, 4, 8, 9)]
    assert found == pytest.approx([0.01, 0.02, 0.02, 0.02, math.inf], abs=1e-4)
