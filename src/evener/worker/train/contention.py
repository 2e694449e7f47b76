"""Measure contention: the same work timed by each rank alone, then by all ranks at once, without communication.

Several processes on one machine share its cores, its caches and its memory bus. Which of them is the bottleneck shows
in two more figures: the number of cores that a rank really ran on, and the bandwidth of a large copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from evener.core.base.units import median
from evener.core.run.rundir import Contention

if TYPE_CHECKING:
    from evener.worker.train.datasets import Dataset
    from evener.worker.train.run import Run

NUM_REPEATS = 3
COPY_BYTES = 1 << 26  # beyond any cache


def measure_contention(run: Run, model: nn.Module, dataset: Dataset) -> Contention:
    """Measure every rank alone and all together; takes about 3 · (ranks + 1) forward and backward passes."""
    samples = dataset.global_batch(run.spec.train.seed, 0, run.member.largest_micro_batch or 1)
    batch = dataset.load(samples, run.device)
    source = torch.ones(COPY_BYTES // 4, device=run.device)
    target = torch.empty_like(source)

    def train_once() -> None:
        with run.autocast():
            loss = model(*batch)
        loss.backward()
        model.zero_grad()

    def copy() -> None:
        target.copy_(source)

    works = (train_once, copy)
    for rank in range(run.world_size):
        run.group.barrier()
        if rank == run.rank:
            alone = [_time_work(work, run.device) for work in works]
    together = []
    for work in works:
        run.group.barrier()
        together.append(_time_work(work, run.device))
    mine = [alone[0], together[0], [2 * COPY_BYTES / alone[1][0]], [2 * COPY_BYTES / together[1][0]]]
    all_ranks = run.group.all_gather(mine, list[list[float]])
    return Contention(
        alone_s=[rank[0][0] for rank in all_ranks],
        together_s=[rank[1][0] for rank in all_ranks],
        alone_cpus=[rank[0][1] for rank in all_ranks],
        together_cpus=[rank[1][1] for rank in all_ranks],
        copy_alone_Bps=[rank[2][0] for rank in all_ranks],
        copy_together_Bps=[rank[3][0] for rank in all_ranks],
    )


def _time_work(work: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the median seconds of the work, and the number of cores that this process ran on meanwhile."""
    took, cpus = [], []
    for _ in range(NUM_REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - wall)
        cpus.append((time.process_time() - cpu) / took[-1])
    return median(took) or 0.0, median(cpus) or 0.0
