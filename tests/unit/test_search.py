"""The planner recommends the hosts, shares and strategy that are known to be best, and the break-even link."""

from __future__ import annotations

import re

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink, ModelRate, Rates
from evener.core.cluster.link import NAMED_LINKS, LinkModel, parse_link
from evener.core.model.shape import PRESETS, preset_shape
from evener.core.run.prediction import Cluster, Job
from evener.core.run.roster import RankSlot, parse_sync
from evener.plan.choice.advice import advise_on_loss_budget, advise_on_sync, collect_advice
from evener.plan.choice.cluster import NotMeasuredError, build_cluster, uniform_cluster, with_uniform_link
from evener.plan.choice.options import (
    best_two_that_fit,
    job_with_larger_batch,
    job_with_sync,
    pick_fastest,
    pick_simplest,
    predict_training,
    sharded_strategies,
    why_strategy_rejected,
)
from evener.plan.choice.plan_request import PlanRequest, answer_request, predict_launch, request_on_hosts
from evener.plan.choice.plan_request import change_request as question_changed
from evener.plan.choice.search import predict, reasons_left_out, recommended_flags, what_if_options
from evener.plan.cost import penalty
from evener.plan.cost.cost_model import predict_step
from evener.plan.cost.sync_traffic import BUCKET_BYTES, COMPRESSED_BUCKET_BYTES, bucket_sizes, gradient_tensors
from evener.plan.shares import initial_shares
from tests.tiers import exhaustively
from tests.unit import planner
from tests.unit.planner import changed, costing, job_of, loss_measured, priced

from ..cost import in_loops

SHAPE = preset_shape("char", 512)
JOB = job_of(SHAPE, batch=24, micro_batch=12)
PLAIN = planner.changed(JOB, sync="ddp")
FAST = LinkModel(latency_s=1e-5, bandwidth_Bps=1e10)
SLOW = LinkModel(latency_s=1e-3, bandwidth_Bps=1e6)


def cluster(*rates: float, wire: LinkModel = FAST, **more: object) -> Cluster:
    return planner.cluster_of(*rates, wire=wire, **more)


def resized(found: Cluster, name: str, memory_bytes: int) -> Cluster:
    hosts = found.hosts | {name: msgspec.structs.replace(found.hosts[name], memory_bytes=memory_bytes)}
    return msgspec.structs.replace(found, hosts=hosts)


def told(found):
    return [advice.text for advice in collect_advice(found)]


def test_plan_recommends_both_hosts_if_equal_and_link_is_fast():
    found = predict(JOB, cluster(1000.0, 1000.0))
    assert found.recommended == "ddp"
    assert found.verdict.startswith("Train on both hosts with ddp: 2.0k tokens/s")
    assert found.option("ddp").speedup_vs_best_host == pytest.approx(2.0, rel=0.02)
    assert found.option("ddp").rejected_because == ""


def test_slow_link_recommends_single_host():
    found = predict(JOB, cluster(1000.0, 1000.0, 1000.0, wire=SLOW))
    assert found.recommended == "a alone"
    assert found.verdict.startswith("Don't distribute this: a alone trains")
    assert found.option("ddp").rejected_because.startswith("slower: a alone trains")


def test_slow_host_is_recommended_with_share_by_speed():
    equal = predict(changed(JOB, shares="equal"), cluster(60.0, 28.0))
    assert "b is the straggler" in told(equal)[0]
    assert not any("break even" in line for line in told(equal))  # with shares by speed it does, over any link
    assert recommended_flags(equal) == "--shares auto"
    found = predict(JOB, cluster(60.0, 28.0))
    for one in (found, equal):
        assert one.recommended == "ddp, shares 17 : 7"
        assert one.verdict == (
            "Train on both hosts with ddp, shares 17 : 7: 84.7 tokens/s, 1.41 times the fastest host alone."
        )
    assert (found.chosen, equal.chosen) == ("ddp, shares 17 : 7", "ddp")
    assert found.option("ddp").rejected_because == "slower: ddp, shares 17 : 7 trains 1.51 times as fast"
    asked = predict(changed(JOB, shares="17:7"), cluster(60.0, 28.0))
    assert (asked.chosen, asked.recommended) == ("ddp, shares 17 : 7", "ddp, shares 17 : 7")
    assert asked.option("ddp").step_s == found.option("ddp").step_s


def test_too_slow_host_is_left_out_with_both_throughputs():
    found = predict(JOB, cluster(60.0, 2.0))
    assert found.chosen == "ddp, shares 23 : 1"  # the best with it
    assert found.verdict == "Leave b out: with it 48 tokens/s, without 60 tokens/s."
    assert recommended_flags(found) == "--hosts a"
    assert reasons_left_out(found) == {"b": "adding b makes this run slower; 48 tokens/s with it, 60 tokens/s without"}
    told = predict(changed(JOB, shares="equal"), cluster(60.0, 2.0))
    assert told.verdict == "Leave b out: with it 4 tokens/s, without 60 tokens/s."


def test_strategy_that_would_make_a_left_out_host_help_is_named(monkeypatch):
    name = "diloco:10:int8:streamed"
    let_lose(monkeypatch, name, two=0.005, three=0.02)
    slow = cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=8e6))
    why = reasons_left_out(predict(changed(JOB, steps=2000, sync="ddp"), slow))["b"]
    assert why.startswith("adding b makes this run slower; ")
    assert re.search(f"1.0k tokens/s without, 2.0k tokens/s with it and --sync {name}$", why)
    assert " and --sync " not in reasons_left_out(predict(changed(JOB, steps=1000, sync="ddp"), slow))["b"]


def test_slowest_of_three_is_left_out():
    found = predict(JOB, cluster(100.0, 100.0, 4.0))
    assert found.recommended == "ddp without c"
    assert found.option(found.recommended).roster.hosts == ["a", "b"]
    assert found.verdict.startswith("Leave c out: with it 96 tokens/s, without 200 tokens/s")
    assert list(reasons_left_out(found)) == ["c"]


