"""All-reduce the gradient of an embedding table sparsely: send only the rows that a step touched.

Lossless. A row counts as touched where its gradient is not zero, so a table that something else uses as well is summed
correctly too. A rank sends its rows, each with its index, to every other rank: (n-1)·k·(4·W + 4) bytes for k rows of
width W and n ranks. If that is more than an all-reduce of the whole table on the rank with the most rows, all ranks
all-reduce the table instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.plan.cost.collective_cost import ring_all_reduce_bytes
from evener.worker.sync import RankGroup
from evener.worker.sync.pairwise import pairwise_all_to_all

INDEX_BYTES = 4


class SparseAllReduce:
    """A sparse all-reduce of embedding tables, one by one. Stateless."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def run(self, table: Tensor) -> tuple[int, bool]:
        """Replace `table` (rows, width) by its sum over ranks, which has the same bits on all ranks.

        Return the bytes sent, and whether so many rows were touched that the whole table was all-reduced.
        """
        group, (_, width) = self._group, table.shape
        touched = ((table.amax(1) != 0) | (table.amin(1) != 0)).nonzero().view(-1)
        count = torch.zeros(group.world_size, dtype=torch.int64, device=table.device)
        count[group.rank] = len(touched)
        dist.all_reduce(count, group=group.gradient_group)
        counts = [int(num) for num in count.tolist()]
        sent_bytes = ring_all_reduce_bytes(count.nbytes, group.world_size)
        row_bytes = INDEX_BYTES + width * table.element_size()
        if (group.world_size - 1) * max(counts) * row_bytes > ring_all_reduce_bytes(table.nbytes, group.world_size):
            dist.all_reduce(table, group=group.gradient_group)
            return sent_bytes + ring_all_reduce_bytes(table.nbytes, group.world_size), True
        indices = [torch.empty(num, dtype=torch.int32, device=table.device) for num in counts]
        rows = [table.new_empty(num, width) for num in counts]
        indices[group.rank], rows[group.rank] = touched.to(torch.int32), table[touched]
        everyone = range(group.world_size)
        sent_bytes += pairwise_all_to_all(group, [indices[group.rank] for _ in everyone], indices)
        sent_bytes += pairwise_all_to_all(group, [rows[group.rank] for _ in everyone], rows)
        table[touched] = 0
        for index, row in zip(indices, rows, strict=True):  # in the order of the ranks: sums have the same bits
            table.index_add_(0, index, row)
        return sent_bytes, False
