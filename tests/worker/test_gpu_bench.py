"""bench/gpu.py runs the same sections on a CPU, with tiny sizes, and a section that fails is a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..conftest import ENV
from ..tiers import exhaustively

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu.py"


def run_sections(folder: Path, names: str, device: str) -> list[dict[str, object]]:
    """Return the rows that the program appends."""
    argv = [sys.executable, str(PROGRAM), "--quick", "--device", device, "--only", names,
            "--results", str(folder / "rows.jsonl")]  # fmt: skip
    done = subprocess.run(argv, env=ENV, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = (folder / "rows.jsonl").read_text()
    assert done.stdout == rows
    return [json.loads(line) for line in rows.splitlines()]


@pytest.mark.parametrize("names", ["sharded,nanogpt", *exhaustively("compute,one,two,mixed,tests")])
def test_sections_run_on_a_cpu(tmp_path, names):
    rows = {str(row["section"]): row for row in run_sections(tmp_path, names, "cpu")}
    assert ",".join(rows) == names
    assert not any("error" in row for row in rows.values()), rows
    assert {row["quick"] for row in rows.values()} == {True}
    assert {row["torch"] for row in rows.values()} == {torch.__version__}
    if "sharded" in rows:
        assert rows["sharded"]["backend"] == "gloo"
        assert rows["sharded"]["loss_off"] < 1e-6
        assert rows["nanogpt"]["left_out"] == "needs --nanogpt DIR"
    else:
        assert rows["compute"]["mfu"] > 0
        assert rows["one"]["predicted_step_s"] > 0
        assert rows["two"]["predicted_step_s"] > 0
        assert rows["two"]["shares"] == [8, 8]
        assert rows["mixed"]["shares"] == [15, 1]
        assert rows["two"]["replicas_agree"] is rows["mixed"]["replicas_agree"] is True
        assert rows["one"]["loss"] == pytest.approx(rows["mixed"]["loss"], rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_section_that_fails_is_a_row_with_its_error(tmp_path):
    sharded, nanogpt = run_sections(tmp_path, "sharded,nanogpt", "cuda")
    assert "cuda" in str(sharded["error"])
    assert sharded["device"] == nanogpt["device"] == "no GPU that torch can use"
    assert "error" not in nanogpt
