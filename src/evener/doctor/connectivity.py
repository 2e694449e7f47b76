"""Probe the connectivity of every ordered pair of hosts by real connections; the hosts run `remote/connectivity.py`.

Each host listens once and connects to all its peers at once, so that the number of requests grows with the hosts, not
with the pairs. Only the short bursts that measure goodput take turns, so that they do not disturb each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec

from evener.core.base.errors import HostError
from evener.core.base.units import median, percentile
from evener.doctor.facts import HostFacts
from evener.doctor.interfaces import SocketInterface, choose_interface, order_candidates
from evener.ssh.session import RemoteError, Sessions

CONNECT_TIMEOUT_S = 2.2  # the second SYN is sent after one second, so that a lost packet does not look like a firewall
REACHABILITY_TIMEOUT_S = 1.3  # to choose an interface: what is closed then is tried again, on the interface chosen
NUM_RANDOM_PORTS = 2  # random ports of the system's range, besides the one that the kernel chooses
SENDER_LIMITED_BPS = 500e6  # a faster link is measured once: the sender is the limit
MAX_ALL_PAIRS_HOSTS = 4  # hosts: up to so many, goodput is measured between all of them; above, between ring neighbours
BURST_S, WARMUP_S = 0.16, 0.06
LONG_BURST_S, LONG_WARMUP_S = 0.5, 0.15  # a doubtful figure is measured again

ConnectOutcome = Literal["ok", "refused", "timeout", "unreachable", "stranger", "untried"]
R = TypeVar("R")


class ConnectAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One connection attempt."""

    what: Literal["rendezvous", "ephemeral", "ssh"]
    port: int
    result: ConnectOutcome
    detail: str | None = None


