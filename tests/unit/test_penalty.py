"""What a way of agreeing costs in loss is what somebody measured, and is said to be no more than that."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from evener.core.roster import parse_sync
from evener.plan import penalty
from evener.plan.penalty import MEASURED, Watch, loss_penalty

BENCH = Path(__file__).parents[2] / "bench" / "loss.jsonl"
ROWS = [json.loads(line) for line in BENCH.read_text().splitlines()]
OURS = [row for row in MEASURED if row.source.startswith("bench/loss.py")]


def measured(sync: str, ranks: int) -> dict[int, dict]:
    return {row["seed"]: row for row in ROWS if (row["sync"], row["ranks"], row["shape"], row["steps"]) ==
            (sync, ranks, "small", 2000)}  # fmt: skip


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.sync)
def test_our_own_are_those_of_the_bench(row):
    alone, found = measured("one process", 1), measured(row.sync, row.ranks)
    seeds = sorted(alone.keys() & found.keys())
    mine, theirs = (statistics.mean(one[seed]["val_loss"] for seed in seeds) for one in (found, alone))
    assert row.penalty == round(mine / theirs - 1, 4) != 0  # 0 is what costs nothing
    assert row.num_params == found[seeds[0]]["params"]
    assert f", {len(seeds)} seed" in row.source
    errors = [error for seed in seeds for error in found[seed]["errors"]]
    assert row.most_error == (round(max(errors), 4) if errors else None)


def test_what_the_bench_measured_is_in_the_table():
    alone = measured("one process", 1)
    for sync in {row["sync"] for row in ROWS if row["ranks"] == 2}:
        if measured(sync, 2).keys() & alone.keys() and loss_penalty(parse_sync(sync), 10**6, 2)[1] != "exact":
            assert sync in {row.sync for row in OURS}


def test_packed_has_the_loss_of_ddp_to_the_last_digit():
    packed, ddp = measured("packed", 2), measured("ddp", 2)
    assert packed
    assert all(packed[seed]["val_loss"] == ddp[seed]["val_loss"] for seed in packed.keys() & ddp.keys())


def test_between_two_models_a_penalty_is_on_the_line_over_the_logarithm(monkeypatch):
    rows = (penalty._published(2, 1e6, 0.02), penalty._published(2, 1e8, 0.01), penalty._published(4, 1e6, 0.05))
    monkeypatch.setattr(penalty, "MEASURED", rows)
    diloco = parse_sync("diloco:30")
    assert [round(loss_penalty(diloco, 10**power, 2)[0], 6) for power in (5, 6, 7, 8, 9)] == [
        0.02, 0.02, 0.015, 0.01, 0.01]  # fmt: skip
    assert loss_penalty(diloco, 10**8, 4)[0] == 0.05
    assert loss_penalty(diloco, 10**6, 3)[0] is None  # of three replicas nobody said anything
    assert loss_penalty(diloco, 10**6, 2, num_steps=1199)[0] is None  # and not of fewer outer steps
    assert loss_penalty(diloco, 10**6, 2, num_steps=1200)[0] == 0.02


def test_errors_of_coded_gradients_hold_for_any_number_of_ranks_and_steps_and_beside_tables():
    told = loss_penalty(parse_sync("bf16"), 10**8, 2)
    assert told == loss_penalty(parse_sync("bf16"), 10**8, 16, num_steps=10)
    assert told == loss_penalty(parse_sync("bf16+sparse"), 10**8, 2)


def test_an_error_beyond_what_was_measured_is_told_once_until_it_has_come_back():
    watch = Watch(parse_sync("int8"))
    assert 0 < watch.most < 0.03
    within, beyond = watch.most / 2, 2 * watch.most
    errors = [within] * 8 + [beyond] * 9 + [within] * 5 + [beyond] * 5
    told = [i for i, error in enumerate(errors) if watch.hear(error) is not None]
    assert told == [10, 24]  # when most of the latest five are beyond
    assert all(watch.hear(error) is None for error in [within] * 5 + [beyond, within] * 2)


def test_where_nothing_was_measured_nothing_is_beyond_it():
    watch = Watch(parse_sync("powersgd:1"))
    assert all(watch.hear(1e9) is None for _ in range(20))
