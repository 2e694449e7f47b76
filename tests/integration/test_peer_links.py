"""Hosts exchange signed messages over real sockets; forged, replayed and malformed ones are rejected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Coroutine, Iterator

import msgspec
import pytest

from evener.core.run.membership_epoch import MembershipEpoch
from evener.node.agent import peer_links
from evener.node.agent.consensus import ConsensusState, HostStatus
from evener.node.agent.peer_links import MAX_LINE_BYTES, MAX_UNAUTHENTICATED, NONCE_BYTES, PeerLinks, line_mac
from tests.ranks import free_port
from tests.tiers import num_examples

KEY, OTHER_KEY = b"the run's", b"another run's"
LOOPBACK = "127.0.0.1"
WITHIN_S = 60.0  # of a machine as busy as it likes
NUM_MESSAGES, BATCH = num_examples(2_000, 10_000), 100


def of(host: str, count: int = 1) -> HostStatus:
    return HostStatus(
        host=host,
        sequence=count,
        consensus_state=ConsensusState(MembershipEpoch(number=0, hosts=["a", "b"])),
        live_peers=["a"],
    )


def line(nonce: bytes, number: int, text: bytes, key: bytes = KEY) -> bytes:
    return line_mac(key, nonce, number, text) + b" " + text + b"\n"


TEXT = msgspec.json.encode(of("b"))


@pytest.fixture
def quietly(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., None]]:
    """Run a coroutine: nothing may be logged, printed, or left for the event loop to complain about."""

    def run(main: Coroutine[None, None, None]) -> None:
        complaints = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            await main
            gc.collect()  # tells of tasks whose exception nobody has retrieved
            await asyncio.sleep(0)

        with caplog.at_level(logging.WARNING):
            asyncio.run(watched(), debug=False)
        assert complaints == []
        assert caplog.records == []
        assert capfd.readouterr().err == ""

    return run


class Listener:
    """Peer links that listen, and what they have received."""

    def __init__(self) -> None:
        self.received: list[HostStatus] = []
        self.links = PeerLinks(KEY, self.received.append)
        self.port = 0

    async def __aenter__(self) -> Listener:
        self.port = await self.links.listen((LOOPBACK, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.close()

    async def receives(self, sender: PeerLinks, status: HostStatus) -> None:
        """Return once it has received this status."""
        sender.broadcast(status, {"listener": [(LOOPBACK, self.port)]})
        await until(lambda: status in self.received)

    async def receives_from_an_honest_host(self) -> None:
        honest = PeerLinks(KEY, lambda _: None)
        await self.receives(honest, of("honest", time.monotonic_ns()))
        await honest.close()

    def connect(self) -> Raw:
        return Raw(self.port)


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Raw:
    """Somebody on the network: a connection, its nonce, and any bytes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port), WITHIN_S)
        self.nonce = b""

    async def __aenter__(self) -> Raw:
        await asyncio.to_thread(self.hear_nonce)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def hear_nonce(self) -> bytes:
        while len(self.nonce) < NONCE_BYTES:
            some = self._socket.recv(NONCE_BYTES - len(self.nonce))
            assert some, "it is not received at all"
            self.nonce += some
        return self.nonce

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it may have ended the connection at the first bytes
            self._socket.sendall(data)

    def end(self) -> None:
        """Say no more, but listen."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def answer(self) -> bytes:
        """b"." for a line that was believed, b"" when the connection has been ended; TimeoutError is a hang."""
        try:
            return self._socket.recv(1)
        except ConnectionError:
            return b""

    async def answer_to(self, data: bytes) -> bytes:
        self.send(data)
        return await asyncio.to_thread(self.answer)


def test_two_listeners_receive_messages_of_each_other(quietly):
    async def main() -> None:
        async with Listener() as a, Listener() as b:
            assert a.links._listener is not None
            assert a.links._listener.getsockname()[0] == LOOPBACK
            await asyncio.gather(a.receives(b.links, of("b", 1)), b.receives(a.links, of("a", 1)))
            await asyncio.gather(a.receives(b.links, of("b", 2)), b.receives(a.links, of("a", 2)))

    quietly(main())


ADDRESSES = {"a": "127.0.0.1", "b": "127.0.0.2"}
several_addresses = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")


class Host:
    """Peer links of one host, which may listen on another port than the others expect."""

    def __init__(self, name: str, expected: list[int]) -> None:
        self.name, self.port, self._expected = name, 0, expected
        self.received: dict[str, HostStatus] = {}
        self.links = PeerLinks(KEY, lambda status: self.received.update({status.host: status}))
        self._count = 0

    async def listen(self, port: int) -> None:
        self.port = await self.links.listen((ADDRESSES[self.name], port))

    def broadcast(self, *others: str) -> None:
        """Send one more status to the others, who may be on each of the expected ports."""
        self._count += 1
        status = msgspec.structs.replace(of(self.name, self._count), port=self.port)
        endpoints = {name: [(ADDRESSES[name], port) for port in self._expected] for name in others}
        self.links.broadcast(status, endpoints)


async def until_connected(*hosts: Host) -> None:
    """Return when each host has received a status of every other."""
    names = {host.name for host in hosts}

    def is_connected() -> bool:
        for host in hosts:
            host.broadcast(*(names - {host.name}))
        return all(host.received.keys() == names - {host.name} for host in hosts)

    await until(is_connected)


@pytest.fixture
def quick_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "RECONNECT_S", 0.02)
    monkeypatch.setattr(peer_links, "ACK_TIMEOUT_S", 0.5)


@several_addresses
def test_host_on_other_port_is_called_there_once_it_has_called(quietly, quick_reconnects):
    """Its port is none that the others expect: only its status names it."""

    async def main() -> None:
        stays = Host("a", [free_port()])
        await stays.listen(0)
        moved = Host("b", [stays.port])
        await moved.listen(0)
        await until_connected(stays, moved)
        await stays.links.close()
        await moved.links.close()

    quietly(main())


@several_addresses
@pytest.mark.parametrize("taken_by", ["nobody", "silent stranger", "other run"])
def test_hosts_that_all_moved_find_each_other(quietly, quick_reconnects, taken_by):
    """As when two agents restart after a power failure and both find the run's port taken: none can tell the other."""

    async def main() -> None:
        taken, spare = free_port(), [free_port(), free_port()]
        other_run = PeerLinks(OTHER_KEY, lambda _: None)
        stranger: asyncio.Server | None = None
        if taken_by == "other run":
            await other_run.listen(("127.0.0.2", taken))
        elif taken_by == "silent stranger":
            stranger = await asyncio.start_server(lambda reader, writer: None, "127.0.0.2", taken)
        hosts = [Host("a", [taken, *spare]), Host("b", [taken, *spare])]
        for host, port in zip(hosts, spare, strict=True):
            await host.listen(port)
        await until_connected(*hosts)
        for links in (*(host.links for host in hosts), other_run):
            await links.close()
        if stranger is not None:
            stranger.close()

    quietly(main())


