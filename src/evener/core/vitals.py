"""How is a host while it trains? A line of `vitals/HOST.jsonl` every few seconds; None: the machine does not tell."""

from __future__ import annotations

import msgspec


class GpuVitals(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a host, as its driver numbers them."""

    busy: float | None = None  # share of the time in which it did anything
    memory_bytes: int | None = None  # in use, by anybody
    temperature_C: float | None = None
    power_W: float | None = None


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """A host, since the line before."""

    time: float  # Unix time, by its clock
    busy: float  # share of all its processors' time
    memory_bytes: int  # in use, by anybody
    memory_total_bytes: int
    sent_Bps: float | None = None  # bytes a second by the interface over which the run exchanges
    received_Bps: float | None = None
    temperature_C: float | None = None  # of its processor
    power_W: float | None = None  # of its processor
    battery: float | None = None  # share that is left, where it runs on it
    gpus: list[GpuVitals] = []
