"""Only holders of the run's key reach a store on another host; others cost it next to nothing."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator

import psutil
import pytest

from evener.node.agent import store_tunnel
from evener.node.agent.store_tunnel import LOOPBACK, MAX_UNAUTHENTICATED, StoreGate, StoreProxy
from evener.node.remote.sockets import listen
from tests.conftest import wait_until
from tests.ranks import free_port
from tests.tiers import num_examples

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
RUN = "run-3"
WITHIN_S = 60.0  # of a machine as busy as it likes
NUM_CONNECTIONS = num_examples(1_000, 10_000)
MIB = 1 << 20


class Store:
    """What stands for a store: it returns the bytes of a connection as they come, and keeps them."""

    def __init__(self) -> None:
        self.received: list[bytearray] = []  # of each connection that has sent something
        self._listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._echo, args=(self._listener.accept()[0],), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        received = bytearray()
        with connection, contextlib.suppress(OSError):
            while part := connection.recv(1 << 16):
                if not received:
                    self.received.append(received)
                received += part
                connection.sendall(part)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Tunnels:
    """Gates and proxies of one test, which ends them."""

    def __init__(self) -> None:
        self._open: list[StoreGate | StoreProxy | Store] = []

    def store(self) -> Store:
        self._open.append(store := Store())
        return store

    def gate(self, store_port: int, port: int = 0, key: bytes = KEY, run: str = RUN) -> StoreGate:
        self._open.append(gate := StoreGate(listen(LOOPBACK, port), key, run, store_port))
        return gate

    def proxy(self, gate_port: int, key: bytes = KEY, run: str = RUN) -> StoreProxy:
        self._open.append(proxy := StoreProxy((LOOPBACK, gate_port), key, run))
        return proxy

    def close(self) -> None:
        for one in reversed(self._open):
            one.close()


@pytest.fixture
def tunnels() -> Iterator[Tunnels]:
    tunnels = Tunnels()
    yield tunnels
    tunnels.close()


def connect(port: int, source: str = LOOPBACK) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), WITHIN_S, source_address=(source, 0))


def exchange(port: int, text: bytes) -> bytes:
    """Send text, and return what comes back until the other side ends."""
    with connect(port) as client:
        client.sendall(text)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive this many bytes, or fewer if the connection ends."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while len(received) < num_bytes and (part := connection.recv(num_bytes - len(received))):
            received += part
    return received


def is_ended_by_peer(connection: socket.socket) -> bool:
    return receive(connection, 1) == b""


def mac(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).digest()


class Wire:
    """The protocol as its module describes it, written down a second time."""

    def __init__(self, port: int, key: bytes = KEY, run: str = RUN) -> None:
        self.connection = connect(port)
        self._key, self._where = key, [run.encode(), LOOPBACK.encode(), str(port).encode()]
        self.gate_nonce, self.nonce = receive(self.connection, 32), os.urandom(32)
        self._num_sent = 0

    def proof(self, role: str) -> bytes:
        nonces = self.gate_nonce + self.nonce
        return mac(self._key, b"\0".join([b"evener store", role.encode(), *self._where, nonces]))

    def authenticate(self) -> bool:
        """Send the proxy's proof; return whether the gate sends its own."""
        self.connection.sendall(self.nonce + self.proof("proxy"))
        return receive(self.connection, 32) == self.proof("gate")

    def record(self, payload: bytes) -> bytes:
        text = self._num_sent.to_bytes(8, "big") + payload
        self._num_sent += 1
        return struct.pack(">I", len(payload)) + mac(self.proof("records of the proxy"), text) + payload


@pytest.fixture
def short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tunnel, "HANDSHAKE_TIMEOUT_S", 0.2)


def test_bytes_pass_both_ways_unchanged(tunnels: Tunnels) -> None:
    """More of them than any buffer holds; and the end of each direction passes, too."""
    proxy = tunnels.proxy(tunnels.gate(tunnels.store().port).port)
    assert proxy.wait_ready(WITHIN_S)
    sent = random.Random(1).randbytes(8 * MIB)
    with connect(proxy.port) as client:
        sending = threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR)))
        sending.start()
        assert receive(client, len(sent)) == sent
        sending.join()
        assert is_ended_by_peer(client)


def test_gate_speaks_the_documented_protocol(tunnels: Tunnels) -> None:
    store = tunnels.store()
    wire = Wire(tunnels.gate(store.port).port)
    with wire.connection:
        assert wire.authenticate()
        wire.connection.sendall(wire.record(b"first") + wire.record(b"second"))
        wait_until(lambda: bytes(b"".join(store.received)) == b"firstsecond", lambda: repr(store.received))


