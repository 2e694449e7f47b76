"""Probe the connectivity between this machine and its peers: one `listen` serves all peers, one `connect` tries all.

Standard library only, Python 3.8 or newer, Linux or macOS. A listener answers only peers that know the secret of the
preflight check, with an identity of its own. So a port answered by another program, or the same address on another
machine, is never mistaken for the peer.

    connection   secret (32 bytes), a letter, then
                 H                     → identity (32 bytes)
                 E, (length, bytes)*   → the same bytes
                 S, warm-up seconds, bytes until the end → (bytes after the warm-up, seconds they took, all bytes)
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import selectors
import socket
import struct
import threading
import time
from typing import Any, Collection, Dict  # noqa: UP035  python 3.8

from evener.node.remote.sockets import address_family

TOKEN_BYTES = 32  # bytes of a secret and of an identity
CHUNK_BYTES = 1 << 18
STALL_TIMEOUT_S = 1.5  # a transfer without progress for this long is stalled
TOTAL_RETRANS, SND_MSS = 100, 16  # offsets of tcpi_total_retrans and tcpi_snd_mss in Linux's struct tcp_info
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_PROBE = 10, 23, 3  # Linux: do not fragment, ignore the cached path MTU
IP_DONTFRAG, IPV6_DONTFRAG = 28, 62  # macOS
HEADER_BYTES = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP
MIN_MTU = 576
SIZES_PER_ROUND = 48
DATAGRAM_TIMEOUT_S = 0.12
SPARE_FILES = 200
# Connections at a time of peers, and of strangers (fewer where few files may be open): each has a thread.
MAX_CONNECTIONS = 256
SECRET_TIMEOUT_S = 5.0  # from accepting a connection until the secret has arrived
PEER_TIMEOUT_S = 5.0  # that a peer, which has sent the secret, may be silent
ACCEPT_PAUSE_S = 0.1  # after accept() failed for lack of a resource
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Fields = Dict[str, Any]  # noqa: UP006
OpenSockets = Dict[int, socket.socket]  # noqa: UP006  by the index of the target

_listeners: list[socket.socket] = []  # listening sockets
_stop_events: list[threading.Event] = []  # one event for all threads that one `listen` started


# --- listening ---------------------------------------------------------------------------------------------------


def listen(
    addresses: list[str],
    secret: str,
    identity: str,
    port: int | None = None,
    more: int = 0,
    low: int = 32768,
    high: int = 60999,
    avoid: Collection[int] = (),
) -> dict[str, Fields]:
    """Listen on every address: a port that the kernel chooses (as for Gloo), `port`, `more` random ones; and UDP.

    No TCP port of `avoid` is taken: a run needs it whose program restarts at this moment.
    Returns {address: {"ephemeral", "rendezvous", "more", "udp", "error"}}; ports that could not be bound are None.
    """
    close()
    stop = threading.Event()
    _stop_events.append(stop)
    selector = selectors.DefaultSelector()
    ports_by_address: dict[str, Fields] = {}
    for address in addresses:
        ports: Fields = {"ephemeral": None, "rendezvous": None, "more": [], "udp": None, "error": None}
        try:
            ports["ephemeral"] = _ephemeral_listener(selector, address, avoid)
            ports["udp"] = _udp_listener(address, secret, stop)
        except OSError as error:
            ports["error"] = error.strerror or str(error)
            ports_by_address[address] = ports
            continue
        ports["rendezvous"] = _try_listener(selector, address, port) if port and port not in avoid else None
        for candidate in random.sample(range(low, high + 1), min(more * 8, high - low)):
            if len(ports["more"]) == more:
                break
            if candidate not in avoid and _try_listener(selector, address, candidate):
                ports["more"].append(candidate)
        ports_by_address[address] = ports
    threading.Thread(
        target=_accept_connections, args=(selector, secret.encode(), identity.encode(), stop), daemon=True
    ).start()
    return ports_by_address


def close() -> None:
    """Close all listening sockets."""
    while _stop_events:
        _stop_events.pop().set()
    while _listeners:
        _listeners.pop().close()


def _listener(selector: selectors.BaseSelector, address: str, port: int) -> int:
    server = socket.socket(address_family(address), socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(256)
        server.setblocking(False)
    except OSError:
        server.close()
        raise
    _listeners.append(server)
    selector.register(server, selectors.EVENT_READ)
    return int(server.getsockname()[1])


def _ephemeral_listener(selector: selectors.BaseSelector, address: str, avoid: Collection[int]) -> int:
    """Listen on a port that the kernel chooses; one of `avoid` is closed again once there is another."""
    port = _listener(selector, address, 0)
    if port not in avoid:
        return port
    unwanted = _listeners[-1]
    try:
        return _ephemeral_listener(selector, address, avoid)
    finally:
        selector.unregister(unwanted)
        _listeners.remove(unwanted)
        unwanted.close()


def _try_listener(selector: selectors.BaseSelector, address: str, port: int) -> int | None:
    try:
        return _listener(selector, address, port)
    except OSError:
        return None


def _udp_listener(address: str, secret: str, stop: threading.Event) -> int:
    server = socket.socket(address_family(address), socket.SOCK_DGRAM)
    server.bind((address, 0))
    server.settimeout(0.5)
    _listeners.append(server)
    threading.Thread(target=_answer_datagrams, args=(server, secret.encode(), stop), daemon=True).start()
    return int(server.getsockname()[1])


class StrangerConnections:
    """The accepted connections that have not sent the secret yet, oldest first: a new one replaces the oldest."""

    def __init__(self) -> None:
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max = MAX_CONNECTIONS if open_files < 0 else max(1, min(MAX_CONNECTIONS, open_files // 4))
        self._lock = threading.Lock()
        self._connections: Dict[socket.socket, None] = {}  # noqa: UP006

    def add(self, connection: socket.socket) -> None:
        """Count a new connection."""
        while len(self._connections) >= self._max:
            self.end_oldest()
        with self._lock:
            self._connections[connection] = None

    def discard(self, connection: socket.socket) -> None:
        """Stop counting a connection: it has sent the secret, or has ended."""
        with self._lock:
            self._connections.pop(connection, None)

    def end_oldest(self) -> None:
        """End the oldest connection, if there is one; its thread then closes it."""
        with self._lock:
            for connection in list(self._connections)[:1]:
                del self._connections[connection]
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _accept_connections(
    selector: selectors.BaseSelector, secret: bytes, identity: bytes, stop: threading.Event
) -> None:
    strangers, free = StrangerConnections(), threading.BoundedSemaphore(MAX_CONNECTIONS)
    while not stop.is_set():
        for key, _ in selector.select(0.5):
            try:
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    strangers.end_oldest()
                    stop.wait(ACCEPT_PAUSE_S)
                continue
            strangers.add(connection)
            work = threading.Thread(
                target=_serve_connection, args=(connection, secret, identity, strangers, free), daemon=True
            )
            try:
                work.start()
            except RuntimeError:  # the system allows no more threads
                strangers.discard(connection)
                connection.close()
    selector.close()


def _serve_connection(
    connection: socket.socket,
    secret: bytes,
    identity: bytes,
    strangers: StrangerConnections,
    free: threading.BoundedSemaphore,
) -> None:
    """Answer one connection once it has sent the secret, unless MAX_CONNECTIONS others that have are being answered."""
    with connection, contextlib.suppress(OSError):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            is_peer = _receive_exactly(connection, TOKEN_BYTES, time.monotonic() + SECRET_TIMEOUT_S) == secret
        finally:
            strangers.discard(connection)
        if is_peer and free.acquire(blocking=False):
            try:
                connection.settimeout(PEER_TIMEOUT_S)
                _answer_peer(connection, identity)
            finally:
                free.release()


def _answer_peer(connection: socket.socket, identity: bytes) -> None:
    request = _receive_exactly(connection, 1)
    if request == b"H":
        connection.sendall(identity)
    elif request == b"E":
        while True:
            length = struct.unpack("!I", _receive_exactly(connection, 4))[0]
            connection.sendall(_receive_exactly(connection, length))
    elif request == b"S":
        connection.sendall(_measure_received(connection))


def _measure_received(connection: socket.socket) -> bytes:
    warm_s = struct.unpack("!d", _receive_exactly(connection, 8))[0]
    buffer = memoryview(bytearray(CHUNK_BYTES))
    total = counted = 0
    last_at = 0.0
    first_at = counting_since = None
    while True:
        size = connection.recv_into(buffer)
        if not size:
            break
        last_at = time.perf_counter()
        first_at = first_at or last_at
        total += size
        if counting_since is not None:
            counted += size
        elif last_at - first_at >= warm_s:
            counting_since = last_at
    took_s = last_at - counting_since if counting_since is not None else 0.0
    return struct.pack("!QdQ", counted, took_s, total)


def _answer_datagrams(server: socket.socket, secret: bytes, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            data, sender = server.recvfrom(1 << 16)
            if data.startswith(secret):
                server.sendto(data[TOKEN_BYTES : TOKEN_BYTES + 8], sender)
        except OSError:  # nothing arrived within the timeout, or the socket is closed
            continue


# --- connecting --------------------------------------------------------------------------------------------------


def connect(targets: list[Fields], secret: str, within_s: float) -> list[Fields]:
    """Try to connect to all targets at the same time; each is {"peer", "address", "port", "identity", "rank"}.

    Return {"result", "detail", "source"} for each. The result is "ok", "refused", "timeout", "unreachable", "stranger"
    (another program answers), or "untried": not awaited, as every peer had answered on a target of lower rank. With
    an identity of None the result is "ok" once the connection is accepted. "source" is the local address that the
    kernel chose.
    """
    results: list[Fields] = [{"result": "timeout", "detail": None, "source": None} for _ in targets]
    with contextlib.suppress(ValueError, OSError):  # a large fleet needs many at once
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(targets) + SPARE_FILES > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, len(targets) + SPARE_FILES), hard))
    selector = selectors.DefaultSelector()
    attempts: OpenSockets = {}
    for i, target in enumerate(targets):
        _start_connect(selector, attempts, results, i, target)
    deadline = time.monotonic() + within_s
    enough_at = None
    while attempts:
        now = time.monotonic()
        if _has_enough_answers(targets, results, attempts):
            enough_at = enough_at or now + 0.15
        if now >= min(deadline, enough_at or deadline):
            break
        for key, events in selector.select(min(deadline, enough_at or deadline) - now):
            i = key.data
            try:
                outcome = _advance_connect(selector, attempts[i], targets[i], secret, events)
            except OSError as error:
                outcome = _classify_error(error)
            if outcome is not None:
                results[i].update(outcome)
                selector.unregister(attempts[i])
                attempts.pop(i).close()
    for i, connection in attempts.items():
        if enough_at is not None and time.monotonic() < deadline:
            results[i]["result"] = "untried"
        connection.close()
    selector.close()
    return results


def _start_connect(
    selector: selectors.BaseSelector, attempts: OpenSockets, results: list[Fields], i: int, target: Fields
) -> None:
    try:
        connection = socket.socket(address_family(target["address"]), socket.SOCK_STREAM)
    except OSError as error:  # no IPv6 here, or too many files
        results[i].update(result="untried", detail=str(error))
        return
    connection.setblocking(False)
    status = connection.connect_ex((target["address"], target["port"]))
    if status not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        results[i].update(_classify_error(OSError(status, None)))
        connection.close()
        return
    with contextlib.suppress(OSError):
        results[i]["source"] = connection.getsockname()[0]
    attempts[i] = connection
    selector.register(connection, selectors.EVENT_WRITE, i)


def _advance_connect(
    selector: selectors.BaseSelector, connection: socket.socket, target: Fields, secret: str, events: int
) -> Fields | None:
    """Advance one connection attempt; return its outcome once there is one."""
    if events & selectors.EVENT_WRITE:
        status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, None)
        if target["identity"] is None:
            return {"result": "ok"}
        connection.send(secret.encode() + b"H")
        selector.modify(connection, selectors.EVENT_READ, selector.get_key(connection).data)
        return None
    reply = connection.recv(TOKEN_BYTES)
    if reply == target["identity"].encode():
        return {"result": "ok"}
    return {"result": "stranger", "detail": "another program or machine answered"}


def _has_enough_answers(targets: list[Fields], results: list[Fields], attempts: OpenSockets) -> bool:
    """Return whether every peer answered on some target and all its targets of lower rank are decided."""
    best: dict[str, Any] = {}
    pending: dict[str, int] = {}
    for i, target in enumerate(targets):
        peer, rank = target["peer"], target["rank"]
        best.setdefault(peer, None)
        if i in attempts:
            pending[peer] = min(rank, pending.get(peer, rank))
        elif results[i]["result"] == "ok":
            best[peer] = rank if best[peer] is None else min(rank, best[peer])
    return all(rank is not None and pending.get(peer, rank + 1) > rank for peer, rank in best.items())


def _classify_error(error: OSError) -> Fields:
    kind = "unreachable"
    if error.errno == errno.ECONNREFUSED:
        kind = "refused"
    elif error.errno == errno.ETIMEDOUT or isinstance(error, socket.timeout):
        kind = "timeout"
    elif error.errno in (errno.ECONNRESET, errno.EPIPE):
        kind = "stranger"
    return {"result": kind, "detail": os.strerror(error.errno) if error.errno else str(error)}


def arp_neighbours(addresses: list[str]) -> dict[str, str]:
    """Return {address: MAC address} of those `addresses` that are in this machine's ARP table. Linux only."""
    mac_addresses = {}
    with contextlib.suppress(OSError), open("/proc/net/arp") as table:
        for line in table:
            fields = line.split()
            if fields[0] in addresses and fields[3] != "00:00:00:00:00:00":
                mac_addresses[fields[0]] = fields[3]
    return mac_addresses


