"""Lab 1, the DDP baseline: a real all-reduce between two processes on one machine, and whether two beat one, and why.

OUT/timings.jsonl       one line per step: rank 0 of two processes
OUT/state-rank-R.pt     the final weights of each rank
OUT/scaling.png         one process compared with two
OUT/manifest.json       the measurements and their explanation
OUT/runs/N-process      the same two runs as run directories: `evener report` reads them
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.file_io import write_atomic
from evener.core.base.units import percentile
from evener.core.base.version import __version__
from evener.core.cluster.host_info import local_host_info
from evener.core.model.corpus import Corpus, load_corpus
from evener.core.model.shape import GPTShape, preset_shape
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.run_spec import DataSpec, MachineSpec, ModelSpec, RunSpec, TrainSpec
from evener.core.run.rundir import Manifest, RankProcess, RunResult, code_hash
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepCost, StepRecord, align_steps, split_blocked
from evener.launch.distributed_program import local_program_lines
from evener.launch.torch_subprocess import program_lines
from evener.plan.cost.collective_cost import ring_all_reduce_bytes
from evener.report.explain.explain_run import explain_scaling
from evener.report.pages.png_charts import scaling_png
from evener.report.read.run_summary import RunSummary, read_records, summarize_run

SEED = 35000
STEPS = 100
MEASURED_STEPS = 50  # the first 50 steps are warm-up
BATCH_PER_RANK = 16  # sentences per rank and step
BLOCK_SIZE = 64
TOLERANCE = 1e-5
Encode = Callable[[str], Iterable[int]]  # text to token ids


def run_ddp_baseline(
    corpus: Path, out: Path, encode: Encode, *, force: bool, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Run the lab and return its manifest; `encode` is the corpus's tokenizer. `out` appears only when complete."""
    if out.exists() and any(out.iterdir()) and not force:
        raise UsageError(f"{out}: exists and is not empty", hint="use --force to replace it, or another --out")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        manifest = _run_and_write(corpus, partial, out, encode, notify)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _run_and_write(
    corpus_path: Path, folder: Path, out: Path, encode: Encode, notify: Callable[[str], None]
) -> dict[str, Any]:
    corpus = load_corpus(corpus_path)
    texts = _load_sentences(corpus_path)
    sentences = folder / "sentences.jsonl"
    lines = ({"text": text, "ids": [int(i) for i in encode(text)]} for text in texts)
    sentences.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = preset_shape("tiny", corpus.vocab_size, BLOCK_SIZE, width=128, num_layers=4)
    spec = RunSpec(
        data=DataSpec(data=str(corpus_path)),
        model=ModelSpec(model="tiny", width=128, num_layers=4, block_size=BLOCK_SIZE),
        train=TrainSpec(steps=STEPS, batch=BATCH_PER_RANK, lr=3e-4, clip=0.0, seed=SEED),
    )
    summaries: list[RunSummary] = []
    rows: list[dict[str, Any]] = []
    shards: list[dict[str, Any]] = []
    for num_ranks in (1, 2):
        work = folder / "work"
        work.mkdir()
        threads = max(1, local_host_info().cores // num_ranks)
        lab = {
            "out": str(work),
            "sentences": str(sentences),
            "shape": msgspec.to_builtins(shape),
            "batch": BATCH_PER_RANK,
            "threads": threads,
        }
        notify(f"{num_ranks} {'process' if num_ranks == 1 else 'processes'}: {STEPS} steps")
        started = time.time()
        # to the end
        deque(
            local_program_lines(num_ranks, "evener.worker.probe.ddp_baseline", json.dumps(lab), threads=threads),
            maxlen=0,
        )
        records = [[json.loads(line) for line in (work / f"rank-{rank}.jsonl").open()] for rank in range(num_ranks)]
        shards = [lines[0] for lines in records]
        rows = records[0][1:]
        rundir = RunWriter(folder / "runs" / f"{num_ranks}-process")
        manifest = _make_manifest(spec, shape, corpus, num_ranks, threads, started)
        _write_run(rundir, manifest, [lines[1:] for lines in records], shape.num_params() * 4)
        summaries.append(summarize_run(rundir))
        if num_ranks == 2:
            for rank in range(2):
                (work / f"state-rank-{rank}.pt").rename(folder / f"state-rank-{rank}.pt")
        shutil.rmtree(work)
    sentences.unlink()
    write_atomic(folder / "timings.jsonl", b"".join(_format_timing(row) for row in rows))
    scaling_png({corpus.name: summaries}, folder / "scaling.png")
    states = json.loads(list(program_lines("evener.worker.compare_weights", str(folder)))[-1])
    measured = rows[-MEASURED_STEPS:]
    hook = [row["allreduce_s"] * 1e3 for row in measured]
    exposed = [row["parts_s"]["blocked_s"] * 1e3 for row in measured]
    bracket = [(row["bracket_s"] - row["bracket_no_sync_s"]) * 1e3 for row in measured]
    results = {
        "seed": SEED,
        "lab": "01-ddp-on-cpu",
        "backend": "gloo",
        "world_size": 2,
        "model_params": shape.num_params(),
        "steps": STEPS,
        "allreduce_p50_ms": percentile(hook, 0.5),
        "allreduce_p95_ms": percentile(hook, 0.95),
        "tokens_per_sec_1proc": _tokens_per_s(summaries[0]),
        "tokens_per_sec_2proc": _tokens_per_s(summaries[1]),
        "byte_equivalent": states["largest_difference"] <= TOLERANCE,
        "lesson_notes": explain_scaling(summaries),
        "allreduce_mean_ms": sum(hook) / len(hook),
        "exposed_mean_p50_p95_ms": _mean_p50_p95(exposed),
        "variant_a_mean_p50_p95_ms": _mean_p50_p95(bracket),
        "largest_difference": states["largest_difference"],
        "sentences": [shard["sentences"] for shard in shards],
        "sentences_total": shards[0]["of"],
        "first_sentence": [shard["first_sentence"] for shard in shards],
        "evener": __version__,
    }
    write_atomic(folder / "manifest.json", json.dumps(results, indent=2, ensure_ascii=False).encode() + b"\n")
    return results | {"out": str(out)}


def _load_sentences(corpus_path: Path) -> list[str]:
    path = corpus_path / "train.jsonl"
    try:
        return [json.loads(line)["text"] + "\n" for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="run evener data verbs to make the lab's corpus") from None


def _write_run(rundir: RunWriter, manifest: Manifest, rows: list[list[dict[str, Any]]], gradient_bytes: int) -> None:
    num_ranks = len(rows)
    lines: list[bytes] = [b""] * num_ranks
    for step_rows in zip(*rows, strict=True):
        blocked = split_blocked([row["parts_s"]["blocked_s"] for row in step_rows])
        tokens = sum(row["tokens"] for row in step_rows)
        loss = sum(row["loss"] * row["tokens"] for row in step_rows) / tokens
        for rank, row in enumerate(step_rows):
            parts = row["parts_s"]
            record = StepRecord(
                step=row["step"],
                epoch=0,
                tokens=row["tokens"],
                loss=loss,
                wall_s=row["wall_s"],
                cost=StepCost(
                    data_s=parts["data_s"],
                    compute_s=parts["compute_s"],
                    exposed_sync_s=blocked[rank][0],
                    wait_s=blocked[rank][1],
                    optimizer_s=parts["optimizer_s"],
                ),
                sync_s=row["allreduce_s"] if num_ranks > 1 else None,
                cpu_s=row["cpu_s"],
                bytes=ring_all_reduce_bytes(gradient_bytes, num_ranks),
                members=num_ranks,
                lr=manifest.spec.train.lr,
                grad_norm=None,
                ended=0.0,
            )
            lines[rank] += msgspec.json.encode(record) + b"\n"
    for rank, content in enumerate(lines):
        write_atomic(rundir.steps_path(rank), content)
    rundir.write_manifest(manifest)


def _make_manifest(
    spec: RunSpec, shape: GPTShape, corpus: Corpus, num_ranks: int, threads: int, started: float
) -> Manifest:
    machine = local_host_info()
    return Manifest(
        verdict="finished",
        started=started,
        ended=time.time(),
        argv=["evener", "bench", "--preset", "lab01"],
        versions={"evener": __version__, "python": machine.python},
        spec=msgspec.structs.replace(spec, machine=MachineSpec(ranks=num_ranks)),
        shape=shape,
        corpus=corpus,
        code_hash=code_hash(),
        params_by_group=shape.params_by_group(),
        num_params=shape.num_params(),
        roster=initial_roster(spec, [RankSlot(host=machine.host, device="cpu")] * num_ranks, shape.block_size),
        compiled=False,
        sampler="own",
        hosts=[machine],
        ranks=[
            RankProcess(rank=rank, host=machine.host, device="cpu", threads=threads, pid=0) for rank in range(num_ranks)
        ],
        result=RunResult(steps=STEPS, loss=None, val_loss=None, replicas_agree=None, peak_memory_bytes=[]),
    )


def _tokens_per_s(summary: RunSummary) -> float:
    """Return tokens per second over the last MEASURED_STEPS steps, by rank 0's clock."""
    steps = align_steps(read_records(RunWriter(summary.run_dir)))[-MEASURED_STEPS:]
    tokens = sum(record.tokens for by_rank in steps for record in by_rank.values())
    return tokens / math.fsum(by_rank[0].wall_s for by_rank in steps)


def _format_timing(row: dict[str, Any]) -> bytes:
    timing = {
        "step": row["step"],
        "loss": row["loss"],
        "tokens": row["tokens"],
        "step_ms": row["wall_s"] * 1e3,
        "compute_ms": (row["parts_s"]["data_s"] + row["parts_s"]["compute_s"]) * 1e3,
        "allreduce_ms": row["allreduce_s"] * 1e3,
        "exposed_ms": row["parts_s"]["blocked_s"] * 1e3,
        "optimizer_ms": row["parts_s"]["optimizer_s"] * 1e3,
        "bracket_ms": row["bracket_s"] * 1e3,
        "bracket_no_sync_ms": row["bracket_no_sync_s"] * 1e3,
    }
    return json.dumps(timing).encode() + b"\n"


def _mean_p50_p95(values: list[float]) -> list[float]:
    return [sum(values) / len(values), percentile(values, 0.5), percentile(values, 0.95)]
