"""Choose the interface and address of each host, from its candidates and what its peers reached. Pure.

Gloo is given one exact interface name (GLOO_SOCKET_IFNAME) and binds that interface's first address, so a candidate is
an interface with its first address. The order of preference: reached by more peers; a network card before a tunnel
before the internal bridge of Docker or of virtual machines; wired before wireless; faster; in a network that all hosts
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from evener.core.cluster.fleet_file import HostConfig
from evener.doctor.facts import HostFacts, InterfaceAddress, InterfaceKind, NetworkInterface

KIND_PREFERENCE: dict[InterfaceKind, int] = {
    "wired": 0, "wireless": 0, "tunnel": 1, "wireguard": 1, "bridge": 2, "docker": 2, "virtual": 2, "loopback": 3,
}  # fmt: skip
KIND_LABELS: dict[InterfaceKind, str] = {
    "wired": "wired", "wireless": "wireless", "tunnel": "a tunnel", "wireguard": "WireGuard", "bridge": "a bridge",
    "docker": "Docker's bridge", "virtual": "virtual", "loopback": "loopback",
}  # fmt: skip
NAMED_IN_FLEET_FILE = "named in the fleet file"


class SocketInterface(msgspec.Struct, frozen=True, kw_only=True):
    """The interface and address that a host binds and the others connect to, and why this one."""

    interface: str
    address: str
    kind: InterfaceKind
    why: str
    mtu: int | None = None
    network: str | None = None  # that the address belongs to


def candidate_interfaces(facts: HostFacts, host: HostConfig) -> list[SocketInterface]:
    """Return the interfaces that a host may use, in the order of `facts`; one that the fleet file names comes first.

    The others are tried as well, to report whether they would be better. If the named interface is missing, down or
    without an address, return []: that is an error, and no other is silently used instead.
    """
    candidates: list[SocketInterface] = []
    for interface in facts.interfaces:
        if interface.name == host.interface and interface.first_address is not None and interface.up:
            candidates.insert(0, _make_socket_interface(interface, interface.first_address, NAMED_IN_FLEET_FILE))
        elif (
            interface.up
            and interface.kind != "loopback"
            and interface.first_address is not None
            and not interface.first_address.ip.is_link_local
        ):
            candidates.append(_make_socket_interface(interface, interface.first_address, ""))
    is_named = any(candidate.why == NAMED_IN_FLEET_FILE for candidate in candidates)
    return [] if host.interface is not None and not is_named else candidates


def order_candidates(
    candidates: Mapping[str, Sequence[SocketInterface]], facts: Mapping[str, HostFacts]
) -> dict[str, list[SocketInterface]]:
    """Return each host's candidates, the likely best first, before any was tried."""
    num_hosts: dict[str, int] = {}
    for options in candidates.values():
        for network in {candidate.network for candidate in options if candidate.network is not None}:
            num_hosts[network] = num_hosts.get(network, 0) + 1
    worst: dict[str | None, tuple[int, bool]] = {}  # by network: two hosts connect on it only as well as the worse
    for candidate in (candidate for options in candidates.values() for candidate in options):
        quality = (KIND_PREFERENCE[candidate.kind], candidate.kind != "wired")
        worst[candidate.network] = max(worst.get(candidate.network, quality), quality)
    addresses = [candidate.address for options in candidates.values() for candidate in options]
    ordered = {}
    for name, options in candidates.items():
        ordered[name] = sorted(
            options,
            key=lambda candidate: (
                candidate.why != NAMED_IN_FLEET_FILE,
                addresses.count(candidate.address) > 1,  # the same on two hosts: each would connect to itself
                KIND_PREFERENCE[candidate.kind],
                num_hosts.get(candidate.network or "", 0) < len(candidates),
                worst[candidate.network],
                candidate.kind != "wired",
                -(_nic_speed_Mbit(facts[name], candidate) or 0),
            ),
        )
    return ordered


def choose_interface(
    candidates: Sequence[SocketInterface], reached: Mapping[str, int | None], num_peers: int, facts: HostFacts
) -> SocketInterface:
    """Return the interface to use. `reached`: how many peers reached each address; None: none of them tried it.

    An untried address counts as reached by none: peers stop trying once they have reached a better one.
    """
    named = next((candidate for candidate in candidates if candidate.why == NAMED_IN_FLEET_FILE), None)
    if named is not None:
        return named
    order = {candidate.address: i for i, candidate in enumerate(candidates)}
    best = min(
        candidates,
        key=lambda candidate: (
            -(reached.get(candidate.address) or 0),
            KIND_PREFERENCE[candidate.kind],
            candidate.kind != "wired",
            -(_nic_speed_Mbit(facts, candidate) or 0),
            order[candidate.address],
        ),
    )
    return msgspec.structs.replace(best, why=_choice_reason(best, candidates, reached, num_peers))


def single_host_interface(facts: HostFacts, host: HostConfig) -> SocketInterface:
    """Return the interface for a fleet of one host: the one the fleet file names, else the loopback."""
    if host.interface is not None:
        named = candidate_interfaces(facts, host)
        if named:
            return named[0]
    loopback = next(
        (interface for interface in facts.interfaces if interface.kind == "loopback" and interface.first_address), None
    )
    if loopback is None:
        return SocketInterface(
            interface="lo", address="127.0.0.1", kind="loopback", why="the only host: nothing leaves it"
        )
    assert loopback.first_address is not None
    return _make_socket_interface(loopback, loopback.first_address, "the only host: nothing leaves it")


def _choice_reason(
    best: SocketInterface, candidates: Sequence[SocketInterface], reached: Mapping[str, int | None], num_peers: int
) -> str:
    count = reached.get(best.address) or 0
    others = [candidate for candidate in candidates if candidate.address != best.address]
    if count == num_peers:
        reach = "every other host reaches it" if num_peers > 1 else "the other host reaches it"
    elif count:
        reach = f"{count} of {num_peers} other hosts reach it"
    else:
        reach = "no other host reached it" if others else "it has no other"
    rejected = _join_names(f"{candidate.interface}" for candidate in others)
    return f"{KIND_LABELS[best.kind]}; {reach}" + (f"; rather than {rejected}" if rejected and count else "")


def _join_names(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _make_socket_interface(interface: NetworkInterface, address: InterfaceAddress, why: str) -> SocketInterface:
    return SocketInterface(
        interface=interface.name,
        address=address.address,
        kind=interface.kind,
        why=why,
        mtu=interface.mtu,
        network=address.network,
    )


def _nic_speed_Mbit(facts: HostFacts, interface: SocketInterface) -> int | None:
    nic = facts.find_interface(interface.interface)
    return nic.speed_Mbit if nic is not None and nic.is_physical else None
