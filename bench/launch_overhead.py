"""What does measuring cost a launched program? Steps with and without it in turns, in the same processes.

    python bench/launch_overhead.py --programs DIR [--steps 400]

DIR holds a checkout of nanochat, of which base_train with depth 4 is measured; the other program trains GPT-2's shape
with transformers' Trainer. Each has two ranks here, on a core each. Every second step measures nothing. Two figures
make up the cost:

    on the main thread    processor time of a step that is measured over that of the next one: median over pairs, with
                          the 90 % interval in which it lies
    beside it             processor time of the threads that exchange and write the records, over the steps' wall time

The higher of the two ranks counts. Every program adds a line to bench/launch_overhead.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import median_interval
from programs import EVENER_COMMAND, add_gloo_group, prepare_nanochat

RESULTS = Path(__file__).with_name("launch_overhead.jsonl")
NANOCHAT = (
    "module scripts.base_train --device-type=cpu --depth=4 --max-seq-len=256 --device-batch-size=1 "
    "--total-batch-size=512 --eval-every=-1 --core-metric-every=-1 --sample-every=-1 --window-pattern L"
)
TRAINER = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 512, (128,))), "labels": x} for _ in range(512)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=192, n_layer=4, n_head=4))
args = TrainingArguments("out", max_steps=int(sys.argv[1]), per_device_train_batch_size=4, use_cpu=True, report_to=[],
                         save_strategy="no", disable_tqdm=True, logging_steps=10)
Trainer(model, args, train_dataset=data).train()
"""
# Runs a program; after every update it turns StepMeasurement off or on, and notes what the step took.
ALTERNATE = """
import atexit, gc, json, os, runpy, sys, threading, time
from torch.optim.optimizer import register_optimizer_step_post_hook as register
from evener.worker.script.step_measurement import StepMeasurement
measurement = next(one for one in gc.get_objects() if isinstance(one, StepMeasurement))
steps, before = [], None

def beside_s():
    threads = [one for one in threading.enumerate() if one.name in ("evener-steps", "vitals")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threads)

def after_update(optimizer, *_):
    global before
    if measurement._leader is None or optimizer is not measurement._leader():
        return
    now = time.thread_time(), time.perf_counter(), beside_s()
    if before is not None:
        steps.append([not measurement._is_off, *(b - a for a, b in zip(before, now))])
    before, measurement._is_off = now, not measurement._is_off

register(after_update)

def write():
    measurement._is_off = False
    with open(os.path.join(os.environ["STEPS_FOLDER"], os.environ["RANK"]), "w") as file:
        json.dump(steps, file)

atexit.register(write)
kind, name = sys.argv[1:3]
del sys.argv[:2]
if kind == "module":
    runpy.run_module(name, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(name, run_name="__main__")
"""
WARMUP_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evener-overhead-") as name:
        folder = Path(name)
        nanochat = folder / "nanochat"
        shutil.copytree(options.programs / "nanochat", nanochat, ignore=shutil.ignore_patterns(".git"))
        add_gloo_group(nanochat)
        base = prepare_nanochat(options.programs, folder)
        (folder / "trainer.py").write_text(TRAINER)
        flags = [*NANOCHAT.split(), f"--num-iterations={options.steps}"]
        compare("nanochat depth 4", run(nanochat, flags, NANOCHAT_BASE_DIR=str(base)))
        compare("Trainer, GPT-2 shape", run(folder, ["path", "trainer.py", str(options.steps)]))


def run(folder: Path, words: list[str], **variables: str) -> list[list[list[float]]]:
    """Launch a program with two ranks here; return of each rank's steps [is measured, thread s, wall s, beside s]."""
    (folder / "alternate.py").write_text(ALTERNATE)
    notes = folder / "steps-of-ranks"
    notes.mkdir(exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "STEPS_FOLDER": str(notes)} | variables
    launch = ["launch", "--fleet", "local", "--ranks", "2", "--out", "runs/one", "--", "alternate.py"]
    done = subprocess.run([*EVENER_COMMAND, *launch, *words], cwd=folder, env=env, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return [json.loads((notes / str(rank)).read_text()) for rank in (0, 1)]


def compare(name: str, ranks: list[list[list[float]]]) -> None:
    """Print what measuring costs, and add it to the results."""
    rows = []
    for steps in ranks:
        steady = steps[WARMUP_STEPS + (not steps[WARMUP_STEPS][0]) :]
        pairs = list(zip(steady[::2], steady[1::2], strict=False))
        ratios = [measured[1] / plain[1] for measured, plain in pairs]
        low, high = median_interval(ratios)
        beside = sum(step[3] for step in steady) / sum(step[2] for step in steady)
        rows.append({"main_thread": statistics.median(ratios), "low": low, "high": high, "beside": beside,
                     "pairs": len(pairs), "step_s": statistics.median(plain[2] for _, plain in pairs)})  # fmt: skip
    row = max(rows, key=lambda row: row["main_thread"] + row["beside"])
    with RESULTS.open("a") as file:
        file.write(json.dumps({"program": name, **row, "date": time.strftime("%Y-%m-%d")}) + "\n")
    main_thread, low, high = row["main_thread"] - 1, row["low"] - 1, row["high"] - 1
    print(f"{name}: {main_thread + row['beside']:.2%} of processor time: {main_thread:.2%} on the main thread "
          f"({low:.2%} to {high:.2%}, {row['pairs']} pairs), {row['beside']:.2%} beside it")  # fmt: skip


if __name__ == "__main__":
    main()
