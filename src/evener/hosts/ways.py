"""Choose the interface and address of each host, from its candidates and what its peers reached. Pure.

Gloo is given one exact interface name (GLOO_SOCKET_IFNAME) and binds that interface's first address, so a candidate is
an interface with its first address. The order of preference: reached by more peers; a network card before a tunnel
before the internal bridge of Docker or of virtual machines; wired before wireless; faster; in a network that all hosts
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from evener.core.fleet import Host
from evener.hosts.facts import Address, Facts, Interface, Kind

CLASS: dict[Kind, int] = {
    "wired": 0, "wireless": 0, "tunnel": 1, "wireguard": 1, "bridge": 2, "docker": 2, "virtual": 2, "loopback": 3,
}  # fmt: skip
WORDS: dict[Kind, str] = {
    "wired": "wired", "wireless": "wireless", "tunnel": "a tunnel", "wireguard": "WireGuard", "bridge": "a bridge",
    "docker": "Docker's bridge", "virtual": "virtual", "loopback": "loopback",
}  # fmt: skip
NAMED = "named in the fleet file"


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """The interface and address that a host binds and the others connect to, and why this one."""

    interface: str
    address: str
    kind: Kind
    why: str
    mtu: int | None = None
    network: str | None = None  # that the address belongs to


def ways_of(facts: Facts, host: Host) -> list[Way]:
    """Return what a host may use, in the order of its interfaces; an `interface` that the fleet file names comes first.

    The others are tried all the same, to know whether they would be better. If the host lacks the named interface, or
    it has no address, return nothing: that is an error, and no other is silently used instead.
    """
    candidates: list[Way] = []
    for interface in facts.interfaces:
        if interface.name == host.interface and interface.first is not None and interface.up:
            candidates.insert(0, _way(interface, interface.first, NAMED))
        elif (
            interface.up
            and interface.kind != "loopback"
            and interface.first is not None
            and not interface.first.ip.is_link_local
        ):
            candidates.append(_way(interface, interface.first, ""))
    is_named = any(candidate.why == NAMED for candidate in candidates)
    return [] if host.interface is not None and not is_named else candidates


def in_order(ways: Mapping[str, Sequence[Way]], facts: Mapping[str, Facts]) -> dict[str, list[Way]]:
    """Return each host's candidates, the likely best first, before any was tried."""
    num_hosts: dict[str, int] = {}
    for options in ways.values():
        for network in {candidate.network for candidate in options if candidate.network is not None}:
            num_hosts[network] = num_hosts.get(network, 0) + 1
    worst: dict[str | None, tuple[int, bool]] = {}  # by network: two hosts connect on it only as well as the worse
    for candidate in (candidate for options in ways.values() for candidate in options):
        quality = (CLASS[candidate.kind], candidate.kind != "wired")
        worst[candidate.network] = max(worst.get(candidate.network, quality), quality)
    addresses = [candidate.address for options in ways.values() for candidate in options]
    ordered = {}
    for name, options in ways.items():
        ordered[name] = sorted(
            options,
            key=lambda candidate: (
                candidate.why != NAMED,
                addresses.count(candidate.address) > 1,  # the same on two hosts: each would connect to itself
                CLASS[candidate.kind],
                num_hosts.get(candidate.network or "", 0) < len(ways),
                worst[candidate.network],
                candidate.kind != "wired",
                -(_speed(facts[name], candidate) or 0),
            ),
        )
    return ordered


def choose(ways: Sequence[Way], reached: Mapping[str, int | None], num_peers: int, facts: Facts) -> Way:
    """Return the interface to use. `candidates` in order; `reached`: by address, how many peers did, None = untried.

    An untried one ranks behind one that all peers reached: peers stop trying once they have reached a better one.
    """
    named = next((candidate for candidate in ways if candidate.why == NAMED), None)
    if named is not None:
        return named
    order = {candidate.address: i for i, candidate in enumerate(ways)}
    best = min(
        ways,
        key=lambda candidate: (
            -(reached.get(candidate.address) or 0),
            CLASS[candidate.kind],
            candidate.kind != "wired",
            -(_speed(facts, candidate) or 0),
            order[candidate.address],
        ),
    )
    return msgspec.structs.replace(best, why=_why(best, ways, reached, num_peers))


def only_host(facts: Facts, host: Host) -> Way:
    """Return the interface for a fleet of one host: the one the fleet file names, else the loopback."""
    if host.interface is not None:
        named = ways_of(facts, host)
        if named:
            return named[0]
    loopback = next(
        (interface for interface in facts.interfaces if interface.kind == "loopback" and interface.first), None
    )
    if loopback is None:
        return Way(interface="lo", address="127.0.0.1", kind="loopback", why="the only host: nothing leaves it")
    assert loopback.first is not None
    return _way(loopback, loopback.first, "the only host: nothing leaves it")


def _why(best: Way, ways: Sequence[Way], reached: Mapping[str, int | None], num_peers: int) -> str:
    count = reached.get(best.address) or 0
    others = [candidate for candidate in ways if candidate.address != best.address]
    if count == num_peers:
        reach = "every other host reaches it" if num_peers > 1 else "the other host reaches it"
    elif count:
        reach = f"{count} of {num_peers} other hosts reach it"
    else:
        reach = "no other host reached it" if others else "it has no other"
    rejected = _listed(f"{candidate.interface}" for candidate in others)
    return f"{WORDS[best.kind]}; {reach}" + (f"; rather than {rejected}" if rejected and count else "")


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _way(interface: Interface, address: Address, why: str) -> Way:
    return Way(interface=interface.name, address=address.address, kind=interface.kind, why=why, mtu=interface.mtu,
               network=address.network)  # fmt: skip


def _speed(facts: Facts, way: Way) -> int | None:
    nic = facts.interface(way.interface)
    return nic.speed_Mbit if nic is not None and nic.is_physical else None
