"""Tabulate the vitals that hosts reported while training (load, memory, network, temperature), one row per host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from evener.core.base.units import format_bytes
from evener.core.cluster.host_vitals import Vitals


def _mean_share(shares: list[float]) -> str:
    return f"{fmean(shares):.0%}"


def _mean_rate(rates_Bps: list[float]) -> str:
    return f"{format_bytes(fmean(rates_Bps))}/s"


def _max_temperature(temperatures_C: list[float]) -> str:
    return f"{max(temperatures_C):.0f} °C"


def _mean_power(powers_W: list[float]) -> str:
    return f"{fmean(powers_W):.0f} W"


# By title: what one sample says, and the text of what all samples that say anything did.
VITALS_COLUMNS: dict[str, tuple[Callable[[Vitals], list[Any]], Callable[[list[Any]], str]]] = {
    "processors busy": (lambda sample: [sample.busy], _mean_share),
    "memory": (
        lambda sample: [(sample.memory_bytes, sample.memory_total_bytes)],
        lambda sizes: f"{format_bytes(max(used for used, _ in sizes))} of {format_bytes(sizes[-1][1])}",
    ),
    "sent": (lambda sample: [sample.sent_Bps], _mean_rate),
    "received": (lambda sample: [sample.received_Bps], _mean_rate),
    "temperature": (lambda sample: [sample.temperature_C], _max_temperature),
    "power": (lambda sample: [sample.power_W], _mean_power),
    "battery": (lambda sample: [sample.battery], lambda shares: f"{shares[-1]:.0%}"),
    "GPUs busy": (lambda sample: [gpu.busy for gpu in sample.gpus], _mean_share),
    "GPU memory": (lambda sample: [gpu.memory_bytes for gpu in sample.gpus], lambda sizes: format_bytes(max(sizes))),
    "GPU temperature": (lambda sample: [gpu.temperature_C for gpu in sample.gpus], _max_temperature),
    "GPU power": (lambda sample: [gpu.power_W for gpu in sample.gpus], _mean_power),
}


def host_table(vitals_by_host: Mapping[str, Sequence[Vitals]]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the hosts that reported vitals; omit columns that no host reported.

    >>> one = Vitals(time=0.0, busy=0.5, memory_bytes=10**9, memory_total_bytes=4 * 10**9, temperature_C=71.0)
    >>> host_table({"attic": [one], "laptop": []})
    (['', 'processors busy', 'memory', 'temperature'], [['attic', '50%', '1.0 GB of 4.0 GB', '71 °C']])
    """
    rows = {host: _host_row(samples) for host, samples in vitals_by_host.items() if samples}
    titles = [title for title in VITALS_COLUMNS if any(title in row for row in rows.values())]
    return ["", *titles], [[host, *(row.get(title, "–") for title in titles)] for host, row in rows.items()]


def _host_row(samples: Sequence[Vitals]) -> dict[str, str]:
    """Return the cells of one host's row by column title, from its samples."""
    row = {}
    for title, (values_of, text_of) in VITALS_COLUMNS.items():
        values = [value for sample in samples for value in values_of(sample) if value is not None]
        if values:
            row[title] = text_of(values)
    return row
