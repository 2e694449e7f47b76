"""Device probe: measure this host's matrix products, memory bandwidth, all-reduce, codecs and training throughput.

    python -m evener.worker.probe.device_probe '{"host": "attic", "models": ["char"]}'

One process measures every device in turn; the argument is a HostProbeSpec. Prints lines of JSON.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator

from evener.core.cluster.allocator import disable_malloc_trim, has_jemalloc, use_jemalloc

if __name__ == "__main__":
    use_jemalloc()  # before torch is imported, which takes seconds

import msgspec
import torch
from torch import Tensor

from evener.core.base.decoding import from_json
from evener.core.base.errors import UsageError, exit_status_of
from evener.core.base.units import format_si
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import Rates
from evener.core.cluster.host_info import local_host_info
from evener.core.cluster.host_probe import (
    DeviceProbeResult,
    HostProbeSpec,
    ProbeMessage,
    ProbeProgress,
    SustainedThroughput,
    model_rate,
)
from evener.core.run.roster import Dtype
from evener.worker.probe.codec_bench import codec_rates_Bps
from evener.worker.probe.collective_bench import sum_rate_Bps
from evener.worker.probe.loopback_bench import loopback_rates_Bps
from evener.worker.probe.sustained_bench import time_repeated_s, train_sustained
from evener.worker.rank.precision import TORCH_DTYPES
from evener.worker.rank.process_groups import exit_immediately

MATMUL_S = 0.3  # for one dtype
MATMUL_MAX_SIZE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 1 << 28  # beyond any cache
COPY_S = 0.5
SLOWDOWN_RATIO = 0.9  # a rate below this share of another is slower, and not by chance
MIN_HEATING_S = 10.0  # shorter runs do not heat up the device


def measure_device(device: torch.device, spec: HostProbeSpec) -> Iterator[DeviceProbeResult]:
    """Measure one device, and yield a result for each model; 5 to 10 seconds, and `spec.seconds` for each model."""
    if device.type == "cpu":
        disable_malloc_trim()
    name = "cpu" if device.type == "cpu" else str(device)
    print_json(ProbeProgress(text=f"{name}: matrix products"))
    matmul_flops: dict[str, float] = {
        dtype: matmul_flops_per_s(TORCH_DTYPES[dtype], device) for dtype in _dtypes_to_measure(device)
    }
    print_json(ProbeProgress(text=f"{name}: memory"))
    copy_Bps, triad_Bps = memory_rates_Bps(device)
    sums = {dtype: sum_rate_Bps(TORCH_DTYPES[dtype], device) for dtype in ("fp32", "bf16")}
    sync_Bps = loopback_Bps = None  # not measured on GPUs
    if device.type == "cpu":
        print_json(ProbeProgress(text=f"{name}: all-reduces between two ranks on this host"))
        sync_Bps, loopback_Bps = loopback_rates_Bps()
    print_json(ProbeProgress(text=f"{name}: compressing gradients"))
    coding_Bps = codec_rates_Bps(device)
    rates = Rates(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else local_host_info().cpu,
        matmul_flops=matmul_flops,
        copy_Bps=copy_Bps,
        triad_Bps=triad_Bps,
        sum_Bps=sums,
        sync_Bps=sync_Bps,
        loopback_Bps=loopback_Bps,
        coding_Bps=coding_Bps,
        memory_bytes=device_memory_bytes(device),
        has_jemalloc=device.type == "cpu" and has_jemalloc(),
        measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    pretrained = spec.pretrained
    for model in spec.models if pretrained is None else [pretrained.name]:
        print_json(ProbeProgress(text=f"{name}: {model}, forward and backward for {spec.seconds:.0f} s"))
        sustained = train_sustained(spec, model, device, lambda text: print_json(ProbeProgress(text=f"{name}: {text}")))
        rate = model_rate(sustained, None if pretrained is None else pretrained.flops_per_token)
        of_model = msgspec.structs.replace(rates, models={model: rate})
        yield DeviceProbeResult(
            host=spec.host,
            device=name,
            threads=torch.get_num_threads(),
            model=model,
            rates=of_model,
            sustained=sustained,
            findings=findings(spec, name, of_model, sustained),
        )


def matmul_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of square matrix products whose size doubles until one takes a twentieth of MATMUL_S."""
    n = 128
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def multiply(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
            torch.mm(a, b, out=out)

        took = time_repeated_s(multiply, device, 0.0)
        if took > MATMUL_S / 20 or n == MATMUL_MAX_SIZE[device.type]:
            return 2.0 * n**3 / time_repeated_s(multiply, device, MATMUL_S)
        n *= 2


def memory_rates_Bps(device: torch.device) -> tuple[float, float]:
    """Measure bytes read and written a second by b = a, and by c = a + s·b (McCalpin's STREAM triad)."""
    a, b, c = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(3))
    copy_s = time_repeated_s(lambda: b.copy_(a), device, COPY_S)
    triad_s = time_repeated_s(lambda: torch.add(a, b, alpha=3.0, out=c), device, COPY_S)
    return 2 * COPY_BYTES / copy_s, 3 * COPY_BYTES / triad_s


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the total memory of a GPU, or of the host; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return local_host_info().memory_bytes


