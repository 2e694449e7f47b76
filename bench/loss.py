"""What does each sync strategy cost in loss, at equal tokens? Real runs on local ranks, beside one process alone.

    python bench/loss.py --data FOLDER [--shape small|char] [--syncs ddp,int8,…] [--shares 1:1] [--seeds 1,2,3]
                         [--batch 16] [--steps 2000] [--lr 1e-3] [--dtype bf16|fp32] [--device cpu|cuda] [--at-once N]
                         [--minutes M]                                 run what is missing, for at most so long
    python bench/loss.py --shape llama --steps 150 …                   of a fine-tuning
    python bench/loss.py --table                                       what is there
    python bench/loss.py --write                                       what the planner takes from it

Loss does not depend on the link, so no network is needed: the ranks train here, with the Sync that a fleet would have.
Ranks on a GPU share one, and exchange by Gloo as those of different machines do.
Every run that ends adds a line to bench/loss.jsonl; a line that is there is not run again. A run that --minutes ends
goes on from its checkpoint the next time. `small` is the character model narrowed to about 1M parameters. The corpus of
reference is Python's library by bytes, `evener data python`: 28M tokens, of which 2000 steps of 16 × 256 tokens read
each at most once. Learning rates are near the best for one process. `llama` fine-tunes all weights of a Llama of 10M
parameters, which the bench trains before on every second module of the library, on functions of the others: prompts
with completions of at most 256 tokens. Its learning rate is ten times the default one, so that there is loss to lose.

A difference is the mean over seeds of (loss / one process's) - 1. The validation loss is that of the whole validation
split, the training loss the mean of the last 100 steps, of a short run of the last third. One process's are those of
the same device, or else of the other one. The margin is 1.65 standard errors, so mean ± margin is a 90 % interval. Its
standard deviation is pooled over all strategies of a shape, since three seeds alone would not tell. Rounding alone
makes two runs differ, so ddp has a row as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evener.core.base.units import pluralize
from evener.core.model.corpus import Corpus, load_corpus
from evener.core.run.roster import parse_sync
from evener.core.run.rundir import RunDir
from evener.corpus.samples import read_samples
from evener.plan.cost.penalty import LossMeasurement, format_loss

RESULTS = Path(__file__).with_name("loss.jsonl")
RUNS = Path(__file__).parents[1] / "experiments" / "loss"  # of runs that have not ended
MEASUREMENTS = Path(__file__).parents[1] / "src" / "evener" / "plan" / "cost" / "loss_measurements.json"
SHAPES = {"small": ["--num-layers", "5", "--num-heads", "4", "--width", "128"], "char": [], "llama": []}
LEARNING_RATES = {"small": 4e-3, "char": 1e-3, "llama": 2e-4}
PRETRAINING_STEPS = 300  # of the Llama
BLOCK = 256  # tokens of a sequence
SYNC_STRATEGIES = (
    "ddp",
    "packed",
    "bf16",
    "int8",
    "int4",
    "powersgd:4",
    "powersgd:16",
    "diloco:3:int8:streamed",
    "diloco:5:int8:streamed",
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
    lr: float
    seed: int


class LossDifference(NamedTuple):
    """How far a loss lies from one process's at equal tokens: (mean over seeds) ± margin is a 90 % interval."""

    mean: float
    margin: float

    @property
    def upper_end(self) -> float:
        return self.mean + self.margin

    def __str__(self) -> str:
        return format_loss(*self)