@several_addresses
def test_host_that_returns_to_first_port_is_called_there(quietly, quick_reconnects):
    """It had moved, was restarted, and the run's port is free again."""

    async def main() -> None:
        first, spare, other = free_port(), free_port(), free_port()
        stays, before = Host("a", [first, spare]), Host("b", [other])
        await stays.listen(other)
        await before.listen(spare)
        await until_connected(stays, before)
        await before.links.close()
        stays.received.clear()
        after = Host("b", [other])
        after._count = 1000
        await after.listen(first)
        await until_connected(stays, after)
        await stays.links.close()
        await after.links.close()

    quietly(main())


def test_endpoint_that_answered_is_called_first_again():
    """A connection that breaks must be replaced before its host counts as lost."""

    async def main() -> None:
        links = PeerLinks(KEY, lambda _: None)
        endpoints = [(LOOPBACK, port) for port in (1, 2, 3, 4)]
        links._endpoints["b"] = endpoints
        first_tries = [links._endpoint_to_try("b", num_failures)[1] for num_failures in range(12)]
        assert first_tries == [1, 1, 2, 1, 1, 3, 1, 1, 4, 1, 1, 2]
        links._prefer_endpoint("b", endpoints[2])
        assert [links._endpoint_to_try("b", num_failures)[1] for num_failures in range(3)] == [3, 3, 1]

    asyncio.run(main())