def test_rank_without_share_is_priced_as_waiting():
    found = predict(changed(JOB, shares="1:0"), cluster(1000.0, 1000.0))
    chosen = found.option("ddp, shares 24 : 0")
    assert chosen.ranks[1].cost.compute_s == 0.0
    assert chosen.ranks[1].cost.wait_s == pytest.approx(24 * 256 / 1000)
    assert chosen.is_built


def test_faster_strategy_of_unknown_loss_is_not_recommended(monkeypatch):
    rows = tuple(row for row in penalty.LOSS_MEASUREMENTS if row.sync != "powersgd:4")
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    found = predict(JOB, cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=2e7)))
    faster = [option for option in found.options if option.tokens_per_s > found.option(found.recommended).tokens_per_s]
    assert {"int4", "powersgd:4"} <= {option.name for option in faster}
    assert all(option.rejected_because for option in faster)
    assert found.option("powersgd:4").rejected_because == "nobody measured what it costs in loss"
    assert re.fullmatch(r"may cost \d\.\d% of loss, more than 1\.0%", found.option("int4").rejected_because)


def test_strategy_above_loss_budget_is_rejected(monkeypatch):
    name = "diloco:10:int8:streamed"
    rows = (loss_measured(name, 0.01, margin=0.002, shares="1:1:1:1"), loss_measured("diloco:30", 0.005, steps=1200))
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", rows)
    slow = cluster(1000.0, 1000.0, 1000.0, 1000.0, wire=SLOW)
    long = changed(JOB, steps=2000)
    assert predict(changed(long, loss_budget=1.2), slow).recommended == name
    strict = predict(long, slow)
    assert strict.recommended == "diloco:30 without c, d"  # two replicas lose less
    assert strict.option(name).rejected_because == "may cost 1.2% of loss, more than 1.0%"  # the interval's upper end
    assert strict.option("diloco:30").rejected_because == "its loss was measured only of 2 equal replicas and fewer"
    short = predict(changed(JOB, loss_budget=5.0), slow)  # 200 steps are 6 outer ones
    assert short.option("diloco:30").rejected_because == "its loss was measured only with 1200 steps and more"


def test_host_with_too_little_memory_is_reported():
    found = predict(JOB, cluster(1000.0, 1000.0, memory_bytes=500_000_000))
    assert found.recommended == ""
    assert found.verdict.startswith(
        "This cannot be trained here: does not fit: a has 500.0 MB, a run may fill 450.0 MB"
    )
    assert not any("even at" in line or "faster" in line for line in told(found))
    roomy = cluster(1000.0, 1000.0, memory_bytes=8_000_000_000)
    found = predict(JOB, resized(roomy, "b", 500_000_000))
    assert found.recommended == "a alone"
    assert found.verdict.startswith("Use a only. With both hosts it does not fit: b has 500.0 MB")
    three = cluster(1000.0, 900.0, 800.0, memory_bytes=8_000_000_000)
    found = predict(JOB, resized(three, "a", 500_000_000))
    assert found.recommended == "ddp without a"  # and not without the slowest, which has room


def test_several_hosts_beat_one_only_above_break_even_bandwidth():
    start = cluster(1000.0, 900.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=3e6))
    (line,) = [line for line in told(predict(PLAIN, start)) if "several hosts break even at" in line]
    text = re.search(r"even at (\S+) between", line)[1]
    slower = f"{0.9 * float(text.removesuffix('Mbit')):g}Mbit"
    at, below = (with_uniform_link(start, parse_link(link).wire) for link in (text, slower))
    speeds = [predict_training(PLAIN, machines).tokens_per_s for machines in (at, below)]
    assert speeds[0] > 1020.0 > speeds[1]


def test_following_advice_gives_the_stated_speedup():
    start = cluster(20000.0, 12000.0, 12000.0, 3000.0, wire=parse_link("2.5GbE").wire)
    job = job_of(preset_shape("gpt2", 50257, 1024), batch=64, model="gpt2")
    for advice in collect_advice(predict(job, start)):
        if not advice.flags or "--sync" in advice.flags:
            continue
        asked = PlanRequest(job=job, cluster=start, source="")
        asked = request_on_hosts(asked, advice.flags.get("--hosts"))
        batch = {"batch": advice.flags["--batch"]} if "--batch" in advice.flags else {}
        asked = question_changed(asked, batch, advice.flags.get("--link"))
        found = answer_request(asked)
        assert found.option(found.chosen).tokens_per_s == pytest.approx(advice.tokens_per_s, rel=0.01)
        assert f"{advice.gain:.2f} times as much as a alone" in advice.text


def test_larger_batch_advice_uses_the_measured_noise_scale():
    """At a scale of a batch's tokens N = T, k times the batch needs (k + 1) / 2 times the tokens for the same loss."""
    tokens, slow = PLAIN.tokens, cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0, bandwidth_Bps=3e6))
    assert not any("noise" in line for line in told(predict(PLAIN, slow)))
    little, much = (msgspec.structs.replace(PLAIN, noise_tokens=noise) for noise in (tokens, 1000.0 * tokens))

    (alone,) = [line for line in told(predict(little, cluster(1000.0))) if "noise" in line]
    assert alone == (
        f"By the measured noise scale, {tokens / 1e3:.1f}k tokens, --batch 48 needs 1.50 times as many tokens "
        "for the same loss and trains 1.00 times as many a second: it gets there later."
    )
    (link,) = [line for line in told(predict(much, slow)) if "noise" in line]
    factor = int(link.split("--batch ")[1].split()[0]) // 24
    together = [predict(job, slow).option("ddp").tokens_per_s for job in (PLAIN, job_with_larger_batch(PLAIN, factor))]
    assert f"needs {(factor + 1000) / 1001:.2f} times" in link
    assert f"trains {together[1] / together[0]:.2f} times as many a second: it gets there sooner." in link

    def batch(job):
        lines = [line for line in told(predict(job, slow)) if line.startswith("Or with --batch")]
        return int(lines[0].split()[3].rstrip(",")) // 24 if lines else None

    assert batch(much) > 1  # nothing to gain from tokens that teach less
    assert batch(little) is None


