"""Accept connections from a network so that strangers can neither exhaust the process nor fill its log."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable

BACKLOG = 1024  # connections that the kernel holds until they are accepted
ACCEPT_PAUSE_S = 0.2  # after accept() failed, as for lack of file descriptors
WANTED_OPEN_FILES = 16_384


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files to WANTED_OPEN_FILES, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_strangers(wanted: int) -> int:
    """Return how many unauthenticated connections to keep: `wanted`, or a quarter of the open files if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // 4))


async def accept_connections(
    listener: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
    on_failure: Callable[[OSError], None],
) -> None:
    """Accept connections until cancelled. Where that fails, as without a file descriptor left, pause and try again.

    One is accepted at a time, and each is read while the next one is accepted. So what arrives with a connection is
    read before a flood of newer connections can replace it. asyncio's own servers accept many at once and, without a
    file descriptor left, print a traceback for each [Python 3.11, `BaseSelectorEventLoop._accept_connection`].
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except ConnectionError:  # it was reset before it was accepted
            continue
        except OSError as error:
            on_failure(error)
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        try:
            await loop.connect_accepted_socket(make_protocol, connection)
        except OSError:  # it was reset meanwhile
            connection.close()
