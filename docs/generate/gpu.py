"""Write docs/figures/gpu.md: the newest measurements of each GPU, from bench/gpu.jsonl. `make docs-generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evener.core.base.units import format_count, format_seconds

PAGE = Path(__file__).parents[1] / "figures" / "gpu.md"
RESULTS = Path(__file__).parents[2] / "bench" / "gpu.jsonl"
BEGINNING = """# GPUs, measured

Generated from `bench/gpu.jsonl` by `make docs-generate`. `python bench/gpu.py --nanogpt DIR` measures a GPU in at most
eight minutes, and appends its rows to that file. The model is `gpt2`, of 124M parameters.
"""
NOT_MEASURED = "\nNo GPU was measured yet.\n"
WHAT = {
    "nanogpt": "evener beside nanoGPT's model and loop, both compiled, bf16, in one run",
    "compute": "the operations of a step, not compiled",
    "one": "one rank, not compiled",
    "two": "two ranks that share the GPU, by Gloo",
    "mixed": "a rank on the GPU and one on the CPU, by Gloo",
    "sharded": "weights sharded by FSDP2, group of one, fp32",
    "tests": "`tests/gpu`",
}


def page(results: Path = RESULTS) -> str:
    """Return the text of the page: a table for each device, with the newest row of each section."""
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    newest: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if not row["quick"]:
            newest.setdefault(row["device"], {})[row["section"]] = row
    text = BEGINNING
    for device, sections in newest.items():
        text += f"\n## {device}\n\n| what | figure | torch | date |\n|---|---|---|---|\n"
        for section in sorted(sections, key=[*WHAT].index):
            row = sections[section]
            cells = (WHAT[section], describe(row).replace("|", "\\|"), row["torch"], row["date"])
            text += f"| {' | '.join(cells)} |\n"
    return text if newest else text + NOT_MEASURED


def describe(row: dict[str, Any]) -> str:
    """Return what a section found, or why it did not."""
    if why := row.get("error"):
        return f"failed: {why}"
    if why := row.get("left_out"):
        return f"not measured: {why}"
    match row["section"]:
        case "nanogpt":
            low, high = row["ratio_interval"]
            mfu = "not known" if row["published_mfu"] is None else f"{row['published_mfu']:.2f}"
            return (
                f"{format_count(row['evener_tokens_per_s'])} tokens/s, MFU {mfu} of the published peak; "
                f"{row['ratio']:.3f} of nanoGPT's tokens/s ({low:.3f} to {high:.3f}), {row['pairs']} pairs"
            )
        case "compute":
            return f"a step of {format_seconds(row['step_s'])}, MFU {row['mfu']:.2f} of torch.mm; {row['explanation']}"
        case "sharded":
            return (
                f"a step of {format_seconds(row['step_s'])} by {row['backend']}, {format_seconds(row['whole_step_s'])} "
                f"unsharded; losses within {row['loss_off']:.1g}"
            )
        case "tests":
            return str(row["result"])
    predicted, agree = row["predicted_step_s"], row["replicas_agree"]
    beside = (
        "not predicted"
        if predicted is None
        else f"predicted {format_seconds(predicted)}, {predicted / row['step_p50_s'] - 1:+.0%}"
    )
    replicas = "" if agree is None else f"; replicas {'agree' if agree else 'differ'}"
    return (
        f"{format_count(row['tokens_per_s'])} tokens/s, shares {' : '.join(map(str, row['shares']))}, a step of "
        f"{format_seconds(row['step_p50_s'])}, {beside}{replicas}"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
