"""DDP baseline: stock DistributedDataParallel on two Gloo processes, with every phase of the step timed.

It uses nothing of evener's own loop, so that PyTorch alone is measured: each rank reads its own shard
(index % world size == rank), has its own seed (35000 + rank), averages gradients by DDP with all its defaults.

The all-reduce is timed in two ways. Variant B, the hook: from the call for each bucket to its completion. Variant A,
barrier brackets: backward between two barriers, with and without synchronization; the difference is what communication
adds. Variant A runs a backward of its own after the step, so that its barriers do not slow the step that is measured.

Writes OUT/rank-R.jsonl and OUT/state-rank-R.pt.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.core.base.decoding import from_json
from evener.core.model.shape import GPTShape
from evener.worker.rank.clock import HostClock, LapTimer
from evener.worker.rank.process_groups import ProcessGroups, exit_immediately
from evener.worker.sync.gradient_sync import union_length_s
from evener.worker.train.model import GPT

SEED = 35000
STEPS = 100
LR = 3e-4


class DdpBaselineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the baseline run."""

    out: str
    sentences: str  # JSON lines of {"ids": [...], "text": ...}
    shape: GPTShape
    batch: int  # sentences a rank takes in one step
    threads: int


def make_shard(sentences: list[Any], rank: int, world_size: int) -> list[Any]:
    """Return every sentence whose index is `rank` modulo `world_size`: no overlap, full coverage."""
    return sentences[rank::world_size]


def endless_batches(shard: list[list[int]], size: int, block_size: int, generator: torch.Generator) -> Any:
    """Yield (tokens, targets) endlessly, each (size, block_size); target -1 is ignored in the loss."""
    while True:
        order = torch.randperm(len(shard), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            tokens = torch.zeros(size, block_size, dtype=torch.int64)
            targets = torch.full((size, block_size), -1, dtype=torch.int64)
            for row, index in enumerate(order[start : start + size]):
                ids = shard[index][: block_size + 1]
                tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
                targets[row, : len(ids) - 1] = torch.tensor(ids[1:])
            yield tokens, targets


class TimedAllReduceHook:
    """Variant B: DDP's own all-reduce (a sum, divided by the world size), timed per bucket."""

    def __init__(self, timer: LapTimer) -> None:
        self.timer = timer
        self.spans: list[tuple[float, float]] = []

    def all_reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            self.timer.lap("compute_s")
        begin = time.perf_counter()
        buffer = bucket.buffer().div_(dist.get_world_size())

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self.spans.append((begin, time.perf_counter()))
            return future.value()[0]

        return dist.all_reduce(buffer, async_op=True).get_future().then(done)


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


def run_rank(spec: DdpBaselineSpec) -> None:
    group = ProcessGroups("cpu")
    if group.world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = group.rank, group.world_size
    torch.set_num_threads(spec.threads)
    torch.manual_seed(SEED + rank)
    lines = [json.loads(line) for line in Path(spec.sentences).read_text().splitlines()]
    shard = make_shard(lines, rank, world_size)
    (num_sentences,) = group.all_reduce_sum(len(shard))
    assert num_sentences == len(lines), "the shards do not cover the corpus"
    hook = TimedAllReduceHook(LapTimer(HostClock()))
    model = DistributedDataParallel(GPT(spec.shape))
    model.register_comm_hook(None, hook.all_reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = endless_batches(
        [line["ids"] for line in shard], spec.batch, spec.shape.block_size, torch.Generator().manual_seed(SEED + rank)
    )

    with (Path(spec.out) / f"rank-{rank}.jsonl").open("w") as log:
        log.write(json.dumps({"first_sentence": shard[0]["text"], "sentences": len(shard), "of": len(lines)}) + "\n")
        for step in range(STEPS):
            began, cpu_began = time.perf_counter(), time.process_time()
            hook.timer, hook.spans = LapTimer(HostClock()), []
            batch = next(data)
            hook.timer.lap("data_s")
            loss = mean_loss(model, batch)
            loss.backward()  # the gradients are averaged here
            hook.timer.lap("blocked_s")
            optimizer.step()
            optimizer.zero_grad()
            hook.timer.lap("optimizer_s")
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
            with model.no_sync():
                local_s = barrier_backward_s(model, batch)
            row = {
                "step": step,
                "tokens": int((batch[1] >= 0).sum()),
                "loss": float(loss),
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "parts_s": hook.timer.phase_times_s(),
                "allreduce_s": union_length_s(hook.spans),
                "bracket_s": barrier_backward_s(model, batch),
                "bracket_no_sync_s": local_s,
            }
            log.write(json.dumps(row) + "\n")
    torch.save(model.module.state_dict(), Path(spec.out) / f"state-rank-{rank}.pt")
    group.close()


if __name__ == "__main__":
    run_rank(from_json(sys.argv[1], DdpBaselineSpec))
    exit_immediately(0)
