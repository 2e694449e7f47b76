"""What does DDP do? Stock DistributedDataParallel on Gloo, in one process and in two, every phase of a step timed.

    python examples/ddp_baseline.py --data data/verbs --out experiments/35-ddp-cpu

Each rank reads its own sentences (index % world size == rank), has its own seed (35000 + rank), and averages gradients
by DDP with all its defaults. The all-reduce is timed in two ways. Variant B, the hook: from the call for each bucket to
its completion. Variant A, barrier brackets: a backward between two barriers, with and without synchronization; the
difference is what communication adds. Variant A runs a backward of its own after the step, so that its barriers do not
slow the step that is measured.

OUT/timings.jsonl       one line per step: rank 0 of two processes
OUT/state-rank-R.pt     the final weights of each of two ranks; `evener verify OUT` compares them
OUT/manifest.json       the measurements, and why two processes are, or are not, faster here than one
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.core.model.corpus import load_corpus
from evener.core.model.shape import preset_shape
from evener.corpus.tokenizer import load_tokenizer
from evener.worker.train.model import GPT

SEED = 35000
STEPS = 100
MEASURED_STEPS = 50  # the first 50 steps are warm-up
BATCH_PER_RANK = 16  # sentences per rank and step
BLOCK_SIZE = 64
LR = 3e-4
TOLERANCE = 1e-5


def endless_batches(shard: list[list[int]], generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets), each (BATCH_PER_RANK, BLOCK_SIZE); target -1 is ignored in the loss."""
    while True:
        order = torch.randperm(len(shard), generator=generator).tolist()
        for start in range(0, len(order) - BATCH_PER_RANK + 1, BATCH_PER_RANK):
            tokens = torch.zeros(BATCH_PER_RANK, BLOCK_SIZE, dtype=torch.int64)
            targets = torch.full((BATCH_PER_RANK, BLOCK_SIZE), -1, dtype=torch.int64)
            for row, index in enumerate(order[start : start + BATCH_PER_RANK]):
                ids = shard[index][: BLOCK_SIZE + 1]
                tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
                targets[row, : len(ids) - 1] = torch.tensor(ids[1:])
            yield tokens, targets


class TimedAllReduceHook:
    """Variant B: DDP's own all-reduce (a sum, divided by the world size), timed per bucket."""

    def __init__(self) -> None:
        self.backward_ended = 0.0  # when the last bucket was full
        self.spans: list[tuple[float, float]] = []

    def all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        begin = time.perf_counter()
        if bucket.is_last():
            self.backward_ended = begin
        buffer = bucket.buffer().div_(dist.get_world_size())

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self.spans.append((begin, time.perf_counter()))
            return future.value()[0]

        return dist.all_reduce(buffer, async_op=True).get_future().then(done)

    def all_reduce_s(self) -> float:
        """Return the seconds in which at least one bucket was on its way."""
        total, reached = 0.0, 0.0
        for begin, end in sorted(self.spans):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch) / (batch[1] >= 0).sum()


def barrier_backward_s(model: DistributedDataParallel, batch: tuple[Tensor, Tensor]) -> float:
    """Variant A: return the seconds of a backward between two barriers."""
    loss = mean_loss(model, batch)
    dist.barrier()
    began = time.perf_counter()
    loss.backward()
    dist.barrier()
    took = time.perf_counter() - began
    model.zero_grad()
    return took


def train_rank(corpus: Path, out: Path) -> None:
    """Train as one rank; write OUT/rank-R.jsonl and OUT/state-rank-R.pt."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.manual_seed(SEED + rank)
    lines = (corpus / "train.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = [json.loads(line)["text"] + "\n" for line in lines]
    shard = sentences[rank::world_size]  # no overlap, full coverage
    encode = load_tokenizer(corpus).encode
    data = endless_batches([list(encode(text)) for text in shard], torch.Generator().manual_seed(SEED + rank))
    shape = preset_shape("tiny", load_corpus(corpus).vocab_size, BLOCK_SIZE, width=128, num_layers=4)
    model, hook = DistributedDataParallel(GPT(shape)), TimedAllReduceHook()
    model.register_comm_hook(None, hook.all_reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    head = {"first_sentence": shard[0], "sentences": len(shard), "of": len(sentences), "params": shape.num_params()}
    rows: list[dict[str, Any]] = [head]
    for step in range(STEPS):
        hook.spans.clear()
        began = time.perf_counter()
        batch = next(data)
        loss = mean_loss(model, batch)
        loss.backward()  # the gradients are averaged here
        averaged = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        with model.no_sync():
            local_s = barrier_backward_s(model, batch)
        rows.append(
            {
                "step": step,
                "loss": loss.item(),
                "tokens": int((batch[1] >= 0).sum()),
                "step_ms": (ended - began) * 1e3,
                "compute_ms": (hook.backward_ended - began) * 1e3,
                "allreduce_ms": hook.all_reduce_s() * 1e3,
                "exposed_ms": (averaged - hook.backward_ended) * 1e3,
                "optimizer_ms": (ended - averaged) * 1e3,
                "bracket_ms": barrier_backward_s(model, batch) * 1e3,
                "bracket_no_sync_ms": local_s * 1e3,
            }
        )
    (out / f"rank-{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.save(model.module.state_dict(), out / f"state-rank-{rank}.pt")
    dist.destroy_process_group()


def run_ranks(num_ranks: int, corpus: Path, out: Path) -> list[list[dict[str, Any]]]:
    """Start this file as ranks by torchrun, and return what each wrote: its shard, then its steps."""
    print(f"{num_ranks} {'process' if num_ranks == 1 else 'processes'}: {STEPS} steps", file=sys.stderr)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    subprocess.run([*torchrun, __file__, "--data", str(corpus), "--out", str(out)], check=True)
    files = (out / f"rank-{rank}.jsonl" for rank in range(num_ranks))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def mean_p50_p95(values: list[float]) -> list[float]:
    return [
        statistics.fmean(values),
        statistics.median(values),
        statistics.quantiles(values, n=20, method="inclusive")[-1],
    ]


def tokens_per_s(ranks: list[list[dict[str, Any]]]) -> float:
    """Return tokens per second over the measured steps, by rank 0's clock."""
    tokens = sum(row["tokens"] for rows in ranks for row in rows[-MEASURED_STEPS:])
    return tokens * 1e3 / sum(row["step_ms"] for row in ranks[0][-MEASURED_STEPS:])


