"""A rank of bench/scaling_efficiency.py: evener's own, whose steps alternate with steps that exchange nothing.

    limit ─ run ─ limit ─ run ─ …                a few seconds each, in the same processes: drift of the machine cancels
    limit ─ ddp ─ limit ─ int8 ─ limit ─ ddp …   with `compare`: the strategies that auto could have taken, in turn

In a block of the limit every rank trains a second model with its share of the batch, as fast as it can and without a
word to the others. A run's block beside the mean of the limits before and after it is one pair. The run stops itself
when the 90 % interval of the median of the pairs is narrow enough, or when there are enough pairs. A strategy that is
slower than the chosen one in each of its first pairs is not measured further. bench/limit_cli.py starts a rank;
OPTIONS, as JSON, precedes its flags.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch

from evener.core.run.prediction import PlanOption
from evener.core.run.roster import DDP, Roster, SyncSpec
from evener.core.run.run_spec import TrainSpec
from evener.plan.choice.options import with_best_bucket_size
from evener.plan.choice.strategy_selector import StepTimes, StrategySelector, StrategySwitch
from evener.plan.choice.strategy_trial import SETTLE_STEPS
from evener.worker.__main__ import main
from evener.worker.membership import fixed
from evener.worker.record.step_recorder import StepReport
from evener.worker.train import loop
from evener.worker.train.model import GPT
from evener.worker.train.optim import adamw
from evener.worker.train.train_step import TrainStep

sys.path.insert(0, str(Path(__file__).parent))  # hosts start it with python -P

from common import median_interval

RESULT = "beside its limit:"
MIN_SPEED = 0.5  # of the fastest, by prediction
MIN_PAIRS = 6
MIN_BLOCK_STEPS = 3  # with fewer a single long step, or the rest of a quota's period, widens the interval of a pair
OTHERS_HALF_WIDTHS = 2.0  # of strategies that are compared with the chosen one, whose interval may be wider
MIN_PAIRS_TO_DROP = 4  # of which all are below those of the chosen strategy
Autocast = Callable[[], AbstractContextManager[Any]]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and for how long."""

    first: int  # steps before the first block
    block_s: float  # of a block
    min_s: float  # of all blocks of the chosen strategy together
    half_width: float  # at which the interval is narrow enough, as a fraction of the limit
    max_pairs: int  # of a strategy
    compare: bool  # with the strategies that auto could have taken


class Block(NamedTuple):
    """What a rank, or all, trained in a block."""

    tokens: float
    wall_s: float
    cpu_s: float


class Series(msgspec.Struct):
    """The blocks of one strategy."""

    sync: SyncSpec
    predicted_s: float | None = None  # a step, with the shares of the run; None: not by auto
    num_steps: int = 0  # of a block
    runs: list[dict[str, float]] = []
    shares: list[float] = []  # of the limit, by pair
    is_dropped: bool = False  # slower than the chosen one in all pairs, and not measured to the end

    @property
    def interval(self) -> tuple[float, float]:
        """Of the median share."""
        return median_interval(self.shares)


class MeteredSelector(StrategySelector):
    """auto's own selector, until the meter wants a strategy: the same one on all ranks, as they measure the same."""

    newest: ClassVar[MeteredSelector | None] = None
    wanted: SyncSpec | None = None
    round_shares: ClassVar[tuple[int, list[int]]] = (
        0,
        [],
    )  # of the chosen strategy: steps of a round, and shares of it

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        MeteredSelector.newest = self

    @property
    def is_trying(self) -> bool:
        """Shares stay while strategies are measured."""
        return self.wanted is not None or super().is_trying

    def observe_step(self, step: int, times: StepTimes, roster: Roster, next_step: int) -> StrategySwitch | None:
        if self.wanted is None or self._next is not None:
            return super().observe_step(step, times, roster, next_step)
        if self.wanted == roster.sync:
            return None
        return self._switch(self.option(self.wanted, roster), roster, next_step, "to measure it", is_trial=True)

    def option(self, sync: SyncSpec, roster: Roster) -> PlanOption:
        """What a step with another strategy is predicted to take."""
        (every, shares), other = self.round_shares, roster.renumber_ranks().replace_sync(sync)
        other = other.replace_shares(shares) if shares and sync.every == every else other
        return with_best_bucket_size(self._job, self._cluster, other)

    def possible(self, roster: Roster) -> list[PlanOption]:
        """What auto may take, but for what is predicted to be twice as slow as the fastest."""
        options = self._options(self._cluster, roster)
        fastest = max(option.tokens_per_s for option in options)
        return [option for option in options if option.tokens_per_s >= MIN_SPEED * fastest]


