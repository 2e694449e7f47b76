"""`evener train my.txt`: a text is prepared once and trained on; a mistake is one sentence with what to do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ..in_process import run_verb

SHORT = ["--model", "tiny", "--steps", "1", "--batch", "2", "--block-size", "16", "--dry-run"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my.txt").write_text("a text of one's own. " * 100)
    return tmp_path / "cache" / "evener" / "corpora"


def train(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_verb("train", *args, *SHORT, cwd=tmp_path)


def test_text_is_prepared_once_and_trained_on(tmp_path, cache):
    first = train(tmp_path, "my.txt")
    assert first.returncode == 0, first.stderr
    (corpus,) = cache.iterdir()
    assert f"--data={corpus}" in first.stdout
    assert "my.txt: 2.1 kB of text, 1,890 tokens to train on, 210 to validate; tokenizer char of" in first.stderr
    assert f"prepared in {corpus}" in first.stderr
    again = train(tmp_path, "--data", "my.txt")
    assert f"found prepared in {corpus}" in again.stderr
    as_folder = train(tmp_path, str(corpus))  # a prepared folder is taken as it is
    assert f"--data={corpus}" in as_folder.stdout
    assert "of text" not in as_folder.stderr
    other = train(tmp_path, "my.txt", "--vocab-size", "300")
    assert "tokenizer bpe of" in other.stderr


def test_specification_and_text_go_together(tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nlr = 0.5\n")
    told = train(tmp_path, "run.toml", "my.txt")
    assert told.returncode == 0, told.stderr
    assert "--lr=0.5" in told.stdout
    assert "/my-" in told.stdout


def test_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for variable, args in (("XDG_CACHE_HOME", []), ("XDG_CONFIG_HOME", ["--on", "local"])):
        with monkeypatch.context() as changed:
            changed.setenv(variable, str(tmp_path / "file"))
            done = train(tmp_path, "my.txt", *args)
        assert done.returncode
        error, hint = done.stderr.splitlines()[-2:]
        assert error.startswith(f"error: cannot write {tmp_path}/file/evener")
        assert hint.startswith(f"hint:  {variable}=FOLDER")


def test_learning_rate_of_zero_is_said(tmp_path):
    assert "--lr 0: the weights will not change" in train(tmp_path, "my.txt", "--lr", "0").stderr
    assert "--lr" not in train(tmp_path, "my.txt").stderr


def test_without_data_generated_sentences_are_trained_on(tmp_path):
    told = train(tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stderr.startswith("no text was named: training on generated English sentences, data/verbs")
    assert "no text was named" not in train(tmp_path).stderr  # they are there now


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["my.tx"], "my.tx: no such file or folder", "did you mean my.txt?"),
        (["nothing/at/all"], "nothing/at/all: no such file or folder", "evener train FILE trains on"),
        (["https://example.com/a.txt"], "https://example.com/a.txt: no such file or folder", "download it"),
        (["my.txt", "--data", "my.txt"], "--data my.txt: my.txt is what to train on", "one of them"),
        (["a.toml", "b.toml"], "b.toml: one specification is enough: a.toml", ""),
        (["a.toml"], "a.toml: No such file or directory", "flags begin with --"),
        (["my.txt", "--tokenizer", "bp"], '--tokenizer "bp" is not known', 'did you mean "bpe"?'),
        (["my.txt", "--tokenizer", "char", "--vocab-size", "9"], "--vocab-size is for --tokenizer bpe", ""),
        (["my.txt", "--column", "text"], "--column text: no table is among the texts", "for .jsonl, .csv"),
        (["empty.txt"], "no text in empty.txt", ""),
        (["chats.jsonl"], "chats.jsonl, line 1 has no column text; its columns: messages", "--column NAME"),
        (["corpus", "--tokenizer", "byte"], "--tokenizer byte: corpus is prepared already", "name the text itself"),
        (["corpus", "my.txt"], "corpus is prepared already: no other text", "name all texts"),
    ],
)
def test_mistake_is_one_sentence_with_what_to_do(tmp_path, args, error, hint):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    if "corpus" in args:
        assert run_verb("data", "text", "my.txt", "--out", "corpus", cwd=tmp_path).returncode == 0
    done = train(tmp_path, *args)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"error: {error}")
    assert len(lines) <= 2
    assert hint in lines[-1]


RATES = """
[hosts.here]
address = "local"
[rates.here.cpu]
memory_bytes = 8_000_000_000
[rates.here.cpu.models.g1]
tokens_per_s = 70_000
[rates.here.cpu.models.g2]
tokens_per_s = 40_000
[rates.here.cpu.models.g4]
tokens_per_s = 9_000
[rates.here.cpu.models.g6]
tokens_per_s = 2_400
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """This machine, as `--on local` would have measured it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    fleets = tmp_path / "config" / "evener" / "fleets"
    fleets.mkdir(parents=True)
    (fleets / "local.toml").write_text(RATES)
    (tmp_path / "long.txt").write_text("a longer text of one's own, in which a block has room. " * 400)


def test_budget_of_time_chooses_model_batch_and_steps(tmp_path, measured):
    told = run_verb("train", "long.txt", "--for", "30min", "--dry-run", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    (line,) = (line for line in told.stderr.splitlines() if line.startswith("30min: "))
    assert re.fullmatch(
        r"30min: g\d+, [\d.]+[kM] parameters, [\d,]+ steps of \d+ × 256 tokens, [\d.e+]+ times the text, about .* at "
        r"[\d.]+k tokens/s(; .*)?", line)  # fmt: skip
    for flag in ("--model=g", "--steps=", "--max-s=1800.0", "--lr=0.0"):
        assert flag in told.stdout
    by_hand = next(line for line in told.stderr.splitlines() if line.startswith("by hand: "))
    again = run_verb("train", "long.txt", *by_hand.removeprefix("by hand: ").split(";")[0].split(), "--dry-run",
                     cwd=tmp_path)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert run_command(again) == run_command(told) - {"--max-s=1800.0"}


def run_command(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The flags of the command that a dry run prints, but for the folder."""
    return {word for word in done.stdout.split() if word.startswith("--") and not word.startswith("--out=")}