def findings(spec: HostProbeSpec, device: str, rates: Rates, sustained: SustainedThroughput) -> list[Finding]:
    """Return warnings about slow dtypes and thermal throttling."""
    results = []
    fp32, bf16 = rates.matmul_flops["fp32"], rates.matmul_flops.get("bf16")
    if bf16 is not None and bf16 < SLOWDOWN_RATIO * fp32:
        results.append(
            Finding(
                check="dtype.slow",
                severity="info",
                host=spec.host,
                evidence=f"{device}: matrix products run at {format_si(bf16)}FLOP/s in bf16, "
                f"{format_si(fp32)}FLOP/s in fp32",
                fix="--dtype fp32, which --dtype auto chooses here"
                if sustained.dtype == "fp32"
                else f"--dtype auto chooses {sustained.dtype} here; if a second measurement agrees, use --dtype fp32",
            )
        )
    first, last = sustained.first_third_tokens_per_s, sustained.last_third_tokens_per_s
    # Fewer cores at the end means that another process took them: that is no throttling.
    undisturbed = device != "cpu" or sustained.last_third_cpus > SLOWDOWN_RATIO * sustained.first_third_cpus
    if spec.seconds >= MIN_HEATING_S and last < SLOWDOWN_RATIO * first and undisturbed:
        clock = ""
        if sustained.first_third_Hz and sustained.last_third_Hz:
            clock = f", its clock from {sustained.first_third_Hz / 1e9:.2f} to {sustained.last_third_Hz / 1e9:.2f} GHz"
        results.append(
            Finding(
                check="cpu.throttled",
                severity="warning",
                host=spec.host,
                evidence=f"{device}: within {spec.seconds:.0f} s its rate fell from {first:.0f} to {last:.0f} tokens/s"
                + clock,
                fix="use mains power, improve the airflow, run powerprofilesctl set performance; "
                "then run evener probe host again",
            )
        )
    return results


def _dtypes_to_measure(device: torch.device) -> list[Dtype]:
    """Return the dtypes to measure: on a CPU fp16 only if it has hardware for it."""
    units = torch.cpu.get_capabilities()
    has_fp16 = device.type == "cuda" or units.get("avx512_fp16") or units.get("amx_fp16")
    return ["fp32", "bf16", "fp16"] if has_fp16 or platform.machine() == "arm64" else ["fp32", "bf16"]


def devices_to_measure(requested: str) -> list[torch.device]:
    """Return the devices to measure: every GPU that training would use, and the CPU unless --device is cuda."""
    num_gpus = torch.cuda.device_count() if requested != "cpu" else 0
    if requested == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda: this machine has no GPU that torch can use", hint="--device cpu")
    gpus = [torch.device("cuda", i) for i in range(num_gpus)]
    return gpus if requested == "cuda" else [torch.device("cpu"), *gpus]


def print_json(message: ProbeMessage) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


def measure_host() -> None:
    """Measure all devices of this host, in one process."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        spec = from_json(sys.argv[1], HostProbeSpec)
        for device in devices_to_measure(spec.device):
            for result in measure_device(device, spec):
                print_json(result)


if __name__ == "__main__":
    exit_immediately(exit_status_of(measure_host))
