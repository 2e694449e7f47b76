"""Measure the goodput and round-trip time of a link: one end sends, the other counts what arrives, by its own clock.

Python 3.8 or newer, standard library only; Linux or macOS. `receive` and `echo` first yield the port that they listen
on, then their result; `send` and `ping` connect to it; `receive_bursts` and `send_bursts` are the pair for bursts.
Options of a single socket (congestion control, buffers) can be tried; no setting of the machine is changed.
"""

import ctypes
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

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
PR_SET_PDEATHSIG = 1  # prctl's PR_SET_PDEATHSIG


def receive(address, streams, warm_s, seconds, buffer_bytes=None):
    """Count what `streams` connections deliver in `seconds`, after `warm_s` in which TCP's window grows.

    Yields {"port"}, then {"mean_Bps", "tenths_Bps"}: goodput overall and per 0.1 s, in bytes per second.
    """
    with socket.socket(_address_family(address), socket.SOCK_STREAM) as server:
        if buffer_bytes is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        server.bind((address, 0))
        server.listen(streams)
        server.settimeout(ACCEPT_TIMEOUT_S)
        yield {"port": server.getsockname()[1]}
        connections = [server.accept()[0] for _ in range(streams)]
    begins = time.perf_counter() + warm_s
    results = [None] * streams
    bins = [0] * (int(seconds / BIN_S) + 1)
    _run_threads(lambda i: _count_received(connections[i], begins, begins + seconds, results, i, bins), streams)
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise OSError(failed[0])
    yield {
        "mean_Bps": sum(num_bytes / took_s for num_bytes, took_s in results),
        "tenths_Bps": [count / BIN_S for count in bins[: int(seconds / BIN_S)]],
    }


def send(address, port, source, streams, seconds, congestion=None, buffer_bytes=None):
    """Send as fast as TCP allows, until the receiver closes the connections or `seconds` are over."""
    results = [None] * streams
    until = time.perf_counter() + seconds
    _run_threads(lambda i: _send_stream(address, port, source, until, results, i, congestion, buffer_bytes), streams)
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise OSError(failed[0])
    retransmits = [result[0] for result in results]
    return {
        "retransmits": None if None in retransmits else sum(retransmits),
        "congestion": results[0][1],
        "window_limited": results[0][2],  # share of the time in which the receiver's window was the limit
    }