def test_single_host_has_only_the_local_option():
    found = predict(JOB, cluster(1000.0))
    assert found.verdict == "a with 1 rank trains 1.0k tokens/s."
    assert [option.name for option in found.options] == ["a alone"]


def test_more_ranks_than_sequences_is_refused():
    with pytest.raises(UsageError, match="3 ranks, more than the 2 sequences"):
        predict(changed(JOB, batch=2), cluster(1.0, 1.0, 1.0))


def test_the_ring_avoids_the_slow_link():
    """Gloo sends to the rank before: a → c → b → a has no slow link, a → b → c → a has one."""
    found = cluster(1000.0, 1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=1e8))
    slow = LinkModel(latency_s=0.0, bandwidth_Bps=1e7)
    planned = predict(JOB, msgspec.structs.replace(found, wires={"b": {"a": slow}}))
    assert planned.cluster.host_names == ["a", "c", "b"]
    assert any("10.0 times as fast as in the file's order" in line for line in told(planned))
    assert planned.option("ddp").roster.hosts == ["a", "c", "b"]


def test_explicit_shares_apply_to_hosts_in_fleet_file_order():
    """With them no ring is looked for: ranks are counted as the file lists their hosts."""
    found = cluster(1000.0, 500.0, 250.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=1e9))
    slow = msgspec.structs.replace(found, wires={"b": {"a": LinkModel(latency_s=0.0, bandwidth_Bps=1e8)}})
    slots = [slow.slots[i] for i in (0, 2, 1)]
    for prediction in (predict(JOB, slow), predict(JOB, msgspec.structs.replace(slow, slots=slots), keep_order=True)):
        assert prediction.cluster.host_names == ["a", "c", "b"]
        assert prediction.chosen == prediction.recommended == "ddp, shares 14 : 3 : 7"
    again = predict(changed(JOB, shares="14:7:3"), slow)
    assert again.cluster.host_names == ["a", "b", "c"]
    assert again.chosen == "ddp, shares 14 : 7 : 3"
    other = predict(changed(JOB, shares="1:1:1"), slow)
    assert recommended_flags(other) == "--shares auto"


def test_shares_of_five_hosts_are_named_as_asked_or_by_speed():
    five = cluster(1000.0, 900.0, 800.0, 700.0, 600.0)
    asked = predict(changed(JOB, shares="1:1:1:1:2"), five)
    assert asked.chosen == "ddp, shares as asked"
    assert asked.option("ddp, shares by speed").tokens_per_s > asked.option(asked.chosen).tokens_per_s


def test_none_strategy_on_several_replicas_is_refused():
    with pytest.raises(UsageError, match="never synchronize"):
        predict(changed(JOB, sync="none"), cluster(1.0, 1.0))


def test_requested_strategy_is_priced_with_ddp():
    found = predict(changed(JOB, sync="hsdp"), cluster(1000.0, 1000.0, wire=SLOW))
    assert found.chosen == "hsdp"
    assert len({option.name for option in found.options}) == len(found.options)
    assert found.option("hsdp").rejected_because.startswith("--sync hsdp needs several hosts with the same number")
    assert found.option("ddp").is_built


def test_faster_exact_strategy_is_recommended_with_its_flag():
    bf16 = changed(JOB, dtype="bf16", loss_budget=0.0)
    found = predict(bf16, cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=2e7)))
    assert found.recommended == "packed"
    asked = predict(changed(bf16, sync="ddp"), found.cluster)
    assert asked.recommended == "ddp"
    assert asked.option("packed").rejected_because == "--sync ddp was asked for"
    (hint,) = advise_on_sync(asked)
    assert hint.text.startswith("With --sync packed, a and b would train ")


def test_auto_takes_fastest_within_budget_else_ddp(monkeypatch):
    slow, fast = (cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=Bps)) for Bps in (2e7, 1e12))
    auto = changed(JOB, sync="auto", dtype="bf16")
    exact = changed(auto, loss_budget=0.0)
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", (loss_measured("int8", 0.004), loss_measured("int4", 0.02)))
    assert predict(exact, slow).chosen == predict(exact, slow).recommended == "packed"
    assert predict(auto, slow).chosen == "packed"  # what costs loss must be clearly faster
    slower = cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=8e6))
    assert predict(auto, slower).chosen == "int8"
    assert "; loss +0.4% at equal tokens (1.0M" in predict(auto, slower).verdict
    assert predict(auto, fast).chosen == "ddp"
    monkeypatch.setattr("evener.plan.cost.cost_model.loss_penalty", costing({"int4": 0.02, "diloco": 1.0}))
    assert predict(auto, slow).chosen == "powersgd:4"
    assert predict(changed(auto, loss_budget=0.0), slow).chosen == "powersgd:4"
    monkeypatch.setattr("evener.plan.cost.cost_model.loss_penalty", costing({"ddp": 0.0, "diloco": 1.0}, others=0.02))
    assert predict(auto, slow).chosen == "ddp"
    assert predict(changed(auto, loss_budget=2.0), slow).chosen == "powersgd:4"


def test_lossy_strategy_needs_a_minimum_speedup():
    option = predict(JOB, cluster(1000.0, 1000.0)).options[0]
    exact, lossless, lossy = (
        msgspec.structs.replace(option, name=name, tokens_per_s=rate, loss_penalty=cost,
                                roster=option.roster.replace_sync(parse_sync(sync)))
        for name, sync, rate, cost in (
            ("exact", "ddp", 1000.0, 0.0), ("lossless", "int8", 1030.0, -0.01), ("lossy", "int8", 1040.0, 0.002))
    )  # fmt: skip
    assert pick_fastest([exact, lossless, lossy]) is lossless
    assert pick_fastest([exact, lossy]) is exact
    assert pick_fastest([exact, msgspec.structs.replace(lossless, tokens_per_s=1010.0)]) is exact
    faster = msgspec.structs.replace(lossy, tokens_per_s=1100.0)
    assert pick_fastest([exact, lossless, faster]) is faster
    lossy = msgspec.structs.replace(lossy, step_s=option.step_s / 2)
    eight, four = (
        msgspec.structs.replace(lossless, tokens_per_s=rate, roster=msgspec.structs.replace(
            option.roster, sync=parse_sync(f"diloco:10:int{bits}:streamed")))
        for bits, rate in ((8, 1100.0), (4, 1110.0))
    )  # fmt: skip
    assert pick_fastest([exact, eight, four]) is eight  # fewer bits for hardly anything
    much_faster = msgspec.structs.replace(four, tokens_per_s=1200.0)
    assert pick_fastest([exact, eight, much_faster]) is much_faster
    dear = msgspec.structs.replace(eight, loss_penalty=0.002)
    assert pick_fastest([exact, dear, four]) is four
    assert pick_simplest([exact, lossless, lossy], lossless, "ddp") is lossless  # no loss for one percent more
    assert pick_simplest([exact, lossless, lossy], lossy, "lossless") is lossless


