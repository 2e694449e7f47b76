"""How fast is the wire to this machine, and back? One end sends, the other counts what arrives, by its own clock.

Python 3.8 or newer, standard library only; Linux or macOS. `receive` and `echo` first yield the port that they listen
on, then what they saw; `send` and `ping` talk to it; `take` and `bursts` are the same pair for bursts. What the system
allows a single socket (congestion control, buffers) can be tried: nothing of the machine is changed.
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

CHUNK = 1 << 18
CHUNKS = 4  # buffers handed to the kernel in one call
CONNECT_S = 5.0
ACCEPT_S = 8.0
SILENCE_S = 5.0
BIN_S = 0.1
MESSAGE = b"evener.."
SND_CWND, TOTAL_RETRANS, BUSY_TIME, RWND_LIMITED = 80, 100, 168, 176  # where Linux keeps them in struct tcp_info
LARGE_BYTES = 1 << 26  # of a buffer: more than any system allows by itself
OF_THE_MACHINE = "/proc/sys/net/core/default_qdisc"  # stands in no other network than the machine's own
BEGINNING = 1 << 14  # bytes of a burst that any window lets through
END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def receive(address, streams, warm_s, seconds, buffer_bytes=None):
    """Count what `streams` connections bring in `seconds`, after the `warm_s` in which TCP finds its pace."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as server:
        if buffer_bytes is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        server.bind((address, 0))
        server.listen(streams)
        server.settimeout(ACCEPT_S)
        yield {"port": server.getsockname()[1]}
        connections = [server.accept()[0] for _ in range(streams)]
    begins = time.perf_counter() + warm_s
    seen = [None] * streams
    bins = [0] * (int(seconds / BIN_S) + 1)
    _all_at_once(lambda i: _count(connections[i], begins, begins + seconds, seen, i, bins), streams)
    failed = [what for what in seen if isinstance(what, str)]
    if failed:
        raise OSError(failed[0])
    yield {
        "mean_Bps": sum(num_bytes / took_s for num_bytes, took_s in seen),
        "tenths_Bps": [count / BIN_S for count in bins[: int(seconds / BIN_S)]],
    }


def send(address, port, source, streams, seconds, congestion=None, buffer_bytes=None):
    """Send as fast as TCP lets, until the other end has seen enough or `seconds` are over."""
    told = [None] * streams
    until = time.perf_counter() + seconds
    _all_at_once(lambda i: _pour(address, port, source, until, told, i, congestion, buffer_bytes), streams)
    failed = [what for what in told if isinstance(what, str)]
    if failed:
        raise OSError(failed[0])
    again = [what[0] for what in told]
    return {
        "retransmits": None if None in again else sum(again),
        "congestion": told[0][1],
        "window_limited": told[0][2],  # share of the time in which the receiver's window was the limit
    }


def choices():
    """What a socket here may choose for itself: congestion controls, and the largest buffers that it gets.

    Of congestion controls those that can become the default, too: where the network is not the machine's own (a
    container's), only those that the machine allows to everybody.
    """
    which = "available" if os.path.exists(OF_THE_MACHINE) else "allowed"
    try:
        with open("/proc/sys/net/ipv4/tcp_" + which + "_congestion_control") as file:
            names = file.read().split()
    except OSError:
        names = []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        return {
            "congestion": [name for name in names if _set_congestion(one, name)],
            "receive_bytes": _largest(one, socket.SO_RCVBUF),
            "send_bytes": _largest(one, socket.SO_SNDBUF),
        }