def test_without_a_length_it_is_three_minutes_and_says_so(tmp_path, measured):
    told = run_verb("train", "long.txt", "--model", "g2", "--dry-run", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "3 min (--for 1h: another time): g2," in told.stderr
    assert "--max-s=180.0" in told.stdout
    by_steps = run_verb("train", "long.txt", "--model", "g2", "--steps", "5k", "--dry-run", cwd=tmp_path)
    assert "--steps=5000" in by_steps.stdout
    assert "--max-s" not in by_steps.stdout


def test_hosts_that_nobody_measured_are_named_with_the_command_that_measures_them(tmp_path, measured):
    (tmp_path / "two.toml").write_text('link = "1GbE"\n[hosts.a]\naddress = "a"\n[hosts.b]\naddress = "b"\n')
    told = run_verb("train", "long.txt", "--fleet", "two.toml", "--for", "1h", "--dry-run", cwd=tmp_path)
    assert told.returncode == 2
    assert told.stderr.splitlines()[-2:] == [
        "error: a: nobody measured its processor", "hint:  evener probe host --fleet two.toml --model g1,g2,g4,g6"
    ]  # fmt: skip


def test_budget_of_tokens_is_that_many_steps(tmp_path):
    (tmp_path / "long.txt").write_text("a longer text of one's own, in which a block has room. " * 400)
    told = run_verb("train", "long.txt", "--tokens", "1M", "--model", "g3", "--dry-run", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "--steps=245" in told.stdout  # of 16 × 256 tokens, rounded up


def test_plan_and_train_choose_the_same_for_a_budget(tmp_path, measured):
    planned = run_verb("plan", "long.txt", "--for", "2h", cwd=tmp_path)
    trained = run_verb("train", "long.txt", "--for", "2h", "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    (line,) = (line for line in trained.stderr.splitlines() if line.startswith("2h: "))
    assert line in " ".join(planned.stdout.split())


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_mistaken_budget_is_said_before_the_text_is_prepared(tmp_path, cache, verb):
    done = run_verb(verb, "my.txt", "--for", "soon", cwd=tmp_path)
    assert done.stderr.splitlines() == ["error: --for soon: expected a time", "hint:  30min, 8h or 2d"]
    assert not cache.exists()


@pytest.mark.parametrize("flag", [["--sync", "nonsense"], ["--nodes", "2", "--link", "1GbE", "--threads", "2"]])
def test_mistaken_flag_of_plan_is_said_before_the_text_is_prepared(tmp_path, cache, flag):
    assert run_verb("plan", "my.txt", *flag, cwd=tmp_path).returncode == 2
    assert not cache.exists()


@pytest.mark.parametrize("more", [["--data", "my.txt"], ["--from", "run"]])
def test_plan_of_a_text_has_no_other_data(tmp_path, cache, more):
    done = run_verb("plan", "my.txt", *more, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "hint:  one of them")
    assert not cache.exists()
