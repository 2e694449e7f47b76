"""Find the exception that ended a program, in what Python itself prints."""

from __future__ import annotations

import subprocess
import sys

from evener.launch.script.python_traceback import last_exception

PROGRAM = """
import json
def load(path):
    try:
        {}["lr"]
    except KeyError:
        json.loads("{")
print("epoch 3")
load("x")
"""


def stderr_of(program: str, tmp_path) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(program)
    return subprocess.run([sys.executable, path], capture_output=True, text=True, check=False).stderr.splitlines()


def test_last_exception_of_a_chain_is_named_with_the_line_of_the_program(tmp_path) -> None:
    lines = stderr_of(PROGRAM, tmp_path)
    found = last_exception(["a warning", *lines, "what a library prints at its end"])
    assert found is not None
    assert found.text.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert found.where == "train.py, line 7"
    assert found.traceback[0] == "Traceback (most recent call last):"
    assert found.text in found.traceback


def test_prefix_of_torch_is_taken_off(tmp_path) -> None:
    found = last_exception([f"[rank1]: {line}" for line in stderr_of("raise ValueError('no\\nsuch')", tmp_path)])
    assert found is not None
    assert (found.text, found.where) == ("ValueError: no", "train.py, line 1")


def test_lines_without_a_complete_traceback_have_no_exception(tmp_path) -> None:
    cut = stderr_of(PROGRAM, tmp_path)[-4:-1]
    assert last_exception(["Traceback (most recent call last):", *cut]) is None
    assert last_exception(["ValueError: this was printed"]) is None


def test_syntax_error_is_named(tmp_path) -> None:
    path = tmp_path / "main.py"
    path.write_text("import broken\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    found = last_exception(done.stderr.splitlines())
    assert found is not None
    assert found.text.startswith("SyntaxError: ")


def test_exceptions_that_ended_nothing_are_passed_over(tmp_path) -> None:
    """What is ignored, met in a thread or at exit, or was survived long ago."""
    fatal = stderr_of("raise ValueError('no such layer')", tmp_path)
    ignored = stderr_of("class A:\n    def __del__(self): raise KeyError('x')\na = A()\ndel a\n", tmp_path)
    at_exit = stderr_of("import atexit\natexit.register(lambda: {}['x'])\n", tmp_path)
    in_thread = stderr_of("import threading\nthreading.Thread(target=lambda: {}['x']).start()\n", tmp_path)
    for later in (ignored, at_exit, in_thread):
        assert any("Traceback" in line for line in later)
        found = last_exception([*fatal, *later])
        assert found is not None
        assert found.text == "ValueError: no such layer"
    assert last_exception([*fatal, *["epoch"] * 100]) is None


def test_traceback_after_a_progress_bar_is_found(tmp_path) -> None:
    fatal = stderr_of("raise ValueError('no such layer')", tmp_path)
    found = last_exception([f"\r 50%|████ | 5/10 [00:01<00:01,  4.9it/s]{fatal[0]}", *fatal[1:]])
    assert found is not None
    assert found.text == "ValueError: no such layer"


def test_whole_message_is_kept_and_exception_of_a_worker_is_named(tmp_path) -> None:
    program = """
import torch
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i):
        raise KeyError("no such sample")
for _ in DataLoader(Data(), num_workers=1):
    pass
"""
    found = last_exception(stderr_of(program, tmp_path))
    assert found is not None
    assert (found.text, found.where) == ("KeyError: 'no such sample'", "train.py, line 7")
    found = last_exception(stderr_of("raise RuntimeError('Error(s) in loading:\\n\tMissing key(s): a')", tmp_path))
    assert found is not None
    assert "Missing key(s): a" in "\n".join(found.traceback)
