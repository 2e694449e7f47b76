"""What do two and more machines make of what they could do together? Emulated hosts pinned to a core each, real ssh.

    python bench/scaling_efficiency.py --data FOLDER [--rates 1Gbit,100Mbit] [--cpus 1,0.5] [--syncs auto,ddp]
                         [--model char] [--batch 16] [--shares auto] [--starts 1] [--first 150] [--min-s 40] [--compare]

The limit is what all hosts do at once, each by itself and exchanging nothing, with its share of the batch. It is
measured inside the run: a few seconds of the run alternate with a few seconds of the limit (bench/limit_rank.py), so
that a machine that changes its speed from minute to minute changes both. A figure is the median of the pairs, with its
90 % interval; a run goes on until the interval is narrower than ±2 %, or says that it is not. Processor time per token
of both stands beside. With --compare the other strategies that auto could have taken alternate with its choice in the
same run. Every start is probed afresh. Sequences of 256 tokens, the default arithmetic and dropout, as the probe
measures them. Runs are planned for 2000 steps, as `auto` judges them; --first steps go before, in which it tries
strategies and shares settle. Every run adds a line to bench/fast.jsonl; docs/generate/fast.py shows them. Needs Linux
and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from limit_rank import RESULT

from evener.core.model.shape import preset_shape
from evener.core.run.rundir import RunDir, code_hash
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
from evener.report.read.run_summary import summarize_run

RESULTS = Path(__file__).with_name("fast.jsonl")
BLOCK_S, HALF_WIDTH, MAX_PAIRS = 5.0, 0.02, 40
PLANNED_STEPS = 2000  # steps of the runs that are begun
EVENER_COMMAND = (sys.executable, "-c", "from evener.cli.main import main; main()")
COMMON_FLAGS = {"block-size": 256, "eval-every": 0, "eval-tokens": 256, "checkpoint-every": 0, "verify-every": 0,
                "compile": "off"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True,
                        help="a prepared folder: evener data text FILE --tokenizer char --out …")  # fmt: skip
    parser.add_argument("--rates", default="1Gbit,100Mbit")
    parser.add_argument("--cpus", default="1,1", help="processor of each host, in cores")
    parser.add_argument("--syncs", default="auto")
    parser.add_argument("--model", default="char")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shares", default="auto", help="11:5 has both hosts take part, be it slower than one")
    parser.add_argument("--starts", type=int, default=1, help="runs of each strategy")
    parser.add_argument("--first", type=int, default=150, help="steps before: strategies are tried, shares settle")
    parser.add_argument("--min-s", type=float, default=40.0, help="seconds of the run that are measured")
    parser.add_argument("--compare", action="store_true", help="measure what auto could have taken as well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is taken down
    cpus = [float(word) for word in options.cpus.split(",")]
    for rate in options.rates.split(","):
        with tempfile.TemporaryDirectory(prefix="evener-fast-") as folder:
            measure_lab(Path(folder), options, rate, cpus)


def measure_lab(folder: Path, options: argparse.Namespace, rate: str, cpus: list[float]) -> None:
    """The runs of one lab."""
    names = "abcdefgh"[: len(cpus)]
    taken, hosts = [0.0] * (os.cpu_count() or 1), {}
    for name, cpu in zip(names, cpus, strict=True):
        core = taken.index(min(taken))
        taken[core] += cpu
        hosts[name] = HostSpec(rate=rate, cpus=cpu if cpu < 1 else None, cores=(core,))
    if max(taken) > 1:
        raise SystemExit(f"--cpus: {', '.join(map(str, cpus))} do not fit on {len(taken)} cores")
    fleet = folder / "fleet.toml"
    lab = EmulatedLab.up(LabSpec(name="fast", hosts=hosts), out=fleet)
    try:
        for start in range(options.starts):
            run_evener(folder, "probe", "wire", "--fleet", str(fleet), "--no-iperf3", "--no-trials")
            # All at once, as they train: they share caches.
            run_evener(folder, "probe", "host", "--fleet", str(fleet), "--model", options.model)
            for sync in options.syncs.split(","):
                row = measure_run(folder, fleet, options, RunDir(folder / f"{sync}-{start}"), sync)
                row |= {"rate": rate, "cpus": cpus}
                # A host that the plan left out could train too; its processor stands for its speed.
                part = sum(cpu for name, cpu in zip(names, cpus, strict=True) if name in row["hosts"]) / sum(cpus)
                for one in row["strategies"].values():
                    one |= {name: one[name] * part for name in ("of_limit", "low", "high")}
                chosen = row["strategies"][row["sync"]]
                row |= {name: chosen[name] for name in ("of_limit", "low", "high", "predicted_off", "step_s")}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{rate}, start {start + 1}: {sync}: {describe(row)}", flush=True)
    finally:
        lab.down()


def measure_run(folder: Path, fleet: Path, options: argparse.Namespace, run: RunDir, asked: str) -> dict[str, Any]:
    """One run beside its limit, as a row of the results."""
    flags = train_flags(options, batch=options.batch, shares=options.shares, sync=asked, out=run, steps=PLANNED_STEPS)
    meter = {"first": options.first, "block_s": BLOCK_S, "min_s": options.min_s, "half_width": HALF_WIDTH,
             "max_pairs": MAX_PAIRS, "compare": options.compare and asked == "auto"}  # fmt: skip
    argv = [
        sys.executable,
        str(Path(__file__).with_name("limit_cli.py")),
        json.dumps(meter),
        "train",
        "--fleet",
        str(fleet),
    ]
    done = subprocess.run([*argv, *flags], cwd=folder, capture_output=True, text=True, check=False)
    results = [line.partition(RESULT)[2] for log in (run.path / "logs").glob("*.0.log")
               for line in log.read_text().splitlines() if RESULT in line]  # fmt: skip
    if not results:
        raise SystemExit(f"{' '.join(argv)}:\n{done.stdout}{done.stderr}")
    found, summary = json.loads(results[-1]), summarize_run(run)
    limit = median_of(found["limits"], "tokens_per_s")
    strategies = {}
    for sync, one in found["strategies"].items():
        step_s = options.batch * 256 / median_of(one["runs"], "tokens_per_s")
        strategies[sync] = {
            **{name: one[name] for name in ("of_limit", "low", "high")},
            "pairs": [round(share, 4) for share in one["pairs"]],
            "step_s": step_s,
            "predicted_off": one["predicted_s"] and one["predicted_s"] / step_s - 1,
            "cpu_s_per_token": median_of(one["runs"], "cpu_s_per_token"),
            **exposed_and_waiting(run, one["runs"]),
            "is_dropped": one["is_dropped"],
        }
    chosen = strategies[found["chosen"]]
    if chosen["predicted_off"] is None and summary.predicted:  # asked for, and planned as such
        chosen["predicted_off"] = summary.predicted.step_s / chosen["step_s"] - 1
    return {
        "model": options.model, "batch": options.batch, "asked": asked, "sync": found["chosen"],
        "dropout": preset_shape(options.model, 1).dropout,
        "strategies": strategies, "hosts": found["hosts"], "shares": found["shares"], "limit": limit,
        "limit_cpu_s_per_token": median_of(found["limits"], "cpu_s_per_token"),
        "sent_bytes": summary.ranks[0].bytes, "date": time.strftime("%Y-%m-%d"), "code": code_hash(),
    }  # fmt: skip


def exposed_and_waiting(run: RunDir, blocks: list[dict[str, float]]) -> dict[str, float]:
    """Seconds a step of these blocks that the rank which waits least spends exchanging, and waiting."""
    steps = {step for block in blocks for step in range(int(block["first_step"]), int(block["last_step"]) + 1)}
    ranks = [[record.cost for record in run.records(rank) if record.step in steps]
             for rank in range(run.manifest().world_size)]  # fmt: skip
    names = {"exposed_s": "exposed_sync_s", "waiting_s": "wait_s"}
    means = [{key: statistics.mean(getattr(cost, name) or 0.0 for cost in costs) for key, name in names.items()}
             for costs in ranks]  # fmt: skip
    return min(means, key=lambda mean: mean["waiting_s"])


def median_of(blocks: list[dict[str, float]], name: str) -> float:
    return statistics.median(block[name] for block in blocks)


def describe(row: dict[str, Any]) -> str:
    """The strategies of a row, the chosen one first: shares of the limit, intervals, steps."""
    found = []
    for sync, one in row["strategies"].items():
        predicted = f", predicted {one['predicted_off']:+.1%}" if one["predicted_off"] is not None else ""
        interval = f"{one['low']:.3f} to {one['high']:.3f}, {len(one['pairs'])} pairs"
        found.append(f"{sync} {one['of_limit']:.3f} ({interval}), step {one['step_s']:.3f} s{predicted}")
    return "; ".join(found)


def train_until_measured(folder: Path, fleet: Path, run: RunDir, flags: list[str], first: int, num_steps: int) -> None:
    """So many steps behind the first ones, two rounds at least, of a run that is planned for more: in a short one other
    things pay.
    """
    argv = [*EVENER_COMMAND, "train", "--fleet", str(fleet), *flags]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None and num_recorded_steps(run) < first + max(num_steps, 2 * sync_interval(run)):
            time.sleep(1)
        if process.poll() is None:
            run_evener(folder, "stop", str(run))
        output, _ = process.communicate(timeout=600)
    if not run.is_run() or run.manifest().verdict not in ("stopped", "finished"):
        raise SystemExit(f"{' '.join(argv)}:\n{output}")


def num_recorded_steps(run: RunDir) -> int:
    """Steps of rank 0 that have come home."""
    path = run.steps_path(0)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def sync_interval(run: RunDir) -> int:
    """Steps between two exchanges."""
    return run.manifest().roster.sync.every if run.is_run() else 1


def throughput(rundir: RunDir, first: int) -> float:
    """Tokens/s of all ranks, from the end of step `first` - 1 to that of the last one of a whole round."""
    manifest = rundir.manifest()
    records = [rundir.records(rank) for rank in range(manifest.world_size)]
    every = manifest.roster.sync.every
    last = first + (len(records[0]) - first) // every * every
    tokens = sum(record.tokens for of_rank in records for record in of_rank[first:last])
    return tokens / (records[0][last - 1].ended - records[0][first - 1].ended)


def train_flags(options: argparse.Namespace, **more: object) -> list[str]:
    flags = COMMON_FLAGS | {"model": options.model, "data": options.data.absolute()} | more
    return [f"--{name}={value}" for name, value in flags.items()]


def run_evener(folder: Path, *args: str) -> None:
    done = subprocess.run(
        [*EVENER_COMMAND, *args], cwd=folder, capture_output=True, text=True, timeout=3600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(args)}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
