"""While two hosts are surveyed and train, they listen only on the addresses that the run uses, and on the loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from evener.core.run.run_plan import read_plan_if_present
from evener.lab.host import LabHost
from evener.node.agent.store_tunnel import LOOPBACK
from tests.lab.conftest import wait_until
from tests.lab.test_launch import Fleet, fleet  # noqa: F401  a fixture
from tests.tiers import exhaustive

FLAGS = ["--model", "tiny", "--batch", "8", "--eval-tokens", "256", "--threads", "1", "--device", "cpu",
         "--compile", "off", "--sync", "diloco:10:int8:streamed", "--steps", "1000000"]  # fmt: skip
LISTENS = {"tcp": "0A", "udp": "07"}  # as /proc/net numbers it: LISTEN, and a socket that is not connected


class Listening(NamedTuple):
    protocol: str
    address: str
    port: int


def listening(host: LabHost) -> set[Listening]:
    """Every socket of a host's network that somebody else could send to."""
    return {one for protocol in LISTENS for version in ("", "6") for one in _table(host, protocol, version)}


def _table(host: LabHost, protocol: str, version: str) -> Iterator[Listening]:
    for line in Path(f"/proc/{host.pid}/net/{protocol}{version}").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == LISTENS[protocol]:
            address, _, port = local.partition(":")
            yield Listening(protocol, _dotted(bytes.fromhex(address)), int(port, 16))


def _dotted(raw: bytes) -> str:
    """The kernel writes words of four bytes, each as its processor has numbers."""
    words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


OFTEN_S = 0.01  # from look to look: some sockets are there for a moment


@exhaustive
@pytest.mark.parametrize("membership", ["live", "fixed", "restart"])
def test_all_listeners_bind_run_address(fleet: Fleet, corpus: Path, membership: str) -> None:  # noqa: F811
    """From before the launch until steps are taken, whenever somebody looks: store, Gloo, agents, and the look at the
    hosts.
    """
    hosts = fleet.lab.hosts
    before = {host.name: listening(host) for host in hosts}
    assert all({one.port for one in there} == {22} for there in before.values())
    seen: dict[str, set[Listening]] = {host.name: set() for host in hosts}
    now: dict[str, set[Listening]] = {}

    def look() -> None:
        for host in hosts:
            now[host.name] = listening(host) - before[host.name]
            seen[host.name] |= now[host.name]

    def is_started() -> bool:
        look()
        return command.has_ended()

    run = f"runs/{membership}"
    command = fleet.start("train", "--data", str(corpus), *FLAGS, "--membership", membership, "--out", run, "--detach")
    try:
        wait_until(is_started, "it is started", every_s=OFTEN_S)
        plan = read_plan_if_present(fleet.rundir(run))
        assert command.wait() == 0, command.told()
        assert plan is not None
        folders = [fleet.there(run, host) / "steps" for host in "ab"]

        def trains() -> bool:
            look()
            return all(any(path.stat().st_size for path in folder.glob("*")) for folder in folders)

        wait_until(trains, "both take steps", every_s=OFTEN_S)
        for host, place in zip(hosts, plan.hosts, strict=True):
            assert place.address == host.address
            assert {one.address for one in seen[host.name]} == {host.address, LOOPBACK}
            assert {one.protocol for one in now[host.name]} == {"tcp"}
            ports = {one.port for one in now[host.name] if one.address == host.address}
            has_gate, has_agent = host.name == "a", membership != "fixed"
            assert (plan.port in ports) == (has_gate or has_agent)
            # Gloo's, for news and for what is exchanged meanwhile; and where the agents have the port, the gate's
            assert len(ports - {plan.port}) == 2 + (has_gate and has_agent)
            assert sum(one.address == LOOPBACK for one in now[host.name]) == 1  # the store, or the proxy to it
    finally:
        command.wait()
        fleet.run("stop", "--now", run)
    wait_until(lambda: all(listening(host) == before[host.name] for host in hosts), "nothing listens any more")


def test_listener_on_other_address_is_detected(fleet: Fleet) -> None:  # noqa: F811
    """The look itself: on all addresses, on the loopback, IPv6 and UDP."""
    code = (
        "import socket, sys\n"
        "held = [socket.create_server(('', 4001)), socket.create_server(('::1', 4002), family=socket.AF_INET6)]\n"
        "held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)); held[-1].bind(('127.0.0.1', 4003))\n"
        "print('there', flush=True); sys.stdin.read()"
    )
    host = fleet.lab.host("b")
    wanted = {Listening("tcp", "0.0.0.0", 4001), Listening("tcp", "::1", 4002), Listening("udp", "127.0.0.1", 4003)}
    with host.popen(["python3", "-c", code], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"there\n"
        assert {one for one in listening(host) if one.port != 22} == wanted
        holder.communicate()
