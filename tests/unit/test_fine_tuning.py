"""The planner's view of a fine-tuning: FLOPs, memory and rates against closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig, ModelRate, Rates
from evener.core.model.fine_tuning import FineTuning, SequenceLengths
from evener.core.model.gradients import GradientTensor
from evener.core.model.pretrained import Layers, PretrainedModel
from evener.core.model.shape import PRESETS
from evener.core.run.prediction import Job, Prediction
from evener.core.run.roster import DDP, Member, Roster
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import StepRecord
from evener.plan.choice.cluster import NotMeasuredError, build_cluster
from evener.plan.choice.plan_request import answer_request, change_request, predict_launch, request_from_run
from evener.plan.cost.cost_model import predict_step
from evener.plan.cost.memory import peak_memory

from ..sample_runs import write_run

WIDTH, LAYERS, MLP, VOCAB, BLOCK, RANK = 256, 6, 768, 1000, 128, 8
KV = WIDTH // 2
LINEAR = LAYERS * (2 * WIDTH * (WIDTH + KV) + 3 * WIDTH * MLP)
ADAPTERS = LAYERS * RANK * (2 * (WIDTH + WIDTH) + 2 * (WIDTH + KV) + 3 * (WIDTH + MLP))


def llama(lora_rank: int | None = None, **changes: Any) -> PretrainedModel:
    num_params = LINEAR + 2 * VOCAB * WIDTH
    trained = num_params if lora_rank is None else ADAPTERS
    model = PretrainedModel(
        name="llama", architecture="llama", weights_hash="", tokenizer_hash="", vocab_size=VOCAB, block_size=BLOCK,
        lora_rank=lora_rank, num_frozen=0 if lora_rank is None else num_params, num_linear=LINEAR,
        layers=Layers(num_layers=LAYERS, width=WIDTH, attention_width=WIDTH, kv_width=KV, mlp_width=MLP, has_gate=True),
        gradients=(GradientTensor(name="all", rows=trained, columns=1, ready=1.0),),
    )  # fmt: skip
    return msgspec.structs.replace(model, **changes)


def tuning(lora_rank: int | None = None, **changes: Any) -> FineTuning:
    return FineTuning(model=llama(lora_rank, **changes), lengths=SequenceLengths.full(BLOCK))


def job_of(shape: FineTuning, *flags: str) -> Job:
    return Job(spec=parse_args(["--model=hf:llama", "--batch=16", "--micro-batch=4", *flags]), shape=shape)


def fleet_of(rates: Rates, *names: str) -> Fleet:
    hosts = {name: HostConfig(address=name) for name in names}
    return Fleet(hosts=hosts, rates={name: {"cpu": rates} for name in names}, link="100Mbit")


def test_full_fine_tuning_has_the_flops_of_palm():
    matmul = LINEAR + VOCAB * WIDTH
    assert tuning().flops_per_token() == 6 * matmul + 12 * LAYERS * WIDTH * BLOCK
    assert tuning().backward_fraction == pytest.approx(2 / 3)


def test_frozen_weights_have_no_gradient():
    """4 N instead of 6 N, less the first layer's inputs; adapters 6 N; the attention has no weights."""
    frozen = 4 * (LINEAR + VOCAB * WIDTH) - 2 * WIDTH * (WIDTH + 2 * KV)
    assert tuning(RANK).flops_per_token() == frozen + 6 * ADAPTERS + 12 * LAYERS * WIDTH * BLOCK


def test_probed_rate_is_converted_by_flops():
    """A sequence of half the tokens that carry loss takes as long, and counts half."""
    rate = ModelRate(tokens_per_s=1000.0, dtype="fp32", flops_per_token=tuning().flops_per_token())
    rates = Rates(measured="now", models={"hf:llama": rate})
    half = SequenceLengths.full(BLOCK)
    half = msgspec.structs.replace(half, loss_tokens=BLOCK / 2)
    for lengths, expected in ((SequenceLengths.full(BLOCK), 1000.0), (half, 500.0)):
        job = job_of(FineTuning(model=llama(), lengths=lengths))
        cluster = build_cluster(fleet_of(rates, "a"), job)
        assert cluster.hosts["a"].tokens_per_s["fp32"] == pytest.approx(expected)
        assert cluster.hosts["a"].basis == "measured"


