"""One stage of a GPT that two processes train as a pipeline by layers; bench/pipeline.py starts both.

torch.distributed.pipelining's Schedule1F1B over Gloo. Stage 0 has the token embedding and the first blocks, stage 1 the
rest and the head. Both draw the weights of the whole model and read the batches that evener's ranks read, so losses can
be compared. Gradients are clipped by their global norm, for which the stages exchange one number. Embedding and head
must be different matrices, as in nanochat's models: a tied one would be needed by both stages.

    B  sequences of a micro-batch    T  positions    C  width
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from evener.core.cluster.allocator import disable_malloc_trim
from evener.core.cluster.host_info import peak_memory_bytes
from evener.core.run.resolve import resolve
from evener.core.run.roster import Dtype
from evener.core.run.run_spec import parse_args
from evener.worker.rank.linear_cross_entropy import linear_cross_entropy
from evener.worker.rank.precision import autocast
from evener.worker.train.loop import build_model
from evener.worker.train.model import GPT, Attention, rotary_angles
from evener.worker.train.optim import adamw, set_hyperparameters
from evener.worker.train.token_blocks import TokenBlocks

CPU = torch.device("cpu")


class Lookup(torch.autograd.Function):
    """Look up rows; backward adds to their gradients in place.

    nn.Embedding writes a gradient of its whole table in every micro-batch, 67 MB for each of d8's five tables.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.weight, ctx.tokens = weight, tokens
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.index_add_(0, ctx.tokens.flatten(), gradients[0].flatten(0, 1))
        return None, None


class Table(nn.Embedding):
    """An embedding with the same weights whose gradients are added in place."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        rows: Tensor = Lookup.apply(self.weight, tokens)  # type: ignore[no-untyped-call]
        return rows


class Stage(nn.Module):
    """The blocks of a GPT before or after the cut, with what precedes the first and follows the last of them.

    What it sends, and the gradient that comes back, have the dtype `sent_as`.
    """

    def __init__(self, model: GPT, cut: int, is_first: bool, dtype: Dtype, sent_as: torch.dtype) -> None:
        super().__init__()
        assert model.head is not None, "a tied head would be needed by both stages"
        assert model.position_embedding is None
        assert not model.shape.dropout
        self.shape, self.dtype, self.sent_as = model.shape, dtype, sent_as
        self.token_embedding = Table(model.token_embedding) if is_first else None
        self.blocks = model.blocks[:cut] if is_first else model.blocks[cut:]
        for part in self.blocks.modules():
            if isinstance(part, Attention) and part.value_embedding is not None:
                part.register_module("value_embedding", Table(part.value_embedding))
        self.norm = None if is_first else model.norm
        self.head = None if is_first else model.head

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the other stage's input, or the head's, (B, T, C); stage 0 is given its tokens (B, T) as x, too."""
        with autocast(CPU, self.dtype):
            if self.token_embedding is not None:
                x = F.rms_norm(self.token_embedding(x), (self.shape.width,))
            x = x.float()
            rotary = rotary_angles(tokens.shape[1], self.shape.head_dim, CPU)
            for block in self.blocks:
                x = block(x, tokens, rotary)
            return x.to(self.sent_as) if self.norm is None else self.norm(x)

    def loss_sum(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the token losses of the head's input."""
        assert self.head is not None
        with autocast(CPU, self.dtype):
            return linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten())


def sent_bytes() -> int:
    """Return the bytes that this host has sent on interfaces other than its loopback, by the kernel's counters."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if not line.strip().startswith("lo:"))


def main() -> None:
    job = json.loads(sys.argv[1])  # flags, cut, num_steps, and settings: pairs of micro-batches and dtype sent
    resolved = resolve(parse_args(job["flags"]))
    train, shape, dtype = resolved.spec.train, resolved.shape, resolved.spec.model.dtype
    assert dtype != "auto"
    torch.set_num_threads(1)
    disable_malloc_trim()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(train.seed)
    model = build_model(resolved, dtype, is_new=True)
    assert isinstance(model, GPT)
    stage_module = Stage(model, job["cut"], rank == 0, dtype, torch.float32)
    del model  # and with it the weights of the other stage
    optimizer = adamw(stage_module, train)
    dataset = TokenBlocks(resolved.corpus, "train", shape.block_size, train.sampling)
    num_tokens, numbers = train.batch * shape.block_size, itertools.count()
    for num_micro_batches, sent_as in job["settings"]:
        stage_module.sent_as = getattr(torch, sent_as)
        schedule = Schedule1F1B(
            PipelineStage(stage_module, rank, 2, CPU),
            num_micro_batches,
            loss_fn=lambda x, targets: stage_module.loss_sum(x, targets) / num_tokens,
            scale_grads=False,
        )
        dist.barrier()
        for _ in range(job["num_steps"]):
            index, began, sent = next(numbers), time.perf_counter(), sent_bytes()
            cpu_began = time.process_time()
            set_hyperparameters(optimizer, index, train)
            tokens, targets = dataset.load(dataset.global_batch(train.seed, index, train.batch), CPU)
            losses = list[Tensor]()
            if rank == 0:
                schedule.step(tokens, tokens=tokens, return_outputs=False)
            else:
                schedule.step(tokens=tokens, target=targets, losses=losses, return_outputs=False)
            scheduled = time.perf_counter()
            gradients = [parameter.grad for parameter in stage_module.parameters() if parameter.grad is not None]
            norm_sq = nn.utils.get_total_norm(gradients).square()
            dist.all_reduce(norm_sq)
            if train.clip:
                torch._foreach_mul_(gradients, torch.clamp(train.clip / (norm_sq.sqrt() + 1e-6), max=1.0))
            optimizer.step()
            optimizer.zero_grad()
            ended = time.perf_counter()
            total = torch.stack(losses).sum().item() if losses else None
            print(json.dumps({
                "micro_batches": num_micro_batches, "sent_as": sent_as, "step": index, "step_s": ended - began,
                "update_s": ended - scheduled, "cpu_s": time.process_time() - cpu_began,
                "sent_bytes": sent_bytes() - sent, "loss": total,
                "peak_bytes": peak_memory_bytes(),
            }), flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
