"""Is the model that `train --for` chooses the best one? The choice beside its neighbours, each with the same budget.

    python bench/budget.py --data FOLDER [--for 2min] [--neighbours 2] [--batches 8,32] [--minutes 60] [--untimed]

Trains the chosen size and its neighbours in the list of sizes, and the chosen size with other batches, each with the
same budget of time on this machine. Every run adds a line to bench/budget.jsonl; runs that are there are not repeated,
and --minutes ends the bench between two runs. The runs are timed: nothing else may run meanwhile. With --untimed each
choice trains the steps that the plan gives it for the budget, on one thread, however long they take: other work on the
machine, such as another corpus, then changes nothing, but an error of the predicted throughput stays in. At the end the
losses of 131,072 tokens of the validation split stand beside each other.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from evener.cli.on_machines import measure_this_machine
from evener.core.base.units import parse_duration
from evener.core.run.rundir import RunDir
from evener.plan.choice.training_budget import PROBED_SIZES, SIZES

RESULTS = Path(__file__).with_name("budget.jsonl")
KEY = ("corpus", "seconds", "on", "model", "batch")
EVAL_TOKENS = 131_072
BOUND = 1.02  # times the best loss that the choice may have
EVENER = (sys.executable, "-c", "from evener.cli.main import main; main()")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder")
    parser.add_argument("--for", dest="time", default="2min")
    parser.add_argument("--on", default="local", help="as for train --on")
    parser.add_argument("--neighbours", type=int, default=2, help="sizes on each side of the choice")
    parser.add_argument("--batches", default="", help="other batches of the chosen size")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--untimed", action="store_true", help="train the planned steps without a limit of time")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    seconds = parse_duration(options.time)
    if seconds is None:
        raise SystemExit(f"--for {options.time}: expected a time")
    chosen = planned(options)
    model, batch = chosen["model"], int(chosen["batch"])
    place = SIZES.index(model)
    sizes = [size for at, size in enumerate(SIZES) if abs(at - place) <= options.neighbours and at != place]
    batches = [int(other) for other in options.batches.split(",") if other]
    runs = [(model, batch), *((size, batch) for size in sizes), *((model, other) for other in batches)]
    for run in runs:
        key = (options.data.name, seconds, options.on, *run)
        if any(tuple(row[name] for name in KEY) == key for row in load_rows()):
            continue
        if time.monotonic() + seconds > until:
            break
        row = dict(zip(KEY, key, strict=True)) | train(options, *run) | {"is_choice": run == (model, batch)}
        print(row, flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print_table()


def planned(options: argparse.Namespace, **given: Any) -> dict[str, str]:
    """Return the flags that `train --for` chooses for the budget, the given ones among them.

    Measures the machine where it was not.
    """
    if options.on == "local":
        measure_this_machine(PROBED_SIZES)
    words = ["--for", options.time, "--dry-run", *as_flags(given)]
    answer = subprocess.run([*EVENER, "train", str(options.data), *words, *where(options)], capture_output=True,
                            text=True, check=False)  # fmt: skip
    if answer.returncode:
        raise SystemExit(answer.stderr)
    flags = dict(re.findall(r"--(model|batch|steps|dropout)=(\S+)", answer.stdout))
    return {"model": "char", "batch": "16"} | flags | {name: str(value) for name, value in given.items()}


def as_flags(flags: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def where(options: argparse.Namespace) -> list[str]:
    return [] if options.on == "local" else ["--on", options.on]


def train(options: argparse.Namespace, model: str, batch: int) -> dict[str, Any]:
    """Train for the budget, or the steps that it buys by the plan; return steps, seconds and losses."""
    budget = planned(options, model=model, batch=batch) | {"threads": "1"} if options.untimed else {
        "model": model, "batch": batch, "for": options.time}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        flags = budget | {"out": out, "eval-every": 0, "verify-every": 0, "checkpoint-every": 0,
                          "eval-tokens": EVAL_TOKENS}  # fmt: skip
        words = [*as_flags(flags), *where(options)]
        done = subprocess.run([*EVENER, "train", str(options.data), *words], capture_output=True, text=True,
                              check=False)  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        run = RunDir(str(out))
        manifest = run.manifest()
        assert manifest.result is not None
        records = run.records(0)
        return {"timed": not options.untimed,
                "params": manifest.num_params, "steps": manifest.result.steps, "planned": manifest.spec.train.steps,
                "lr": manifest.spec.train.lr, "dropout": manifest.shape.dropout if manifest.shape else None,
                "took_s": round(sum(record.wall_s for record in records), 1), "val_loss": manifest.result.val_loss,
                "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def print_table() -> None:
    """Print the losses of each corpus and budget, the choice marked, and its distance from the best."""
    groups: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in load_rows():
        groups[row["corpus"], row["seconds"], row["on"]].append(row)
    for (corpus, seconds, on), rows in groups.items():
        best = min(row["val_loss"] for row in rows)
        print(f"{corpus}, {seconds:g} s, {on}:")
        for row in sorted(rows, key=lambda row: (SIZES.index(row["model"]), row["batch"])):
            mark = " ← chosen" if row["is_choice"] else ""
            print(f"  {row['model']} batch {row['batch']}: {row['val_loss']:.4f}, {row['val_loss'] / best:.3f} of the "
                  f"best, {row['steps']} of {row['planned']} steps in {row['took_s']:g} s{mark}")  # fmt: skip
        for row in rows:
            if row["is_choice"]:
                verdict = "within 2 %" if row["val_loss"] <= BOUND * best else "NOT within 2 %"
                print(f"  the choice is {verdict}")


if __name__ == "__main__":
    main()
