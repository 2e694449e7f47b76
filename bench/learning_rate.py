"""Is the default learning rate within 3 % of the best one? Four sizes, each with a few multiples of the default.

    python bench/learning_rate.py --data FOLDER [--models g2,g3,g4,g6] [--factors 0.33,0.6,1,1.7,3] [--batch 16]
                                  [--seconds 120] [--threads 1]

Each run takes as many steps as `--seconds` on these threads are enough for, measured by a few steps beforehand, and
ends with the loss of 131,072 tokens of the validation split. Every run adds a line to bench/learning_rate.jsonl, and
runs that are there are not repeated; at the end the losses stand beside each other. Nothing is timed: other work may
run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from evener.core.model.corpus import load_corpus
from evener.core.model.shape import preset_shape
from evener.core.run.resolve import default_learning_rate
from evener.core.run.rundir import RunDir

RESULTS = Path(__file__).with_name("learning_rate.jsonl")
KEY = ("corpus", "model", "batch", "factor")
TRIAL_STEPS = 12
EVAL_TOKENS = 131_072
BOUND = 1.03  # times the best loss that the default may have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder")
    parser.add_argument("--models", default="g2,g3,g4,g6")
    parser.add_argument("--factors", default="0.33,0.6,1,1.7,3")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120.0, help="of one run")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for model in options.models.split(","):
        steps = 0
        for factor in map(float, options.factors.split(",")):
            key = (options.data.name, model, options.batch, factor)
            known = [row for row in load_rows() if tuple(row[name] for name in KEY) == key]
            if known:
                steps = known[0]["steps"]
                continue
            steps = steps or count_steps(options, model)
            row = dict(zip(KEY, key, strict=True)) | measure(options, model, factor, steps)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print_table()


def count_steps(options: argparse.Namespace, model: str) -> int:
    """Return how many steps of this model fit into the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(options, model, 1.0, TRIAL_STEPS, Path(folder) / "run")
        walls = sorted(record.wall_s for record in run.records(0))
        return int(options.seconds / walls[len(walls) // 2])


def measure(options: argparse.Namespace, model: str, factor: float, steps: int) -> dict[str, Any]:
    """Train one run; return its learning rate and losses."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(options, model, factor, steps, Path(folder) / "run")
        manifest = run.manifest()
        assert manifest.result is not None
        row = {"lr": manifest.spec.train.lr, "steps": steps, "val_loss": manifest.result.val_loss,
               "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        print(f"{model}: {row}", flush=True)
        return row


def train(options: argparse.Namespace, model: str, factor: float, steps: int, out: Path) -> RunDir:
    """Train a run of so many steps with `factor` times the default learning rate."""
    corpus = load_corpus(options.data)
    shape = preset_shape(model, corpus.vocab_size)
    lr = factor * default_learning_rate(shape.width, options.batch * shape.block_size)
    flags = {
        "data": options.data, "model": model, "steps": steps, "batch": options.batch, "lr": f"{lr:.3g}",
        "threads": options.threads, "eval-every": 0, "eval-tokens": EVAL_TOKENS, "checkpoint-every": 0,
        "verify-every": 0, "compile": "off", "device": "cpu", "out": out,
    }  # fmt: skip
    argv = [sys.executable, "-m", "evener.worker", *(f"--{name}={value}" for name, value in flags.items())]
    env = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stderr[-2000:]}")
    return RunDir(str(out))


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def print_table() -> None:
    """Print the losses by model and batch, and how much more than the best the default has."""
    groups: defaultdict[tuple[str, str, int], dict[float, dict[str, Any]]] = defaultdict(dict)
    for row in load_rows():
        groups[row["corpus"], row["model"], row["batch"]][row["factor"]] = row
    for (corpus, model, batch), rows in groups.items():
        best = min(row["val_loss"] for row in rows.values())
        ratio = rows[1.0]["val_loss"] / best if 1.0 in rows else float("nan")
        losses = ", ".join(f"{row['lr']:g}: {row['val_loss']:.3f}" for _, row in sorted(rows.items()))
        verdict = "within 3 %" if ratio <= BOUND else "NOT within 3 %"
        print(f"{corpus}, {model}, batch {batch}: {losses}; the default has {ratio:.3f} times the best: {verdict}")


if __name__ == "__main__":
    main()
