"""How is a global batch divided between ranks?"""

from __future__ import annotations


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
