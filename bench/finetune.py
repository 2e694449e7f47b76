"""What does a second host gain a fine-tuning? Emulated hosts of 1 and 1/2 core with a link of 100 Mbit/s.

    python bench/finetune.py [--methods lora,full] [--syncs auto] [--seeds 0,1,2] [--steps 20] [--rate 100Mbit]
                             [--cpus 1,0.5]
    python bench/finetune.py --report

A Llama of 31M parameters with random weights is trained on Python's standard library, cut into prompts with
completions of at most 512 tokens, in batches of 16 sequences; LoRA has rank 16. "alone" is the faster host, "slower"
the other one for a quarter of the steps; the limit is what each trains by itself, together. On both, shares are left to
`--shares auto`, and --syncs are compared. A cell, of one method, seed and set-up, is one run, which takes two to four
minutes; the set-ups of a seed follow each other. Each adds a line to bench/finetune.jsonl, and a cell that is there,
measured in the same way, is not measured again. Runs are planned for PLANNED_STEPS steps, as `auto` judges them, and
stopped after --steps steps behind those in which shares settle. A step is the median over rounds of a strategy that
exchanges weights, of their mean steps, or over steps.
--report prints the ratios with their intervals. Needs Linux and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import median_interval
from pretrained_llama import make_llama, source_texts, write_rows
from scaling_efficiency import run_evener, train_until_measured

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
from evener.report.read.run_summary import summarize_run

RESULTS = Path(__file__).with_name("finetune.jsonl")
ALONE, SLOWER = "alone", "slower"
BLOCK_SIZE, BATCH, LORA_RANK = 512, 16, 16
NUM_ROWS = 400
PLANNED_STEPS = 150  # of bench/loss.py --shape llama
FIRST_STEPS = {ALONE: 4, SLOWER: 2}  # that do not count; on both hosts:
FIRST_STEPS_OF_BOTH = 16
METHODS = {"lora": ["--lora", str(LORA_RANK)], "full": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="lora,full")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--syncs", default="auto")
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument("--rate", default="100Mbit")
    parser.add_argument("--cpus", default="1,0.5", help="processor of each host, in cores")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is taken down
    if not options.report:
        measure(options)
    report()


def measure(options: argparse.Namespace) -> None:
    """Measure the cells that are missing."""
    conditions = {"rate": options.rate, "cpus": options.cpus, "steps": options.steps, "planned": PLANNED_STEPS}
    wanted = [{"method": method, "seed": int(seed), "setup": setup, **conditions}
              for seed in options.seeds.split(",") for method in options.methods.split(",")
              for setup in (ALONE, *options.syncs.split(","), SLOWER)]  # fmt: skip
    missing = [cell for cell in wanted if not any(cell.items() <= row.items() for row in read_rows())]
    if not missing:
        return
    cpus = [float(word) for word in options.cpus.split(",")]
    hosts = {name: HostSpec(rate=options.rate, cpus=cpu if cpu < 1 else None, cores=(core % (os.cpu_count() or 1),))
             for core, (name, cpu) in enumerate(zip("ab", cpus, strict=True))}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="evener-finetune-") as temporary:
        folder, fleet = Path(temporary), Path(temporary) / "fleet.toml"
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # of the encoded samples
        make_llama(folder / "llama", width=512, mlp_width=1376, num_layers=8, num_heads=8, block_size=BLOCK_SIZE)
        make_data(folder / "data.jsonl")
        lab = EmulatedLab.up(LabSpec(name="tune", hosts=hosts), out=fleet)
        try:
            run_evener(folder, "probe", "wire", "--fleet", str(fleet), "--no-iperf3", "--no-trials")
            for method in dict.fromkeys(cell["method"] for cell in missing):
                run_evener(folder, "probe", "host", "--fleet", str(fleet), "--model", "hf:llama", *METHODS[method],
                           "--block-size", str(BLOCK_SIZE))  # fmt: skip
            for cell in missing:
                row = cell | measure_cell(folder, fleet, cell)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
        finally:
            lab.down()


def measure_cell(folder: Path, fleet: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return what the run recorded, and what was predicted for it."""
    run = RunDir(folder / f"{cell['method']}-{cell['setup']}-{cell['seed']}")
    num_steps = cell["steps"] // 4 if cell["setup"] == SLOWER else cell["steps"]
    first = FIRST_STEPS.get(cell["setup"], FIRST_STEPS_OF_BOTH)
    hosts = {ALONE: "a", SLOWER: "b"}.get(cell["setup"])
    flags = ["--steps", PLANNED_STEPS, "--batch", BATCH, "--block-size", BLOCK_SIZE, "--seed", cell["seed"],
             "--eval-every", 0, "--eval-tokens", BLOCK_SIZE, "--checkpoint-every", 0, "--out", run, "--shares", "auto",
             *(["--hosts", hosts] if hosts else ["--sync", cell["setup"]])]  # fmt: skip
    words = ["data.jsonl", "--model", "hf:llama", *METHODS[cell["method"]], *map(str, flags)]
    train_until_measured(folder, fleet, run, words, first, num_steps)
    summary, records = summarize_run(run), run.records(0)
    result, every = summary.manifest.result, summary.manifest.roster.sync.every
    walls = [record.wall_s for record in records[first:]]
    rounds = [statistics.mean(walls[i : i + every]) for i in range(0, len(walls) - every + 1, every)]
    peaks = result.peak_memory_bytes if result else []
    needs = [rank.memory_bytes for rank in summary.predicted.ranks] if summary.predicted else []
    return {
        "step_s": statistics.median(rounds),
        "steps_s": [round(wall_s, 3) for wall_s in walls],
        "predicted_s": summary.predicted.step_s if summary.predicted else None,
        "predicted_gain": summary.predicted.speedup_vs_best_host if summary.predicted else None,
        "sync": str(summary.manifest.roster.sync),
        "shares": summary.manifest.roster.shares,
        "hosts": summary.manifest.roster.hosts,
        "sent_bytes": summary.ranks[0].bytes,
        "peak_bytes": peaks,
        "predicted_peak_bytes": needs,
        "date": time.strftime("%Y-%m-%d"),
    }


