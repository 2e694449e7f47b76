"""Create the Sync that a Roster names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from evener.core.errors import UsageError
from evener.core.resolve import check_useful
from evener.core.roster import Roster, SyncSpec, harms_fp16
from evener.plan.sync import bucket_bytes
from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import Sync
from evener.worker.sync.alone import Alone
from evener.worker.sync.buckets import Buckets, Reduction
from evener.worker.sync.codes import Bf16, Scaled
from evener.worker.sync.ddp import AllReduce
from evener.worker.sync.diloco import DiLoCo
from evener.worker.sync.lane import Exchange, Lane
from evener.worker.sync.narrow import Narrow
from evener.worker.sync.packed import Packed
from evener.worker.sync.powersgd import PowerSGD, is_thin
from evener.worker.sync.streamed import Streamed
from evener.worker.sync.whole import Whole


def make_sync(roster: Roster, group: Group, clock: Clock, lap: Callable[[str], None], module: nn.Module) -> Sync:
    """Create the sync strategy of a run; `lap` charges the time since the last lap to a phase of the step."""
    if roster.sync.kind == "none":
        return Alone()
    if roster.sync.kind == "diloco":
        return (Streamed if roster.sync.streamed else DiLoCo)(group, clock, lap, roster.sync)
    _check(roster, module)
    return Buckets(group, clock, lap, _reduction(roster.sync, group, clock, module), bucket_bytes(roster))


def change_sync(sync: Sync, roster: Roster, group: Group, clock: Clock, module: nn.Module) -> None:
    """Switch a GradientSync to the Roster's strategy from the next step on; both strategies keep replicas equal."""
    assert isinstance(sync, Buckets), roster.sync
    sync.change(_reduction(roster.sync, group, clock, module), bucket_bytes(roster))


def _check(roster: Roster, module: nn.Module) -> None:
    """Raise UsageError where a strategy would have no effect, or do harm."""
    sync = roster.sync
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32 and (sync.kind != "ddp" or sync.sparse):
            raise UsageError(
                f"--sync {sync}: {name} is {parameter.dtype}: it exchanges gradients of fp32 weights",
                hint="weights in fp32, and run.autocast() around forward; or --sync ddp",
            )
    is_thinner = any(is_thin(parameter, sync.rank) for parameter in module.parameters())
    check_useful(sync, has_tables=bool(tables_of(module)), is_thinner=is_thinner)
    if harms_fp16(roster):
        raise UsageError(
            f"--sync {sync} with fp16: its residuals would be of another loss scale than the next step",
            hint="--dtype fp32 or bf16, or --sync ddp",
        )


def _reduction(sync: SyncSpec, group: Group, clock: Clock, module: nn.Module) -> Reduction:
    if group.world_size == 1 or (sync.kind == "ddp" and not sync.sparse):
        return AllReduce(group, clock)
    return Lane(group, clock, _exchange(sync, group), tables_of(module) if sync.sparse else frozenset())


def _exchange(sync: SyncSpec, group: Group) -> Exchange:
    match sync.kind:
        case "ddp":
            return Whole(group)
        case "packed":
            return Packed(group)
        case "bf16":
            return Narrow(group, Bf16())
        case "int8":
            return Narrow(group, Scaled(8))
        case "int4":
            return Narrow(group, Scaled(4))
        case "powersgd":
            return PowerSGD(group, sync.rank)
    raise AssertionError(sync)


def tables_of(module: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights that only nn.Embedding modules hold, so that they are not tied to another layer."""
    uses = [(parameter, isinstance(submodule, nn.Embedding)) for submodule in module.modules()
            for parameter in submodule.parameters(recurse=False)]  # fmt: skip
    tied = {parameter for parameter, is_table in uses if not is_table}
    return frozenset(parameter for parameter, is_table in uses if is_table and parameter not in tied)
