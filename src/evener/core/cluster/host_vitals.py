"""Host vitals: CPU, memory, GPU, network and power, a line of `vitals/HOST.jsonl` every few seconds; None: unknown."""

from __future__ import annotations

import msgspec


class GpuVitals(msgspec.Struct, frozen=True, kw_only=True):
    """The vitals of one GPU; GPUs are in the order of their driver."""

    busy: float | None = None  # share of the time in which it was active
    memory_bytes: int | None = None  # in use, by all processes
    temperature_C: float | None = None
    power_W: float | None = None


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `vitals/HOST.jsonl`. Shares and rates are means over the time since the previous line."""

    time: float  # Unix time, by the host's clock
    busy: float  # share of the time of all its CPUs
    memory_bytes: int  # in use, by all processes
    memory_total_bytes: int
    sent_Bps: float | None = None  # by the network interface of the run
    received_Bps: float | None = None
    temperature_C: float | None = None  # of the CPU
    power_W: float | None = None  # of the CPU
    battery: float | None = None  # remaining share, if the host runs on battery
    gpus: list[GpuVitals] = []
