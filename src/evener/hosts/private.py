"""--private: may hosts of the run alone connect to what it listens on? Stores of torch and Gloo have no password.

A table of nftables' on each host refuses new connections to the run's ports from everybody else. evener makes no rules
itself, for that takes root: it looks whether they stand, and gives the command.

    the table can be read (root, or sudo without a password)   its own rules tell
    else, from a machine that is not of the run                a port that listens there must not answer
    else                                                       nobody can tell, and that is said
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from evener.core.finding import Finding, Severity
from evener.core.fleet import RENDEZVOUS_PORT, Fleet
from evener.hosts.facts import Facts
from evener.hosts.pairs import Asker, Network
from evener.hosts.ways import Way

TABLE = "evener_private"
CONNECT_S = 2.2  # as between hosts: a lost packet is no firewall
INSTEAD = "a network of its own, or WireGuard's or Tailscale's interface in the fleet file, protects it too"

State = Literal["stands", "differs", "absent", "closed", "open", "untold", "none"]


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """What protects the ports of one host, and what would."""

    state: State  # closed, open: found by trying; none: no nftables there
    rules: str  # that protect it, as nft reads them


def rules_of(name: str, facts: Facts, network: Network, port: int, ssh_port: int) -> str:
    """What nft is told on a host: the table, in place of one before, in a line."""
    way, (low, high) = network.ways[name], facts.port_range
    kinds = {4: ("hosts4", "ipv4_addr", "ip"), 6: ("hosts6", "ipv6_addr", "ip6")}
    sets, accepts = [], []
    for version, (label, kind, family) in kinds.items():
        members = [str(one) for one in sorted(addresses(network), key=int) if one.version == version]
        if members:
            sets.append(f"set {label} {{ type {kind}; elements = {{ {', '.join(members)} }}; }};")
            accepts.append(f"{family} saddr @{label} accept;")
    alone = RENDEZVOUS_PORT if low <= port <= high else port  # one that was free instead is among the others
    own = ipaddress.ip_address(way.address.partition("%")[0])
    body = [
        "type filter hook input priority -10; policy accept;",
        'iifname "lo" accept;',
        "ct state established,related accept;",
        f"tcp dport {ssh_port} accept;",
        *accepts,
        f"{kinds[own.version][2]} daddr {own} tcp dport {{ {alone}, {low}-{high} }}",
    ]
    text = f"{' '.join(sets)} chain input {{ {' '.join(body)}"
    mark = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    made = f'table inet {TABLE} {{ {text} drop comment "{mark}"; }}; }};'
    return f"add table inet {TABLE}; delete table inet {TABLE}; {made}"


def addresses(network: Network) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """From which hosts of the run connect, and to which."""
    told = [way.address for way in network.ways.values()]
    told += [pair.sent_from for pair in network.pairs if pair.sent_from]
    return {ipaddress.ip_address(one.partition("%")[0]) for one in told}


def stands(found: list[dict[str, Any]], rules: str, network: Network) -> bool:
    """Is a table, as nft tells it in JSON, the one that these rules make?"""
    kinds = [(kind, item) for one in found for kind, item in one.items()]
    told = [item for kind, item in kinds if kind == "rule"]
    members = {str(member) for kind, item in kinds if kind == "set" for member in item.get("elem", [])}
    hooked = any(kind == "chain" and item.get("hook") == "input" for kind, item in kinds)
    mark = rules.rpartition('comment "')[2].partition('"')[0]
    return (hooked and len(told) == rules.count(" accept;") - rules.count("policy accept;") + 1
            and told[-1].get("comment") == mark and {"drop": None} in told[-1].get("expr", [])
            and members == {str(one) for one in addresses(network)})  # fmt: skip


def guards(asker: Asker, fleet: Fleet, facts: Mapping[str, Facts], network: Network, port: int) -> dict[str, Guard]:
    """How every host is protected. Those whose table nobody may read are tried, where this machine is a stranger."""
    names = [name for name in facts if name in network.ways]
    told = asker.each(names, lambda name: asker.sessions[name].call("private", "look", table=TABLE))
    found = {}
    for name, seen in told.items():
        if seen is None:
            continue
        ssh_port = seen["ssh_port"] or fleet.hosts[name].port or 22
        rules = rules_of(name, facts[name], network, port, ssh_port)
        state: State = "none"
        if seen["told"]:
            state = "absent" if not seen["rules"] else "differs"
            state = "stands" if stands(seen["rules"], rules, network) else state
        elif seen["has_nft"]:
            state = _tried(asker, name, network, ssh_port, port)
        found[name] = Guard(state=state, rules=rules)
    return found


def _tried(asker: Asker, name: str, network: Network, ssh_port: int, port: int) -> State:
    """What this machine finds that connects to a host's ports: untold where it is of the run, or out of reach."""
    address = network.ways[name].address
    secret, identity = secrets.token_hex(16), secrets.token_hex(16)
    if not _reaches(address, ssh_port, network):
        return "untold"
    args = {"addresses": [address], "secret": secret, "identity": identity, "port": port}
    there = asker.ask([name], "listen", lambda _: args).get(name, {}).get(address)
    try:
        if there is None or there["error"]:
            return "untold"
        ports = [one for one in (there["ephemeral"], there["rendezvous"]) if one]
        return "open" if any(_reaches(address, one, network) for one in ports) else "closed"
    finally:
        asker.ask([name], "close", lambda _: {})


def _reaches(address: str, port: int, network: Network) -> bool:
    """Does a connection come about, from an address that is not of the run?"""
    with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_S) as connection:
        return ipaddress.ip_address(connection.getsockname()[0].partition("%")[0]) not in addresses(network)
    return False


def check_private(
    seen_guards: Mapping[str, Guard], ways: Mapping[str, Way], sudo: Mapping[str, str]
) -> Iterator[Finding]:
    """What does not stand is an error: whoever asks for --private wants no run without it."""
    for name, guard in seen_guards.items():
        where = f"{ways[name].address} on {ways[name].interface}"
        away = f"{sudo[name]}nft delete table inet {TABLE}"
        told = {
            "stands": f"only hosts of the run can connect to its ports at {where}; taken away with: {away}",
            "closed": f"this machine, which is not of the run, cannot connect to its ports at {where}; whether others "
            "can, nobody can tell: its rules are read as root, or by sudo without a password",
            "differs": f"its table {TABLE} is not for these hosts, addresses and ports",
            "absent": f"anybody who reaches {where} can connect to the run's ports: there is no table {TABLE}",
            "open": f"this machine, which is not of the run, can connect to its ports at {where}",
            "untold": f"nobody can tell whether its table {TABLE} stands: reading it needs root, or sudo without a "
            "password, and this machine is of the run or does not reach it",
            "none": f"there is no nftables: --private cannot tell who can connect at {where}",
        }[guard.state]
        severity: Severity = "info" if guard.state == "stands" else "warning" if guard.state == "closed" else "error"
        command = f"on {name}: {sudo[name]}nft '{guard.rules}'"
        if guard.state in ("untold", "closed"):
            line = f"$USER ALL=(root) NOPASSWD: $(command -v nft || echo /usr/sbin/nft) -j list table inet {TABLE}"
            command += f' && echo "{line}" | sudo tee /etc/sudoers.d/evener'
        if guard.state == "none":
            command = f"leave out --private; {INSTEAD}"
        yield Finding(check="net.private", severity=severity, host=name, evidence=told,
                      fix="" if guard.state == "stands" else command)  # fmt: skip
