"""What a way of agreeing costs in loss is what somebody measured, and is said to be no more than that."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
import pytest

from evener.core.roster import Member, Roster, parse_sync
from evener.core.shape import preset_shape
from evener.core.spec import RunSpec, TrainSpec
from evener.plan import penalty
from evener.plan.penalty import MEASURED, Measured, Watch, loss_penalty

BENCH = Path(__file__).parents[2] / "bench" / "loss.jsonl"
ROWS = [json.loads(line) for line in BENCH.read_text().splitlines()]
OURS = [row for row in MEASURED if row.source.startswith("bench/loss.py")]


def measured(sync: str, ranks: int, batch: int = 16, dtype: str = "bf16") -> dict[int, dict]:
    return {row["seed"]: row for row in ROWS
            if (row["sync"], row["ranks"], row["batch"], row["dtype"], row["shape"], row["steps"]) ==
            (sync, ranks, batch, dtype, "small", 2000)}  # fmt: skip


def batch_of(row: Measured) -> int:
    return int(row.source.split(" steps of ")[1].split(" × 256")[0])


def dtype_of(row: Measured) -> str:
    return row.source.rsplit(", ", 1)[1]


@pytest.mark.parametrize("row", OURS, ids=lambda row: f"{row.sync}-{row.ranks}-{batch_of(row)}-{dtype_of(row)}")
def test_our_own_are_those_of_the_bench(row):
    batch = batch_of(row)
    alone, found = (measured(*way, batch, dtype_of(row)) for way in (("one process", 1), (row.sync, row.ranks)))
    seeds = sorted(alone.keys() & found.keys())
    mine, theirs = (statistics.mean(one[seed]["val_loss"] for seed in seeds) for one in (found, alone))
    assert row.penalty == round(mine / theirs - 1, 4) != 0  # 0 is what costs nothing
    assert row.num_params == found[seeds[0]]["params"]
    assert f", {len(seeds)} seed" in row.source
    assert row.least_tokens == (256 * batch if row.sync.startswith("diloco") else 0)
    errors = [error for seed in seeds for error in found[seed]["errors"]]
    assert row.most_error == (round(max(errors), 4) if errors else None)


def test_what_the_bench_measured_is_in_the_table():
    ours = {(row.sync, row.ranks, batch_of(row), dtype_of(row)) for row in OURS}
    for sync, *how in {(row["sync"], row["ranks"], row["batch"], row["dtype"]) for row in ROWS if row["ranks"] > 1}:
        compared = measured(sync, *how).keys() & measured("one process", 1, *how[1:]).keys()
        if compared and loss_penalty(parse_sync(sync), 10**6, how[0])[1] != "exact":
            assert (sync, *how) in ours


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
    assert loss_penalty(diloco, 10**6, 3)[0] == 0.05  # at most what four lose
    assert loss_penalty(diloco, 10**6, 5)[0] is None  # of more nobody said anything
    assert loss_penalty(diloco, 10**6, 2, num_steps=1199)[0] is None  # and not of fewer outer steps
    assert loss_penalty(diloco, 10**6, 2, num_steps=1200)[0] == 0.02


def test_what_was_measured_says_nothing_of_fewer_tokens_a_step():
    diloco = parse_sync("diloco:10:int8:streamed")
    assert loss_penalty(diloco, 10**6, 4, num_tokens=4095) == (None, "not measured")
    assert loss_penalty(diloco, 10**6, 4, num_tokens=4096)[0] == loss_penalty(diloco, 10**6, 4, num_tokens=8191)[0] > 0
    assert loss_penalty(diloco, 10**6, 4, num_tokens=8192)[0] < 0  # as much for each as two have of 4096
    assert loss_penalty(parse_sync("int8"), 10**6, 4, num_tokens=1)[0] > 0


def test_a_gain_holds_for_models_of_about_the_size_with_which_it_was_measured():
    told = [loss_penalty(parse_sync("diloco:10:int8:streamed"), num_params, 2, 2000)
            for num_params in (10**5, 4 * 10**5, 10**6, 3 * 10**6, 4 * 10**6, 124 * 10**6)]  # fmt: skip
    gain, cost = (next(row.penalty for row in OURS if row.sync == sync) for sync in ("diloco:10:int8:streamed", "int8"))
    assert gain < 0 < cost
    assert [one for one, _ in told] == [0.0, gain, gain, gain, 0.0, 0.0]
    assert "exact" not in {source for _, source in told}
    assert loss_penalty(parse_sync("int8"), 124 * 10**6, 2)[0] == cost  # a loss holds anywhere


def test_errors_of_coded_gradients_hold_for_any_number_of_ranks_and_steps_and_beside_tables():
    told = loss_penalty(parse_sync("bf16"), 10**8, 2)
    assert told == loss_penalty(parse_sync("bf16"), 10**8, 16, num_steps=10)
    assert told == loss_penalty(parse_sync("bf16+sparse"), 10**8, 2)


def test_an_error_beyond_what_was_measured_is_told_once_until_it_has_come_back():
    watch = Watch(parse_sync("int8"), 2)
    assert 0 < watch.most < 0.03
    within, beyond = watch.most / 2, 2 * watch.most
    errors = [within] * 8 + [beyond] * 9 + [within] * 5 + [beyond] * 5
    told = [i for i, error in enumerate(errors) if watch.hear(error) is not None]
    assert told == [10, 24]  # when most of the latest five are beyond
    assert all(watch.hear(error) is None for error in [within] * 5 + [beyond, within] * 2)


def test_no_run_is_called_beyond_what_was_measured_in_it():
    """Each of the bench's, of two ranks and of more, which code twice."""
    told = [(row["sync"], row["ranks"], error) for row in ROWS if row.get("errors")
            for watch in [Watch(parse_sync(row["sync"]), row["ranks"])] for error in row["errors"]
            if watch.hear(error) is not None]  # fmt: skip
    assert told == []
    assert {row["ranks"] for row in ROWS if row.get("errors") and row["sync"] == "int8"} == {2, 3}


