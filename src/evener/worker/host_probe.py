"""How fast is this host: its arithmetic, its memory, and the model itself?

    python -m evener.worker.host_probe '{"host": "attic", "model": "char"}'

Every device in turn, by one process; the argument is a HostProbeSpec. Prints lines of JSON.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from evener.core.errors import EvenerError, UsageError
from evener.core.finding import Finding
from evener.core.fleet import Rates
from evener.core.hostprobe import DeviceProbe, Doing, HostProbeSpec, HostTold, Sustained
from evener.core.machine import this_machine
from evener.core.resolve import MICRO_BATCH_TOKENS
from evener.core.shape import PRESETS, preset_shape
from evener.core.units import count, median, percentile
from evener.core.units import seconds as duration
from evener.worker.collectives import DTYPES, sum_rate_Bps
from evener.worker.group import leave
from evener.worker.model import GPT
from evener.worker.run import choose_dtype

MATMUL_S = 0.3  # for one type
MATMUL_LARGEST = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 1 << 28  # beyond any cache
COPY_S = 0.5
PASS_S = 0.4  # a micro-batch that takes so long is large enough
MIN_PASSES = 3
SLOWER = 0.9  # below this share of another rate it is no chance
SUSTAINED_S = 10.0  # shorter runs do not heat anything up


def probe(device: torch.device, spec: HostProbeSpec) -> DeviceProbe:
    """All figures of one device; takes about four seconds more than `spec.seconds`."""
    name = "cpu" if device.type == "cpu" else str(device)
    tell(Doing(text=f"{name}: matrix products"))
    matmul_flops = {dtype: matmul_rate(DTYPES[dtype], device) for dtype in _dtypes(device)}
    tell(Doing(text=f"{name}: memory"))
    copy_Bps, triad_Bps = memory_rates(device)
    sums = {dtype: sum_rate_Bps(DTYPES[dtype], device) for dtype in ("fp32", "bf16")}
    tell(Doing(text=f"{name}: {spec.model}, forward and backward for {spec.seconds:.0f} s"))
    sustained = train(spec.model, device, spec.seconds)
    rates = Rates(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().cpu,
        matmul_flops=matmul_flops,
        copy_Bps=copy_Bps,
        triad_Bps=triad_Bps,
        sum_Bps=sums,
        tokens_per_s={spec.model: sustained.tokens_per_s},
        measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    return DeviceProbe(
        host=spec.host,
        device=name,
        threads=torch.get_num_threads(),
        model=spec.model,
        rates=rates,
        sustained=sustained,
        findings=findings(spec, name, rates, sustained),
    )


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of square matrix products, as large as take a twentieth of the time."""
    n = 128
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def multiply(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
            torch.mm(a, b, out=out)

        took = _repeat(multiply, device, 0.0)
        if took > MATMUL_S / 20 or n == MATMUL_LARGEST[device.type]:
            return 2.0 * n**3 / _repeat(multiply, device, MATMUL_S)
        n *= 2


def memory_rates(device: torch.device) -> tuple[float, float]:
    """Bytes read and written in a second by b = a, and by c = a + s·b (McCalpin's STREAM triad)."""
    a, b, c = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(3))
    copy_s = _repeat(lambda: b.copy_(a), device, COPY_S)
    triad_s = _repeat(lambda: torch.add(a, b, alpha=3.0, out=c), device, COPY_S)
    return 2 * COPY_BYTES / copy_s, 3 * COPY_BYTES / triad_s