def test_rate_of_another_lora_rank_is_converted_by_flops():
    full = tuning(RANK).flops_per_token()
    rates = Rates(measured="now", models={"hf:llama+lora8": ModelRate(tokens_per_s=1000.0, flops_per_token=full)})
    wide = (GradientTensor(name="all", rows=2 * ADAPTERS, columns=1, ready=1.0),)
    job = job_of(tuning(2 * RANK, gradients=wide), "--lora=16")
    host = build_cluster(fleet_of(rates, "a"), job).hosts["a"]
    assert host.tokens_per_s["fp32"] == pytest.approx(1000.0 * full / (full + 6 * ADAPTERS))
    assert host.basis == "derived"


def test_rate_of_a_preset_stands_in_with_a_measured_factor_and_the_command_to_measure():
    rates = Rates(measured="now", models={"g6": ModelRate(tokens_per_s=1000.0, dtype="fp32", update_s=0.1)})
    cluster = build_cluster(fleet_of(rates, "a"), job := job_of(tuning(RANK), "--lora=8"))
    g6 = PRESETS["g6"]
    assert cluster.hosts["a"].tokens_per_s["fp32"] == pytest.approx(
        0.76 * 1000.0 * g6.flops_per_token() / job.shape.flops_per_token()
    )
    assert cluster.hosts["a"].update_s == pytest.approx(0.1 * ADAPTERS / g6.num_params())
    assert any("evener probe host" in text and "--model hf:llama --lora 8" in text for text in cluster.assumed)


def test_model_of_unknown_layers_is_not_predicted():
    rates = Rates(models={"g6": ModelRate(tokens_per_s=1000.0)})
    with pytest.raises(NotMeasuredError, match="does not know the layers of a mixtral"):
        build_cluster(fleet_of(rates, "a"), job_of(tuning(layers=None, architecture="mixtral")))


def test_auto_takes_an_exact_strategy_for_adapters_whatever_the_budget():
    """On a slow link int8 would be faster, but nobody measured what it costs LoRA."""
    rates = Rates(models={"hf:llama+lora8": ModelRate(tokens_per_s=1000.0, dtype="fp32")}, copy_Bps=1e10)
    for budget in (0, 5):
        job = job_of(tuning(RANK), "--sync=auto", f"--loss-budget={budget}", "--steps=5000")
        prediction = predict_launch(fleet_of(rates, "a", "b"), job, may_leave_out=False)
        assert prediction.option(prediction.chosen).is_exact
        rejected = {option.rejected_because for option in prediction.options if not option.is_exact}
        assert rejected == {"nobody measured what it costs LoRA in loss"}


def test_hosts_with_jemalloc_need_less_memory():
    rates = Rates(models={"hf:llama": ModelRate(tokens_per_s=1000.0, dtype="fp32")}, copy_Bps=1e10)
    job, needs = job_of(tuning(), "--sync=ddp"), list[int]()
    for has_jemalloc in (False, True):
        fleet = fleet_of(msgspec.structs.replace(rates, has_jemalloc=has_jemalloc), "a", "b")
        found = predict_launch(fleet, job, may_leave_out=False)
        needs.append(found.option(found.chosen).ranks[0].memory_bytes or 0)
    assert 0 < needs[1] < needs[0]


def test_only_adapters_travel():
    """Two ranks send each other the fp32 gradients of the adapters: half at a time, twice.   [ring all-reduce]"""
    rates = Rates(models={"hf:llama+lora8": ModelRate(tokens_per_s=1000.0, dtype="fp32")})
    job = job_of(tuning(RANK), "--sync=ddp")
    option = predict_launch(fleet_of(rates, "a", "b"), job, may_leave_out=False)
    assert option.option(option.chosen).bytes_per_rank == pytest.approx(4 * ADAPTERS, rel=1e-6)


def test_padding_lengthens_the_step():
    lengths = SequenceLengths.full(BLOCK)
    (full,) = lengths.micro_batches
    half = msgspec.structs.replace(full, tokens=BLOCK / 2, squares=BLOCK * BLOCK / 4, logits=BLOCK / 2)
    padded = msgspec.structs.replace(lengths, loss_tokens=BLOCK / 2, micro_batches=(half, half, full))
    rate = ModelRate(tokens_per_s=1000.0, dtype="fp32", flops_per_token=tuning().flops_per_token())
    rates = Rates(models={"hf:llama": rate})
    shape = FineTuning(model=llama(), lengths=padded)
    roster = Roster(members=[Member(rank=0, host="a", device="cpu", dtype="fp32", share=16, micro_batch=4)], sync=DDP,
                    backend="none")  # fmt: skip
    one, four = (
        predict_step(job, build_cluster(fleet_of(rates, "a"), job), msgspec.structs.replace(roster, members=[member]))
        for job in [job_of(shape)]
        for member in (msgspec.structs.replace(roster.members[0], micro_batch=size) for size in (1, 4))
    )
    assert four.step_s == pytest.approx(16 * BLOCK / 1000.0)  # as full ones
    assert one.step_s < 0.51 * four.step_s  # the attention of half the tokens is a quarter


