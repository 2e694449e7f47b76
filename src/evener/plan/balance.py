"""How is a global batch divided between ranks?"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def equal_shares(num_sequences: int, num_ranks: int) -> list[int]:
    """Whole sequences of every rank: as equal as they can be, the first ranks taking what is left over.

    >>> equal_shares(16, 3)
    [6, 5, 5]
    """
    least, left_over = divmod(num_sequences, num_ranks)
    return [least + (rank < left_over) for rank in range(num_ranks)]


def micro_batch_sizes(share: int, largest: int) -> list[int]:
    """A share cut into the fewest micro-batches of at most `largest`, as equal as they can be.

    >>> micro_batch_sizes(11, 4), micro_batch_sizes(3, 8)
    ([4, 4, 3], [3])
    """
    return equal_shares(share, -(-share // largest))


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
