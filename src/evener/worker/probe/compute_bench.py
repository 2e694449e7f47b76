"""Compute benchmark: attribute the time of a GPT's training step to operations, and measure the rates that bound it.

    python -m evener.worker.probe.compute_bench '{"shape": …, "batch": 8, "seconds": 20}'

The argument is a ComputeBenchSpec; prints a ComputeProfile as one line of JSON. Steps with torch.profiler alternate
with steps without it, which say what the profiler costs.

Module hooks open a profiler range for each operation of the forward pass. An operation of the backward pass belongs to
the forward operation that created its autograd node, which both carry the node's sequence number. On a CPU the time of
an operation is the range's, Python included; on a GPU it is that of the kernels launched in it.
"""

from __future__ import annotations

import bisect
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from evener.core.cluster.allocator import disable_malloc_trim, use_jemalloc

if __name__ == "__main__":
    use_jemalloc()  # as ranks do

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from evener.core.base.decoding import from_json
from evener.core.base.errors import UsageError, exit_status_of
from evener.core.cluster.host_info import local_host_info
from evener.core.model.compute_profile import ComputeBenchSpec, ComputeProfile, OperationTime
from evener.core.model.operations import OperationName, Phase
from evener.core.model.shape import MLP_EXPANSION, GPTShape
from evener.core.run.roster import RankSlot, choose_dtypes
from evener.core.run.run_spec import TrainSpec
from evener.worker.probe.device_probe import memory_rates_Bps
from evener.worker.probe.sustained_bench import synchronize_device, time_repeated_s
from evener.worker.rank.precision import TORCH_DTYPES, autocast, has_bf16
from evener.worker.rank.process_groups import exit_immediately
from evener.worker.train.model import GPT
from evener.worker.train.optim import adamw

NUM_WARMUP_STEPS = 2  # memory is mapped, AdamW allocates its moments; the profiler starts
MIN_STEPS = 3  # with the profiler
RATES_SHARE = 0.2  # of the time, before and after the steps together
RANGE_PREFIX = "evener/"
BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
MODULE_OPERATIONS: dict[str, OperationName] = {  # by the last word of a module's name, which has the rest of its time
    "": "embedding",  # the model itself
    "token_embedding": "embedding",
    "value_embedding": "embedding",
    "dropout": "dropout",
    "attention_norm": "norms",
    "mlp_norm": "norms",
    "norm": "norms",
    "qkv": "qkv",
    "attention": "attention",
    "out": "attention output",
    "up": "MLP up",
    "mlp": "activation",
    "down": "MLP down",
}
Key = tuple[OperationName, Phase]
T = TypeVar("T")


