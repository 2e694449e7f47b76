"""A host is cut to half in the middle of a run, and later whole again: how soon do shares answer, and what comes of it?

    python bench/straggler_rebalance.py --data FOLDER [--sync auto] [--rate 1Gbit] [--turns 1]

Two emulated hosts of 0.9 core each, real ssh, `char`, 16 × 256 tokens a step. What two such hosts can do with one at
half is ¾ of what they did before: what is measured from the tenth step after the cut on is set beside that. Needs Linux
and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from scaling_efficiency import EVENER_COMMAND, num_recorded_steps, run_evener

from evener.core.run.rundir import RunDir
from evener.lab import cgroup
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec

CORES_PER_HOST = 0.9
RESPONSE_STEPS = 10  # steps
STEPS_PER_PHASE = 50  # steps between two changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder: evener data text FILE --out …")
    parser.add_argument("--sync", default="auto")
    parser.add_argument("--rate", default="1Gbit")
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evener-halved-") as name:
        folder = Path(name)
        hosts = {
            host: HostSpec(rate=options.rate, cpus=CORES_PER_HOST, cores=(core,)) for core, host in enumerate("ab")
        }
        lab = EmulatedLab.up(LabSpec(name="halved", hosts=hosts), out=folder / "fleet.toml")
        try:
            for kind in (("wire", "--no-iperf3", "--no-trials"), ("host", "--model", "char")):
                run_evener(folder, "probe", *kind, "--fleet", "fleet.toml")
            for turn in range(options.turns):
                measure_run(folder, options, folder / f"run-{turn}")
        finally:
            lab.down()


def measure_run(folder: Path, options: argparse.Namespace, out: Path) -> None:
    """One run: whole, half, whole again."""
    flags = {"data": options.data.absolute(), "model": "char", "batch": 16, "dropout": 0, "sync": options.sync,
             "eval-every": 0, "eval-tokens": 256, "checkpoint-every": 0, "verify-every": 0, "compile": "off",
             "steps": 2000, "out": out}  # fmt: skip
    argv = [*EVENER_COMMAND, "train", "--fleet", "fleet.toml", *(f"--{name}={value}" for name, value in flags.items())]
    run, changed = RunDir(out), list[float]()
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for step, cores in (
            (2 * STEPS_PER_PHASE, CORES_PER_HOST / 2),
            (3 * STEPS_PER_PHASE, CORES_PER_HOST),
            (4 * STEPS_PER_PHASE, None),
        ):
            while process.poll() is None and num_recorded_steps(run) < step:
                time.sleep(0.2)
            if cores:
                cgroup.make("halved", "b", cores, None)
                changed.append(time.time())
        if process.poll() is None:
            run_evener(folder, "stop", str(out))
        output, _ = process.communicate()
    if len(run.records(0)) < 4 * STEPS_PER_PHASE:
        raise SystemExit(output)
    cuts = [next(record.step for record in run.records(0) if record.ended > at) for at in changed]
    answers = [(event["step"], event["shares"]) for event in run.events() if event["event"] == "rebalanced"]
    before = throughput(run, cuts[0] - STEPS_PER_PHASE, cuts[0])
    print(f"{run.manifest().roster.sync}: {before:.0f} tokens/s")
    for cut, ideal, what in ((cuts[0], 3 / 4, "half"), (cuts[1], 1.0, "whole again")):
        found = throughput(run, cut + RESPONSE_STEPS, cut + STEPS_PER_PHASE - RESPONSE_STEPS)
        changes = ", ".join(f"step {step}: {shares}" for step, shares in answers if cut <= step < cut + STEPS_PER_PHASE)
        share = found / before / ideal
        print(
            f"{what} at step {cut}: {share:.2f} of the ideal after {RESPONSE_STEPS} steps; {changes or 'no answer'}",
            flush=True,
        )


def throughput(run: RunDir, first: int, last: int) -> float:
    """Tokens/s of both ranks in these steps."""
    both = [run.records(rank)[first:last] for rank in (0, 1)]
    tokens = sum(record.tokens for of_rank in both for record in of_rank[1:])
    return tokens / (both[0][-1].ended - both[0][0].ended)


if __name__ == "__main__":
    main()
