"""The firewall of `--private` admits only the run's hosts, checked by nft's output or by connecting."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.doctor import firewall
from evener.doctor.connectivity import ConnectivityReport, HostFanout
from evener.doctor.firewall import (
    PortProtection,
    build_nft_rules,
    check_port_protection,
    inspect_port_protection,
    matches_rules,
)
from evener.ssh.fake import FakeSession
from tests.unit.test_checks import facts, way

NETWORK = ConnectivityReport(interfaces={"attic": way(36), "laptop": way(28)})
FACTS = {"attic": facts("attic", 36), "laptop": facts("laptop", 28)}
RULES = build_nft_rules("attic", FACTS["attic"], NETWORK, 29500, 22)
MARK = RULES.rpartition('comment "')[2].partition('"')[0]
ACCEPTS = 4  # loopback, established, ssh, the hosts


def told(*, members: tuple[str, ...] = ("192.168.1.28", "192.168.1.36"), mark: str = MARK, accepts: int = ACCEPTS,
         hook: str = "input", verdict: str = "drop") -> list[dict[str, Any]]:  # fmt: skip
    """As `nft -j list table` of nftables 1.0.6 prints it, in short."""
    last = {"rule": {"comment": mark, "expr": [{"match": {}}, {verdict: None}]}}
    chain = {"chain": {"name": "input", "type": "filter", "hook": hook, "prio": -10, "policy": "accept"}}
    return [
        {"metainfo": {}},
        {"table": {"name": firewall.NFT_TABLE}},
        {"set": {"name": "hosts4", "elem": list(members)}},
        chain,
        *[{"rule": {"expr": [{"accept": None}]}}] * accepts,
        last,
    ]


def test_firewall_rules_cover_only_run_hosts_and_ports():
    assert "elements = { 192.168.1.28, 192.168.1.36 }" in RULES
    assert "ip daddr 192.168.1.36 tcp dport { 29500, 32768-60999 } drop" in RULES
    assert build_nft_rules("attic", FACTS["attic"], NETWORK, 40123, 22) == RULES  # one that was free instead of 29500
    assert "{ 4000, 32768-60999 }" in build_nft_rules("attic", FACTS["attic"], NETWORK, 4000, 22)


@pytest.mark.parametrize(
    ("found", "is_so"),
    [
        (told(), True),
        ([], False),
        (told(members=("192.168.1.36",)), False),
        (told(members=("192.168.1.28", "192.168.1.36", "192.168.1.66")), False),
        (told(mark="of others"), False),
        (told(accepts=ACCEPTS + 1), False),
        (told(hook="output"), False),
        (told(verdict="accept"), False),
    ],
)
def test_modified_firewall_table_is_not_accepted(found, is_so):
    assert matches_rules(json.loads(json.dumps(found)), RULES, NETWORK) is is_so


def guard_of(seen: dict[str, Any], address: str = "192.168.1.36") -> PortProtection:
    fleet, network = (
        Fleet(hosts={"attic": HostConfig(address="x")}),
        ConnectivityReport(interfaces={"attic": way(36, address=address)}),
    )
    asker = HostFanout({"attic": FakeSession("attic", {"facts.read_nft_table": lambda table: seen})}, {})
    return inspect_port_protection(asker, fleet, {"attic": FACTS["attic"]}, network, 0)["attic"]


def test_firewall_state_is_derived_from_nft_output():
    seen = {"has_nft": True, "is_readable": True, "rules": [], "ssh_port": None}
    assert guard_of(seen).state == "absent"
    assert guard_of(seen | {"rules": told(mark="other")}).state == "differs"
    assert guard_of(seen | {"has_nft": False, "is_readable": False}).state == "none"
    assert "tcp dport 2222 accept" in guard_of(seen | {"ssh_port": 2222}).rules


@pytest.fixture
def sshd() -> Iterator[Callable[[str], int]]:
    """A port that answers on an address of this machine."""
    with contextlib.ExitStack() as stack:
        yield lambda address: stack.enter_context(socket.create_server((address, 0))).getsockname()[1]


def test_firewall_is_probed_by_connecting_if_nft_is_unreadable(sshd, monkeypatch):
    seen = {"has_nft": True, "is_readable": False, "rules": []}
    assert guard_of(seen | {"ssh_port": sshd("127.0.0.2")}, "127.0.0.2").state == "open"
    assert guard_of(seen | {"ssh_port": sshd("127.0.0.1")}, "127.0.0.1").state == "untold"  # we are of the run
    port = sshd("127.0.0.2")
    connect = socket.create_connection

    def only_ssh(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[1] != port:
            raise TimeoutError
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", only_ssh)
    assert guard_of(seen | {"ssh_port": port}, "127.0.0.2").state == "closed"
    monkeypatch.setattr(socket, "create_connection", lambda *_: only_ssh(("", 0), 0))
    assert guard_of(seen | {"ssh_port": port}, "127.0.0.2").state == "untold"  # it does not reach the host at all


@pytest.mark.parametrize(
    ("state", "severity", "fix"),
    [
        ("stands", "info", ""),
        ("differs", "error", f"on attic: sudo nft '{RULES}'"),
        ("absent", "error", f"on attic: sudo nft '{RULES}'"),
        ("open", "error", f"on attic: sudo nft '{RULES}'"),
        ("none", "error", f"leave out --private; {firewall.ALTERNATIVE_HINT}"),
    ],
)
def test_each_firewall_state_gives_its_finding_and_fix(state, severity, fix):
    (found,) = check_port_protection(
        {"attic": PortProtection(state=state, rules=RULES)}, NETWORK.interfaces, {"attic": "sudo "}
    )
    assert (found.check, found.severity, found.fix) == ("net.private", severity, fix)


@pytest.mark.parametrize(("state", "severity"), [("untold", "error"), ("closed", "warning")])
def test_unknown_firewall_state_is_reported_with_fix(state, severity):
    (found,) = check_port_protection(
        {"attic": PortProtection(state=state, rules=RULES)}, NETWORK.interfaces, {"attic": "sudo "}
    )
    assert found.severity == severity
    assert "not known" in found.evidence
    assert found.fix.endswith("/etc/sudoers.d/evener")