def let_lose(monkeypatch: pytest.MonkeyPatch, sync: str, two: float, three: float) -> None:
    """So much lose two and three equal replicas, and of more nobody knows."""
    monkeypatch.setattr(penalty, "LOSS_MEASUREMENTS", tuple(
        loss_measured(sync, cost, shares=shares, num_params=JOB.shape.num_params())
        for shares, cost in (("1:1", two), ("1:1:1", three))))  # fmt: skip


def test_host_is_left_out_when_loss_budget_would_be_exceeded(monkeypatch):
    """Three replicas that drift lose more than two."""
    name = "diloco:10:int8:streamed"
    let_lose(monkeypatch, name, two=0.005, three=0.02)
    slow = cluster(1000.0, 1000.0, 250.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=8e6))
    auto = changed(JOB, sync="auto", steps=2000)
    found = predict(auto, slow)
    assert found.recommended == f"{name} without c"
    assert found.verdict.startswith("Use a and b only: ")
    assert found.verdict.endswith(", but may cost 1.3% of loss, more than 1.0%.")  # worth 2.5 of equal shares
    why = reasons_left_out(found)["c"]
    assert why.startswith(f"{name} with it: may cost 1.3% of loss, more than 1.0%; ")
    assert why.endswith(" tokens/s without")
    dear = predict(changed(auto, loss_budget=3.0), slow)
    assert dear.option(dear.recommended).roster.hosts == ["a", "b", "c"]
    assert reasons_left_out(dear) == {}
    for all_take_part in (predict(auto, slow, may_leave_out=False), predict(changed(auto, shares="equal"), slow)):
        assert all_take_part.option(all_take_part.chosen).roster.sync.kind != "diloco"
    asked = predict(changed(JOB, sync=name, steps=2000), slow)  # a person who asks for it has it
    assert reasons_left_out(asked) == {}


@pytest.mark.parametrize("rates", [(4000.0, 1000.0, 4000.0, 4000.0, 4000.0), (900.0, 800.0, 3000.0, 700.0),
                                   (2000.0, 1900.0, 1800.0, 1700.0, 1600.0, 1500.0, 1400.0)])  # fmt: skip
def test_two_host_set_is_considered_when_larger_sets_lose_too_much(monkeypatch, rates):
    """The larger sets are faster, and lose too much."""
    way = "diloco:10:int8:streamed"
    let_lose(monkeypatch, way, two=0.005, three=0.03)
    slow = cluster(*rates, wire=LinkModel(latency_s=0.0, bandwidth_Bps=5e6))
    found = predict(changed(JOB, sync="auto", steps=2000), slow)
    best = found.option(found.recommended)
    assert str(best.roster.sync) == way
    by_rate = sorted(slow.host_names, key=lambda name: -slow.hosts[name].tokens_per_s["fp32"])
    assert sorted(best.roster.hosts) == sorted(by_rate[:2])
    assert set(reasons_left_out(found)) == set(slow.host_names) - set(best.roster.hosts)


def test_only_host_with_too_little_memory_is_left_out():
    hosts = resized(
        cluster(*[4000.0] * 4, wire=LinkModel(latency_s=0.0, bandwidth_Bps=125e6), memory_bytes=8_000_000_000),
        "d",
        67_000_000,
    )
    found = predict(changed(JOB, sync="auto", steps=2000, dtype="bf16"), hosts)
    assert list(reasons_left_out(found)) == ["d"]


def test_lossy_strategy_needs_a_loss_budget():
    slow = cluster(1000.0, 1000.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=8e6))
    auto = changed(JOB, sync="auto", steps=2000)
    drifting = predict(changed(auto, loss_budget=3.0), slow)
    assert drifting.chosen == drifting.recommended == "diloco:10:int8:streamed"
    assert re.search(r"; loss \+\d\.\d% ± \d\.\d% at equal tokens \(training loss, text read once", drifting.verdict)
    (advice,) = advise_on_loss_budget(predict(auto, slow))
    budget = float(re.findall(r"--loss-budget (\d\.\d)\.$", advice.text)[0])
    assert predict(changed(auto, loss_budget=budget), slow).recommended == drifting.recommended
    assert predict(changed(auto, loss_budget=budget - 0.1), slow).recommended != drifting.recommended
    assert advice.text.startswith(f"With --sync {drifting.recommended}, a and b would train 2.0k tokens/s, ")
    for unadvised in (drifting, predict(changed(auto, loss_budget=0.0), slow), predict(auto, cluster(1000.0))):
        assert advise_on_loss_budget(unadvised) == []
    strict = predict(changed(auto, loss_budget=0.0), slow)
    assert strict.option(strict.chosen).is_exact
    assert strict.option(drifting.chosen).rejected_because == "not exact, and no loss may be spent"


