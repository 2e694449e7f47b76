"""Rate measured collectives: bus bandwidth as a share of the link bandwidth, with an explanation."""

from __future__ import annotations

import msgspec

from evener.core.collective import COLLECTIVES, Collective, Row, Stopped, World
from evener.core.finding import Finding
from evener.core.units import link_rate, seconds
from evener.plan.collectives import Split, sent_bytes, split_collective

SMALL = 1 << 14  # up to this size collectives are latency-bound
LARGE = 1 << 24  # from this size on they should be bandwidth-bound
LOST = 0.7  # warn if large buffers between hosts reach less of the wire than this
ONE_WAY = ("all_gather", "all_to_all")  # not cut into segments: see GLOO_STALL in plan/collectives.py
HALF_DUPLEX = 0.75
JUDGED = 1 << 26  # the size that the explanation quotes, if it was measured


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A measured row with its share of the link bandwidth, and its time split into latency, transfer and reduction."""

    row: Row
    share_of_wire: float  # busbw / β
    split: Split


def judge(row: Row, world: World, wire_Bps: float, least: Row) -> Judged:
    """Rate a row: `wire_Bps` is β of the slowest link, both directions busy; `least` shows the latency."""

    def split(row: Row, latency_s: float) -> Split:
        return split_collective(
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
    return Judged(row=row, share_of_wire=row.busbw_Bps / wire_Bps, split=split(row, latency_s))


def judge_all(rows: list[Row], world: World, wire_Bps: float) -> list[Judged]:
    """Rate every row, with the latency from the fastest small row of its collective."""
    return [judge(row, world, wire_Bps, least_of(rows, row.collective)) for row in rows]


def least_of(rows: list[Row], collective: Collective) -> Row:
    """Return the row that shows a collective's latency: its fastest small row, or else its smallest."""
    candidates = [row for row in rows if row.collective == collective]
    small = [row for row in candidates if row.size_bytes <= SMALL]
    return min(small, key=lambda row: row.time_s) if small else candidates[0]


def explain(judged: list[Judged], stopped: list[Stopped], world: World, wire_Bps: float) -> list[str]:
    """Return sentences: what large buffers reach, where latency dominates, and what the backend sends in excess."""
    sentences = []
    for collective in COLLECTIVES:
        rows = [entry for entry in judged if entry.row.collective == collective]
        if not rows:
            continue
        large = _quoted(rows)
        name = _name(collective)
        text = f"{size_name(large.row.size_bytes)} {name} reaches {large.share_of_wire:.2f} of the wire"
        slow = [entry for entry in rows if entry.split.latency_s > entry.split.wire_s + entry.split.reduction_s]
        if slow:
            latency_s = max(entry.split.latency_s for entry in slow)
            text += f"; up to {size_name(slow[-1].row.size_bytes)} latency dominates ({seconds(latency_s)})"
        minimum = sent_bytes(collective, 1.0, world.ranks, "nccl")
        sent = sent_bytes(collective, 1.0, world.ranks, world.backend)
        if sent > minimum:
            text += f"; {world.backend.capitalize()} sends {sent / minimum:.2g} times what it must"
        elif world.backend == "gloo" and collective in ONE_WAY and large.share_of_wire < HALF_DUPLEX:
            text += "; Gloo hardly sends while it receives here"
        sentences.append(text + ".")
    if stopped:
        more_s = sum(stop.needs_s - max(0.0, stop.left_s) for stop in stopped)
        which = ", ".join(f"{_name(stop.collective)} before {size_name(stop.size_bytes)}" for stop in stopped)
        sentences.append(f"The time was up for {which}: about {seconds(more_s)} more would do (--seconds).")
    sentences.append(
        f"The wire is {link_rate(wire_Bps)} of payload each way, measured with both directions busy."
        if len(set(world.hosts)) > 1
        else f"All ranks share one machine: the wire is its loopback, {link_rate(wire_Bps)} each way."
    )
    return sentences


def findings(judged: list[Judged], world: World) -> list[Finding]:
    """Return net.stack-loss if collectives stay far below the link bandwidth, an error for each wrong result."""
    result = [
        Finding(
            check="run.collective-mismatch",
            severity="error",
            evidence=f"{entry.row.num_wrong} elements of {_name(entry.row.collective)} are wrong "
            f"({size_name(entry.row.size_bytes)}, {entry.row.dtype})",
            fix="the same torch on every host: evener setup; then a memory test of each",
        )
        for entry in judged
        if entry.row.num_wrong
    ]
    large = [entry for entry in judged if entry.row.collective == "all_reduce" and entry.row.size_bytes >= LARGE]
    if len(set(world.hosts)) > 1 and large and max(entry.share_of_wire for entry in large) < LOST:
        best = max(large, key=lambda entry: entry.share_of_wire)
        result.append(
            Finding(
                check="net.stack-loss",
                severity="warning",
                evidence=f"all-reduce of {size_name(best.row.size_bytes)} reaches {best.share_of_wire:.2f} of the "
                f"wire, p95 {seconds(best.row.time_p95_s)} against p50 {seconds(best.row.time_s)}",
                fix="look at congestion control on every host: sysctl net.ipv4.tcp_congestion_control; "
                "sudo sysctl -w net.ipv4.tcp_congestion_control=cubic",
            )
        )
    return result


def size_name(num_bytes: int) -> str:
    """Format a buffer size in powers of two.

    >>> size_name(1 << 26), size_name(65536), size_name(1000)
    ('64 MiB', '64 KiB', '1000 B')
    """
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g} {unit}"
    return f"{num_bytes} B"


def _quoted(rows: list[Judged]) -> Judged:
    """Return the 64 MiB row if there is one, else the largest."""
    return next((entry for entry in rows if entry.row.size_bytes == JUDGED), rows[-1])


def _name(collective: Collective) -> str:
    return collective.replace("_", "-")
