"""Which shares of a global batch are fastest?"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def fastest_shares(num_sequences: int, pass_s: Sequence[float], sequence_s: Sequence[float]) -> list[int]:
    """Whole sequences of every rank that minimize the slowest rank's time: min max_r (pass_r + n_r · t_r), Σ n_r fixed.

    `pass_s` is what a rank pays for taking part, `sequence_s` what each sequence takes it. Exact: every sequence goes
    to the rank that is then done first, ties to the first rank. A rank whose best share is 0 helps nobody.

    >>> fastest_shares(16, [0, 0], [1.0, 2.0]), fastest_shares(4, [0, 0], [1.0, 9.0])
    ([11, 5], [4, 0])
    """
    shares = [0] * len(sequence_s)
    queue = [(pass_s[rank] + sequence_s[rank], rank) for rank in range(len(shares))]
    heapq.heapify(queue)
    for _ in range(num_sequences):
        done_s, rank = heapq.heappop(queue)
        shares[rank] += 1
        heapq.heappush(queue, (done_s + sequence_s[rank], rank))
    return shares
