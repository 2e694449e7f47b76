"""Codec benchmark: throughput of encoding and decoding gradients for each compressed sync strategy, without a link.

It times what each of two ranks computes: a rank encodes its own gradients and adds up two payloads, its own and the
other's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from evener.worker.sustained import repeat
from evener.worker.sync.codes import Bf16, Code, Scaled
from evener.worker.sync.lane import Slots
from evener.worker.sync.packed import Packed, values_of
from evener.worker.sync.powersgd import PowerSGD

SHAPE, NUM_MATRICES = (1536, 384), 8  # of the character model's MLP: 19 MB, beyond most caches
MEASURED_S = 0.3
POWERSGD_RANKS = (4, 32)  # the time at other ranks lies on the line through these


def coding_rates(device: torch.device) -> dict[str, float]:
    """Measure bytes of fp32 gradients a second by sync strategy, on one CPU thread or on a GPU."""
    draw = torch.Generator().manual_seed(0)
    views = [(torch.randn(SHAPE, generator=draw) * 1e-3).view(-1).to(device) for _ in range(NUM_MATRICES)]
    codes: dict[str, Code] = {"bf16": Bf16(), "int8": Scaled(8), "int4": Scaled(4)}
    work: dict[str, Callable[[], object]] = {name: _narrow(code, torch.cat(views)) for name, code in codes.items()}
    work["packed"] = _packed(views)
    for rank in POWERSGD_RANKS:
        work[f"powersgd:{rank}"] = _powersgd(views, rank)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in training: one communication thread, beside those that compute
    try:
        num_bytes = sum(view.nbytes for view in views)
        return {name: num_bytes / repeat(encode_decode, device, MEASURED_S) for name, encode_decode in work.items()}
    finally:
        torch.set_num_threads(threads)


def _narrow(code: Code, values: torch.Tensor) -> Callable[[], object]:
    residual, total = values.clone(), torch.zeros_like(values)
    payload = torch.zeros(code.num_bytes(len(values)), dtype=torch.uint8, device=values.device)

    def once() -> None:
        residual.add_(values)
        code.encode(residual, payload, kept=total)
        code.add(payload, total)

    return once


def _packed(views: list[torch.Tensor]) -> Callable[[], object]:
    group: Any = SimpleNamespace(world_size=2, rank=0)
    packed, bf16_values = Packed(group), [view.bfloat16().float() for view in views]
    payload = torch.empty(4 * sum(map(len, views)), dtype=torch.uint8, device=views[0].device)

    def once() -> None:
        fits = packed.pack(bf16_values, payload)
        for view, values in zip(views, values_of(payload, fits, views), strict=True):
            packed.add(values, view)

    return once


def _powersgd(views: list[torch.Tensor], rank: int) -> Callable[[], object]:
    group: Any = SimpleNamespace(world_size=1)
    exchange = PowerSGD(group, rank)
    parameters = tuple(nn.Parameter(torch.empty(SHAPE, device=views[0].device)) for _ in views)
    results = [view.clone() for view in views]
    return lambda: exchange.run(Slots(0, parameters, results, is_rehearsal=False))