def test_proxy_refuses_connections_until_store_is_up(tunnels: Tunnels) -> None:
    """As a store's own port does; whoever waits for a store tries until it is accepted."""
    store_port, gate_port = free_port(), free_port()
    proxy = tunnels.proxy(gate_port)
    wait_until(lambda: "refused" in proxy.problem.lower(), lambda: proxy.problem)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy.port)
    tunnels.gate(store_port, gate_port)
    wait_until(lambda: "store is not up yet" in proxy.problem, lambda: proxy.problem)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy.port)
    with listen(LOOPBACK, store_port):
        assert proxy.wait_ready(WITHIN_S)
        connect(proxy.port).close()


@pytest.mark.parametrize(("key", "run"), [(OTHER_KEY, RUN), (KEY, "run-2"), (KEY, "other-3")])
def test_proxy_of_another_run_or_epoch_is_not_admitted(tunnels: Tunnels, key: bytes, run: str) -> None:
    store = tunnels.store()
    gate = tunnels.gate(store.port)
    proxy = tunnels.proxy(gate.port, key, run)
    wait_until(lambda: "another" in proxy.problem, lambda: proxy.problem)
    assert not proxy.wait_ready(0)
    wire = Wire(gate.port, key, run)
    with wire.connection:
        assert not wire.authenticate()
    assert store.received == []


def test_stranger_in_place_of_gate_receives_nothing(tunnels: Tunnels) -> None:
    """Somebody took the gate's port after the gate had ended: no rank may send to it, as it has no proof."""
    gate = tunnels.gate(tunnels.store().port)
    proxy = tunnels.proxy(gate.port)
    assert proxy.wait_ready(WITHIN_S)
    gate.close()
    received = bytearray()
    with socket.create_server((LOOPBACK, gate.port)) as stranger:
        for proof in (os.urandom(32), bytes(32)):
            with connect(proxy.port) as client:
                client.sendall(b"secret")
                with stranger.accept()[0] as connection:
                    connection.settimeout(WITHIN_S)
                    connection.sendall(os.urandom(32))
                    received += receive(connection, 64)
                    connection.sendall(proof)
                    received += receive(connection, 1)  # it ends the connection
                assert is_ended_by_peer(client)
    assert len(received) == 2 * 64
    assert b"secret" not in received


def test_replayed_handshake_is_not_admitted(tunnels: Tunnels) -> None:
    store = tunnels.store()
    gate = tunnels.gate(store.port)
    wire = Wire(gate.port)
    assert wire.authenticate()
    recorded = wire.nonce + wire.proof("proxy") + wire.record(b"recorded")
    with wire.connection:
        pass
    with connect(gate.port) as stranger:
        receive(stranger, 32)
        stranger.sendall(recorded)
        assert is_ended_by_peer(stranger)
    assert store.received == []


def test_reflected_handshake_is_not_admitted(tunnels: Tunnels) -> None:
    """A stranger that has no key sends back to each side what it sent, or what the other role sent."""
    store = tunnels.store()
    gate = tunnels.gate(store.port)
    with connect(gate.port) as stranger:
        nonce = receive(stranger, 32)
        stranger.sendall(nonce + nonce)
        assert is_ended_by_peer(stranger)
    with socket.create_server((LOOPBACK, 0)) as stranger_gate:
        proxy = tunnels.proxy(stranger_gate.getsockname()[1])
        with stranger_gate.accept()[0] as connection:
            connection.sendall(bytes(32))
            reply = receive(connection, 64)
            connection.sendall(reply[32:])  # the proxy's own proof
            assert is_ended_by_peer(connection)
        wait_until(lambda: "does not have this run's key" in proxy.problem, lambda: proxy.problem)
        assert not proxy.wait_ready(0)
    assert store.received == []


def test_handshake_relayed_from_another_port_is_not_admitted(tunnels: Tunnels) -> None:
    """A stranger lets a proxy and a gate that it connects authenticate each other, to speak in the proxy's place."""
    store = tunnels.store()
    gate = tunnels.gate(store.port)
    with socket.create_server((LOOPBACK, 0)) as relay:
        proxy = tunnels.proxy(relay.getsockname()[1])
        with relay.accept()[0] as to_proxy, connect(gate.port) as to_gate:
            to_proxy.settimeout(WITHIN_S)
            to_proxy.sendall(receive(to_gate, 32))
            to_gate.sendall(receive(to_proxy, 64))
            assert is_ended_by_peer(to_gate)
    assert not proxy.wait_ready(0)


@pytest.mark.parametrize("change", ["payload", "repeated", "left out", "too long", "of the gate"])
def test_changed_record_ends_connection_before_it_reaches_store(tunnels: Tunnels, change: str) -> None:
    """As somebody between the hosts could do once both have authenticated each other."""
    store = tunnels.store()
    wire = Wire(tunnels.gate(store.port).port)
    assert wire.authenticate()
    first, second = wire.record(b"first"), wire.record(b"second")
    forged = {
        "payload": second[:-1] + b"\0",
        "repeated": first,
        "left out": wire.record(b"third"),
        "too long": struct.pack(">I", 0xFFFFFFFF) + second[4:],
    }
    with wire.connection:
        wire.connection.sendall(first)
        echo = receive(wire.connection, 4 + 32 + 5)
        assert echo.endswith(b"first")
        wire.connection.sendall(forged.get(change, echo))
        assert is_ended_by_peer(wire.connection)
    assert [bytes(one) for one in store.received] == [b"first"]