class StepProfiler:
    """A GPT with its optimizer, whose steps are taken with and without torch.profiler."""

    def __init__(self, spec: ComputeBenchSpec, device: torch.device) -> None:
        torch.manual_seed(0)
        slot = RankSlot(host="here", device=str(device), has_bf16=has_bf16(device))
        (self.dtype,) = choose_dtypes([slot], spec.dtype)
        self.device, self._train = device, TrainSpec(lr=1e-3)
        self.module = GPT(spec.shape).to(device)
        self._optimizer = adamw(self.module, self._train)
        tokens = torch.randint(spec.shape.vocab_size, (spec.batch, spec.shape.block_size + 1)).to(device)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self._open_ranges: list[Any] = []

    def train_step(self) -> float:
        """Take one step as the training loop does; return its seconds."""
        synchronize_device(self.device)
        began = time.perf_counter()
        with autocast(self.device, self.dtype):
            loss = self.module(self._inputs, self._targets)
        (loss / self._targets.numel()).backward()
        with record_function(f"{RANGE_PREFIX}clipping"):
            nn.utils.clip_grad_norm_(self.module.parameters(), self._train.clip)
        with record_function(f"{RANGE_PREFIX}AdamW"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        synchronize_device(self.device)
        return time.perf_counter() - began

    def profile_step(self) -> tuple[float, dict[Key, float]]:
        """Take one step with the profiler; return its seconds and those of each operation."""
        on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        with self._operation_ranges(), profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiled:
            took_s = self.train_step()
        return took_s, operation_times(list(profiled.events() or []), on_gpu=bool(on_gpu))

    @contextmanager
    def _operation_ranges(self) -> Iterator[None]:
        """Open a profiler range in each module of the forward pass. After the last norm come the head and the loss."""
        handles = []
        for name, module in self.module.named_modules():
            if isinstance(module, nn.Dropout) and not module.p:
                continue
            operation = MODULE_OPERATIONS.get(name.rpartition(".")[2], "residuals")  # of a block, named by its number
            handles.append(module.register_forward_pre_hook(self._opener(operation)))
            handles.append(module.register_forward_hook(self._closer))
        handles.append(self.module.norm.register_forward_hook(self._opener("head and loss")))
        handles.append(self.module.register_forward_hook(self._closer))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _opener(self, operation: OperationName) -> Callable[..., None]:
        def open_range(*_: object) -> None:
            self._open_ranges.append(record_function(f"{RANGE_PREFIX}{operation}"))
            self._open_ranges[-1].__enter__()

        return open_range

    def _closer(self, *_: object) -> None:
        self._open_ranges.pop().__exit__(None, None, None)


def operation_times(events: list[Any], *, on_gpu: bool) -> dict[Key, float]:
    """Return the seconds of each operation and phase from the profiler's events of one step.

    Time outside of all ranges and autograd nodes belongs to none.
    """
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    times: Counter[Key] = Counter()
    creators: dict[int, tuple[float, OperationName]] = {}  # sequence number: start of the last event with it, operation

    def add(event: Any, key: Key | None) -> None:
        if key is not None and key[1] == "forward" and event.sequence_nr >= 0:
            creators[event.sequence_nr] = max(
                creators.get(event.sequence_nr, (0.0, key[0])), (event.time_range.start, key[0])
            )
        children_us = 0.0
        for child in event.cpu_children:
            children_us += child.time_range.elapsed_us()
            add(child, _key_of_range(child.name) or key)
        if key is not None:
            kernels_us = sum(kernel.duration for kernel in event.kernels)
            times[key] += (kernels_us if on_gpu else event.time_range.elapsed_us() - children_us) / 1e6

    roots = [event for event in events if event.cpu_parent is None]
    for event in roots:
        if not event.name.startswith(BACKWARD_PREFIX):
            add(event, _key_of_range(event.name))
    numbers = sorted(creators)
    for event in roots:
        # An operation may create several nodes: the later ones have no event with their number.
        i = bisect.bisect_right(numbers, event.sequence_nr) - 1
        if event.name.startswith(BACKWARD_PREFIX) and event.sequence_nr >= 0 and i >= 0:
            name = creators[numbers[i]][1]
            add(event, (name, "both" if name == "head and loss" else "backward"))
    return dict(times)


def _key_of_range(name: str) -> Key | None:
    """Return operation and phase of a range of ours; None of all other events."""
    if not name.startswith(RANGE_PREFIX):
        return None
    operation: OperationName = name.removeprefix(RANGE_PREFIX)  # type: ignore[assignment]  # as it was opened
    phases: dict[OperationName, Phase] = {"clipping": "update", "AdamW": "update", "head and loss": "both"}
    return operation, phases.get(operation, "forward")


def best_matmul(shape: GPTShape, num_tokens: int, dtype: torch.dtype, device: torch.device,
                seconds: float) -> tuple[float, tuple[int, int, int]]:  # fmt: skip
    """Return FLOP/s and (m, k, n) of the fastest product among those of the model's linear layers and their gradients.

    Each is measured for an equal part of `seconds`, with operands that lie in memory as in the layer.
    """
    C = shape.width
    layers = ((C, 3 * C), (C, C), (C, MLP_EXPANSION * C), (MLP_EXPANSION * C, C))
    best = (0.0, (0, 0, 0))
    for wide_in, wide_out in layers:
        x, y, weight = (torch.randn(size, device=device).to(dtype) for size in
                        ((num_tokens, wide_in), (num_tokens, wide_out), (wide_out, wide_in)))  # fmt: skip
        for a, b in ((x, weight.T), (y, weight), (y.T, x)):  # output, gradient of the input, gradient of the weight
            out = torch.mm(a, b)

            def multiply(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
                torch.mm(a, b, out=out)

            took_s = time_repeated_s(multiply, device, seconds / (3 * len(layers)))
            m, k, n = a.shape[0], a.shape[1], b.shape[1]
            best = max(best, (2.0 * m * k * n / took_s, (m, k, n)))
    return best


def best_memory_Bps(num_elements: int, device: torch.device, seconds: float) -> float:
    """Return the best bytes read and written a second: by a copy and a triad, in memory and of so many fp32 numbers."""
    a, b, c = (torch.ones(num_elements, device=device) for _ in range(3))
    copy_s = time_repeated_s(lambda: b.copy_(a), device, seconds / 2)
    triad_s = time_repeated_s(lambda: torch.add(a, b, alpha=3.0, out=c), device, seconds / 2)
    return max(*memory_rates_Bps(device), 8 * num_elements / copy_s, 12 * num_elements / triad_s)


def middle_half(values: Sequence[T], key: Callable[[T], Any] | None = None) -> list[T]:
    """Return the values without the lowest and the highest quarter: means of these can be added, medians cannot.

    >>> middle_half([9.0, 1.0, 2.0, 3.0]), middle_half([1.0])
    ([2.0, 3.0], [1.0])
    """
    ordered = sorted(values, key=key)  # type: ignore[type-var, arg-type]
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def profile_compute(spec: ComputeBenchSpec) -> ComputeProfile:
    """Measure for about `spec.seconds`."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU that torch can use", hint="--device cpu")
    use_gpu = spec.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    machine = local_host_info()
    torch.set_num_threads(spec.threads or machine.cores)
    if not use_gpu:
        disable_malloc_trim()
    profiler = StepProfiler(spec, device)
    num_tokens, dtype = spec.batch * spec.shape.block_size, TORCH_DTYPES[profiler.dtype]
    rates_s = RATES_SHARE / 2 * spec.seconds

    def measure_rates() -> tuple[float, tuple[int, int, int]]:
        return best_matmul(spec.shape, num_tokens, dtype, device, rates_s)

    matmul_before = measure_rates()
    memory_Bps = best_memory_Bps(num_tokens * spec.shape.width, device, rates_s / 4)
    for _ in range(NUM_WARMUP_STEPS):
        profiler.train_step()
        profiler.profile_step()
    plain: list[float] = []
    cpu_s = 0.0
    profiled: list[tuple[float, dict[Key, float]]] = []
    until = time.perf_counter() + (1 - RATES_SHARE) * spec.seconds
    while len(plain) < MIN_STEPS or time.perf_counter() < until:
        cpu_before = time.process_time()
        plain.append(profiler.train_step())
        cpu_s += time.process_time() - cpu_before
        profiled.append(profiler.profile_step())
    matmul_flops, matmul_shape = max(matmul_before, measure_rates())
    typical = middle_half(profiled, key=lambda one: one[0])
    keys = dict.fromkeys(key for _, times in typical for key in times)
    return ComputeProfile(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if use_gpu else machine.cpu,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        dtype=profiler.dtype,
        tokens=num_tokens,
        num_steps=len(plain),
        step_s=statistics.fmean(middle_half(plain)),
        cpus=cpu_s / sum(plain),
        profiled_step_s=statistics.fmean(took_s for took_s, _ in typical),
        matmul_flops=matmul_flops,
        matmul_shape=matmul_shape,
        memory_Bps=memory_Bps,
        operations=[
            OperationTime(
                name=name, phase=phase, time_s=statistics.fmean(times.get((name, phase), 0.0) for _, times in typical)
            )
            for name, phase in keys
        ],
    )


def _print_profile() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes a line about each start of the profiler
    print(msgspec.json.encode(profile_compute(from_json(sys.argv[1], ComputeBenchSpec))).decode(), flush=True)


if __name__ == "__main__":
    exit_immediately(exit_status_of(_print_profile))
