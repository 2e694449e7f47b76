"""All-reduce the dense rest of a bucket whose embedding tables are reduced sparsely."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evener.plan.cost.collective_cost import ring_all_reduce_bytes
from evener.worker.sync import RankGroup, StatelessReduction
from evener.worker.sync.bucket_queue import GradBucketSlice
from evener.worker.sync.codecs import ScratchBuffer


class DenseAllReduce(StatelessReduction):
    """An all-reduce of all gradients as one flat buffer."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._flat_buffer = group, ScratchBuffer()

    def run(self, grads: GradBucketSlice) -> int:
        flat = grads.views[0]
        if len(grads.views) > 1:
            flat = torch.cat(grads.views, out=self._flat_buffer.take(grads.numel, flat.device))
        dist.all_reduce(flat, group=self._group.gradient_group)
        if len(grads.views) > 1:
            for (_, begin, end), view in zip(grads.offsets(), grads.views, strict=True):
                view.copy_(flat[begin:end])
        return ring_all_reduce_bytes(flat.nbytes, self._group.world_size)