@pytest.mark.parametrize(("budget", "steps"), [(0.0, 2000), (0.5, 2000), (1.0, 2000), (2.0, 1000), (5.0, 200)])
@pytest.mark.parametrize("bandwidth_Bps", [1e6, *exhaustively(1e7, 1e8)])
def test_auto_is_as_fast_as_any_allowed_strategy(bandwidth_Bps, budget, steps):
    """Whatever a person could ask for, of what somebody measured."""
    hosts = cluster(600.0, 300.0, wire=LinkModel(latency_s=1e-4, bandwidth_Bps=bandwidth_Bps))
    job = job_of(PRESETS["d8"], batch=16, steps=steps, loss_budget=budget)
    found = predict(changed(job, sync="auto"), hosts)
    for name in {row.sync for row in penalty.LOSS_MEASUREMENTS}:
        asked = predict(changed(job, sync=name), hosts)
        option = asked.option(asked.chosen)
        if not why_strategy_rejected(option, budget / 100):
            assert option.tokens_per_s <= 1.06 * found.option(found.chosen).tokens_per_s, name


def test_buckets_are_small_on_slow_link_and_large_on_high_latency_link():
    """What is left to send when backward is over: bucket after bucket, each when it is ready and the one before has
    gone. On a long link each message waits for its answer."""
    job = job_of(SHAPE, batch=16)
    slow = cluster(1200.0, 1200.0, wire=LinkModel(latency_s=1e-4, bandwidth_Bps=117e6))
    usual, chosen = priced(job, slow), predict(job, slow).option("ddp")
    assert chosen.roster.bucket_bytes == COMPRESSED_BUCKET_BYTES
    backward_s, exposed_s = 8 * 256 / 1200 * 2 / 3, []
    for most_bytes in (None, COMPRESSED_BUCKET_BYTES):
        gone_s = 0.0
        for num_bytes, ready in bucket_sizes(gradient_tensors(SHAPE), most_bytes):
            gone_s = max(gone_s, ready * backward_s) + num_bytes / 117e6  # two ranks of a ring send all of it once
        exposed_s.append(gone_s - backward_s)
    assert [one.straggler_cost.cost.exposed_sync_s for one in (usual, chosen)] == pytest.approx(exposed_s, rel=0.05)
    assert usual.step_s - chosen.step_s == pytest.approx(exposed_s[0] - exposed_s[1], rel=0.05)
    assert usual.bytes_per_rank == chosen.bytes_per_rank

    fast = cluster(3400.0, 3400.0, wire=FAST)
    assert {option.roster.bucket_bytes for option in predict(job, fast).options} == {0}
    far = LinkModel(latency_s=0.05, bandwidth_Bps=1e8)
    assert predict(job, cluster(3400.0, 3400.0, wire=far)).option("int8").roster.bucket_bytes == BUCKET_BYTES
    assert predict(job, cluster(3400.0)).options[0].roster.bucket_bytes == 0


def test_small_gain_is_not_recommended():
    found = predict(JOB, cluster(1000.0, 10.2, wire=FAST))
    assert found.recommended == "a alone"
    at_par = predict(changed(JOB, batch=2), cluster(1000.0, 507.0))  # one sequence each: no other division helps
    assert at_par.verdict == "a is enough: both hosts together train 1.0k tokens/s, it alone 1.0k tokens/s."


def test_high_latency_is_named_as_cause():
    far = LinkModel(latency_s=1.0, bandwidth_Bps=1e9)
    found = predict(PLAIN, cluster(1000.0, 1000.0, wire=far))
    blamed = "More bandwidth would not make several hosts faster: every message takes 1.00 s one way"
    assert any(blamed in line for line in told(found))
    assert any("--batch" in line for line in told(found))


def test_equal_hosts_are_not_stragglers_when_batch_does_not_divide():
    found = predict(changed(JOB, batch=25), cluster(1000.0, 1000.0))
    assert "25 sequences are not divided equally by 2: others wait for a" in told(found)[0]


def test_what_if_changes_one_factor_at_a_time():
    found = what_if_options(
        predict(PLAIN, cluster(1000.0, 500.0, 900.0, wire=LinkModel(latency_s=0.0, bandwidth_Bps=5e7)))
    )
    names = [option.name for option in found]
    assert names[:3] == ["2.5GbE between all hosts", "10GbE between all hosts", "ddp without b"]
    assert {"batch and accumulation × 4", "int8"} <= set(names)
    assert len(names) == len(set(names))
    assert len({option.step_s for option in found[:2]}) == 2


def test_planning_32_hosts_takes_less_than_a_second():
    hosts = uniform_cluster({f"n{i}": 100.0 for i in range(32)}, FAST)
    assert in_loops(lambda: predict(changed(JOB, batch=512), hosts)) < 500  # a second


def test_a_share_above_a_micro_batch_is_avoided():
    """Seventeen in micro-batches of sixteen are two passes, of nine and eight; each costs as much as six sequences."""
    job = changed(JOB, micro_batch=16)
    found = predict(job, cluster(60.0, 27.0, pass_s=6 * 256 / 60.0))
    assert found.chosen == "ddp, shares 16 : 8"
    assert predict(job, cluster(60.0, 27.0)).chosen == "ddp, shares 17 : 7"


@pytest.mark.parametrize("sync", ["ddp", "diloco:10"])
@pytest.mark.parametrize(
    ("rates", "gets_equal_shares"),
    [((1000.0, 1090.0), True), ((1070.0, 1000.0, 1035.0), True), ((1000.0, 1150.0), False), ((1000.0, 500.0), False)],
)
def test_hosts_start_with_equal_shares_unless_their_speeds_clearly_differ(rates, gets_equal_shares, sync):
    """Probes of equal hosts differ by up to 7 %, and so would the shares of two equal hosts from run to run."""
    found = cluster(*rates)
    job = changed(job_of(SHAPE, batch=48), sync=sync)
    shares = initial_shares.initial_roster_by_speed(job, found, found.slots).shares
    assert (len(set(shares)) == 1) == gets_equal_shares


