"""`evener train chats.jsonl --model hf:FOLDER`: samples are prepared once; a mistake is a sentence with what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from ..in_process import run_verb
from ..pretrained import make_chats, make_model
from ..tiers import exhaustive


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of all tests here: to encode the same chats anew takes seconds."""
    cache = llama.with_name("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    shutil.copytree(llama, tmp_path / "llama")
    make_chats(tmp_path / "chats.jsonl")
    return cache / "evener" / "corpora"


def prepared(cache: Path) -> Path:
    (corpus,) = cache.glob("chats-*")
    return corpus


def train(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_verb("train", *args, "--dry-run", cwd=tmp_path, timeout_s=120)


def refused(tmp_path: Path, *args: str) -> tuple[str, str]:
    """Return the error and the hint of a command that is refused."""
    done = train(tmp_path, *args)
    assert done.returncode == 2, done.stderr
    error, *hint = done.stderr.splitlines()[-2:] if "\nhint:" in done.stderr else [done.stderr.splitlines()[-1]]
    assert error.startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    return error, hint[0] if hint else ""


def test_chats_are_prepared_once_and_one_epoch_is_planned(tmp_path, cache):
    first = train(tmp_path, "chats.jsonl", "--model", "hf:./llama", "--lora", "4", "--batch", "10")
    assert first.returncode == 0, first.stderr
    corpus = prepared(cache)
    assert re.search(
        r"54 samples to train on: [\d,]+ tokens, [\d,]+ of them carry loss\n6 samples held out", first.stderr
    )
    assert "6 steps of 10 sequences" in first.stderr  # 54 / 10, upward
    for flag in (f"--data={corpus}", f"--model=hf:{tmp_path}/llama", "--lora=4", "--steps=6", "--lr=0.0002"):
        assert flag in first.stdout
    again = train(tmp_path, "chats.jsonl", "--model", "hf:llama", "--epochs", "2", "--batch", "10", "--packing")
    assert "encoding" not in again.stderr
    assert re.search(r"in (\d+) sequences of 128", again.stderr)
    assert "--lr=2e-05" in again.stdout
    text = train(tmp_path, "chats.jsonl", "--model", "hf:llama", "--steps", "3", "--block-size", "40")
    assert "truncated at 40 tokens (--block-size)" in text.stderr
    assert "--steps=3" in text.stdout


FLEET = """
[hosts.here]
address = "local"
ranks = 1
[rates.here.cpu]
measured = "now"
copy_Bps = 1e10
[rates.here.cpu.models."hf:llama+lora4"]
tokens_per_s = {}
dtype = "fp32"
"""


def test_plan_and_train_end_with_the_budget(tmp_path):
    """54 samples in batches of 6 are 9 steps; 88 % of 30 min are planned."""
    words = ["chats.jsonl", "--model", "hf:llama", "--lora", "4", "--batch", "6", "--dtype", "fp32", "--for", "30min",
             "--fleet", "fleet.toml"]  # fmt: skip

    def sentences(tokens_per_s: float, *more: str) -> list[str]:
        (tmp_path / "fleet.toml").write_text(FLEET.format(tokens_per_s))
        planned = run_verb("plan", *words, *more, cwd=tmp_path, timeout_s=120)
        assert planned.returncode == 0, planned.stderr
        trained = train(tmp_path, *words, *more)
        assert trained.returncode == 0, trained.stderr
        (sentence,) = [line for line in trained.stderr.splitlines() if "steps of 6 sequences" in line]
        assert sentence in " ".join(planned.stdout.split())  # of which a long line is wrapped
        steps = re.search(r"(\d+) steps", sentence)
        assert steps is not None
        assert f"--steps={steps[1]}" in trained.stdout
        assert "--max-s=1800" in trained.stdout
        return [sentence, planned.stdout]

    sentence, planned = sentences(1e4)
    assert re.fullmatch(r"one epoch needs about \S+ m?s of the 30min: 9 steps of 6 sequences", sentence)
    assert "frozen, 6 sequences of about" in planned
    assert "carry loss and count, a step" in planned
    assert "18 steps" in sentences(1e4, "--epochs", "2")[0]
    slow, _ = sentences(0.1)  # a step takes longer, so that not all fit
    found = re.fullmatch(r"one epoch takes about .*; 30min end after (\S+) epochs: (\d+) steps of 6 sequences", slow)
    assert found is not None, slow
    assert float(found[1]) == pytest.approx(6 * int(found[2]) / 54, rel=0.06)
    (tmp_path / "fleet.toml").write_text(FLEET.format(1e-4))
    error, hint = refused(tmp_path, *words)
    assert "30min: too little: one step of 6 sequences takes" in error
    assert "smaller --batch" in hint


@exhaustive
def test_trained_tokens_are_those_that_carry_loss(tmp_path):
    out = tmp_path / "run"
    done = run_verb("train", "chats.jsonl", "--model", "hf:llama", "--lora", "2", "--batch", "54", "--eval-every", "0",
                    "--dtype", "fp32", "--out", out, cwd=tmp_path, timeout_s=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
    carrying = int(re.search(r"to train on: [\d,]+ tokens, ([\d,]+) of them", done.stderr)[1].replace(",", ""))
    record = json.loads((out / "steps" / "rank-0.jsonl").read_text().splitlines()[0])
    assert record["tokens"] == carrying  # one step of all samples
    assert "parameters: trained" in done.stderr
    verified = run_verb("verify", out, "--replay", "1", cwd=tmp_path, timeout_s=200)
    assert verified.returncode == 0, verified.stderr
    wrong = run_verb("train", "--resume", out, "--epochs", "2", cwd=tmp_path)
    assert "--epochs 2: a run that is resumed has its steps" in wrong.stderr


@exhaustive
def test_malformed_row_names_its_line(tmp_path, cache):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"messages": [}\n')
    error, _ = refused(tmp_path, "bad.jsonl", "--model", "hf:llama")
    assert error.startswith("error: bad.jsonl, line 2: not JSON")
    assert not list(cache.glob("*bad*"))  # nothing is left behind


def test_prompts_that_fill_the_block_are_refused(tmp_path):
    error, hint = refused(tmp_path, "chats.jsonl", "--model", "hf:llama", "--block-size", "3")
    assert "no sample carries loss within 3 tokens" in error
    assert "a larger --block-size" in hint


def test_tokenizer_of_another_model_is_refused(tmp_path):
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    error, hint = refused(tmp_path, "chats.jsonl", "--model", "hf:llama")
    assert "its tokenizer has 300 tokens, and its model 200" in error
    assert "the tokenizer.json with which the model was published" in hint


def test_corpus_of_another_tokenizer_is_refused(tmp_path, cache):
    assert train(tmp_path, "chats.jsonl", "--model", "hf:llama").returncode == 0
    corpus = prepared(cache)
    tokenizer = json.loads((tmp_path / "llama" / "tokenizer.json").read_text())
    (tmp_path / "llama" / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    error, hint = refused(tmp_path, str(corpus), "--model", "hf:llama")
    assert "encoded with another tokenizer" in error
    assert "name the texts themselves" in hint
    error, hint = refused(tmp_path, str(corpus), "--steps", "1")
    assert "prepared as samples for a pretrained model" in error
    assert "--model hf:FOLDER" in hint


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--num-layers", "2"], "--num-layers: --model hf:"),
        (["--tokenizer", "byte"], "--tokenizer byte: "),
        (["--compile", "on"], "--compile on"),
        (["--block-size", "4096"], "has 128 positions"),
        (["--sync", "int8+sparse"], "no lookup-only embedding table"),
        (["--epochs", "2", "--steps", "3"], "--epochs 2: --steps says"),
        (["--epochs", "2", "--tokens", "1M"], "--epochs 2: --tokens 1M says"),
        (["--init-from", "x"], "--init-from: --model hf:"),
        (["--ranks", "2", "--sync", "fsdp"], "--sync fsdp: a model that is fine-tuned is whole on every rank"),
    ],
)
def test_flags_that_do_not_fit_a_pretrained_model_are_refused(tmp_path, args, error):
    assert error in refused(tmp_path, "chats.jsonl", "--model", "hf:llama", *args)[0]


def test_missing_extra_is_named(tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else found(name, *more))
    error, hint = refused(tmp_path, "chats.jsonl", "--model", "hf:llama")
    assert "needs peft" in error
    assert "pip install 'evener[hf]'" in hint


def test_epochs_are_for_pretrained_models(tmp_path):
    (tmp_path / "my.txt").write_text("a text of one's own. " * 100)
    assert "--epochs 2: only for --model hf:FOLDER" in refused(tmp_path, "my.txt", "--epochs", "2")[0]


@exhaustive
def test_walk_of_the_guide_ends_with_a_model_that_transformers_loads(tmp_path):
    root = Path(__file__).parents[2]
    for name in ("README.md", "docs/reference/cli.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((root / name).read_text())
    blocks = re.findall(r"```console\n(.*?)```", (root / "docs/guides/fine-tune.md").read_text(), re.DOTALL)
    (walk,) = [block for block in blocks if "runs/base" in block]
    commands = "\n".join(line[2:] for line in walk.splitlines())
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True,
                          timeout=170, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/tuned/model")
    assert model.num_parameters() > 0
