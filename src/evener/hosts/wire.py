"""Probe the links between the hosts of a fleet: every ordered pair, by our own sender and, if installed, by iperf3.

    simplex       goodput of one TCP stream, by the receiver's clock, after slow start
    parallel      goodput of several streams at once: if it is higher, one stream, not the link, is the limit
    duplex        goodput while the other direction sends too, as in a ring all-reduce: each rank sends and receives
    round trip    of a small message on an idle link

A goodput is the median over tenths of a second. The 5th percentile and the mean show how often the link gives less: one
that pauses is a finding (BBR by itself goes quiet for a fifth of a second in ten).

Up to four hosts are measured one pair after another; more of them in rounds of pairs that have no host in common.
*Assumption*: the switch between them is not the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from evener.core.decoding import from_tree
from evener.core.errors import HostError
from evener.core.finding import Finding
from evener.core.fleet import Gain, Link
from evener.core.units import link_rate, median, percentile
from evener.hosts.session import RemoteError, Session

WARM_S = 1.0  # of slow start, not counted
SECONDS = 2.0  # of one measurement
STREAMS = 4
PING_S, PINGS = 0.5, 2000
ONE_BY_ONE = 4  # hosts: up to so many, pairs take turns
ASYMMETRIC = 0.8  # a finding if one direction is below this share of the other
PAUSES = 0.85  # a finding if the mean is below this share of the median
# In duplex, less than this share of a direction's simplex goodput is TCP's doing, not the link's: on a link that both
# share each has a half. BBR at 10 Mbit/s left one of them a quarter in 2 of 6 measurements of 2 s, in none of 3 of 5 s.
UNFAIR = 0.4
LONGER = (1, 3, 3)  # duration of each attempt, until none is unfair
OVERHEAD_S = 0.3  # of one measurement, to connect and to reply
BLOCKED = {"OSError", "TimeoutError", "timeout", "ConnectionRefusedError", "ConnectionResetError"}  # cannot connect


Way = tuple[str, str]  # (source, target)


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured from one host to another: the fleet file's Link, and figures for the reader only."""

    source: str
    target: str
    link: Link
    goodput_p05_Bps: float  # of tenths of a second
    mean_Bps: float
    num_pings: int
    congestion: str | None  # the sender's congestion control: cubic, bbr
    window_limited: float | None = None  # share of the time in which the receiver's window was the limit
    iperf3_Bps: float | None = None  # None: not installed on both ends, or not asked for


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The links that could be measured, and the findings about them."""

    wires: list[Wire]
    findings: list[Finding]

    def links(self, gains: Mapping[tuple[str, str], list[Gain]]) -> dict[str, dict[str, Link]]:
        """Return the links as the fleet file stores them, with the `gains` of better settings."""
        links: dict[str, dict[str, Link]] = {}
        for wire in self.wires:
            link_gains = gains.get((wire.source, wire.target), [])
            links.setdefault(wire.source, {})[wire.target] = msgspec.structs.replace(wire.link, gains=link_gains)
        return links


def rounds(names: list[str]) -> list[list[tuple[str, str]]]:
    """Return rounds that contain every unordered pair once; the pairs of a round are measured at the same time.

    One pair a round for up to four hosts, else rounds of pairs with no host in common (the circle method).

    >>> rounds(["a", "b", "c"])
    [[('a', 'b')], [('a', 'c')], [('b', 'c')]]
    >>> [len(pairs) for pairs in rounds(list("abcdef"))]
    [3, 3, 3, 3, 3]
    """
    if len(names) <= ONE_BY_ONE:
        return [[(a, b)] for i, a in enumerate(names) for b in names[i + 1 :]]
    circle = [*names, ""] if len(names) % 2 else list(names)
    half = len(circle) // 2
    schedule = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([pair for pair in opposite if "" not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def estimate_s(num_hosts: int, *, seconds: float = SECONDS, iperf3: bool = True) -> float:
    """Return the approximate duration of `measure_links`.

    >>> round(estimate_s(2, iperf3=False))
    18
    """
    stream_s = WARM_S + seconds + OVERHEAD_S
    pair_s = 2 * (PING_S + OVERHEAD_S) + 2 * 2 * stream_s + stream_s + (2 * stream_s if iperf3 else 0)
    return len(rounds([str(i) for i in range(num_hosts)])) * pair_s


def measure(
    sessions: Mapping[str, Session],
    addresses: Mapping[str, str],
    *,
    seconds: float = SECONDS,
    iperf3: bool = True,
    told: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Measure every ordered pair of `addresses`: by host, the address at which the others reach it.

    `on_progress` is called with a line for each pair that is done. A pair that cannot connect becomes a finding.
    """
    with_iperf3 = {name for name in addresses if iperf3 and sessions[name].call("wire", "has_iperf3")}
    results: dict[tuple[str, str], Wire] = {}
    findings: list[Finding] = []

    def work(pair: tuple[str, str]) -> None:
        try:
            for wire in _pair(sessions, addresses, pair, seconds, set(pair) <= with_iperf3):
                results[wire.source, wire.target] = wire
            told(_line(results[pair], results[pair[1], pair[0]]))
        except UnreachableError as error:
            findings.append(error.finding)
            told(f"{pair[0]} and {pair[1]}: {error.finding.evidence}")

    for pairs in rounds(list(addresses)):
        if len(pairs) == 1:
            work(pairs[0])  # in this thread, so that Ctrl-C ends it
            continue
        with ThreadPoolExecutor(max_workers=len(pairs)) as pool:
            list(pool.map(work, pairs))
    order = [(a, b) for a in addresses for b in addresses if (a, b) in results]
    return Measured(
        wires=[results[pair] for pair in order],
        findings=findings + [finding for a, b in order for finding in _judged(results, a, b)],
    )


