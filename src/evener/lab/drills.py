"""Which drills are there, and what can no lab break? A row for every id of FAILURES.md that namespaces can produce."""

from __future__ import annotations

from evener.core.errors import UsageError, did_you_mean
from evener.lab import drills_hosts, drills_network, drills_runs
from evener.lab.drill import Drill

DRILLS: dict[str, Drill] = {
    drill.name: drill for drill in (*drills_network.DRILLS, *drills_hosts.DRILLS, *drills_runs.DRILLS)
}

NOT_HERE: dict[str, str] = {
    "clock.skew": "all hosts of a lab have this machine's clock: Linux has no namespace for the time of day",
    "mem.swap": "swap is the machine's: to make one host swap, all would",
    "link.congestion": "which congestion control is the faster one hangs on the wire and on how busy the cores are",
    "link.idle": "the ways of a lab are short: after silence TCP is at full speed again at once",
    "gpu.p2p": "it needs two GPUs behind an IOMMU that translates between them",
    "run.hang": "a program makes it, not a host",
    "run.collective-mismatch": "a program makes it, not a host",
    "run.nonfinite": "a program makes it, not a host: the run records which rank",
    "run.diverged": "it takes a flipped bit: evener verify names it, and its tests flip one",
    "run.straggler": "`evener report` names it, from the records of a longer run",
}


def find(name: str) -> Drill:
    """The drill of this name."""
    if name in NOT_HERE:
        raise UsageError(f"{name}: a lab cannot break this: {NOT_HERE[name]}", hint="evener lab drill --list")
    if name not in DRILLS:
        raise UsageError(f"{name}: no such drill", hint=did_you_mean(name, DRILLS))
    return DRILLS[name]
