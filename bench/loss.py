"""What does each way of agreeing cost in loss, at equal tokens? Real runs on local ranks, beside one process alone.

    python bench/loss.py --data FOLDER [--shape small|char] [--syncs ddp,int8,…] [--ranks 2] [--seeds 1,2,3]
                         [--batch 16] [--steps 2000] [--dtype bf16|fp32] [--minutes M]
                                                                       run what is missing, for at most so long
    python bench/loss.py --table                                       what is there

Loss does not depend on the link, so no network is needed: the ranks train here, with the Sync that a fleet would have.
Every run that ends adds a line to bench/loss.jsonl; a line that is there is not run again, so the bench can be stopped
at any time and goes on another day. `small` is the character model narrowed to about 1M parameters.

The penalty is that of the mean over seeds: (validation loss / one process's) - 1, over the whole validation split; the
training loss is the mean of the last 100 steps. Rounding alone makes two runs differ, so ddp has a row as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from evener.core.corpus import load_corpus
from evener.core.rundir import RunDir

RESULTS = Path(__file__).with_name("loss.jsonl")
SHAPES = {"small": ["--num-layers", "5", "--num-heads", "4", "--width", "128"], "char": []}
SYNCS = ("ddp", "packed", "bf16", "int8", "int4", "powersgd:4", "powersgd:16", "diloco:10", "diloco:30", "diloco:100",
         "diloco:10:int8", "diloco:10:int8:streamed", "diloco:10:int4:streamed", "diloco:30:int8",
         "diloco:30:int4")  # fmt: skip
LAST = 100  # steps whose losses are the training loss
Key = tuple[str, str, str, str, int, int, int, int]  # corpus, shape, dtype, sync, ranks, batch, steps, seed
Line = dict[str, Any]  # what a run came to, in RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a prepared folder: evener data text FILE --tokenizer char --out …")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--syncs", default=",".join(SYNCS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens that all ranks have together")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--minutes", type=float, help="begin no run that would end later")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        if options.data is None:
            parser.error("--data: which corpus?")
        run_missing(options)
    print_table()


def run_missing(options: argparse.Namespace) -> None:
    began, longest_s = time.monotonic(), 0.0
    ways = [("one process", 1), *((sync, options.ranks) for sync in options.syncs.split(","))]
    # Seed by seed, so that a bench that was stopped has compared all of them.
    for seed in map(int, options.seeds.split(",")):
        for sync, ranks in ways:
            key = (options.data.name, options.shape, options.dtype, sync, ranks, options.batch, options.steps, seed)
            if key in {key_of(row) for row in rows()}:
                continue
            left_s = (options.minutes or 1e9) * 60 - (time.monotonic() - began)
            if left_s < 1.1 * longest_s:
                return
            print(f"{sync}, seed {seed} …", flush=True)
            took = time.monotonic()
            row = run(options.data, key)
            longest_s = max(longest_s, time.monotonic() - took)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


def run(data: Path, key: Key) -> Line:
    """One run to its end, as its line."""
    corpus, shape, dtype, sync, ranks, batch, steps, seed = key
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "data": data, "model": "char", "dropout": 0, "steps": steps, "seed": seed, "batch": batch,
            "threads": threads, "lr": 1e-3, "eval-every": 0, "eval-tokens": load_corpus(data).num_tokens("val"),
            "checkpoint-every": 0, "verify-every": 200, "device": "cpu", "compile": "off", "dtype": dtype,
            "shares": ":".join(["1"] * ranks), "out": f"{folder}/run",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()] + SHAPES[shape]
        words += [] if ranks == 1 else ["--sync", sync]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        argv = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "evener.worker", *words]
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        if done.returncode != 0:
            sys.exit(f"{' '.join(argv)}\n{done.stderr[-2000:]}")
        rundir = RunDir(f"{folder}/run")
        manifest, records = rundir.manifest(), rundir.records(0)
        assert manifest.result is not None
        return {
            "corpus": corpus, "shape": shape, "sync": sync, "ranks": ranks, "batch": batch, "steps": steps,
            "seed": seed, "params": manifest.num_params, "dtype": dtype,
            "val_loss": manifest.result.val_loss,
            "train_loss": statistics.mean(record.loss for record in records[-LAST:] if record.loss is not None),
            "bytes_per_step": statistics.mean(record.bytes for record in records),
            "errors": [round(record.fidelity.error, 4) for record in records if record.fidelity],
            "took_s": round(time.monotonic() - began), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip


def rows() -> list[Line]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def key_of(row: Line) -> Key:
    return (
        row["corpus"],
        row["shape"],
        row["dtype"],
        row["sync"],
        row["ranks"],
        row["batch"],
        row["steps"],
        row["seed"],
    )


def print_table() -> None:
    """One line a strategy: the mean over the seeds that one process has too, and how far they lie apart."""
    groups: dict[tuple[str, str, int, int, str], dict[tuple[str, int], dict[int, Line]]]
    groups = defaultdict(lambda: defaultdict(dict))
    for row in rows():
        group = groups[row["corpus"], row["shape"], row["batch"], row["steps"], row["dtype"]]
        group[row["sync"], row["ranks"]][row["seed"]] = row
    for (corpus, shape, batch, steps, dtype), found in groups.items():
        alone = found.pop(("one process", 1), {})
        if not alone:
            continue
        params = next(iter(alone.values()))["params"]
        print(f"\n{corpus}, {shape} ({params / 1e6:.1f}M parameters), {steps} steps of {batch} × 256 tokens, {dtype}\n")
        print("| | ranks | seeds | validation loss | penalty | of the seeds | training loss | bytes a step |")
        print("|:--|--:|--:|--:|--:|--:|--:|--:|")
        for (sync, ranks), by_seed in [(("one process", 1), alone), *found.items()]:
            seeds = sorted(by_seed.keys() & alone.keys())
            if not seeds:
                continue
            mine, theirs = ([one[seed]["val_loss"] for seed in seeds] for one in (by_seed, alone))
            penalties = [a / b - 1 for a, b in zip(mine, theirs, strict=True)]
            train = statistics.mean(by_seed[seed]["train_loss"] for seed in seeds)
            sent = statistics.mean(by_seed[seed]["bytes_per_step"] for seed in seeds)
            spread = f"{min(penalties):+.2%} … {max(penalties):+.2%}"
            print(f"| {sync} | {ranks} | {len(seeds)} | {statistics.mean(mine):.4f} | "
                  f"{statistics.mean(mine) / statistics.mean(theirs) - 1:+.2%} | {spread} | {train:.4f} | "
                  f"{sent / 1e6:.2f} MB |")  # fmt: skip


main()
