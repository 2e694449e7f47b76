"""Decide which other TCP setting is worth a finding, and choose its value. Pure: figures in, findings out.

One TCP stream carries at most its window in a round trip, and two buffers hold the window: the sender's, for bytes that
are not yet acknowledged (at most the third value of tcp_wmem), and the receiver's (at most half of the third value of
tcp_rmem, as the kernel uses the other half). While idle, the sender's congestion window shrinks, at last to ten
segments, and then doubles with every round trip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from evener.core.base.units import median
from evener.core.cluster.finding import Finding, Severity
from evener.core.cluster.fleet_file import HostLink, TuningGain
from evener.doctor.facts import HostFacts

CONGESTION_CONTROL_SYSCTL = "net.ipv4.tcp_congestion_control"
SLOW_START_AFTER_IDLE_SYSCTL = "net.ipv4.tcp_slow_start_after_idle"
# minimum, initial, maximum size of a buffer
TCP_RMEM_SYSCTL, TCP_WMEM_SYSCTL = "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"
LINUX_DEFAULT_BUFFERS = {TCP_RMEM_SYSCTL: (4096, 131072, 6 << 20), TCP_WMEM_SYSCTL: (4096, 16384, 4 << 20)}  # of Linux
WINDOW_SHARE_OF_BUFFER = {TCP_RMEM_SYSCTL: 0.5, TCP_WMEM_SYSCTL: 1.0}  # bytes in flight for each byte of the buffer

MIN_SPEEDUP = 1.05  # times as fast: a smaller gain is not reported
WARNING_SPEEDUP = 1.25  # times as fast: a larger gain is a warning
MSS_BYTES, INITIAL_CWND_SEGMENTS = 1448, 10
ETHERNET_PAYLOAD_SHARE = 1448 / 1538  # share of the bytes on an Ethernet


def is_clearly_faster(was: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether `other` has `MIN_SPEEDUP` times the median of `was`, and a minimum above the maximum of `was`.

    >>> (is_clearly_faster([100, 104, 102], [110, 112, 109]), is_clearly_faster([100, 111, 102], [110, 112, 109]),
    ...  is_clearly_faster([100, 101], [102, 103]))
    (True, False, False)
    """
    first, second = median(was), median(other)
    return first is not None and second is not None and second >= MIN_SPEEDUP * first and min(other) > max(was)


def window_limit_Bps(setting: str, buffer_bytes: int, rtt_s: float) -> float:
    """Return the maximum throughput of one stream: window / round trip.

    >>> window_limit_Bps(TCP_RMEM_SYSCTL, 131072, 0.020)
    3276800.0
    """
    return WINDOW_SHARE_OF_BUFFER[setting] * buffer_bytes / max(rtt_s, 1e-6)


def parse_max_buffer_bytes(triple: str) -> int | None:
    """Return the maximum of "minimum initial maximum"; None if the text is not such a triple.

    >>> parse_max_buffer_bytes("4096 131072 6291456"), parse_max_buffer_bytes("unknown")
    (6291456, None)
    """
    values = triple.split()
    return int(values[2]) if len(values) == 3 and all(value.isdigit() for value in values) else None


def widen_buffers(setting: str, triple: str, goodput_Bps: float, rtt_s: float) -> str:
    """Return the setting with room for twice the bytes in flight at this goodput, at least the defaults of Linux.

    >>> widen_buffers(TCP_RMEM_SYSCTL, "4096 8192 8192", 118e6, 0.0002)
    '4096 131072 6291456'
    >>> widen_buffers(TCP_WMEM_SYSCTL, "4096 16384 4194304", 118e6, 0.080)
    '4096 16384 33554432'
    """
    minimum, initial, _ = (int(value) for value in triple.split())
    needed = 2 * goodput_Bps * rtt_s / WINDOW_SHARE_OF_BUFFER[setting]
    maximum = max(LINUX_DEFAULT_BUFFERS[setting][2], 1 << math.ceil(math.log2(max(needed, 1))))
    return f"{minimum} {max(initial, LINUX_DEFAULT_BUFFERS[setting][1])} {maximum}"


def slow_start_s(goodput_Bps: float, rtt_s: float, size: int) -> float:
    """Return the most that a burst loses by starting with ten segments: a round trip for each doubling up to the bytes
    in flight at full speed.

    >>> round(slow_start_s(11.7e6, 0.020, 1_000_000), 3), slow_start_s(11.7e6, 0.0002, 1_000_000)
    (0.08, 0.0)
    """
    in_flight = min(size, goodput_Bps * rtt_s) / MSS_BYTES
    return max(0.0, math.log2(max(in_flight, 1) / INITIAL_CWND_SEGMENTS)) * rtt_s


def has_headroom(reached_Bps: float, speed_Bps: float | None) -> bool:
    """Return whether a link of this speed (None: not known) could carry `MIN_SPEEDUP` times as much.

    >>> has_headroom(117e6, 125e6), has_headroom(90e6, 125e6), has_headroom(117e6, None)
    (False, True, True)
    """
    return speed_Bps is None or MIN_SPEEDUP * reached_Bps < ETHERNET_PAYLOAD_SHARE * speed_Bps


def finding_for_gain(gain: TuningGain, source: str, target: str, sudo: str, measured: str = "") -> Finding:
    """Return the finding for a gain, with the command that applies the setting."""
    severity: Severity = "warning" if gain.better_Bps >= WARNING_SPEEDUP * gain.was_Bps else "info"
    assignment = f"{gain.setting}='{gain.better}'" if " " in gain.better else f"{gain.setting}={gain.better}"
    persist = f'echo "{assignment.replace(chr(39), "")}" | {sudo}tee -a /etc/sysctl.d/60-evener.conf'
    return Finding(
        check=gain.check, severity=severity, host=gain.host, peer=target if gain.host == source else source,
        evidence=gain.evidence + (f" (evener probe wire, {measured[:10]})" if measured else ""),
        fix=f"on {gain.host}: {sudo}sysctl -w {assignment}; or for good: {persist}",
    )  # fmt: skip


def applicable_gains(
    links: Mapping[str, Mapping[str, HostLink]], facts: Mapping[str, HostFacts]
) -> Iterator[tuple[str, str, TuningGain]]:
    """Yield (source, target, gain) for each setting of a host that still has its slower value: the largest gain."""
    best: dict[tuple[str, str], tuple[str, str, TuningGain]] = {}
    for source, targets in links.items():
        for target, link in targets.items():
            for gain in link.gains:
                host = facts.get(gain.host)
                if {source, target} <= facts.keys() and host is not None and host.sysctls.get(gain.setting) == gain.was:
                    key = (gain.host, gain.setting)
                    if key not in best or speedup(gain) > speedup(best[key][2]):
                        best[key] = (source, target, gain)
    yield from best.values()


def speedup(gain: TuningGain) -> float:
    """Return the speedup."""
    return gain.better_Bps / gain.was_Bps