def test_memory_is_that_of_frozen_weights_adapters_and_their_optimizer():
    roster = Roster(members=[Member(rank=0, host="a", device="cpu", dtype="bf16", share=4, micro_batch=4)], sync=DDP,
                    backend="none")  # fmt: skip
    need = peak_memory(tuning(RANK), roster, 0)
    assert need.weights == 4 * ADAPTERS + 2 * tuning(RANK).model.num_frozen
    assert (need.gradients, need.optimizer) == (4 * ADAPTERS, 8 * ADAPTERS)
    full = peak_memory(tuning(), roster, 0)
    assert full.weights == 4 * tuning().num_params() + 2 * LINEAR  # autocast keeps the casts for backward
    assert peak_memory(tuning(), roster, 0, recompute=True).activations < 0.5 * full.activations


def test_quantized_linear_layers_take_half_a_byte_a_weight():
    """QLoRA's figure: 4 bits and 0.127 of scales."""
    shape = tuning(RANK, quantization="nf4")
    roster = Roster(members=[Member(rank=0, host="a", device="cpu", dtype="bf16", share=4, micro_batch=4)], sync=DDP,
                    backend="none")  # fmt: skip
    frozen = 2 * 2 * VOCAB * WIDTH + LINEAR * 4.127 / 8  # embeddings and head stay in bf16
    assert peak_memory(shape, roster, 0).weights == pytest.approx(4 * ADAPTERS + frozen, rel=1e-6)
    rates = Rates(models={"hf:llama+lora8": ModelRate(tokens_per_s=1000.0, dtype="bf16")})
    cluster = build_cluster(fleet_of(rates, "a"), job_of(shape, "--lora=8", "--quantize=nf4"))
    assert any("decoding the nf4 weights" in text for text in cluster.assumed)


def run_of_two_hosts(folder: Path) -> tuple[Manifest, list[list[StepRecord]], Prediction]:
    """Return a run on a and b that took 1.5 times as long to compute as predicted, and its prediction."""
    rates = Rates(models={"hf:llama+lora8": ModelRate(tokens_per_s=1000.0, dtype="fp32")}, copy_Bps=1e10)
    job = job_of(tuning(RANK), "--sync=ddp")
    prediction = predict_launch(fleet_of(rates, "a", "b"), job, may_leave_out=False)
    option = prediction.option(prediction.chosen)
    computed_s = 1.5 * (option.ranks[0].cost.compute_s or 0.0)
    tokens = [share * BLOCK for share in option.roster.shares]
    cost = {"data_s": 0.0, "compute_s": computed_s, "exposed_sync_s": 0.01, "wait_s": 0.0, "optimizer_s": 0.0}
    run = write_run(folder, [dict(cost), dict(cost)], tokens=tokens, sync_s=0.4)
    manifest = msgspec.structs.replace(run.manifest(), shape=llama(RANK), spec=job.spec, roster=option.roster)
    return manifest, [run.records(rank) for rank in range(2)], prediction


def test_run_says_whether_the_second_host_was_worth_it(tmp_path):
    manifest, records, prediction = run_of_two_hosts(tmp_path / "run")
    request = request_from_run("run", manifest, records, prediction)
    answered = answer_request(request)
    both, alone = answered.option(answered.chosen), answered.option("a alone")
    assert both.step_s == pytest.approx(records[0][0].wall_s)
    assert alone.step_s == pytest.approx(2 * 1.5 * (prediction.option(prediction.chosen).ranks[0].cost.compute_s or 0),
                                         rel=0.02)  # fmt: skip
    assert 1.9 < (both.speedup_vs_best_host or 0) < 2.0
    slower = change_request(request, {}, "1Mbit")  # 1.2 MB of adapters take 10 s
    assert answer_request(slower).recommended == "a alone"
    with pytest.raises(UsageError, match="--lora: the run shows how fast its own model is"):
        change_request(request, {"lora": "4"}, None)


def test_run_without_prediction_or_samples_is_refused(tmp_path):
    manifest, records, _ = run_of_two_hosts(tmp_path / "run")
    with pytest.raises(UsageError, match="its samples data/verbs are not here"):
        request_from_run("run", manifest, records, None)
    unknown = msgspec.structs.replace(manifest, shape=llama(RANK, layers=None))
    with pytest.raises(UsageError, match="does not know the layers of a llama"):
        request_from_run("run", unknown, records, None)
