"""On which network do hosts meet that share more than one?"""

from __future__ import annotations

from evener.core.fleet import Host
from evener.hosts.facts import Address, Facts, GlooChoice, Interface, Kind
from evener.hosts.ways import choose, in_order, ways_of


def host(**interfaces: tuple[str, Kind]) -> Facts:
    return Facts(
        hostname="h", system="Linux", architecture="x86_64", workdir="/w", python="/p", cores=1, port=29500,
        gloo=GlooChoice(hostname="h", candidates=[], address="127.0.0.1"),
        interfaces=[Interface(name=name, addresses=[Address(address=address, prefix=24)], up=True, kind=kind)
                    for name, (address, kind) in interfaces.items()],
    )  # fmt: skip


def test_a_network_is_as_good_as_its_poorest_way() -> None:
    """a is wired to both networks, b to one of them by Wi-Fi: they meet on the other, and neither half way."""
    facts = {
        "a": host(eth0=("10.0.0.1", "wired"), eth1=("10.1.0.1", "wired")),
        "b": host(wlan0=("10.0.0.2", "wireless"), eth1=("10.1.0.2", "wired")),
    }
    ordered = in_order({name: ways_of(one, Host(address=name)) for name, one in facts.items()}, facts)
    chosen = {name: choose(ways, {way.address: 1 for way in ways}, 1, facts[name]) for name, ways in ordered.items()}
    assert {name: way.interface for name, way in chosen.items()} == {"a": "eth1", "b": "eth1"}
