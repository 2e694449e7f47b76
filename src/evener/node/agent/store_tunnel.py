"""Carry connections to a rendezvous store between hosts, for holders of the run's key alone.

torch's TCPStore has no password, and takes any amount of memory from whoever connects. So the store listens on
127.0.0.1 of its host, and ranks connect to 127.0.0.1 of theirs. On the network only the store's gate listens:

    rank ── 127.0.0.1 ──▶ StoreProxy ══ network ══▶ StoreGate ── 127.0.0.1 ──▶ TCPStore

    gate  ─▶ nonce
    proxy ─▶ nonce, MAC                MAC = HMAC-SHA256(the run's key; role, run, address and port of the gate, nonces)
    gate  ─▶ MAC                       once it has connected to the store
    both  ─▶ length, MAC, payload …    MAC = HMAC-SHA256(session key of the direction; number of the record, payload)

A recorded handshake is not valid again, because both nonces are new. A reflected one is not valid, because the roles
differ. Nor is one that is relayed from another port, another run or another epoch. Nothing is encrypted: an
eavesdropper can read what ranks write into the store, but nobody without the key can change it.

Before a connection has authenticated itself, the gate reads at most `REPLY_BYTES` of it, and waits
`HANDSHAKE_TIMEOUT_S`. It holds at most `MAX_UNAUTHENTICATED` such connections: a new one replaces the oldest of the
address that has the most, so that a flood displaces its own connections first.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

from evener.node.remote.sockets import address_family

LOOPBACK = "127.0.0.1"
NONCE_BYTES = MAC_BYTES = 32
REPLY_BYTES = NONCE_BYTES + MAC_BYTES  # of the proxy
HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 128
RECEIVE_BUFFER_BYTES = 1 << 16  # the kernel's, for each connection to a gate: bounds what strangers fill
MAX_RECORD_BYTES = 1 << 16
RETRY_S = 0.05  # between attempts to reach a gate for the first time, and after a failed accept


class _Handshake:
    """The MACs of one handshake. The text of each begins with its purpose, so that none is valid for another one."""

    def __init__(self, key: bytes, run_id: str, gate: tuple[Any, ...], gate_nonce: bytes, proxy_nonce: bytes) -> None:
        self._key, self._nonces = key, gate_nonce + proxy_nonce
        address = gate[0].partition("%")[0]  # each host has its own name for the scope of an IPv6 address
        self._context = f"{run_id}\0{address}\0{gate[1]}".encode()

    def mac(self, purpose: str) -> bytes:
        """Return the MAC for a purpose: the proof of one role, or the session key of one direction."""
        return _mac(self._key, b"evener store\0%s\0%s\0%s" % (purpose.encode(), self._context, self._nonces))

    def verify(self, purpose: str, mac: bytes) -> None:
        """Raise ConnectionError unless this is the MAC for the purpose."""
        if not hmac.compare_digest(mac, self.mac(purpose)):
            raise ConnectionError("the other end does not have this run's key")


class _Link:
    """An authenticated connection between a proxy and a gate, which carries records."""

    def __init__(self, connection: socket.socket, handshake: _Handshake, *, is_gate: bool) -> None:
        self._connection = connection
        keys = handshake.mac("records of the proxy"), handshake.mac("records of the gate")
        self._receive_key, self._send_key = keys if is_gate else reversed(keys)
        self._num_sent = self._num_received = 0

    async def send(self, payload: bytes) -> None:
        """Send one record; an empty one is the last."""
        mac = _mac(self._send_key, self._num_sent.to_bytes(8) + payload)
        self._num_sent += 1
        await _loop().sock_sendall(self._connection, struct.pack("!I", len(payload)) + mac + payload)

    async def receive(self) -> bytes:
        """Receive one record. ConnectionError if it is not the next one that the other side sent."""
        length, mac = struct.unpack(f"!I{MAC_BYTES}s", await _receive_exactly(self._connection, 4 + MAC_BYTES))
        if length > MAX_RECORD_BYTES:
            raise ConnectionError("a record that is too long")
        payload = await _receive_exactly(self._connection, length)
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._num_received.to_bytes(8) + payload)):
            raise ConnectionError("a record with an invalid MAC")
        self._num_received += 1
        return payload

    async def carry(self, plain: socket.socket) -> None:
        """Copy bytes both ways between this link and a plain connection until both directions have ended.

        Raise OSError, in a group, as soon as either connection fails.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy_from(plain))
            group.create_task(self._copy_to(plain))

    async def _copy_from(self, plain: socket.socket) -> None:
        payload = b"-"
        while payload:
            payload = await _loop().sock_recv(plain, MAX_RECORD_BYTES)
            await self.send(payload)
            await asyncio.sleep(0)  # the loop's operations on sockets return at once while there is data

    async def _copy_to(self, plain: socket.socket) -> None:
        while payload := await self.receive():
            await _loop().sock_sendall(plain, payload)
            await asyncio.sleep(0)
        plain.shutdown(socket.SHUT_WR)


