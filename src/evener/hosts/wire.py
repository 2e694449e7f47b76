"""How fast is the wire between the hosts of a fleet? Every ordered pair, by our own sender, beside iperf3 where it is.

    one way       goodput of one TCP stream: what arrives by the receiver's clock, after slow start
    streams       of several at once: more than one stream brings means that one stream, not the wire, is the limit
    both ways     while as much goes the other way: what a ring all-reduce uses, since each rank sends and receives
    round trip    of a small message on an idle wire

A goodput is the median over tenths of a second: what the wire gives. How often it gives less shows in p5 and in the
mean: a wire that pauses is a finding (BBR by itself goes quiet for a fifth of a second in ten).

Up to four hosts are measured one pair after another; more of them in rounds of pairs that have no host in common, which
assumes that the switch between them is not what limits.
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

WARM_S = 1.0  # TCP finds its pace: left out
SECONDS = 2.0  # of one measurement
STREAMS = 4
PING_S, PINGS = 0.5, 2000
ONE_BY_ONE = 4  # hosts, up to which pairs take turns
ASYMMETRIC = 0.8  # one direction slower than this share of the other is worth a word
PAUSES = 0.85  # and so is a mean below this share of the median
# One of two directions at once that has less of what it has alone is not the wire's doing: on one that both share each
# has a half. BBR at 10 Mbit/s left one of them a quarter in 2 of 6 measurements of 2 s, and in none of 3 of 5 s.
UNFAIR = 0.4
LONGER = (1, 3, 3)  # times as long, as long as one is unfair
OVERHEAD_S = 0.3  # of one measurement: connecting, answering
BLOCKED = {"OSError", "TimeoutError", "timeout", "ConnectionRefusedError", "ConnectionResetError"}  # no way through


Way = tuple[str, str]  # from a host to another


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured from one host to another: the fleet file's Link and what only a reader wants to know."""

    source: str
    target: str
    link: Link
    goodput_p05_Bps: float  # of tenths of a second
    mean_Bps: float
    num_pings: int
    congestion: str | None  # TCP's congestion control on the sender: cubic, bbr
    window_limited: float | None = None  # share of the time in which the receiver's window was the limit
    iperf3_Bps: float | None = None  # None: not installed on both ends, or not asked for


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Every pair that could be measured, and what is wrong."""

    wires: list[Wire]
    findings: list[Finding]

    def links(self, gains: Mapping[tuple[str, str], list[Gain]]) -> dict[str, dict[str, Link]]:
        """As the fleet file wants them, with what was found to be better."""
        links: dict[str, dict[str, Link]] = {}
        for wire in self.wires:
            better = gains.get((wire.source, wire.target), [])
            links.setdefault(wire.source, {})[wire.target] = msgspec.structs.replace(wire.link, gains=better)
        return links


def rounds(names: list[str]) -> list[list[tuple[str, str]]]:
    """Every unordered pair once; the pairs of one round are measured at the same time.

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
    found = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([pair for pair in opposite if "" not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def estimate_s(num_hosts: int, *, seconds: float = SECONDS, iperf3: bool = True) -> float:
    """About how long `measure` takes.

    >>> round(estimate_s(2, iperf3=False))
    18
    """
    one = WARM_S + seconds + OVERHEAD_S
    pair = 2 * (PING_S + OVERHEAD_S) + 2 * 2 * one + one + (2 * one if iperf3 else 0)
    return len(rounds([str(i) for i in range(num_hosts)])) * pair


def measure(
    sessions: Mapping[str, Session],
    addresses: Mapping[str, str],
    *,
    seconds: float = SECONDS,
    iperf3: bool = True,
    told: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Measure every ordered pair of `addresses`: the address, by host, at which the others reach it.

    `told` is called with a line for each pair that is done. A pair that cannot connect becomes a finding.
    """
    with_iperf3 = {name for name in addresses if iperf3 and sessions[name].call("wire", "has_iperf3")}
    wires: dict[tuple[str, str], Wire] = {}
    findings: list[Finding] = []

    def work(pair: tuple[str, str]) -> None:
        try:
            for wire in _pair(sessions, addresses, pair, seconds, set(pair) <= with_iperf3):
                wires[wire.source, wire.target] = wire
            told(_line(wires[pair], wires[pair[1], pair[0]]))
        except UnreachableError as error:
            findings.append(error.finding)
            told(f"{pair[0]} and {pair[1]}: {error.finding.evidence}")

    for pairs in rounds(list(addresses)):
        if len(pairs) == 1:
            work(pairs[0])  # in this thread, so that Ctrl-C ends it
            continue
        with ThreadPoolExecutor(max_workers=len(pairs)) as pool:
            list(pool.map(work, pairs))
    order = [(a, b) for a in addresses for b in addresses if (a, b) in wires]
    return Measured(
        wires=[wires[pair] for pair in order],
        findings=findings + [finding for a, b in order for finding in _judged(wires, a, b)],
    )


def ring_Bps(
    sessions: Mapping[str, Session], addresses: Mapping[str, str], order: list[str], *, seconds: float = SECONDS
) -> float:
    """Goodput of the slowest link while every host sends to the next and receives from the one before: what a ring
    all-reduce can use. HostError with net.firewall where two of them cannot connect."""
    flows = [Flow(sessions, addresses, a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    try:
        with ThreadPoolExecutor(max_workers=len(flows)) as pool:
            poured: list[Poured] = list(pool.map(lambda flow: flow.pour(1, seconds), flows))
    except UnreachableError as error:
        finding = error.finding
        raise HostError(finding.evidence, check=finding.check, host=finding.host or "", hint=finding.fix) from None
    return min(found.goodput_Bps for found in poured)


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
    """Both directions, each for itself, then at once."""
    ways = [pair, (pair[1], pair[0])]
    flows = {way: Flow(sessions, addresses, *way) for way in ways}
    trips = {way: flows[way].ping() for way in ways}
    single = {way: flows[way].pour(1, seconds) for way in ways}
    several = {way: flows[way].pour(STREAMS, seconds) for way in ways}
    duplex = both_ways(flows, single, seconds)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return [
        Wire(
            source=way[0],
            target=way[1],
            link=Link(
                goodput_Bps=single[way].goodput_Bps,
                duplex_Bps=duplex[way].goodput_Bps,
                parallel_Bps=several[way].goodput_Bps,
                rtt_s=percentile(trips[way], 0.5),
                rtt_p95_s=percentile(trips[way], 0.95),
                retransmits=single[way].retransmits,
                measured=now,
            ),
            goodput_p05_Bps=single[way].p05_Bps,
            mean_Bps=single[way].mean_Bps,
            num_pings=len(trips[way]),
            congestion=single[way].congestion,
            window_limited=single[way].window_limited,
            iperf3_Bps=flows[way].iperf3(seconds) if iperf3 else None,
        )
        for way in ways
    ]


def both_ways(flows: Mapping[Way, Flow], alone: Mapping[Way, Poured], seconds: float) -> dict[Way, Poured]:
    """Both at once. Where one had so little of what it has `alone` that TCP must have kept it low, they are measured
    again, for longer, and the fairest counts.
    """

    def at_once(each_s: float) -> dict[Way, Poured]:
        with ThreadPoolExecutor(max_workers=2) as pool:
            return dict(zip(flows, pool.map(lambda flow: flow.pour(1, each_s), flows.values()), strict=True))

    best, most = dict[Way, Poured](), -1.0
    for times in LONGER:
        found = at_once(times * seconds)
        share = min(found[way].goodput_Bps / max(alone[way].goodput_Bps, 1.0) for way in flows)
        if share > most:
            best, most = found, share
        if most > UNFAIR:
            break
    return best


class Poured(msgspec.Struct, frozen=True, kw_only=True):
    """What one measurement saw."""

    goodput_Bps: float
    p05_Bps: float
    mean_Bps: float
    retransmits: int | None
    congestion: str | None
    window_limited: float | None


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """One burst, until its receiver said that it was all there."""

    took_s: float
    window: int | None  # segments in which it began; None: the system does not tell


class Flow:
    """From one host to another."""

    def __init__(self, sessions: Mapping[str, Session], addresses: Mapping[str, str], source: str, target: str) -> None:
        self._source, self._target = sessions[source], sessions[target]
        self._from, self._to = addresses[source], addresses[target]

    def ping(self) -> list[float]:
        """Seconds of every round trip."""
        trips: list[float] = self._talk(
            "echo", {"seconds": PING_S}, "ping", {"seconds": PING_S, "at_most": PINGS}, PING_S
        )[1]
        return trips

    def pour(
        self, streams: int, seconds: float, *, warm_s: float = WARM_S, congestion: str | None = None,
        send_bytes: int | None = None, receive_bytes: int | None = None,
    ) -> Poured:  # fmt: skip
        """As fast as TCP lets, with the system's settings unless others are given."""
        sent_with = {"congestion": congestion, "buffer_bytes": send_bytes}
        arrived, sent = self._talk(
            "receive",
            {"streams": streams, "warm_s": warm_s, "seconds": seconds, "buffer_bytes": receive_bytes},
            "send",
            {"streams": streams, "seconds": 2 * (warm_s + seconds) + 5, **sent_with},  # the receiver hangs up first
            warm_s + seconds,
        )
        return Poured(
            # A receiver that waits for its processor has nothing in most tenths, and much in others.
            goodput_Bps=percentile(arrived["tenths_Bps"], 0.5) or arrived["mean_Bps"],
            p05_Bps=percentile(arrived["tenths_Bps"], 0.05),
            mean_Bps=arrived["mean_Bps"],
            retransmits=sent["retransmits"],
            congestion=sent["congestion"],
            window_limited=sent["window_limited"],
        )

    def bursts(self, size: int, pauses_s: Sequence[float], rounds: int) -> list[list[Burst]]:
        """Bursts after each of these pauses in turn: those of every pause."""
        took_s = 5.0 * rounds * len(pauses_s)
        asked = {"size": size, "pauses_s": list(pauses_s), "rounds": rounds, "seconds": took_s}
        told = self._talk("take", {"seconds": took_s}, "bursts", asked, took_s)[1]
        return from_tree(told, list[list[Burst]])

    def iperf3(self, seconds: float) -> float | None:
        """The same by iperf3; None where it failed."""
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
        """What the listener saw, and what the other end did."""
        timeout_s = took_s + 30
        listener = self._target.stream("wire", listen, address=self._to, timeout_s=timeout_s, **listen_args)
        assert isinstance(listener, Generator)
        try:
            port = next(listener)["port"]
            found = self._source.call(
                "wire", connect, address=self._to, port=port, source=self._from, timeout_s=timeout_s, **connect_args
            )
            return next(listener, None), found
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
            evidence=f"no wire from {self._source.name} to {self._target.name} at {self._to}: {error.message}",
            fix="evener doctor finds out why",
        )


def _judged(wires: Mapping[tuple[str, str], Wire], source: str, target: str) -> Iterator[Finding]:
    wire = wires[source, target]
    there, back = wire.link.goodput_Bps, wires[target, source].link.goodput_Bps
    if there < ASYMMETRIC * back:
        yield Finding(
            check="net.asymmetric",
            severity="warning",
            host=source,
            peer=target,
            evidence=f"{source} sends {link_rate(there)} to {target}, which sends {link_rate(back)} back",
            fix="another cable or port of the switch; on both: ethtool INTERFACE, and look at Speed and Duplex",
        )
    if wire.mean_Bps < PAUSES * there:
        again = "" if wire.link.retransmits is None else f", {wire.link.retransmits} segments sent again"
        yield Finding(
            check="net.stack-loss",
            severity="warning",
            host=source,
            peer=target,
            evidence=f"the wire pauses: {link_rate(there)} half of the time, {link_rate(wire.mean_Bps)} in the mean"
            f"{again}, congestion control {wire.congestion or 'not known'}",
            fix=f"on {source}: sudo sysctl -w net.ipv4.tcp_congestion_control=cubic, then evener probe wire again",
        )


def _line(there: Wire, back: Wire) -> str:
    return (
        f"{there.source} to {there.target} {link_rate(there.link.goodput_Bps)}, "
        f"back {link_rate(back.link.goodput_Bps)}, "
        f"both at once {link_rate(there.link.duplex_Bps)} and {link_rate(back.link.duplex_Bps)}, "
        f"round trip {(median([there.link.rtt_s, back.link.rtt_s]) or 0.0) * 1e3:.3g} ms"
    )
