"""Fine-tuning a pretrained model: equal to transformers' and peft's own loop, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evener.core.model.corpus import load_corpus
from evener.core.run.run_spec import TrainSpec
from evener.core.run.rundir import RunDir
from evener.worker.finetune.libraries import load_model
from evener.worker.finetune.model import NO_TARGET, add_adapters
from evener.worker.finetune.sample_rows import SampleRows
from evener.worker.finetune.tokenize_samples import SamplesRequest, prepare_samples
from evener.worker.train.optim import set_hyperparameters

from ..pretrained import ARCHITECTURES, make_chats, make_model
from ..tiers import exhaustively

CPU, STEPS, BATCH, SEED, LR = torch.device("cpu"), 6, 8, 1337, 1e-3
TRAIN = ["--steps", str(STEPS), "--batch", str(BATCH), "--lr", str(LR), "--dtype", "fp32", "--threads", "1",
         "--eval-every", "3", "--checkpoint-every", "3"]  # fmt: skip
Train = Callable[..., RunDir]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of all architectures, and one prepared corpus for all, as their tokenizers are equal."""
    folder = tmp_path_factory.mktemp("finetune")
    for architecture in ARCHITECTURES:
        make_model(folder / architecture, architecture)
    chats = make_chats(folder / "chats.jsonl")
    prepare_samples(
        SamplesRequest(paths=[str(chats)], column=None, model=str(folder / "llama"), out=str(folder / "data"))
    )
    return folder


@pytest.fixture
def finetune(places: Path, server, tmp_path: Path) -> Train:
    """Fine-tune to the end, successfully."""

    def run(out: str, architecture: str, *args: str, ranks: int = 1) -> RunDir:
        words = ["--data", str(places / "data"), "--model", f"hf:{places / architecture}", "--out", str(tmp_path / out)]
        ended = server.run(tmp_path / f"said-{out}-{len(args)}", [*words, *TRAIN, *args], ranks, module="evener.worker")
        assert not any(ended.statuses), f"{ended.statuses}\n{ended.said('out')}{ended.said('err')}"
        return RunDir(tmp_path / out)

    return run


def losses(run: RunDir) -> list[float | None]:
    return [record.loss for record in run.records(0)]


def reference_losses(folder: Path, data: Path, lora: int | None) -> list[float]:
    """Return the losses of the loop that one writes with transformers and peft: their loss, a mask, one sample a time.

    It shares the batches with evener, and nothing else: no padding, no positions, labels that transformers shifts.
    """
    torch.manual_seed(SEED)
    model = load_model(folder)
    model = model if lora is None else add_adapters(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.99))
    rows = SampleRows(load_corpus(data), "train", 128)
    result = []
    for step in range(STEPS):
        batch, total = rows.global_batch(SEED, step, BATCH), 0.0
        num_tokens = rows.num_tokens(batch)
        for row in batch:
            tokens, _, targets = rows.load(batch[batch == row][:1], CPU)
            labels = torch.cat([torch.full((1, 1), NO_TARGET), targets[:, :-1]], dim=1)
            loss = model(input_ids=tokens, labels=labels).loss * (labels != NO_TARGET).sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        set_hyperparameters(optimizer, step, TrainSpec(steps=STEPS, lr=LR))
        optimizer.step()
        optimizer.zero_grad()
        result.append(total)
    return result


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [("llama", 4), ("gpt2", None), *exhaustively(("llama", None), ("gpt2", 4), ("qwen2", 4), ("qwen2", None))],
)
def test_losses_equal_the_loop_of_transformers_and_peft(places, finetune, architecture, lora):
    ours = losses(finetune("run", architecture, *(["--lora", str(lora)] if lora else [])))
    theirs = reference_losses(places / architecture, places / "data", lora)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [("llama", 4), *exhaustively(("gpt2", 4), ("qwen2", 4), ("llama", None), ("gpt2", None), ("qwen2", None))],
)
def test_any_division_has_the_same_losses(finetune, architecture, lora):
    more = ["--lora", str(lora)] if lora else []
    one = finetune("one", architecture, *more)
    two = finetune("two", architecture, *more, "--shares", "equal", ranks=2)
    unequal = finetune("unequal", architecture, *more, "--shares", "3:1", ranks=2)
    for run in (two, unequal):
        assert losses(run) == pytest.approx(losses(one), rel=1e-5)
        assert run.manifest().result.val_loss == pytest.approx(one.manifest().result.val_loss, rel=1e-5)
        assert run.manifest().result.replicas_agree is True
    assert [member.share for member in unequal.manifest().roster.members] == [6, 2]
