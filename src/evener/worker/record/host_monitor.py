"""Host monitor: a thread in each host's first rank samples load, memory, network, temperature, power and GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from evener.core.base.file_io import LineFile
from evener.core.cluster.host_vitals import GpuVitals, Vitals

SAMPLE_INTERVAL_S = 5.0
# sensor chips of CPUs, the preferred first
CPU_SENSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")
RAPL = Path("/sys/class/powercap")  # energy of Intel and AMD CPUs; since 2020 only root may read it
NVIDIA_SMI_QUERY = "utilization.gpu,memory.used,temperature.gpu,power.draw"


class HostMonitor:
    """Samples a host; rates are computed since the previous sample."""

    def __init__(self, interface: str | None, *, has_gpu: bool) -> None:
        self._interface, self._has_gpu = interface, has_gpu
        psutil.cpu_percent()
        self._at, self._byte_counters, self._energy_J = time.monotonic(), self._counters(), _energy_J()

    def sample(self) -> Vitals:
        """Return the vitals, with rates since the previous sample."""
        now, moved, energy_J = time.monotonic(), self._counters(), _energy_J()
        took_s = max(now - self._at, 1e-3)
        sent, received = (None if moved is None or self._byte_counters is None else max(0, new - old) / took_s
                          for new, old in zip(moved or (0, 0), self._byte_counters or (0, 0), strict=True))  # fmt: skip
        power_W = None
        if energy_J is not None and self._energy_J is not None and energy_J >= self._energy_J:  # the counter wraps
            power_W = (energy_J - self._energy_J) / took_s
        self._at, self._byte_counters, self._energy_J = now, moved, energy_J
        memory = psutil.virtual_memory()
        return Vitals(time=time.time(), busy=psutil.cpu_percent() / 100,
                      memory_bytes=memory.total - memory.available, memory_total_bytes=memory.total,
                      sent_Bps=sent, received_Bps=received, temperature_C=_temperature_C(), power_W=power_W,
                      battery=_battery(), gpus=_query_gpus() if self._has_gpu else [])  # fmt: skip

    def _counters(self) -> tuple[int, int] | None:
        """Return the bytes sent and received by the interface since it came up."""
        counted = psutil.net_io_counters(pernic=True).get(self._interface or "")
        return None if counted is None else (counted.bytes_sent, counted.bytes_recv)


def start_host_monitor(path: Path, *, has_gpu: bool) -> None:
    """Start a thread that appends samples to a file until this process ends."""
    threading.Thread(target=_write, args=(path, has_gpu), daemon=True, name="vitals").start()


def _write(path: Path, has_gpu: bool) -> None:
    machine = HostMonitor(os.environ.get("GLOO_SOCKET_IFNAME"), has_gpu=has_gpu)
    with contextlib.suppress(OSError), LineFile(path) as file:  # a full disk: reported elsewhere
        while True:
            time.sleep(SAMPLE_INTERVAL_S)
            file.write(msgspec.json.encode(machine.sample()) + b"\n")


def _temperature_C() -> float | None:
    """Return the temperature of the CPU's hottest sensor."""
    with contextlib.suppress(AttributeError, OSError):  # not supported on this system; a sensor that disappeared
        sensors = psutil.sensors_temperatures()
        for chip in CPU_SENSOR_CHIPS:
            if temperatures := [float(sensor.current) for sensor in sensors.get(chip, ()) if sensor.current]:
                return max(temperatures)
    return None


def _energy_J() -> float | None:
    """Return the energy that the CPUs have used since some fixed time."""
    try:
        packages = [path for path in RAPL.iterdir() if path.name.count(":") == 1]  # the others are included in these
        return sum(int((path / "energy_uj").read_text()) for path in packages) / 1e6 if packages else None
    except (OSError, ValueError):
        return None


def _battery() -> float | None:
    with contextlib.suppress(AttributeError, OSError):
        battery = psutil.sensors_battery()
        if battery is not None and battery.power_plugged is False:
            return float(battery.percent) / 100
    return None


def _query_gpus() -> list[GpuVitals]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    argv = [tool, f"--query-gpu={NVIDIA_SMI_QUERY}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SAMPLE_INTERVAL_S, check=False)
        return [*parse_nvidia_smi(done.stdout)]
    return []


def parse_nvidia_smi(text: str) -> Iterator[GpuVitals]:
    """Parse nvidia-smi's output: per cent, MiB, °C and W; unknown values are [N/A].

    >>> [*parse_nvidia_smi("97, 20312, 71, 311.52\\n0, 4, 33, [N/A]\\n")][1]
    GpuVitals(busy=0.0, memory_bytes=4194304, temperature_C=33.0, power_W=None)
    """
    for line in text.splitlines():
        values: list[float | None] = []
        for field in line.split(","):
            try:
                values.append(float(field))
            except ValueError:
                values.append(None)
        if len(values) == NVIDIA_SMI_QUERY.count(",") + 1:
            busy, memory_MiB, temperature_C, power_W = values
            yield GpuVitals(busy=None if busy is None else busy / 100,
                            memory_bytes=None if memory_MiB is None else int(memory_MiB) << 20,
                            temperature_C=temperature_C, power_W=power_W)  # fmt: skip
