"""Rate measured collectives: bus bandwidth as a share of the link bandwidth, with an explanation."""

from __future__ import annotations

import msgspec

from evener.core.base.units import format_bit_rate, format_seconds
from evener.core.cluster.collective_results import (
    COLLECTIVES,
    Collective,
    CollectiveBenchGroup,
    CollectiveResult,
    SkippedSizes,
)
from evener.core.cluster.finding import Finding
from evener.plan.cost.collective_cost import CollectiveTimeSplit, sent_bytes, split_collective_time

LATENCY_BOUND_BYTES = 1 << 14  # up to this size collectives are latency-bound
BANDWIDTH_BOUND_BYTES = 1 << 24  # from this size on they should be bandwidth-bound
LOW_WIRE_SHARE = 0.7  # warn if large buffers between hosts reach less of the wire than this
UNSEGMENTED = ("all_gather", "all_to_all")  # not cut into segments: see collective_cost.GLOO_STALL_FACTOR
HALF_DUPLEX_SHARE = 0.75
HEADLINE_BYTES = 1 << 26  # the size that the explanation quotes, if it was measured


class CollectiveEfficiency(msgspec.Struct, frozen=True, kw_only=True):
    """A measured row with its share of the link bandwidth, and its time split into latency, transfer and reduction."""

    row: CollectiveResult
    share_of_wire: float  # bus bandwidth / bandwidth of the slowest link
    split: CollectiveTimeSplit


def collective_efficiency(
    row: CollectiveResult, world: CollectiveBenchGroup, wire_Bps: float, least: CollectiveResult
) -> CollectiveEfficiency:
    """Rate a row against `wire_Bps`, the bandwidth of the slowest link with both directions busy.

    `least` is the row that shows the latency of the same collective, as `latency_row` returns it.
    """

    def split(row: CollectiveResult, latency_s: float) -> CollectiveTimeSplit:
        return split_collective_time(
            row.collective,
            row.size_bytes,
            world.ranks,
            time_s=row.time_s,
            latency_s=latency_s,
            bandwidth_Bps=wire_Bps,
            sum_Bps=world.sum_Bps,
            backend=world.backend,
        )

    latency_s = split(least, least.time_s).latency_s
    return CollectiveEfficiency(row=row, share_of_wire=row.busbw_Bps / wire_Bps, split=split(row, latency_s))


def collective_efficiencies(
    rows: list[CollectiveResult], world: CollectiveBenchGroup, wire_Bps: float
) -> list[CollectiveEfficiency]:
    """Rate every row, with the latency from the fastest small row of its collective."""
    return [collective_efficiency(row, world, wire_Bps, latency_row(rows, row.collective)) for row in rows]


def latency_row(rows: list[CollectiveResult], collective: Collective) -> CollectiveResult:
    """Return the row that shows a collective's latency: its fastest small row, or else its smallest."""
    candidates = [row for row in rows if row.collective == collective]
    small = [row for row in candidates if row.size_bytes <= LATENCY_BOUND_BYTES]
    return min(small, key=lambda row: row.time_s) if small else candidates[0]


def explain_bandwidth(
    efficiencies: list[CollectiveEfficiency], stopped: list[SkippedSizes], world: CollectiveBenchGroup, wire_Bps: float
) -> list[str]:
    """Return sentences: what large buffers reach, where latency dominates, and what the backend sends in excess."""
    sentences = []
    for collective in COLLECTIVES:
        rows = [entry for entry in efficiencies if entry.row.collective == collective]
        if not rows:
            continue
        large = _headline_row(rows)
        name = _display_name(collective)
        text = f"{format_buffer_size(large.row.size_bytes)} {name} reaches {large.share_of_wire:.2f} of the wire"
        slow = [entry for entry in rows if entry.split.latency_s > entry.split.wire_s + entry.split.reduction_s]
        if slow:
            latency_s = max(entry.split.latency_s for entry in slow)
            text += (
                f"; up to {format_buffer_size(slow[-1].row.size_bytes)} latency dominates ({format_seconds(latency_s)})"
            )
        minimum = sent_bytes(collective, 1.0, world.ranks, "nccl")
        sent = sent_bytes(collective, 1.0, world.ranks, world.backend)
        if sent > minimum:
            text += f"; {world.backend.capitalize()} sends {sent / minimum:.2g} times what it must"
        elif world.backend == "gloo" and collective in UNSEGMENTED and large.share_of_wire < HALF_DUPLEX_SHARE:
            text += "; Gloo hardly sends while it receives here"
        sentences.append(text + ".")
    if stopped:
        more_s = sum(stop.needs_s - max(0.0, stop.left_s) for stop in stopped)
        which = ", ".join(
            f"{_display_name(stop.collective)} before {format_buffer_size(stop.size_bytes)}" for stop in stopped
        )
        sentences.append(f"The time was up for {which}: about {format_seconds(more_s)} more would do (--seconds).")
    sentences.append(
        f"The wire is {format_bit_rate(wire_Bps)} of payload each way, measured with both directions busy."
        if len(set(world.hosts)) > 1
        else f"All ranks share one machine: the wire is its loopback, {format_bit_rate(wire_Bps)} each way."
    )
    return sentences


def bandwidth_findings(efficiencies: list[CollectiveEfficiency], world: CollectiveBenchGroup) -> list[Finding]:
    """Return an error for each row with wrong elements, and a warning if large all-reduces use too little bandwidth."""
    result = [
        Finding(
            check="run.collective-mismatch",
            severity="error",
            evidence=f"{entry.row.num_wrong} elements of {_display_name(entry.row.collective)} are wrong "
            f"({format_buffer_size(entry.row.size_bytes)}, {entry.row.dtype})",
            fix="the same torch on every host: evener setup; then a memory test of each",
        )
        for entry in efficiencies
        if entry.row.num_wrong
    ]
    large = [
        entry
        for entry in efficiencies
        if entry.row.collective == "all_reduce" and entry.row.size_bytes >= BANDWIDTH_BOUND_BYTES
    ]
    if len(set(world.hosts)) > 1 and large and max(entry.share_of_wire for entry in large) < LOW_WIRE_SHARE:
        best = max(large, key=lambda entry: entry.share_of_wire)
        result.append(
            Finding(
                check="net.stack-loss",
                severity="warning",
                evidence=f"all-reduce of {format_buffer_size(best.row.size_bytes)} reaches {best.share_of_wire:.2f} of "
                f"the wire, p95 {format_seconds(best.row.time_p95_s)} against p50 {format_seconds(best.row.time_s)}",
                fix="look at congestion control on every host: sysctl net.ipv4.tcp_congestion_control; "
                "sudo sysctl -w net.ipv4.tcp_congestion_control=cubic",
            )
        )
    return result


def format_buffer_size(num_bytes: int) -> str:
    """Format a buffer size in powers of two.

    >>> format_buffer_size(1 << 26), format_buffer_size(65536), format_buffer_size(1000)
    ('64 MiB', '64 KiB', '1000 B')
    """
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g} {unit}"
    return f"{num_bytes} B"


def _headline_row(rows: list[CollectiveEfficiency]) -> CollectiveEfficiency:
    """Return the 64 MiB row if there is one, else the largest."""
    return next((entry for entry in rows if entry.row.size_bytes == HEADLINE_BYTES), rows[-1])


def _display_name(collective: Collective) -> str:
    return collective.replace("_", "-")
