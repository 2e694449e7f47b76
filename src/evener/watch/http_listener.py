"""Serve the dashboard over HTTP: open the listening socket, run uvicorn, and shut down at once despite open streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn

from evener.core.base.accept_connections import BACKLOG, accept_connections, raise_open_files_limit
from evener.core.base.errors import UsageError
from evener.watch.auth import LOOPBACK, AuthMiddleware
from evener.watch.connection_limits import LimitedHTTPProtocol, UnauthenticatedConnections
from evener.watch.dashboard import Dashboard
from evener.watch.http_app import DashboardApp, RunActions

PORT = 7447
SHUTDOWN_TIMEOUT_S = 1  # for responses in progress


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on `port`; if that is None, on PORT or, if PORT is taken, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port,) if port is not None else (PORT, 0):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, candidate))
            sock.listen(BACKLOG)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            why = error.strerror
    where = f"--host {host}" + (f" --port {port}" if port is not None else "")
    hint = "without --port a free port is chosen; --host must be an address of this machine"
    raise UsageError(f"{where}: {why}", hint=hint)


def serve_dashboard(
    sock: socket.socket,
    hub: Dashboard,
    actions: RunActions,
    token: str,
    host_names: list[str],
    on_started: Callable[[], None],
    notify: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    `host_names`: names of this server other than the loopback's; `on_started` is called once it accepts requests;
    `notify` receives warnings about connections.
    """
    port = sock.getsockname()[1]
    app = AuthMiddleware(DashboardApp(hub, actions).build(), token, port, host_names)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="error",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        http=LimitedHTTPProtocol,
        ws="none",
        lifespan="on",
    )
    raise_open_files_limit()
    server = _DashboardServer(config, hub, UnauthenticatedConnections(notify), on_started)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[sock]))


def dashboard_url(sock: socket.socket, host: str, token: str) -> str:
    """Return the URL to open; for a server on all addresses, the one that other machines reach."""
    reachable = _outbound_address() if host in ("0.0.0.0", "::") else host  # noqa: S104
    shown = f"[{reachable}]" if ":" in reachable else reachable
    return f"http://{shown}:{sock.getsockname()[1]}/?token={token}"


def _outbound_address() -> str:
    """Return the address from which this machine sends to other networks; the loopback's if it has no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: a datagram socket only looks up the route [RFC 5737]
        except OSError:
            return LOOPBACK[0]
        return str(sock.getsockname()[0])


class _DashboardServer(uvicorn.Server):
    """A uvicorn server that limits connections without a token, and ends its event streams when it shuts down."""

    def __init__(
        self,
        config: uvicorn.Config,
        hub: Dashboard,
        waiting: UnauthenticatedConnections,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._hub, self._waiting, self._on_started = hub, waiting, on_started
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, but accept connections ourselves, then call `on_started`."""
        await super().startup(sockets=[])
        for sock in sockets or []:
            accepting = accept_connections(sock, self._make_protocol, self._waiting.on_accept_failure)
            self._accepting.append(asyncio.create_task(accepting))
        self._on_started()

    def _make_protocol(self) -> asyncio.Protocol:
        return LimitedHTTPProtocol(self.config, self.server_state, self.lifespan.state, self._waiting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and end the streams first, because uvicorn waits for them; then shut down."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._hub.close_streams()
        await super().shutdown(sockets)