def _called(address, seconds):
    """Tell the port, and return the one connection that comes."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as server:
        server.bind((address, 0))
        server.listen(1)
        server.settimeout(ACCEPT_S)
        yield {"port": server.getsockname()[1]}
        connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(seconds + SILENCE_S)
    return connection


def take(address, seconds):
    """Take bursts, each after a line with its size, and say when one is all there."""
    buffer = memoryview(bytearray(CHUNK * CHUNKS))
    with (yield from _called(address, seconds)) as connection:
        while True:
            head = connection.recv(8, socket.MSG_WAITALL)
            if len(head) < 8:
                break
            left = struct.unpack("!Q", head)[0]
            while left:
                got = connection.recv_into(buffer[: min(left, len(buffer))])
                if not got:
                    raise OSError("the sender hung up")
                left -= got
            connection.sendall(b"x")


def bursts(address, port, source, size, pauses_s, rounds, seconds):
    """Bursts of `size` bytes after each of these pauses in turn: [{"took_s", "window"}] of every round, for each pause.

    `window` is the congestion window, in segments, in which the kernel began the burst; None where it does not tell.
    """
    found = [[] for _ in pauses_s]
    data = memoryview(bytearray(size))
    with socket.create_connection((address, port), CONNECT_S, (source, 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(seconds + SILENCE_S)

        def one():
            began = time.perf_counter()
            connection.sendall(struct.pack("!Q", size) + data[:BEGINNING])
            window = _told(connection, "I", SND_CWND)
            connection.sendall(data[BEGINNING:])
            if connection.recv(1) != b"x":
                raise OSError("the other end hung up")
            return {"took_s": time.perf_counter() - began, "window": window}

        for _ in range(3):  # TCP finds its pace
            one()
        for _ in range(rounds):
            for i, pause_s in enumerate(pauses_s):
                time.sleep(pause_s)
                found[i].append(one())
    return found


def echo(address, seconds):
    """Give back every message of one connection."""
    with (yield from _called(address, seconds)) as connection:
        while True:
            message = connection.recv(len(MESSAGE))
            if not message:
                break
            connection.sendall(message)


def ping(address, port, source, seconds, at_most):
    """Seconds of each round trip of a small message; the first ones, on which caches warm, are left out."""
    trips = []
    with socket.create_connection((address, port), CONNECT_S, (source, 0)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        while len(trips) < 3 or (len(trips) < at_most and time.perf_counter() < until):
            began = time.perf_counter()
            connection.sendall(MESSAGE)
            left = len(MESSAGE)
            while left:
                got = connection.recv(left)
                if not got:
                    raise OSError("the other end hung up")
                left -= len(got)
            trips.append(time.perf_counter() - began)
    return trips[len(trips) // 10 :]


def has_iperf3():
    """Is iperf3 there?"""
    return shutil.which("iperf3") is not None


def iperf3_receive(address, seconds):
    """One iperf3 server for one test."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    argv = ["iperf3", "--server", "--one-off", "--bind", address, "--port", str(port)]
    nothing = subprocess.DEVNULL
    server = subprocess.Popen(argv, stdin=nothing, stdout=nothing, stderr=nothing, preexec_fn=_end_with_us)
    try:
        yield {"port": port}
        server.wait(seconds + ACCEPT_S)
    finally:
        server.kill()
        server.wait()


def iperf3_send(address, port, source, warm_s, seconds):
    """Payload in bytes a second that an iperf3 server received."""
    argv = ["iperf3", "--client", address, "--port", str(port), "--bind", source, "--json"]
    argv += ["--omit", str(int(warm_s + 0.999)), "--time", str(max(1, int(seconds)))]
    for attempt in range(20):  # the server may need a moment
        timeout_s = warm_s + seconds + 2 * ACCEPT_S
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, preexec_fn=_end_with_us
        )
        told = json.loads(done.stdout or b"{}")
        if done.returncode == 0:
            return told["end"]["sum_received"]["bits_per_second"] / 8
        if "refused" not in told.get("error", ""):
            break
        time.sleep(0.1 * (attempt < 19))
    raise OSError("iperf3: " + told.get("error", done.stderr.decode(errors="replace").strip() or "it failed"))


def _count(connection, begins, ends, seen, i, bins):
    """Bytes between the first arrival after `begins` and the last one before `ends`, and the time between the two."""
    buffer = memoryview(bytearray(CHUNK * CHUNKS))
    first = last = None
    total = 0
    try:
        with connection:
            connection.settimeout(SILENCE_S)
            while True:
                got = connection.recv_into(buffer)
                now = time.perf_counter()
                if not got:
                    raise OSError("the sender hung up")
                if now >= ends:
                    break
                if now < begins:
                    continue
                if first is None:
                    first = now
                else:
                    total, last = total + got, now
                bins[min(int((now - begins) / BIN_S), len(bins) - 1)] += got
        if last is None:
            raise OSError("nothing arrived in time")
        seen[i] = (total, last - first)
    except OSError as error:
        seen[i] = str(error) or type(error).__name__


def _pour(address, port, source, until, told, i, congestion, buffer_bytes):
    again = limited = None
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as connection:
            if congestion is not None and not _set_congestion(connection, congestion):
                raise OSError("it may not use " + congestion)
            if buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            connection.settimeout(CONNECT_S)
            connection.bind((source, 0))
            connection.connect((address, port))
            connection.settimeout(SILENCE_S)
            congestion = _congestion(connection)
            buffers = [memoryview(bytearray(CHUNK))] * CHUNKS
            try:
                while time.perf_counter() < until:
                    connection.sendmsg(buffers)
                    again = _told(connection, "I", TOTAL_RETRANS)
                    busy_us, limited_us = _told(connection, "Q", BUSY_TIME), _told(connection, "Q", RWND_LIMITED)
                    limited = limited_us / busy_us if busy_us and limited_us is not None else None
            except ConnectionError:
                pass  # the receiver has seen enough
        told[i] = (again, congestion, limited)
    except OSError as error:
        told[i] = str(error) or type(error).__name__


def _told(connection, kind, offset):
    """A field of the kernel's own account of this connection; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from(kind, info, offset)[0] if len(info) >= offset + struct.calcsize(kind) else None


def _set_congestion(connection, name):
    """Whether this socket may use it; where it may, it does."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        return False
    return True


def _largest(connection, option):
    """What the kernel gives a socket that asks for a very large buffer."""
    connection.setsockopt(socket.SOL_SOCKET, option, LARGE_BYTES)
    return connection.getsockopt(socket.SOL_SOCKET, option)


def _congestion(connection):
    """The congestion control in use, such as "cubic"."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return None
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def _all_at_once(work, num):
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _end_with_us():
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(END_WITH_PARENT, 9)