def train(model: str, device: torch.device, seconds: float) -> Sustained:
    """Forward and backward of a preset without a stop, in the arithmetic that a run would choose."""
    torch.manual_seed(0)
    shape = preset_shape(model, PRESETS[model].vocab_size)
    dtype = choose_dtype("auto", device)
    module = GPT(shape).to(device)
    sequences = torch.randint(shape.vocab_size, (MICRO_BATCH_TOKENS // shape.block_size or 1, shape.block_size + 1))
    sequences = sequences.to(device)

    def once(micro_batch: int) -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = module(sequences[:micro_batch, :-1], sequences[:micro_batch, 1:])
        (loss / (micro_batch * shape.block_size)).backward()
        module.zero_grad()

    micro_batch = 1
    began = time.perf_counter()
    once(micro_batch)
    _wait_for(device)
    first_s = time.perf_counter() - began
    if first_s > seconds / MIN_PASSES:
        tell(Doing(text=f"one pass takes {duration(first_s)}, so about {duration(MIN_PASSES * first_s)}"))
    elif first_s < 4 * PASS_S:  # the first is slow by itself
        while _repeat(lambda: once(micro_batch), device, 0.0) < PASS_S and micro_batch < len(sequences):  # noqa: B023
            micro_batch = min(2 * micro_batch, len(sequences))
    passes: list[tuple[float, float, float]] = []  # when it ended, how long it took, processor seconds
    clocks: list[tuple[float, float]] = []
    began = time.perf_counter()
    while time.perf_counter() < began + seconds or len(passes) < MIN_PASSES:
        wall, cpu = time.perf_counter(), time.process_time()
        once(micro_batch)
        _wait_for(device)
        now = time.perf_counter()
        passes.append((now - began, now - wall, time.process_time() - cpu))
        if (clock := _clock_Hz()) is not None:
            clocks.append((now - began, clock))
    whole_s = passes[-1][0]
    thirds = [[one for one in passes if lo <= one[0] / whole_s <= hi] or passes for lo, hi in ((0, 1 / 3), (2 / 3, 1))]
    first_Hz, last_Hz = (
        median([clock for at, clock in clocks if lo <= at / whole_s <= hi]) for lo, hi in ((0, 1 / 3), (2 / 3, 1))
    )
    tokens = micro_batch * shape.block_size
    return Sustained(
        dtype=next(name for name, known in DTYPES.items() if known == dtype),
        micro_batch=micro_batch,
        tokens=tokens,
        passes=len(passes),
        pass_p50_s=percentile([took for _, took, _ in passes], 0.5),
        pass_p95_s=percentile([took for _, took, _ in passes], 0.95),
        tokens_per_s=len(passes) * tokens / whole_s,
        first_third_tokens_per_s=tokens / (median([took for _, took, _ in thirds[0]]) or math.inf),
        last_third_tokens_per_s=tokens / (median([took for _, took, _ in thirds[1]]) or math.inf),
        first_third_cpus=sum(cpu for _, _, cpu in thirds[0]) / sum(took for _, took, _ in thirds[0]),
        last_third_cpus=sum(cpu for _, _, cpu in thirds[1]) / sum(took for _, took, _ in thirds[1]),
        first_third_Hz=first_Hz,
        last_third_Hz=last_Hz,
    )


def findings(spec: HostProbeSpec, device: str, rates: Rates, sustained: Sustained) -> list[Finding]:
    """What in these figures deserves a word."""
    found = []
    fp32, bf16 = rates.matmul_flops["fp32"], rates.matmul_flops.get("bf16")
    if bf16 is not None and bf16 < SLOWER * fp32:
        found.append(
            Finding(
                check="dtype.slow",
                severity="info",
                host=spec.host,
                evidence=f"{device}: matrix products run at {count(bf16)}FLOP/s in bf16, {count(fp32)}FLOP/s in fp32",
                fix="--dtype fp32, which --dtype auto takes here",
            )
        )
    first, last = sustained.first_third_tokens_per_s, sustained.last_third_tokens_per_s
    # Where the process ran on fewer processors in the end, somebody else took them: that is no throttling.
    undisturbed = device != "cpu" or sustained.last_third_cpus > SLOWER * sustained.first_third_cpus
    if spec.seconds >= SUSTAINED_S and last < SLOWER * first and undisturbed:
        clock = ""
        if sustained.first_third_Hz and sustained.last_third_Hz:
            clock = f", its clock from {sustained.first_third_Hz / 1e9:.2f} to {sustained.last_third_Hz / 1e9:.2f} GHz"
        found.append(
            Finding(
                check="cpu.throttled",
                severity="warning",
                host=spec.host,
                evidence=f"{device}: within {spec.seconds:.0f} s its rate fell from {first:.0f} to {last:.0f} tokens/s"
                + clock,
                fix="mains instead of battery, free air, the performance profile: powerprofilesctl set performance; "
                "then evener probe host again",
            )
        )
    return found


def _dtypes(device: torch.device) -> list[str]:
    """Types that are worth a figure: fp16 on a processor only where it has units for it."""
    units = torch.cpu.get_capabilities()
    has_fp16 = device.type == "cuda" or units.get("avx512_fp16") or units.get("amx_fp16")
    return ["fp32", "bf16", *(["fp16"] if has_fp16 or platform.machine() == "arm64" else [])]


def _repeat(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of the work, after one that is not counted."""
    work()
    _wait_for(device)
    took: list[float] = []
    until = time.perf_counter() + seconds
    while len(took) < 1 or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        _wait_for(device)
        took.append(time.perf_counter() - began)
    return median(took) or math.inf


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clock_Hz() -> float | None:
    """Mean clock of the processors now; None where the system does not tell."""
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    try:
        clocks = [1e3 * int(path.read_text()) for path in paths]
    except (OSError, ValueError):
        return None
    return sum(clocks) / len(clocks) if clocks else None


def devices(wish: str) -> list[torch.device]:
    """The devices to measure: every GPU that training would use, else the processor."""
    num_gpus = torch.cuda.device_count() if wish != "cpu" else 0
    if wish == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda: this machine has no GPU that torch can use", hint="--device cpu")
    gpus = [torch.device("cuda", i) for i in range(num_gpus)]
    return gpus if wish == "cuda" else [torch.device("cpu"), *gpus]


def tell(news: HostTold) -> None:
    print(msgspec.json.encode(news).decode(), flush=True)


def main() -> int:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # one process measures all devices of its host
    try:
        spec = msgspec.json.decode(sys.argv[1], type=HostProbeSpec)
        for device in devices(spec.device):
            tell(probe(device, spec))
    except EvenerError as error:
        print(msgspec.json.encode({"error": str(error), "hint": error.hint, "kind": type(error).__name__}).decode())
        return error.exit_status
    return 0


if __name__ == "__main__":
    leave(main())
