"""Set-ups of the benches: the same training by each host and combination of hosts, or by each sync strategy.

compute      the operations of one process's training step
fleet        each host alone: one process, one process per core, its GPUs; then together, the fastest first
strategies   the fastest host alone, then all hosts with each sync strategy, for the same steps
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.units import pluralize
from evener.core.model.compute_profile import ComputeBenchSpec
from evener.core.model.corpus import load_corpus
from evener.core.model.shape import PRESETS, preset_shape
from evener.core.run.prediction import Job
from evener.core.run.resolve import check_sync_for_shape
from evener.core.run.roster import parse_sync
from evener.core.run.run_spec import DataSpec, EvalSpec, MachineSpec, ModelSpec, RunSpec, TrainSpec
from evener.plan.choice.options import is_applicable

MAX_PROCESSES = 8  # on one host's CPU
MAX_STEPS = 10_000  # more than fit in any time limit, which ends a run
DEFAULT_SYNC_STRATEGIES = ("ddp", "packed", "bf16", "int8", "int4", "powersgd:4", "diloco:10", "diloco:10:int8",
         "diloco:10:int8:streamed", "diloco:10:int4:streamed", "diloco:30", "ddp+sparse", "packed+sparse",
         "int8+sparse")  # fmt: skip


class BenchSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One training of a bench."""

    label: str  # for a person, unique in its bench
    hosts: list[str]
    spec: RunSpec
    ranks: int | None = None  # per host; None: as in the fleet file

    @property
    def name(self) -> str:
        """Return the name of its run directory."""
        return re.sub(r"[^\w.+]+", "-", self.label).strip("-")


def scaling_bench_spec(model: str, batch: int, seconds: float) -> RunSpec:
    """Return what all runs of a scaling bench share; in fp32 and without dropout, so that losses can be compared."""
    return RunSpec(
        model=ModelSpec(model=model, dropout=0.0, compile="off", dtype="fp32"),
        train=TrainSpec(steps=MAX_STEPS, batch=batch, max_s=seconds, warmup=20, sync="ddp"),
        eval=EvalSpec(eval_every=0),
        machine=MachineSpec(contention=True),
    )


def compute_bench_spec(
    model: str, batch: int, seconds: float, corpora: Sequence[str] | None, given: dict[str, Any]
) -> ComputeBenchSpec:
    """Return the spec of a compute bench, without dropout unless `given` says so; UsageError if a value is wrong.

    `given` has fields of ComputeBenchSpec, and dropout and vocab_size, which otherwise is that of the corpus.
    """
    if model not in PRESETS:
        raise UsageError(f"--model {model}: no such preset", hint=did_you_mean(model, PRESETS))
    if corpora and len(corpora) > 1:
        raise UsageError("--preset compute takes one corpus")
    fields = {"batch": batch, "seconds": seconds} | given
    vocab_size = load_corpus(corpora[0]).vocab_size if corpora else PRESETS[model].vocab_size
    vocab_size, dropout = fields.pop("vocab_size", vocab_size), fields.pop("dropout", 0.0)
    fields["shape"] = preset_shape(model, vocab_size, dropout=dropout)
    try:
        return from_builtins(fields, ComputeBenchSpec)
    except msgspec.ValidationError as error:
        known = {"dtype": "auto, fp32 or bf16", "device": "auto, cpu or cuda"}
        flag = next((name for name in known if f"$.{name}" in str(error)), None)
        if flag is None:
            raise UsageError(f"--preset compute: {error}") from None
        raise UsageError(f"--{flag} {fields[flag]}: expected {known[flag]}") from None


def fleet_bench_spec(data: str, model: str, batch: int, seconds: float) -> RunSpec:
    """Return the spec of all runs of a fleet bench: a time limit, and an evaluation of only one block, at the end."""
    train = TrainSpec(steps=MAX_STEPS, batch=batch, max_s=seconds, warmup=20, sync="ddp")
    return _comparable_spec(data, model, train, EvalSpec(eval_every=0, eval_tokens=1))


def strategies_bench_spec(data: str, model: str, batch: int, steps: int) -> RunSpec:
    """Return the spec of all runs of a bench of sync strategies: the same steps, and an evaluation at the end."""
    return _comparable_spec(data, model, TrainSpec(steps=steps, batch=batch, sync="ddp"), EvalSpec(eval_every=0))


def _comparable_spec(data: str, model: str, train: TrainSpec, evaluation: EvalSpec) -> RunSpec:
    """Return a spec without dropout, so that the losses of its runs can be compared."""
    return RunSpec(
        data=DataSpec(data=data),
        model=ModelSpec(model=model, dropout=0.0, compile="off"),
        train=train,
        eval=evaluation,
    )


def single_host_setups(base: RunSpec, host: str, cores: int, num_gpus: int) -> list[BenchSetup]:
    """Return the set-ups of one host by itself: CPU processes, then GPUs.

    >>> from evener.core.run.run_spec import DataSpec, EvalSpec, MachineSpec, ModelSpec, RunSpec, TrainSpec
    >>> [setup.name for setup in single_host_setups(RunSpec(), "attic", 4, 1)]
    ['attic-1-process', 'attic-4-processes', 'attic-GPU']
    """
    counts = sorted({1, min(cores, base.train.batch, MAX_PROCESSES)})
    setups = [
        BenchSetup(
            label=f"{host}, {pluralize(ranks, 'process')}", hosts=[host], spec=_with_device(base, "cpu"), ranks=ranks
        )
        for ranks in counts
    ]
    if num_gpus:
        label = f"{host}, GPU" if num_gpus == 1 else f"{host}, {num_gpus} GPUs"
        setups.append(BenchSetup(label=label, hosts=[host], spec=_with_device(base, "cuda")))
    return setups


def multi_host_setups(base: RunSpec, hosts: Sequence[str], with_gpus: Sequence[str]) -> list[BenchSetup]:
    """Return set-ups of the first two hosts, the first three, … all; and of all on their CPUs if any has a GPU."""
    setups = [BenchSetup(label=" + ".join(hosts[:num]), hosts=list(hosts[:num]), spec=base)
              for num in range(2, len(hosts) + 1)]  # fmt: skip
    if len(hosts) > 1 and with_gpus:
        setups.append(
            BenchSetup(label=" + ".join(hosts) + ", processors", hosts=list(hosts), spec=_with_device(base, "cpu"))
        )
    return setups


def strategy_setups(job: Job, fastest: str, hosts: Sequence[str],
                syncs: Sequence[str] | None) -> list[BenchSetup]:  # fmt: skip
    """Return the fastest host alone, and all hosts with each of these strategies, or with those that suit the model.

    Raise UsageError for a strategy that does not exist or has no effect on this model.
    """
    base = job.spec
    for name in syncs or ():
        check_sync_for_shape(parse_sync(name), job.shape)
    chosen = syncs or [sync for sync in DEFAULT_SYNC_STRATEGIES if is_applicable(parse_sync(sync), job)]
    setups = [BenchSetup(label=f"{fastest} alone", hosts=[fastest], spec=base)]
    for sync in dict.fromkeys(chosen):
        train = msgspec.structs.replace(base.train, sync=sync)
        setups.append(BenchSetup(label=sync, hosts=list(hosts), spec=msgspec.structs.replace(base, train=train)))
    return setups


def _with_device(base: RunSpec, device: str) -> RunSpec:
    return msgspec.structs.replace(base, machine=msgspec.structs.replace(base.machine, device=device))
