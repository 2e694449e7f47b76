"""How do hosts tell each other how they are? Each keeps a connection to each other one, and says its newest statement
on it, again and again.

    listener ─▶ a nonce, once                       a line that was heard elsewhere, or before, is none
    speaker  ─▶ MAC STATEMENT, a line each          MAC = HMAC-SHA256(the run's key; nonce, line's number, statement)
    listener ─▶ one byte for each that it believes  none for a while: the connection is dead, another one is tried

Nothing but JSON of known types is read, no line longer than LINE_BYTES; what is not signed ends the connection. Whoever
listens in on the network can read who takes part, and can't say anything. Nor can it keep others from being heard by
connecting: the oldest connection on which nothing signed has come makes room for a new one.
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
# For a connection, and for each byte on it. One that is dead is replaced, and heard, before anybody is missed: the
# council's SAY_S, these two and some more must be less than the shortest time for which a host may be silent.
ANSWER_S = 1.8
RETRY_S = 0.5
IDLE_S = 30.0  # that a listener waits for a line
MAX_UNPROVEN = 256  # connections on which nothing signed has come: nobody fills the memory by asking
Endpoint = tuple[str, int]  # address, port


def sign(key: bytes, nonce: bytes, number: int, text: bytes) -> bytes:
    """Of the line with this number on the connection with this nonce; hexadecimal."""
    return hmac.new(key, b"%s %d %s" % (nonce.hex().encode(), number, text), hashlib.sha256).hexdigest().encode()


class Gossip:
    """What this host says, and hears."""

    def __init__(self, key: bytes, hear: Callable[[Statement], None]) -> None:
        self._key, self._hear = key, hear
        self._decoder = json_decoder(Statement)
        self._server: asyncio.Server | None = None
        self._speakers: dict[str, asyncio.Task[None]] = {}
        self._listeners: set[asyncio.Task[None]] = set()
        self._said, self._text = asyncio.Event(), b""
        self._unproven: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def listen(self, endpoint: Endpoint) -> int:
        """Hear the others on one address alone; the port. OSError where it is taken."""
        self._server = await asyncio.start_server(self._accept, *endpoint, limit=LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def say(self, statement: Statement, others: Mapping[str, Endpoint]) -> None:
        """Tell it to all of them, as soon as it can be; what was said before and is not sent yet is forgotten."""
        self._text = msgspec.json.encode(statement)
        for name in others.keys() - self._speakers.keys():
            self._speakers[name] = asyncio.create_task(self._speak(others[name]))
        said, self._said = self._said, asyncio.Event()
        said.set()

    async def close(self) -> None:
        """Say and hear no more."""
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
            said, text = self._said, self._text
            writer.write(sign(self._key, nonce, number, text) + b" " + text + b"\n")
            async with asyncio.timeout(ANSWER_S):
                await reader.readexactly(1)
            number += 1
            await said.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tasks of our own: to end one that asyncio began prints a traceback [Python 3.11]."""
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
        # ValueError: a line that is too long; RecursionError: JSON that is too deep
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError, TimeoutError):
            pass
        finally:
            self._unproven.pop(writer, None)
            writer.transport.abort()

    async def _believe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear statements until there is no more, or one that nobody of this run made."""
        nonce, number = secrets.token_bytes(NONCE_BYTES), 0
        writer.write(nonce)
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await reader.readline()
            mac, _, text = line.rstrip(b"\n").partition(b" ")
            if not hmac.compare_digest(mac, sign(self._key, nonce, number, text)):
                return
            self._hear(self._decoder.decode(text))
            self._unproven.pop(writer, None)
            writer.write(b".")
            number += 1
