"""Probe the links between the hosts of a fleet: every ordered pair, by our own sender and, if installed, by iperf3.

    simplex       goodput of one TCP stream, by the receiver's clock, after slow start
    parallel      goodput of several streams at once: if it is higher, one stream, not the link, is the limit
    duplex        goodput while the other direction sends too, as in a ring all-reduce: each rank sends and receives
    CPU time      of both directions at once, by what loops of the lowest priority lose on all CPUs of a host meanwhile
    round trip    of a small message on an idle link

A goodput is the median over tenths of a second. The 5th percentile and the mean show how often the link gives less: a
link that pauses is a finding (BBR, by design, nearly pauses for 0.2 s in every 10 s).

Up to four hosts are measured one pair after another; more of them in rounds of pairs that have no host in common.
*Assumption*: the switch between them is not the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import HostError
from evener.core.base.units import format_bit_rate, median, percentile
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import HostLink, TuningGain
from evener.ssh.session import RemoteError, Session

WARMUP_S = 1.0  # of slow start, not counted
MEASURE_S = 2.0  # of one measurement
NUM_STREAMS = 4
PING_S, MAX_PINGS = 0.5, 2000
MAX_SEQUENTIAL_HOSTS = 4  # hosts: up to so many, pairs take turns
MIN_SYMMETRY = 0.8  # a finding if one direction is below this share of the other
MIN_MEAN_SHARE = 0.85  # a finding if the mean is below this share of the median
# In duplex, less than this share of a direction's simplex goodput is TCP's doing, not the link's: on a link that both
# share each has a half. BBR at 10 Mbit/s left one of them a quarter in 2 of 6 measurements of 2 s, in none of 3 of 5 s.
MIN_DUPLEX_SHARE = 0.4
RETRY_DURATION_FACTORS = (1, 3, 3)  # duration of each attempt, until none is unfair
OVERHEAD_S = 0.3  # of one measurement, to connect and to reply
IDLE_S = 0.5  # in which the CPU is measured without traffic, before and after that with traffic
MIN_LOST_CPUS = 0.002  # a smaller loss is not told from chance
MIN_LOSS_TO_NOISE = 2.0  # times the difference between the two measurements without traffic
# cannot connect
CONNECT_ERROR_KINDS = {"OSError", "TimeoutError", "timeout", "ConnectionRefusedError", "ConnectionResetError"}


Direction = tuple[str, str]  # (source, target)


class LinkProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements from one host to another: the fleet file's HostLink, and figures that are only printed."""

    source: str
    target: str
    link: HostLink
    goodput_p05_Bps: float  # of tenths of a second
    mean_Bps: float
    num_pings: int
    congestion: str | None  # the sender's congestion control: cubic, bbr
    window_limited: float | None = None  # share of the time in which the receiver's window was the limit
    iperf3_Bps: float | None = None  # None: not installed on both ends, or not asked for


class LinkProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The links that could be measured, and the findings about them."""

    measurements: list[LinkProbeResult]
    findings: list[Finding]

    def fleet_links(self, gains: Mapping[tuple[str, str], list[TuningGain]]) -> dict[str, dict[str, HostLink]]:
        """Return the links as the fleet file stores them, with the `gains` of better settings."""
        links: dict[str, dict[str, HostLink]] = {}
        for wire in self.measurements:
            link_gains = gains.get((wire.source, wire.target), [])
            links.setdefault(wire.source, {})[wire.target] = msgspec.structs.replace(wire.link, gains=link_gains)
        return links


def schedule_rounds(names: list[str]) -> list[list[tuple[str, str]]]:
    """Return rounds that contain every unordered pair once; the pairs of a round are measured at the same time.

    One pair a round for up to four hosts, else rounds of pairs with no host in common (the circle method).

    >>> schedule_rounds(["a", "b", "c"])
    [[('a', 'b')], [('a', 'c')], [('b', 'c')]]
    >>> [len(pairs) for pairs in schedule_rounds(list("abcdef"))]
    [3, 3, 3, 3, 3]
    """
    if len(names) <= MAX_SEQUENTIAL_HOSTS:
        return [[(a, b)] for i, a in enumerate(names) for b in names[i + 1 :]]
    circle = [*names, ""] if len(names) % 2 else list(names)
    half = len(circle) // 2
    schedule = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([pair for pair in opposite if "" not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def estimate_duration_s(num_hosts: int, *, seconds: float = MEASURE_S, iperf3: bool = True) -> float:
    """Return the approximate duration of `measure_links`.

    >>> round(estimate_duration_s(2, iperf3=False))
    22
    """
    stream_s = WARMUP_S + seconds + OVERHEAD_S
    pair_s = 2 * (PING_S + OVERHEAD_S) + 2 * 2 * stream_s + 2 * stream_s + 2 * IDLE_S + (2 * stream_s if iperf3 else 0)
    return len(schedule_rounds([str(i) for i in range(num_hosts)])) * pair_s


def measure_links(
    sessions: Mapping[str, Session],
    addresses: Mapping[str, str],
    *,
    seconds: float = MEASURE_S,
    iperf3: bool = True,
    notify: Callable[[str], None] = lambda text: None,
) -> LinkProbeReport:
    """Measure the links between all ordered pairs of hosts. `addresses`: {host: address at which the others reach it}.

    `notify` is called with a line for each pair that is done. A pair that cannot connect becomes a finding.
    """
    with_iperf3 = {name for name in addresses if iperf3 and sessions[name].call("link_probe", "has_iperf3")}
    results: dict[tuple[str, str], LinkProbeResult] = {}
    findings: list[Finding] = []

    def work(pair: tuple[str, str]) -> None:
        try:
            for wire in _measure_pair(sessions, addresses, pair, seconds, set(pair) <= with_iperf3):
                results[wire.source, wire.target] = wire
            notify(_summary_line(results[pair], results[pair[1], pair[0]]))
        except UnreachableError as error:
            findings.append(error.finding)
            notify(f"{pair[0]} and {pair[1]}: {error.finding.evidence}")

    for pairs in schedule_rounds(list(addresses)):
        if len(pairs) == 1:
            work(pairs[0])  # in this thread, so that Ctrl-C ends it
            continue
        with ThreadPoolExecutor(max_workers=len(pairs)) as pool:
            list(pool.map(work, pairs))
    order = [(a, b) for a in addresses for b in addresses if (a, b) in results]
    return LinkProbeReport(
        measurements=[results[pair] for pair in order],
        findings=findings + [finding for a, b in order for finding in _judge_link(results, a, b)],
    )


def measure_ring_Bps(
    sessions: Mapping[str, Session], addresses: Mapping[str, str], order: list[str], *, seconds: float = MEASURE_S
) -> float:
    """Return the goodput of the slowest link while every host sends to the next and receives from the previous one, as
    in a ring all-reduce. HostError with net.firewall if two of them cannot connect."""
    flows = [TcpFlow(sessions, addresses, a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    try:
        with ThreadPoolExecutor(max_workers=len(flows)) as pool:
            measurements: list[GoodputMeasurement] = list(
                pool.map(lambda flow: flow.measure_goodput(1, seconds), flows)
            )
    except UnreachableError as error:
        finding = error.finding
        raise HostError(finding.evidence, check=finding.check, host=finding.host or "", hint=finding.fix) from None
    return min(measurement.goodput_Bps for measurement in measurements)


class UnreachableError(Exception):
    """One host of a pair cannot connect to the other."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding


def _measure_pair(
    sessions: Mapping[str, Session],
    addresses: Mapping[str, str],
    pair: tuple[str, str],
    seconds: float,
    iperf3: bool,
) -> list[LinkProbeResult]:
    """Measure both directions, first each alone, then both at once."""
    directions = [pair, (pair[1], pair[0])]
    flows = {direction: TcpFlow(sessions, addresses, *direction) for direction in directions}
    round_trips_s = {direction: flows[direction].measure_round_trips() for direction in directions}
    simplex = {direction: flows[direction].measure_goodput(1, seconds) for direction in directions}
    parallel = {direction: flows[direction].measure_goodput(NUM_STREAMS, seconds) for direction in directions}
    duplex = measure_duplex(flows, simplex, seconds)
    per_cpu_s = measure_bytes_per_cpu_s(flows, seconds)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return [
        LinkProbeResult(
            source=direction[0],
            target=direction[1],
            link=HostLink(
                goodput_Bps=simplex[direction].goodput_Bps,
                duplex_Bps=duplex[direction].goodput_Bps,
                duplex_bytes_per_cpu_s=per_cpu_s[direction],
                parallel_Bps=parallel[direction].goodput_Bps,
                rtt_s=percentile(round_trips_s[direction], 0.5),
                rtt_p95_s=percentile(round_trips_s[direction], 0.95),
                retransmits=simplex[direction].retransmits,
                measured=now,
            ),
            goodput_p05_Bps=simplex[direction].p05_Bps,
            mean_Bps=simplex[direction].mean_Bps,
            num_pings=len(round_trips_s[direction]),
            congestion=simplex[direction].congestion,
            window_limited=simplex[direction].window_limited,
            iperf3_Bps=flows[direction].measure_iperf3(seconds) if iperf3 else None,
        )
        for direction in directions
    ]