@pytest.mark.parametrize(("memory_bytes", "micro_batch"), [(None, 64), (10**12, 64), (2_000_000_000, 8), (1, 1)])
def test_micro_batch_fits_known_memory(memory_bytes, micro_batch):
    """The largest of 64, 32, 16 … sequences of 256 tokens; what was told holds, whether it fits or not."""
    asked = job_of(SHAPE, batch=128)
    found = cluster(1000.0, 1000.0, memory_bytes=memory_bytes)
    roster = initial_shares.initial_roster_by_speed(asked, found, found.slots)
    assert {member.micro_batch for member in roster.members} == {micro_batch}
    if memory_bytes == 2_000_000_000:
        assert all(rank.memory_bytes < 0.9 * memory_bytes for rank in predict_step(asked, found, roster).ranks)
        twice = [msgspec.structs.replace(member, micro_batch=2 * micro_batch) for member in roster.members]
        worse = predict_step(asked, found, msgspec.structs.replace(roster, members=twice))
        assert any(rank.memory_bytes > 0.9 * memory_bytes for rank in worse.ranks)
    told = changed(asked, micro_batch=64)
    assert {
        member.micro_batch for member in initial_shares.initial_roster_by_speed(told, found, found.slots).members
    } == {64}


# --- what a fleet file says -------------------------------------------------------------------------------------------

RATE = ModelRate(tokens_per_s=1000.0, pass_s=0.01, update_s=0.02, dtype="bf16", cpus=2.0)
PROBED = Rates(matmul_flops={"fp32": 1e11, "bf16": 2e11}, copy_Bps=1e10, sync_Bps=2e9, loopback_Bps=1e9,
               memory_bytes=10**10, models={"char": RATE})  # fmt: skip


def fleet(**changes: Rates) -> Fleet:
    link = HostLink(goodput_Bps=1.2e8, duplex_Bps=1.1e8, rtt_s=4e-4)
    return Fleet(
        hosts={"a": HostConfig(address="1.1.1.1"), "b": HostConfig(address="1.1.1.2")},
        links={"a": {"b": link}, "b": {"a": link}},
        rates={"a": {"cpu": PROBED}, "b": {"cpu": changes.get("b", PROBED)}},
    )


def job(model: str = "char", **shape: int) -> Job:
    return job_of(msgspec.structs.replace(PRESETS[model], **shape), model=model, batch=24, micro_batch=12)


def test_probed_rates_are_used_unchanged():
    found = build_cluster(fleet(), job())
    assert found.assumed == []
    host = found.hosts["a"]
    assert (host.tokens_per_s, host.pass_s, host.update_s, host.cpus) == ({"bf16": 1000.0}, 0.01, 0.02, 2.0)
    assert found.wires["a"]["b"] == LinkModel(latency_s=2e-4, bandwidth_Bps=1.1e8)
    assert host.bound_by == "arithmetic"
    slow_memory = fleet(b=msgspec.structs.replace(PROBED, copy_Bps=1e9))
    assert build_cluster(slow_memory, job()).hosts["b"].bound_by == "memory"


def test_exchange_takes_the_cpu_time_measured_over_links_or_more_as_between_local_ranks():
    def sync_Bps(*over_links: float | None) -> float | None:
        measured = fleet()
        links = {name: HostLink(goodput_Bps=1e8, rtt_s=4e-4, duplex_bytes_per_cpu_s=rate)
                 for name, rate in zip("bcd", over_links, strict=False)}  # fmt: skip
        hosts = dict.fromkeys(["a", *links], measured.hosts["a"])
        rates = dict.fromkeys(hosts, measured.rates["a"])
        return (
            build_cluster(Fleet(hosts=hosts, link="1GbE", links={"a": links}, rates=rates), job()).hosts["a"].sync_Bps
        )

    assert sync_Bps(None) == PROBED.sync_Bps
    assert sync_Bps(5e8) == 5e8
    assert sync_Bps(9e9) == PROBED.sync_Bps
    assert sync_Bps(3e8, 9e8, 4e8) == 4e8  # their median


def test_vocabulary_size_scales_rate_by_flops():
    bigger = job(vocab_size=5000)
    found = build_cluster(fleet(), bigger)
    ratio = PRESETS["char"].flops_per_token() / bigger.shape.flops_per_token()
    assert found.hosts["a"].tokens_per_s == pytest.approx({"bf16": 1000.0 * ratio})
    assert found.assumed == []


def test_rate_of_other_model_is_derived_and_marked():
    found = build_cluster(fleet(), job("gpt2"))
    (line,) = [line for line in found.assumed if "evener probe host --model gpt2" in line]
    assert line.startswith("a and b: its rate of gpt2 follows from that of char")


def dtypes(fleet: Fleet, **flags: object) -> set[str]:
    """The arithmetic of all ranks together."""
    asked = changed(job(), **flags)
    return {member.dtype for member in asked.initial_roster(build_cluster(fleet, asked).slots).members}


def test_rate_of_other_dtype_is_derived_and_marked():
    assert dtypes(fleet()) == {"bf16"}
    mixed = fleet(b=msgspec.structs.replace(PROBED, models={"char": msgspec.structs.replace(RATE, dtype="fp32")}))
    assert dtypes(mixed) == {"bf16", "fp32"}  # each its own
    found = build_cluster(mixed, job())
    assert (found.hosts["a"].tokens_per_s, found.hosts["b"].tokens_per_s) == ({"bf16": 1000.0}, {"fp32": 1000.0})
    assert found.assumed == []
    found = build_cluster(mixed, changed(job(), dtype="fp32"))
    assert found.hosts["a"].tokens_per_s == {"fp32": 500.0}  # its products are half as fast in fp32
    assert found.assumed == ["a: was measured in bf16; fp32 is taken to run at 50% of that"]


def test_each_host_computes_in_its_own_dtype():
    mixed = fleet(b=msgspec.structs.replace(PROBED, models={"char": msgspec.structs.replace(RATE, dtype="fp32")}))
    found = predict(job(), build_cluster(mixed, job()))
    assert found.option("ddp").roster.dtypes_text == "bf16 and fp32"
    assert found.option("a alone").roster.dtypes_text == "bf16"
    told = changed(job(), dtype="fp32")
    in_fp32 = predict(told, build_cluster(mixed, told)).option("b alone")
    assert found.option("a alone").tokens_per_s == pytest.approx(in_fp32.tokens_per_s)


