"""What must be known of a training program before its first gradients count? It is rehearsed once, and nothing learned.

A rehearsal runs the program's own forward and backward on the first step's batch: half of a micro-batch, the same half
with every sample twice, then the whole, whose backward exchanges gradients. Then compilers and caches are warm, DDP has
settled its buckets (so that a resumed run sums in the same order), and three things are known: which buffers forward
changes, whether the ranks read the same data, and whether a loss is a sum over its samples, as any split of the batch
needs, or a mean, which is the same of every sample twice, or something between them. Where there is noise in it, such
as dropout's, that is tried until it is clear.
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

from evener.core.decoding import from_json
from evener.core.errors import UsageError
from evener.worker import rng
from evener.worker.buffers import Buffers
from evener.worker.datasets import Fingerprint
from evener.worker.group import Group
from evener.worker.trained import Trained, batch_norms

FEWEST, MOST = 5, 64  # trials of a loss with noise
EXACT = 1e-3  # what is as near to once or twice as much has none
CLEAR = 3.0  # standard errors
BETWEEN = 0.03  # from both, in log₂: a sum of bf16 numbers is less off
ALIKE = 1e-4  # in log₂: what differs by less from trial to trial has no noise, nor a state that moves

Kind = Literal["sum", "mean", "mix of a sum and a mean"]


class Seen(msgspec.Struct, frozen=True):
    """What one rank saw in its rehearsal."""

    moved: list[str]  # buffers that forward changed
    wrong: tuple[str, float, float] | None  # a mean, or a mix, and the losses of some samples and of all of them twice
    has_backward: bool  # was there a step.backward?
    data: Fingerprint | None  # of the first step's samples; None where nobody can know


class Rehearsal:
    """Begin one, run the parts, `end` it: then all is as it was, but for what it found."""

    def __init__(self, trained: Trained, group: Group, *, is_own: bool, is_compiled: bool) -> None:
        """`is_own`: the loss is the program's own, so that nobody knows whether it is a sum."""
        self._trained, self._group, self._is_own, self._is_compiled = trained, group, is_own, is_compiled
        self._buffers = Buffers(trained.module, [name for name, _ in trained.module.named_buffers()])
        self._states = copy.deepcopy(trained.user_states())
        self._rng = rng.states(group.device)
        self._losses: list[list[float]] = []  # of each part, by step.backward
        self._wrong: tuple[str, float, float] | None = None

    def parts(self, samples: np.ndarray, sizes: list[int]) -> Iterator[tuple[np.ndarray, bool]]:
        """(samples of a micro-batch to run, does its backward exchange gradients?); its losses are to be noted before
        the next is asked for. `samples` are a rank's share.
        """
        whole = samples[: sizes[0]]
        least = 2 if batch_norms(self._trained.module) else 1  # a BatchNorm refuses a batch of one
        half = whole[: max(len(whole) // 2, least)]
        if self._is_own and len(whole) >= max(2, least):
            with self._not_compiled():  # a compiled model would be compiled once more for each size
                yield from self._trials(half)
        for size in sorted(set(sizes[1:]) - {sizes[0]}):
            yield samples[:size], False
        yield whole, True

    def note(self, losses: list[float]) -> None:
        """What each step.backward of a part that was run was given, as a sum."""
        self._losses.append(losses)

    def _trials(self, half: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        trials: list[list[tuple[float, float]]] = []  # by step.backward
        while not trials or not all(kinds := [kind_of(several) for several in trials]):
            yield half, False
            yield np.concatenate([half, half]), False
            once, twice = self._losses[-2:]
            if not once or len(once) != len(twice) or (trials and len(once) != len(trials)):
                return  # how many there are depends on the samples: nothing can be said of any
            trials = trials or [[] for _ in once]
            for several, pair in zip(trials, zip(once, twice, strict=True), strict=True):
                several.append(pair)
        wrong = [(kind, *several[-1]) for kind, several in zip(kinds, trials, strict=True) if kind not in ("sum", None)]
        self._wrong = wrong[0] if wrong else None

    @contextlib.contextmanager
    def _not_compiled(self) -> Iterator[None]:
        if not self._is_compiled:
            yield
            return
        torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            torch.compiler.set_stance("default")

    @torch.no_grad()
    def end(self, has_backward: bool, data: Fingerprint | None) -> set[str]:
        """Names of the buffers that forward changes on any rank.

        UsageError on all ranks where one's loss is no sum, where there was no step.backward on any, or where their data
        differ.
        """
        moved = self._buffers.moved()
        self._buffers.put_back()
        self._trained.load_states(self._states)
        rng.restore(self._rng, self._group.device)
        mine = Seen(moved, self._wrong, has_backward, data)
        seen = [from_json(text, Seen) for text in self._group.gather(msgspec.json.encode(mine))]
        if not any(one.has_backward for one in seen):
            raise UsageError(
                "no step.backward in the loop over step.micro_batches(): nothing is exchanged, or not as it should be",
                hint="step.backward(loss_sum), not loss.backward()",
            )
        for rank, one in enumerate(seen):
            if one.wrong is not None:
                kind, once, twice = one.wrong
                raise UsageError(
                    f"step.backward got a {kind}: on rank {rank} some samples give {once:.4g}, and every one of them "
                    f"twice {twice:.4g}; the result would depend on the number of ranks",
                    hint="reduction='sum', or step.backward(mean, number of samples or tokens that it is the mean of)"
                    if kind == "mean"
                    else "what is not a sum over the samples, such as a penalty on weights, × the number of samples",
                )
            if one.data and seen[0].data and not one.data.is_like(seen[0].data):
                raise UsageError(
                    f"rank {rank} has other data than rank 0: the first step's samples differ; every rank reads its "
                    "own part of one batch",
                    hint="the same file on every machine, and a seed for whatever is drawn",
                )
        return {name for one in seen for name in one.moved}


def kind_of(trials: Sequence[tuple[float, float]]) -> Kind | None:
    """Trials are losses of some samples, and of every one of them twice. Is the second as much, as of a mean, twice as
    much, as of a sum, or time and again the same in between? By the mean of log₂(second / first), which is 0 of a mean
    and 1 of a sum; None: it takes another trial.

    What changes its sign is a sum of both signs. *Measured* on 2400 small networks with dropout of 0.2 and 0.5, 1 to 4
    samples: no mean was missed, 1 sum was taken for one; of 20000 losses that were noise alone, 1.

    >>> kind_of([(2.3, 2.3)]), kind_of([(147.2, 294.4)]), kind_of([(0.0, 0.0)]), kind_of([(2.3, 2.5)])
    ('mean', 'sum', 'sum', None)
    >>> kind_of([(2.5, 4.5)] * 5)
    'mix of a sum and a mean'
    """
    if not trials:
        return None
    sign = math.copysign(1.0, trials[0][0])
    if not all(0 < sign * loss < math.inf for trial in trials for loss in trial):
        return "sum"
    found = [math.log2(twice / once) for once, twice in trials]
    mean, border = statistics.fmean(found), 1 / 2
    likely: Kind = "mean" if mean < border else "sum"
    if len(found) == 1 and min(abs(mean), abs(mean - 1)) < EXACT:
        return likely
    if len(found) < FEWEST:
        return None
    error = statistics.stdev(found) / math.sqrt(len(found))
    if max(found) - min(found) < ALIKE and BETWEEN < mean < 1 - BETWEEN:
        return "mix of a sum and a mean"
    return likely if abs(mean - border) > CLEAR * error or len(found) == MOST else None
