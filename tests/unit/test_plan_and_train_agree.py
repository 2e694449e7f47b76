"""For one set of flags `plan` recommends what `train` does: the same hosts, the same strategy, the same step time."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink, ModelRate, Rates
from evener.core.model.shape import PRESETS
from evener.core.run.prediction import Job, Prediction
from evener.core.run.resolve import check_sync_for_shape, make_job
from evener.core.run.roster import RankSlot, requested_sync
from evener.core.run.run_spec import RunSpec, parse_args
from evener.launch import start_training
from evener.launch.start_training import host_ring_order
from evener.plan.choice.cluster import build_cluster
from evener.plan.choice.plan_request import PlanRequest, answer_request, predict_launch, request_from_fleet

from ..tiers import num_examples
from .test_fine_tuning import tuning

SYNCS = ("", "", "", "auto", "ddp", "packed", "bf16", "int8", "int4", "fsdp", "zero1", "diloco:10",
         "diloco:10:int8:streamed")  # fmt: skip


def random_fleet(draw: random.Random, model: str) -> Fleet:
    """One to four hosts of one or two ranks, as `evener probe` describes them."""
    names = [f"h{i}" for i in range(draw.choice((1, 2, 2, 3, 4)))]
    device = draw.choice(("cpu", "cpu", "cuda:0"))
    hosts = {name: HostConfig(address=name, ranks=draw.choice((None, None, 2)) if device == "cpu" else None)
             for name in names}  # fmt: skip
    fast = 10 ** draw.uniform(2, 5)
    rates = {
        name: {
            device: Rates(
                copy_Bps=1e10, sync_Bps=1e9, sum_Bps={"fp32": 4e9}, memory_bytes=draw.choice((None, 16 * 10**9)),
                models={model: ModelRate(tokens_per_s=fast * draw.choice((1.0, 1.0, 0.5, 0.1)), pass_s=0.01,
                                         update_s=0.01, dtype=draw.choice(("fp32", "bf16")))},
            )
        }
        for name in names
    }  # fmt: skip
    Bps = 10 ** draw.uniform(6, 10)
    link = HostLink(goodput_Bps=Bps, rtt_s=draw.choice((1e-4, 5e-3)))
    links = {a: {b: link for b in names if b != a} for a in names}
    return Fleet(hosts=hosts, rates=rates, links=links)


def random_spec(draw: random.Random) -> RunSpec:
    flags = {
        "model": draw.choice(("g2", "char", "gpt2", "d8")), "batch": draw.choice((4, 16, 64, 256)),
        "steps": draw.choice((50, 200, 2000, 20000)), "loss-budget": draw.choice((0, 1, 1, 5)),
        "shares": draw.choice(("auto", "auto", "auto", "equal")),
    }  # fmt: skip
    if sync := draw.choice(SYNCS):
        flags["sync"] = sync
    return parse_args([f"--{name}={value}" for name, value in flags.items()])


@pytest.mark.parametrize("first", range(0, 300, 25))
def test_plan_recommends_what_train_does(first):
    for seed in range(first, first + num_examples(5, 25)):
        draw = random.Random(seed)
        spec = random_spec(draw)
        fleet = random_fleet(draw, spec.model.model)
        shape = PRESETS[spec.model.model]
        try:
            check_sync_for_shape(requested_sync(spec), shape)
            planned = answer_request(request_from_fleet(fleet, spec, None, None, "fleet.toml"))
        except UsageError:
            continue
        trained = train_prediction(fleet, make_job(spec, shape, None))
        if not planned.recommended:
            continue
        best, does = planned.option(planned.recommended), trained.option(trained.chosen)
        if spec.machine.shares != "auto":  # all hosts take part, as asked, and train prints plan's verdict
            assert trained.verdict == planned.verdict, seed
            continue
        assert sorted(best.roster.hosts) == sorted(does.roster.hosts), seed
        assert best.roster.sync == does.roster.sync or len(best.roster.hosts) == 1, seed
        assert best.step_s == pytest.approx(does.step_s, rel=0.03), seed


@pytest.mark.parametrize("first", range(1000, 1100, 25))
def test_plan_recommends_what_train_does_in_a_fine_tuning(first):
    """`--sync auto` is exact with LoRA, whose few bytes let slow hosts help."""
    for seed in range(first, first + num_examples(5, 25)):
        draw = random.Random(seed)
        shape = tuning(draw.choice((None, 8, 16)))
        fleet = random_fleet(draw, draw.choice((shape.rate_name, "g6")))
        flags = {"model": "hf:llama", "batch": draw.choice((4, 16, 64)), "micro-batch": draw.choice((1, 4, 16)),
                 "shares": draw.choice(("auto", "auto", "equal")), "loss-budget": draw.choice((0, 1, 5)),
                 "sync": draw.choice(("auto", "auto", "ddp", "packed", "int8"))}  # fmt: skip
        spec = parse_args([f"--{name}={value}" for name, value in flags.items()])
        job = Job(spec=spec, shape=shape)
        try:
            planned = answer_request(PlanRequest(job=job, cluster=build_cluster(fleet, job), source="fleet.toml"))
        except UsageError:
            continue
        trained = train_prediction(fleet, job)
        if not planned.recommended:
            continue
        best, does = planned.option(planned.recommended), trained.option(trained.chosen)
        if flags["sync"] == "auto" and shape.model.lora_rank is not None:
            assert best.is_exact, seed
            assert does.is_exact, seed
        if flags["shares"] != "auto" or does.rejected_because:  # as asked, and train prints plan's verdict
            assert trained.verdict == planned.verdict, seed
            continue
        assert sorted(best.roster.hosts) == sorted(does.roster.hosts), seed
        assert best.roster.sync == does.roster.sync or len(best.roster.hosts) == 1, seed
        assert best.step_s == pytest.approx(does.step_s, rel=0.03), seed


def train_prediction(fleet: Fleet, job: Job):
    """What `train` predicts of what it is about to do."""
    order = host_ring_order(fleet, job)
    ordered = Fleet(hosts={name: fleet.hosts[name] for name in order}, rates=fleet.rates, links=fleet.links)
    return predict_launch(ordered, job)


def test_train_refuses_what_no_host_can_hold():
    """gpt2-xl takes 24.9 GB of 16 bytes a parameter: two hosts of 20 GB hold it in parts only."""
    model = ModelRate(tokens_per_s=100.0, pass_s=0.01, update_s=0.01, dtype="fp32")
    rates = Rates(
        copy_Bps=1e10, sync_Bps=1e9, sum_Bps={"fp32": 4e9}, memory_bytes=20 * 10**9, models={"gpt2-xl": model}
    )
    link, hosts = HostLink(goodput_Bps=1e8, rtt_s=1e-4), {name: HostConfig(address=name) for name in "ab"}
    links = {"a": {"b": link}, "b": {"a": link}}
    fleet = Fleet(hosts=hosts, rates={name: {"cpu": rates} for name in "ab"}, links=links)
    slots = [RankSlot(host=name, device="cpu") for name in "ab"]

    def planned(sync: str) -> Prediction | None:
        spec = parse_args(["--model=gpt2-xl", "--batch=2", "--recompute", f"--sync={sync}"])
        resolved: Any = SimpleNamespace(
            spec=spec, shape=PRESETS["gpt2-xl"], job=make_job(spec, PRESETS["gpt2-xl"], None)
        )
        return start_training._predict(fleet, resolved, slots, print, as_requested=False, resumed=None)

    with pytest.raises(
        UsageError, match=r"--sync ddp does not fit: a has 20\.0 GB, a run may fill 18\.0 GB"
    ) as refused:
        planned("ddp")
    assert re.search(r"--sync (fsdp|zero1) --micro-batch 1 fits, with 1\d\.\d GB on a rank", refused.value.hint)
    chosen = planned("auto")
    assert chosen.option(chosen.chosen).roster.sync.is_sharded
