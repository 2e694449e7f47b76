"""How fast is this host: its arithmetic, its memory, and the model itself?

    python -m evener.worker.device_rates '{"host": "attic", "model": "char"}'

Every device in turn, by one process; the argument is a DeviceRatesSpec. Prints lines of JSON.
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

MATMUL_S = 0.3  # for one type
MATMUL_LARGEST = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 1 << 28  # beyond any cache
COPY_S = 0.5
SLOWER = 0.9  # below this share of another rate it is no chance
SUSTAINED_S = 10.0  # shorter runs do not heat anything up


def measure(device: torch.device, spec: DeviceRatesSpec) -> DeviceRates:
    """All figures of one device; takes 5 to 10 seconds more than `spec.seconds`."""
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
        tell(Doing(text=f"{name}: all-reduces between two ranks here"))
        sync_Bps, loopback_Bps = loopback_rates()
    tell(Doing(text=f"{name}: {spec.model}, forward and backward for {spec.seconds:.0f} s"))
    tell(Doing(text=f"{name}: gradients in fewer bytes"))
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
    """Floating-point operations a second of square matrix products, as large as take a twentieth of the time."""
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
    """Bytes read and written in a second by b = a, and by c = a + s·b (McCalpin's STREAM triad)."""
    a, b, c = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(3))
    copy_s = repeat(lambda: b.copy_(a), device, COPY_S)
    triad_s = repeat(lambda: torch.add(a, b, alpha=3.0, out=c), device, COPY_S)
    return 2 * COPY_BYTES / copy_s, 3 * COPY_BYTES / triad_s


def memory_bytes(device: torch.device) -> int | None:
    """All memory of a GPU, or of the host; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return this_machine().memory_bytes


def findings(spec: DeviceRatesSpec, device: str, rates: Rates, sustained: Sustained) -> list[Finding]:
    """What in these figures deserves a word."""
    found = []
    fp32, bf16 = rates.matmul_flops["fp32"], rates.matmul_flops.get("bf16")
    if bf16 is not None and bf16 < SLOWER * fp32:
        found.append(
            Finding(
                check="dtype.slow",
                severity="info",
                host=spec.host,
                evidence=f"{device}: matrix products run at {metric(bf16)}FLOP/s in bf16, {metric(fp32)}FLOP/s in fp32",
                fix="--dtype fp32, which --dtype auto takes here"
                if sustained.dtype == "fp32"
                else f"--dtype auto takes {sustained.dtype} here; if a second measurement says the same, --dtype fp32",
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


def _dtypes(device: torch.device) -> list[Dtype]:
    """Types that are worth a figure: fp16 on a processor only where it has units for it."""
    units = torch.cpu.get_capabilities()
    has_fp16 = device.type == "cuda" or units.get("avx512_fp16") or units.get("amx_fp16")
    return ["fp32", "bf16", "fp16"] if has_fp16 or platform.machine() == "arm64" else ["fp32", "bf16"]


def devices(wish: str) -> list[torch.device]:
    """The devices to measure: every GPU that training would use, else the processor."""
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
