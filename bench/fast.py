"""What do two and more machines make of what they could do together? Emulated hosts pinned to a core each, real ssh.

    python bench/fast.py --data FOLDER [--rates 1Gbit,100Mbit] [--cpus 1,0.5] [--syncs ddp,packed,int8,auto]
                         [--pairs 3] [--steps 50]

The limit is what all hosts do at once, each by itself and exchanging nothing, with the share of the batch that is its
own in proportion to its processor. This machine changes its speed from minute to minute, so the limit is measured
before and after every run, and a figure is the median over the turns of tokens/s beside the mean of these two.
16 × 256 tokens a step, no dropout, the default arithmetic. Tokens/s are those of all steps after the first, by the
clock: of every way the same, hiccups and all, and where replicas agree every H steps, of whole rounds. Runs are planned
for 2000 steps, as `auto` judges them, and stopped when enough are measured. Every strategy adds a line to
bench/fast.jsonl, of which `make docs` makes a page. Needs Linux and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evener.core.roster import weighted_shares
from evener.core.rundir import RunDir
from evener.lab.lab import Lab
from evener.lab.spec import HostSpec, LabSpec
from evener.report.summary import Summary, summarize

RESULTS = Path(__file__).with_name("fast.jsonl")
BATCH = 16
FIRST = 20  # steps in which shares settle and caches fill
PLANNED = 2000  # steps of the runs that are begun
EVENER = (sys.executable, "-c", "from evener.cli.main import main; main()")
COMMON = {"model": "char", "dropout": 0, "eval-every": 0, "eval-tokens": 256, "checkpoint-every": 0, "verify-every": 0,
          "compile": "off"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rates", default="1Gbit,100Mbit")
    parser.add_argument("--cpus", default="1,1", help="processor of each host, in cores")
    parser.add_argument("--syncs", default="ddp,packed,bf16,int8,int4,powersgd:4")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    cpus = [float(word) for word in options.cpus.split(",")]
    for rate in options.rates.split(","):
        with tempfile.TemporaryDirectory(prefix="evener-fast-") as folder:
            found = measure(Path(folder), options, rate, cpus)
        print_table(rate, cpus, found)
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)


def measure(folder: Path, options: argparse.Namespace, rate: str, cpus: list[float]) -> list[dict[str, Any]]:
    """The turns of one lab, as one row a strategy."""
    names = "abcdefgh"[: len(cpus)]
    hosts = {name: HostSpec(rate=rate, cpus=cpu if cpu < 1 else None, cores=(i % 2,))
             for i, (name, cpu) in enumerate(zip(names, cpus, strict=True))}  # fmt: skip
    fleet, syncs = folder / "fleet.toml", options.syncs.split(",")
    lab = Lab.up(LabSpec(name="fast", hosts=hosts), out=fleet)
    try:
        evener(folder, "probe", "wire", "--fleet", str(fleet), "--seconds", "1", "--no-iperf3", "--no-trials")
        evener(folder, "probe", "host", "--fleet", str(fleet), "--one-by-one")
        runs: dict[str, list[Summary]] = {sync: [] for sync in syncs}
        rates: dict[str, list[float]] = {sync: [] for sync in syncs}
        limits: dict[str, list[float]] = {sync: [] for sync in syncs}
        shares = dict(zip(names, cpus, strict=True))
        before = limit(folder, fleet, options, shares, "limit")
        for turn in range(options.pairs):
            for sync in syncs:
                run = RunDir(folder / f"{sync}-{turn}")
                train(
                    folder, fleet, run, flags_of(options, batch=BATCH, sync=sync, out=run, steps=PLANNED), options.steps
                )
                runs[sync].append(summarize(run))
                rates[sync].append(throughput(run))
                after = limit(folder, fleet, options, shares, f"limit-{sync}-{turn}")
                limits[sync].append((before + after) / 2)
                before = after
                print(f"{rate} turn {turn + 1}: {sync} {rates[sync][-1]:.0f} of {limits[sync][-1]:.0f} tokens/s",
                      flush=True)  # fmt: skip
    finally:
        lab.down()
    return [row_of(rate, cpus, sync, runs[sync], rates[sync], limits[sync]) for sync in syncs]


def train(folder: Path, fleet: Path, run: RunDir, flags: list[str], steps: int) -> None:
    """So many steps, two rounds at least, of a run that is planned for more: in a short one other things pay."""
    argv = [*EVENER, "train", "--fleet", str(fleet), *flags]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None and num_recorded(run) < FIRST + max(steps, 2 * every_of(run)):
            time.sleep(1)
        if process.poll() is None:
            evener(folder, "stop", str(run))
        told, _ = process.communicate(timeout=600)
    if not run.is_run() or run.manifest().verdict not in ("stopped", "finished"):
        raise SystemExit(f"{' '.join(argv)}:\n{told}")


def num_recorded(run: RunDir) -> int:
    """Steps of rank 0 that have come home."""
    path = run.steps_path(0)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def every_of(run: RunDir) -> int:
    """Steps between two exchanges."""
    return run.manifest().roster.sync.every if run.is_run() else 1


def limit(folder: Path, fleet: Path, options: argparse.Namespace, cpus: dict[str, float], name: str) -> float:
    """Tokens/s of all hosts together, each by itself."""
    outs = {}
    for host, share in zip(cpus, weighted_shares(BATCH, list(cpus.values())), strict=True):
        outs[host] = folder / f"{name}-{host}"
        flags = flags_of(options, batch=share, out=outs[host])
        evener(folder, "train", "--fleet", str(fleet), "--hosts", host, "--detach", *flags)
    for out in outs.values():
        evener(folder, "logs", "-f", str(out))
    return sum(throughput(RunDir(out)) for out in outs.values())


def throughput(rundir: RunDir) -> float:
    """Tokens/s of all ranks, from the end of step FIRST - 1 to that of the last one of a whole round."""
    manifest = rundir.manifest()
    records = [rundir.records(rank) for rank in range(manifest.world_size)]
    every = manifest.roster.sync.every
    last = FIRST + (len(records[0]) - FIRST) // every * every
    tokens = sum(record.tokens for of_rank in records for record in of_rank[FIRST:last])
    return tokens / (records[0][last - 1].ended - records[0][FIRST - 1].ended)


def flags_of(options: argparse.Namespace, **more: object) -> list[str]:
    flags = COMMON | {"data": options.data.absolute(), "steps": FIRST + options.steps} | more
    return [f"--{name}={value}" for name, value in flags.items()]


def evener(folder: Path, *args: str) -> None:
    done = subprocess.run([*EVENER, *args], cwd=folder, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(args)}:\n{done.stdout}{done.stderr}")


def row_of(rate: str, cpus: list[float], sync: str, runs: list[Summary], rates: list[float],
           limits: list[float]) -> dict[str, Any]:  # fmt: skip
    of_limit = [mine / most for mine, most in zip(rates, limits, strict=True)]
    predicted = [run.predicted.step_s / (run.step_p50_s or 1.0) - 1 for run in runs if run.predicted]
    return {
        "rate": rate, "cpus": cpus, "asked": sync, "sync": str(runs[-1].manifest.roster.sync), "of_limit": of_limit,
        "median_of_limit": statistics.median(of_limit), "limits": limits,
        "tokens_per_s": statistics.median(rates),
        "sent_bytes": runs[-1].ranks[0].bytes, "date": time.strftime("%Y-%m-%d"),
        "predicted_off": statistics.median(predicted) if predicted else None,
    }  # fmt: skip


def print_table(rate: str, cpus: list[float], rows: list[dict[str, Any]]) -> None:
    cores, most = " : ".join(f"{cpu:g}" for cpu in cpus), statistics.median(rows[0]["limits"])
    print(f"\n{rate}, hosts of {cores} core; the limit is {most:.0f} tokens/s\n")
    print("| | of the limit | turns | tokens/s | sends a step | predicted |")
    print("|:--|--:|:--|--:|--:|--:|")
    for row in rows:
        name = row["sync"] if row["asked"] == row["sync"] else f"{row['asked']} → {row['sync']}"
        off = "" if row["predicted_off"] is None else f"{row['predicted_off']:+.1%}"
        turns = " ".join(f"{share:.2f}" for share in row["of_limit"])
        print(f"| {name} | {row['median_of_limit']:.3f} | {turns} | {row['tokens_per_s']:.0f} | "
              f"{row['sent_bytes'] / 1e6:.2f} MB | {off} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