def round_trips(targets: list[Fields], secret: str, repeats: int = 20) -> list[list[float]]:
    """Return the seconds of each round trip of a small message, per target; [] if none came back."""
    trips_by_target = []
    for target in targets:
        trips = []
        try:
            with _open_connection(target, secret, b"E") as connection:
                for _ in range(repeats):
                    began = time.perf_counter()
                    connection.sendall(struct.pack("!I", 8) + b"evener..")
                    _receive_exactly(connection, 8)
                    trips.append(time.perf_counter() - began)
        except OSError:
            pass
        trips_by_target.append(trips[2:])  # the first two warm caches up
    return trips_by_target


def probe_mtu(targets: list[Fields], secret: str, size: int = CHUNK_BYTES) -> list[Fields]:
    """Test whether a large message gets through, and find the path MTU, for all targets at the same time.

    Each target has "mtu", the largest packet that both ends can send, and "udp", its UDP port. Returns for each
    {"large": "ok", "stalled" or "failed", "path_mtu": bytes, or None if UDP does not pass or the system does not tell}.
    """
    results: list[Fields] = [{"large": "failed", "path_mtu": None} for _ in targets]

    def work(i: int) -> None:
        results[i]["large"] = _send_large_message(targets[i], secret, size)
        with contextlib.suppress(OSError):
            results[i]["path_mtu"] = _find_path_mtu(targets[i], secret)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def _send_large_message(target: Fields, secret: str, size: int) -> str:
    try:
        with _open_connection(target, secret, b"S" + struct.pack("!d", 0.0)) as connection:
            unsent = memoryview(bytes(size))
            while unsent:  # the timeout is per send: progress restarts it
                unsent = unsent[connection.send(unsent) :]
            connection.shutdown(socket.SHUT_WR)
            total = struct.unpack("!QdQ", _receive_exactly(connection, 24))[2]
        return "ok" if total == size else "failed"
    except socket.timeout:  # noqa: UP041  another name for TimeoutError only since 3.10
        return "stalled"
    except OSError:
        return "failed"