def read_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def report() -> None:
    """Print for each method the gain of both hosts, and the errors of the predictions."""
    names, cells = ("rate", "cpus", "steps", "planned", "method"), defaultdict[tuple[Any, ...], dict[str, Any]](dict)
    for row in read_rows():
        cells[*(row[name] for name in names), row["seed"]][row["setup"]] = row
    setups = dict.fromkeys((*key[:-1], setup) for key, of_seed in cells.items() for setup in of_seed
                           if setup not in (ALONE, SLOWER))  # fmt: skip
    for rate, cpus, steps, planned, method, setup in setups:
        of_method = [of_seed for key, of_seed in cells.items() if key[:-1] == (rate, cpus, steps, planned, method)]
        pairs = [(of_seed[ALONE], of_seed[setup]) for of_seed in of_method if {ALONE, setup} <= of_seed.keys()]
        if not pairs:
            continue
        gains = [alone["step_s"] / both["step_s"] for alone, both in pairs]
        errors = [row["predicted_s"] / row["step_s"] - 1 for pair in pairs for row in pair if row["predicted_s"]]
        limits = [1 + of_seed[ALONE]["step_s"] / of_seed[SLOWER]["step_s"]
                  for of_seed in of_method if {ALONE, SLOWER} <= of_seed.keys()]  # fmt: skip
        limit = f", of at most {statistics.median(limits):.2f}" if limits else ""
        low, high = median_interval(gains)
        taken = ", ".join(dict.fromkeys(both["sync"] for _, both in pairs))
        print(
            f"{method}, {setup} ({taken}), {cpus} cores, {rate}, {steps} of {planned} steps, {len(pairs)} seeds: "
            f"both hosts {statistics.median(gains):.2f} times the faster alone (90 % interval {low:.2f} to {high:.2f})"
            f"{limit}; predicted steps off by {', '.join(f'{error:+.1%}' for error in errors)}"
        )


def make_data(path: Path) -> None:
    """Write prompts with completions: pieces of the library's source, most of them longer than a sequence."""
    rows = []
    for i, text in enumerate(source_texts()):
        size = (1200, 2400, 3600, 4800)[i % 4]
        if len(text) >= size:
            rows.append({"prompt": text[: size // 6], "completion": text[size // 6 : size]})
    write_rows(path, rows[:NUM_ROWS])


if __name__ == "__main__":
    main()