def test_message_with_other_key_is_rejected(quietly):
    async def main() -> None:
        async with Listener() as listener:
            stranger = PeerLinks(OTHER_KEY, lambda _: None)
            stranger.broadcast(of("stranger"), {"listener": [(LOOPBACK, listener.port)]})
            async with listener.connect() as raw:
                assert await raw.answer_to(line(raw.nonce, 0, TEXT, OTHER_KEY)) == b""
            await listener.receives_from_an_honest_host()
            await stranger.close()
            assert {one.host for one in listener.received} == {"honest"}

    quietly(main())


def test_replayed_or_out_of_order_message_is_rejected(quietly):
    async def main() -> None:
        async with Listener() as listener:
            async with listener.connect() as raw:
                recorded = line(raw.nonce, 0, TEXT)
                assert await raw.answer_to(recorded) == b"."
                assert await raw.answer_to(recorded) == b""
            async with listener.connect() as raw:
                assert await raw.answer_to(recorded) == b""
            async with listener.connect() as raw:  # nor a later one first
                assert await raw.answer_to(line(raw.nonce, 1, TEXT)) == b""
            assert listener.received == [of("b")]
            await listener.receives_from_an_honest_host()

    quietly(main())


SIGNED = {  # by somebody who has the key: an agent of another version, or a broken one
    "no-json": b"no json",
    "no-utf-8": b'{"host": "\xff\xfe"}',
    "half-a-surrogate": b'{"host": "\\ud800"}',
    "another-type": b"[1, 2, 3]",
    "null": b"null",
    "nothing": b"",
    "no-fields": b"{}",
    "fields-of-other-types": TEXT.replace(b'"b"', b"7"),
    "too-large-a-number": TEXT.replace(b'"sequence":1', b'"sequence":1e999'),
    "too-deep": b'{"more":' + b"[" * (MAX_LINE_BYTES - 200),
}


@pytest.mark.parametrize("what", SIGNED)
def test_signed_malformed_message_closes_only_its_connection(quietly, what):
    async def main() -> None:
        async with Listener() as listener:
            async with listener.connect() as raw:
                assert await raw.answer_to(line(raw.nonce, 0, SIGNED[what])) == b""
            assert listener.received == []
            await listener.receives_from_an_honest_host()

    quietly(main())


