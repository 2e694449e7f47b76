"""The page about GPUs shows the newest row of each section, and none of a try with tiny sizes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate" / "gpu.py"))["page"]
ROW = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-12-01", "quick": False, "took_s": 1.0}
TRAINED = {"section": "two", "tokens_per_s": 100e3, "shares": [8, 8], "step_p50_s": 0.2, "replicas_agree": True}


def page_of(folder: Path, *rows: dict[str, object]) -> str:
    file = folder / "gpu.jsonl"
    file.write_text("".join(json.dumps(ROW | row) + "\n" for row in rows))
    return PAGE(file)


def test_page_says_that_no_gpu_was_measured(tmp_path):
    assert PAGE(tmp_path / "missing.jsonl").endswith("\nNo GPU was measured yet.\n")
    assert page_of(tmp_path, {"section": "tests", "result": "18 passed", "quick": True}).endswith("measured yet.\n")


def test_page_shows_newest_row_of_each_section(tmp_path):
    page = page_of(
        tmp_path,
        {"section": "tests", "error": "error: no CUDA"},
        TRAINED | {"predicted_step_s": 0.25},
        {"section": "nanogpt", "left_out": "needs --nanogpt DIR"},
        {"section": "tests", "result": "18 passed in 80 s"},
        {"section": "compute", "error": "not finished after 60 s: a | b"},
    )
    assert page.count("## NVIDIA H200\n") == 1
    assert page.splitlines()[-4:] == [
        "| evener beside nanoGPT's model and loop, both compiled, bf16, in one run | not measured: needs --nanogpt DIR "
        "| 2.11.0 | 2026-12-01 |",
        "| the operations of a step, not compiled | failed: not finished after 60 s: a \\| b | 2.11.0 | 2026-12-01 |",
        "| two ranks that share the GPU, by Gloo | 100.0k tokens/s, shares 8 : 8, a step of 200 ms, predicted 250 ms, "
        "+25%; replicas agree | 2.11.0 | 2026-12-01 |",
        "| `tests/gpu` | 18 passed in 80 s | 2.11.0 | 2026-12-01 |",
    ]
    assert "not predicted" in page_of(tmp_path, TRAINED | {"predicted_step_s": None})
