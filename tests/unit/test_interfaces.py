"""Choose the network on which hosts connect if they share several."""

from __future__ import annotations

from evener.core.cluster.fleet_file import HostConfig
from evener.doctor.facts import GlooDefaultAddress, HostFacts, InterfaceAddress, InterfaceKind, NetworkInterface
from evener.doctor.interfaces import candidate_interfaces, choose_interface, order_candidates


def host(**interfaces: tuple[str, InterfaceKind]) -> HostFacts:
    return HostFacts(
        hostname="h",
        system="Linux",
        architecture="x86_64",
        workdir="/w",
        python="/p",
        cores=1,
        port=29500,
        gloo=GlooDefaultAddress(hostname="h", candidates=[], address="127.0.0.1"),
        interfaces=[
            NetworkInterface(name=name, addresses=[InterfaceAddress(address=address, prefix=24)], up=True, kind=kind)
            for name, (address, kind) in interfaces.items()
        ],
    )


def test_network_order_follows_its_slowest_interface() -> None:
    """a is wired to both networks, b to one of them by Wi-Fi: they meet on the other, and neither half way."""
    facts = {
        "a": host(eth0=("10.0.0.1", "wired"), eth1=("10.1.0.1", "wired")),
        "b": host(wlan0=("10.0.0.2", "wireless"), eth1=("10.1.0.2", "wired")),
    }
    ordered = order_candidates(
        {name: candidate_interfaces(one, HostConfig(address=name)) for name, one in facts.items()}, facts
    )
    chosen = {
        name: choose_interface(ways, {way.address: 1 for way in ways}, 1, facts[name]) for name, ways in ordered.items()
    }
    assert {name: way.interface for name, way in chosen.items()} == {"a": "eth1", "b": "eth1"}
