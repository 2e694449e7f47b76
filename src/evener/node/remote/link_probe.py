"""Measure the goodput and round-trip time of a link: one end sends, the other counts what arrives, by its own clock.

Python 3.8 or newer, standard library only; Linux or macOS. `receive` and `echo` first yield the port that they listen
on, then their result; `send` and `ping` connect to it; `receive_bursts` and `send_bursts` are the pair for bursts.
Options of a single socket (congestion control, buffers) can be tried; no setting of the machine is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Generator, Iterator, Optional, Tuple, TypeVar  # noqa: UP035  python 3.8

from evener.node.remote.programs import count_allowed_cpus, end_with_parent
from evener.node.remote.sockets import address_family, free_port

CHUNK_BYTES = 1 << 18
CHUNKS_PER_CALL = 4  # buffers handed to the kernel in one call
CONNECT_TIMEOUT_S = 5.0
ACCEPT_TIMEOUT_S = 8.0
STALL_TIMEOUT_S = 5.0
BIN_S = 0.1
MESSAGE = b"evener.."
SND_CWND, TOTAL_RETRANS, BUSY_TIME, RWND_LIMITED = 80, 100, 168, 176  # offsets in Linux's struct tcp_info
LARGE_BUFFER_BYTES = 1 << 26  # a buffer larger than any system allows by default
HOST_NETWORK_SYSCTL = "/proc/sys/net/core/default_qdisc"  # exists only in the host's own network namespace
FIRST_SEND_BYTES = 1 << 14  # bytes of a burst that fit in any congestion window
# the share of a CPU that a loop of the lowest priority gets: after so many seconds, for so many
SPARE_CPU = """
import os, sys, time
os.nice(19)
time.sleep(float(sys.argv[1]))
began, used, seconds = time.perf_counter(), time.process_time(), float(sys.argv[2])
while time.perf_counter() < began + seconds:
    pass
