"""Check that only hosts of a run can connect to its ports (`--private`): torch's stores and Gloo have no password.

An nftables table on each host refuses new connections to the run's ports from everybody else. evener installs no rules
itself, as that takes root: it checks whether they are in place, and prints the command.

    the table can be read (root, or sudo without a password)   compare its rules
    else, if this machine is not of the run                    a port that listens there must not answer
    else                                                       report that the protection is not known
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

from evener.core.base.shell import quote_word
from evener.core.cluster.finding import Finding, Severity
from evener.core.cluster.fleet_file import DEFAULT_SSH_PORT, RENDEZVOUS_PORT, Fleet
from evener.doctor.connectivity import CONNECT_TIMEOUT_S, ConnectivityReport, HostFanout
from evener.doctor.facts import HostFacts
from evener.doctor.interfaces import SocketInterface

NFT_TABLE = "evener_private"
ALTERNATIVE_HINT = "a network of its own, or WireGuard's or Tailscale's interface in the fleet file, protects it too"

FirewallState = Literal["stands", "differs", "absent", "closed", "open", "untold", "none"]


class PortProtection(msgspec.Struct, frozen=True, kw_only=True):
    """How the ports of one host are protected, and the rules that protect them."""

    state: FirewallState  # closed, open: detected by connecting; none: no nftables there
    rules: str  # commands for nft


def build_nft_rules(name: str, facts: HostFacts, network: ConnectivityReport, port: int, ssh_port: int) -> str:
    """Return the nft commands, in one line, for a table by which a host admits only hosts of the run to its ports."""
    interface, (low, high) = network.interfaces[name], facts.port_range
    kinds = {4: ("hosts4", "ipv4_addr", "ip"), 6: ("hosts6", "ipv6_addr", "ip6")}
    sets, accepts = [], []
    for version, (label, kind, family) in kinds.items():
        members = [str(ip) for ip in sorted(member_addresses(network), key=int) if ip.version == version]
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
    table = f'table inet {NFT_TABLE} {{ {text} drop comment "{digest}"; }}; }};'
    return f"add table inet {NFT_TABLE}; delete table inet {NFT_TABLE}; {table}"


def member_addresses(network: ConnectivityReport) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return all addresses of the run's hosts: those that they connect from and those that they are reached at."""
    texts = [interface.address for interface in network.interfaces.values()]
    texts += [pair.sent_from for pair in network.pairs if pair.sent_from]
    return {ipaddress.ip_address(text.partition("%")[0]) for text in texts}


def matches_rules(listed: list[dict[str, Any]], rules: str, network: ConnectivityReport) -> bool:
    """Return whether `listed`, a table as nft prints it in JSON, is the one that the commands `rules` create."""
    objects = [(kind, item) for entry in listed for kind, item in entry.items()]
    table_rules = [item for kind, item in objects if kind == "rule"]
    members = {str(member) for kind, item in objects if kind == "set" for member in item.get("elem", [])}
    hooked = any(kind == "chain" and item.get("hook") == "input" for kind, item in objects)
    digest = rules.rpartition('comment "')[2].partition('"')[0]
    return (hooked and len(table_rules) == rules.count(" accept;") - rules.count("policy accept;") + 1
            and table_rules[-1].get("comment") == digest and {"drop": None} in table_rules[-1].get("expr", [])
            and members == {str(entry) for entry in member_addresses(network)})  # fmt: skip


