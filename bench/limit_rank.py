"""A rank of bench/scaling_efficiency.py: evener's own, whose steps alternate with steps that exchange nothing.

    limit ─ run ─ limit ─ run ─ …     a few seconds each, in the same processes: drift of the machine cancels

In a block of the limit every rank trains a second model with its share of the batch, as fast as it can and without a
word to the others. A run's block beside the mean of the limits before and after it is one pair. The run stops itself
when the 90 % interval of the median of the pairs is narrow enough, or when there are enough pairs.
bench/limit_cli.py starts it; OPTIONS, as JSON, precedes the flags of a rank.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from evener.core.run.run_spec import TrainSpec
from evener.worker.__main__ import main
from evener.worker.train import loop
from evener.worker.train.model import GPT
from evener.worker.train.optim import adamw
from evener.worker.train.train_step import TrainStep

sys.path.insert(0, str(Path(__file__).parent))  # hosts start it with python -P

from common import median_interval

RESULT = "beside its limit:"
Autocast = Callable[[], AbstractContextManager[Any]]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and for how long."""

    first: int  # steps before the first block
    block_s: float  # of a block
    min_s: float  # of all blocks of the run together
    half_width: float  # at which the interval is narrow enough, as a fraction of the limit
    max_pairs: int


class Block(NamedTuple):
    """What a rank, or all, trained in a block."""

    tokens: float
    wall_s: float
    cpu_s: float


class LimitMeter:
    """Takes a rank's steps, and measures the limit between them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._limits: list[dict[str, float]] = []
        self._runs: list[dict[str, float]] = []
        self._steps_per_block = self._steps_left = 0
        self._tokens = 0.0
        self._began = self._began_cpu = 0.0  # of the block of the run

    def after_step(self, step: TrainStep, model: GPT, train: TrainSpec, autocast: Autocast) -> None:
        """Count a step of the run; between two blocks of it, measure the limit."""
        context = step._context
        if step.index + 1 < self._options.first:
            self._began = time.perf_counter()  # of the last step before the first block
            return
        if not self._steps_per_block:
            (took_s,) = context.group.all_reduce_sum((time.perf_counter() - self._began) / context.group.world_size)
            every = step._roster.sync.every
            self._steps_per_block = max(1, math.ceil(self._options.block_s / took_s / every)) * every
            self._alone = model_alone(model, train)
            self._train_alone(step, autocast)  # its memory is allocated
        else:
            self._tokens, self._steps_left = self._tokens + step._tokens, self._steps_left - 1
            if self._steps_left:
                return
        context.sync.wait_all()
        if self._tokens:
            mine = Block(self._tokens, time.perf_counter() - self._began, time.process_time() - self._began_cpu)
            self._runs.append(together(step, mine, are_one_run=True))
        self._limits.append(together(step, self._measure_limit(step, autocast), are_one_run=False))
        if self._runs:
            self._judge(step)
        context.group.barrier()
        self._began, self._began_cpu = time.perf_counter(), time.process_time()
        self._tokens, self._steps_left = 0.0, self._steps_per_block

    def _measure_limit(self, step: TrainStep, autocast: Autocast) -> Block:
        step._context.group.barrier()
        tokens, began, began_cpu = 0.0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < self._options.block_s:
            tokens += self._train_alone(step, autocast)
        return Block(tokens, time.perf_counter() - began, time.process_time() - began_cpu)

    def _train_alone(self, step: TrainStep, autocast: Autocast) -> float:
        """Do to the second model what a step does, with this step's share of the batch; return its tokens.

        A rank without a share could train too: it takes an equal one.
        """
        model, optimizer, clip = self._alone
        equal_share = step._samples[: max(1, len(step._samples) // step._context.group.world_size)]
        micro_batches = step._micro_batch_samples or [equal_share]
        for samples in micro_batches:
            tokens, targets = step._context.dataset.load(samples, step._context.group.device)
            with autocast():
                loss = model(tokens, targets)
            (loss / step._divisor).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(step._context.dataset.num_tokens(samples) for samples in micro_batches))

    def _judge(self, step: TrainStep) -> None:
        """Print what is known, and stop the run if that is enough."""
        around = [
            (a["tokens_per_s"] + b["tokens_per_s"]) / 2 for a, b in zip(self._limits, self._limits[1:], strict=False)
        ]
        shares = [run["tokens_per_s"] / limit for run, limit in zip(self._runs, around, strict=True)]
        low, high = median_interval(shares)
        is_enough = sum(run["wall_s"] for run in self._runs) >= self._options.min_s and (
            len(shares) >= self._options.max_pairs
            or (len(shares) >= 6 and (high - low) / 2 <= self._options.half_width)
        )
        if step._context.group.rank == 0:
            row = {"of_limit": statistics.median(shares), "low": low, "high": high, "shares": shares,
                   "limits": self._limits, "runs": self._runs, "sync": str(step._roster.sync),
                   "hosts": sorted({member.host for member in step._roster.members})}  # fmt: skip
            print(RESULT, json.dumps(row), flush=True)  # into its log: a host may not share any other file
            if is_enough:
                os.kill(os.getpid(), signal.SIGTERM)


def model_alone(model: GPT, train: TrainSpec) -> tuple[GPT, torch.optim.AdamW, float]:
    """A second model of the same shape with its optimizer, and the norm at which its gradients are clipped."""
    other = GPT(model.shape).to(next(model.parameters()).device)
    return other, adamw(other, train), train.clip


def together(step: TrainStep, mine: Block, *, are_one_run: bool) -> dict[str, float]:
    """All ranks' block: a run takes as long as its slowest rank, ranks by themselves each their own time."""
    blocks = [Block(*values) for values in step._context.group.all_gather(list(mine), list[float])]
    tokens = sum(block.tokens for block in blocks)
    wall_s = max(block.wall_s for block in blocks)
    rate = tokens / wall_s if are_one_run else sum(block.tokens / block.wall_s for block in blocks)
    return {"tokens_per_s": rate, "wall_s": wall_s, "cpu_s_per_token": sum(block.cpu_s for block in blocks) / tokens}


def measured(train_one_step: Callable[..., None], meter: LimitMeter) -> Callable[..., None]:
    """A step of the loop, and what the meter does after it."""

    @functools.wraps(train_one_step)
    def train_and_measure(step: TrainStep, model: GPT, optimizer: torch.optim.AdamW, train: TrainSpec,
                          autocast: Autocast) -> None:  # fmt: skip
        train_one_step(step, model, optimizer, train, autocast)
        meter.after_step(step, model, train, autocast)

    return train_and_measure


if __name__ == "__main__":
    options = msgspec.json.decode(sys.argv.pop(1), type=Options)
    loop.train_one_step = measured(loop.train_one_step, LimitMeter(options))
    raise SystemExit(main())