@pytest.mark.usefixtures("short_handshakes")
@pytest.mark.parametrize("sent", [b"", b"x" * 63])
def test_slow_handshake_is_ended(tunnels: Tunnels, sent: bytes) -> None:
    gate = tunnels.gate(tunnels.store().port)
    with connect(gate.port) as stranger:
        receive(stranger, 32)
        stranger.sendall(sent)
        assert is_ended_by_peer(stranger)


@pytest.mark.usefixtures("short_handshakes")
def test_silent_gate_ends_connection_of_rank(tunnels: Tunnels) -> None:
    """A host that takes what is sent and does not answer: ranks must not wait for it longer than for a store."""
    gate = tunnels.gate(tunnels.store().port)
    proxy = tunnels.proxy(gate.port)
    assert proxy.wait_ready(WITHIN_S)
    gate.close()
    with socket.create_server((LOOPBACK, gate.port)), connect(proxy.port) as client:
        assert is_ended_by_peer(client)


def test_rank_sees_end_of_store_and_of_gate(tunnels: Tunnels) -> None:
    """An established connection ends when the gate's process does, and a new one ends at once."""
    gate = tunnels.gate(tunnels.store().port)
    proxy = tunnels.proxy(gate.port)
    assert proxy.wait_ready(WITHIN_S)
    with connect(proxy.port) as client:
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        gate.close()
        assert is_ended_by_peer(client)
    with connect(proxy.port) as client:
        assert is_ended_by_peer(client)


def test_stranger_does_not_grow_memory_of_gate(tunnels: Tunnels) -> None:
    """The gate closes a connection after its first wrong bytes; those of silent ones stay with the kernel."""
    store = tunnels.store()
    gate = tunnels.gate(store.port)
    block = b"\0" * MIB
    exchange(gate.port, b"")
    before = psutil.Process().memory_info().rss
    for _ in range(4):
        with connect(gate.port) as stranger, contextlib.suppress(ConnectionError):
            for _ in range(64):
                stranger.sendall(block)
    assert psutil.Process().memory_info().rss - before < 8 * MIB
    assert store.received == []


def test_gate_admits_proxies_during_a_flood(tunnels: Tunnels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood displaces its own connections; those of other addresses, which are as slow, stay."""
    monkeypatch.setattr(store_tunnel, "HANDSHAKE_TIMEOUT_S", 10 * WITHIN_S)  # longer than the flood takes anywhere
    gate = tunnels.gate(tunnels.store().port)
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connect(gate.port))
        assert len(receive(slow, 32)) == 32
        for i in range(NUM_CONNECTIONS):
            held.append(stack.enter_context(connect(gate.port, "127.0.0.2")))
            receive(held[-1], 32)
            if i % (NUM_CONNECTIONS // 4) == 0:
                assert exchange(_ready(tunnels.proxy(gate.port)), b"during") == b"during"
            if len(held) > MAX_UNAUTHENTICATED:
                assert is_ended_by_peer(held.pop(0))
        assert not _has_ended(slow)


def _ready(proxy: StoreProxy) -> int:
    assert proxy.wait_ready(WITHIN_S), proxy.problem
    return proxy.port


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_tunnel_carries_data_beside_random_bytes(tunnels: Tunnels, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever strangers send: the gate logs nothing, and continues."""
    noise = random.Random(2)
    gate = tunnels.gate(tunnels.store().port)
    for _ in range(NUM_CONNECTIONS // 4):
        with connect(gate.port) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(noise.randbytes(noise.randint(0, 200)))
            if noise.random() < 0.5:
                receive(stranger, 32)
    assert exchange(_ready(tunnels.proxy(gate.port)), b"after") == b"after"
    assert capfd.readouterr().err == ""


def test_close_frees_port_threads_and_descriptors(tunnels: Tunnels) -> None:
    store = tunnels.store()
    process = psutil.Process()

    def used() -> tuple[int, int]:
        return process.num_fds(), sum("Store" in thread.name for thread in threading.enumerate())

    before = used()
    gate = tunnels.gate(store.port)
    proxy = tunnels.proxy(gate.port)
    with connect(_ready(proxy)) as client:
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        proxy.close()
        gate.close()
        assert is_ended_by_peer(client)
    wait_until(lambda: used() == before, lambda: f"{before} {used()}")  # the store's ends follow
    listen(LOOPBACK, gate.port).close()
