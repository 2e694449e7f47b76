"""What does an all-reduce cost the processors of this host, and how fast is one between two of its own ranks?

Two ranks of Gloo in one process, joined by the loopback interface: no second interpreter has to start, and the
process's own clock knows what both took. *Measured* with 64 MiB on 2 cores of an AMD EPYC (2026-11): 2.14 GB per
processor second so, 2.10 GB between two processes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evener.core.units import median

SIZE_BYTES = 64 << 20  # beyond most caches, as gradients are that a backward has just written
LOOPBACK_S = 1.0
MIN_TIMES = 3
TIMEOUT = timedelta(seconds=60)
INTERFACE = "GLOO_SOCKET_IFNAME"


def loopback_rates() -> tuple[float, float]:
    """(sync_Bps, loopback_Bps): bytes that a rank sends in an all-reduce of two, per processor second and per second.

    With two ranks each sends as much as the buffer has, receives as much, and adds half of it.
    """
    ranks = _two_ranks()
    buffers = [torch.zeros(SIZE_BYTES // 4) for _ in ranks]

    def once() -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        for work in [rank.allreduce([buffer]) for rank, buffer in zip(ranks, buffers, strict=True)]:
            work.wait()
        return time.perf_counter() - began, time.process_time() - cpu

    once()  # memory is touched, connections find their pace
    took: list[tuple[float, float]] = []
    until = time.perf_counter() + LOOPBACK_S
    while len(took) < MIN_TIMES or time.perf_counter() < until:
        took.append(once())
    wall_s, both_cpu_s = (median(column) or 0.0 for column in zip(*took, strict=True))
    return SIZE_BYTES / (both_cpu_s / len(ranks)), SIZE_BYTES / wall_s


def _two_ranks() -> list[Any]:
    """Two process groups that are each other's only peer. A rank waits for the other in its constructor."""
    interface, before = (
        next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
        os.environ.get(INTERFACE),
    )
    os.environ[INTERFACE] = interface
    store = dist.HashStore()
    made: dict[int, Any] = {}

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)

    other = threading.Thread(target=make, args=(1,), daemon=True)
    try:
        other.start()
        make(0)
        other.join()
    finally:
        if before is None:
            del os.environ[INTERFACE]
        else:
            os.environ[INTERFACE] = before
    return [made[0], made[1]]
