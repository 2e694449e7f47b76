"""Tabulate the vitals that hosts reported while training (load, memory, network, temperature), one row per host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.core.base.units import format_bytes
from evener.core.cluster.host_vitals import GpuVitals, Vitals

Samples = list[float]
VITALS_COLUMNS: dict[str, Callable[[Sequence[Vitals]], str | None]] = {
    "processors busy": lambda samples: _aggregate(
        lambda x: x.busy, samples, lambda busy: f"{statistics.fmean(busy):.0%}"
    ),
    "memory": lambda samples: (
        f"{format_bytes(max(x.memory_bytes for x in samples))} of {format_bytes(samples[-1].memory_total_bytes)}"
    ),
    "sent": lambda samples: _aggregate(
        lambda x: x.sent_Bps, samples, lambda rates: f"{format_bytes(statistics.fmean(rates))}/s"
    ),
    "received": lambda samples: _aggregate(
        lambda x: x.received_Bps, samples, lambda rates: f"{format_bytes(statistics.fmean(rates))}/s"
    ),
    "temperature": lambda samples: _aggregate(
        lambda x: x.temperature_C, samples, lambda values: f"{max(values):.0f} °C"
    ),
    "power": lambda samples: _aggregate(
        lambda x: x.power_W, samples, lambda values: f"{statistics.fmean(values):.0f} W"
    ),
    "battery": lambda samples: _aggregate(lambda x: x.battery, samples[-1:], lambda values: f"{values[-1]:.0%}"),
    "GPUs busy": lambda samples: _aggregate_gpus(
        lambda x: x.busy, samples, lambda busy: f"{statistics.fmean(busy):.0%}"
    ),
    "GPU memory": lambda samples: _aggregate_gpus(
        lambda x: x.memory_bytes, samples, lambda values: format_bytes(max(values))
    ),
    "GPU temperature": lambda samples: _aggregate_gpus(
        lambda x: x.temperature_C, samples, lambda values: f"{max(values):.0f} °C"
    ),
    "GPU power": lambda samples: _aggregate_gpus(
        lambda x: x.power_W, samples, lambda values: f"{statistics.fmean(values):.0f} W"
    ),
}


def host_table(vitals_by_host: Mapping[str, Sequence[Vitals]]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the hosts that reported vitals; omit columns that no host reported.

    >>> one = Vitals(time=0.0, busy=0.5, memory_bytes=10**9, memory_total_bytes=4 * 10**9, temperature_C=71.0)
    >>> host_table({"attic": [one], "laptop": []})
    (['', 'processors busy', 'memory', 'temperature'], [['attic', '50%', '1.0 GB of 4.0 GB', '71 °C']])
    """
    rows = {
        host: {title: aggregate(of_host) for title, aggregate in VITALS_COLUMNS.items()}
        for host, of_host in vitals_by_host.items()
        if of_host
    }
    titles = [title for title in VITALS_COLUMNS if any(row[title] is not None for row in rows.values())]
    return ["", *titles], [[host, *(row[title] or "–" for title in titles)] for host, row in rows.items()]


def _aggregate(
    figure: Callable[[Vitals], float | None], samples: Sequence[Vitals], format_samples: Callable[[Samples], str]
) -> str | None:
    values = [value for vitals in samples if (value := figure(vitals)) is not None]
    return format_samples(values) if values else None


def _aggregate_gpus(
    figure: Callable[[GpuVitals], Any], samples: Sequence[Vitals], format_samples: Callable[[Samples], str]
) -> str | None:
    values = [value for vitals in samples for gpu in vitals.gpus if (value := figure(gpu)) is not None]
    return format_samples(values) if values else None
