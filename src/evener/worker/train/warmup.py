"""Warm-up step: run a program's first step once without effect, to warm up and to validate the program.

It runs the program's own forward and backward on the first step's batch: half of a micro-batch, the same half with
every sample twice, then the whole, whose backward exchanges gradients. Then compilers and caches are warm, and DDP has
rebuilt its buckets (so that a resumed run sums in the same order). It also finds out which buffers forward
changes, whether the ranks read the same data, and how a loss is reduced over its samples. A sum is what any split of
the batch needs; a mean stays the same when every sample comes twice; a mix is in between; a sum that was given a
count, as a mean is, becomes four times as large. A noisy loss, such as one with dropout, is tried until the
reduction is clear.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from evener.core.base.errors import UsageError
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.state import rng
from evener.worker.state.training_state import TrainingState, batch_norm_names
from evener.worker.train.buffers import BufferSnapshot
from evener.worker.train.datasets import DataFingerprint

MIN_TRIALS, MAX_TRIALS = 5, 64  # of a noisy loss
EXACT_TOLERANCE = 1e-3  # relative; a ratio this near to 1 or 2 needs one trial: the loss has no noise
CLEAR_STDERRS = 3.0  # standard errors from the border between mean and sum
MIX_MARGIN_LOG2 = 0.03  # distance of a mix from a mean and a sum, in log₂; bf16 sums are less off
NOISELESS_SPREAD_LOG2 = 1e-4  # in log₂: trials that differ by less have neither noise nor a changing state

LossReduction = Literal[
    "sum",
    "mean",
    "mix of a sum and a mean",
    "sum multiplied by a count",
    "loss that is not a sum over its samples",
]
REDUCTION_HINTS: dict[LossReduction, str] = {
    "mean": "reduction='sum', or step.backward(mean, number of samples or tokens that it is the mean of)",
    "mix of a sum and a mean": "multiply what is not a sum over the samples, such as a penalty on weights, by their "
    "number",
    "sum multiplied by a count": "step.backward(sum) without a count, or step.backward(mean, count)",
    "loss that is not a sum over its samples": "add up one loss a sample, each of which depends on no other sample of "
    "its micro-batch and is multiplied by no count",
}


class WarmupResult(msgspec.Struct, frozen=True):
    """The results of the warm-up step on one rank."""

    mutated_buffers: list[str]  # buffers that forward changed
    # of a loss that is not a sum: (reduction, loss of some samples, loss of each of them twice)
    wrong_reduction: tuple[LossReduction, float, float] | None
    has_backward: bool  # the program called step.backward
    data_fingerprint: DataFingerprint | None  # of the first step's samples; None if reading is random


class WarmupStep:
    """A warm-up step: construct it, run its `micro_batches`, then `finish` it, which restores the training state."""

    def __init__(
        self, training_state: TrainingState, group: ProcessGroups, *, is_user_program: bool, is_compiled: bool
    ) -> None:
        """Save the state to restore. `is_user_program`: the loss is the user's, so its reduction must be checked."""
        self._training_state = training_state
        self._group = group
        self._is_user_program = is_user_program
        self._is_compiled = is_compiled
        self._buffers = BufferSnapshot(
            training_state.module, [name for name, _ in training_state.module.named_buffers()]
        )
        self._states = copy.deepcopy(training_state.user_state_dicts())
        self._rng = rng.get_states(group.device)
        self._losses: list[list[float]] = []  # of each micro-batch run, one for each step.backward
        self._wrong_reduction: tuple[LossReduction, float, float] | None = None

    def micro_batches(self, samples: np.ndarray, sizes: list[int]) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield (samples, whether backward exchanges gradients) of each micro-batch to run.

        The caller records the losses of each before it takes the next. `samples`: this rank's share of the batch.
        """
        whole = samples[: sizes[0]]
        min_size = 2 if batch_norm_names(self._training_state.module) else 1  # a BatchNorm refuses a batch of one
        half = whole[: max(len(whole) // 2, min_size)]
        if self._is_user_program and len(whole) >= max(2, min_size):
            with self._eager():  # a compiled model would be recompiled for each size
                yield from self._reduction_trials(half)
        for size in sorted(set(sizes[1:]) - {sizes[0]}):
            yield samples[:size], False
        yield whole, True

    def record_losses(self, losses: list[float]) -> None:
        """Record the losses, as sums, that each step.backward of the last micro-batch got."""
        self._losses.append(losses)

    def _reduction_trials(self, half: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        trials: list[list[tuple[float, float]]] = []  # one list for each step.backward
        while not trials or not all(reductions := [classify_loss_reduction(pairs) for pairs in trials]):
            yield half, False
            yield np.concatenate([half, half]), False
            once, twice = self._losses[-2:]
            if not once or len(once) != len(twice) or (trials and len(once) != len(trials)):
                return  # their number depends on the samples: no loss can be classified
            trials = trials or [[] for _ in once]
            for pairs, pair in zip(trials, zip(once, twice, strict=True), strict=True):
                pairs.append(pair)
        results = zip(reductions, trials, strict=True)
        wrong = [(reduction, *pairs[-1]) for reduction, pairs in results if reduction not in ("sum", None)]
        self._wrong_reduction = wrong[0] if wrong else None

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        if not self._is_compiled:
            yield
            return
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")

    @torch.no_grad()
    def finish(self, has_backward: bool, data: DataFingerprint | None) -> set[str]:
        """Restore the training state; return the names of the buffers that forward changes on any rank.

        Raise UsageError on all ranks if a loss of any rank is not a sum, if no rank called step.backward, or if ranks
        have read different data.
        """
        moved = self._buffers.mutated_names()
        self._buffers.restore()
        self._training_state.load_state_dicts(self._states)
        rng.set_states(self._rng, self._group.device)
        mine = WarmupResult(moved, self._wrong_reduction, has_backward, data)
        results = self._group.all_gather(mine, WarmupResult)
        if not any(result.has_backward for result in results):
            raise UsageError(
                "no step.backward in the loop over step.micro_batches(): gradients are not exchanged",
                hint="step.backward(loss_sum), not loss.backward()",
            )
        for rank, result in enumerate(results):
            if result.wrong_reduction is not None:
                reduction, once, twice = result.wrong_reduction
                raise UsageError(
                    f"step.backward got a {reduction}: on rank {rank} some samples give {once:.4g}, and each of them "
                    f"twice {twice:.4g}; the result would depend on the number of ranks",
                    hint=REDUCTION_HINTS[reduction],
                )
            if (
                result.data_fingerprint
                and results[0].data_fingerprint
                and not result.data_fingerprint.is_same_data(results[0].data_fingerprint)
            ):
                raise UsageError(
                    f"rank {rank} has other data than rank 0: the first step's samples differ; every rank reads its "
                    "own share of one batch",
                    hint="the same file on every machine, and a seed for whatever is drawn at random",
                )
        return {name for result in results for name in result.mutated_buffers}


def classify_loss_reduction(trials: Sequence[tuple[float, float]]) -> LossReduction | None:
    """Return how a loss is reduced over its samples; None: another trial is needed.

    A trial is a pair of losses: of some samples, and of each of them twice. The mean over trials of
    log₂(second / first) is 0 for a mean, 1 for a sum and 2 for a sum multiplied by a count of its samples; any other
    mix gives the same value in between, or above, trial after trial. A loss that changes its sign counts as a sum of
    terms of both signs. *Measured* on 2400 small networks with dropout of 0.2 and 0.5, 1 to 4 samples: no mean was
    missed, 1 sum was taken for a mean; of 20000 losses of pure noise, 1.

    >>> (classify_loss_reduction([(2.3, 2.3)]), classify_loss_reduction([(147.2, 294.4)]),
    ...  classify_loss_reduction([(0.0, 0.0)]), classify_loss_reduction([(2.3, 2.5)]))
    ('mean', 'sum', 'sum', None)
    >>> classify_loss_reduction([(2.5, 4.5)] * 5), classify_loss_reduction([(147.2, 588.8)] * 5)
    ('mix of a sum and a mean', 'sum multiplied by a count')
    """
    if not trials:
        return None
    sign = math.copysign(1.0, trials[0][0])
    if not all(0 < sign * loss < math.inf for trial in trials for loss in trial):
        return "sum"
    log2_ratios = [math.log2(twice / once) for once, twice in trials]
    mean, num = statistics.fmean(log2_ratios), len(log2_ratios)
    likely: LossReduction = "mean" if mean < 1 / 2 else "sum"
    if num == 1 and min(abs(mean), abs(mean - 1)) < EXACT_TOLERANCE:
        return likely
    if num < MIN_TRIALS:
        return None
    is_noiseless = max(log2_ratios) - min(log2_ratios) < NOISELESS_SPREAD_LOG2
    if is_noiseless and MIX_MARGIN_LOG2 < mean < 1 - MIX_MARGIN_LOG2:
        return "mix of a sum and a mean"
    if is_noiseless and mean > 1 + MIX_MARGIN_LOG2 and abs(mean - 2) > MIX_MARGIN_LOG2:
        return "loss that is not a sum over its samples"
    growth, growth_stderr = _log2_of_mean_ratio(trials)
    if (is_noiseless or num == MAX_TRIALS) and growth - 3 / 2 > CLEAR_STDERRS * growth_stderr:
        return "sum multiplied by a count"
    stderr = statistics.stdev(log2_ratios) / math.sqrt(num)
    is_clear = abs(mean - 1 / 2) > CLEAR_STDERRS * stderr and 3 / 2 - growth > growth_stderr
    return likely if is_clear or num == MAX_TRIALS else None


def _log2_of_mean_ratio(trials: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return log₂(mean second / mean first) of the pairs, and its standard error.

    For a noisy sum it is 1, where the mean of log₂(second / first) is larger: the logarithm of a noisier value is
    smaller. The loss of one sample that is the square of a normal value gives 2 there, as a multiplied sum does.
    """
    once, twice = zip(*trials, strict=True)
    variances = [(statistics.stdev(losses) / statistics.fmean(losses)) ** 2 for losses in (once, twice)]
    return math.log2(statistics.fmean(twice) / statistics.fmean(once)), math.sqrt(
        sum(variances) / len(trials)
    ) / math.log(2)
