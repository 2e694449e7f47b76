"""On which address does the page's server listen, and how does it end? At once: no open stream keeps it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn

from evener.core.errors import UsageError
from evener.watch.guard import LOOPBACK, Guard
from evener.watch.hub import Hub
from evener.watch.server import Actions, Server

PORT = 7447
ENDS_S = 1  # for answers that are under way


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens there: at the port that was asked for, else at ours or, where that is taken, a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (port,) if port is not None else (PORT, 0):
        one = socket.socket(family, socket.SOCK_STREAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, wanted))
            one.listen(128)
            return one
        except OSError as error:
            one.close()
            why = error.strerror
    where = f"--host {host}" + (f" --port {port}" if port is not None else "")
    raise UsageError(f"{where}: {why}", hint="without --port a free one is taken; --host is an address of this machine")


def serve(
    one: socket.socket, hub: Hub, actions: Actions, token: str, names: list[str], begin: Callable[[], None]
) -> None:
    """Answer until SIGINT or SIGTERM. `names`: of this server beside the loopback's; `begin` is called when it does."""
    port = one.getsockname()[1]
    app = Guard(Server(hub, actions).app(), token, port, names)
    config = uvicorn.Config(app, access_log=False, log_level="error", server_header=False, date_header=False,
                            timeout_graceful_shutdown=ENDS_S, http="h11", ws="none", lifespan="on")  # fmt: skip
    server = _Ending(config, hub, begin)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[one]))


def address(one: socket.socket, host: str, token: str) -> str:
    """What a person opens; where all of this machine's addresses listen, the one by which others reach it."""
    found = _outward() if host in ("0.0.0.0", "::") else host  # noqa: S104
    shown = f"[{found}]" if ":" in found else found
    return f"http://{shown}:{one.getsockname()[1]}/?token={token}"


def _outward() -> str:
    """The address from which this machine would send to any other; the loopback's where it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # nothing is sent: of a datagram this only looks up the way [RFC 5737]
        except OSError:
            return LOOPBACK[0]
        return str(one.getsockname()[0])


class _Ending(uvicorn.Server):
    """A server whose streams end with it."""

    def __init__(self, config: uvicorn.Config, hub: Hub, begin: Callable[[], None]) -> None:
        super().__init__(config)
        self._hub, self._begin = hub, begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and tell it."""
        await super().startup(sockets)
        if self.started:
            self._begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits for streams."""
        self._hub.close()
        await super().shutdown(sockets)
