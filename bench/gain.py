"""What evener gains on two unequal hosts: one alone, both with plain DDP, both as evener chooses.

    python bench/gain.py --data FOLDER [--rate 100Mbit] [--cpus 1,0.5] [--model char] [--batch 16] [--turns 2]

Emulated hosts, each on a core of its own, with real ssh and a link that the kernel shapes. "alone" is the faster host;
"ddp" divides the batch equally and averages gradients in every step, as a plain DDP program does; "evener" leaves
shares and strategy to `--shares auto --sync auto`. Runs are planned for 2000 steps, as `auto` judges them, and stopped
when enough are measured. Tokens/s are those of all steps after the first ten, by the clock. Every turn adds a line to
bench/gain.jsonl, and docs/generate/fast.py draws the median turn. Needs Linux and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from scaling_efficiency import PLANNED_STEPS, run_evener, throughput, train_flags, train_until_measured

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec

RESULTS = Path(__file__).with_name("gain.jsonl")
SETUPS: dict[str, dict[str, str]] = {
    "alone": {"hosts": "a"},
    "ddp": {"sync": "ddp", "shares": "8:8"},
    "evener": {"sync": "auto", "shares": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder")
    parser.add_argument("--rate", default="100Mbit")
    parser.add_argument("--cpus", default="1,0.5", help="processor of each host, in cores")
    parser.add_argument("--model", default="char")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    options.first, options.steps = 10, 10
    cpus = [float(word) for word in options.cpus.split(",")]
    hosts = {name: HostSpec(rate=options.rate, cpus=cpu if cpu < 1 else None, cores=(core % (os.cpu_count() or 1),))
             for core, (name, cpu) in enumerate(zip("ab", cpus, strict=True))}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="evener-gain-") as temporary:
        folder, fleet = Path(temporary), Path(temporary) / "fleet.toml"
        lab = EmulatedLab.up(LabSpec(name="gain", hosts=hosts), out=fleet)
        try:
            run_evener(folder, "probe", "wire", "--fleet", str(fleet), "--no-iperf3", "--no-trials")
            run_evener(folder, "probe", "host", "--fleet", str(fleet), "--model", options.model)
            for turn in range(options.turns):
                row: dict[str, Any] = {
                    "model": options.model, "batch": options.batch, "rate": options.rate, "cpus": cpus,
                    "date": time.strftime("%Y-%m-%d"),
                }  # fmt: skip
                for setup, flags in SETUPS.items():
                    run = RunDir(folder / f"{setup}-{turn}")
                    given = train_flags(options, batch=options.batch, out=run, steps=PLANNED_STEPS, **flags)
                    train_until_measured(folder, fleet, run, given, options.first, options.steps)
                    roster = run.manifest().roster
                    row[setup] = throughput(run, options.first)
                    row[f"{setup}_sync"] = str(roster.sync)
                    row["dtypes"] = roster.dtypes_text
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
        finally:
            lab.down()


if __name__ == "__main__":
    main()
