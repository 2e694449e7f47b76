"""Folders and files whose names are not UTF-8 are refused in one sentence, and nothing is left behind."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from ..in_process import run_verb

NAME = os.fsdecode(b"caf\xe9")  # Latin-1, as an old archive or a USB stick has it


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    """A corpus, a script and a text in a folder with such a name, and a link to it."""
    bad = tmp_path / NAME
    shutil.copytree(corpus, bad / "data")
    shutil.copytree(corpus, tmp_path / "data")
    (bad / "script.py").write_text("print('hello')")
    (tmp_path / "script.py").write_text("print('hello')")
    (bad / "text.txt").write_text("some words\n" * 100)
    (bad / "run.toml").write_text("[train]\nsteps = 2\n")
    (tmp_path / "link").symlink_to(bad)
    return tmp_path


TRAIN = ("train", "--model", "tiny", "--steps", "1")
REFUSED: list[tuple[str, tuple[str, ...]]] = [  # the current folder, the verb
    (".", (*TRAIN, "--data", f"{NAME}/data", "--out", "run")),
    (".", (*TRAIN, "--data", "data", "--out", f"{NAME}/run")),
    (".", ("train", f"{NAME}/run.toml", "--data", "data")),
    (NAME, (*TRAIN, "--data", "data", "--out", "run")),
    ("link", (*TRAIN, "--data", "data", "--out", "run")),
    (".", ("launch", "--", f"{NAME}/script.py")),
    (".", ("launch", "--out", NAME + "/run", "--", "script.py")),
    (NAME, ("launch", "--", "script.py")),
    (".", ("bench", "--data", f"{NAME}/data", "--out", "bench")),
    (".", ("report", NAME)),
    (".", ("plan", "--fleet", f"{NAME}/fleet.toml")),
    (".", ("data", "verbs", "--sentences", "50", "--out", f"{NAME}/verbs")),
    (".", ("data", "text", f"{NAME}/text.txt", "--out", "words")),
]


@pytest.mark.parametrize(("cwd", "args"), REFUSED, ids=lambda value: ascii(value)[:60])
def test_name_that_is_not_utf8_is_refused_in_one_sentence(folder, cwd, args):
    before = {*folder.rglob("*")}
    done = run_verb(*args, cwd=folder / cwd)
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert r"caf\udce9" in error
    assert "not valid UTF-8" in error
    assert r"$'" in hint
    assert r"caf\351" in hint
    assert {*folder.rglob("*")} == before


def test_help_is_printed_in_a_folder_that_is_not_utf8(folder):
    assert run_verb("train", "--help", cwd=folder / NAME).returncode == 0


def test_interpreter_in_a_folder_that_is_not_utf8_leaves_no_half_run(folder, monkeypatch):
    """A virtual environment there: the plan of a run names it, and is written after the run directory is made."""
    python = folder / NAME / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    done = run_verb("launch", "--out", "run", "--", "script.py", cwd=folder)
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: \S*caf\\udce9/python: not UTF-8, as the paths of a run must be", done.stderr.splitlines()[0]
    )
    assert not (folder / "run").exists()
