"""What do measured collectives say about the wire? Beside each row what it could have been, then a paragraph."""

from __future__ import annotations

import msgspec

from evener.core.collective import COLLECTIVES, Collective, Row, Stopped, World
from evener.core.finding import Finding
from evener.core.units import link_rate, seconds
from evener.plan.collectives import Split, sent_bytes, split_collective

SMALL = 1 << 14  # up to here latency is all that counts
LARGE = 1 << 24  # from here on the wire should be all that counts
LOST = 0.7  # less of the wire than this, on large buffers between hosts, is worth a word
ONE_WAY = ("all_gather", "all_to_all")  # not cut into segments: see GLOO_STALL in plan/collectives.py
HALF_DUPLEX = 0.75
JUDGED = 1 << 26  # the size that the paragraph quotes, where it was measured


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A row beside the wire."""

    row: Row
    share_of_wire: float  # busbw / β
    split: Split


def judge(row: Row, world: World, wire_Bps: float, least: Row) -> Judged:
    """`wire_Bps` is β of the slowest link with both directions busy; `least` the row that shows the latency."""

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
    """Every row, against the small one of its collective that took least time."""
    return [judge(row, world, wire_Bps, least_of(rows, row.collective)) for row in rows]


def least_of(rows: list[Row], collective: Collective) -> Row:
    """The row that shows a collective's latency: of its small ones the fastest, or the smallest there is."""
    mine = [row for row in rows if row.collective == collective]
    small = [row for row in mine if row.size_bytes <= SMALL]
    return min(small, key=lambda row: row.time_s) if small else mine[0]


def explain(judged: list[Judged], stopped: list[Stopped], world: World, wire_Bps: float) -> list[str]:
    """Sentences: what large buffers reach, from where on latency counts, what the backend sends more than it must."""
    told = []
    for collective in COLLECTIVES:
        rows = [one for one in judged if one.row.collective == collective]
        if not rows:
            continue
        large = _quoted(rows)
        name = _name(collective)
        text = f"{size_name(large.row.size_bytes)} {name} reaches {large.share_of_wire:.2f} of the wire"
        slow = [one for one in rows if one.split.latency_s > one.split.wire_s + one.split.reduction_s]
        if slow:
            latency_s = max(one.split.latency_s for one in slow)
            text += f"; up to {size_name(slow[-1].row.size_bytes)} latency dominates ({seconds(latency_s)})"
        must = sent_bytes(collective, 1.0, world.ranks, "nccl")
        sends = sent_bytes(collective, 1.0, world.ranks, world.backend)
        if sends > must:
            text += f"; {world.backend.capitalize()} sends {sends / must:.2g} times what it must"
        elif world.backend == "gloo" and collective in ONE_WAY and large.share_of_wire < HALF_DUPLEX:
            text += "; Gloo hardly sends while it receives here"
        told.append(text + ".")
    if stopped:
        more_s = sum(stop.needs_s - max(0.0, stop.left_s) for stop in stopped)
        which = ", ".join(f"{_name(stop.collective)} before {size_name(stop.size_bytes)}" for stop in stopped)
        told.append(f"The time was up for {which}: about {seconds(more_s)} more would do (--seconds).")
    told.append(
        f"The wire is {link_rate(wire_Bps)} of payload each way, measured with both directions busy."
        if len(set(world.hosts)) > 1
        else f"All ranks share one machine: the wire is its loopback, {link_rate(wire_Bps)} each way."
    )
    return told


def findings(judged: list[Judged], world: World) -> list[Finding]:
    """net.stack-loss where the collectives stay far below the wire, an error where a result is wrong."""
    found = [
        Finding(
            check="run.collective-mismatch",
            severity="error",
            evidence=f"{one.row.num_wrong} elements of {_name(one.row.collective)} are wrong "
            f"({size_name(one.row.size_bytes)}, {one.row.dtype})",
            fix="the same torch on every host: evener setup; then a memory test of each",
        )
        for one in judged
        if one.row.num_wrong
    ]
    large = [one for one in judged if one.row.collective == "all_reduce" and one.row.size_bytes >= LARGE]
    if len(set(world.hosts)) > 1 and large and max(one.share_of_wire for one in large) < LOST:
        best = max(large, key=lambda one: one.share_of_wire)
        found.append(
            Finding(
                check="net.stack-loss",
                severity="warning",
                evidence=f"all-reduce of {size_name(best.row.size_bytes)} reaches {best.share_of_wire:.2f} of the "
                f"wire, p95 {seconds(best.row.time_p95_s)} beside p50 {seconds(best.row.time_s)}",
                fix="look at congestion control on every host: sysctl net.ipv4.tcp_congestion_control; "
                "sudo sysctl -w net.ipv4.tcp_congestion_control=cubic",
            )
        )
    return found


def size_name(num_bytes: int) -> str:
    """A buffer's size as benches name it, in powers of two.

    >>> size_name(1 << 26), size_name(65536), size_name(1000)
    ('64 MiB', '64 KiB', '1000 B')
    """
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g} {unit}"
    return f"{num_bytes} B"


def _quoted(rows: list[Judged]) -> Judged:
    """The 64 MiB row where there is one, else the largest."""
    return next((one for one in rows if one.row.size_bytes == JUDGED), rows[-1])


def _name(collective: Collective) -> str:
    return collective.replace("_", "-")
