"""How near is a prediction? Emulated hosts, each lab probed afresh, then trained on; predicted beside measured.

    python bench/prediction_accuracy.py [--only TEXT] [--steps N] [--syncs ddp,int8,…] [--accumulations 1,4]

{100 Mbit, 1 Gbit} × {2, 3 hosts} × {equal, one at half speed} × {accumulation 1, 4} × sync strategies. The peak memory
is that of the rank whose prediction is furthest off. Bytes are
compared with the kernel's counters of what each connection between hosts has received, each byte once (where several
share a slow cable its queue overflows, and up to a tenth is sent again), but for the agents' messages to each other,
read at the same place of two steps, or of two rounds where replicas agree every so many steps: ten rounds apart where
parts are streamed, for of these one may be under way at either end. `char` has no table that is only looked up:
strategies with +sparse are measured with `d4`, on Python's library in 32768 tokens. Its hosts are probed all at once,
as they train, where the others are probed one by one. The hosts are probed again at the end: where a rate changed by
more than 15 % meanwhile, the machine under the lab was not steady, and the lab is measured anew, once. At 100 Mbit/s
the plan would do without a host: shares are given there. Needs Linux, root and an idle machine, on which not even a
linter runs: 33 minutes for each of the eight labs. Rows go into bench/prediction.jsonl, and what is there is not
measured again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from evener.core.cluster.fleet_file import RENDEZVOUS_PORT, load_fleet
from evener.core.run.roster import parse_sync
from evener.core.run.run_plan import read_plan, read_prediction
from evener.core.run.rundir import RunDir, code_hash
from evener.core.run.step_cost import PHASES
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
from evener.report.read.run_summary import summarize_run

CPUS_PER_HOST = {2: 0.9, 3: 0.6}  # of a host, so that all together leave the machine some air
RESULTS = Path(__file__).with_name("prediction.jsonl")
SYNC_STRATEGIES = (
    "ddp",
    "packed",
    "bf16",
    "int8",
    "int4",
    "powersgd:4",
    "diloco:10",
    "diloco:10:int8:streamed",
    "ddp+sparse",
    "packed+sparse",
    "int8+sparse",
    "fsdp",
    "zero1",
)
BLOCK_SIZE = 256  # tokens
ACCUMULATIONS = (1, 4)
BATCH = 24  # sequences: 12 or 8 a rank
WARMUP = 3
RATES_WITH_FIXED_SHARES = ("100Mbit",)  # links over which the plan would do without a host
MAX_DRIFT = 0.15  # rates of a host that differ by more were not measured on the same machine


def run_evener(folder: Path, *args: str) -> str:
    argv = [sys.executable, "-c", "from evener.cli.main import main; main()", *args]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(args)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def grid() -> list[tuple[str, int, bool]]:
    return [(rate, hosts, equal) for rate in ("1Gbit", "100Mbit") for hosts in (2, 3) for equal in (True, False)]


def run_lab(folder: Path, rate: str, num_hosts: int, equal: bool, steps: int,
            cells: list[tuple[int, str]]) -> list[dict[str, Any]]:  # fmt: skip
    cpus = CPUS_PER_HOST[num_hosts]
    hosts = {name: HostSpec(rate=rate, cpus=cpus if equal or name != "bc"[num_hosts - 2] else cpus / 2)
             for name in "abc"[:num_hosts]}  # fmt: skip
    folder.mkdir()
    fleet = folder / "fleet.toml"
    lab = EmulatedLab.up(LabSpec(name=f"grid{num_hosts}", hosts=hosts), out=fleet)
    try:
        run_evener(folder, "probe", "wire", "--fleet", str(fleet), "--seconds", "1", "--no-iperf3")
        models = {model_for(sync) for _, sync in cells}
        before = _probe_rates(folder, fleet, models)
        rows = [measure_cell(lab, folder, fleet, rate, num_hosts, equal, accumulation, steps, sync)
                for accumulation, sync in cells]  # fmt: skip
        after = _probe_rates(folder, fleet, models)
        drift = max((after[name] / before[name] - 1 for name in before), key=abs)
        return [row | {"drift": drift} for row in rows]
    finally:
        lab.down()


def model_for(sync: str) -> str:
    return "d4" if parse_sync(sync).sparse else "char"


def _probe_rates(folder: Path, fleet: Path, models: Collection[str]) -> dict[tuple[str, str], float]:
    """Tokens/s of each host with each model, measured now and written into the fleet's file."""
    for model in sorted(models):
        together = [] if model == "d4" else ["--one-by-one"]
        run_evener(folder, "probe", "host", "--fleet", str(fleet), "--model", model, *together)
    return {(name, model): rates["cpu"].models[model].tokens_per_s
            for name, rates in load_fleet(fleet).rates.items() for model in models}  # fmt: skip


