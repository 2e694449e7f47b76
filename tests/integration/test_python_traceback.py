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
    assert found.traceback[-1] == found.text


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
