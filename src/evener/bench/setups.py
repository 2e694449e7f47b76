"""Set-ups of the fleet benchmarks: the same training by each host and combination of hosts, or by each sync strategy.

fleet        each host alone: one process, one process per core, its GPUs; then together, the fastest first
strategies   the fastest host alone, then all hosts with each sync strategy, for the same steps
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from evener.core.prediction import Job
from evener.core.resolve import check_suits
from evener.core.roster import parse_sync
from evener.core.spec import RunSpec
from evener.core.units import plural
from evener.plan.options import makes_sense

MOST_PROCESSES = 8  # on one host's CPU
SYNCS = ("ddp", "packed", "bf16", "int8", "int4", "powersgd:4", "diloco:10", "diloco:10:int8",
         "diloco:10:int8:streamed", "diloco:10:int4:streamed", "diloco:30", "ddp+sparse", "packed+sparse",
         "int8+sparse")  # fmt: skip


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One training of a bench."""

    label: str  # for a person, unique in its bench
    hosts: list[str]
    spec: RunSpec
    ranks: int | None = None  # per host; None: as in the fleet file

    @property
    def name(self) -> str:
        """Return the name of its run directory."""
        return re.sub(r"[^\w.+]+", "-", self.label).strip("-")


def alone(base: RunSpec, host: str, cores: int, num_gpus: int) -> list[Setup]:
    """Return the set-ups of one host by itself: CPU processes, then GPUs.

    >>> from evener.core.spec import RunSpec
    >>> [setup.name for setup in alone(RunSpec(), "attic", 4, 1)]
    ['attic-1-process', 'attic-4-processes', 'attic-GPU']
    """
    counts = sorted({1, min(cores, base.train.batch, MOST_PROCESSES)})
    setups = [Setup(label=f"{host}, {plural(ranks, 'process')}", hosts=[host], spec=_on(base, "cpu"), ranks=ranks)
              for ranks in counts]  # fmt: skip
    if num_gpus:
        label = f"{host}, GPU" if num_gpus == 1 else f"{host}, {num_gpus} GPUs"
        setups.append(Setup(label=label, hosts=[host], spec=_on(base, "cuda")))
    return setups


def together(base: RunSpec, hosts: Sequence[str], with_gpus: Sequence[str]) -> list[Setup]:
    """Return set-ups of the first two hosts, the first three, … all; and of all on their CPUs if any has a GPU."""
    setups = [Setup(label=" + ".join(hosts[:num]), hosts=list(hosts[:num]), spec=base)
              for num in range(2, len(hosts) + 1)]  # fmt: skip
    if len(hosts) > 1 and with_gpus:
        setups.append(Setup(label=" + ".join(hosts) + ", processors", hosts=list(hosts), spec=_on(base, "cpu")))
    return setups


def by_strategy(job: Job, fastest: str, hosts: Sequence[str],
                syncs: Sequence[str] | None) -> list[Setup]:  # fmt: skip
    """Return the fastest host alone, and all hosts with each of these strategies, or with those that suit the model.

    Raise UsageError for a strategy that does not exist or has no effect on this model.
    """
    base = job.spec
    for name in syncs or ():
        check_suits(parse_sync(name), job.shape)
    chosen = syncs or [sync for sync in SYNCS if makes_sense(parse_sync(sync), job)]
    setups = [Setup(label=f"{fastest} alone", hosts=[fastest], spec=base)]
    for sync in dict.fromkeys(chosen):
        train = msgspec.structs.replace(base.train, sync=sync)
        setups.append(Setup(label=sync, hosts=list(hosts), spec=msgspec.structs.replace(base, train=train)))
    return setups


def _on(base: RunSpec, device: str) -> RunSpec:
    return msgspec.structs.replace(base, machine=msgspec.structs.replace(base.machine, device=device))
