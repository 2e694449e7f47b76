"""Run directories written without a run, for tests of whatever reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from evener.core.base.file_io import write_atomic
from evener.core.cluster.host_info import HostInfo
from evener.core.model.corpus import Corpus
from evener.core.model.shape import preset_shape
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.run_spec import EvalSpec, RunSpec, TrainSpec
from evener.core.run.rundir import Contention, Manifest, RankProcess, RunResult
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepCost, StepRecord

STARTED = 1_795_000_000.0
BATCH, BLOCK_SIZE = 16, 64
MEASURED = {"data_s": 0.001, "compute_s": 0.100, "exposed_sync_s": 0.0, "wait_s": 0.0, "optimizer_s": 0.004}


def contention(ranks: int, **figures: float) -> Contention:
    """A measurement in which all ranks found the same; by default they do not disturb each other."""
    alone = {"alone_s": 0.05, "alone_cpus": 0.99, "copy_alone_Bps": 12e9} | figures
    together = {name.replace("alone", "together"): value for name, value in alone.items()}
    return Contention(**{name: [value] * ranks for name, value in (together | alone | figures).items()})


def write_run(
    path: Path,
    costs: list[dict[str, float | None]],
    *,
    cpus: list[float | None] | None = None,
    threads: int = 1,
    cores: int = 2,
    contention: Contention | None = None,
    sync_s: float | None = None,
    steps: int = 20,
    tokens: list[int] | None = None,
    losses: Callable[[int], float | None] = lambda step: 3.0 / (step + 1),
    evaluations: dict[int, float] | None = None,
    verdict: str = "finished",
    result: RunResult | None = None,
    corpus: str = "verbs",
    device: str = "cpu",
    dropout: float = 0.0,
    ended: float = STARTED + 60,
) -> RunWriter:
    """One cost a rank (missing parts as in MEASURED), the same in every step."""
    num = len(costs)
    shape = preset_shape("tiny", 256, BLOCK_SIZE, dropout=dropout)
    run = RunWriter(path)
    for rank, given in enumerate(costs):
        cost = StepCost(**(MEASURED | given))
        wall_s = cost.total_s
        lines = b""
        for step in range(steps):
            record = StepRecord(
                step=step,
                epoch=0,
                tokens=tokens[rank] if tokens else BATCH * BLOCK_SIZE // num,
                loss=losses(step),
                wall_s=wall_s,
                cost=cost,
                sync_s=sync_s if num > 1 else None,
                cpu_s=None if cpus is None or cpus[rank] is None else wall_s * cpus[rank],
                bytes=0 if num == 1 else 480_000,
                members=num,
                lr=1e-3,
                grad_norm=1.0,
                ended=STARTED + wall_s * step,
            )
            lines += msgspec.json.encode(record) + b"\n"
        write_atomic(run.steps_path(rank), lines)
    if result is None and verdict == "finished":
        result = RunResult(
            steps=steps,
            loss=losses(steps - 1) if steps else None,
            val_loss=1.25,
            replicas_agree=True if num > 1 else None,
            peak_memory_bytes=[400_000_000] * num,
        )
    run.write_manifest(
        Manifest(
            verdict=verdict,
            started=STARTED,
            ended=None if verdict == "running" else ended,
            argv=["evener", "train"],
            versions={"evener": "0.1", "torch": "2.13.0", "python": "3.11.7"},
            spec=RunSpec(
                out=str(path), train=TrainSpec(steps=steps or 20, batch=BATCH, lr=3e-4), eval=EvalSpec(eval_every=10)
            ),
            shape=shape,
            corpus=Corpus(
                path=f"data/{corpus}",
                name=corpus,
                tokenizer="byte",
                vocab_size=256,
                dtype="uint16",
                train_tokens=1000,
                val_tokens=100,
                content_hash="sha256:0",
                tokenizer_hash="sha256:1",
            ),
            code_hash="c0de",
            params_by_group=shape.params_by_group(),
            num_params=shape.num_params(),
            roster=initial_roster(
                RunSpec(train=TrainSpec(batch=BATCH)), [RankSlot(host="h", device=device)] * num, BLOCK_SIZE
            ),
            compiled=False,
            sampler="epochs-1",
            hosts=[HostInfo(host="h", system="Linux", cpu="cpu", cores=cores, memory_bytes=8 << 30, python="3.11.7")],
            ranks=[RankProcess(rank=rank, host="h", device=device, threads=threads, pid=rank) for rank in range(num)],
            contention=contention,
            result=result,
        )
    )
    for step, val_loss in (evaluations or {}).items():
        run.add_event("evaluation", step=step, val_loss=val_loss, tokens=1024, took_s=0.1)
    return run