def test_what_two_codings_lose_adds_up_as_squares_do():
    """Where three ranks were measured it is no more than that; where they were not, so much."""
    int4, int8 = parse_sync("int4"), parse_sync("int8")
    assert penalty.most_error(int4, 3) == penalty.most_error(int4, 9) == 2**0.5 * penalty.most_error(int4, 2)
    assert 1 < penalty.most_error(int8, 3) / penalty.most_error(int8, 2) < 2**0.5
    assert penalty.most_error(int8, 5) == penalty.most_error(int8, 3)


def test_what_bf16_costs_was_measured_of_gradients_of_which_it_loses_something():
    """In fp32: under bf16 most of them are bf16 numbers."""
    penalty, source = loss_penalty(parse_sync("bf16"), 10**6, 2)
    assert source.endswith("fp32")
    (row,) = (row for row in OURS if row.source == source)
    assert (row.sync, row.penalty) == ("bf16", penalty)
    assert 0 < row.most_error < 2**-8


@pytest.mark.parametrize(("ranks", "budget", "told"), [(3, 1.0, ""), (4, 1.0, "costs 1.7% of loss, more than 1.0%"),
                                                       (3, 0.0, "not exact, and no loss may be spent"),
                                                       (5, 1.0, "nobody measured what it costs in loss")])  # fmt: skip
def test_a_run_whose_replicas_become_more_may_cost_more_than_it_should(ranks, budget, told):
    train = TrainSpec(batch=16, steps=2000, loss_budget=budget)
    members = [Member(rank=rank, host="a", device="cpu", dtype="bf16", micro_batch=1, share=0) for rank in range(ranks)]
    members[0] = msgspec.structs.replace(members[0], share=16)
    roster = Roster(members=members, sync=parse_sync("diloco:10:int8:streamed"), backend="gloo")
    shape = preset_shape("char", 65, num_layers=5, num_heads=4, width=128)
    assert penalty.no_more_chosen(roster, RunSpec(train=train), shape) == told


def test_where_nothing_was_measured_nothing_is_beyond_it():
    watch = Watch(parse_sync("powersgd:1"), 2)
    assert all(watch.hear(1e9) is None for _ in range(20))


def test_a_limit_is_that_of_as_many_replicas_as_it_was_measured_with():
    name = "diloco:10:int8:streamed"
    seen = {ranks: max(error for row in ROWS if (row["sync"], row["ranks"]) == (name, ranks) for error in row["errors"])
            for ranks in (2, 3, 4)}  # fmt: skip
    assert len(set(seen.values())) == 3
    for ranks, most in seen.items():
        assert penalty.most_error(parse_sync(name), ranks) == pytest.approx(most, abs=1e-4)
