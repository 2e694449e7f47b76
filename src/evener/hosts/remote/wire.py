"""How fast is the wire to this machine, and back? One end sends, the other counts what arrives, by its own clock.

Python 3.8 or newer, standard library only; Linux or macOS. `receive` and `echo` first yield the port that they listen
on, then what they saw; `send` and `ping` talk to it.
"""

import ctypes
import json
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
TOTAL_RETRANS = 100  # where struct tcp_info of Linux keeps tcpi_total_retrans
END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def receive(address, streams, warm_s, seconds):
    """Count what `streams` connections bring in `seconds`, after the `warm_s` in which TCP finds its pace."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as server:
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


def send(address, port, source, streams, seconds):
    """Send as fast as TCP lets, until the other end has seen enough or `seconds` are over."""
    told = [None] * streams
    until = time.perf_counter() + seconds
    _all_at_once(lambda i: _pour(address, port, source, until, told, i), streams)
    failed = [what for what in told if isinstance(what, str)]
    if failed:
        raise OSError(failed[0])
    again = [what[0] for what in told]
    return {"retransmits": None if None in again else sum(again), "congestion": told[0][1]}


def echo(address, seconds):
    """Give back every message of one connection."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as server:
        server.bind((address, 0))
        server.listen(1)
        server.settimeout(ACCEPT_S)
        yield {"port": server.getsockname()[1]}
        connection = server.accept()[0]
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(seconds + SILENCE_S)
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


def _pour(address, port, source, until, told, i):
    again, congestion = None, None
    try:
        with socket.create_connection((address, port), CONNECT_S, (source, 0)) as connection:
            connection.settimeout(SILENCE_S)
            congestion = _congestion(connection)
            buffers = [memoryview(bytearray(CHUNK))] * CHUNKS
            try:
                while time.perf_counter() < until:
                    connection.sendmsg(buffers)
                    again = _retransmits(connection)
            except ConnectionError:
                pass  # the receiver has seen enough
        told[i] = (again, congestion)
    except OSError as error:
        told[i] = str(error) or type(error).__name__


def _retransmits(connection):
    """Segments sent again on this connection; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("I", info, TOTAL_RETRANS)[0] if len(info) >= TOTAL_RETRANS + 4 else None


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
