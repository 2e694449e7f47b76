"""How were the hosts while they trained? What each told of itself every few seconds, in a row a host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.core.units import size
from evener.core.vitals import GpuVitals, Vitals

Figures = list[float]
COLUMNS: dict[str, Callable[[Sequence[Vitals]], str | None]] = {
    "processors busy": lambda told: _of(lambda one: one.busy, told, lambda busy: f"{statistics.fmean(busy):.0%}"),
    "memory": lambda told: f"{size(max(one.memory_bytes for one in told))} of {size(told[-1].memory_total_bytes)}",
    "sent": lambda told: _of(lambda one: one.sent_Bps, told, lambda rates: f"{size(statistics.fmean(rates))}/s"),
    "received": lambda told: _of(
        lambda one: one.received_Bps, told, lambda rates: f"{size(statistics.fmean(rates))}/s"
    ),
    "temperature": lambda told: _of(lambda one: one.temperature_C, told, lambda found: f"{max(found):.0f} °C"),
    "power": lambda told: _of(lambda one: one.power_W, told, lambda found: f"{statistics.fmean(found):.0f} W"),
    "battery": lambda told: _of(lambda one: one.battery, told[-1:], lambda found: f"{found[-1]:.0%}"),
    "GPUs busy": lambda told: _of_gpus(lambda one: one.busy, told, lambda busy: f"{statistics.fmean(busy):.0%}"),
    "GPU memory": lambda told: _of_gpus(lambda one: one.memory_bytes, told, lambda found: size(max(found))),
    "GPU temperature": lambda told: _of_gpus(lambda one: one.temperature_C, told, lambda found: f"{max(found):.0f} °C"),
    "GPU power": lambda told: _of_gpus(lambda one: one.power_W, told, lambda found: f"{statistics.fmean(found):.0f} W"),
}


def host_table(told: Mapping[str, Sequence[Vitals]]) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of the hosts that told anything; columns of which no machine tells are left out.

    >>> one = Vitals(time=0.0, busy=0.5, memory_bytes=10**9, memory_total_bytes=4 * 10**9, temperature_C=71.0)
    >>> host_table({"attic": [one], "laptop": []})
    (['', 'processors busy', 'memory', 'temperature'], [['attic', '50%', '1.0 GB of 4.0 GB', '71 °C']])
    """
    rows = {host: {title: say(of_host) for title, say in COLUMNS.items()} for host, of_host in told.items() if of_host}
    titles = [title for title in COLUMNS if any(row[title] is not None for row in rows.values())]
    return ["", *titles], [[host, *(row[title] or "–" for title in titles)] for host, row in rows.items()]


def _of(figure: Callable[[Vitals], float | None], told: Sequence[Vitals], say: Callable[[Figures], str]) -> str | None:
    found = [value for one in told if (value := figure(one)) is not None]
    return say(found) if found else None


def _of_gpus(figure: Callable[[GpuVitals], Any], told: Sequence[Vitals], say: Callable[[Figures], str]) -> str | None:
    found = [value for one in told for gpu in one.gpus if (value := figure(gpu)) is not None]
    return say(found) if found else None
