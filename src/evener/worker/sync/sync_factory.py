"""Create the Sync that a Roster names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from evener.core.base.errors import UsageError
from evener.core.run.resolve import check_sync_is_useful
from evener.core.run.roster import NO_SYNC, Roster, SyncSpec, why_unsafe_in_fp16
from evener.worker.rank.clock import Clock
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.sync import RankGroup, Sync
from evener.worker.sync.allreduce_hook import AllReduceHook
from evener.worker.sync.bucket_queue import AllReduceAlgorithm, BucketQueue
from evener.worker.sync.codecs import Bf16Codec, BlockwiseIntCodec, Codec
from evener.worker.sync.dense_rest import DenseAllReduce
from evener.worker.sync.diloco import DiLoCo
from evener.worker.sync.fully_sharded import FullyShardedSync
from evener.worker.sync.gradient_sync import CommHook, GradientSync
from evener.worker.sync.no_sync import NoSync
from evener.worker.sync.packed import PackedAllReduce
from evener.worker.sync.powersgd import PowerSGD, is_low_rank_smaller
from evener.worker.sync.quantized import QuantizedAllReduce
from evener.worker.sync.streaming_diloco import StreamingDiLoCo


def make_sync(
    roster: Roster, group: ProcessGroups, clock: Clock, lap: Callable[[str], None], module: nn.Module
) -> Sync:
    """Create the sync strategy of a run; `lap` charges the time since the last lap to a phase of the step."""
    if roster.sync == NO_SYNC:
        return NoSync()
    if roster.sync.drifts:
        return (StreamingDiLoCo if roster.sync.streamed else DiLoCo)(group, clock, lap, roster.sync)
    if roster.sync.is_sharded:
        return FullyShardedSync(group, clock, lap, roster)
    _check_strategy(roster, module)
    return GradientSync(group, clock, lap, roster, lambda sync: _make_hook(sync, group, clock, module))


def _check_strategy(roster: Roster, module: nn.Module) -> None:
    """Raise UsageError where a strategy would have no effect, or do harm."""
    sync = roster.sync
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32 and (sync.kind != "ddp" or sync.sparse):
            raise UsageError(
                f"--sync {sync}: {name} is {parameter.dtype}: it exchanges gradients of fp32 weights",
                hint="weights in fp32, and run.autocast() around forward; or --sync ddp",
            )
    is_thinner = any(is_low_rank_smaller(parameter, sync.rank) for parameter in module.parameters())
    check_sync_is_useful(sync, has_sparse_embeddings=bool(embedding_tables(module)), is_low_rank_smaller=is_thinner)
    if why := why_unsafe_in_fp16(roster):
        raise UsageError(f"--sync {sync} with fp16: {why}", hint="--dtype fp32 or bf16, or --sync ddp")


def _make_hook(sync: SyncSpec, group: ProcessGroups, clock: Clock, module: nn.Module) -> CommHook:
    if group.world_size == 1 or (sync.kind == "ddp" and not sync.sparse):
        return AllReduceHook(group, clock)
    return BucketQueue(
        group, clock, make_algorithm(sync, group), embedding_tables(module) if sync.sparse else frozenset()
    )


def make_codec(sync: SyncSpec) -> Codec | None:
    """Return the codec of a strategy; None if it has none."""
    match sync.kind:
        case "bf16":
            return Bf16Codec()
        case "int8":
            return BlockwiseIntCodec(8)
        case "int4":
            return BlockwiseIntCodec(4)
    return None


def make_algorithm(sync: SyncSpec, group: RankGroup) -> AllReduceAlgorithm:
    """Create the algorithm of a strategy that exchanges gradients in every step."""
    if (codec := make_codec(sync)) is not None:
        return QuantizedAllReduce(group, codec)
    match sync.kind:
        case "ddp":
            return DenseAllReduce(group)
        case "packed":
            return PackedAllReduce(group)
        case "powersgd":
            return PowerSGD(group, sync.rank)
    raise AssertionError(sync)


def embedding_tables(module: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights of nn.Embedding modules, except those that are tied to a module of another type."""
    uses = [(parameter, isinstance(submodule, nn.Embedding)) for submodule in module.modules()
            for parameter in submodule.parameters(recurse=False)]  # fmt: skip
    tied = {parameter for parameter, is_table in uses if not is_table}
    return frozenset(parameter for parameter, is_table in uses if is_table and parameter not in tied)
