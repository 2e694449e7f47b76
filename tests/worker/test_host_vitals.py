"""Host vitals match what the kernel reports."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from evener.worker.record import host_monitor
from evener.worker.record.host_monitor import HostMonitor

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux calls it lo")


@linux
def test_vitals_report_interface_bytes_and_memory() -> None:
    began = time.monotonic()  # before the machine's own first look, so that no less than its time is taken
    machine = HostMonitor("lo", has_gpu=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        for _ in range(100):
            one.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(other.recv(left))
        time.sleep(0.05)
        found, took_s = machine.sample(), time.monotonic() - began
    assert found.sent_Bps is not None
    assert found.received_Bps is not None
    assert min(found.sent_Bps, found.received_Bps) * took_s >= 10_000_000  # others may use it too
    told = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    assert found.memory_total_bytes == 1024 * int(told["MemTotal:"])
    assert 0 < found.memory_bytes < found.memory_total_bytes
    assert 0 <= found.busy <= 1
    assert found.gpus == []


def test_missing_interface_has_no_rate() -> None:
    found = HostMonitor("eth77", has_gpu=False).sample()
    assert (found.sent_Bps, found.received_Bps) == (None, None)


def test_power_is_energy_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages, and a part of one, which is not counted twice; a counter that wraps is passed over."""
    monkeypatch.setattr(host_monitor, "RAPL", tmp_path)
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(host_monitor.time, "monotonic", lambda: next(clock))

    def counts(*joules: float) -> None:
        for name, energy in zip(("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"), joules, strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "energy_uj").write_text(f"{round(energy * 1e6)}\n")

    counts(10, 20, 7)
    machine = HostMonitor(None, has_gpu=False)
    counts(70, 40, 60)
    assert machine.sample().power_W == pytest.approx(40)
    counts(1, 50, 60)
    assert machine.sample().power_W is None


def test_hottest_cpu_sensor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def sensor(current: float) -> object:
        return type("Sensor", (), {"current": current})()

    found = {"nvme": [sensor(80.0)], "k10temp": [sensor(51.0), sensor(63.5)], "acpitz": [sensor(20.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    assert HostMonitor(None, has_gpu=False).sample().temperature_C == 63.5
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"nvme": [sensor(80.0)]}, raising=False)
    assert HostMonitor(None, has_gpu=False).sample().temperature_C is None
