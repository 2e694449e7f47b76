"""Exchange host statuses: every host keeps one TCP connection to every other and sends its newest status on it.

    receiver ─▶ a nonce, once                       a line recorded elsewhere, or earlier, is not valid
    sender   ─▶ MAC STATUS, one a line              MAC = HMAC-SHA256(the run's key; nonce, line number, status)
    receiver ─▶ one byte for each that it accepts   none for a while: the connection is dead, try another one

Only JSON of known types is read, and no line longer than `MAX_LINE_BYTES`. A line with an invalid MAC ends the
connection. An eavesdropper on the network can read who takes part, and cannot forge a status. Nor can it block others
by opening connections: a new one replaces the oldest connection that has not authenticated itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping

import msgspec

from evener.agent.council import Statement
from evener.core.decoding import json_decoder

LINE_BYTES = 1 << 16
NONCE_BYTES = 16
# Timeout of a connection, and of each byte on it. A dead connection must be replaced, and a status received on the new
# one, before the host times out: `HEARTBEAT_INTERVAL_S`, these two and some slack must be below any host timeout.
ANSWER_S = 1.8
RETRY_S = 0.5
IDLE_S = 30.0  # that a receiver waits for a line
MAX_UNPROVEN = 256  # connections not authenticated yet: bounds the memory that strangers can use
Endpoint = tuple[str, int]  # address, port


def sign(key: bytes, nonce: bytes, number: int, text: bytes) -> bytes:
    """Return the MAC, in hexadecimal, of the line with this number on the connection with this nonce."""
    return hmac.new(key, b"%s %d %s" % (nonce.hex().encode(), number, text), hashlib.sha256).hexdigest().encode()


class Gossip:
    """The connections of this host to all others: statuses sent and received."""

    def __init__(self, key: bytes, hear: Callable[[Statement], None]) -> None:
        self._key, self._hear = key, hear
        self._decoder = json_decoder(Statement)
        self._server: asyncio.Server | None = None
        self._speakers: dict[str, asyncio.Task[None]] = {}
        self._listeners: set[asyncio.Task[None]] = set()
        self._said, self._text = asyncio.Event(), b""
        self._unproven: dict[asyncio.StreamWriter, None] = {}  # oldest first

    async def listen(self, endpoint: Endpoint) -> int:
        """Listen on this one address; return the port. OSError if it is taken."""
        self._server = await asyncio.start_server(self._accept, *endpoint, limit=LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def say(self, statement: Statement, others: Mapping[str, Endpoint]) -> None:
        """Send the status to all peers as soon as possible; it replaces an earlier one that is not sent yet."""
        self._text = msgspec.json.encode(statement)
        for name in others.keys() - self._speakers.keys():
            self._speakers[name] = asyncio.create_task(self._speak(others[name]))
        previous, self._said = self._said, asyncio.Event()
        previous.set()

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._speakers.values(), *self._listeners]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _speak(self, to: Endpoint) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    reader, writer = await asyncio.open_connection(*to)
                try:
                    await self._tell(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(RETRY_S)

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ANSWER_S):
            nonce = await reader.readexactly(NONCE_BYTES)
        number = 0
        while True:
            changed, payload = self._said, self._text
            writer.write(sign(self._key, nonce, number, payload) + b" " + payload + b"\n")
            async with asyncio.timeout(ANSWER_S):
                await reader.readexactly(1)
            number += 1
            await changed.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection in a task of our own: cancelling one of asyncio's prints a traceback [Python 3.11]."""
        task = asyncio.create_task(self._listen(reader, writer))
        self._listeners.add(task)
        task.add_done_callback(self._listeners.discard)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()
        self._unproven[writer] = None
        try:
            await self._believe(reader, writer)
        # ValueError: a line too long; RecursionError: JSON nested too deep
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError, TimeoutError):
            pass
        finally:
            self._unproven.pop(writer, None)
            writer.transport.abort()

    async def _believe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive statuses until the connection ends, or a line with an invalid MAC arrives."""
        nonce, number = secrets.token_bytes(NONCE_BYTES), 0
        writer.write(nonce)
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await reader.readline()
            mac, _, payload = line.rstrip(b"\n").partition(b" ")
            if not hmac.compare_digest(mac, sign(self._key, nonce, number, payload)):
                return
            self._hear(self._decoder.decode(payload))
            self._unproven.pop(writer, None)
            writer.write(b".")
            number += 1