def _find_path_mtu(target: Fields, secret: str) -> int | None:
    """Find the largest packet that arrives, by bisection; if the interface's MTU passes, one packet shows it."""
    family = address_family(target["address"])
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        try:
            if family == socket.AF_INET:
                sender.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_PROBE)
            else:
                sender.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_PROBE)
        except OSError:
            if family == socket.AF_INET:
                sender.setsockopt(socket.IPPROTO_IP, IP_DONTFRAG, 1)
            else:
                sender.setsockopt(socket.IPPROTO_IPV6, IPV6_DONTFRAG, 1)
        sender.connect((target["address"], target["udp"]))
        headers = HEADER_BYTES[family]
        if _delivered_sizes(sender, secret, [target["mtu"]], headers):
            return int(target["mtu"])
        low, high = MIN_MTU, target["mtu"]
        if not _delivered_sizes(sender, secret, [low], headers):
            return None  # no datagram passes: unknown
        while high - low > 1:  # many sizes at a time
            sizes = list(range(low + 1, high, max(1, (high - low) // SIZES_PER_ROUND)))
            arrived = _delivered_sizes(sender, secret, sizes, headers)
            low = max(arrived, default=low)
            high = min([size for size in sizes if size > low], default=high)
        return low


def _delivered_sizes(sender: socket.socket, secret: str, sizes: list[int], headers: int) -> set[int]:
    """Return the sizes of the packets that the peer received; each is sent up to three times, as any may be lost."""
    arrived: set[int] = set()
    nonce = random.getrandbits(40)
    for _ in range(3):
        for size in sizes:
            if size in arrived:
                continue
            try:
                sender.send((secret.encode() + struct.pack("!Q", nonce << 20 | size)).ljust(size - headers, b"\0"))
            except OSError:  # larger than the interface sends
                continue
        until = time.monotonic() + DATAGRAM_TIMEOUT_S
        while len(arrived) < len(sizes) and time.monotonic() < until:
            try:
                sender.settimeout(max(0.001, until - time.monotonic()))
                token = struct.unpack("!Q", sender.recv(8))[0]
            except (OSError, struct.error):
                break
            if token >> 20 == nonce:
                arrived.add(token & 0xFFFFF)
        if len(arrived) == len(sizes):
            break
    return arrived


def measure_goodput(target: Fields, secret: str, seconds: float, warm_s: float) -> Fields | None:
    """Measure the goodput of one TCP stream by the receiver's clock, and its retransmits (None if not reported).

    Returns None if the stream broke or stalled.
    """
    try:
        with _open_connection(target, secret, b"S" + struct.pack("!d", warm_s)) as connection:
            return _send_stream(connection, seconds, warm_s)
    except OSError:
        return None


def _send_stream(connection: socket.socket, seconds: float, warm_s: float) -> Fields:
    retransmits = segments = None
    chunk = bytes(CHUNK_BYTES)
    until = time.perf_counter() + warm_s + seconds
    while time.perf_counter() < until:
        connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(4 * STALL_TIMEOUT_S)
    counted, took, total = struct.unpack("!QdQ", _receive_exactly(connection, 24))
    if hasattr(socket, "TCP_INFO"):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        if len(info) >= 104:
            retransmits = struct.unpack_from("=I", info, TOTAL_RETRANS)[0]
            segments = max(1, total // max(1, struct.unpack_from("=I", info, SND_MSS)[0]))
    goodput = counted / took if took else total / (warm_s + seconds)
    return {"goodput_Bps": goodput, "retransmits": retransmits, "segments": segments, "bytes": total}


def resolve(names: list[str], within_s: float = 2.0) -> dict[str, list[str] | None]:
    """Return {name: [addresses in the order in which programs try them]}; None without an answer in time."""
    addresses: dict[str, list[str] | None] = dict.fromkeys(names)

    def work(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
            addresses[name] = [str(answer[4][0]) for answer in answers]
        except (OSError, UnicodeError):
            pass

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(addresses)


# --- helpers -----------------------------------------------------------------------------------------------------


def _open_connection(target: Fields, secret: str, request: bytes) -> socket.socket:
    connection = socket.create_connection((target["address"], target["port"]), STALL_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(secret.encode() + request)
    return connection


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Receive `size` bytes; OSError if the connection ends, or is late. With a `deadline` all of them are late then."""
    parts = []
    while size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(size, CHUNK_BYTES))
        if not part:
            raise OSError(errno.ECONNRESET, "the peer closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