def test_detected_hardware_overrides_measured_dtype():
    """Measured in fp32, and the launcher finds units for bf16: the run will compute in it."""
    in_fp32 = msgspec.structs.replace(PROBED, models={"char": msgspec.structs.replace(RATE, dtype="fp32")})
    known = msgspec.structs.replace(fleet(b=in_fp32), rates={name: {"cpu": in_fp32} for name in "ab"})
    slots = [RankSlot(host=name, device="cpu", has_bf16=True) for name in "ab"]
    found = build_cluster(known, job(), slots=slots)
    assert found.slots == slots
    assert found.hosts["a"].tokens_per_s == {"bf16": 2000.0}  # its products are twice as fast in bf16
    assert "a and b: was measured in fp32; bf16 is taken to run at 200% of that" in found.assumed
    with pytest.raises(NotMeasuredError, match="a: nobody measured its GPUs"):
        build_cluster(known, job(), slots=[msgspec.structs.replace(slot, device="cuda:0") for slot in slots])


def test_gpus_and_cpus_are_planned_as_launched():
    """As the launcher has it."""
    gpu = msgspec.structs.replace(PROBED, name="H200")
    both = msgspec.structs.replace(fleet(), rates={"a": {"cuda:0": gpu, "cpu": PROBED}, "b": {"cpu": PROBED}})
    assert dtypes(both) == {"bf16"}
    assert dtypes(both, device="cpu") == {"bf16"}
    assert job().initial_roster(build_cluster(both, job()).slots).backend == "gloo"
    gpus = msgspec.structs.replace(fleet(), rates={"a": {"cuda:0": gpu, "cuda:1": gpu}, "b": {"cuda:0": gpu}})
    assert dtypes(gpus) == {"bf16"}
    roster = job().initial_roster(build_cluster(gpus, job()).slots)
    assert [(member.host, member.device) for member in roster.members] == [
        ("a", "cuda:0"),
        ("a", "cuda:1"),
        ("b", "cuda:0"),
    ]
    assert roster.backend == "nccl"
    on_processors = changed(job(), device="cpu")
    with_cpus = msgspec.structs.replace(gpus, rates={name: {"cpu": PROBED} | of for name, of in gpus.rates.items()})
    assert on_processors.initial_roster(build_cluster(with_cpus, on_processors).slots).backend == "gloo"
    two_on_one = msgspec.structs.replace(gpus, hosts=gpus.hosts | {"b": HostConfig(address="1.1.1.2", ranks=2)})
    assert build_cluster(two_on_one, job()).hosts["b"].tokens_per_s == {"bf16": 500.0}


def test_rate_of_narrower_model_is_derived_and_marked():
    found = build_cluster(fleet(), job(width=192, num_heads=6))
    assert any("follows from that of the preset, by FLOPs" in line for line in found.assumed)


def test_host_with_declared_rate_needs_no_probe():
    declared = fleet(b=Rates(models={"char": ModelRate(tokens_per_s=30.0)}))
    found = build_cluster(declared, job())
    assert found.hosts["b"].tokens_per_s == {"fp32": 30.0}  # whatever it was measured in
    assert any("b: the weight update is assumed to be part" in line for line in found.assumed)


def test_missing_rate_or_link_is_an_error_that_names_the_probe_command():
    with pytest.raises(NotMeasuredError, match="b: nobody measured how fast it trains") as told:
        build_cluster(fleet(b=Rates()), job())
    assert "evener probe host --model char" in told.value.hint
    with pytest.raises(NotMeasuredError, match="b: nobody measured its processor"):
        build_cluster(msgspec.structs.replace(fleet(), rates={"a": {"cpu": PROBED}}), job())
    with pytest.raises(NotMeasuredError, match="a → b: nobody measured this link") as told:
        build_cluster(msgspec.structs.replace(fleet(), links={}), job())
    assert "evener probe wire" in told.value.hint


def test_missing_link_direction_is_assumed_symmetric_and_stated():
    whole = fleet()
    found = build_cluster(msgspec.structs.replace(whole, links={"a": whole.links["a"]}), job())
    assert found.wires["b"]["a"] == found.wires["a"]["b"]
    assert found.assumed == ["b → a is assumed to be as fast as a → b"]


def test_ranks_of_one_cpu_share_its_rate():
    asked = changed(job(), ranks=2)
    found = build_cluster(fleet(), asked)
    assert len(found.slots) == 4
    assert found.hosts["a"].tokens_per_s == {"bf16": 500.0}
    assert (found.hosts["a"].update_s, found.hosts["a"].pass_s) == (0.04, 0.02)
    assert found.hosts["a"].local == LinkModel(latency_s=20e-6, bandwidth_Bps=1e9)
    assert len(priced(asked, found).ranks) == 4


def test_resumed_run_keeps_its_strategy_and_the_hosts_that_auto_would_take():
    """ddp was on trial: that one host alone is faster than both with ddp is no reason to leave the other out."""
    asked, link = changed(job(), sync="auto", steps=4000, loss_budget=0.0), HostLink(goodput_Bps=8e6, rtt_s=4e-4)
    known = msgspec.structs.replace(fleet(), links={"a": {"b": link}, "b": {"a": link}})
    slots = build_cluster(known, asked).slots
    assert predict_launch(known, changed(asked, sync="ddp"), slots).left_out
    for sync in ("ddp", "packed"):
        found = predict_launch(known, asked, slots, resumed=changed(asked, sync=sync))
        assert (str(found.option(found.chosen).roster.sync), found.left_out) == (sync, {})


def test_train_leaves_out_slowing_host_with_reason():
    slow = msgspec.structs.replace(PROBED, models={"char": msgspec.structs.replace(RATE, tokens_per_s=20.0)})
    asked, known = job(), fleet(b=slow)
    slots = build_cluster(known, asked).slots
    found = predict_launch(known, asked, slots)
    assert found.left_out.keys() == {"b"}
    assert found.left_out["b"].startswith("adding b makes this run slower; ")
    assert found.option(found.chosen).roster.hosts == found.cluster.host_names == ["a"]
    resumed = predict_launch(known, asked, slots, resumed=changed(asked, sync="packed"))
    assert (resumed.left_out, resumed.cluster.host_names) == (found.left_out, ["a"])
    all_of_them = changed(asked, shares="equal")
    insisted = predict_launch(known, all_of_them, slots)
    assert (insisted.left_out, insisted.option(insisted.chosen).roster.shares) == ({}, [12, 12])
    half = msgspec.structs.replace(PROBED, models={"char": msgspec.structs.replace(RATE, tokens_per_s=500.0)})
    found = predict_launch(fleet(b=half), asked, slots)
    assert (found.left_out, found.option(found.chosen).roster.shares) == ({}, [16, 8])


