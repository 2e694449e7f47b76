"""Check that only hosts of a run can connect to its ports (`--private`): torch's stores and Gloo have no password.

An nftables table on each host refuses new connections to the run's ports from everybody else. evener installs no rules
itself, as that takes root: it checks whether they are in place, and prints the command.

    the table can be read (root, or sudo without a password)   compare its rules
    else, if this machine is not of the run                    a port that listens there must not answer
    else                                                       report that it is not known
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
CONNECT_S = 2.2  # as between hosts: a lost packet must not look like a firewall
INSTEAD = "a network of its own, or WireGuard's or Tailscale's interface in the fleet file, protects it too"

State = Literal["stands", "differs", "absent", "closed", "open", "untold", "none"]


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """How the ports of one host are protected, and the rules that protect them."""

    state: State  # closed, open: detected by connecting; none: no nftables there
    rules: str  # commands for nft


def rules_of(name: str, facts: Facts, network: Network, port: int, ssh_port: int) -> str:
    """Return the commands for nft on a host, in one line: they replace the table by a new one."""
    interface, (low, high) = network.ways[name], facts.port_range
    kinds = {4: ("hosts4", "ipv4_addr", "ip"), 6: ("hosts6", "ipv6_addr", "ip6")}
    sets, accepts = [], []
    for version, (label, kind, family) in kinds.items():
        members = [str(ip) for ip in sorted(addresses(network), key=int) if ip.version == version]
        if members:
            sets.append(f"set {label} {{ type {kind}; elements = {{ {', '.join(members)} }}; }};")
            accepts.append(f"{family} saddr @{label} accept;")
    run_port = RENDEZVOUS_PORT if low <= port <= high else port  # a port taken instead is in the range
    own_ip = ipaddress.ip_address(interface.address.partition("%")[0])
    body = [
        "type filter hook input priority -10; policy accept;",
        'iifname "lo" accept;',
        "ct state established,related accept;",
        f"tcp dport {ssh_port} accept;",
        *accepts,
        f"{kinds[own_ip.version][2]} daddr {own_ip} tcp dport {{ {run_port}, {low}-{high} }}",
    ]
    text = f"{' '.join(sets)} chain input {{ {' '.join(body)}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    table = f'table inet {TABLE} {{ {text} drop comment "{digest}"; }}; }};'
    return f"add table inet {TABLE}; delete table inet {TABLE}; {table}"


def addresses(network: Network) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses from which hosts of the run connect, and to which."""
    texts = [interface.address for interface in network.ways.values()]
    texts += [pair.sent_from for pair in network.pairs if pair.sent_from]
    return {ipaddress.ip_address(text.partition("%")[0]) for text in texts}


def stands(found: list[dict[str, Any]], rules: str, network: Network) -> bool:
    """Return whether a table, as nft lists it in JSON, is the one that these rules make."""
    objects = [(kind, item) for entry in found for kind, item in entry.items()]
    table_rules = [item for kind, item in objects if kind == "rule"]
    members = {str(member) for kind, item in objects if kind == "set" for member in item.get("elem", [])}
    hooked = any(kind == "chain" and item.get("hook") == "input" for kind, item in objects)
    digest = rules.rpartition('comment "')[2].partition('"')[0]
    return (hooked and len(table_rules) == rules.count(" accept;") - rules.count("policy accept;") + 1
            and table_rules[-1].get("comment") == digest and {"drop": None} in table_rules[-1].get("expr", [])
            and members == {str(entry) for entry in addresses(network)})  # fmt: skip


def guards(asker: Asker, fleet: Fleet, facts: Mapping[str, Facts], network: Network, port: int) -> dict[str, Guard]:
    """Return how every host is protected. If its table cannot be read, try to connect, as a machine not of the run."""
    names = [name for name in facts if name in network.ways]
    answers = asker.each(names, lambda name: asker.sessions[name].call("private", "look", table=TABLE))
    protection = {}
    for name, answer in answers.items():
        if answer is None:
            continue
        ssh_port = answer["ssh_port"] or fleet.hosts[name].port or 22
        rules = rules_of(name, facts[name], network, port, ssh_port)
        state: State = "none"
        if answer["told"]:
            state = "absent" if not answer["rules"] else "differs"
            state = "stands" if stands(answer["rules"], rules, network) else state
        elif answer["has_nft"]:
            state = _tried(asker, name, network, ssh_port, port)
        protection[name] = Guard(state=state, rules=rules)
    return protection


def _tried(asker: Asker, name: str, network: Network, ssh_port: int, port: int) -> State:
    """Connect from this machine to a host's ports: "untold" if it is of the run, or cannot reach the host."""
    address = network.ways[name].address
    secret, identity = secrets.token_hex(16), secrets.token_hex(16)
    if not _reaches(address, ssh_port, network):
        return "untold"
    args = {"addresses": [address], "secret": secret, "identity": identity, "port": port}
    listener = asker.ask([name], "listen", lambda _: args).get(name, {}).get(address)
    try:
        if listener is None or listener["error"]:
            return "untold"
        ports = [bound_port for bound_port in (listener["ephemeral"], listener["rendezvous"]) if bound_port]
        return "open" if any(_reaches(address, bound_port, network) for bound_port in ports) else "closed"
    finally:
        asker.ask([name], "close", lambda _: {})


def _reaches(address: str, port: int, network: Network) -> bool:
    """Return whether a connection succeeds, from an address that is not of the run."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_S) as connection:
        return ipaddress.ip_address(connection.getsockname()[0].partition("%")[0]) not in addresses(network)
    return False


def check_private(
    seen_guards: Mapping[str, Guard], ways: Mapping[str, Way], sudo: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a finding for each host. Missing protection is an error: --private asks for no run without it."""
    for name, status in seen_guards.items():
        where = f"{ways[name].address} on {ways[name].interface}"
        removal = f"{sudo[name]}nft delete table inet {TABLE}"
        evidence = {
            "stands": f"only hosts of the run can connect to its ports at {where}; remove with: {removal}",
            "closed": f"this machine, which is not of the run, cannot connect to its ports at {where}; whether others "
            "can is not known: reading its rules needs root, or sudo without a password",
            "differs": f"its table {TABLE} is for other hosts, addresses or ports",
            "absent": f"anybody who reaches {where} can connect to the run's ports: there is no table {TABLE}",
            "open": f"this machine, which is not of the run, can connect to its ports at {where}",
            "untold": f"it is not known if its table {TABLE} is in place: reading it needs root, or sudo without a "
            "password, and this machine is of the run or does not reach it",
            "none": f"there is no nftables: --private cannot tell who can connect at {where}",
        }[status.state]
        severity: Severity = "info" if status.state == "stands" else "warning" if status.state == "closed" else "error"
        command = f"on {name}: {sudo[name]}nft '{status.rules}'"
        if status.state in ("untold", "closed"):
            sudoers_line = (
                f"$USER ALL=(root) NOPASSWD: $(command -v nft || echo /usr/sbin/nft) -j list table inet {TABLE}"
            )
            command += f' && echo "{sudoers_line}" | sudo tee /etc/sudoers.d/evener'
        if status.state == "none":
            command = f"leave out --private; {INSTEAD}"
        yield Finding(check="net.private", severity=severity, host=name, evidence=evidence,
                      fix="" if status.state == "stands" else command)  # fmt: skip
