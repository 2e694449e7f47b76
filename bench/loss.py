"""What does each sync strategy cost in loss, at equal tokens? Real runs on local ranks, beside one process alone.

    python bench/loss.py --data FOLDER [--shape small|char] [--syncs ddp,int8,…] [--shares 1:1] [--seeds 1,2,3]
                         [--batch 16] [--steps 2000] [--dtype bf16|fp32] [--device cpu|cuda] [--at-once N] [--minutes M]
                                                                       run what is missing, for at most so long
    python bench/loss.py --table                                       what is there

Loss does not depend on the link, so no network is needed: the ranks train here, with the Sync that a fleet would have.
Ranks on a GPU share one, and exchange by Gloo as those of different machines do.
Every run that ends adds a line to bench/loss.jsonl; a line that is there is not run again, so the bench can be stopped
at any time and goes on another day. `small` is the character model narrowed to about 1M parameters.

The penalty is the mean over seeds of (validation loss / one process's) - 1, over the whole validation split; one
process's on the same device, or else on the other one. The training loss is the mean of the last 100 steps. Rounding
alone makes two runs differ, so ddp has a row as well.
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
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from evener.core.model.corpus import load_corpus
from evener.core.run.rundir import RunDir

RESULTS = Path(__file__).with_name("loss.jsonl")
SHAPES = {"small": ["--num-layers", "5", "--num-heads", "4", "--width", "128"], "char": []}
SYNC_STRATEGIES = (
    "ddp",
    "packed",
    "bf16",
    "int8",
    "int4",
    "powersgd:4",
    "powersgd:16",
    "diloco:10",
    "diloco:30",
    "diloco:100",
    "diloco:10:int8",
    "diloco:10:int8:streamed",
    "diloco:10:int4:streamed",
    "diloco:30:int8",
    "diloco:30:int4",
)
TRAIN_LOSS_STEPS = 100  # steps whose losses are the training loss
ResultRow = dict[str, Any]  # what a run came to, in RESULTS


class RunKey(NamedTuple):
    """What a run is of."""

    corpus: str
    shape: str
    device: str
    dtype: str
    sync: str
    shares: str  # of each rank: "1" is one process, "9:5:2" are three ranks
    batch: int
    steps: int
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a prepared folder: evener data text FILE --tokenizer char --out …")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--syncs", default=",".join(SYNC_STRATEGIES))
    parser.add_argument("--shares", default="1:1", help="of each rank, as `train` takes them: 9:5:2 are three ranks")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens that all ranks have together")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--at-once", type=int, default=1, help="runs")
    parser.add_argument("--minutes", type=float, help="begin no run that would end later")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        if options.data is None:
            parser.error("--data: which corpus?")
        run_missing(options)
    print(format_table())


def run_missing(options: argparse.Namespace) -> None:
    began, longest_s = time.monotonic(), 0.0
    keys, running, failed = missing_runs(options), dict[Future[ResultRow], RunKey](), list[str]()
    with ThreadPoolExecutor(options.at_once) as pool:
        while True:
            left_s = (options.minutes or 1e9) * 60 - (time.monotonic() - began)
            while len(running) < options.at_once and left_s >= 1.1 * longest_s and (key := next(keys, None)):
                print(f"{key.sync}, seed {key.seed} …", flush=True)
                running[pool.submit(train_run, options.data, key, options.at_once)] = key
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(ended)
                if ended.exception():
                    failed.append(f"{key}: {ended.exception()}")
                    continue
                row = ended.result()
                longest_s = max(longest_s, row["took_s"])
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if failed:
        sys.exit("\n\n".join(failed))


def missing_runs(options: argparse.Namespace) -> Iterator[RunKey]:
    """Seed by seed, so that a bench that was stopped has compared all of them."""
    there = {row_key(row) for row in load_rows()}
    runs = [("one process", "1"), *((sync, options.shares) for sync in options.syncs.split(","))]
    for seed in map(int, options.seeds.split(",")):
        for sync, shares in runs:
            key = RunKey(options.data.name, options.shape, options.device, options.dtype, sync, shares, options.batch,
                      options.steps, seed)  # fmt: skip
            if key not in there:
                yield key


def train_run(data: Path, key: RunKey, at_once: int) -> ResultRow:
    """One run to its end, as its line."""
    ranks = key.shares.count(":") + 1
    threads = max(1, (os.cpu_count() or 1) // (ranks * at_once))
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "data": data, "model": "char", "dropout": 0, "steps": key.steps, "seed": key.seed, "batch": key.batch,
            "threads": threads, "lr": 1e-3, "eval-every": 0, "eval-tokens": load_corpus(data).num_tokens("val"),
            "checkpoint-every": 0, "verify-every": 200, "device": key.device, "compile": "off", "dtype": key.dtype,
            "shares": key.shares, "out": f"{folder}/run",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()] + SHAPES[key.shape]
        words += [] if ranks == 1 else ["--sync", key.sync, "--backend", "gloo"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        argv = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "evener.worker", *words]
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}\n{done.stderr[-2000:]}")
        rundir = RunDir(f"{folder}/run")
        manifest, records = rundir.manifest(), rundir.records(0)
        assert manifest.result is not None
        return {
            **key._asdict(),
            "ranks": ranks,
            "params": manifest.num_params,
            "val_loss": manifest.result.val_loss,
            "train_loss": statistics.mean(
                record.loss for record in records[-TRAIN_LOSS_STEPS:] if record.loss is not None
            ),
            "bytes_per_step": statistics.mean(record.bytes for record in records),
            "errors": [round(record.fidelity.error, 4) for record in records if record.fidelity],
            "took_s": round(time.monotonic() - began),
            "date": time.strftime("%Y-%m-%d"),
        }


def load_rows() -> list[ResultRow]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def row_key(row: ResultRow) -> RunKey:
    return RunKey(**{name: row[name] for name in RunKey._fields})


def format_table() -> str:
    """In Markdown, a line a strategy: the mean over the seeds that one process has too, and how far they lie apart."""
    groups: dict[tuple[str, str, int, int, str], dict[tuple[str, str, str], dict[int, ResultRow]]]
    groups = defaultdict(lambda: defaultdict(dict))
    for row in load_rows():
        key = row_key(row)
        group = groups[key.corpus, key.shape, key.batch, key.steps, key.dtype]
        group[key.sync, key.shares, key.device][key.seed] = row
    lines: list[str] = []
    for (corpus, shape, batch, steps, dtype), found in groups.items():
        alone = {device: by_seed for (sync, _, device), by_seed in found.items() if sync == "one process"}
        if not alone:
            continue
        elsewhere = {seed: row for by_seed in alone.values() for seed, row in by_seed.items()}
        params = next(iter(elsewhere.values()))["params"] / 1e6
        lines += [f"### {corpus}, {shape}: {params:.1f}M parameters, {steps} steps of {batch} × 256 tokens, {dtype}\n",
                  "| | shares | on | seeds | validation loss | beside one process | of the seeds | training loss | "
                  "beside one process | a step sends |",
                  "|:--|--:|:--|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
        for (sync, shares, device), by_seed in sorted(found.items(), key=lambda item: item[0][0] != "one process"):
            beside = elsewhere | alone.get(device, {})
            seeds = sorted(by_seed.keys() & beside.keys())
            if not seeds:
                continue
            mean = {name: statistics.mean(by_seed[seed][name] for seed in seeds)
                    for name in ("val_loss", "train_loss", "bytes_per_step")}  # fmt: skip
            more = {name: [by_seed[seed][name] / beside[seed][name] - 1 for seed in seeds]
                    for name in ("val_loss", "train_loss")}  # fmt: skip
            spread = " … ".join(format_percent(end(more["val_loss"])) for end in (min, max)[: len(seeds)])
            lines.append(f"| {sync} | {shares} | {device} | {len(seeds)} | {mean['val_loss']:.4f} | "
                         f"{format_percent(statistics.mean(more['val_loss']))} | {spread} | {mean['train_loss']:.4f} | "
                         f"{format_percent(statistics.mean(more['train_loss']))} | "
                         f"{mean['bytes_per_step'] / 1e6:.2f} MB |")  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def format_percent(share: float) -> str:
    return f"{share:+.2%}".replace("-", "−")


if __name__ == "__main__":
    main()