class _Forwarder:
    """Serve all connections to a listening socket, in a thread with an event loop of its own."""

    def __init__(self, listener: socket.socket, key: bytes, run_id: str) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._run_id = listener, key, run_id
        self.port: int = listener.getsockname()[1]
        self._connections: set[asyncio.Task[None]] = set()
        self._own_loop = asyncio.new_event_loop()
        self._serving = self._own_loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, daemon=True, name=type(self).__name__)
        self._thread.start()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._own_loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        with self._listener, contextlib.closing(self._own_loop), contextlib.suppress(asyncio.CancelledError):
            self._own_loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        try:
            await self._prepare()
            while True:
                await self._accept()
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self) -> None:
        try:
            connection, source = await _loop().sock_accept(self._listener)
        except OSError:  # it was closed already, or no descriptor is left
            await asyncio.sleep(RETRY_S)
            return
        task = asyncio.create_task(self._serve_connection(connection, source[0]))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        await asyncio.sleep(0)  # in a flood the next one is there at once, and this one must begin first

    async def _serve_connection(self, connection: socket.socket, source: str) -> None:
        with connection:
            try:
                _configure(connection)
                await self._handle(connection, source)
            except* OSError:
                pass

    async def _prepare(self) -> None:
        """Wait until connections can be served."""

    async def _handle(self, connection: socket.socket, source: str) -> None:
        """Serve one connection from this address. OSError if either side fails."""
        raise NotImplementedError


class StoreGate(_Forwarder):
    """The entrance to the store on this host: it connects proxies that have the run's key to the store."""

    def __init__(self, listener: socket.socket, key: bytes, run_id: str, store_port: int) -> None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)  # of its connections
        self._store_port = store_port
        self._unauthenticated: dict[asyncio.Task[Any], str] = {}  # and their source addresses, oldest first
        super().__init__(listener, key, run_id)

    async def _handle(self, connection: socket.socket, source: str) -> None:
        handshake = await self._authenticate(connection, source)
        with _tcp_socket(LOOPBACK) as store:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _loop().sock_connect(store, (LOOPBACK, self._store_port))
                await _loop().sock_sendall(connection, handshake.mac("gate"))
            await _Link(connection, handshake, is_gate=True).carry(store)

    async def _authenticate(self, connection: socket.socket, source: str) -> _Handshake:
        """Return the handshake of a proxy that has the run's key. OSError if it has not, or is too slow."""
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            [(crowded, _)] = collections.Counter(self._unauthenticated.values()).most_common(1)
            oldest = next(task for task, address in self._unauthenticated.items() if address == crowded)
            del self._unauthenticated[oldest]
            oldest.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._unauthenticated[task] = source
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                nonce = secrets.token_bytes(NONCE_BYTES)
                await _loop().sock_sendall(connection, nonce)
                reply = await _receive_exactly(connection, REPLY_BYTES)
        finally:
            self._unauthenticated.pop(task, None)
        handshake = _Handshake(self._key, self._run_id, connection.getsockname(), nonce, reply[:NONCE_BYTES])
        handshake.verify("proxy", reply[NONCE_BYTES:])
        return handshake


class StoreProxy(_Forwarder):
    """The store of another host, as a port of 127.0.0.1.

    The port refuses connections until the gate has let one of this proxy through, as a store's own port does until the
    store is up.
    """

    def __init__(self, gate: tuple[str, int], key: bytes, run_id: str) -> None:
        self._gate, self._is_ready = gate, threading.Event()
        self.problem = "no connection was tried yet"  # why the gate could not be used so far
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))  # this reserves the port
        super().__init__(listener, key, run_id)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the gate has let a connection through; return whether it has."""
        return self._is_ready.wait(timeout_s)

    async def _prepare(self) -> None:
        while not self._is_ready.is_set():
            try:
                async with self._dial():
                    self._listener.listen(1024)
                    self._is_ready.set()
            except OSError as error:
                self.problem = os.strerror(error.errno) if error.errno else str(error) or "no answer"
                await asyncio.sleep(RETRY_S)

    async def _handle(self, connection: socket.socket, source: str) -> None:
        async with self._dial() as link:
            await link.carry(connection)

    @contextlib.asynccontextmanager
    async def _dial(self) -> AsyncIterator[_Link]:
        """Connect to the gate. OSError if it does not answer or does not have the run's key."""
        with _tcp_socket(self._gate[0]) as connection:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _loop().sock_connect(connection, self._gate)
                gate_nonce, nonce = await _receive_exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
                handshake = _Handshake(self._key, self._run_id, connection.getpeername(), gate_nonce, nonce)
                await _loop().sock_sendall(connection, nonce + handshake.mac("proxy"))
                handshake.verify("gate", await _receive_exactly(connection, MAC_BYTES))
            yield _Link(connection, handshake, is_gate=False)


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _tcp_socket(address: str) -> socket.socket:
    """Return a socket for connections to this address."""
    connection = socket.socket(address_family(address))
    _configure(connection)
    return connection


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive this many bytes. ConnectionError if the connection ends before."""
    received = b""
    while len(received) < num_bytes:
        part = await _loop().sock_recv(connection, num_bytes - len(received))
        if not part:
            raise ConnectionError(
                "the other end closed the connection: it belongs to another run, or its store is not up yet"
            )
        received += part
    return received
