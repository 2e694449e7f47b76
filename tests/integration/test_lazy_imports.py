"""Verbs that need no worker run without importing torch or other heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCH = {"torch", "safetensors", "accelerate", "transformers"}  # what loads torch

WITHOUT = """
import sys
from typer.main import get_command
from evener.cli.main import app
sys.modules |= dict.fromkeys({without!r})  # to import one of them raises ImportError
def run(words):
    try:
        get_command(app).main(words, prog_name="evener", standalone_mode=False)
    except SystemExit as ended:
        assert not ended.code, words
def leaves(command, words):
    if not getattr(command, "commands", None):
        yield words
    for name, child in getattr(command, "commands", {{}}).items():
        yield from leaves(child, [*words, name])
"""


def run_without(modules: set[str], code: str, cwd: Path | None = None) -> str:
    code = WITHOUT.format(without=sorted(modules)) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_of_every_verb_imports_nothing_heavy():
    code = 'for words in leaves(get_command(app), []): run([*words, "--help"])'
    assert run_without({*TORCH, "numpy", "matplotlib"}, code).count("Usage:") > 20


def test_verbs_without_worker_run_without_torch(tmp_path):
    verbs = [
        ["data", "verbs", "--sentences", "50", "--out", "verbs"],
        ["plan", "--model", "gpt2", "--nodes", "2", "--link", "1GbE", "--compute-tokens-per-s", "500"],
        ["runs", "."],
        ["lab", "drill", "--list"],
    ]
    assert "tokens/s" in run_without(TORCH, f"for words in {verbs!r}: run(words)", tmp_path)