class PairConnectivity(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements from one host to another."""

    source: str
    target: str
    tries: list[ConnectAttempt] = []
    sent_from: str | None = None  # the address that the source's kernel chose
    answered_by: str | None = None  # MAC that answers for the target's address; asked if a port did not
    rtt_s: float | None = None  # median
    rtt_p05_s: float | None = None
    rtt_p95_s: float | None = None
    large: Literal["ok", "stalled", "failed"] | None = None  # a message of 256 KiB
    path_mtu: int | None = None
    goodput_Bps: float | None = None  # of one TCP stream, for a fifth of a second
    retransmits: int | None = None
    segments: int | None = None

    def failed_attempts(self, what: str) -> list[ConnectAttempt]:
        """Return the failed attempts on ports of one kind: "rendezvous", "ephemeral" or "ssh"."""
        return [attempt for attempt in self.tries if attempt.what == what and attempt.result not in ("ok", "untried")]

    @property
    def is_open(self) -> bool:
        """Return whether every port answered."""
        return not self.failed_attempts("rendezvous") and not self.failed_attempts("ephemeral")


class ConnectivityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements between all hosts."""

    interfaces: dict[str, SocketInterface]  # by host
    pairs: list[PairConnectivity] = []
    resolved: dict[str, dict[str, list[str] | None]] = {}  # by host, by name
    reached: dict[str, dict[str, int | None]] = {}  # by host, by its own address: how many peers reached it


class HostFanout:
    """Calls functions on all hosts at once. A host that is lost is left out of later calls."""

    def __init__(self, sessions: Sessions, errors: dict[str, HostError]) -> None:
        self.sessions, self._errors = sessions, errors

    def call_connectivity(
        self, names: Sequence[str], function: str, args: Callable[[str], dict[str, Any]]
    ) -> dict[str, Any]:
        """Call a function of `remote/connectivity.py`; return {host: result}, without the hosts that failed."""

        def work(name: str) -> Any:
            return self.sessions[name].call("connectivity", function, **args(name))

        return {name: value for name, value in self.map_hosts(names, work).items() if value is not None}

    def map_hosts(self, names: Sequence[str], work: Callable[[str], R]) -> dict[str, R | None]:
        """Return {host: work(host)}; None if the host was lost or its function raised."""
        alive = [name for name in names if name not in self._errors]
        if not alive:
            return {}
        with ThreadPoolExecutor(max_workers=len(alive)) as pool:
            return dict(zip(alive, pool.map(lambda name: self._run_or_record_error(name, work), alive), strict=True))

    def _run_or_record_error(self, name: str, work: Callable[[str], R]) -> R | None:
        try:
            return work(name)
        except HostError as error:
            self._errors[name] = error
        except RemoteError as error:
            self._errors[name] = HostError(
                f"{name}: cannot be examined: {error.kind}: {error.message}", check="ssh.unreachable", host=name,
                output=error.traceback, hint="this is a bug in evener: please report it",
            )  # fmt: skip
        return None


def probe_connectivity(
    fanout: HostFanout,
    facts: Mapping[str, HostFacts],
    candidates: Mapping[str, Sequence[SocketInterface]],
    *,
    port: int,
    ssh_ports: Mapping[str, int],
    names: Sequence[str],
    quick: bool,
    notify: Callable[[str], None] = lambda text: None,
) -> ConnectivityReport:
    """Choose an interface for each host by trying its candidates, then probe every ordered pair on those chosen."""
    secret = secrets.token_hex(16)
    identities = {name: secrets.token_hex(16) for name in facts}
    ordered = order_candidates(candidates, facts)
    hosts = [name for name in ordered if ordered[name]]
    notify("listening on every host")
    listening = fanout.call_connectivity(hosts, "listen", lambda name: {
        "addresses": [candidate.address for candidate in ordered[name]], "secret": secret, "identity": identities[name],
        "port": port, "more": NUM_RANDOM_PORTS, "low": facts[name].port_range[0], "high": facts[name].port_range[1],
        "avoid": facts[name].run_ports,
    })  # fmt: skip
    hosts = list(listening)
    usable = {
        name: [candidate for candidate in ordered[name] if not listening[name][candidate.address]["error"]]
        for name in hosts
    }
    hosts = [name for name in hosts if usable[name]]
    try:
        reached = _count_reachable(fanout, hosts, usable, listening, identities, secret)
        chosen = {name: choose_interface(usable[name], reached[name], len(hosts) - 1, facts[name]) for name in hosts}
        notify("connecting every host to every other")
        pairs = _try_ports(fanout, hosts, chosen, listening, identities, secret, port, ssh_ports)
        pairs = _resolve_answering_macs(fanout, chosen, pairs)
        resolved = fanout.call_connectivity(hosts, "resolve", lambda name: {"names": list(names)})
        pairs = _measure_latency_and_mtu(fanout, hosts, chosen, listening, secret, pairs)
        if not quick:
            pairs = _measure_goodput(fanout, hosts, chosen, listening, secret, pairs, notify)
    finally:
        fanout.call_connectivity(list(listening), "close", lambda name: {})
    return ConnectivityReport(interfaces=chosen, pairs=list(pairs.values()), resolved=resolved, reached=reached)


PairTable = dict[tuple[str, str], PairConnectivity]
ListeningPorts = Mapping[str, dict[str, dict[str, Any]]]


def _count_reachable(
    fanout: HostFanout,
    hosts: list[str],
    candidates: Mapping[str, list[SocketInterface]],
    listening: ListeningPorts,
    identities: Mapping[str, str],
    secret: str,
) -> dict[str, dict[str, int | None]]:
    """Return {host: {address: number of peers that reached it}}; assume all did if no host has a choice."""
    if all(len(candidates[name]) == 1 for name in hosts):
        return {name: {candidates[name][0].address: len(hosts) - 1} for name in hosts}
    targets = {
        source: [
            {"peer": target, "address": candidate.address, "port": listening[target][candidate.address]["ephemeral"],
             "identity": identities[target], "rank": rank}
            for target in hosts if target != source for rank, candidate in enumerate(candidates[target])
        ]
        for source in hosts
    }  # fmt: skip
    results = fanout.call_connectivity(
        hosts, "connect", lambda name: {"targets": targets[name], "secret": secret, "within_s": REACHABILITY_TIMEOUT_S}
    )
    reached: dict[str, dict[str, int | None]] = {
        name: dict.fromkeys(candidate.address for candidate in candidates[name]) for name in hosts
    }
    for source, outcomes in results.items():
        for target, outcome in zip(targets[source], outcomes, strict=True):
            if outcome["result"] != "untried":
                counts = reached[target["peer"]]
                counts[target["address"]] = (counts[target["address"]] or 0) + (outcome["result"] == "ok")
    return reached


def _try_ports(
    fanout: HostFanout,
    hosts: list[str],
    interfaces: Mapping[str, SocketInterface],
    listening: ListeningPorts,
    identities: Mapping[str, str],
    secret: str,
    port: int,
    ssh_ports: Mapping[str, int],
) -> PairTable:
    """Try the rendezvous port and the ephemeral ones from every host to every other, and ssh's port for comparison."""
    targets: dict[str, list[dict[str, Any]]] = {source: [] for source in hosts}
    for source in hosts:
        for target in hosts:
            if target == source:
                continue
            listener = listening[target][interfaces[target].address]
            ports = [("ephemeral", number) for number in (listener["ephemeral"], *listener["more"])]
            if listener["rendezvous"]:
                ports.append(("rendezvous", port))
            if target in ssh_ports:
                ports.append(("ssh", ssh_ports[target]))
            targets[source] += [
                {"peer": target, "what": kind, "address": interfaces[target].address, "port": number,
                 "rank": int(kind == "ssh"), "identity": None if kind == "ssh" else identities[target]}
                for kind, number in ports
            ]  # fmt: skip
    results = fanout.call_connectivity(
        hosts, "connect", lambda name: {"targets": targets[name], "secret": secret, "within_s": CONNECT_TIMEOUT_S}
    )
    pairs: PairTable = {}
    for source, outcomes in results.items():
        for request, outcome in zip(targets[source], outcomes, strict=True):
            key = (source, request["peer"])
            pair = pairs.setdefault(key, PairConnectivity(source=source, target=request["peer"]))
            attempt = ConnectAttempt(
                what=request["what"], port=request["port"], result=outcome["result"], detail=outcome["detail"]
            )
            pairs[key] = msgspec.structs.replace(
                pair, tries=[*pair.tries, attempt], sent_from=pair.sent_from or outcome["source"]
            )
    return pairs


def _resolve_answering_macs(
    fanout: HostFanout, interfaces: Mapping[str, SocketInterface], pairs: PairTable
) -> PairTable:
    """Add to pairs that are not open the MAC address that answers for the target: if another machine has the target's
    address, that looks like a firewall."""
    addresses: dict[str, list[str]] = {}
    for (source, target), pair in pairs.items():
        if not pair.is_open:
            addresses.setdefault(source, []).append(interfaces[target].address)
    macs = fanout.call_connectivity(list(addresses), "arp_neighbours", lambda name: {"addresses": addresses[name]})
    return {
        (source, target): msgspec.structs.replace(
            pair, answered_by=macs.get(source, {}).get(interfaces[target].address)
        )
        for (source, target), pair in pairs.items()
    }


def _choose_probe_target(
    pair: PairConnectivity, interfaces: Mapping[str, SocketInterface], listening: ListeningPorts
) -> dict[str, Any] | None:
    """Return the target's {"address", "port", "udp", "mtu"} with a port that answered; None if none did."""
    address = interfaces[pair.target].address
    port = next((attempt.port for attempt in pair.tries if attempt.result == "ok" and attempt.what != "ssh"), None)
    if port is None:
        return None
    mtus = [mtu for mtu in (interfaces[pair.source].mtu, interfaces[pair.target].mtu) if mtu is not None]
    udp = listening[pair.target][address]["udp"]
    return {"address": address, "port": port, "udp": udp, "mtu": min(mtus, default=1500)}


def _measure_latency_and_mtu(
    fanout: HostFanout,
    hosts: list[str],
    interfaces: Mapping[str, SocketInterface],
    listening: ListeningPorts,
    secret: str,
    pairs: PairTable,
) -> PairTable:
    """Measure round trips of small messages, while the links are idle; then send a large message and large packets."""
    open_targets = {
        key: target for key, pair in pairs.items() if (target := _choose_probe_target(pair, interfaces, listening))
    }
    keys = {source: [key for key in open_targets if key[0] == source] for source in hosts}
    targets = {source: [open_targets[key] for key in keys[source]] for source in hosts}
    measured = dict(pairs)
    trips = fanout.call_connectivity(hosts, "round_trips", lambda name: {"targets": targets[name], "secret": secret})
    for source, results in trips.items():
        for key, seconds in zip(keys[source], results, strict=True):
            if seconds:
                measured[key] = msgspec.structs.replace(
                    measured[key],
                    rtt_s=median(seconds),
                    rtt_p05_s=percentile(seconds, 0.05),
                    rtt_p95_s=percentile(seconds, 0.95),
                )
    for source, results in fanout.call_connectivity(
        hosts, "probe_mtu", lambda name: {"targets": targets[name], "secret": secret}
    ).items():
        for key, outcome in zip(keys[source], results, strict=True):
            measured[key] = msgspec.structs.replace(measured[key], **outcome)
    return measured


def _measure_goodput(
    fanout: HostFanout,
    hosts: list[str],
    interfaces: Mapping[str, SocketInterface],
    listening: ListeningPorts,
    secret: str,
    pairs: PairTable,
    notify: Callable[[str], None],
) -> PairTable:
    """Measure goodput, one pair after another. Repeat doubtful measurements for longer, and keep the better."""
    measured = dict(pairs)

    def burst(key: tuple[str, str], seconds: float, warm_s: float) -> None:
        target = _choose_probe_target(measured[key], interfaces, listening)
        if target is None or measured[key].large != "ok":
            return
        notify(f"measuring {key[0]} to {key[1]}")
        result = fanout.call_connectivity(
            [key[0]],
            "measure_goodput",
            lambda name: {"target": target, "secret": secret, "seconds": seconds, "warm_s": warm_s},
        ).get(key[0])
        if result and result["goodput_Bps"] > (measured[key].goodput_Bps or 0.0):
            measured[key] = msgspec.structs.replace(
                measured[key],
                goodput_Bps=result["goodput_Bps"],
                retransmits=result["retransmits"],
                segments=result["segments"],
            )

    keys = [key for key in goodput_pairs(hosts) if key in measured]
    for key in keys:
        burst(key, BURST_S, WARMUP_S)
    for key in pairs_to_remeasure({key: measured[key] for key in keys}):
        burst(key, LONG_BURST_S, LONG_WARMUP_S)
    return measured


def goodput_pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs whose goodput is measured: all ordered pairs of a few hosts, else ring neighbours, both ways.

    >>> goodput_pairs(["a", "b"])
    [('a', 'b'), ('b', 'a')]
    >>> len(goodput_pairs(list("abcdefgh")))
    16
    """
    if len(hosts) <= MAX_ALL_PAIRS_HOSTS:
        return [(a, b) for a in hosts for b in hosts if a != b]
    ring = [(hosts[i], hosts[(i + 1) % len(hosts)]) for i in range(len(hosts))]
    return [pair for a, b in ring for pair in ((a, b), (b, a))]


def pairs_to_remeasure(pairs: Mapping[tuple[str, str], PairConnectivity]) -> list[tuple[str, str]]:
    """Return at most 16 pairs whose goodput is doubtful: low in itself or next to others, or with many retransmits."""
    known = {key: pair.goodput_Bps for key, pair in pairs.items() if pair.goodput_Bps}
    best = max(known.values(), default=0.0)
    selected = []
    for key, goodput in known.items():
        reverse = known.get((key[1], key[0]), goodput)
        loss = (pairs[key].retransmits or 0) / (pairs[key].segments or 1)
        slow = goodput < SENDER_LIMITED_BPS and (goodput < best / 2 or goodput < reverse / 1.4 or goodput < 20e6)
        if slow or loss > 0.005:
            selected.append(key)
    return selected[:16]