def ring_Bps(
    sessions: Mapping[str, Session], addresses: Mapping[str, str], order: list[str], *, seconds: float = SECONDS
) -> float:
    """Return the goodput of the slowest link while every host sends to the next and receives from the previous one, as
    in a ring all-reduce. HostError with net.firewall if two of them cannot connect."""
    flows = [Flow(sessions, addresses, a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    try:
        with ThreadPoolExecutor(max_workers=len(flows)) as pool:
            measurements: list[Poured] = list(pool.map(lambda flow: flow.pour(1, seconds), flows))
    except UnreachableError as error:
        finding = error.finding
        raise HostError(finding.evidence, check=finding.check, host=finding.host or "", hint=finding.fix) from None
    return min(measurement.goodput_Bps for measurement in measurements)


class UnreachableError(Exception):
    """One host of a pair cannot connect to the other."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding


def _pair(
    sessions: Mapping[str, Session],
    addresses: Mapping[str, str],
    pair: tuple[str, str],
    seconds: float,
    iperf3: bool,
) -> list[Wire]:
    """Measure both directions, first each alone, then both at once."""
    directions = [pair, (pair[1], pair[0])]
    flows = {direction: Flow(sessions, addresses, *direction) for direction in directions}
    round_trips_s = {direction: flows[direction].ping() for direction in directions}
    simplex = {direction: flows[direction].pour(1, seconds) for direction in directions}
    parallel = {direction: flows[direction].pour(STREAMS, seconds) for direction in directions}
    duplex = both_ways(flows, simplex, seconds)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return [
        Wire(
            source=direction[0],
            target=direction[1],
            link=Link(
                goodput_Bps=simplex[direction].goodput_Bps,
                duplex_Bps=duplex[direction].goodput_Bps,
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
            iperf3_Bps=flows[direction].iperf3(seconds) if iperf3 else None,
        )
        for direction in directions
    ]


def both_ways(flows: Mapping[Way, Flow], alone: Mapping[Way, Poured], seconds: float) -> dict[Way, Poured]:
    """Measure both directions at once. If one has so little of its `simplex` goodput that TCP must have held it back,
    measure again for longer, and return the fairest measurement.
    """

    def at_once(each_s: float) -> dict[Way, Poured]:
        with ThreadPoolExecutor(max_workers=2) as pool:
            return dict(zip(flows, pool.map(lambda flow: flow.pour(1, each_s), flows.values()), strict=True))

    best, best_share = dict[Way, Poured](), -1.0
    for factor in LONGER:
        duplex = at_once(factor * seconds)
        share = min(duplex[direction].goodput_Bps / max(alone[direction].goodput_Bps, 1.0) for direction in flows)
        if share > best_share:
            best, best_share = duplex, share
        if best_share > UNFAIR:
            break
    return best


class Poured(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one measurement of goodput."""

    goodput_Bps: float
    p05_Bps: float
    mean_Bps: float
    retransmits: int | None
    congestion: str | None
    window_limited: float | None


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """One burst, until its receiver reported that all of it had arrived."""

    took_s: float
    window: int | None  # congestion window at its start, in segments; None: the system does not report it


class Flow:
    """A TCP flow from one host to another."""

    def __init__(self, sessions: Mapping[str, Session], addresses: Mapping[str, str], source: str, target: str) -> None:
        self._source, self._target = sessions[source], sessions[target]
        self._from, self._to = addresses[source], addresses[target]

    def ping(self) -> list[float]:
        """Return the seconds of every round trip."""
        trips: list[float] = self._talk(
            "echo", {"seconds": PING_S}, "ping", {"seconds": PING_S, "at_most": PINGS}, PING_S
        )[1]
        return trips

    def pour(
        self, streams: int, seconds: float, *, warm_s: float = WARM_S, congestion: str | None = None,
        send_bytes: int | None = None, receive_bytes: int | None = None,
    ) -> Poured:  # fmt: skip
        """Send as fast as TCP allows, with the system's settings unless others are given, and return the goodput."""
        sent_with = {"congestion": congestion, "buffer_bytes": send_bytes}
        arrived, sent = self._talk(
            "receive",
            {"streams": streams, "warm_s": warm_s, "seconds": seconds, "buffer_bytes": receive_bytes},
            "send",
            {"streams": streams, "seconds": 2 * (warm_s + seconds) + 5, **sent_with},  # the receiver closes first
            warm_s + seconds,
        )
        return Poured(
            # A receiver that waits for its processor receives nothing in most tenths, and much in others.
            goodput_Bps=percentile(arrived["tenths_Bps"], 0.5) or arrived["mean_Bps"],
            p05_Bps=percentile(arrived["tenths_Bps"], 0.05),
            mean_Bps=arrived["mean_Bps"],
            retransmits=sent["retransmits"],
            congestion=sent["congestion"],
            window_limited=sent["window_limited"],
        )

    def bursts(self, size: int, pauses_s: Sequence[float], rounds: int) -> list[list[Burst]]:
        """Send `rounds` bursts after each of these pauses, the pauses in turn; return the bursts of every pause."""
        took_s = 5.0 * rounds * len(pauses_s)
        args = {"size": size, "pauses_s": list(pauses_s), "rounds": rounds, "seconds": took_s}
        timings = self._talk("take", {"seconds": took_s}, "bursts", args, took_s)[1]
        return from_tree(timings, list[list[Burst]])

    def iperf3(self, seconds: float) -> float | None:
        """Return the goodput by iperf3 in bytes a second; None if it failed."""
        try:
            received_Bps: float = self._talk(
                "iperf3_receive", {"seconds": WARM_S + seconds},
                "iperf3_send", {"warm_s": WARM_S, "seconds": seconds}, WARM_S + seconds,
            )[1]  # fmt: skip
            return received_Bps
        except UnreachableError:
            return None

    def _talk(
        self, listen: str, listen_args: dict[str, Any], connect: str, connect_args: dict[str, Any], took_s: float
    ) -> tuple[Any, Any]:
        """Run `listen` on the target and `connect` on the source, and return both results.

        Raise UnreachableError if the source cannot connect.
        """
        timeout_s = took_s + 30
        listener = self._target.stream("wire", listen, address=self._to, timeout_s=timeout_s, **listen_args)
        assert isinstance(listener, Generator)
        try:
            port = next(listener)["port"]
            sent = self._source.call(
                "wire", connect, address=self._to, port=port, source=self._from, timeout_s=timeout_s, **connect_args
            )
            return next(listener, None), sent
        except RemoteError as error:
            if error.kind not in BLOCKED:
                raise
            raise UnreachableError(self._blocked(error)) from None
        finally:
            listener.close()

    def _blocked(self, error: RemoteError) -> Finding:
        return Finding(
            check="net.firewall",
            severity="error",
            host=self._target.name,
            peer=self._source.name,
            evidence=f"{self._source.name} cannot connect to {self._target.name} at {self._to}: {error.message}",
            fix="evener doctor shows why",
        )


def _judged(measurements: Mapping[tuple[str, str], Wire], source: str, target: str) -> Iterator[Finding]:
    wire = measurements[source, target]
    forward_Bps, reverse_Bps = wire.link.goodput_Bps, measurements[target, source].link.goodput_Bps
    if forward_Bps < ASYMMETRIC * reverse_Bps:
        yield Finding(
            check="net.asymmetric",
            severity="warning",
            host=source,
            peer=target,
            evidence=f"{source} sends {link_rate(forward_Bps)} to {target}, which sends {link_rate(reverse_Bps)} back",
            fix="another cable or port of the switch; on both: ethtool INTERFACE, and look at Speed and Duplex",
        )
    if wire.mean_Bps < PAUSES * forward_Bps:
        retransmits = "" if wire.link.retransmits is None else f", {wire.link.retransmits} segments retransmitted"
        yield Finding(
            check="net.stack-loss",
            severity="warning",
            host=source,
            peer=target,
            evidence=f"the link pauses: median {link_rate(forward_Bps)}, mean {link_rate(wire.mean_Bps)}"
            f"{retransmits}, congestion control {wire.congestion or 'not known'}",
            fix=f"on {source}: sudo sysctl -w net.ipv4.tcp_congestion_control=cubic, then evener probe wire again",
        )


def _line(there: Wire, back: Wire) -> str:
    return (
        f"{there.source} to {there.target} {link_rate(there.link.goodput_Bps)}, "
        f"back {link_rate(back.link.goodput_Bps)}, "
        f"both at once {link_rate(there.link.duplex_Bps)} and {link_rate(back.link.duplex_Bps)}, "
        f"round trip {(median([there.link.rtt_s, back.link.rtt_s]) or 0.0) * 1e3:.3g} ms"
    )
