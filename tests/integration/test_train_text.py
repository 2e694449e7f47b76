"""`evener train my.txt`: a text is prepared once and trained on; a mistake is one sentence with what to do."""

from __future__ import annotations

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
