"""Load balancing: divide a global batch into the shares that minimize the time of the slowest rank.

    time_r(n) = fixed_r + micro_batches_r(n) · overhead_r + n · t_r          micro_batches_r(n) = ⌈n / micro_batch_r⌉

    min max_r time_r(n_r), Σ n_r fixed

A micro-batch has an overhead in addition to the time of its sequences, so a share just above a multiple of the
micro-batch is inefficient: 17 sequences in micro-batches of 16 are two micro-batches, of 9 and 8. With DiLoCo a share
counts the sequences of all steps from one synchronization to the next (a round), and times are averages over its steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from evener.core.run.roster import equal_shares, num_micro_batches

BISECTION_TOLERANCE = 1e-9  # relative, of a time found by bisection


class RankTimeModel(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a rank's step as a function of its share, in any unit of time."""

    sequence_s: float
    micro_batch_overhead_s: float = 0.0  # overhead of each micro-batch, apart from its sequences
    fixed_s: float = 0.0  # of every step, with or without a share
    micro_batch: int = 1 << 31  # maximum sequences of one forward and backward
    num_steps: int = 1  # steps of a round, among which a share is divided as equally as possible; times are of one step

    def time_s(self, share: int) -> float:
        """Return the time of a step with `share` sequences.

        >>> model = RankTimeModel(sequence_s=1.0, micro_batch_overhead_s=5.0, micro_batch=16)
        >>> [model.time_s(share) for share in (0, 16, 17)]
        [0.0, 21.0, 27.0]
        """
        return self.fixed_s + self.variable_time_s(share)

    def variable_time_s(self, share: int) -> float:
        """Return the time of a step without its fixed part."""
        return (
            mean_num_micro_batches(share, self.micro_batch, self.num_steps) * self.micro_batch_overhead_s
            + share / self.sequences_per_s
        )

    @property
    def sequences_per_s(self) -> float:
        """Sequences of a share per second, without the overhead of micro-batches."""
        return self.num_steps / self.sequence_s

    def max_share_within(self, time_s: float) -> int:
        """Return the largest share that is done within `time_s`, up to float rounding.

        >>> model = RankTimeModel(sequence_s=1.0, micro_batch_overhead_s=5.0, micro_batch=16)
        >>> [model.max_share_within(time_s) for time_s in (5.5, 21.0, 26.5, 27.0)]
        [0, 16, 16, 17]
        """
        full_pass_s = self.micro_batch_overhead_s + self.micro_batch * self.sequence_s
        num_full, rest_s = divmod(max(0.0, time_s - self.fixed_s), full_pass_s)
        all_steps_s = self.num_steps * rest_s  # left after the micro-batches that are full in every step
        # steps with one more micro-batch, of one sequence
        extra = int(all_steps_s / (self.micro_batch_overhead_s + self.sequence_s))
        if extra >= self.num_steps:
            extra = max(
                self.num_steps, int((all_steps_s - self.num_steps * self.micro_batch_overhead_s) / self.sequence_s)
            )
        return int(num_full) * self.micro_batch * self.num_steps + extra

    def for_round(self, num_steps: int) -> RankTimeModel:
        """Return this model for shares that count the sequences of `num_steps` steps."""
        return msgspec.structs.replace(self, num_steps=num_steps)


def mean_num_micro_batches(share: int, micro_batch: int, num_steps: int) -> float:
    """Return the mean number of micro-batches in a step if `share` sequences are divided among `num_steps` steps.

    >>> mean_num_micro_batches(17, 16, 1), mean_num_micro_batches(85, 8, 10)
    (2.0, 1.5)
    """
    base, more = divmod(share, num_steps)
    return (
        more * num_micro_batches(base + 1, micro_batch) + (num_steps - more) * num_micro_batches(base, micro_batch)
    ) / num_steps


def fastest_shares(
    num_sequences: int, time_models: Sequence[RankTimeModel], *, min_units: int = 0, unit: int = 1
) -> list[int]:
    """Return every rank's sequences such that the slowest rank is done as soon as possible.

    Each share is a multiple of `unit`, and at least `min_units` times `unit`.
    Each unit goes to the rank that would be done first with it, ties to the first rank. This is exact, because no
    rank's time falls as its share grows. `num_sequences` must be a multiple of `unit`. A rank whose best share is 0
    does not speed up the step.

    >>> fastest_shares(16, [RankTimeModel(sequence_s=1.0), RankTimeModel(sequence_s=2.0)])
    [11, 5]
    >>> slow_to_begin = RankTimeModel(sequence_s=1.0, micro_batch_overhead_s=5.0, micro_batch=16)
    >>> fastest_shares(24, [slow_to_begin, RankTimeModel(sequence_s=3.2)])
    [16, 8]
    """
    if all(model is time_models[0] for model in time_models):
        return [unit * share for share in equal_shares(num_sequences // unit, len(time_models))]
    remaining = num_sequences - min_units * unit * len(time_models)
    # a lower bound of the time for the rest
    soonest_s = remaining / math.fsum(model.sequences_per_s for model in time_models)
    shares = [unit * max(min_units, (model.max_share_within(soonest_s) - 1) // unit) for model in time_models]
    queue = [
        (model.time_s(share + unit), rank) for rank, (model, share) in enumerate(zip(time_models, shares, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range((num_sequences - sum(shares)) // unit):
        _, rank = queue[0]
        shares[rank] += unit
        heapq.heapreplace(queue, (time_models[rank].time_s(shares[rank] + unit), rank))
    return shares


def fastest_shares_or_zero(num_sequences: int, time_models: Sequence[RankTimeModel], min_share: int) -> list[int]:
    """Return the fastest shares of which each is 0 or at least `min_share`; `num_sequences` is at least `min_share`.

    Bisect for the shortest time within which some ranks can do all sequences together. For a given time, these are the
    ranks that can do most: each at least `min_share`, and at most num_sequences // min_share ranks.

    >>> fastest_shares_or_zero(160,
    ...     [RankTimeModel(sequence_s=1.0), RankTimeModel(sequence_s=3.0), RankTimeModel(sequence_s=40.0)], 10)
    [120, 40, 0]
    """

    def taking(time_s: float) -> list[int]:
        """Return ranks that together finish all sequences within `time_s`; none if that is impossible."""
        done = sorted(((model.max_share_within(time_s), -rank) for rank, model in enumerate(time_models)), reverse=True)
        most = [(num, -rank) for num, rank in done[: num_sequences // min_share] if num >= min_share]
        return sorted(rank for _, rank in most) if sum(num for num, _ in most) >= num_sequences else []

    too_soon_s, in_time_s = 0.0, (1 + BISECTION_TOLERANCE) * min(model.time_s(num_sequences) for model in time_models)
    while in_time_s - too_soon_s > BISECTION_TOLERANCE * in_time_s:
        time_s = (too_soon_s + in_time_s) / 2
        too_soon_s, in_time_s = (too_soon_s, time_s) if taking(time_s) else (time_s, in_time_s)
    ranks, shares = taking(in_time_s), [0] * len(time_models)
    positive_shares = fastest_shares(num_sequences, [time_models[rank] for rank in ranks], min_units=min_share)
    for rank, share in zip(ranks, positive_shares, strict=True):
        shares[rank] = share
    return shares


def slowest_rank_s(shares: Sequence[int], time_models: Sequence[RankTimeModel]) -> float:
    """Return the time at which the last rank is done.

    >>> slowest_rank_s([11, 5], [RankTimeModel(sequence_s=1.0), RankTimeModel(sequence_s=2.0)])
    11.0
    """
    return max(model.time_s(share) for model, share in zip(time_models, shares, strict=True))
