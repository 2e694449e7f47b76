"""What does `evener launch --sync int8` make of an unchanged DDP program over a slow link? Two emulated hosts.

    python bench/launched_sync.py --text FILE [--rate 100Mbit] [--sync int8] [--steps 60] [--turns 3]

The program is a byte-level language model of 10.5M parameters (an MLP over 8 bytes), wrapped in DistributedDataParallel
and started as it is. Runs with DDP's own sums and with the strategy alternate. A figure is the median over the turns of
the ratio of the throughput of two runs side by side; losses are those that the program printed over its last quarter,
with the same seed. Every turn adds a line to bench/launched_sync.jsonl. Needs Linux and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
from evener.report.read.run_summary import summarize_run

RESULTS = Path(__file__).with_name("launched_sync.jsonl")
EVENER_COMMAND = (sys.executable, "-c", "from evener.cli.main import main; main()")
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

steps, context = int(sys.argv[1]), 8
dist.init_process_group("gloo")
torch.manual_seed(0)
text = torch.frombuffer(bytearray(open("text.txt", "rb").read()), dtype=torch.uint8).long()
windows = text.unfold(0, context + 1, 1)[: steps * 2 * 256 * 2]
data = TensorDataset(windows[:, :-1], windows[:, -1])
model = DistributedDataParallel(nn.Sequential(
    nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * context, 2048), nn.GELU(), nn.Linear(2048, 4096), nn.GELU(),
    nn.Linear(4096, 256),
))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(data, batch_size=256, sampler=DistributedSampler(data, seed=1), drop_last=True)
for step, (inputs, targets) in zip(range(steps), loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"loss {step} {mean.item() / dist.get_world_size():.6f}", flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rate", default="100Mbit")
    parser.add_argument("--sync", default="int8")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is taken down
    with tempfile.TemporaryDirectory(prefix="evener-launched-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM)
        (folder / "text.txt").write_bytes(options.text.read_bytes())
        hosts = {host: HostSpec(rate=options.rate, cores=(core,)) for core, host in enumerate("ab")}
        lab = EmulatedLab.up(LabSpec(name="launched", hosts=hosts), out=folder / "fleet.toml")
        try:
            turns = [measure_turn(folder, options, turn) for turn in range(options.turns)]
        finally:
            lab.down()
    ratios = [turn["ratio"] for turn in turns]
    losses = [turn[options.sync]["loss"] / turn["ddp"]["loss"] - 1 for turn in turns]
    print(f"{options.rate}: {options.sync} is {statistics.median(ratios):.2f} times DDP ({min(ratios):.2f} to "
          f"{max(ratios):.2f}, {len(ratios)} turns), loss {statistics.median(losses):+.2%}")  # fmt: skip


def measure_turn(folder: Path, options: argparse.Namespace, turn: int) -> dict[str, Any]:
    """Run the program with DDP's own sums and with the strategy; add a line to the results."""
    order = ["ddp", options.sync] if turn % 2 == 0 else [options.sync, "ddp"]
    row: dict[str, Any] = {sync: measure_run(folder, options, f"{sync}-{turn}", sync) for sync in order}
    row["ratio"] = row["ddp"]["step_s"] / row[options.sync]["step_s"]
    row |= {"rate": options.rate, "sync": options.sync, "steps": options.steps, "date": time.strftime("%Y-%m-%d")}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return row


def measure_run(folder: Path, options: argparse.Namespace, name: str, sync: str) -> dict[str, float]:
    """Return the seconds of a step, the bytes that a rank sends, and the loss of the last quarter."""
    argv = [*EVENER_COMMAND, "launch", "--fleet", "fleet.toml", "--include", "text.txt", "--sync", sync, "--out", name]
    done = subprocess.run(
        [*argv, "--", "train.py", str(options.steps)], cwd=folder, capture_output=True, text=True, check=False
    )
    rundir = RunDir(folder / name)
    losses = [float(line.split()[-1]) for line in rundir.log_path("a", 0).read_text().splitlines() if " loss " in line]
    if done.returncode or len(losses) != options.steps:
        raise SystemExit(f"{' '.join(argv)}:\n{done.stdout}{done.stderr}")
    summary = summarize_run(rundir)
    exposed_s = summary.ranks[0].typical.exposed_sync_s or 0.0
    return {
        "step_s": summary.step_p50_s or 0.0,
        "exposed": exposed_s / (summary.step_p50_s or 1.0),
        "bytes": summary.ranks[0].bytes or 0,
        "loss": statistics.fmean(losses[-options.steps // 4 :]),
    }


if __name__ == "__main__":
    main()
