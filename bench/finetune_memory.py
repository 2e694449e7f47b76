"""Is the memory of a fine-tuning predicted? One process, models of random weights in bf16, as published ones are.

    python bench/finetune_memory.py [--only 0.5B] [--threads 2] [--glibc]
    python bench/finetune_memory.py --report

Each cell trains three steps of 4 × 512 tokens in micro-batches of 2, and adds the peak of resident memory and what was
predicted to bench/finetune_memory.jsonl; a cell that is there is not measured again. 60M is a Llama, 0.5B and 1.5B have
the shapes of Qwen2.5. --glibc measures without jemalloc where the machine has it. The peak is that of the process, from
its start to its end, with the pages of the model's files that it has mapped. Needs 18 GiB of memory, 4 GiB of space and
the extra evener[hf].
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from pretrained_llama import make_tokenizer, source_texts

from evener.core.base.units import format_bytes
from evener.core.cluster.allocator import find_jemalloc
from evener.core.model.corpus import load_corpus
from evener.core.model.fine_tuning import FineTuning
from evener.core.model.pretrained import PretrainedModel
from evener.core.run.resolve import make_job
from evener.core.run.rundir import RunDir
from evener.plan.cost.memory import peak_memory

RESULTS = Path(__file__).with_name("finetune_memory.jsonl")
BLOCK_SIZE, BATCH, MICRO_BATCH, STEPS = 512, 4, 2, 3


class Cell(NamedTuple):
    """A model and how it is trained."""

    model: str
    flags: str

    def __str__(self) -> str:
        return f"{self.model} {self.flags}".rstrip()


QWEN = {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 512}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "60M": ("LlamaConfig", {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1376,
                            "num_attention_heads": 8, "num_hidden_layers": 9, "num_key_value_heads": 4,
                            "max_position_embeddings": 512}),
    "0.5B": ("Qwen2Config", QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
                                    "num_hidden_layers": 24}),
    "1.5B": ("Qwen2Config", QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                                    "num_hidden_layers": 28}),
}  # fmt: skip
CELLS = [
    *(Cell(model, flags) for model in ("60M", "0.5B") for flags in ("", "--lora 16", "--recompute")),
    Cell("1.5B", "--lora 16 --quantize nf4"),
    Cell("1.5B", "--lora 16 --quantize nf4 --recompute"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--glibc", action="store_true", help="the C library's allocator, although jemalloc is there")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if not options.report:
        if options.glibc:
            os.environ["MALLOC_CONF"] = ""  # whoever chooses settings of an allocator keeps theirs
        has_jemalloc = find_jemalloc() is not None and not options.glibc
        there = {(row["model"], row["flags"]) for row in load_rows()
                 if (row["jemalloc"], row["threads"]) == (has_jemalloc, options.threads)}  # fmt: skip
        missing = [cell for cell in CELLS if options.only in str(cell) and cell not in there]
        for model in dict.fromkeys(cell.model for cell in missing):
            with tempfile.TemporaryDirectory() as folder:
                make_model(Path(folder) / "model", *CONFIGS[model])
                (Path(folder) / "text.txt").write_text("\n".join(source_texts()[:40]))
                for cell in missing:
                    if cell.model == model:
                        print(f"{cell} …", flush=True)
                        add_row(measure(Path(folder), cell, options.threads))
    report()


def make_model(folder: Path, config_class: str, sizes: dict[str, Any]) -> None:
    """Write a model with random weights in bf16, and a tokenizer."""
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    config = getattr(transformers, config_class)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    make_tokenizer(folder)


def measure(folder: Path, cell: Cell, threads: int) -> dict[str, Any]:
    """Train, and return the row."""
    out = folder / cell.flags.replace(" ", "") if cell.flags else folder / "full"
    words = [str(folder / "text.txt"), "--model", f"hf:{folder / 'model'}", "--block-size", str(BLOCK_SIZE), "--batch",
             str(BATCH), "--micro-batch", str(MICRO_BATCH), "--steps", str(STEPS), "--eval-every", "0",
             "--checkpoint-every", "0", "--threads", str(threads), "--out", str(out), *cell.flags.split()]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "evener", "train", *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{cell}: {done.stderr[-3000:]}")
    manifest = RunDir(str(out)).manifest()
    assert manifest.result is not None
    assert manifest.corpus is not None
    assert isinstance(manifest.shape, PretrainedModel)
    has_jemalloc = manifest.hosts[0].has_jemalloc
    shape = make_job(manifest.spec, manifest.shape, load_corpus(manifest.corpus.path)).shape
    assert isinstance(shape, FineTuning)
    need = peak_memory(shape, manifest.roster, 0, recompute=manifest.spec.model.recompute, has_jemalloc=has_jemalloc)
    return {
        **cell._asdict(),
        "dtype": manifest.roster.members[0].dtype,
        "jemalloc": has_jemalloc,
        "threads": threads,
        "measured_bytes": manifest.result.peak_memory_bytes[0],
        "predicted_bytes": need.total,
        "date": time.strftime("%Y-%m-%d"),
    }


def add_row(row: dict[str, Any]) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def report() -> None:
    for row in load_rows():
        measured, predicted = row["measured_bytes"], row["predicted_bytes"]
        allocator = "jemalloc" if row["jemalloc"] else "glibc"
        print(f"{Cell(row['model'], row['flags'])}, {row['dtype']}, {allocator}: {format_bytes(measured)}, "
              f"predicted {format_bytes(predicted)} ({predicted / measured - 1:+.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
