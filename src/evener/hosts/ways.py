"""Which interface and which address does each host use? Pure: what it may use, and what its peers could really reach.

Gloo is told one exact interface name (GLOO_SOCKET_IFNAME) and binds that interface's first address, so a candidate is
an interface with its first address. Better is: reached by more peers; then a network card before a tunnel before the
inner bridge of Docker or of virtual machines; wired before wireless; faster; in a network that all hosts share.
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
    """How a host takes part: what it binds, what the others connect to, and why this one."""

    interface: str
    address: str
    kind: Kind
    why: str
    mtu: int | None = None
    network: str | None = None  # that the address belongs to


def ways_of(facts: Facts, host: Host) -> list[Way]:
    """What a host may use, in the order of its interfaces; an `interface` that the fleet file names comes first.

    The others are tried all the same, to know whether they would be better. A name that the host does not have, or
    that has no address, leaves nothing: that is an error, and is not quietly replaced.
    """
    found: list[Way] = []
    for one in facts.interfaces:
        if one.name == host.interface and one.first is not None and one.up:
            found.insert(0, _way(one, one.first, NAMED))
        elif one.up and one.kind != "loopback" and one.first is not None and not one.first.ip.is_link_local:
            found.append(_way(one, one.first, ""))
    return [] if host.interface is not None and not any(way.why == NAMED for way in found) else found


def in_order(ways: Mapping[str, Sequence[Way]], facts: Mapping[str, Facts]) -> dict[str, list[Way]]:
    """Each host's ways, what is likely best first, before anything was tried."""
    known: dict[str, int] = {}
    for each in ways.values():
        for network in {way.network for way in each if way.network is not None}:
            known[network] = known.get(network, 0) + 1
    poorest: dict[str | None, tuple[int, bool]] = {}  # way of a network: two hosts meet on it only as well as that
    for way in (way for each in ways.values() for way in each):
        quality = (CLASS[way.kind], way.kind != "wired")
        poorest[way.network] = max(poorest.get(way.network, quality), quality)
    addresses = [way.address for each in ways.values() for way in each]
    ordered = {}
    for name, each in ways.items():
        ordered[name] = sorted(
            each,
            key=lambda way: (
                way.why != NAMED,
                addresses.count(way.address) > 1,  # the same on two hosts: each would talk to itself
                CLASS[way.kind],
                known.get(way.network or "", 0) < len(ways),
                poorest[way.network],
                way.kind != "wired",
                -(_speed(facts[name], way) or 0),
            ),
        )
    return ordered


def choose(ways: Sequence[Way], reached: Mapping[str, int | None], num_peers: int, facts: Facts) -> Way:
    """The way to use. `ways` in order; `reached`: by address, how many peers got through to it, None = untried.

    An untried one stands behind one that all peers reached: whoever tried had found a better one by then.
    """
    named = next((way for way in ways if way.why == NAMED), None)
    if named is not None:
        return named
    order = {way.address: i for i, way in enumerate(ways)}
    best = min(
        ways,
        key=lambda way: (
            -(reached.get(way.address) or 0),
            CLASS[way.kind],
            way.kind != "wired",
            -(_speed(facts, way) or 0),
            order[way.address],
        ),
    )
    return msgspec.structs.replace(best, why=_why(best, ways, reached, num_peers))


def only_host(facts: Facts, host: Host) -> Way:
    """A fleet of one host needs no network."""
    if host.interface is not None:
        named = ways_of(facts, host)
        if named:
            return named[0]
    loopback = next((one for one in facts.interfaces if one.kind == "loopback" and one.first), None)
    if loopback is None:
        return Way(interface="lo", address="127.0.0.1", kind="loopback", why="the only host: nothing leaves it")
    assert loopback.first is not None
    return _way(loopback, loopback.first, "the only host: nothing leaves it")


def _why(best: Way, ways: Sequence[Way], reached: Mapping[str, int | None], num_peers: int) -> str:
    count = reached.get(best.address) or 0
    others = [way for way in ways if way.address != best.address]
    if count == num_peers:
        every = "every other host reaches it" if num_peers > 1 else "the other host reaches it"
    elif count:
        every = f"{count} of {num_peers} other hosts reach it"
    else:
        every = "no other host reached it" if others else "it has no other"
    worse = _listed(f"{way.interface}" for way in others)
    return f"{WORDS[best.kind]}; {every}" + (f"; rather than {worse}" if worse and count else "")


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _way(interface: Interface, address: Address, why: str) -> Way:
    return Way(interface=interface.name, address=address.address, kind=interface.kind, why=why, mtu=interface.mtu,
               network=address.network)  # fmt: skip


def _speed(facts: Facts, way: Way) -> int | None:
    one = facts.interface(way.interface)
    return one.speed_Mbit if one is not None and one.is_physical else None