class LimitMeter:
    """Takes a rank's steps, and measures the limit between them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._limits: list[dict[str, float]] = []
        self._all: list[Series] = []  # the chosen strategy first
        self._active: list[Series] = []  # those whose interval is too wide yet, in the order of their blocks
        self._now = Series(DDP)
        self._to_settle, self._steps_left = -1, 0  # steps before a block, and of it
        self._first_step = 0  # of a block
        self._tokens = 0.0
        self._began = self._began_cpu = 0.0

    def after_step(self, step: TrainStep, model: GPT, train: TrainSpec, autocast: Autocast) -> None:
        """Count a step of the run; between two blocks of it, measure the limit."""
        context, roster = step._context, step._roster
        if not self._all:
            if step.index + 1 >= self._options.first and not context.membership.is_undecided:
                self._choose_strategies(context.membership.roster)
                self._alone = model_alone(model, train)
                self._train_alone(step, autocast)  # its memory is allocated
                context.sync.wait_all()
                self._limits.append(together(step, self._measure_limit(step, autocast), are_one_run=False))
                self._begin(self._active[0], step)
        elif roster.sync != self._now.sync:
            pass  # it is being changed
        elif self._to_settle > 0:
            self._to_settle -= 1
            if self._to_settle == 0:
                self._begin_block(step)
        else:
            self._tokens, self._steps_left = self._tokens + step._tokens, self._steps_left - 1
            if self._steps_left == 0:
                context.sync.wait_all()
                self._end_block(step, autocast)

    def _choose_strategies(self, roster: Roster) -> None:
        """Take the strategy that the run has now, and with `compare` those that it could have."""
        selector = MeteredSelector.newest
        MeteredSelector.round_shares = roster.sync.every, roster.round_shares
        self._all = [Series(roster.sync, selector.option(roster.sync, roster).step_s if selector else None)]
        if self._options.compare and selector is not None:  # with a host left out, there is nothing to choose
            self._all += [Series(option.roster.sync, option.step_s) for option in selector.possible(roster)
                          if option.roster.sync != roster.sync]  # fmt: skip
        self._active = sorted(self._all, key=lambda one: (one.sync.drifts, not one.sync.is_exact))

    def _begin(self, series: Series, step: TrainStep) -> None:
        """Turn to a strategy: its first steps settle."""
        self._now = series
        if MeteredSelector.newest is not None:
            MeteredSelector.newest.wanted = series.sync
        self._to_settle = max(SETTLE_STEPS, series.sync.every)
        self._began = time.perf_counter()
        if series.sync == step._roster.sync and series.num_steps:
            self._to_settle = 0
            self._begin_block(step)

    def _begin_block(self, step: TrainStep) -> None:
        group, every = step._context.group, self._now.sync.every
        if not self._now.num_steps:
            settled_s = (time.perf_counter() - self._began) / max(SETTLE_STEPS, every)
            step_s = self._now.predicted_s or group.all_reduce_sum(settled_s / group.world_size)[0]
            num_rounds = max(1, math.ceil(self._options.block_s / step_s / every), MIN_BLOCK_STEPS // every)
            self._now.num_steps = num_rounds * every
        step._context.sync.wait_all()
        group.barrier()
        self._tokens, self._steps_left, self._first_step = 0.0, self._now.num_steps, step.index + 1
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def _end_block(self, step: TrainStep, autocast: Autocast) -> None:
        mine = Block(self._tokens, time.perf_counter() - self._began, time.process_time() - self._began_cpu)
        steps = {"first_step": self._first_step, "last_step": step.index}
        self._now.runs.append(together(step, mine, are_one_run=True) | steps)
        self._limits.append(together(step, self._measure_limit(step, autocast), are_one_run=False))
        around = statistics.mean(limit["tokens_per_s"] for limit in self._limits[-2:])
        self._now.shares.append(self._now.runs[-1]["tokens_per_s"] / around)
        following = self._active[(self._active.index(self._now) + 1) % len(self._active)]
        self._active = [one for one in self._active if not self._is_enough(one)]
        if step._context.group.rank == 0:
            # into its log: a host may not share any other file
            print(RESULT, json.dumps(self._result(step)), flush=True)
            if not self._active:
                os.kill(os.getpid(), signal.SIGTERM)
        if self._active:
            self._begin(following if following in self._active else self._active[0], step)

    def _is_enough(self, one: Series) -> bool:
        if len(one.shares) >= self._options.max_pairs:
            return True
        chosen = self._all[0]
        if min(len(one.shares), len(chosen.shares)) < MIN_PAIRS_TO_DROP:
            return False
        if max(one.shares) < min(chosen.shares):
            one.is_dropped = True
            return True
        low, high = one.interval
        measured_s = sum(run["wall_s"] for run in one.runs)
        half_width = self._options.half_width * (1.0 if one is chosen else OTHERS_HALF_WIDTHS)
        return (
            len(one.shares) >= MIN_PAIRS
            and (high - low) / 2 <= half_width
            and (one is not chosen or measured_s >= self._options.min_s)
        )

    def _measure_limit(self, step: TrainStep, autocast: Autocast) -> Block:
        step._context.group.barrier()
        tokens, num_steps, began, began_cpu = 0.0, 0, time.perf_counter(), time.process_time()
        while num_steps < MIN_BLOCK_STEPS or time.perf_counter() - began < self._options.block_s:
            tokens, num_steps = tokens + self._train_alone(step, autocast), num_steps + 1
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

    def _result(self, step: TrainStep) -> dict[str, Any]:
        """What is known, by strategy, the chosen one first."""
        strategies = {}
        for one in self._all:
            if one.shares:
                low, high = one.interval
                strategies[str(one.sync)] = {"of_limit": statistics.median(one.shares), "low": low, "high": high,
                                             "predicted_s": one.predicted_s, "pairs": one.shares,
                                             "is_dropped": one.is_dropped,
                                             "runs": one.runs}  # fmt: skip
        return {"chosen": str(self._all[0].sync), "strategies": strategies, "limits": self._limits,
                "shares": step._roster.shares,
                "hosts": sorted({member.host for member in step._roster.members})}  # fmt: skip


def keep_round_shares(
    update_roster: Callable[[fixed.FixedMembership, Sequence[StepReport], int], Roster | None],
) -> Callable[[fixed.FixedMembership, Sequence[StepReport], int], Roster | None]:
    """`update_roster`, whose changes to rounds as long as those of the chosen strategy divide them as the run did."""

    def update(membership: fixed.FixedMembership, reports: Sequence[StepReport], next_step: int) -> Roster | None:
        roster, (every, shares) = update_roster(membership, reports, next_step), MeteredSelector.round_shares
        if roster is not None and shares and roster.sync.every == every and not roster.round_shares:
            membership.roster = roster = roster.replace_shares(shares)
        return roster

    return update


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
    MEMBERSHIP: Any = fixed.FixedMembership
    MEMBERSHIP.update_roster = keep_round_shares(MEMBERSHIP.update_roster)
    fixed.StrategySelector = MeteredSelector  # type: ignore[attr-defined]
    loop.train_one_step = measured(loop.train_one_step, LimitMeter(options))
    raise SystemExit(main())
