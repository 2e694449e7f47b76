"""What do two and more machines make of what they could do together? Emulated hosts pinned to a core each, real ssh.

    python bench/scaling_efficiency.py --data FOLDER [--rates 1Gbit,100Mbit] [--cpus 1,0.5]
                         [--syncs ddp,packed,int8,auto] [--model char] [--batch 16] [--shares auto] [--turns 3] [--steps
                         50] [--first 20]

The limit is what all hosts do at once, each by itself and exchanging nothing, with the share of the batch that is its
own in proportion to its processor. This machine changes its speed from minute to minute, so the limit is measured
before and after every run, and a figure is the median over the turns of tokens/s beside the mean of these two; what
was predicted of a run is set beside what was predicted of its limit.
Sequences of 256 tokens, no dropout, the default arithmetic. Tokens/s are those of all steps after the first, by the
clock: the same for every strategy, hiccups and all, and where replicas agree every H steps, of whole rounds. Runs are
planned for 2000 steps, as `auto` judges them, and stopped when enough are measured. Every run adds a line to
bench/fast.jsonl; more turns can follow another day, and docs/generate/fast.py shows them all. Needs Linux and root,
and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evener.core.run.roster import weighted_shares
from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
from evener.report.read.run_summary import summarize_run

RESULTS = Path(__file__).with_name("fast.jsonl")
PLANNED_STEPS = 2000  # steps of the runs that are begun
EVENER_COMMAND = (sys.executable, "-c", "from evener.cli.main import main; main()")
COMMON_FLAGS = {"block-size": 256, "dropout": 0, "eval-every": 0, "eval-tokens": 256, "checkpoint-every": 0,
          "verify-every": 0, "compile": "off"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True,
                        help="a prepared folder: evener data text FILE --tokenizer char --out …")  # fmt: skip
    parser.add_argument("--rates", default="1Gbit,100Mbit")
    parser.add_argument("--cpus", default="1,1", help="processor of each host, in cores")
    parser.add_argument("--syncs", default="ddp,packed,bf16,int8,int4,powersgd:4")
    parser.add_argument("--model", default="char")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shares", default="auto", help="11:5 has both hosts take part, be it slower than one")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--first", type=int, default=20, help="steps before them: shares settle and caches fill")
    options = parser.parse_args()
    cpus = [float(word) for word in options.cpus.split(",")]
    for rate in options.rates.split(","):
        with tempfile.TemporaryDirectory(prefix="evener-fast-") as folder:
            measure_lab(Path(folder), options, rate, cpus)


def measure_lab(folder: Path, options: argparse.Namespace, rate: str, cpus: list[float]) -> None:
    """The turns of one lab; every run between two of the limit."""
    names = "abcdefgh"[: len(cpus)]
    taken, hosts = [0.0] * (os.cpu_count() or 1), {}
    for name, cpu in zip(names, cpus, strict=True):
        core = taken.index(min(taken))
        taken[core] += cpu
        hosts[name] = HostSpec(rate=rate, cpus=cpu if cpu < 1 else None, cores=(core,))
    if max(taken) > 1:
        raise SystemExit(f"--cpus: {', '.join(map(str, cpus))} do not fit on {len(taken)} cores")
    fleet, shares = folder / "fleet.toml", dict(zip(names, cpus, strict=True))
    lab = EmulatedLab.up(LabSpec(name="fast", hosts=hosts), out=fleet)
    try:
        run_evener(folder, "probe", "wire", "--fleet", str(fleet), "--no-iperf3", "--no-trials")
        # All at once, as they train: they share caches.
        run_evener(folder, "probe", "host", "--fleet", str(fleet), "--model", options.model)
        before = measure_limit(folder, fleet, options, shares, "limit")
        for turn in range(options.turns):
            for sync in options.syncs.split(","):
                run = RunDir(folder / f"{sync}-{turn}")
                flags = train_flags(
                    options, batch=options.batch, shares=options.shares, sync=sync, out=run, steps=PLANNED_STEPS
                )
                train_until_measured(folder, fleet, run, flags, options)
                after = measure_limit(folder, fleet, options, shares, f"limit-{sync}-{turn}")
                row = result_row(options, rate, cpus, sync, run, before, after)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{rate} turn {turn + 1}: {sync} {row['tokens_per_s']:.0f} of {row['limit']:.0f} tokens/s",
                      flush=True)  # fmt: skip
                before = after
    finally:
        lab.down()


def train_until_measured(folder: Path, fleet: Path, run: RunDir, flags: list[str], options: argparse.Namespace) -> None:
    """So many steps, two rounds at least, of a run that is planned for more: in a short one other things pay."""
    argv = [*EVENER_COMMAND, "train", "--fleet", str(fleet), *flags]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None and num_recorded_steps(run) < options.first + max(
            options.steps, 2 * sync_interval(run)
        ):
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


def measure_limit(
    folder: Path, fleet: Path, options: argparse.Namespace, cpus: dict[str, float], name: str
) -> list[RunDir]:
    """A run of each host by itself, all at once."""
    outs = {}
    for host, share in zip(cpus, weighted_shares(options.batch, list(cpus.values())), strict=True):
        outs[host] = folder / f"{name}-{host}"
        flags = train_flags(options, batch=share, out=outs[host], steps=options.first + options.steps // 2)
        run_evener(folder, "train", "--fleet", str(fleet), "--hosts", host, "--detach", *flags)
    for out in outs.values():
        run_evener(folder, "logs", "-f", str(out))
    return [RunDir(out) for out in outs.values()]


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


def predicted_fraction_of_limit(rundir: RunDir, limit: list[RunDir]) -> float | None:
    """Tokens/s as they were predicted, beside those of the hosts by themselves."""
    run, *alone = (summarize_run(one).predicted for one in (rundir, *limit))
    known = [option.tokens_per_s for option in alone if option is not None]
    return run.tokens_per_s / sum(known) if run is not None and len(known) == len(alone) else None


def result_row(options: argparse.Namespace, rate: str, cpus: list[float], requested_sync: str, rundir: RunDir,
           before: list[RunDir], after: list[RunDir]) -> dict[str, Any]:  # fmt: skip
    """What a run came to, beside the limits of its minutes."""
    run, mine = summarize_run(rundir), throughput(rundir, options.first)
    limit = sum(throughput(alone, options.first) for alone in (*before, *after)) / 2
    return {
        "model": options.model, "batch": options.batch, "rate": rate, "cpus": cpus,
        "asked": requested_sync, "sync": str(run.manifest.roster.sync),
        "of_limit": mine / limit, "limit": limit, "tokens_per_s": mine, "sent_bytes": run.ranks[0].bytes,
        "date": time.strftime("%Y-%m-%d"), "predicted_of_limit": predicted_fraction_of_limit(rundir, before),
        "predicted_off": run.predicted.step_s / run.step_p50_s - 1 if run.predicted and run.step_p50_s else None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
