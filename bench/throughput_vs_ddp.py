"""evener's loop beside a plain hand-written DDP loop: the same model, two ranks, a step of one and a step of the other.

    python bench/throughput_vs_ddp.py [--steps 30]  tokens/s of evener / tokens/s of the plain loop, median of pairs

Both train in the same two processes, in turn, so that whatever the machine does meanwhile it does to both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from common import evener_steps, resolve_benchmark_run, torchrun_command

from evener.core.run.resolve import ResolvedRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="char")
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    if "RANK" in os.environ:
        return compare_throughput(options)
    sys.exit(subprocess.run(torchrun_command(__file__, sys.argv[1:])).returncode)


def compare_throughput(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    from evener.worker.train.run import join

    what = resolve_benchmark_run(options.model, options.batch, options.steps)
    seconds: dict[str, list[float]] = {"evener": [], "plain": []}
    with join(what.spec, what) as run:
        ours, theirs = evener_steps(run, what), ddp_steps(what, options.batch // run.world_size)
        next(theirs), next(theirs)
        for _ in range(options.steps - 1):
            for name, steps in (("evener", ours), ("plain", theirs)):
                dist.barrier()
                seconds[name].append(next(steps))
        rank = run.rank
    if rank == 0:
        ratios = [plain / evener for plain, evener in zip(seconds["plain"], seconds["evener"], strict=True)]
        for name, values in seconds.items():
            print(f"{name:>7}: step p50 {statistics.median(values) * 1e3:.1f} ms")
        print(f"evener / plain tokens/s: {statistics.median(ratios):.3f}, median of {len(ratios)} pairs")


def ddp_steps(what: ResolvedRun, batch: int) -> Iterator[float]:
    """The loop that one writes by hand."""
    import numpy as np
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from evener.worker.train.model import GPT

    train, block = what.spec.train, what.shape.block_size
    model = DistributedDataParallel(GPT(what.gpt_shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.peak_lr, betas=(train.beta1, train.beta2))
    data = np.memmap(what.corpus.split_path("train"), dtype=what.corpus.dtype, mode="r")
    while True:
        began = time.perf_counter()
        positions = torch.randint(len(data) - block, (batch,))
        tokens = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in positions])
        targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in positions])
        loss = model(tokens, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield time.perf_counter() - began


main()