# --- links by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "fast", "-1GbE", "0G", "1", "1e9", "GbE", "1GbE!", "1 lightyear/s", "nan", "--x"])
def test_unknown_link_is_a_one_line_error(text):
    with pytest.raises(UsageError) as told:
        parse_link(text)
    assert "\n" not in str(told.value)
    assert told.value.hint


@pytest.mark.parametrize(
    ("text", "Bps"),
    [
        ("100Mbit", 0.85 * 12.5e6),
        ("1gbe", 0.85 * 125e6),
        ("2.5 Gbit/s", 0.85 * 312.5e6),
        ("117MB/s", 117e6),
        ("3.19GB/s", 3.19e9),
        ("10GBps", 1e10),
        ("10Gbps", 0.85 * 1.25e9),
        ("wi-fi", NAMED_LINKS["wifi"].wire.bandwidth_Bps),
    ],
)
def test_link_text_gives_usable_bandwidth(text, Bps):
    assert parse_link(text).wire.bandwidth_Bps == pytest.approx(Bps)


def test_equal_and_per_round_shares_are_separate_options():
    """110, 110, 90 and 90 of 16 sequences: 4.4 and 3.6 in the mean, which rounded are equal ones."""
    wire = LinkModel(latency_s=1e-4, bandwidth_Bps=1e9)
    machines = cluster(1100.0, 1100.0, 900.0, 900.0, wire=wire)
    job = changed(JOB, batch=16, steps=2000, sync="diloco:10")
    by_speed, equal = (predict(changed(job, shares=shares), machines) for shares in ("auto", "equal"))
    told = {option.name: option for option in equal.options}
    assert by_speed.chosen == "diloco:10, shares 4.4 : 4.4 : 3.6 : 3.6"
    assert told[by_speed.chosen].roster.round_shares == [44, 44, 36, 36]
    assert equal.chosen == "diloco:10"
    gain = told[by_speed.chosen].tokens_per_s / told[equal.chosen].tokens_per_s
    assert gain == pytest.approx(4 / 900 / (4.4 / 1100), rel=0.02)


def test_fastest_option_is_returned_if_none_fits_in_memory():
    small = cluster(1000.0, 1000.0, memory_bytes=1_000_000)
    option = predict(JOB, small).options[0]
    slow, fast = (msgspec.structs.replace(option, name=f"{rate}", tokens_per_s=rate) for rate in (10.0, 20.0))
    assert best_two_that_fit([slow, fast], small) == [fast]
    assert best_two_that_fit([slow, fast], cluster(1000.0, 1000.0)) == [fast, slow]


def test_auto_shards_what_no_host_can_hold():
    """Two hosts of 14 GB: AdamW's state of 850M parameters is 13.6 GB on each, or 6.8 GB."""
    job = job_of(preset_shape("gpt2", 50257, 64, num_layers=40, num_heads=20, width=1280), batch=2, sync="auto")
    small = cluster(1000.0, 1000.0, wire=FAST, memory_bytes=14_000_000_000)
    found = predict(job, small)
    assert str(found.option(found.recommended).roster.sync) in ("fsdp", "zero1")
    asked = predict(changed(job, sync="ddp"), small)
    assert "does not fit: a has 14.0 GB" in asked.option("ddp").rejected_because
    assert any("--sync fsdp" in line or "--sync zero1" in line for line in told(asked))
    assert not predict(job, small).job.spec.model.recompute
    enough = predict(job, cluster(1000.0, 1000.0, wire=FAST, memory_bytes=64_000_000_000))
    assert str(enough.option(enough.chosen).roster.sync) not in ("fsdp", "zero1")


def test_auto_takes_the_fastest_of_what_fits():
    """Of 124M parameters and 4096 tokens: over a slow link it is faster to recompute than to gather weights more often,
    over a fast one to gather them, if mapping memory anew takes little of a step. Where little fits, both are needed.
    """
    job = job_of(preset_shape("gpt2", 50257, 1024), batch=8, micro_batch=4, sync="auto")

    def need(sync: str, recompute: bool) -> int:
        with_them = job_with_sync(job, parse_sync(sync), recompute=recompute)
        return predict_training(with_them, cluster(1000.0, 1000.0)).ranks[0].memory_bytes

    def chosen(wire: LinkModel, fits: int, speed: float = 1000.0) -> tuple[str, bool]:
        found = predict(
            job, cluster(speed, speed, wire=wire, memory_bytes=int(fits / 0.89))
        )  # of which it may fill 0.9
        recomputes = found.job.spec.model.recompute
        assert any("With --recompute" in note for note in found.notes) is recomputes
        return str(found.option(found.chosen).roster.sync), recomputes

    assert need("fsdp", True) < need("zero1", True) < need("ddp", True) < need("fsdp", False) < need("zero1", False)
    assert chosen(SLOW, need("fsdp", False)) == ("ddp", True)
    assert chosen(FAST, need("fsdp", False), speed=100.0) == ("fsdp", False)
    assert chosen(SLOW, need("fsdp", True)) == ("fsdp", True)
    nothing = predict(job, cluster(1000.0, 1000.0, memory_bytes=1_000_000_000))
    assert not nothing.recommended


def test_copies_of_a_part_are_on_devices_of_one_name():
    """Others may round differently, and ranks would refuse hsdp."""
    same = cluster(1.0, 1.0)
    other = [msgspec.structs.replace(slot, name=f"{slot.host}'s") for slot in same.slots]
    assert parse_sync("hsdp") in sharded_strategies(same)
    assert parse_sync("hsdp") not in sharded_strategies(msgspec.structs.replace(same, slots=other))
