"""Limit what strangers can take from the dashboard's server: connections without its token are few, and short.

    accepted               counted, and closed after REQUEST_TIMEOUT_S
    one more than allowed  the oldest counted connection is closed for it
    a valid token          no longer counted and never closed here, as an event stream lasts
    a refused request      answered, then closed (auth.py)

A browser sends its request with its connection, so that the owner's is read before newer connections can close it
(core/base/accept_connections.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from evener.core.base.accept_connections import max_strangers
from evener.watch.auth import ON_AUTHENTICATED

MAX_UNAUTHENTICATED = 64  # connections without a token at a time, or fewer if the process may open few files
REQUEST_TIMEOUT_S = 10.0  # from accepting a connection until a request with a valid token has arrived


class UnauthenticatedConnections:
    """The connections on which no valid token has arrived yet, oldest first."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify` receives a warning when there are too many, or none can be accepted."""
        self._max = max_strangers(MAX_UNAUTHENTICATED)
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._notify, self._warned = notify, set[str]()

    def add(self, transport: asyncio.Transport) -> None:
        """Count a new connection; close the oldest one if there are too many."""
        if len(self._timers) >= self._max:
            self.close_oldest()
            self._warn_once(f"over {self._max} connections without a valid token at a time: the oldest are closed")
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

    def on_accept_failure(self, error: OSError) -> None:
        """Make room for the next connection, where none could be accepted."""
        self.close_oldest()
        self._warn_once(f"no connection can be accepted now: {error.strerror}; trying again")

    def _warn_once(self, text: str) -> None:
        """Pass a warning on, unless it was before: strangers must not fill a log."""
        if text not in self._warned:
            self._warned.add(text)
            self._notify(f"warning: {text}")

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
