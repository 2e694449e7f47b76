"""`evener launch -- trl sft …` trains as `trl sft` does in one process, also with unequal shares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from tests.integration.test_launched_programs import TIMEOUT_S
from tests.tiers import exhaustive

# A model without weights, its tokenizer and texts. All texts have as many tokens.
MODEL = """
import json, pathlib
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
set_seed(0)
texts = [f"{one} plus {other} is {one + other}" for one in range(12) for other in range(8)]
words = ["<pad>", "<eos>", *sorted({word for text in texts for word in text.split()})]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained("model")
LlamaForCausalLM(LlamaConfig(
    vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)).save_pretrained("model")
pathlib.Path("data").mkdir()
pathlib.Path("data/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\\n" for text in texts))
"""
OPTIONS = (
    "--model_name_or_path model --dataset_name data --max_steps 6 --learning_rate 1e-3 --logging_steps 1 --bf16 False "
    "--save_strategy no --report_to none"
)


@exhaustive
def test_trl_trains_with_unequal_shares_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "COLUMNS": "120"}

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    run("-c", MODEL)
    for ranks, *flags in (("1",), ("2", "--shares", "2:1")):
        batch = ["--per_device_train_batch_size", str(12 // int(ranks)), "--output_dir", f"tuned-{ranks}"]
        launched = ["-m", "evener", "launch", "--fleet", "local", "--ranks", ranks, "--out", f"run-{ranks}", *flags]
        text = run(*launched, "--", "trl", "sft", *OPTIONS.split(), *batch)
        assert "evener starts the ranks itself, without trl sft" in text
        assert "warning: " not in text, text
    one, two = (RunDir(tmp_path / f"run-{ranks}").records(0) for ranks in (1, 2))
    losses = [record.loss for record in one]
    assert len(losses) == 6
    assert None not in losses
    assert [record.loss for record in two] == pytest.approx(losses, rel=1e-5)
