"""Free ports and address families on this host. Standard library only, Python 3.8 or newer, Linux or macOS."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
from typing import Collection  # noqa: UP035  python 3.8

NUM_TRIES = 64
NUM_SPARE_PORTS = 4
SPARE_PORTS = (49152, 60999)  # in the ranges from which Linux and macOS choose ports, so that firewalls let them in


def address_family(address: str) -> socket.AddressFamily:
    """Return the address family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def agent_ports(port: int, key: bytes) -> list[int]:
    """Return the ports on which an agent of a run may listen: the run's `port`, then spare ones for when it is taken.

    Every host derives the same spare ports from the run's key, so an agent that had to move is called without anybody
    having to learn its port: also where all agents have moved or restarted.
    """
    low, high = SPARE_PORTS
    digests = [hashlib.sha256(b"%s spare port %d" % (key, i)).digest() for i in range(NUM_SPARE_PORTS)]
    return [port, *(low + int.from_bytes(digest[:8], "big") % (high - low + 1) for digest in digests)]


def free_port(address: str, wanted: int = 0) -> int:
    """Return `wanted` if it is free on this address, or one that the kernel chooses; OSError if there is none."""
    with socket.socket(address_family(address)) as listener:
        if wanted:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, wanted))
        port: int = listener.getsockname()[1]
        return port


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on one address only; torch's own store would listen on all. Raise OSError."""
    listener = socket.socket(address_family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    listener.listen(1024)
    return listener


def find_free_port(address: str, wanted: int, low: int, high: int, avoid: Collection[int] = ()) -> int | None:
    """Return a port that is free on this address and not in `avoid`: `wanted`, else a random one from `low` to `high`.

    None if there is none.
    """
    for port in [wanted, *random.sample(range(low, high), NUM_TRIES)]:
        with contextlib.suppress(OSError):
            if port not in avoid:
                return free_port(address, port)
    return None
