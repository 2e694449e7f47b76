"""What does measuring cost a launched program? Runs with and without --no-measure, in pairs, on this machine.

    python bench/launch_overhead.py --programs DIR [--pairs 15]

DIR holds a checkout of nanochat; the other program trains GPT-2's shape with transformers' Trainer. Each has two ranks
on a core each. The time of a step is what the program itself prints: the median over its steps, or for the Trainer
its mean. A figure is the median over pairs of the ratio of two runs side by side, with the 90 % interval in which it
lies. Every program adds a line to bench/launch_overhead.jsonl. Nothing else may be running.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import median_interval
from programs import EVENER_COMMAND, add_gloo_group, prepare_nanochat

RESULTS = Path(__file__).with_name("launch_overhead.jsonl")
NANOCHAT = (
    "-m scripts.base_train --device-type=cpu --depth=4 --max-seq-len=256 --device-batch-size=1 --total-batch-size=512 "
    "--num-iterations=30 --eval-every=-1 --core-metric-every=-1 --sample-every=-1 --window-pattern L"
)
WARMUP_STEPS = 5
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 512, (128,))), "labels": x} for _ in range(512)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=192, n_layer=4, n_head=4))
args = TrainingArguments("out", max_steps=40, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                         save_strategy="no", disable_tqdm=True, logging_steps=10)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
if trainer.args.process_index == 0:
    print("steps per second", trainer.state.log_history[-1]["train_steps_per_second"], flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evener-overhead-") as name:
        folder = Path(name)
        nanochat = folder / "nanochat"
        shutil.copytree(options.programs / "nanochat", nanochat, ignore=shutil.ignore_patterns(".git"))
        add_gloo_group(nanochat)
        base = prepare_nanochat(options.programs, folder)
        (folder / "trainer.py").write_text(TRAINER)
        compare("nanochat depth 4", lambda flags: nanochat_step_s(nanochat, base, flags), options.pairs)
        compare("Trainer, GPT-2 shape", lambda flags: trainer_step_s(folder, flags), options.pairs)


def compare(name: str, step_s: Callable[[list[str]], float], pairs: int) -> None:
    """Time a program's step with and without measuring, in turns; print the ratio and add it to the results."""
    ratios, plain_s = [], []
    for pair in range(pairs):
        order: list[list[str]] = [[], ["--no-measure"]] if pair % 2 == 0 else [["--no-measure"], []]
        took_s = {bool(flags): step_s(flags) for flags in order}
        ratios.append(took_s[False] / took_s[True])
        plain_s.append(took_s[True])
        print(f"{name}: pair {pair + 1}: {ratios[-1]:.4f}", flush=True)
    low, high = median_interval(ratios)
    row = {"program": name, "ratio": statistics.median(ratios), "low": low, "high": high, "pairs": ratios,
           "step_s": statistics.median(plain_s), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{name}: {row['ratio']:.4f} times as long with measuring ({low:.4f} to {high:.4f}, {pairs} pairs)")


def nanochat_step_s(folder: Path, base: Path, flags: list[str]) -> float:
    printed = launch(folder, flags, NANOCHAT.split(), NANOCHAT_BASE_DIR=str(base))
    times_ms = [float(value) for value in re.findall(r"\| dt: ([\d.]+)ms", printed)]
    return statistics.median(times_ms[WARMUP_STEPS:]) / 1e3


def trainer_step_s(folder: Path, flags: list[str]) -> float:
    return 1 / float(re.findall(r"steps per second ([\d.]+)", launch(folder, flags, ["trainer.py"]))[0])


def launch(folder: Path, flags: list[str], program: list[str], **variables: str) -> str:
    """Launch a program with two ranks here; return what rank 0 printed."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    argv = [*EVENER_COMMAND, "launch", "--fleet", "local", "--ranks", "2", "--out", "runs/one", *flags, "--", *program]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}:\n{done.stdout}{done.stderr}")
    return "".join(path.read_text() for path in sorted((folder / "runs/one/logs").glob("*.0.log")))


if __name__ == "__main__":
    main()
