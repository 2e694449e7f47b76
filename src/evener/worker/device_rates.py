"""Device probe: measure this host's matrix products, memory bandwidth, all-reduce, codecs and training throughput.

    python -m evener.worker.device_rates '{"host": "attic", "model": "char"}'

One process measures every device in turn; the argument is a HostProbeSpec. Prints lines of JSON.
"""

from __future__ import annotations

import os
import platform
import sys
import time

import msgspec
import torch
from torch import Tensor

from evener.core.decoding import from_json
from evener.core.device_rates import DeviceRates, DeviceRatesSpec, DeviceTold, Doing, Sustained, model_rate
from evener.core.errors import EvenerError, UsageError
from evener.core.finding import Finding
from evener.core.fleet import Rates
from evener.core.machine import keep_freed_memory, this_machine
from evener.core.roster import Dtype
from evener.core.shape import PRESETS
from evener.core.units import metric
from evener.worker.arithmetic import TORCH_DTYPES
from evener.worker.coding import coding_rates
from evener.worker.collectives import sum_rate_Bps
from evener.worker.group import leave
from evener.worker.loopback import loopback_rates
from evener.worker.sustained import repeat, train

MATMUL_S = 0.3  # for one dtype
MATMUL_LARGEST = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 1 << 28  # beyond any cache
COPY_S = 0.5
SLOWER = 0.9  # a rate below this share of another is slower, and not by chance
SUSTAINED_S = 10.0  # shorter runs do not heat up the device


def measure(device: torch.device, spec: DeviceRatesSpec) -> DeviceRates:
    """Measure one device; takes 5 to 10 seconds more than `spec.seconds`."""
    if device.type == "cpu":
        keep_freed_memory()
    name = "cpu" if device.type == "cpu" else str(device)
    tell(Doing(text=f"{name}: matrix products"))
    matmul_flops: dict[str, float] = {dtype: matmul_rate(TORCH_DTYPES[dtype], device) for dtype in _dtypes(device)}
    tell(Doing(text=f"{name}: memory"))
    copy_Bps, triad_Bps = memory_rates(device)
    sums = {dtype: sum_rate_Bps(TORCH_DTYPES[dtype], device) for dtype in ("fp32", "bf16")}
    sync_Bps = loopback_Bps = None  # on GPUs not measured
    if device.type == "cpu":
        tell(Doing(text=f"{name}: all-reduces between two ranks on this host"))
        sync_Bps, loopback_Bps = loopback_rates()
    tell(Doing(text=f"{name}: {spec.model}, forward and backward for {spec.seconds:.0f} s"))
    tell(Doing(text=f"{name}: compressing gradients"))
    coding_Bps = coding_rates(device)
    sustained = train(spec, device, lambda text: tell(Doing(text=f"{name}: {text}")))
    rates = Rates(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().cpu,
        matmul_flops=matmul_flops,
        copy_Bps=copy_Bps,
        triad_Bps=triad_Bps,
        sum_Bps=sums,
        sync_Bps=sync_Bps,
        loopback_Bps=loopback_Bps,
        coding_Bps=coding_Bps,
        memory_bytes=memory_bytes(device),
        models={spec.model: model_rate(sustained)},
        measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    return DeviceRates(
        host=spec.host,
        device=name,
        threads=torch.get_num_threads(),
        model=spec.model,
        num_params=PRESETS[spec.model].num_params(),
        rates=rates,
        sustained=sustained,
        findings=findings(spec, name, rates, sustained),
    )


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measure FLOP/s of square matrix products, of a size that takes a twentieth of MATMUL_S."""
    n = 128
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def multiply(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
            torch.mm(a, b, out=out)

        took = repeat(multiply, device, 0.0)
        if took > MATMUL_S / 20 or n == MATMUL_LARGEST[device.type]:
            return 2.0 * n**3 / repeat(multiply, device, MATMUL_S)
        n *= 2


def memory_rates(device: torch.device) -> tuple[float, float]:
    """Measure bytes read and written a second by b = a, and by c = a + s·b (McCalpin's STREAM triad)."""
    a, b, c = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(3))
    copy_s = repeat(lambda: b.copy_(a), device, COPY_S)
    triad_s = repeat(lambda: torch.add(a, b, alpha=3.0, out=c), device, COPY_S)
    return 2 * COPY_BYTES / copy_s, 3 * COPY_BYTES / triad_s


def memory_bytes(device: torch.device) -> int | None:
    """Return the total memory of a GPU, or of the host; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return this_machine().memory_bytes


def findings(spec: DeviceRatesSpec, device: str, rates: Rates, sustained: Sustained) -> list[Finding]:
    """Return warnings about slow dtypes and thermal throttling."""
    results = []
    fp32, bf16 = rates.matmul_flops["fp32"], rates.matmul_flops.get("bf16")
    if bf16 is not None and bf16 < SLOWER * fp32:
        results.append(
            Finding(
                check="dtype.slow",
                severity="info",
                host=spec.host,
                evidence=f"{device}: matrix products run at {metric(bf16)}FLOP/s in bf16, {metric(fp32)}FLOP/s in fp32",
                fix="--dtype fp32, which --dtype auto chooses here"
                if sustained.dtype == "fp32"
                else f"--dtype auto chooses {sustained.dtype} here; if a second measurement agrees, use --dtype fp32",
            )
        )
    first, last = sustained.first_third_tokens_per_s, sustained.last_third_tokens_per_s
    # Fewer cores at the end means that another process took them: that is no throttling.
    undisturbed = device != "cpu" or sustained.last_third_cpus > SLOWER * sustained.first_third_cpus
    if spec.seconds >= SUSTAINED_S and last < SLOWER * first and undisturbed:
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


def _dtypes(device: torch.device) -> list[Dtype]:
    """Return the dtypes to measure: on a CPU fp16 only if it has hardware for it."""
    units = torch.cpu.get_capabilities()
    has_fp16 = device.type == "cuda" or units.get("avx512_fp16") or units.get("amx_fp16")
    return ["fp32", "bf16", "fp16"] if has_fp16 or platform.machine() == "arm64" else ["fp32", "bf16"]


def devices(wish: str) -> list[torch.device]:
    """Return the devices to measure: every GPU that training would use, and the CPU unless --device is cuda."""
    num_gpus = torch.cuda.device_count() if wish != "cpu" else 0
    if wish == "cuda" and num_gpus == 0:
        raise UsageError("--device cuda: this machine has no GPU that torch can use", hint="--device cpu")
    gpus = [torch.device("cuda", i) for i in range(num_gpus)]
    return gpus if wish == "cuda" else [torch.device("cpu"), *gpus]


def tell(news: DeviceTold) -> None:
    print(msgspec.json.encode(news).decode(), flush=True)


def main() -> int:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # one process measures all devices of its host
    try:
        spec = from_json(sys.argv[1], DeviceRatesSpec)
        for device in devices(spec.device):
            tell(measure(device, spec))
    except EvenerError as error:
        print(error.as_line(), flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    leave(main())
