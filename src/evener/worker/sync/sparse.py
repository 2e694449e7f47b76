"""How does the gradient of a table travel that is only looked up? By the rows that a step touched: the rest is zeros.

Nothing is lost. A row counts as touched where its gradient is not zero, so a table that something else uses as well is
summed rightly too. A rank sends its rows, each with its number, to every other one: (n-1)·k·(4·W + 4) bytes for k rows
of width W. Where that is more than an all-reduce of the whole table, on the rank that has most, all take the
all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.plan.collectives import ring_all_reduce_bytes
from evener.worker.group import Group
from evener.worker.sync.swap import swap

INDEX_BYTES = 4


class Rows:
    """Exchanges tables one by one; remembers nothing."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def run(self, table: Tensor) -> tuple[int, bool]:
        """Replace `table` (rows, width) by its sum over ranks, to the bit the same on all.

        Returns the bytes sent, and whether so many rows were touched that the whole table travelled.
        """
        group, (_, width) = self._group, table.shape
        mine = ((table.amax(1) != 0) | (table.amin(1) != 0)).nonzero().view(-1)
        count = torch.zeros(group.world_size, dtype=torch.int64, device=table.device)
        count[group.rank] = len(mine)
        dist.all_reduce(count, group=group.gradients)
        counts = [int(num) for num in count.tolist()]
        sent = ring_all_reduce_bytes(count.nbytes, group.world_size)
        row_bytes = INDEX_BYTES + width * table.element_size()
        if (group.world_size - 1) * max(counts) * row_bytes > ring_all_reduce_bytes(table.nbytes, group.world_size):
            dist.all_reduce(table, group=group.gradients)
            return sent + ring_all_reduce_bytes(table.nbytes, group.world_size), True
        numbers = [torch.empty(num, dtype=torch.int32, device=table.device) for num in counts]
        rows = [table.new_empty(num, width) for num in counts]
        numbers[group.rank], rows[group.rank] = mine.to(torch.int32), table[mine]
        everyone = range(group.world_size)
        sent += swap(group, [numbers[group.rank] for _ in everyone], numbers)
        sent += swap(group, [rows[group.rank] for _ in everyone], rows)
        table[mine] = 0
        for number, row in zip(numbers, rows, strict=True):  # in the order of the ranks: sums have the same bits
            table.index_add_(0, number, row)
        return sent, False
