"""Which shares of a global batch are fastest?

    time_r(n) = fixed_r + passes_r(n) · pass_r + n · t_r          passes_r(n) = ⌈n / micro_batch_r⌉

    min max_r time_r(n_r), Σ n_r fixed

A pass through the model costs something apart from its sequences, so a share just above a micro-batch is a bad one: 17
sequences in micro-batches of 16 are two passes of 9 and 8. Where replicas drift a share is of the sequences of a round
of steps, each of which has its own passes, and times are of a step in the mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from evener.core.roster import equal_shares, num_passes

PRECISION = 1e-9  # of a time that is found by halving


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank takes for its share of a step, in any unit of time."""

    sequence_s: float
    pass_s: float = 0.0  # of each forward and backward, apart from its sequences
    fixed_s: float = 0.0  # of every step, with a share or without
    micro_batch: int = 1 << 31  # sequences of one pass, at most
    num_steps: int = 1  # among which a share is divided as equally as can be; times are those of one of them

    def time_s(self, share: int) -> float:
        """Of so many sequences.

        >>> pace = Pace(sequence_s=1.0, pass_s=5.0, micro_batch=16)
        >>> [pace.time_s(share) for share in (0, 16, 17)]
        [0.0, 21.0, 27.0]
        """
        return self.fixed_s + self.share_s(share)

    def share_s(self, share: int) -> float:
        """The same without what every step takes."""
        return mean_passes(share, self.micro_batch, self.num_steps) * self.pass_s + share / self.rate

    @property
    def rate(self) -> float:
        """Sequences of a share that are done in a second, without passes."""
        return self.num_steps / self.sequence_s

    def done_by(self, time_s: float) -> int:
        """The largest share with which it is done then, to the last place of a float.

        >>> pace = Pace(sequence_s=1.0, pass_s=5.0, micro_batch=16)
        >>> [pace.done_by(time_s) for time_s in (5.5, 21.0, 26.5, 27.0)]
        [0, 16, 16, 17]
        """
        full_pass_s = self.pass_s + self.micro_batch * self.sequence_s
        num_full, rest_s = divmod(max(0.0, time_s - self.fixed_s), full_pass_s)
        all_steps_s = self.num_steps * rest_s  # beside passes that are full in every step
        begun = int(all_steps_s / (self.pass_s + self.sequence_s))  # steps with one more pass, of one sequence
        if begun >= self.num_steps:
            begun = max(self.num_steps, int((all_steps_s - self.num_steps * self.pass_s) / self.sequence_s))
        return int(num_full) * self.micro_batch * self.num_steps + begun

    def of_round(self, num_steps: int) -> Pace:
        """The same for shares of so many steps."""
        return msgspec.structs.replace(self, num_steps=num_steps)


def mean_passes(share: int, micro_batch: int, num_steps: int) -> float:
    """Of a step, where a share is divided among so many.

    >>> mean_passes(17, 16, 1), mean_passes(85, 8, 10)
    (2.0, 1.5)
    """
    least, more = divmod(share, num_steps)
    return (more * num_passes(least + 1, micro_batch) + (num_steps - more) * num_passes(least, micro_batch)) / num_steps


def fastest_shares(num_sequences: int, paces: Sequence[Pace], *, least: int = 0, unit: int = 1) -> list[int]:
    """Sequences of every rank that minimize the slowest rank's time, in whole units of which each has `least`.

    Exact, because no time falls as a share grows: every unit goes to the rank that is then done first, ties to the
    first rank. `num_sequences` is a multiple of the unit. A rank whose best share is 0 helps nobody.

    >>> fastest_shares(16, [Pace(sequence_s=1.0), Pace(sequence_s=2.0)])
    [11, 5]
    >>> slow_to_begin = Pace(sequence_s=1.0, pass_s=5.0, micro_batch=16)
    >>> fastest_shares(24, [slow_to_begin, Pace(sequence_s=3.2)])
    [16, 8]
    """
    if all(pace is paces[0] for pace in paces):
        return [unit * share for share in equal_shares(num_sequences // unit, len(paces))]
    left = num_sequences - least * unit * len(paces)
    soonest_s = left / math.fsum(pace.rate for pace in paces)  # nothing has the rest done before that
    shares = [unit * max(least, (pace.done_by(soonest_s) - 1) // unit) for pace in paces]
    queue = [(pace.time_s(share + unit), rank) for rank, (pace, share) in enumerate(zip(paces, shares, strict=True))]
    heapq.heapify(queue)
    for _ in range((num_sequences - sum(shares)) // unit):
        _, rank = queue[0]
        shares[rank] += unit
        heapq.heapreplace(queue, (paces[rank].time_s(shares[rank] + unit), rank))
    return shares


def fastest_or_none(num_sequences: int, paces: Sequence[Pace], least: int) -> list[int]:
    """The same where a rank has no sequence, or at least so many; `num_sequences` is not below them.

    By a given time all can be done if those who do most by then, each at least its least and together no more of them
    than there are sequences for, do enough: the soonest such time is found by halving.

    >>> fastest_or_none(160, [Pace(sequence_s=1.0), Pace(sequence_s=3.0), Pace(sequence_s=40.0)], 10)
    [120, 40, 0]
    """

    def taking(time_s: float) -> list[int]:
        """Ranks that have it all done by then, or none."""
        done = sorted(((pace.done_by(time_s), -rank) for rank, pace in enumerate(paces)), reverse=True)
        most = [(num, -rank) for num, rank in done[: num_sequences // least] if num >= least]
        return sorted(rank for _, rank in most) if sum(num for num, _ in most) >= num_sequences else []

    too_soon_s, in_time_s = 0.0, (1 + PRECISION) * min(pace.time_s(num_sequences) for pace in paces)
    while in_time_s - too_soon_s > PRECISION * in_time_s:
        time_s = (too_soon_s + in_time_s) / 2
        too_soon_s, in_time_s = (too_soon_s, time_s) if taking(time_s) else (time_s, in_time_s)
    ranks, shares = taking(in_time_s), [0] * len(paces)
    found = fastest_shares(num_sequences, [paces[rank] for rank in ranks], least=least)
    for rank, share in zip(ranks, found, strict=True):
        shares[rank] = share
    return shares


def slowest_s(shares: Sequence[int], paces: Sequence[Pace]) -> float:
    """When the last rank is done.

    >>> slowest_s([11, 5], [Pace(sequence_s=1.0), Pace(sequence_s=2.0)])
    11.0
    """
    return max(pace.time_s(share) for pace, share in zip(paces, shares, strict=True))