print((time.process_time() - used) / (time.perf_counter() - began))
"""

Item = Dict[str, Any]  # noqa: UP006  what a function yields
# retransmits, congestion control, share of the time in which the receiver's window was the limit
Sent = Tuple[Optional[int], Optional[str], Optional[float]]  # noqa: UP006, UP045
T = TypeVar("T")


def receive(
    address: str, streams: int, warm_s: float, seconds: float, buffer_bytes: int | None = None
) -> Iterator[Item]:
    """Count what `streams` connections deliver in `seconds`, after `warm_s` in which TCP's window grows.

    Yields {"port"}, then {"mean_Bps", "tenths_Bps"}: goodput overall and per 0.1 s, in bytes per second.
    """
    with socket.socket(address_family(address), socket.SOCK_STREAM) as server:
        if buffer_bytes is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        server.bind((address, 0))
        server.listen(streams)
        server.settimeout(ACCEPT_TIMEOUT_S)
        yield {"port": server.getsockname()[1]}
        connections = [server.accept()[0] for _ in range(streams)]
    begins = time.perf_counter() + warm_s
    bins = [0] * (int(seconds / BIN_S) + 1)
    results = _run_threads(lambda i: _count_received(connections[i], begins, begins + seconds, bins), streams)
    yield {
        "mean_Bps": sum(num_bytes / took_s for num_bytes, took_s in results),
        "tenths_Bps": [count / BIN_S for count in bins[: int(seconds / BIN_S)]],
    }


def send(
    address: str, port: int, source: str, streams: int, seconds: float, congestion: str | None = None,
    buffer_bytes: int | None = None,
) -> Item:  # fmt: skip
    """Send as fast as TCP allows, until the receiver closes the connections or `seconds` are over."""
    until = time.perf_counter() + seconds

    def send_stream(_: int) -> Sent:
        with socket.socket(address_family(address), socket.SOCK_STREAM) as connection:
            if congestion is not None and not _try_congestion_control(connection, congestion):
                raise OSError("the system does not allow the congestion control " + congestion)
            if buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.bind((source, 0))
            connection.connect((address, port))
            return _send_until(connection, until)

    results = _run_threads(send_stream, streams)
    retransmits = [result[0] for result in results]
    return {
        "retransmits": None if None in retransmits else sum(retransmits),
        "congestion": results[0][1],
        "window_limited": results[0][2],  # share of the time in which the receiver's window was the limit
    }


def socket_tcp_options() -> Item:
    """Return the options a socket may set here: congestion controls, and the largest buffers that it gets.

    Only congestion controls that can also become the default are returned. In a container's network namespace these are
    the ones that the host allows to every user.
    """
    which = "available" if os.path.exists(HOST_NETWORK_SYSCTL) else "allowed"
    try:
        with open("/proc/sys/net/ipv4/tcp_" + which + "_congestion_control") as file:
            names = file.read().split()
    except OSError:
        names = []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return {
            "congestion": [name for name in names if _try_congestion_control(probe, name)],
            "receive_bytes": _max_buffer_bytes(probe, socket.SO_RCVBUF),
            "send_bytes": _max_buffer_bytes(probe, socket.SO_SNDBUF),
        }


def _accept_one(address: str, seconds: float) -> Generator[Item, None, socket.socket]:
    """Yield the port, then accept and return one connection."""
    with socket.socket(address_family(address), socket.SOCK_STREAM) as server:
        server.bind((address, 0))
        server.listen(1)
        server.settimeout(ACCEPT_TIMEOUT_S)
        yield {"port": server.getsockname()[1]}
        connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(seconds + STALL_TIMEOUT_S)
    return connection


def receive_bursts(address: str, seconds: float) -> Iterator[Item]:
    """Receive bursts, each preceded by its size (8 bytes), and acknowledge each with one byte when it is complete."""
    buffer = memoryview(bytearray(CHUNK_BYTES * CHUNKS_PER_CALL))
    with (yield from _accept_one(address, seconds)) as connection:
        while True:
            head = connection.recv(8, socket.MSG_WAITALL)
            if len(head) < 8:
                break
            remaining = struct.unpack("!Q", head)[0]
            while remaining:
                num_bytes = connection.recv_into(buffer[: min(remaining, len(buffer))])
                if not num_bytes:
                    raise OSError("the sender closed the connection")
                remaining -= num_bytes
            connection.sendall(b"x")


def send_bursts(
    address: str, port: int, source: str, size: int, pauses_s: list[float], rounds: int, seconds: float
) -> list[list[Item]]:
    """Send a burst of `size` bytes after each pause, `rounds` times; return a list of {"took_s", "window"} per pause.

    The pauses take turns: a round has one burst after each of `pauses_s`, in order. `window` is the congestion
    window, in segments, at the start of the burst; None where the kernel does not report it.
    """
    rounds_by_pause: list[list[Item]] = [[] for _ in pauses_s]
    data = memoryview(bytearray(size))
    with socket.create_connection((address, port), CONNECT_TIMEOUT_S, (source, 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(seconds + STALL_TIMEOUT_S)

        def send_burst() -> Item:
            began = time.perf_counter()
            connection.sendall(struct.pack("!Q", size) + data[:FIRST_SEND_BYTES])
            window = _tcp_info_field(connection, "I", SND_CWND)
            connection.sendall(data[FIRST_SEND_BYTES:])
            if connection.recv(1) != b"x":
                raise OSError("the peer closed the connection")
            return {"took_s": time.perf_counter() - began, "window": window}

        for _ in range(3):  # warm-up: TCP's window grows
            send_burst()
        for _ in range(rounds):
            for i, pause_s in enumerate(pauses_s):
                time.sleep(pause_s)
                rounds_by_pause[i].append(send_burst())
    return rounds_by_pause


def echo(address: str, seconds: float) -> Iterator[Item]:
    """Send back every message of one connection."""
    with (yield from _accept_one(address, seconds)) as connection:
        while True:
            message = connection.recv(len(MESSAGE))
            if not message:
                break
            connection.sendall(message)


def ping(address: str, port: int, source: str, seconds: float, at_most: int) -> list[float]:
    """Return the seconds of each round trip of a small message, without the first tenth, in which caches warm up."""
    trips: list[float] = []
    with socket.create_connection((address, port), CONNECT_TIMEOUT_S, (source, 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        while len(trips) < 3 or (len(trips) < at_most and time.perf_counter() < until):
            began = time.perf_counter()
            connection.sendall(MESSAGE)
            remaining = len(MESSAGE)
            while remaining:
                data = connection.recv(remaining)
                if not data:
                    raise OSError("the peer closed the connection")
                remaining -= len(data)
            trips.append(time.perf_counter() - began)
    return trips[len(trips) // 10 :]


def spare_cpus(wait_s: float, seconds: float) -> float:
    """Run a loop of the lowest priority on each CPU that this process may use, and return how many CPUs they get.

    They begin after `wait_s` and take `seconds`. What they get less while data is transferred is the CPU time of the
    transfer, in this or another process or in the kernel. The work in interrupts is part of it where the kernel
    accounts for it (CONFIG_IRQ_TIME_ACCOUNTING).
    """
    argv, parent = [sys.executable, "-I", "-S", "-c", SPARE_CPU, str(wait_s), str(seconds)], os.getpid()
    loops = []  # type: list[subprocess.Popen[bytes]]
    try:
        loops.extend(  # those that have started stay in it if one cannot
            subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=lambda: end_with_parent(parent)
            )
            for _ in range(count_allowed_cpus())
        )
        return sum(float(loop.communicate()[0]) for loop in loops)
    except ValueError:
        raise OSError("a process that measures the spare CPU was killed") from None
    finally:
        for loop in loops:
            with loop:
                loop.kill()


def has_iperf3() -> bool:
    """Return whether iperf3 is installed."""
    return shutil.which("iperf3") is not None


def iperf3_receive(address: str, seconds: float) -> Iterator[Item]:
    """Run an iperf3 server for one test; yields its port."""
    port, parent = free_port(address), os.getpid()
    argv = ["iperf3", "--server", "--one-off", "--bind", address, "--port", str(port)]
    devnull = subprocess.DEVNULL
    server = subprocess.Popen(
        argv, stdin=devnull, stdout=devnull, stderr=devnull, preexec_fn=lambda: end_with_parent(parent)
    )
    try:
        yield {"port": port}
        server.wait(seconds + ACCEPT_TIMEOUT_S)
    finally:
        server.kill()
        server.wait()


def iperf3_send(address: str, port: int, source: str, warm_s: float, seconds: float) -> float:
    """Send to an iperf3 server; return the goodput that it measured, in bytes per second."""
    argv = ["iperf3", "--client", address, "--port", str(port), "--bind", source, "--json"]
    argv += ["--omit", str(int(warm_s + 0.999)), "--time", str(max(1, int(seconds)))]
    parent, errors = os.getpid(), b""
    report: Item = {}
    for attempt in range(20):  # the server may need a moment
        timeout_s = warm_s + seconds + 2 * ACCEPT_TIMEOUT_S
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
            preexec_fn=lambda: end_with_parent(parent),
        )  # fmt: skip
        report, errors = json.loads(process.stdout or b"{}"), process.stderr
        if process.returncode == 0:
            return float(report["end"]["sum_received"]["bits_per_second"]) / 8
        if "refused" not in report.get("error", ""):
            break
        time.sleep(0.1 * (attempt < 19))
    raise OSError("iperf3: " + report.get("error", errors.decode(errors="replace").strip() or "it failed"))


def _count_received(connection: socket.socket, begins: float, ends: float, bins: list[int]) -> tuple[int, float]:
    """Return (bytes, seconds) from the first arrival after `begins` to the last before `ends`; add bytes to `bins`."""
    buffer = memoryview(bytearray(CHUNK_BYTES * CHUNKS_PER_CALL))
    first = last = None
    total = 0
    with connection:
        connection.settimeout(STALL_TIMEOUT_S)
        while True:
            num_bytes = connection.recv_into(buffer)
            now = time.perf_counter()
            if not num_bytes:
                raise OSError("the sender closed the connection")
            if now >= ends:
                break
            if now < begins:
                continue
            if first is None:
                first = now
            else:
                total, last = total + num_bytes, now
            bins[min(int((now - begins) / BIN_S), len(bins) - 1)] += num_bytes
    if first is None or last is None:
        raise OSError("nothing arrived in time")
    return total, last - first


def _send_until(connection: socket.socket, until: float) -> Sent:
    """Send until time `until`, or until the receiver has measured enough and closes the connection."""
    retransmits = window_limited = None
    connection.settimeout(STALL_TIMEOUT_S)
    congestion = _congestion_control(connection)
    buffers = [memoryview(bytearray(CHUNK_BYTES))] * CHUNKS_PER_CALL
    with contextlib.suppress(ConnectionError):
        while time.perf_counter() < until:
            connection.sendmsg(buffers)
            retransmits = _tcp_info_field(connection, "I", TOTAL_RETRANS)
            busy_us = _tcp_info_field(connection, "Q", BUSY_TIME)
            limited_us = _tcp_info_field(connection, "Q", RWND_LIMITED)
            window_limited = limited_us / busy_us if busy_us and limited_us is not None else None
    return retransmits, congestion, window_limited


def _tcp_info_field(connection: socket.socket, kind: str, offset: int) -> int | None:
    """Return a field of the kernel's tcp_info of this connection, or None where the system does not provide it."""
    if not sys.platform.startswith("linux"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from(kind, info, offset)[0]) if len(info) >= offset + struct.calcsize(kind) else None


def _try_congestion_control(connection: socket.socket, name: str) -> bool:
    """Set the socket's congestion control; return whether the system allows it."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        return False
    return True


def _max_buffer_bytes(connection: socket.socket, option: int) -> int:
    """Return the buffer size that the kernel grants a socket that asks for a very large one."""
    connection.setsockopt(socket.SOL_SOCKET, option, LARGE_BUFFER_BYTES)
    return connection.getsockopt(socket.SOL_SOCKET, option)


def _congestion_control(connection: socket.socket) -> str | None:
    """Return the congestion control in use, such as "cubic"."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return None
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def _run_threads(work: Callable[[int], T], num: int) -> list[T]:
    """Return [work(0), …, work(num - 1)], each called in a thread of its own; OSError if one raised it."""
    results: dict[int, T] = {}
    failures: list[str] = []

    def run(i: int) -> None:
        try:
            results[i] = work(i)
        except OSError as error:
            failures.append(str(error) or type(error).__name__)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise OSError(failures[0])
    return [results[i] for i in range(num)]