def measure_duplex(
    flows: Mapping[Direction, TcpFlow], simplex: Mapping[Direction, GoodputMeasurement], seconds: float
) -> dict[Direction, GoodputMeasurement]:
    """Measure both directions at once. If one gets so little of its `simplex` goodput that TCP must have held it back,
    measure again for longer. Return the measurement whose lower duplex/simplex ratio is the highest.
    """
    best, best_share = dict[Direction, GoodputMeasurement](), -1.0
    for factor in RETRY_DURATION_FACTORS:
        duplex = _measure_at_once(flows, factor * seconds)
        share = min(duplex[direction].goodput_Bps / max(simplex[direction].goodput_Bps, 1.0) for direction in flows)
        if share > best_share:
            best, best_share = duplex, share
        if best_share > MIN_DUPLEX_SHARE:
            break
    return best


def measure_bytes_per_cpu_s(flows: Mapping[Direction, TcpFlow], seconds: float) -> dict[Direction, float | None]:
    """Return for each direction the bytes that its source sends, and receives as many, in a second of its CPU time.

    None where the CPU time is not told from chance, or could not be measured.
    """
    before = _spare_cpus(flows, 0.0, IDLE_S)
    with ThreadPoolExecutor(max_workers=1) as pool:
        meanwhile = pool.submit(_spare_cpus, flows, WARMUP_S, seconds)
        mean_Bps = fmean(measured.mean_Bps for measured in _measure_at_once(flows, seconds).values())
        loaded = meanwhile.result()
    after = _spare_cpus(flows, 0.0, IDLE_S)
    rates: dict[Direction, float | None] = dict.fromkeys(flows)
    for direction in flows:
        first, spare, last = before[direction], loaded[direction], after[direction]
        if first is None or spare is None or last is None:
            continue
        lost = (first + last) / 2 - spare
        if lost > max(MIN_LOST_CPUS, MIN_LOSS_TO_NOISE * abs(first - last)):
            rates[direction] = mean_Bps / lost
    return rates


def _measure_at_once(flows: Mapping[Direction, TcpFlow], seconds: float) -> dict[Direction, GoodputMeasurement]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(flows, pool.map(lambda flow: flow.measure_goodput(1, seconds), flows.values()), strict=True))


def _spare_cpus(flows: Mapping[Direction, TcpFlow], wait_s: float, seconds: float) -> dict[Direction, float | None]:
    """Return the spare CPUs of the source of each flow, measured at the same time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        spare = pool.map(lambda flow: flow.spare_cpus(wait_s, seconds), flows.values())
        return dict(zip(flows, spare, strict=True))


class GoodputMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one measurement of goodput."""

    goodput_Bps: float
    p05_Bps: float
    mean_Bps: float
    retransmits: int | None
    congestion: str | None
    window_limited: float | None


class BurstTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One burst, until its receiver reported that all of it had arrived."""

    took_s: float
    window: int | None  # congestion window at its start, in segments; None: the system does not report it


class TcpFlow:
    """A TCP flow from one host to another."""

    def __init__(self, sessions: Mapping[str, Session], addresses: Mapping[str, str], source: str, target: str) -> None:
        self._source, self._target = sessions[source], sessions[target]
        self._source_address, self._target_address = addresses[source], addresses[target]

    def spare_cpus(self, wait_s: float, seconds: float) -> float | None:
        """Return how many CPUs of the source loops of the lowest priority get, after `wait_s`; None if it fails."""
        timeout_s = wait_s + seconds + 30
        try:
            spare: float = self._source.call(
                "link_probe", "spare_cpus", wait_s=wait_s, seconds=seconds, timeout_s=timeout_s
            )
        except RemoteError:  # no room for its processes, say
            return None
        return spare

    def measure_round_trips(self) -> list[float]:
        """Return the seconds of every round trip."""
        trips: list[float] = self._run_both_ends(
            "echo", {"seconds": PING_S}, "ping", {"seconds": PING_S, "at_most": MAX_PINGS}, PING_S
        )[1]
        return trips

    def measure_goodput(
        self, streams: int, seconds: float, *, warm_s: float = WARMUP_S, congestion: str | None = None,
        send_bytes: int | None = None, receive_bytes: int | None = None,
    ) -> GoodputMeasurement:  # fmt: skip
        """Send as fast as TCP allows, with the system's settings unless others are given, and return the goodput."""
        sent_with = {"congestion": congestion, "buffer_bytes": send_bytes}
        arrived, sent = self._run_both_ends(
            "receive",
            {"streams": streams, "warm_s": warm_s, "seconds": seconds, "buffer_bytes": receive_bytes},
            "send",
            {"streams": streams, "seconds": 2 * (warm_s + seconds) + 5, **sent_with},  # the receiver closes first
            warm_s + seconds,
        )
        return GoodputMeasurement(
            # A receiver that waits for its processor receives nothing in most tenths, and much in others.
            goodput_Bps=percentile(arrived["tenths_Bps"], 0.5) or arrived["mean_Bps"],
            p05_Bps=percentile(arrived["tenths_Bps"], 0.05),
            mean_Bps=arrived["mean_Bps"],
            retransmits=sent["retransmits"],
            congestion=sent["congestion"],
            window_limited=sent["window_limited"],
        )

    def measure_bursts(self, size: int, pauses_s: Sequence[float], rounds: int) -> list[list[BurstTiming]]:
        """Send `rounds` bursts after each pause, the pauses in turn; return one list of bursts per pause."""
        took_s = 5.0 * rounds * len(pauses_s)
        args = {"size": size, "pauses_s": list(pauses_s), "rounds": rounds, "seconds": took_s}
        timings = self._run_both_ends("receive_bursts", {"seconds": took_s}, "send_bursts", args, took_s)[1]
        return from_builtins(timings, list[list[BurstTiming]])

    def measure_iperf3(self, seconds: float) -> float | None:
        """Return the goodput by iperf3 in bytes a second; None if it failed."""
        try:
            received_Bps: float = self._run_both_ends(
                "iperf3_receive", {"seconds": WARMUP_S + seconds},
                "iperf3_send", {"warm_s": WARMUP_S, "seconds": seconds}, WARMUP_S + seconds,
            )[1]  # fmt: skip
            return received_Bps
        except UnreachableError:
            return None

    def _run_both_ends(
        self, listen: str, listen_args: dict[str, Any], connect: str, connect_args: dict[str, Any], took_s: float
    ) -> tuple[Any, Any]:
        """Run `listen` on the target and `connect` on the source, and return both results.

        Raise UnreachableError if the source cannot connect.
        """
        timeout_s = took_s + 30
        listener = self._target.stream(
            "link_probe", listen, address=self._target_address, timeout_s=timeout_s, **listen_args
        )
        assert isinstance(listener, Generator)
        try:
            port = next(listener)["port"]
            sent = self._source.call(
                "link_probe",
                connect,
                address=self._target_address,
                port=port,
                source=self._source_address,
                timeout_s=timeout_s,
                **connect_args,
            )
            return next(listener, None), sent
        except RemoteError as error:
            if error.kind not in CONNECT_ERROR_KINDS:
                raise
            raise UnreachableError(self._blocked_finding(error)) from None
        finally:
            listener.close()

    def _blocked_finding(self, error: RemoteError) -> Finding:
        return Finding(
            check="net.firewall",
            severity="error",
            host=self._target.name,
            peer=self._source.name,
            evidence=f"{self._source.name} cannot connect to {self._target.name} at {self._target_address}: "
            f"{error.message}",
            fix="evener doctor shows why",
        )


def _judge_link(measurements: Mapping[tuple[str, str], LinkProbeResult], source: str, target: str) -> Iterator[Finding]:
    wire = measurements[source, target]
    forward_Bps, reverse_Bps = wire.link.goodput_Bps, measurements[target, source].link.goodput_Bps
    if forward_Bps < MIN_SYMMETRY * reverse_Bps:
        yield Finding(
            check="net.asymmetric",
            severity="warning",
            host=source,
            peer=target,
            evidence=f"{source} sends {format_bit_rate(forward_Bps)} to {target}, which sends "
            f"{format_bit_rate(reverse_Bps)} back",
            fix="another cable or port of the switch; on both: ethtool INTERFACE, and look at Speed and Duplex",
        )
    if wire.mean_Bps < MIN_MEAN_SHARE * forward_Bps:
        retransmits = "" if wire.link.retransmits is None else f", {wire.link.retransmits} segments retransmitted"
        yield Finding(
            check="net.stack-loss",
            severity="warning",
            host=source,
            peer=target,
            evidence=f"the link pauses: median {format_bit_rate(forward_Bps)}, mean {format_bit_rate(wire.mean_Bps)}"
            f"{retransmits}, congestion control {wire.congestion or 'not known'}",
            fix=f"on {source}: sudo sysctl -w net.ipv4.tcp_congestion_control=cubic, then evener probe wire again",
        )


def _summary_line(forward: LinkProbeResult, reverse: LinkProbeResult) -> str:
    return (
        f"{forward.source} to {forward.target} {format_bit_rate(forward.link.goodput_Bps)}, "
        f"back {format_bit_rate(reverse.link.goodput_Bps)}, "
        f"both at once {format_bit_rate(forward.link.duplex_Bps)} and {format_bit_rate(reverse.link.duplex_Bps)}, "
        f"round trip {(median([forward.link.rtt_s, reverse.link.rtt_s]) or 0.0) * 1e3:.3g} ms"
    )
