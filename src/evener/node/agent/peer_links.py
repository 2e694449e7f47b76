"""Exchange host statuses: every host keeps one TCP connection to every other and sends its newest status on it.

    receiver ─▶ a nonce, once                       a line recorded elsewhere, or earlier, is not valid
    sender   ─▶ MAC STATUS, one a line              MAC = HMAC-SHA256(the run's key; nonce, line number, status)
    receiver ─▶ one byte for each that it accepts   none for a while: the connection is dead, try another one

Only JSON of known types is read, and no line longer than `MAX_LINE_BYTES`. A line with an invalid MAC ends the
connection. A peer is called on each of its endpoints in turn until one answers: its agent listens on another port where
the run's was taken. Its statuses name that port, so one that has moved is called there as soon as it has called.

An eavesdropper on the network can read who takes part, and cannot forge a status. Nor can it block others
by opening connections: a new one replaces the oldest connection that has not authenticated itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from evener.core.base.accept_connections import BACKLOG, accept_connections, max_strangers
from evener.core.base.decoding import json_decoder
from evener.node.agent.consensus import HostStatus
from evener.node.remote.sockets import address_family

MAX_LINE_BYTES = 1 << 16
NONCE_BYTES = 16
# Timeout of a connection, and of each byte on it. A dead connection must be replaced, and a status received on the new
# one, before the host times out: `HEARTBEAT_INTERVAL_S`, these two and some slack must be below any host timeout.
ACK_TIMEOUT_S = 1.8
RECONNECT_S = 0.5
IDLE_TIMEOUT_S = 30.0  # that a receiver waits for a line
MAX_UNAUTHENTICATED = 256  # connections not authenticated yet, or fewer if the process may open few files
Endpoint = tuple[str, int]  # address, port


def line_mac(key: bytes, nonce: bytes, number: int, text: bytes) -> bytes:
    """Return the MAC, in hexadecimal, of the line with this number on the connection with this nonce."""
    return hmac.new(key, b"%s %d %s" % (nonce.hex().encode(), number, text), hashlib.sha256).hexdigest().encode()


class PeerLinks:
    """The connections of this host to all others: statuses sent and received."""

    def __init__(self, key: bytes, on_status: Callable[[HostStatus], None]) -> None:
        self._key, self._on_status = key, on_status
        self._decoder = json_decoder(HostStatus)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._endpoints: dict[str, list[Endpoint]] = {}  # of each peer: those to try, in this order
        self._receivers: set[asyncio.Task[None]] = set()
        self._status_changed, self._payload = asyncio.Event(), b""
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._max_unauthenticated = max_strangers(MAX_UNAUTHENTICATED)

    async def listen(self, endpoint: Endpoint) -> int:
        """Listen on this one address; return the port. OSError if it is taken."""
        self._listener = socket.create_server(endpoint, family=address_family(endpoint[0]), backlog=BACKLOG)
        self._listener.setblocking(False)
        accepting = accept_connections(self._listener, self._make_protocol, lambda error: self._end_oldest())
        self._accepting = asyncio.create_task(accepting)
        port: int = self._listener.getsockname()[1]
        return port

    def broadcast(self, status: HostStatus, peers: Mapping[str, Sequence[Endpoint]]) -> None:
        """Send the status to all peers as soon as possible; it replaces an earlier one that is not sent yet.

        `peers`: for each host the endpoints on which its agent may listen, the likeliest first.
        """
        self._payload = msgspec.json.encode(status)
        for name in peers.keys() - self._senders.keys():
            self._endpoints[name] = [*peers[name]]
            self._senders[name] = asyncio.create_task(self._send_to_peer(name))
        previous, self._status_changed = self._status_changed, asyncio.Event()
        previous.set()

    async def close(self) -> None:
        """Close all connections."""
        tasks = [*self._senders.values(), *self._receivers, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _send_to_peer(self, name: str) -> None:
        num_failures = 0  # tries in a row without an answer
        while True:
            endpoint = self._endpoint_to_try(name, num_failures)
            num_failures += 1
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(ACK_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(*endpoint)
                try:
                    async for _ in self._send_statuses(reader, writer):
                        num_failures = 0
                        self._prefer_endpoint(name, endpoint)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(RECONNECT_S)

    def _endpoint_to_try(self, name: str, num_failures: int) -> Endpoint:
        """Return the endpoint on which to call a peer: the preferred one, after every second failure another one."""
        preferred, *others = self._endpoints[name]
        return others[num_failures // 3 % len(others)] if others and num_failures % 3 == 2 else preferred

    def _prefer_endpoint(self, name: str, endpoint: Endpoint) -> None:
        """Call a peer on this endpoint first from now on."""
        self._endpoints[name] = [endpoint, *(other for other in self._endpoints[name] if other != endpoint)]

    def _learn_port(self, name: str, port: int) -> None:
        """Call a peer at once on the port that its status names, unless it is called there already."""
        if port and name in self._senders and port != self._endpoints[name][0][1]:
            self._prefer_endpoint(name, (self._endpoints[name][0][0], port))
            self._senders[name].cancel()
            self._senders[name] = asyncio.create_task(self._send_to_peer(name))

    async def _send_statuses(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Send each new status on this connection; yield for each that the peer accepts."""
        async with asyncio.timeout(ACK_TIMEOUT_S):
            nonce = await reader.readexactly(NONCE_BYTES)
        number = 0
        while True:
            changed, payload = self._status_changed, self._payload
            writer.write(line_mac(self._key, nonce, number, payload) + b" " + payload + b"\n")
            async with asyncio.timeout(ACK_TIMEOUT_S):
                await reader.readexactly(1)
            yield
            number += 1
            await changed.wait()

    def _make_protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(MAX_LINE_BYTES), self._on_connection)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection in a task of our own: cancelling one of asyncio's prints a traceback [Python 3.11]."""
        task = asyncio.create_task(self._serve_connection(reader, writer))
        self._receivers.add(task)
        task.add_done_callback(self._receivers.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unauthenticated) >= self._max_unauthenticated:
            self._end_oldest()
        self._unauthenticated[writer] = None
        try:
            await self._receive_statuses(reader, writer)
        # ValueError: a line too long; RecursionError: JSON nested too deep
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError, TimeoutError):
            pass
        finally:
            self._unauthenticated.pop(writer, None)
            writer.transport.abort()

    def _end_oldest(self) -> None:
        """End the oldest connection that has not authenticated itself, if there is one."""
        for oldest in [*self._unauthenticated][:1]:
            del self._unauthenticated[oldest]
            oldest.transport.abort()

    async def _receive_statuses(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive statuses until the connection ends, or a line with an invalid MAC arrives."""
        nonce, number = secrets.token_bytes(NONCE_BYTES), 0
        writer.write(nonce)
        while True:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                line = await reader.readline()
            mac, _, payload = line.rstrip(b"\n").partition(b" ")
            if not hmac.compare_digest(mac, line_mac(self._key, nonce, number, payload)):
                return
            status = self._decoder.decode(payload)
            self._learn_port(status.host, status.port)
            self._on_status(status)
            self._unauthenticated.pop(writer, None)
            writer.write(b".")
            number += 1
