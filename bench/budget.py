"""Is the model that `train --for` chooses the best one? The choice beside its neighbours, each with the same budget.

    python bench/budget.py --data FOLDER [--for 2min] [--neighbours 2] [--batches 8,32] [--minutes 60]

Trains the chosen size and its neighbours in the list of sizes, and the chosen size with other batches, each with the
same budget of time on this machine. Every run adds a line to bench/budget.jsonl; runs that are there are not repeated,
and --minutes ends the bench between two runs. The runs are timed: nothing else may run meanwhile. At the end the losses
of 131,072 tokens of the validation split stand beside each other.
"""

from __future__ import annotations

import argparse
import json
import os
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
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    seconds = parse_duration(options.time)
    if seconds is None:
        raise SystemExit(f"--for {options.time}: expected a time")
    chosen = chosen_model(options)
    place = SIZES.index(chosen["model"])
    others = [SIZES[at] for at in range(place - options.neighbours, place + options.neighbours + 1)
              if 0 <= at < len(SIZES) and at != place]  # fmt: skip
    runs = [chosen, *({"model": model, "batch": chosen["batch"]} for model in others)]
    runs += [{"model": chosen["model"], "batch": int(batch)} for batch in options.batches.split(",") if batch]
    for run in runs:
        key = (options.data.name, seconds, options.on, run["model"], run["batch"])
        if any(tuple(row[name] for name in KEY) == key for row in load_rows()):
            continue
        if time.monotonic() + seconds > until:
            break
        row = dict(zip(KEY, key, strict=True)) | train(options, run) | {"is_choice": run is chosen}
        print(row, flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print_table()


def chosen_model(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model and batch that `train --for` chooses; measures the machine where it was not."""
    if options.on == "local":
        measure_this_machine(PROBED_SIZES)
    train_flags = ["--for", options.time, "--dry-run", *where(options)]
    measured = subprocess.run([*EVENER, "train", str(options.data), *train_flags], capture_output=True, text=True,
                              check=False)  # fmt: skip
    if measured.returncode:
        raise SystemExit(measured.stderr)
    flags = dict(re.findall(r"--(model|batch)=(\S+)", measured.stdout))
    return {"model": flags.get("model", "char"), "batch": int(flags.get("batch", 16))}


def where(options: argparse.Namespace) -> list[str]:
    return [] if options.on == "local" else ["--on", options.on]


def train(options: argparse.Namespace, chosen: dict[str, Any]) -> dict[str, Any]:
    """Train for the budget; return steps, seconds and losses."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        flags = chosen | {"for": options.time, "out": out, "eval-every": 0, "verify-every": 0, "checkpoint-every": 0,
                          "eval-tokens": EVAL_TOKENS}  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        done = subprocess.run([*EVENER, "train", str(options.data), *words, *where(options)], capture_output=True,
                              text=True, env=dict(os.environ), check=False)  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        run = RunDir(str(out))
        manifest = run.manifest()
        assert manifest.result is not None
        records = run.records(0)
        return {"params": manifest.num_params, "steps": manifest.result.steps, "planned": manifest.spec.train.steps,
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
