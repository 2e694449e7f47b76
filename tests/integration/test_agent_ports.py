"""An agent whose port or address is taken or missing for a while stays in the run."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from evener.core.run.membership_epoch import AgentSpec, HostEntry
from evener.node.agent.__main__ import PORT_TIMEOUT_S, HostAgent
from evener.node.agent.peer_links import PeerLinks
from evener.node.remote.sockets import SPARE_PORTS, agent_ports
from tests.ranks import free_port

LOOPBACK, KEY = "127.0.0.1", b"secret"


class Clock:
    """Advances by a second whenever it is read, and then calls what is due."""

    def __init__(self) -> None:
        self.now, self.due_at, self.due = 0.0, float("inf"), lambda: None

    def __call__(self) -> float:
        self.now += 1.0
        if self.now >= self.due_at:
            self.due()
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    monkeypatch.setattr("evener.node.agent.__main__.PORT_RETRY_S", 0.0)
    return Clock()


def agent_on(folder: Path, clock: Clock, port: int, address: str = LOOPBACK) -> HostAgent:
    (folder / "host").mkdir()
    hosts = {"a": HostEntry(address=address, num_ranks=1), "b": HostEntry(address="127.0.0.2", num_ranks=1)}
    spec = AgentSpec(run="r1", host="a", hosts=hosts, first=["a", "b"], port=port, program=["rank.py"])
    return HostAgent(spec, folder, clock=clock)


def listening_port(agent: HostAgent) -> int:
    """Return the port on which an agent listens in the end."""

    async def main() -> int:
        links = PeerLinks(KEY, agent.on_status)
        try:
            return await agent._listen(links, agent_ports(agent._spec.port, KEY))
        finally:
            await links.close()

    return asyncio.run(main())


def take(port: int) -> socket.socket:
    return socket.create_server((LOOPBACK, port), backlog=1)


def test_agent_waits_for_port_that_is_taken_for_a_moment(tmp_path, clock, capsys):
    """As by a preflight, which listens for about a second."""
    port = free_port()
    preflight = take(port)
    clock.due_at, clock.due = clock.now + PORT_TIMEOUT_S / 2, preflight.close
    assert listening_port(agent_on(tmp_path, clock, port)) == port
    assert capsys.readouterr().out == f"evener: port {port} is taken: trying again\n"


def test_agent_takes_first_free_spare_port(tmp_path, clock, capsys):
    ports = agent_ports(free_port(), KEY)
    with closing(take(ports[0])), closing(take(ports[1])):
        assert listening_port(agent_on(tmp_path, clock, ports[0])) == ports[2]
    assert clock.now > PORT_TIMEOUT_S
    assert f"this agent listens on port {ports[2]}" in capsys.readouterr().out


def test_agent_waits_while_all_its_ports_are_taken(tmp_path, clock):
    ports = agent_ports(free_port(), KEY)
    taken = [take(port) for port in ports]
    clock.due_at, clock.due = 1000.0, taken[3].close
    try:
        assert listening_port(agent_on(tmp_path, clock, ports[0])) == ports[3]
    finally:
        for listener in taken:
            listener.close()


def test_agent_without_its_address_gives_up_in_the_end(tmp_path, clock):
    """A network that is not up yet after a power failure comes up; an address that has changed for good does not."""
    agent = agent_on(tmp_path, clock, 29500, address="192.0.2.1")  # nobody's [RFC 5737]
    with pytest.raises(OSError, match=r"192\.0\.2\.1") as raised:
        listening_port(agent)
    assert raised.value.errno == errno.EADDRNOTAVAIL
    assert clock.now > agent._spec.join_s


def test_agents_of_one_run_have_the_same_ports_and_of_two_runs_others():
    ports = agent_ports(29500, KEY)
    low, high = SPARE_PORTS
    assert ports == agent_ports(29500, KEY)
    assert ports[0] == 29500
    assert len({*ports}) == len(ports)
    assert all(low <= port <= high for port in ports[1:])
    assert not {*ports[1:]} & {*agent_ports(29500, b"another")}