def socket_tcp_options():
    """Return the options a socket may set here: congestion controls, and the largest buffers that it gets.

    Only congestion controls that can also become the default: in another network namespace than the host's (a
    container's), those that the host allows to every user.
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


def _accept_one(address, seconds):
    """Yield the port, then accept and return one connection."""
    with socket.socket(_address_family(address), socket.SOCK_STREAM) as server:
        server.bind((address, 0))
        server.listen(1)
        server.settimeout(ACCEPT_TIMEOUT_S)
        yield {"port": server.getsockname()[1]}
        connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(seconds + STALL_TIMEOUT_S)
    return connection


def receive_bursts(address, seconds):
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


def send_bursts(address, port, source, size, pauses_s, rounds, seconds):
    """Send bursts of `size` bytes after each of these pauses; return [{"took_s", "window"}] per round and pause.

    `window` is the congestion window, in segments, at the start of the burst; None where the kernel does not report it.
    """
    rounds_by_pause = [[] for _ in pauses_s]
    data = memoryview(bytearray(size))
    with socket.create_connection((address, port), CONNECT_TIMEOUT_S, (source, 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(seconds + STALL_TIMEOUT_S)

        def send_burst():
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


def echo(address, seconds):
    """Send back every message of one connection."""
    with (yield from _accept_one(address, seconds)) as connection:
        while True:
            message = connection.recv(len(MESSAGE))
            if not message:
                break
            connection.sendall(message)


def ping(address, port, source, seconds, at_most):
    """Return the seconds of each round trip of a small message, without the first tenth, in which caches warm up."""
    trips = []
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


def has_iperf3():
    """Return whether iperf3 is installed."""
    return shutil.which("iperf3") is not None


def iperf3_receive(address, seconds):
    """Run an iperf3 server for one test; yields its port."""
    with socket.socket(_address_family(address), socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    argv = ["iperf3", "--server", "--one-off", "--bind", address, "--port", str(port)]
    devnull = subprocess.DEVNULL
    server = subprocess.Popen(argv, stdin=devnull, stdout=devnull, stderr=devnull, preexec_fn=_kill_with_parent)
    try:
        yield {"port": port}
        server.wait(seconds + ACCEPT_TIMEOUT_S)
    finally:
        server.kill()
        server.wait()


def iperf3_send(address, port, source, warm_s, seconds):
    """Return the payload that an iperf3 server received, in bytes per second."""
    argv = ["iperf3", "--client", address, "--port", str(port), "--bind", source, "--json"]
    argv += ["--omit", str(int(warm_s + 0.999)), "--time", str(max(1, int(seconds)))]
    for attempt in range(20):  # the server may need a moment
        timeout_s = warm_s + seconds + 2 * ACCEPT_TIMEOUT_S
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, preexec_fn=_kill_with_parent
        )
        report = json.loads(process.stdout or b"{}")
        if process.returncode == 0:
            return report["end"]["sum_received"]["bits_per_second"] / 8
        if "refused" not in report.get("error", ""):
            break
        time.sleep(0.1 * (attempt < 19))
    raise OSError("iperf3: " + report.get("error", process.stderr.decode(errors="replace").strip() or "it failed"))


def _count_received(connection, begins, ends, results, i, bins):
    """Set results[i] to (bytes, seconds) from the first arrival after `begins` to the last one before `ends`."""
    buffer = memoryview(bytearray(CHUNK_BYTES * CHUNKS_PER_CALL))
    first = last = None
    total = 0
    try:
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
        if last is None:
            raise OSError("nothing arrived in time")
        results[i] = (total, last - first)
    except OSError as error:
        results[i] = str(error) or type(error).__name__


def _send_stream(address, port, source, until, results, i, congestion, buffer_bytes):
    retransmits = window_limited = None
    try:
        with socket.socket(_address_family(address), socket.SOCK_STREAM) as connection:
            if congestion is not None and not _try_congestion_control(connection, congestion):
                raise OSError("the system does not allow the congestion control " + congestion)
            if buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.bind((source, 0))
            connection.connect((address, port))
            connection.settimeout(STALL_TIMEOUT_S)
            congestion = _congestion_control(connection)
            buffers = [memoryview(bytearray(CHUNK_BYTES))] * CHUNKS_PER_CALL
            try:
                while time.perf_counter() < until:
                    connection.sendmsg(buffers)
                    retransmits = _tcp_info_field(connection, "I", TOTAL_RETRANS)
                    busy_us, limited_us = (
                        _tcp_info_field(connection, "Q", BUSY_TIME),
                        _tcp_info_field(connection, "Q", RWND_LIMITED),
                    )
                    window_limited = limited_us / busy_us if busy_us and limited_us is not None else None
            except ConnectionError:
                pass  # the receiver has measured enough
        results[i] = (retransmits, congestion, window_limited)
    except OSError as error:
        results[i] = str(error) or type(error).__name__


def _tcp_info_field(connection, kind, offset):
    """Return a field of the kernel's tcp_info of this connection, or None where the system does not provide it."""
    if not sys.platform.startswith("linux"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from(kind, info, offset)[0] if len(info) >= offset + struct.calcsize(kind) else None


def _try_congestion_control(connection, name):
    """Set the socket's congestion control; return whether the system allows it."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        return False
    return True


def _max_buffer_bytes(connection, option):
    """Return the buffer size that the kernel grants a socket that asks for a very large one."""
    connection.setsockopt(socket.SOL_SOCKET, option, LARGE_BUFFER_BYTES)
    return connection.getsockopt(socket.SOL_SOCKET, option)


def _congestion_control(connection):
    """Return the congestion control in use, such as "cubic"."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return None
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def _run_threads(work, num):
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _address_family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _kill_with_parent():
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