UNSIGNED = {
    "nothing": b"",
    "an-empty-line": b"\n",
    "no-mac": TEXT + b"\n",
    "too-long-a-line": b"x" * (4 * MAX_LINE_BYTES),
    "too-long-a-line-with-an-end": b"x" * (MAX_LINE_BYTES + 1) + b"\n",
    "a-mac-of-bytes-beyond-ascii": b"\xff" * 64 + b" " + TEXT + b"\n",
    "zeros": bytes(1000),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("what", UNSIGNED)
def test_unsigned_message_closes_only_its_connection(quietly, what):
    async def main() -> None:
        async with Listener() as listener:
            async with listener.connect() as raw:
                raw.send(UNSIGNED[what])
                raw.end()
                assert await raw.answer_to(b"") == b""
            assert listener.received == []
            await listener.receives_from_an_honest_host()

    quietly(main())


def test_partial_line_times_out(quietly, monkeypatch):
    monkeypatch.setattr(peer_links, "IDLE_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with Listener() as listener, listener.connect() as raw:
            raw.send(line(raw.nonce, 0, TEXT)[:40])
            await listener.receives_from_an_honest_host()
            assert await raw.answer_to(b"") == b""  # in the end it is hung up on

    quietly(main())


def test_listener_survives_300_short_connections(quietly):
    async def main() -> None:
        async with Listener() as listener:
            for i in range(300):
                with socket.create_connection((LOOPBACK, listener.port), WITHIN_S) as one:
                    if i % 2:  # a reset instead of an end
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if i % 50 == 0:
                    await asyncio.sleep(0)
            await listener.receives_from_an_honest_host()

    quietly(main())


def test_idle_connections_do_not_block_others(quietly):
    """A stranger holds more of them than are allowed; connected hosts stay, and new ones can still connect."""

    async def main() -> None:
        async with Listener() as listener, listener.connect() as known:
            assert await known.answer_to(line(known.nonce, 0, TEXT)) == b"."
            with contextlib.ExitStack() as idle:
                for _ in range(MAX_UNAUTHENTICATED + 100):
                    await asyncio.to_thread(idle.enter_context(contextlib.closing(listener.connect())).hear_nonce)
                await listener.receives_from_an_honest_host()
                assert len(listener.links._unauthenticated) <= MAX_UNAUTHENTICATED
                assert await known.answer_to(line(known.nonce, 1, TEXT)) == b"."
            await until(lambda: not listener.links._unauthenticated)

    quietly(main())


FEW_FILES = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from evener.node.agent.peer_links import PeerLinks

async def main():
    links = PeerLinks(sys.argv[1].encode(), lambda status: print(status.host, flush=True))
    print(await links.listen(("127.0.0.1", 0)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await links.close()

asyncio.run(main())
"""


def test_host_is_heard_beside_idle_connections_where_few_files_may_be_open(quietly):
    """And nothing is printed, however often accept() fails."""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FEW_FILES, KEY.decode(), stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        with contextlib.ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(socket.create_connection((LOOPBACK, port), WITHIN_S))
            honest = PeerLinks(KEY, lambda _: None)
            honest.broadcast(of("honest"), {"listener": [(LOOPBACK, port)]})
            async with asyncio.timeout(WITHIN_S):
                assert await process.stdout.readline() == b"honest\n"
            await honest.close()
        _, errors = await process.communicate(b"")
        assert (process.returncode, errors) == (0, b"")

    quietly(main())


def mutated(real: bytes, rng: random.Random) -> bytes:
    """A real line, damaged in one to three places, or noise."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(400))
    data = bytearray(real)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 20))
            case _:
                del data[at : at + rng.randrange(1, 20)]
    return bytes(data)


def fuzz(port: int, rng: random.Random) -> None:
    """NUM_MESSAGES, each behind up to two that are right, BATCH at a time; TimeoutError where there is no answer."""
    for _ in range(NUM_MESSAGES // BATCH):
        with contextlib.ExitStack() as together:
            batch = [together.enter_context(contextlib.closing(Raw(port))) for _ in range(BATCH)]
            right = [rng.choice([0, 0, 0, 1, 2]) for _ in batch]
            for raw, num_right in zip(batch, right, strict=True):
                nonce = raw.hear_nonce()
                lines = [line(nonce, i, TEXT) for i in range(num_right)]
                damaged = mutated(line(nonce, num_right, TEXT), rng)
                raw.send(b"".join(lines) + damaged + rng.choice([b"", b"\n"]))
                raw.end()
            for raw, num_right in zip(batch, right, strict=True):
                answers = b"".join(iter(raw.answer, b""))
                # The damage may be behind a line that is whole.
                assert answers in (b"." * num_right, b"." * (num_right + 1))


def test_damaged_messages_are_rejected(quietly):
    async def main() -> None:
        async with Listener() as listener:
            await asyncio.to_thread(fuzz, listener.port, random.Random(0))
            assert all(one == of("b") for one in listener.received)
            await listener.receives_from_an_honest_host()

    quietly(main())


ODD_LISTENERS = {
    "hangs-up": None,
    "talks-nonsense": b"\xff" * (NONCE_BYTES + 4),
    "a-nonce-and-no-more": b"n" * NONCE_BYTES,
    "says-nothing": b"",
}


@pytest.mark.parametrize("what", ODD_LISTENERS)
def test_sender_reconnects_until_right_listener_answers(quietly, monkeypatch, what):
    """Another program on the port, that goes after a while: then the right one receives."""
    monkeypatch.setattr(peer_links, "RECONNECT_S", 0.02)
    monkeypatch.setattr(peer_links, "ACK_TIMEOUT_S", 0.5)

    async def main() -> None:
        port, visits = free_port(), []

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            visits.append(writer)
            said = ODD_LISTENERS[what]
            if said is None:
                writer.transport.abort()
            else:
                writer.write(said)

        odd = await asyncio.start_server(serve, LOOPBACK, port)
        sender = PeerLinks(KEY, lambda _: None)

        async def said_on() -> None:
            for count in range(1000000):
                sender.broadcast(of("sender", count), {"listener": [(LOOPBACK, port)]})
                await asyncio.sleep(0.02)

        saying = asyncio.create_task(said_on())
        await until(lambda: len(visits) > 2)
        odd.close()
        for writer in visits:
            writer.transport.abort()
        received: list[HostStatus] = []
        listener = PeerLinks(KEY, received.append)
        await listener.listen((LOOPBACK, port))
        await until(lambda: len(received) > 2)
        saying.cancel()
        await sender.close()
        await listener.close()

    quietly(main())
