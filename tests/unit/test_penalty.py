"""The loss penalty of a sync strategy is what runs measured, and unknown beyond them."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import pytest

from evener.core.model.shape import preset_shape
from evener.core.run.roster import Member, Roster, parse_sync
from evener.core.run.run_spec import RunSpec, TrainSpec
from evener.plan.cost import penalty
from evener.plan.cost.penalty import (
    LOSS_MEASUREMENTS,
    CompressionErrorMonitor,
    LossMeasurement,
    LossPenalty,
    loss_penalty,
)

BENCH = Path(__file__).parents[2] / "bench" / "loss.jsonl"
ROWS = [json.loads(line) for line in BENCH.read_text().splitlines()]
OURS = [row for row in LOSS_MEASUREMENTS if row.source.startswith("bench/loss.py")]


class Way(NamedTuple):
    """What a row of the table is of."""

    sync: str
    shares: str
    batch: int
    steps: int
    dtype: str
    shape: str


def equal(num_ranks: int) -> str:
    return ":".join("1" * num_ranks)


def way_of(row: LossMeasurement) -> Way:
    steps, batch = map(int, re.findall(r"(\d+) steps of (\d+) × 256", row.source)[0])
    shape = next(name for name, num_params in penalty.NUM_PARAMS.items() if num_params == row.num_params)
    return Way(row.sync, ":".join(map(str, row.shares)), batch, steps, row.source.rsplit(", ", 1)[1], shape)


def measured(way: Way) -> dict[tuple[str, str, int], dict]:
    """Runs by corpus, device and seed."""
    return {(row["corpus"], row["device"], row["seed"]): row for row in ROWS
            if tuple(row[name] for name in Way._fields) == way}  # fmt: skip


def compared(way: Way) -> list[tuple[dict, dict]]:
    """(run, one process's) of the same corpus and seed, on the same device where there is one."""
    alone = measured(way._replace(sync="one process", shares="1"))
    elsewhere = {(corpus, seed): row for (corpus, _, seed), row in alone.items()}
    return [(row, alone.get((corpus, device, seed), elsewhere[corpus, seed]))
            for (corpus, device, seed), row in measured(way).items() if (corpus, seed) in elsewhere]  # fmt: skip


@pytest.mark.parametrize("row", OURS, ids=lambda row: "-".join(map(str, way_of(row))))
def test_loss_penalty_table_matches_bench_records(row):
    way = way_of(row)
    runs = compared(way)
    penalties = [mine["val_loss"] / theirs["val_loss"] - 1 for mine, theirs in runs]
    assert row.penalty == round(statistics.mean(penalties), 4) != 0  # 0 is what costs nothing
    training = [mine["train_loss"] / theirs["train_loss"] - 1 for mine, theirs in runs]
    assert row.train_penalty == round(statistics.mean(training), 4)
    corpora = {mine["corpus"] for mine, _ in runs}
    if "shakespeare" in corpora:
        assert row.num_params == next(mine["params"] for mine, _ in runs if mine["corpus"] == "shakespeare")
    assert f", {len(runs)} run" in row.source
    assert ("two corpora" in row.source) == (len(corpora) == 2)
    assert row.min_tokens == (256 * way.batch if row.sync.startswith("diloco") else 0)
    errors = [error for mine, _ in runs for error in mine["errors"]]
    assert row.max_error == (round(max(errors), 4) if errors else None)


def test_every_bench_result_is_in_penalty_table():
    ours = {way_of(row) for row in OURS}
    for way in {Way(*(row[name] for name in Way._fields)) for row in ROWS if row["shares"] != "1"}:
        if compared(way) and loss_penalty(parse_sync(way.sync), 10**6, [1, 1])[1] != "exact":
            assert way in ours


def test_packed_loss_equals_ddp_bit_for_bit():
    packed, ddp = (measured(Way(sync, "1:1", 16, 2000, "bf16", "small")) for sync in ("packed", "ddp"))
    assert packed
    assert all(packed[key]["val_loss"] == ddp[key]["val_loss"] for key in packed.keys() & ddp.keys())


def test_penalty_of_unmeasured_model_size_is_log_interpolated(monkeypatch):
    rows = (penalty._from_paper(2, 1e6, 0.02), penalty._from_paper(2, 1e8, 0.01), penalty._from_paper(4, 1e6, 0.05))
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    diloco = parse_sync("diloco:30")
    assert [round(loss_penalty(diloco, 10**power, [8, 8])[0], 6) for power in (6, 7, 8, 9)] == [0.02, 0.015, 0.01, 0.01]
    assert loss_penalty(diloco, 10**8, [1] * 4)[0] == 0.05
    assert loss_penalty(diloco, 10**6, [1] * 3)[0] == pytest.approx(0.035)  # between two and four
    assert loss_penalty(diloco, 10**6, [1] * 5)[0] is None  # of more nobody said anything
    assert loss_penalty(diloco, 10**6, [8, 8], num_steps=1199)[0] is None  # and not of fewer outer steps
    assert loss_penalty(diloco, 10**6, [8, 8], num_steps=1200)[0] == 0.02


def test_penalty_is_unknown_for_fewer_tokens_per_step(monkeypatch):
    name = "diloco:10:int8:streamed"
    rows = (
        penalty._from_bench(name, 0.017, 1, shares=equal(4)),
        penalty._from_bench(name, -0.004, 1, shares=equal(4), batch=32),
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
    name = "diloco:10:int8:streamed"
    rows = (penalty._from_bench(name, 0.016, 1, shape="char", shares=equal(4)),
            penalty._from_bench(name, 0.033, 1, shape="char", shares=equal(4), batch=32, steps=1000))  # fmt: skip
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    told = {(steps, tokens): loss_penalty(parse_sync(name), penalty.NUM_PARAMS["char"], [1] * 4, steps, tokens)
            for steps in (999, 1000, 2000) for tokens in (4096, 8192)}  # fmt: skip
    assert [told[key][0] for key in ((1000, 8192), (2000, 4096), (2000, 8192))] == [0.033, 0.016, 0.016]
    assert {told[999, tokens] for tokens in (4096, 8192)} == {
        LossPenalty(None, "its loss was measured only with 1000 steps and more")
    }
    assert told[1000, 4096] == LossPenalty(None, "its loss was measured only with 8192 tokens a step and more")


def test_penalty_does_not_fall_with_more_replicas(monkeypatch):
    """Four were measured with a small model alone, two with a larger one as well."""
    name = "diloco:10:int8:streamed"
    rows = (
        penalty._from_bench(name, 0.001, 3),
        penalty._from_bench(name, 0.009, 3, shape="char"),
        penalty._from_bench(name, 0.004, 1, shares=equal(4)),
        penalty._from_bench(name, 0.5, 1, shares=equal(8)),
    )
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    diloco = parse_sync(name)
    small, large = penalty.NUM_PARAMS.values()
    for num_params, expected in ((small, [0.001, 0.0025, 0.004, 0.128, 0.5]),
                                 (large, [0.009, 0.009, 0.009, 0.13175, 0.5])):  # fmt: skip
        found = [loss_penalty(diloco, num_params, [1] * ranks)[0] for ranks in (2, 3, 4, 5, 8)]
        assert found == pytest.approx(expected)
    assert loss_penalty(diloco, large, [1] * 9)[0] is None
    told = [loss_penalty(diloco, small, shares)[1] for shares in ([9, 5, 2], [6, 5, 5], [1] * 3)]
    assert told == [rows[0].source, rows[0].source, rows[2].source]  # of the nearer number: worth 2.4, 2.98 and 3


def test_penalty_of_unequal_shares_uses_effective_replica_number():
    """A rank with nothing to learn from is none. Four are on the line between two and eight, as they were published."""
    diloco, own = parse_sync("diloco:30"), parse_sync("diloco:10:int8:streamed")
    two, four, eight = (loss_penalty(diloco, 35_000_000, [1] * ranks)[0] for ranks in (2, 4, 8))
    assert four == pytest.approx(two + (eight - two) / 3, abs=0.003)
    assert loss_penalty(diloco, 35_000_000, [8, 0, 8]) == loss_penalty(diloco, 35_000_000, [1, 1])
    found = [loss_penalty(own, 10_745_088, shares)[0] for shares in ([12, 4], [8, 8], [9, 5, 2], [6, 5, 5], [4] * 4)]
    assert found[0] == found[1] <= found[2] < found[3] < found[4]


def test_small_model_measurement_overrides_larger_model_penalty(monkeypatch):
    """Two and four of the small one, 9 : 5 : 2 of the large one alone: of one between them these are on the line."""
    name = "diloco:10:int8:streamed"
    rows = (penalty._from_bench(name, 0.01, 3), penalty._from_bench(name, 0.05, 3, shares=equal(4)),
            penalty._from_bench(name, 0.006, 3, shape="char", shares="9:5:2"))  # fmt: skip
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    small, large = penalty.NUM_PARAMS.values()
    own = [loss_penalty(parse_sync(name), num, [9, 5, 2])[0] for num in (small, large // 3 + 1, large // 2, large)]
    assert own[0] == own[1] == own[2] == pytest.approx(0.01 + (penalty.equivalent_replicas([9, 5, 2]) - 2) / 2 * 0.04)
    assert own[3] == 0.01  # no less than two


def test_penalty_below_smallest_measured_model_is_unknown_for_drifting_replicas():
    """They lose more. Coded gradients do not."""
    small = penalty.NUM_PARAMS["small"]
    for sync, ranks in (("diloco:10:int8:streamed", 2), ("diloco:10:int8:streamed", 4)):
        assert loss_penalty(parse_sync(sync), small // 2, [1] * ranks)[0] is not None
        assert loss_penalty(parse_sync(sync), small // 4, [1] * ranks)[1] == (
            "its loss was measured only of 1.0M parameters and more"
        )
    assert loss_penalty(parse_sync("diloco:30"), 10_745_088, [8] * 4)[0] is None  # published of 35M and more
    assert loss_penalty(parse_sync("int8"), small // 100, [8, 8]) == loss_penalty(parse_sync("int8"), small, [8, 8])


def test_negative_penalty_holds_only_near_measured_model_size(monkeypatch):
    gain, cost = -0.03, 0.004
    monkeypatch.setattr(
        penalty, "LOSS_MEASUREMENTS", (penalty._from_bench("diloco:10", gain, 3), penalty._from_bench("int8", cost, 3))
    )
    told = [loss_penalty(parse_sync("diloco:10"), num_params, [8, 8], 2000)
            for num_params in (10**5, 4 * 10**5, 10**6, 3 * 10**6, 4 * 10**6, 124 * 10**6)]  # fmt: skip
    assert [one.validation for one in told] == [None, gain, gain, gain, 0.0, 0.0]
    assert "exact" not in {one.source for one in told}
    assert loss_penalty(parse_sync("int8"), 124 * 10**6, [8, 8])[0] == cost  # a loss holds anywhere


def test_compression_penalty_does_not_depend_on_ranks_steps_or_sparsity():
    told = loss_penalty(parse_sync("bf16"), 10**8, [8, 8])
    assert told == loss_penalty(parse_sync("bf16"), 10**8, [1] * 16, num_steps=10)
    assert told == loss_penalty(parse_sync("bf16+sparse"), 10**8, [8, 8])


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
    assert penalty.source.endswith("fp32")
    (row,) = (row for row in OURS if row.source == penalty.source)
    assert (row.sync, row.penalty) == ("bf16", penalty.validation)
    assert 0 < row.max_error < 2**-8


@pytest.mark.parametrize(
    ("ranks", "budget", "told"),
    [
        (3, 1.0, ""),
        (4, 1.0, "costs 1.7% of validation loss, more than 1.0%"),
        (3, 0.0, "not exact, and no loss may be spent"),
        (5, 1.0, "its loss was measured only of 4 equal replicas and fewer"),
    ],
)
def test_more_replicas_than_measured_warn_about_loss_budget(monkeypatch, ranks, budget, told):
    name = "diloco:10:int8:streamed"
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", tuple(penalty._from_bench(name, cost, 1, shares=equal(num))
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
    name = "diloco:10:int8:streamed"
    rows = tuple(penalty._from_bench(name, 0.0, 1, most, shares=equal(ranks))
                 for ranks, most in ((2, 0.01), (3, 0.02), (8, 0.012)))  # fmt: skip
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    found = [penalty.max_compression_error(parse_sync(name), ranks) for ranks in (2, 3, 4, 8, 9)]
    assert found == pytest.approx([0.01, 0.02, 0.02, 0.02, math.inf], abs=1e-4)