def inspect_port_protection(
    fanout: HostFanout, fleet: Fleet, facts: Mapping[str, HostFacts], network: ConnectivityReport, port: int
) -> dict[str, PortProtection]:
    """Return how each host's ports are protected. If its table cannot be read, try to connect from this machine."""
    names = [name for name in facts if name in network.interfaces]
    answers = fanout.map_hosts(
        names, lambda name: fanout.sessions[name].call("facts", "read_nft_table", table=NFT_TABLE)
    )
    protection = {}
    for name, answer in answers.items():
        if answer is None:
            continue
        ssh_port = answer["ssh_port"] or fleet.hosts[name].port or DEFAULT_SSH_PORT
        rules = build_nft_rules(name, facts[name], network, port, ssh_port)
        state: FirewallState = "none"
        if answer["is_readable"]:
            state = "absent" if not answer["rules"] else "differs"
            state = "stands" if matches_rules(answer["rules"], rules, network) else state
        elif answer["has_nft"]:
            state = _probe_as_outsider(fanout, name, network, ssh_port, port)
        protection[name] = PortProtection(state=state, rules=rules)
    return protection


def _probe_as_outsider(
    fanout: HostFanout, name: str, network: ConnectivityReport, ssh_port: int, port: int
) -> FirewallState:
    """Return whether a host's ports are "open" or "closed" to this machine; "untold" if that shows nothing."""
    address = network.interfaces[name].address
    secret, identity = secrets.token_hex(16), secrets.token_hex(16)
    if not _can_connect_as_outsider(address, ssh_port, network):
        return "untold"
    args = {"addresses": [address], "secret": secret, "identity": identity, "port": port}
    listener = fanout.call_connectivity([name], "listen", lambda _: args).get(name, {}).get(address)
    try:
        if listener is None or listener["error"]:
            return "untold"
        ports = [bound_port for bound_port in (listener["ephemeral"], listener["rendezvous"]) if bound_port]
        return (
            "open" if any(_can_connect_as_outsider(address, bound_port, network) for bound_port in ports) else "closed"
        )
    finally:
        fanout.call_connectivity([name], "close", lambda _: {})


def _can_connect_as_outsider(address: str, port: int, network: ConnectivityReport) -> bool:
    """Return whether this machine can connect to a port of a host, from an address that is not of the run."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_TIMEOUT_S) as connection:
        return ipaddress.ip_address(connection.getsockname()[0].partition("%")[0]) not in member_addresses(network)
    return False


def check_port_protection(
    protection: Mapping[str, PortProtection], interfaces: Mapping[str, SocketInterface], sudo: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a finding for each host. Missing protection is an error: --private asks for no run without it."""
    for name, status in protection.items():
        where = f"{interfaces[name].address} on {interfaces[name].interface}"
        removal = f"{sudo[name]}nft delete table inet {NFT_TABLE}"
        evidence = {
            "stands": f"only hosts of the run can connect to its ports at {where}; remove with: {removal}",
            "closed": f"this machine, which is not of the run, cannot connect to its ports at {where}; whether others "
            "can is not known: reading its rules needs root, or sudo without a password",
            "differs": f"its table {NFT_TABLE} is for other hosts, addresses or ports",
            "absent": f"anybody who reaches {where} can connect to the run's ports: there is no table {NFT_TABLE}",
            "open": f"this machine, which is not of the run, can connect to its ports at {where}",
            "untold": f"it is not known if its table {NFT_TABLE} is in place: reading it needs root, or sudo without a "
            "password, and this machine is of the run or does not reach it",
            "none": f"there is no nftables: --private cannot tell who can connect at {where}",
        }[status.state]
        severity: Severity = "info" if status.state == "stands" else "warning" if status.state == "closed" else "error"
        command = f"on {name}: {sudo[name]}nft {quote_word(status.rules)}"
        if status.state in ("untold", "closed"):
            sudoers_line = (
                f"$USER ALL=(root) NOPASSWD: $(command -v nft || echo /usr/sbin/nft) -j list table inet {NFT_TABLE}"
            )
            command += f' && echo "{sudoers_line}" | sudo tee /etc/sudoers.d/evener'
        if status.state == "none":
            command = f"leave out --private; {ALTERNATIVE_HINT}"
        yield Finding(check="net.private", severity=severity, host=name, evidence=evidence,
                      fix="" if status.state == "stands" else command)  # fmt: skip
