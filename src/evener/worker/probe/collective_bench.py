"""Collective benchmark: bandwidths of each collective by size, and a check of its results, as in nccl-tests.

    torchrun --nproc-per-node 2 -m evener.worker.probe.collective_bench '{"collectives": ["all_reduce"], "seconds": 30}'

The argument is a CollectiveBenchSpec. Rank 0 prints a line of JSON for the group and for each result. The first
operation of a size runs on known values and its result is checked; then zeros are transferred and timed.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.units import median, percentile
from evener.core.cluster.collective_results import (
    Collective,
    CollectiveBenchGroup,
    CollectiveBenchMessage,
    CollectiveBenchSpec,
    CollectiveResult,
    SkippedSizes,
)
from evener.core.cluster.host_info import local_host_info
from evener.core.run.roster import RankSlot, choose_backend
from evener.plan.cost.collective_cost import bus_factor
from evener.worker.rank.precision import TORCH_DTYPES
from evener.worker.rank.process_groups import ProcessGroups, exit_immediately

PATTERN_PERIOD = 4093  # of the known values: a prime, so that segments of a power of two bytes differ
MAX_EXACT_INT = 256  # whole numbers up to here are exact in bf16
TARGET_S_PER_SIZE = 1.0  # target for one size
MIN_ITERATIONS, MAX_ITERATIONS = 3, 200
NUM_WARMUPS = 2  # one that is checked, one that is not
NUM_SETTLING_OPS = 50  # small operations before anything is measured
OPS_PER_GPU_SYNC = 10  # operations queued on a GPU before it is synchronized
SUM_BYTES = 1 << 22  # size of each operand of `sum_rate_Bps`: about that of one segment in Gloo
SUM_RATE_S = 0.1


class BenchCollective:
    """One collective, its buffers, and the check of its result."""

    def __init__(
        self, collective: Collective, group: ProcessGroups, size_bytes: int, dtype: torch.dtype, in_place: bool
    ) -> None:
        self.collective, self._group = collective, group
        n, rank = group.world_size, group.rank
        self.is_chunked = collective in ("all_gather", "reduce_scatter", "all_to_all")
        self.count = max(1, size_bytes // dtype.itemsize // (n if self.is_chunked else 1))
        whole = torch.zeros(self.count * (n if self.is_chunked else 1), dtype=dtype, device=group.device)
        self.size_bytes = whole.numel() * dtype.itemsize
        self.in_place = in_place if collective in ("all_gather", "reduce_scatter") else not self.is_chunked
        part = slice(rank * self.count, (rank + 1) * self.count)
        if collective == "all_to_all":
            self._input, self._output = whole, torch.zeros_like(whole)
        elif collective == "all_gather":
            self._output = whole
            self._input = whole[part] if self.in_place else torch.zeros_like(whole[part])
        elif collective == "reduce_scatter":
            self._input = whole
            self._output = whole[part] if self.in_place else torch.zeros_like(whole[part])
        else:
            self._input = self._output = whole

    def run(self) -> None:
        """Run the collective once."""
        process_group = self._group.gradient_group
        if self.collective == "all_reduce":
            dist.all_reduce(self._output, group=process_group)
        elif self.collective == "all_gather":
            dist.all_gather_single(self._output, self._input, group=process_group)
        elif self.collective == "reduce_scatter":
            dist.reduce_scatter_single(self._output, self._input, group=process_group)
        elif self.collective == "broadcast":
            dist.broadcast(self._output, src=0, group=process_group)
        else:
            dist.all_to_all_single(self._output, self._input, group=process_group)

    def fill_known_values(self) -> None:
        """Fill this rank's input with known values."""
        rank, ranks = self._group.rank, range(self._group.world_size)
        self._output.fill_(-1)
        if self.collective in ("reduce_scatter", "all_to_all"):
            for chunk, other in zip(self._input.view(len(ranks), -1), ranks, strict=True):
                _fill_periodic(chunk, self._known_values(rank, other))
        elif self.collective != "broadcast" or rank == 0:
            _fill_periodic(self._input, self._known_values(rank, 0))

    def num_wrong(self) -> int:
        """Return the number of wrong elements in this rank's result."""
        rank, ranks = self._group.rank, range(self._group.world_size)
        if self.collective == "all_reduce":
            return _count_wrong(self._output, sum(self._known_values(other, 0) for other in ranks))
        if self.collective == "reduce_scatter":
            return _count_wrong(self._output, sum(self._known_values(other, rank) for other in ranks))
        if self.collective == "broadcast":
            return _count_wrong(self._output, self._known_values(0, 0))
        place = rank if self.collective == "all_to_all" else 0
        chunks = zip(self._output.view(len(ranks), -1), ranks, strict=True)
        return sum(_count_wrong(chunk, self._known_values(other, place)) for chunk, other in chunks)

    def corrupt(self, num: int) -> None:
        """Corrupt the first `num` elements of the result, for tests."""
        self._output[:num] += 1

    def zero_buffers(self) -> None:
        """Fill the buffers with zeros: repeated sums of them stay finite."""
        self._input.zero_()
        self._output.zero_()

    def _known_values(self, source: int, target: int) -> Any:
        """Return one period of what `source` sends to `target`: integers whose sum over ranks is exact in any dtype."""
        below = max(2, min(16, MAX_EXACT_INT // self._group.world_size))
        i = torch.arange(PATTERN_PERIOD, device=self._group.device)
        values = (i * i + 7 * source * i + 3 * source + 11 * target * i + 5 * target) % PATTERN_PERIOD % below
        return values.to(self._output.dtype)


def measure_collective(
    group: ProcessGroups, spec: CollectiveBenchSpec, collective: Collective, size_bytes: int, target_s: float
) -> CollectiveResult:
    """Check one collective at one size, then time it for about `target_s`."""
    operation = BenchCollective(collective, group, size_bytes, TORCH_DTYPES[spec.dtype], spec.in_place)
    operation.fill_known_values()
    group.barrier()
    _time_operation_s(operation, 1, group.device)
    if spec.corrupt_results and group.rank == 0:
        operation.corrupt(spec.corrupt_results)
    (num_wrong,) = group.all_reduce_sum(operation.num_wrong())
    operation.zero_buffers()
    group.barrier()
    once_s = _max_over_ranks(group, _time_operation_s(operation, 1, group.device))
    batch = OPS_PER_GPU_SYNC if group.device.type == "cuda" else 1
    iterations = min(max(int(target_s / once_s), MIN_ITERATIONS), MAX_ITERATIONS)
    group.barrier()
    before = _kernel_sent_bytes(group)
    took = [_time_operation_s(operation, batch, group.device) / batch for _ in range(math.ceil(iterations / batch))]
    group.barrier()
    after = _kernel_sent_bytes(group)
    done = len(took) * batch
    sent = None if before is None or after is None else _max_over_ranks(group, (after - before) / done)
    time_s = _max_over_ranks(group, median(took) or 0.0)
    algbw_Bps = operation.size_bytes / time_s
    return CollectiveResult(
        collective=collective,
        size_bytes=operation.size_bytes,
        count=operation.count,
        dtype=spec.dtype,
        redop="sum" if collective in ("all_reduce", "reduce_scatter") else "none",
        root=0 if collective == "broadcast" else -1,
        in_place=operation.in_place,
        time_s=time_s,
        time_p95_s=_max_over_ranks(group, percentile(took, 0.95)),
        iterations=done,
        algbw_Bps=algbw_Bps,
        busbw_Bps=bus_factor(collective, group.world_size) * algbw_Bps,
        num_wrong=int(num_wrong),
        sent_bytes=sent,
    )


def run_benchmark(spec: CollectiveBenchSpec) -> None:
    """Measure every collective at every size that there is time for.

    Each collective gets an equal share of the time that remains when it begins.
    """
    group = ProcessGroups(spec.device)
    if group.world_size < 2:
        raise UsageError("collectives need two ranks or more", hint="--ranks 2")
    local = RankSlot(host=local_host_info().host, device=str(group.device))
    slots = group.all_gather(local, RankSlot)
    group.set_gradient_backend(choose_backend(slots, spec.backend))
    _print_json(
        group,
        CollectiveBenchGroup(
            ranks=group.world_size,
            hosts=[slot.host for slot in slots],
            backend=group.backend,
            device=torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "cpu",
            interface=_bound_interface(),
            sum_Bps=-_max_over_ranks(group, -sum_rate_Bps(TORCH_DTYPES[spec.dtype], group.device)),
            torch=str(torch.__version__),
        ),
    )
    for _ in range(NUM_SETTLING_OPS):  # TCP connections ramp up
        dist.all_reduce(
            torch.zeros(256, dtype=TORCH_DTYPES[spec.dtype], device=group.device), group=group.gradient_group
        )
    until = time.monotonic() + spec.seconds
    for index, collective in enumerate(spec.collectives):
        rows: list[CollectiveResult] = []
        ends = time.monotonic() + _value_of_rank0(group, until - time.monotonic()) / (len(spec.collectives) - index)
        for done, size_bytes in enumerate(spec.sizes):
            left_s = _value_of_rank0(group, ends - time.monotonic())
            needs_s = (NUM_WARMUPS + MIN_ITERATIONS) * extrapolate_time_s(rows, size_bytes)
            if needs_s > left_s:
                _print_json(
                    group, SkippedSizes(collective=collective, size_bytes=size_bytes, needs_s=needs_s, left_s=left_s)
                )
                break
            slot_s = min(TARGET_S_PER_SIZE, left_s / 2 / (len(spec.sizes) - done))
            rows.append(measure_collective(group, spec, collective, size_bytes, slot_s))
            _print_json(group, rows[-1])
    group.barrier()
    group.close()


def extrapolate_time_s(rows: list[CollectiveResult], size_bytes: int) -> float:
    """Predict the seconds of one operation of the next size from the line through the first and the last result.

    The line may be flat by chance, so return at least a quarter of what the last result's bandwidth predicts.
    """
    if not rows:
        return 0.0
    first, last = rows[0], rows[-1]
    min_s = last.time_s * size_bytes / last.size_bytes / 4
    if len(rows) == 1:
        return 4 * min_s
    slope = (last.time_s - first.time_s) / (last.size_bytes - first.size_bytes)
    return max(min_s, last.time_s + slope * (size_bytes - last.size_bytes))


def sum_rate_Bps(dtype: torch.dtype, device: torch.device) -> float:
    """Measure γ, the bytes per second of a buffer to which torch adds another one, on one CPU core or on the GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = torch.zeros(SUM_BYTES // dtype.itemsize, dtype=dtype, device=device)
    source = torch.ones_like(target)
    took: list[float] = []
    until = time.perf_counter() + SUM_RATE_S
    while len(took) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        target += source
        _synchronize(device)
        took.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return SUM_BYTES / (median(took) or math.inf)


def _fill_periodic(buffer: Tensor, period: Tensor) -> None:
    whole = buffer.numel() // PATTERN_PERIOD * PATTERN_PERIOD
    buffer[:whole].view(-1, PATTERN_PERIOD).copy_(period)
    buffer[whole:] = period[: buffer.numel() - whole]


def _count_wrong(buffer: Tensor, period: Tensor) -> int:
    whole = buffer.numel() // PATTERN_PERIOD * PATTERN_PERIOD
    rows = buffer[:whole].view(-1, PATTERN_PERIOD)
    return int((rows != period).sum()) + int((buffer[whole:] != period[: buffer.numel() - whole]).sum())


def _time_operation_s(operation: BenchCollective, times: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(times):
        operation.run()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _max_over_ranks(group: ProcessGroups, value: float) -> float:
    return max(float(text) for text in group.all_gather_bytes(repr(value).encode()))


def _value_of_rank0(group: ProcessGroups, value: float) -> float:
    """Return rank 0's value on all ranks."""
    return group.all_reduce_sum(value if group.rank == 0 else 0.0)[0]


def _bound_interface() -> str | None:
    return os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or None


def _kernel_sent_bytes(group: ProcessGroups) -> int | None:
    """Return the bytes, headers included, that this rank's network interface has sent.

    None if the interface is not known or other ranks share it.
    """
    interface = _bound_interface()
    if interface is None or group.local_world_size > 1 or not Path("/proc/net/dev").exists():
        return None
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.strip().partition(":")
        if name == interface:
            return int(figures.split()[8])
    return None


def _print_json(group: ProcessGroups, message: CollectiveBenchMessage) -> None:
    if group.rank == 0:
        print(msgspec.json.encode(message).decode(), flush=True)


def main() -> int:
    try:
        run_benchmark(from_json(sys.argv[1], CollectiveBenchSpec))
    except EvenerError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error.to_json_line(), flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    exit_immediately(main())
