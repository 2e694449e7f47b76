"""`--for` and `--tokens`: the model, batch and steps with the lowest predicted loss."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from evener.cli.budget import Throughputs, parse_budget, request_for_budget
from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig, ModelRate, Rates
from evener.core.model.corpus import Corpus
from evener.core.model.shape import PRESETS
from evener.core.run.resolve import model_shape
from evener.core.run.run_spec import RunSpec, TrainSpec
from evener.plan.choice.plan_request import MachineFlags, request_from_flags
from evener.plan.choice.training_budget import (
    MAX_EPOCHS,
    SIZES,
    TIME_SHARE,
    Budget,
    balanced_size,
    choose_for_budget,
    reducible_loss,
)

DAY = Budget(text="1d", seconds=86400.0)


def corpus_of(num_tokens: int, vocab_size: int = 256) -> Corpus:
    known = {"path": Path("text"), "tokenizer": "byte", "vocab_size": vocab_size, "train_tokens": num_tokens}
    fields = {field.name: known.get(field.name) for field in msgspec.structs.fields(Corpus)}
    return Corpus(**(fields | {"val_tokens": num_tokens // 10}))


def machine_of(flops: float, **by_batch: float):
    """A machine that trains any model with so many FLOP/s, whatever the batch."""

    def tokens_per_s(spec: RunSpec) -> float:
        return flops / model_shape(spec, 256).flops_per_token()

    return tokens_per_s


@pytest.mark.parametrize(("tokens", "params"), [(9.2e9, 400e6), (27.1e9, 1e9), (1.5e12, 67e9)])
def test_balanced_size_is_that_of_the_published_table(tokens, params):
    # Hoffmann et al. 2022, table A3, approach 3
    assert balanced_size(tokens) == pytest.approx(params, rel=0.3)


def test_faster_machine_gets_larger_model():
    sizes = [
        SIZES.index(choose_for_budget(RunSpec(), set(), None, DAY, machine_of(flops)).spec.model.model)
        for flops in (1e9, 1e10, 1e11, 1e12, 1e13, 1e14)
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 3


def test_choice_has_the_lowest_loss_of_all_sizes_at_its_batch():
    tokens_per_s = machine_of(1e11)
    choice = choose_for_budget(RunSpec(), {"batch"}, None, DAY, tokens_per_s)
    for size in SIZES:
        spec = msgspec.structs.replace(RunSpec(), model=msgspec.structs.replace(RunSpec().model, model=size))
        shape = model_shape(spec, None)
        tokens = TIME_SHARE * DAY.seconds * tokens_per_s(spec)
        loss = reducible_loss(shape.num_params(), tokens, 16 * shape.block_size, None)
        assert loss >= choice.reducible_loss * (1 - 1e-4)  # whole steps
    assert choice.spec.train.max_s == DAY.seconds


def test_what_the_user_gave_stays():
    given = RunSpec(train=TrainSpec(batch=3, lr=0.5))
    spec = choose_for_budget(given, {"batch", "lr", "model"}, None, DAY, machine_of(1e11)).spec
    assert (spec.model, spec.train.batch, spec.train.lr) == (given.model, 3, 0.5)
    tokens = TIME_SHARE * DAY.seconds * machine_of(1e11)(given)
    assert spec.train.steps == int(tokens / (3 * PRESETS["char"].block_size))


def test_small_text_is_read_so_often_and_not_more():
    choice = choose_for_budget(RunSpec(), set(), corpus_of(10**6), DAY, machine_of(1e14))
    assert choice.ends_early
    assert choice.epochs == pytest.approx(MAX_EPOCHS, rel=0.02)
    assert (choice.spec.model.model, choice.spec.model.dropout) == ("g6", 0.2)  # nanoGPT's for 1 MB of characters
    read_once = choose_for_budget(RunSpec(), set(), corpus_of(10**9), DAY, machine_of(1e11))
    assert (read_once.spec.model.dropout, read_once.ends_early) == (0.0, False)


def test_repeated_text_teaches_less():
    once, again = (reducible_loss(1e6, 10e6, 4096, corpus) for corpus in (None, 1e6))
    assert once < again < reducible_loss(1e6, 1e6, 4096, None)


def test_tokens_alone_need_no_measurement():
    choice = choose_for_budget(RunSpec(), set(), None, Budget(text="2.5B tokens", tokens=2.5e9), None)
    assert choice.spec.train.steps * 16 * choice.shape.block_size >= 2.5e9
    assert choice.spec.model.model == "gpt2"  # 124M parameters, 20 tokens each [Hoffmann et al. 2022]


@pytest.mark.parametrize(
    ("for_time", "tokens", "texts", "error"),
    [
        ("8h", None, {"steps"}, "--for 8h: --steps says how long the run is, too"),
        ("8h", "2M", (), "--for 8h: --tokens 2M says how long the run is, too"),
        (None, "2M", {"steps"}, "--tokens 2M: --steps says how long the run is, too"),
        ("soon", None, (), "--for soon: expected a time"),
        ("0h", None, (), "--for 0h: expected a time"),
        (None, "some", (), "--tokens some: expected a number of tokens"),
    ],
)
def test_conflicting_or_senseless_budget_is_one_sentence(for_time, tokens, texts, error):
    with pytest.raises(UsageError) as raised:
        parse_budget(for_time, tokens, texts)
    assert str(raised.value) == error


def fleet_of(ranks: int, **more: object) -> Fleet:
    rates = Rates(models={"g2": ModelRate(tokens_per_s=30e3), "g6": ModelRate(tokens_per_s=2e3)}, **more)
    return Fleet(hosts={"h": HostConfig(address="local", ranks=ranks)}, rates={"h": {"cpu": rates}})


def test_batch_has_a_sequence_for_every_rank():
    corpus = corpus_of(10**7)
    hour = Budget(text="1h", seconds=3600.0)
    for ranks in (12, 40):
        choice = choose_for_budget(RunSpec(), set(), corpus, hour, Throughputs(fleet_of(ranks), corpus))
        assert choice.spec.train.batch >= ranks


def test_model_that_does_not_fit_into_memory_is_not_chosen():
    corpus, month = corpus_of(10**10), Budget(text="30d", seconds=30 * 86400.0)
    large, small = (choose_for_budget(RunSpec(), set(), corpus, month, Throughputs(fleet_of(1, **more), corpus)).shape
                    for more in ({}, {"memory_bytes": 800_000_000}))  # fmt: skip
    assert small.num_params() < large.num_params()
    with pytest.raises(UsageError, match="no model fits into memory"):
        choose_for_budget(RunSpec(), set(), corpus, month, Throughputs(fleet_of(1, memory_bytes=10**7), corpus))


def test_plan_judges_the_size_that_params_asks_for():
    flags = MachineFlags(gpus="4090")
    spec = RunSpec()

    def request(candidate):
        return request_from_flags(flags, candidate, None, "350M")

    planned = request_for_budget(request, spec, {"model"}, None, Budget(text="1B tokens", tokens=1e9))
    assert planned.job.spec.model.model == "350M"
    assert planned.job.spec.train.steps * planned.job.tokens == pytest.approx(1e9, rel=1e-3)


def test_budget_too_small_for_a_step_is_said():
    with pytest.raises(UsageError, match="1s: too little for one step"):
        choose_for_budget(RunSpec(), set(), None, Budget(text="1s", seconds=1.0), machine_of(1e6))
