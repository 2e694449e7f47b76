"""What must be known of a training program before its first gradients count? It is rehearsed once, and nothing learned.

A rehearsal runs the program's own forward and backward on the first step's batch: half of a micro-batch, the other
half, then the whole, whose backward exchanges gradients. Then compilers and caches are warm, DDP has settled its
buckets (so that a resumed run sums in the same order), and two things are known: which buffers forward changes, and
whether a loss is a sum over its samples, as any split of the batch needs, or a mean.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from evener.core.decoding import from_json
from evener.core.errors import UsageError
from evener.worker import checkpoint
from evener.worker.group import Group

MEAN_WITHIN = 0.05  # two halves sum to twice the whole within this: no sum of samples does


class Seen(msgspec.Struct, frozen=True):
    """What one rank saw in its rehearsal."""

    moved: list[str]  # buffers that forward changed
    whole: float | None  # the loss of a micro-batch
    halves: float | None  # of its two halves, added up; None where it cannot be halved
    has_backward: bool  # was there a step.backward?


class Rehearsal:
    """Begin one, run the parts, `end` it: then all is as it was, but for what it found."""

    def __init__(self, module: nn.Module, group: Group, *, tries_halves: bool) -> None:
        self._module, self._group, self._tries_halves = module, group, tries_halves
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._rng = checkpoint.rng_states(group.device)
        self._losses: list[float] = []

    def parts(self, samples: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        """Samples of the micro-batches to run, the last of which exchanges gradients. `samples` are a rank's share."""
        whole = samples[: sizes[0]]
        others = [samples[:size] for size in sorted(set(sizes[1:]) - {sizes[0]})]
        # A BatchNorm refuses a batch of one.
        has_batch_norm = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self._module.modules())
        halves = np.array_split(whole, 2)
        can_be_halved = self._tries_halves and len(halves[1]) >= (2 if has_batch_norm else 1)
        self._halves = halves if can_be_halved else []
        return [*self._halves, *others, whole]

    def note(self, loss_sum: float) -> None:
        """The loss of a part that was run."""
        self._losses.append(loss_sum)

    @torch.no_grad()
    def end(self, has_backward: bool) -> set[str]:
        """Names of the buffers that forward changes on any rank.

        UsageError on all ranks where one's loss is a mean, or where there was no step.backward on any.
        """
        moved = []
        for name, buffer in self._module.named_buffers():
            if name in self._buffers and not torch.equal(buffer, self._buffers[name]):
                moved.append(name)
                buffer.copy_(self._buffers[name])
        checkpoint.restore_rng(self._rng, self._group.device)
        halves = sum(self._losses[:2]) if self._halves else None
        mine = Seen(moved, _finite(self._losses[-1]), _finite(halves), has_backward)
        seen = [from_json(text, Seen) for text in self._group.gather(msgspec.json.encode(mine))]
        if not any(one.has_backward for one in seen):
            raise UsageError(
                "no step.backward in the loop over step.micro_batches(): nothing is exchanged, or not as it should be",
                hint="step.backward(loss_sum), not loss.backward()",
            )
        for rank, one in enumerate(seen):
            if one.whole is not None and one.halves is not None and is_mean(one.whole, one.halves):
                raise UsageError(
                    f"step.backward got a mean: on rank {rank} two halves of a micro-batch give {one.halves:.4g} "
                    f"together and the whole {one.whole:.4g}; the result would depend on the number of ranks",
                    hint="reduction='sum', or step.backward(mean, number of samples or tokens that it is the mean of)",
                )
        return {name for one in seen for name in one.moved}


def is_mean(whole: float, halves: float) -> bool:
    """Do two halves sum to twice the whole?

    >>> is_mean(2.30, 2.29 + 2.32), is_mean(147.2, 73.0 + 74.2), is_mean(0.0, 0.0)
    (True, False, False)
    """
    return abs(halves - 2 * whole) < MEAN_WITHIN * abs(whole)


def _finite(value: Any) -> float | None:
    return value if value is not None and math.isfinite(value) else None
