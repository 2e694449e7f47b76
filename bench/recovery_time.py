"""What does it cost a run to lose hosts and ranks? Emulated hosts, real ssh, faults by a seed; fp32.

    python bench/recovery_time.py kills --data FOLDER [--times 100] [--seed 1]   a rank is killed, at random moments
    python bench/recovery_time.py power --data FOLDER [--times 20]               a random host, and its unflushed writes
    python bench/recovery_time.py lid --data FOLDER [--seconds 600]              all of a host is stopped, and goes on
    python bench/recovery_time.py night --data FOLDER [--minutes 60] [--seed 1]  everything in `evener lab chaos --list`
    python bench/recovery_time.py cost --data FOLDER [--turns 8]                 what an undisturbed run pays for it
    python bench/recovery_time.py --table                                        what is there

A pause is the longest time between the ends of two steps around a fault, less the run's typical step. Whoever was lost
is back when a world has all hosts again; beside that stands how long `import torch` takes on a host just then. At the
end every loss is compared with that of one process that nobody disturbs. What it costs is the ratio of the usual steps
of runs with `--membership live` and `fixed`, which take turns on the same two hosts of a core each. Rows go into
bench/chaos.jsonl. Needs Linux and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.fault_injection import (
    AGENT_PROGRAM,
    FAULT_TABLE,
    FAULTS_BY_NAME,
    RANK_PROGRAM,
    SUPERVISOR_PROGRAM,
    find_pids,
    inject_faults,
    schedule_faults,
)
from evener.lab.lab_spec import HostSpec, LabSpec

RESULTS = Path(__file__).with_name("chaos.jsonl")
EVENER_COMMAND = (sys.executable, "-c", "from evener.cli.main import main; main()")
COMMON_FLAGS = {
    "batch": 12,
    "dtype": "fp32",
    "dropout": 0,
    "eval-every": 0,
    "eval-tokens": 256,
    "threads": 1,
    "lr": 3e-5,
    "min-lr": 3e-5,
    "warmup": 0,
    "compile": "off",
    "checkpoint-every": 20,
}
REJOIN_TIMEOUT_S = 180.0  # until all hosts are in the world again
WRITEBACK_S = 5.0  # power: what was written since and not flushed is lost; ext4 commits as often
PAUSE_WINDOW_S = 30.0  # of a fault, in which the longest pause counts as its own


class FaultRun:
    """A run on three hosts."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.run = folder, options, RunDir(folder / "run")
        writeback_s = WRITEBACK_S if options.kind == "power" else None
        hosts = {name: HostSpec(rate="1Gbit", cpus=0.6, disk="2GB", writeback_s=writeback_s) for name in "abc"}
        self.lab = EmulatedLab.up(LabSpec(name="chaos", hosts=hosts), out=folder / "fleet.toml")
        flags = COMMON_FLAGS | {"model": options.model, "data": options.data.absolute(), "steps": 10**6,
                          "membership": options.membership, "shares": "equal"}  # fmt: skip
        self.flags = [f"--{name}={value}" for name, value in flags.items()]
        argv = [*EVENER_COMMAND, "train", "--fleet", str(folder / "fleet.toml"), "--out", "run", *self.flags]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output)
        self.wait_until(lambda: len(self.step_end_times()) > 30, "it begins")

    def step_end_times(self) -> list[float]:
        """When each of rank 1's that has come home ended, by the controller's clock: hosts of a lab share it."""
        path = self.run.steps_path(1)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["ended"] for line in lines if line.endswith(b"\n")]

    def membership_epochs(self) -> list[dict[str, Any]]:
        lines = {line for path in self.run.path.glob("hosts/*/events.jsonl")
                 for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")}  # fmt: skip
        found = {event["number"]: event for event in map(json.loads, lines) if event["event"] == "world"}
        return [event for _, event in sorted(found.items())]

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = REJOIN_TIMEOUT_S) -> float:
        began = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() - began > timeout_s:
                raise SystemExit(f"{what}: not so\n{(self.folder / 'output').read_text()[-3000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def has_regrouped(self, num_epochs: int) -> bool:
        return len(self.membership_epochs()) > num_epochs

    def has_all_hosts(self, num_epochs: int) -> bool:
        """Is there a later world than so many, with all hosts?"""
        worlds = self.membership_epochs()
        return len(worlds) > num_epochs and len(worlds[-1]["hosts"]) == len(self.lab.hosts)

    def stop_and_check(self) -> dict[str, Any]:
        """Stop it, and set its losses beside those of one process."""
        subprocess.run([*EVENER_COMMAND, "stop", "run"], cwd=self.folder, check=True, capture_output=True, timeout=300)
        self.process.wait(300)
        manifest = self.run.manifest()
        losses, taken = dict[int, set[float]](), dict[int, set[int]]()  # of each step: whoever has recorded it
        for rank in range(3):
            for record in self.run.records(rank):
                taken.setdefault(record.step, set()).add(record.epoch)
                losses.setdefault(record.step, set()).update([] if record.loss is None else [record.loss])
        steps = max(taken) + 1
        argv = [sys.executable, "-m", "evener.worker", *self.flags, f"--steps={steps}", "--device=cpu",
                f"--out={self.folder / 'alone'}"]  # fmt: skip
        argv = [word for word in argv if not word.startswith(("--membership", "--shares"))]
        subprocess.run(argv, check=True, capture_output=True)
        alone = {record.step: record.loss for record in RunDir(self.folder / "alone").records(0)}
        off = {step: abs(loss / theirs - 1) for step, of_step in losses.items() for loss in of_step
               if (theirs := alone.get(step)) is not None}  # fmt: skip
        apart = min((step for step, one in off.items() if one > 1e-5), default=None)
        left = [
            pid
            for host in self.lab.hosts
            for what in (RANK_PROGRAM, AGENT_PROGRAM, SUPERVISOR_PROGRAM)
            for pid in find_pids(host, what)
        ]
        half = [str(path) for folder in (self.run.path, *(host.home for host in self.lab.hosts))
                for path in folder.rglob(".*.tmp")]  # fmt: skip
        return {
            "steps": steps, "verdict": manifest.verdict, "worst_loss_off": max(off.values()), "apart_at": apart,
            "steps_without_loss": steps - len(off), "taken_again": sum(len(one) - 1 for one in taken.values()),
            "replicas_agree": manifest.result.replicas_agree if manifest.result else None, "left": len(left),
            "half_files": half,
        }  # fmt: skip

    def pauses_s(self, moments: list[float]) -> list[float]:
        """Of each fault."""
        ends = sorted(ended for rank in range(3) for ended in [one.ended for one in self.run.records(rank)])
        typical = statistics.median(b - a for a, b in zip(ends, ends[3:], strict=False))
        found = []
        for moment in moments:
            near = [b - a for a, b in itertools.pairwise(ends) if b > moment and a < moment + PAUSE_WINDOW_S]
            found.append(max(near, default=0.0) - typical)
        return found


def inject_one_by_one(
    fault_run: FaultRun, inject: Callable[[random.Random], tuple[str, Callable[[], None]]]
) -> Iterator[dict[str, Any]]:
    """Fault after fault, each when all hosts are there again and a random time later."""
    chance = random.Random(fault_run.options.seed)
    for number in range(fault_run.options.times):
        time.sleep(chance.uniform(2.0, 6.0))
        since, moment = len(fault_run.membership_epochs()), time.time()
        host, mend = inject(chance)
        fault_run.wait_until(functools.partial(fault_run.has_regrouped, since), "the others go on")
        mend()
        fault_run.wait_until(functools.partial(fault_run.has_all_hosts, since), f"{host} is back")
        print(f"{number + 1}: {host}, back after {time.time() - moment:.1f} s", flush=True)
        yield {"host": host, "moment": moment, "back_s": time.time() - moment}


def kill_ranks(fault_run: FaultRun) -> list[dict[str, Any]]:
    def kill(chance: random.Random) -> tuple[str, Callable[[], None]]:
        host = chance.choice(fault_run.lab.hosts)
        FAULTS_BY_NAME["kill-rank"].begin(fault_run.lab, host)
        return host.name, lambda: None

    return list(inject_one_by_one(fault_run, kill))


def power_off_hosts(fault_run: FaultRun) -> list[dict[str, Any]]:
    def off(chance: random.Random) -> tuple[str, Callable[[], None]]:
        first = fault_run.membership_epochs()[-1]["hosts"][0]
        name = first if fault_run.options.first else chance.choice([one.name for one in fault_run.lab.hosts])
        fault_run.lab.host(name).power_off()
        return name, fault_run.lab.host(name).boot

    return list(inject_one_by_one(fault_run, off))


def suspend_host(fault_run: FaultRun) -> list[dict[str, Any]]:
    host, moment, since = fault_run.lab.host("c"), time.time(), len(fault_run.membership_epochs())
    for pid in host.pids():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(fault_run.options.seconds)
    opened = time.time()
    for pid in host.pids():
        os.kill(pid, signal.SIGCONT)
    fault_run.wait_until(lambda: fault_run.has_all_hosts(since), "c is back")
    return [{"host": "c", "moment": moment, "back_s": time.time() - opened}]


def inject_all_faults(fault_run: FaultRun) -> list[dict[str, Any]]:
    rows = []
    for event, begins in inject_faults(
        fault_run.lab, schedule_faults(fault_run.options.seed, fault_run.options.minutes, list("abc"), FAULT_TABLE)
    ):
        if begins:
            print(event, flush=True)
            rows.append({"host": event.host, "fault": event.fault.name, "moment": time.time(),
                         "lasts_s": event.duration_s, "expected_pause_s": event.fault.max_pause_s})  # fmt: skip
    fault_run.wait_until(lambda: fault_run.has_all_hosts(0), "all are there")
    return rows


SCENARIOS = {"kills": kill_ranks, "power": power_off_hosts, "lid": suspend_host, "night": inject_all_faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=[*SCENARIOS, "cost"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--membership", default="live")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--first", action="store_true", help="power: always of the first host")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--turns", type=int, default=8, help="cost: pairs of runs")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.kind is not None:
        if options.data is None:
            parser.error("--data: which corpus?")
        if options.kind == "cost":
            measure_overhead(options)
        else:
            folder = Path(tempfile.mkdtemp(prefix="evener-chaos-"))
            try:
                run_scenario(folder, options)
            except BaseException:
                print(f"what there is of it: {folder}", file=sys.stderr)  # an hour's worth
                raise
            shutil.rmtree(folder)
    print_table()


def measure_overhead(options: argparse.Namespace) -> None:
    """Runs of a minute with and without membership, in turns."""
    ratios = []
    with tempfile.TemporaryDirectory(prefix="evener-chaos-") as folder:
        # A core each: whoever has a part of one waits for the next part whenever it has waited for somebody.
        hosts = {name: HostSpec(rate="1Gbit", cores=(core,)) for core, name in enumerate("ab")}
        lab = EmulatedLab.up(LabSpec(name="chaos", hosts=hosts), out=Path(folder, "fleet.toml"))
        try:
            for turn in range(options.turns):
                order = ("live", "fixed") if turn % 2 else ("fixed", "live")
                took = {membership: _typical_step_s(Path(folder), options, membership, turn) for membership in order}
                ratios.append(took["live"] / took["fixed"])
                print(f"{turn + 1}: {took['fixed'] * 1e3:.1f} and {took['live'] * 1e3:.1f} ms, "
                      f"{ratios[-1]:.4f}; median {statistics.median(ratios):.4f}", flush=True)  # fmt: skip
        finally:
            lab.down()
    row = {"kind": "cost", "model": options.model, "date": time.strftime("%Y-%m-%d"), "ratios": ratios}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _typical_step_s(folder: Path, options: argparse.Namespace, membership: str, turn: int) -> float:
    flags = COMMON_FLAGS | {"model": options.model, "data": options.data.absolute(), "for": "40s",
                      "membership": membership, "shares": "equal", "sync": "ddp"}  # fmt: skip
    out = f"{membership}-{turn}"
    argv = [*EVENER_COMMAND, "train", "--fleet", str(folder / "fleet.toml"), "--out", out,
            *[f"--{name}={value}" for name, value in flags.items()]]  # fmt: skip
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=300)
    records = RunDir(folder / out).records(0)
    return statistics.median(record.wall_s for record in records[len(records) // 3 :])  # the first ones are slower


def run_scenario(folder: Path, options: argparse.Namespace) -> None:
    night = FaultRun(folder, options)
    try:
        faults = SCENARIOS[options.kind](night)
        imports = night.lab.hosts[0].exec([sys.executable, "-c", "import time; t = time.time(); import torch; "
                                           "print(time.time() - t)"])  # fmt: skip
        found = night.stop_and_check()
        for fault, pause in zip(faults, night.pauses_s([one["moment"] for one in faults]), strict=True):
            fault["pause_s"] = pause
        row = {"kind": options.kind, "model": options.model, "membership": options.membership, "seed": options.seed,
               "date": time.strftime("%Y-%m-%d"), "import_s": float(imports.stdout), "faults": faults}  # fmt: skip
        with RESULTS.open("a") as file:
            file.write(json.dumps(row | found) + "\n")
    finally:
        if night.process.poll() is None:
            night.process.kill()
        night.lab.down()


def print_table() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    print(
        "| | faults | pause: median, 95 %, worst | back: median, 95 % | import torch | steps | taken again | loss off |"
    )
    print("|:--|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        if row["kind"] == "cost":
            continue
        pauses, backs = (sorted(one[what] for one in row["faults"] if what in one) for what in ("pause_s", "back_s"))
        back = f"{statistics.median(backs):.1f}, {backs[int(0.95 * len(backs))]:.1f} s" if backs else ""
        off = "" if row["worst_loss_off"] is None else f"{row['worst_loss_off']:.1e}"
        title = f"{row['kind']}, {row['membership']}, {row['model']}"
        print(f"| {title} | {len(pauses)} | {statistics.median(pauses):.1f}, "
              f"{pauses[int(0.95 * len(pauses))]:.1f}, {pauses[-1]:.1f} s | {back} | {row['import_s']:.1f} s | "
              f"{row['steps']} | {row['taken_again']} | {off} |")  # fmt: skip
    for row in rows:
        if row["kind"] == "cost":
            ratio, num = statistics.median(row["ratios"]), len(row["ratios"])
            print(f"{row['model']}: a step with --membership live takes {ratio:.4f} times one with fixed, {num} pairs")


if __name__ == "__main__":
    main()