class Comparison(NamedTuple):
    """The runs of one strategy beside one process alone."""

    key: RunKey  # without a seed
    runs: list[ResultRow]
    alone: list[ResultRow]  # of one process, by the same seeds
    validation: LossDifference
    training: LossDifference

    @property
    def epochs(self) -> float:
        """How often a run read its corpus."""
        return float(self.runs[0]["epochs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a prepared folder: evener data text FILE --tokenizer char --out …")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--syncs", default=",".join(SYNC_STRATEGIES))
    parser.add_argument("--shares", default="1:1", help="of each rank, as `train` takes them: 9:5:2 are three ranks")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens that all ranks have together")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, help="another learning rate than the shape's")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--at-once", type=int, default=1, help="runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="runs that take longer go on the next time")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        MEASUREMENTS.write_text(format_measurements())
        print(f"{MEASUREMENTS} written")
        return
    if not options.table:
        if options.shape == "llama":
            from pretrained_llama import pretrain_llama

            llama = RUNS.parent / "llama"
            llama.mkdir(parents=True, exist_ok=True)
            _, options.data = pretrain_llama(llama, steps=PRETRAINING_STEPS)
        elif options.data is None:
            parser.error("--data: which corpus?")
        run_missing(options)
    print(format_table())


def run_missing(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + options.minutes * 60
    keys, running, failed = missing_runs(options), dict[Future[ResultRow | None], RunKey](), list[str]()
    with ThreadPoolExecutor(options.at_once) as pool:
        while True:
            while len(running) < options.at_once and time.monotonic() < deadline and (key := next(keys, None)):
                print(f"{key.sync}, seed {key.seed} …", flush=True)
                running[pool.submit(train_run, options.data, key, options.at_once, deadline)] = key
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(ended)
                if ended.exception():
                    failed.append(f"{key}: {ended.exception()}")
                elif row := ended.result():
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    shutil.rmtree(run_folder(key))
    if failed:
        sys.exit("\n\n".join(failed))


def missing_runs(options: argparse.Namespace) -> Iterator[RunKey]:
    """Seed by seed, so that a bench that was stopped has compared all of them."""
    there = {row_key(row) for row in load_rows()}
    runs = [("one process", "1"), *((sync, options.shares) for sync in options.syncs.split(","))]
    for seed in map(int, options.seeds.split(",")):
        for sync, shares in runs:
            key = RunKey(options.data.name, options.shape, options.device, options.dtype, sync, shares, options.batch,
                      options.steps, options.lr or LEARNING_RATES[options.shape], seed)  # fmt: skip
            if key not in there:
                yield key


def run_folder(key: RunKey) -> Path:
    return RUNS / "-".join(map(str, key)).replace(" ", "-").replace(":", "_")


def train_run(data: Path, key: RunKey, at_once: int, deadline: float) -> ResultRow | None:
    """Train one run to its end and return its line, or to the deadline and return None."""
    ranks = key.shares.count(":") + 1
    threads = max(1, (os.cpu_count() or 1) // (ranks * at_once))
    corpus, folder = load_corpus(data), run_folder(key)
    model = {"model": f"hf:{data.parent / 'llama'}"} if key.shape == "llama" else {"model": "char", "dropout": 0}
    flags = model | {
        "data": data, "steps": key.steps, "seed": key.seed, "batch": key.batch, "threads": threads, "lr": key.lr,
        "eval-every": 0, "eval-tokens": corpus.num_tokens("val"), "verify-every": key.steps // 10,
        "device": key.device, "compile": "off", "dtype": key.dtype, "shares": key.shares, "out": folder,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()] + SHAPES[key.shape]
    words += [] if ranks == 1 else ["--sync", key.sync, "--backend", "gloo"]
    if deadline < math.inf:
        words.append(f"--max-s={max(0.0, deadline - time.monotonic()):.0f}")
    if RunDir(str(folder)).checkpoint_steps():
        words.append("--resume")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "evener.worker", *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stderr[-2000:]}")
    rundir = RunDir(str(folder))
    manifest, records = rundir.manifest(), rundir.records(0)
    losses = [record.loss for record in records if record.loss is not None]
    if manifest.verdict != "finished" or manifest.result is None:
        return None
    return {
        **key._asdict(),
        "ranks": ranks,
        "params": manifest.num_params,
        "step_tokens": round(key.batch * loss_tokens(corpus)),
        "epochs": round(key.steps * key.batch / num_sequences(corpus), 2),
        "val_loss": manifest.result.val_loss,
        "train_loss": statistics.mean(losses[-min(TRAIN_LOSS_STEPS, key.steps // 3) :]),
        "bytes_per_step": statistics.mean(record.bytes for record in records),
        "errors": [round(record.fidelity.error, 4) for record in records if record.fidelity],
        "took_s": round(sum(record.wall_s for record in records)),
        "date": time.strftime("%Y-%m-%d"),
    }


def num_sequences(corpus: Corpus) -> float:
    """How many sequences an epoch of the corpus has."""
    if corpus.is_samples:
        return len(read_samples(corpus, "train", BLOCK).starts)
    return corpus.train_tokens / BLOCK


def loss_tokens(corpus: Corpus) -> float:
    """How many tokens of a sequence carry loss, in the mean."""
    return float(read_samples(corpus, "train", BLOCK).loss_tokens.mean()) if corpus.is_samples else BLOCK


def load_rows() -> list[ResultRow]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def row_key(row: ResultRow) -> RunKey:
    return RunKey(**{name: row[name] for name in RunKey._fields})


def compare_runs() -> list[Comparison]:
    """Compare the runs of each strategy with those of one process of the same seeds."""
    alone: dict[RunKey, ResultRow] = {}
    groups: dict[RunKey, list[ResultRow]] = defaultdict(list)
    for row in load_rows():
        key = row_key(row)
        if key.shares == "1":
            alone[key] = row
            alone.setdefault(key._replace(device="any"), row)
        else:
            groups[key._replace(seed=0)].append(row)
    pairs: dict[RunKey, list[tuple[ResultRow, ResultRow]]] = {}
    for group, rows in groups.items():
        for row in rows:
            one = row_key(row)._replace(sync="one process", shares="1")
            if beside := alone.get(one) or alone.get(one._replace(device="any")):
                pairs.setdefault(group, []).append((row, beside))
    differences = {
        (group, name): [row[name] / beside[name] - 1 for row, beside in rows]
        for group, rows in pairs.items()
        for name in ("val_loss", "train_loss")
    }

    def difference(group: RunKey, name: str) -> LossDifference:
        same = [values for (other, its), values in differences.items() if (other.shape, its) == (group.shape, name)]
        squares = sum((len(values) - 1) * statistics.variance(values) for values in same if len(values) > 1)
        degrees = sum(len(values) - 1 for values in same)
        values = differences[group, name]
        if not degrees:  # one seed of each tells nothing of how far seeds lie apart
            return LossDifference(statistics.mean(values), math.inf)
        return LossDifference(statistics.mean(values), 1.65 * math.sqrt(squares / degrees / len(values)))

    return [
        Comparison(
            group,
            [row for row, _ in rows],
            [beside for _, beside in rows],
            difference(group, "val_loss"),
            difference(group, "train_loss"),
        )
        for group, rows in pairs.items()
    ]


def format_measurements() -> str:
    """Return the planner's LossMeasurements as JSON.

    Of the same strategy, shape, shares, steps and tokens a step only those on text that is read once count, if there
    are any; of several precisions or learning rates the one that lost most. The largest error is that of all of them.
    """
    groups: dict[tuple[Any, ...], list[Comparison]] = defaultdict(list)
    for one in compare_runs():
        if not parse_sync(one.key.sync).is_exact and larger_loss(one).margin < math.inf:
            groups[one.key.sync, one.key.shares, one.key.shape, one.key.batch, one.key.steps].append(one)
    rows: list[LossMeasurement] = []
    for found in groups.values():
        chosen = max(found, key=lambda one: (one.epochs <= 1, larger_loss(one).upper_end))
        errors = [error for one in found for run in one.runs for error in run["errors"]]
        rows.append(measurement(chosen, max(errors, default=None)))
    rows.sort(key=lambda row: (SYNC_STRATEGIES.index(row.sync), row.num_params))
    return "[\n" + ",\n".join(msgspec.json.encode(row).decode() for row in rows) + "\n]\n"


def larger_loss(one: Comparison) -> LossDifference:
    return max(one.training, one.validation, key=lambda each: each.upper_end)


def measurement(one: Comparison, max_error: float | None) -> LossMeasurement:
    key, loss, drifts = one.key, larger_loss(one), parse_sync(one.key.sync).drifts
    parts, params = tuple(map(int, key.shares.split(":"))), one.runs[0]["params"]
    ranks = f"{len(parts)} ranks" if len(set(parts)) == 1 else f"{len(parts)} ranks with shares of {key.shares}"
    text = "text read once" if one.epochs <= 1 else f"text read {one.epochs:.0f} times"
    kind = "training" if loss is one.training else "validation"
    is_fine_tuning = key.shape == "llama"
    what = f"{'fine-tuning, ' * is_fine_tuning}{kind} loss, {text}"
    return LossMeasurement(
        task="fine-tuning" if is_fine_tuning else "pretraining",
        sync=key.sync,
        shares=parts,
        num_params=params,
        penalty=round(loss.mean, 4),
        margin=round(loss.margin, 4),
        min_steps=key.steps if drifts else 0,
        min_tokens=one.runs[0].get("step_tokens", key.batch * BLOCK) if drifts else 0,
        max_error=max_error,
        source=f"{what}, {params / 1e6:.1f}M parameters, {ranks}, {pluralize(len(one.runs), 'seed')}",
    )


def format_table() -> str:
    """In Markdown, a line a strategy: the mean over the seeds that one process has too, with its interval."""
    setups: dict[tuple[Any, ...], list[Comparison]] = defaultdict(list)
    for one in compare_runs():
        setups[
            one.epochs, one.key.corpus, one.key.shape, one.key.batch, one.key.steps, one.key.lr, one.key.dtype
        ].append(one)
    lines: list[str] = []
    for (epochs, corpus, shape, batch, steps, lr, dtype), found in sorted(setups.items()):
        params = found[0].runs[0]["params"] / 1e6
        read = "read once" if epochs <= 1 else f"read {epochs:.0f} times"
        lines += [f"### {corpus}, {read}, {shape}: {params:.1f}M parameters, {steps} steps of {batch} × {BLOCK} "
                  f"tokens, learning rate {lr:g}, {dtype}\n",
                  "| | shares | on | seeds | training loss | one process's | | validation loss | one process's | | "
                  "a step sends |",
                  "|:--|--:|:--|--:|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
        for one in found:
            losses = (mean_of(rows, name) for name in ("train_loss", "val_loss") for rows in (one.runs, one.alone))
            train, train_alone, val, val_alone = (f"{loss:.4f}" for loss in losses)
            cells = [one.key.sync, one.key.shares, one.key.device, len(one.runs), train, train_alone, one.training,
                     val, val_alone, one.validation, f"{mean_of(one.runs, 'bytes_per_step') / 1e6:.2f} MB"]  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def mean_of(rows: list[ResultRow], name: str) -> float:
    return statistics.mean(float(row[name]) for row in rows)


if __name__ == "__main__":
    main()
