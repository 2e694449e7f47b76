"""Codec benchmark: throughput of encoding and decoding gradients for each compressed sync strategy, without a link.

It times what each of two ranks computes: a rank encodes its own gradients, adds up two payloads, its own and the
other's, and copies the sums to its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from evener.worker.probe.sustained_bench import time_repeated_s
from evener.worker.sync.bucket_queue import GradBucketSlice
from evener.worker.sync.codecs import Bf16Codec, BlockwiseIntCodec, Codec
from evener.worker.sync.packed import PackedAllReduce, unpack_views
from evener.worker.sync.powersgd import PowerSGD

MATRIX_SHAPE, NUM_MATRICES = (1536, 384), 8  # of the character model's MLP: 19 MB, beyond most caches
BENCH_S = 0.3
POWERSGD_RANKS = (4, 32)  # the time at other ranks lies on the line through these


def codec_rates_Bps(device: torch.device) -> dict[str, float]:
    """Return, by sync strategy, the bytes of fp32 gradients that one CPU thread, or a GPU, codes per second."""
    draw = torch.Generator().manual_seed(0)
    views = [(torch.randn(MATRIX_SHAPE, generator=draw) * 1e-3).view(-1).to(device) for _ in range(NUM_MATRICES)]
    codes: dict[str, Codec] = {"bf16": Bf16Codec(), "int8": BlockwiseIntCodec(8), "int4": BlockwiseIntCodec(4)}
    work: dict[str, Callable[[], object]] = {
        name: _quantized_round_trip(code, torch.cat(views)) for name, code in codes.items()
    }
    work["packed"] = _packed_round_trip(views)
    for rank in POWERSGD_RANKS:
        work[f"powersgd:{rank}"] = _powersgd_round_trip(views, rank)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in training: one communication thread, beside those that compute
    try:
        num_bytes = sum(view.nbytes for view in views)
        return {
            name: num_bytes / time_repeated_s(encode_decode, device, BENCH_S) for name, encode_decode in work.items()
        }
    finally:
        torch.set_num_threads(threads)


def _quantized_round_trip(codec: Codec, values: torch.Tensor) -> Callable[[], object]:
    residual, total, result = values.clone(), torch.zeros_like(values), torch.empty_like(values)
    payload = torch.zeros(codec.payload_bytes(len(values)), dtype=torch.uint8, device=values.device)

    def once() -> None:
        residual.add_(values)
        codec.encode(residual, payload, decoded_out=total)
        codec.decode_add(payload, total)
        result.copy_(total)

    return once


def _packed_round_trip(views: list[torch.Tensor]) -> Callable[[], object]:
    group: Any = SimpleNamespace(world_size=2, rank=0)
    packed, bf16_values = PackedAllReduce(group), [view.bfloat16().float() for view in views]
    payload = torch.empty(4 * sum(map(len, views)), dtype=torch.uint8, device=views[0].device)

    def once() -> None:
        fits = packed.pack_views(bf16_values, payload)
        for view, values in zip(views, unpack_views(payload, fits, views), strict=True):
            packed.add_unpacked(values, view)

    return once


def _powersgd_round_trip(views: list[torch.Tensor], rank: int) -> Callable[[], object]:
    group: Any = SimpleNamespace(world_size=1)
    exchange = PowerSGD(group, rank)
    parameters = tuple(nn.Parameter(torch.empty(MATRIX_SHAPE, device=views[0].device)) for _ in views)
    results = [view.clone() for view in views]
    return lambda: exchange.run(GradBucketSlice(0, parameters, results, is_warmup=False))
