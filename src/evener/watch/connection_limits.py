"""Limit what strangers can take from the dashboard's server: connections without its token are few, and short.

    accepted               counted, and closed after REQUEST_TIMEOUT_S
    one more than allowed  the oldest counted connection is closed for it
    a valid token          no longer counted and never closed here, as an event stream lasts
    a refused request      answered, then closed (auth.py)

Connections are accepted one at a time, and each is read while the next one is accepted. So a request that comes with
its connection, as a browser's does, is read before a flood of newer connections can close it.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from evener.watch.auth import ON_AUTHENTICATED

MAX_UNAUTHENTICATED = 64  # connections without a token at a time, or fewer if the process may open few files
REQUEST_TIMEOUT_S = 10.0  # from accepting a connection until a request with a valid token has arrived
ACCEPT_PAUSE_S = 0.2  # after accept() failed, as for lack of file descriptors
WANTED_OPEN_FILES = 16_384


def raise_open_files_limit() -> int:
    """Raise this process's limit of open files to WANTED_OPEN_FILES, or as far as the system allows; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class UnauthenticatedConnections:
    """The connections on which no valid token has arrived yet, oldest first."""

    def __init__(self, open_files: int, notify: Callable[[str], None]) -> None:
        """`open_files`: how many the process may open; a quarter is left to strangers. `notify` receives a warning."""
        self._max = min(MAX_UNAUTHENTICATED, max(1, open_files // 4))
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._notify, self._warned = notify, set[str]()

    def add(self, transport: asyncio.Transport) -> None:
        """Count a new connection; close the oldest one if there are too many."""
        if len(self._timers) >= self._max:
            self.close_oldest()
            self.warn_once(
                f"warning: over {self._max} connections without a valid token at a time: the oldest are closed"
            )
        timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self._close, transport)
        self._timers[transport] = timer

    def discard(self, transport: asyncio.Transport) -> None:
        """Stop counting a connection: a valid token arrived on it, or it has ended."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def close_oldest(self) -> None:
        """Close the oldest connection, if there is one."""
        for transport in [*self._timers][:1]:
            self._close(transport)

    def warn_once(self, text: str) -> None:
        """Pass a warning on, unless it was before: strangers must not fill a log."""
        if text not in self._warned:
            self._warned.add(text)
            self._notify(text)

    def _close(self, transport: asyncio.Transport) -> None:
        self.discard(transport)
        transport.abort()


class LimitedHTTPProtocol(H11Protocol):
    """HTTP on one connection, which is limited until a request with a valid token has arrived on it."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], waiting: UnauthenticatedConnections
    ) -> None:
        super().__init__(config, server_state, app_state | {ON_AUTHENTICATED: self._on_authenticated})
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection."""
        self._waiting.add(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._waiting.discard(self.transport)
        super().connection_lost(exc)

    def _on_authenticated(self) -> None:
        self._waiting.discard(self.transport)


async def accept_connections(
    listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], waiting: UnauthenticatedConnections
) -> None:
    """Accept connections until cancelled; pause where the process or the system has no file descriptor left."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except ConnectionError:  # it was reset before it was accepted
            continue
        except OSError as error:
            waiting.warn_once(f"warning: no connection can be accepted now: {error.strerror}; trying again")
            waiting.close_oldest()
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        try:
            await loop.connect_accepted_socket(make_protocol, connection)
        except OSError:  # it was reset meanwhile
            connection.close()