def measure_cell(lab: EmulatedLab, folder: Path, fleet: Path, rate: str, num_hosts: int, equal: bool, accumulation: int,
            steps: int, sync: str) -> dict[str, Any]:  # fmt: skip
    out = folder / f"{rate}-{num_hosts}-{'equal' if equal else 'half'}-{accumulation}-{sync}"
    strategy = parse_sync(sync)
    every = strategy.every
    steps = max(steps, WARMUP + (11 if strategy.streamed else 3) * every)
    micro_batch = BATCH // num_hosts // accumulation
    flags = ["--sync", sync, "--steps", str(steps), "--batch", str(BATCH), "--micro-batch", str(micro_batch)]
    flags += ["--eval-every", "0", "--eval-tokens", "256", "--checkpoint-every", "0"]
    flags += ["--model", model_for(sync), "--block-size", str(BLOCK_SIZE), "--out", str(out)]
    flags += ["--data", str(folder.parent / ("python" if strategy.sparse else "verbs"))]
    if rate in RATES_WITH_FIXED_SHARES:
        flags += ["--shares", ":".join(["2"] * (num_hosts - 1) + ["2" if equal else "1"])]
    run_evener(folder, "train", "--fleet", str(fleet), "--detach", *flags)
    rundir = RunDir(out)
    counts = _count_bytes(lab, rundir, (WARMUP, WARMUP + (steps - 2 - WARMUP) // every * every))
    run_evener(folder, "logs", "-f", str(out))
    prediction = read_prediction(rundir)
    assert prediction is not None
    option, summary = prediction.option(prediction.chosen), summarize_run(rundir)
    result = rundir.manifest().result
    assert result is not None
    sent = {member.host: option.ranks[member.rank].bytes for member in option.roster.members}
    bytes_off = max(abs(sent[name] / measured - 1) for name, measured in counts.items())
    peaks = zip(option.ranks, result.peak_memory_bytes, strict=True)
    memory_off = max((rank.memory_bytes / peak - 1 for rank, peak in peaks if rank.memory_bytes), key=abs)
    slow = option.straggler_cost
    took = summary.ranks[option.straggler.rank]
    return {
        "rate": rate,
        "hosts": num_hosts,
        "equal": equal,
        "accumulation": accumulation,
        "sync": str(option.roster.sync),
        "predicted_s": option.step_s,
        "measured_s": summary.step_p50_s,
        "off": option.step_s / (summary.step_p50_s or 1) - 1,
        "bytes_off": bytes_off,
        "memory_off": memory_off,
        "peak_memory_bytes": result.peak_memory_bytes,
        "predicted": {part: getattr(slow.cost, part) for part in PHASES} | {"sync_s": slow.sync_s},
        "measured": {part: getattr(took.typical, part) for part in PHASES} | {"sync_s": took.sync_s},
        "ranks": [
            {part: getattr(rank.typical, part) for part in PHASES} | {"cpus": rank.cpus} for rank in summary.ranks
        ],
        "predicted_ranks": [{part: getattr(rank.cost, part) for part in PHASES} for rank in option.ranks],
    }


def _received_bytes(lab: EmulatedLab) -> Counter[str]:
    """Bytes that came from each host to the others so far, over connections that are open."""
    names, found = {host.address: host.name for host in lab.hosts}, Counter[str]()
    for host in lab.hosts:
        for line in host.exec(["ss", "-tinHO"]).stdout.splitlines():
            here, there = (end.rsplit(":", 1) for end in line.split()[3:5])
            apart = str(RENDEZVOUS_PORT) in (here[1], there[1])  # where agents talk
            received = re.search(r"\bbytes_received:(\d+)", line)
            if there[0] in names and there[0] != host.address and received and not apart:
                found[names[there[0]]] += int(received[1])
    return found


def _count_bytes(lab: EmulatedLab, rundir: RunDir, steps: tuple[int, int]) -> dict[str, float]:
    """Bytes that came from each host in a step, whose record is written when the next one begins, while all compute."""
    hosts = read_plan(rundir).hosts
    names = [host.name for host in hosts]
    rank0 = Path(hosts[0].run_folder(rundir)) / "steps" / "rank-0.jsonl"
    seen = []
    for step in steps:
        deadline = time.monotonic() + 600
        while not rank0.exists() or rank0.read_bytes().count(b"\n") <= step:
            assert time.monotonic() < deadline, f"step {step} does not come"
            time.sleep(0.01)
        seen.append(_received_bytes(lab))
    return {name: (seen[1][name] - seen[0][name]) / (steps[1] - steps[0]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="labs whose title holds this")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--syncs", default=",".join(SYNC_STRATEGIES))
    parser.add_argument("--accumulations", default=",".join(map(str, ACCUMULATIONS)), help="micro-batches of a step")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is taken down
    syncs, accumulations = args.syncs.split(","), [int(word) for word in args.accumulations.split(",")]
    with tempfile.TemporaryDirectory(prefix="evener-grid-") as name:
        folder = Path(name)
        run_evener(folder, "data", "verbs", "--out", str(folder / "verbs"))
        if any(parse_sync(sync).sparse for sync in syncs):
            tokenizer = ("--tokenizer", "bpe", "--vocab-size", "32768")
            run_evener(folder, "data", "python", *tokenizer, "--out", str(folder / "python"))
        for number, (rate, hosts, equal) in enumerate(grid()):
            title = f"{rate} {hosts} hosts {'equal' if equal else '1 : 0.5'}"
            for attempt in range(2):
                known = {cell_key(row) for row in load_results() if row["counts"]}
                left = [(accumulation, sync) for accumulation in accumulations for sync in syncs
                        if (rate, hosts, equal, accumulation, sync) not in known]  # fmt: skip
                if args.only not in title or not left:
                    break
                found = run_lab(folder / f"{number}-{attempt}", rate, hosts, equal, args.steps, left)
                is_steady = abs(found[0]["drift"]) <= MAX_DRIFT
                for row in found:
                    print(f"{title:26} {format_row(row)}{'' if is_steady else '  not steady'}", flush=True)
                with RESULTS.open("a") as file:
                    for row in found:
                        beside = {"counts": is_steady or attempt == 1, "date": f"{datetime.date.today()}"}
                        beside |= {"steps": args.steps, "code": code_hash()}
                        file.write(json.dumps(row | beside, sort_keys=True) + "\n")
    print_summary(syncs)


def load_results() -> list[dict[str, Any]]:
    """All rows that were ever measured here."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def cell_key(row: dict[str, Any]) -> tuple[str, int, bool, int, str]:
    """What a row is of."""
    return row["rate"], row["hosts"], row["equal"], row["accumulation"], row["sync"]


def print_summary(syncs: list[str]) -> None:
    """A line for each strategy, and one for all."""
    rows = [
        row for row in {cell_key(row): row for row in load_results() if row["counts"]}.values() if row["sync"] in syncs
    ]
    dates, unsteady = sorted({row["date"] for row in rows}), sum(abs(row["drift"]) > MAX_DRIFT for row in rows)
    print(f"measured {' … '.join(dict.fromkeys((dates[0], dates[-1])))}; on a machine that was not steady: {unsteady}")
    for sync in [*syncs, "all"]:
        mine = [row for row in rows if sync in (row["sync"], "all")]
        if mine:
            off = [abs(row["off"]) for row in mine]
            of_memory = [abs(row["memory_off"]) for row in mine if "memory_off" in row]  # older rows have none
            memory = f"; memory: median {statistics.median(of_memory):.1%} off" if of_memory else ""
            print(f"{sync:24} step: median {statistics.median(off):6.1%} off, worst {max(off):6.1%} of {len(off):3}; "
                  f"bytes: worst {max(row['bytes_off'] for row in mine):.2%} off{memory}")  # fmt: skip


def format_row(row: dict[str, Any]) -> str:
    """A line of the table."""
    parts = "  ".join(f"{part.removesuffix('_s')} {row['predicted'][part]:.2f}/{row['measured'][part] or 0:.2f}"
                      for part in ("compute_s", "exposed_sync_s", "optimizer_s", "sync_s"))  # fmt: skip
    step = f"{row['predicted_s']:6.2f} s predicted, {row['measured_s']:6.2f} s measured, {row['off']:+6.1%}"
    beside = f"bytes {row['bytes_off']:.2%} and memory {row['memory_off']:+.1%} off; drift {row['drift']:+.0%}"
    return f"{row['sync']:10} ×{row['accumulation']} {step}; {beside}; {parts}"


if __name__ == "__main__":
    main()
