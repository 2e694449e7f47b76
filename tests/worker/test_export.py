"""An exported model has the same logits in transformers, and `--init-from` loads it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from evener.cli.main import app
from evener.core.run.rundir import RunDir
from evener.corpus.tokenizer import load_tokenizer
from evener.worker.state.checkpoint import load_weights, read_safetensors
from evener.worker.train.model import GPT

from ..tiers import exhaustive, exhaustively

FLAGS = ["--model", "tiny", "--batch", "4", "--dtype", "fp32", "--eval-tokens", "256", "--eval-every", "0"]
TEXTS = ["She has been working.", "a  b\n\nc\t", "ä ö 🐎 <|endoftext|>"]


def evener(*words: str) -> int:
    return int(app(list(words), standalone_mode=False) or 0)


@pytest.mark.parametrize(
    "more",
    [
        [],
        *exhaustively(
            ["--model", "gpt2", "--num-layers", "2", "--num-heads", "2", "--width", "32", "--block-size", "64"]
        ),
    ],
)
def test_exported_model_logits_are_bit_equal(tmp_path: Path, train: Callable[..., RunDir], more: list[str]) -> None:
    run = train(tmp_path / "run", *FLAGS, "--steps", "6", "--lr", "0.01", *more)
    assert evener("export", str(tmp_path / "run"), "--out", str(tmp_path / "out")) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa").eval()
    shape = run.manifest().shape
    assert shape is not None
    ours = GPT(shape).eval()
    load_weights(run.checkpoint_path(6), ours)
    tokens = torch.randint(0, shape.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(tokens), theirs(tokens).logits)


@exhaustive
def test_training_initializes_from_export_and_from_run(tmp_path: Path, train: Callable[..., RunDir]) -> None:
    first = train(tmp_path / "run", *FLAGS, "--steps", "6", "--lr", "0.01")
    weights = read_safetensors(first.checkpoint_path(6) / "weights.safetensors")
    assert evener("export", str(tmp_path / "run")) == 0
    for number, place in enumerate(
        ("run", "run/export", "run/checkpoints/step-000006", "run/export/model.safetensors")
    ):
        again = train(
            tmp_path / f"again-{number}", *FLAGS, "--steps", "1", "--lr", "0", "--init-from", str(tmp_path / place)
        )
        taken = read_safetensors(again.checkpoint_path(1) / "weights.safetensors")
        assert all(torch.equal(weights[name], taken[name]) for name in weights), place


@exhaustive
def test_init_from_other_shape_is_refused(tmp_path: Path, train: Callable[..., RunDir], start: Callable) -> None:
    train(tmp_path / "run", *FLAGS, "--steps", "1")
    refused = start(tmp_path / "other", *FLAGS, "--width", "128", "--steps", "1", "--init-from", str(tmp_path / "run"))
    assert refused.wait() != 0
    assert "is (256, 64) there and (256, 128) in the model" in refused.text()
    assert "Traceback" not in refused.text()


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_exported_tokenizer_matches(tmp_path: Path, kind: str) -> None:
    from evener.corpus.huggingface import write_tokenizer

    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS) * 200)
    more = ["--vocab-size", "300"] if kind == "bpe" else []
    assert evener("data", "text", str(text), "--tokenizer", kind, *more, "--out", str(tmp_path / "corpus")) == 0
    ours = load_tokenizer(tmp_path / "corpus")
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out", 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for one in TEXTS[:2]:
        ids = [int(token) for token in ours.encode(one)]
        assert theirs(one)["input_ids"] == ids
        assert theirs.decode(ids) == one
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 64


@exhaustive
def test_export_of_non_gpt2_model_is_refused(tmp_path: Path, train: Callable[..., RunDir]) -> None:
    train(tmp_path / "run", *FLAGS, "--model", "d4", "--width", "128", "--block-size", "32", "--steps", "1")
    with pytest.raises(Exception, match="not GPT-2-like"):
        evener("export", str(tmp_path / "run"))
    assert not (tmp_path / "run" / "export").exists()
