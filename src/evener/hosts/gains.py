"""Decide which other TCP setting is worth a finding, and choose its value. Pure: figures in, findings out.

One TCP stream carries at most its window in a round trip, and two buffers hold the window: the sender's, for bytes that
are not yet acknowledged (at most the third value of tcp_wmem), and the receiver's (of tcp_rmem; half of it counts, the
rest is the kernel's own). While idle, the sender's congestion window shrinks, at last to ten segments, and then doubles
with every round trip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from evener.core.finding import Finding, Severity
from evener.core.fleet import Gain, Link
from evener.core.units import median
from evener.hosts.facts import Facts

CONGESTION = "net.ipv4.tcp_congestion_control"
IDLE = "net.ipv4.tcp_slow_start_after_idle"
RECEIVE, SEND = "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"  # minimum, initial, maximum size of a buffer
DEFAULTS = {RECEIVE: (4096, 131072, 6 << 20), SEND: (4096, 16384, 4 << 20)}  # of Linux
OF_WINDOW = {RECEIVE: 0.5, SEND: 1.0}  # bytes in flight for each byte of the buffer

WORTH = 1.05  # times as fast: a smaller gain is not reported
MUCH = 1.25  # times as fast: a larger gain is a warning
SEGMENT_BYTES, FIRST_SEGMENTS = 1448, 10
PAYLOAD = 1448 / 1538  # share of the bytes on an Ethernet


def ahead(was: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the other is clearly faster: by `MIN_SPEEDUP`, and each of its figures above each of the first.

    >>> ahead([100, 104, 102], [110, 112, 109]), ahead([100, 111, 102], [110, 112, 109]), ahead([100, 101], [102, 103])
    (True, False, False)
    """
    first, second = median(was), median(other)
    return first is not None and second is not None and second >= WORTH * first and min(other) > max(was)


def window_Bps(setting: str, buffer_bytes: int, rtt_s: float) -> float:
    """Return the maximum throughput of one stream: window / round trip.

    >>> window_Bps(RECEIVE, 131072, 0.020)
    3276800.0
    """
    return OF_WINDOW[setting] * buffer_bytes / max(rtt_s, 1e-6)


def greatest(triple: str) -> int | None:
    """Return the maximum of "minimum initial maximum"; None if the text is not such a triple.

    >>> greatest("4096 131072 6291456"), greatest("unknown")
    (6291456, None)
    """
    values = triple.split()
    return int(values[2]) if len(values) == 3 and all(value.isdigit() for value in values) else None


def wider(setting: str, triple: str, goodput_Bps: float, rtt_s: float) -> str:
    """Return the setting with room for twice the bytes in flight at this goodput, at least the defaults of Linux.

    >>> wider(RECEIVE, "4096 8192 8192", 118e6, 0.0002)
    '4096 131072 6291456'
    >>> wider(SEND, "4096 16384 4194304", 118e6, 0.080)
    '4096 16384 33554432'
    """
    minimum, initial, _ = (int(value) for value in triple.split())
    needed = 2 * goodput_Bps * rtt_s / OF_WINDOW[setting]
    maximum = max(DEFAULTS[setting][2], 1 << math.ceil(math.log2(max(needed, 1))))
    return f"{minimum} {max(initial, DEFAULTS[setting][1])} {maximum}"


def slow_start_s(goodput_Bps: float, rtt_s: float, size: int) -> float:
    """Return the most that a burst loses by starting with ten segments: a round trip for each doubling up to the bytes
    in flight at full speed.

    >>> round(slow_start_s(11.7e6, 0.020, 1_000_000), 3), slow_start_s(11.7e6, 0.0002, 1_000_000)
    (0.08, 0.0)
    """
    in_flight = min(size, goodput_Bps * rtt_s) / SEGMENT_BYTES
    return max(0.0, math.log2(max(in_flight, 1) / FIRST_SEGMENTS)) * rtt_s


def has_room(reached_Bps: float, speed_Bps: float | None) -> bool:
    """Return whether a link of this speed (None: not known) could carry `MIN_SPEEDUP` times as much.

    >>> has_room(117e6, 125e6), has_room(90e6, 125e6), has_room(117e6, None)
    (False, True, True)
    """
    return speed_Bps is None or WORTH * reached_Bps < PAYLOAD * speed_Bps


def finding(gain: Gain, source: str, target: str, sudo: str, measured: str = "") -> Finding:
    """Return the finding for a gain, with the command that applies the setting."""
    severity: Severity = "warning" if gain.better_Bps >= MUCH * gain.was_Bps else "info"
    assignment = f"{gain.setting}='{gain.better}'" if " " in gain.better else f"{gain.setting}={gain.better}"
    persist = f'echo "{assignment.replace(chr(39), "")}" | {sudo}tee -a /etc/sysctl.d/60-evener.conf'
    return Finding(
        check=gain.check, severity=severity, host=gain.host, peer=target if gain.host == source else source,
        evidence=gain.evidence + (f" (evener probe wire, {measured[:10]})" if measured else ""),
        fix=f"on {gain.host}: {sudo}sysctl -w {assignment}; or for good: {persist}",
    )  # fmt: skip


def still_there(links: Mapping[str, Mapping[str, Link]], facts: Mapping[str, Facts]) -> Iterator[tuple[str, str, Gain]]:
    """Yield (source, target, gain) for each setting that is still the slower one: its largest gain."""
    best: dict[tuple[str, str], tuple[str, str, Gain]] = {}
    for source, targets in links.items():
        for target, link in targets.items():
            for gain in link.gains:
                host = facts.get(gain.host)
                if {source, target} <= facts.keys() and host is not None and host.sysctls.get(gain.setting) == gain.was:
                    key = (gain.host, gain.setting)
                    if key not in best or factor(gain) > factor(best[key][2]):
                        best[key] = (source, target, gain)
    yield from best.values()


def factor(gain: Gain) -> float:
    """Return the speedup."""
    return gain.better_Bps / gain.was_Bps