def explain(one: list[list[dict[str, Any]]], two: list[list[dict[str, Any]]]) -> str:
    """Say whether two processes are faster than one, and where a step takes longer."""
    ratio = tokens_per_s(two) / tokens_per_s(one)
    means = [
        {key: statistics.fmean(row[key] for row in ranks[0][-MEASURED_STEPS:]) for key in ranks[0][-1]}
        for ranks in (one, two)
    ]
    verdict = "faster than" if ratio > 1.05 else "slower than" if ratio < 0.95 else "as fast as"
    more = {key: means[1][key] - means[0][key] for key in ("compute_ms", "exposed_ms", "optimizer_ms")}
    return (
        f"Two processes are {verdict} one: {ratio:.2f} times its tokens/s, where 2 would be ideal. A step takes "
        f"{means[1]['step_ms']:.1f} ms with two and {means[0]['step_ms']:.1f} ms with one. With two, forward and "
        f"backward take {more['compute_ms']:+.1f} ms, waiting for the all-reduce and the other process "
        f"{more['exposed_ms']:+.1f} ms, the optimizer {more['optimizer_ms']:+.1f} ms. They share {os.cpu_count()} CPU "
        "cores."
    )


def main(corpus: Path, out: Path) -> None:
    """Train with one process and with two; write and print what was measured."""
    if not (corpus / "train.jsonl").exists():
        sys.exit(f"{corpus}/train.jsonl is missing: evener data verbs makes it")
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} exists and is not empty: remove it, or name another --out")
    with tempfile.TemporaryDirectory() as folder:
        one = run_ranks(1, corpus, Path(folder))
        two = run_ranks(2, corpus, Path(folder))  # in the place of the other's files
        states = [torch.load(Path(folder) / f"state-rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
        out.mkdir(parents=True, exist_ok=True)
        for rank in (0, 1):
            shutil.move(Path(folder) / f"state-rank-{rank}.pt", out)
    difference = max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])
    measured = two[0][-MEASURED_STEPS:]
    hook = mean_p50_p95([row["allreduce_ms"] for row in measured])
    results = {
        "seed": SEED,
        "lab": "01-ddp-on-cpu",
        "backend": "gloo",
        "world_size": 2,
        "model_params": two[0][0]["params"],
        "steps": STEPS,
        "allreduce_p50_ms": hook[1],
        "allreduce_p95_ms": hook[2],
        "tokens_per_sec_1proc": tokens_per_s(one),
        "tokens_per_sec_2proc": tokens_per_s(two),
        "byte_equivalent": difference <= TOLERANCE,
        "lesson_notes": explain(one, two),
        "allreduce_mean_ms": hook[0],
        "exposed_mean_p50_p95_ms": mean_p50_p95([row["exposed_ms"] for row in measured]),
        "variant_a_mean_p50_p95_ms": mean_p50_p95([row["bracket_ms"] - row["bracket_no_sync_ms"] for row in measured]),
        "largest_difference": difference,
        "sentences": [rows[0]["sentences"] for rows in two],
        "sentences_total": two[0][0]["of"],
        "first_sentence": [rows[0]["first_sentence"] for rows in two],
    }
    (out / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in two[0][1:]))
    (out / "manifest.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(results, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/verbs"), help="a corpus [data/verbs]")
    parser.add_argument("--out", type=Path, default=Path("experiments/35-ddp-cpu"), help="a new folder")
    arguments = parser.parse_args()
    (train_rank if "RANK" in os.environ else main)(arguments.data, arguments.out)
