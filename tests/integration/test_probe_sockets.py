"""Probe servers survive whatever a stranger sends and still answer whoever knows the secret."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from evener.node.remote import connectivity, link_probe
from tests.tiers import num_examples

LOOPBACK = "127.0.0.1"
SECRET, IDENTITY = "s" * 32, "i" * 32
WITHIN_S = 60.0
NUM_MESSAGES, BATCH = num_examples(2_000, 10_000), 50
REQUESTS = [
    b"H",
    b"E" + struct.pack("!I", 8) + b"evener..",
    b"E" + struct.pack("!I", 2**32 - 1) + b"evener",
    b"S" + struct.pack("!d", 0.0) + bytes(100),
    b"S" + struct.pack("!d", float("nan")) + bytes(100),
]


@pytest.fixture
def threads_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    yield
    assert failed == []


@pytest.fixture
def ports(threads_fail: None) -> Iterator[dict[str, int]]:
    found = connectivity.listen([LOOPBACK], SECRET, IDENTITY)[LOOPBACK]
    assert found["error"] is None
    yield {"tcp": found["ephemeral"], "udp": found["udp"]}
    connectivity.close()


def answers(ports: dict[str, int]) -> bool:
    """Those who know the secret."""
    target = {"peer": "a", "address": LOOPBACK, "port": ports["tcp"], "identity": IDENTITY, "rank": 0}
    (found,) = connectivity.connect([target], SECRET, WITHIN_S)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(1.0)
        for _ in range(int(WITHIN_S)):  # a datagram is lost where others have filled the buffer
            sender.sendto(SECRET.encode() + b"12345678", (LOOPBACK, ports["udp"]))
            with contextlib.suppress(TimeoutError):
                return found["result"] == "ok" and sender.recv(100) == b"12345678"
    return False


def damaged(rng: random.Random) -> bytes:
    """A request, with or without its secret, in one to three places; or noise."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(300))
    data = bytearray(SECRET.encode() + rng.choice(REQUESTS))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(3):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def test_damaged_requests_leave_the_server_answering(ports):
    rng = random.Random(0)
    for _ in range(NUM_MESSAGES // BATCH):
        with contextlib.ExitStack() as together:
            batch = [together.enter_context(socket.create_connection((LOOPBACK, ports["tcp"]), WITHIN_S))
                     for _ in range(BATCH)]  # fmt: skip
            for one in batch:
                with contextlib.suppress(OSError):  # it may have been hung up on already
                    one.sendall(damaged(rng))
                    one.shutdown(socket.SHUT_WR)
            for one in batch:
                with contextlib.suppress(ConnectionError):
                    while one.recv(1 << 16):  # TimeoutError: it hangs
                        pass
    assert answers(ports)


def test_damaged_datagrams_get_no_answer(ports):
    """Only one that begins with the secret has an answer."""
    rng = random.Random(0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(NUM_MESSAGES):
            data = damaged(rng)
            sender.sendto(data[:31] + b"S" + data[32:] if len(data) > 31 else data, (LOOPBACK, ports["udp"]))
        assert answers(ports)
        sender.setblocking(False)
        with pytest.raises(BlockingIOError):
            sender.recv(100)


def test_excess_connections_cost_no_threads(ports):
    """They cost no thread each, and when they are gone all is as before."""
    with contextlib.ExitStack() as idle:
        for _ in range(connectivity.MAX_CONNECTIONS + 50):
            idle.enter_context(socket.create_connection((LOOPBACK, ports["tcp"]), WITHIN_S))
        last = idle.enter_context(socket.create_connection((LOOPBACK, ports["tcp"]), WITHIN_S))
        with contextlib.suppress(ConnectionError):
            assert last.recv(1) == b""  # hung up on at once, or when those before it have been silent for long
    assert answers(ports)


def test_peers_are_answered_beside_idle_connections(ports):
    """A stranger holds more than are allowed; a new connection replaces the oldest of those without the secret."""
    with contextlib.ExitStack() as idle:
        for _ in range(connectivity.MAX_CONNECTIONS + 50):
            idle.enter_context(socket.create_connection((LOOPBACK, ports["tcp"]), WITHIN_S))
        assert answers(ports)


def test_secret_must_arrive_in_time(ports, monkeypatch):
    """A byte now and then keeps no connection."""
    monkeypatch.setattr(connectivity, "SECRET_TIMEOUT_S", 0.5)
    with socket.create_connection((LOOPBACK, ports["tcp"]), WITHIN_S) as one:
        one.settimeout(0.05)
        for _ in range(connectivity.TOKEN_BYTES - 1):  # one more, and it would be judged by what it sent
            try:
                one.sendall(b"s")
                assert one.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            return
    pytest.fail("a connection without the secret is kept")


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from evener.node.remote import connectivity
print(connectivity.listen(["127.0.0.1"], sys.argv[1], sys.argv[2])["127.0.0.1"], flush=True)
sys.stdin.read()
"""


def test_peers_are_answered_where_few_files_may_be_open():
    argv = [sys.executable, "-c", FEW_FILES, SECRET, IDENTITY]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        found = ast.literal_eval(server.stdout.readline())
        with contextlib.ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(socket.create_connection((LOOPBACK, found["ephemeral"]), WITHIN_S))
            assert answers({"tcp": found["ephemeral"], "udp": found["udp"]})
        server.stdin.close()
    assert server.returncode == 0


ONE_CONNECTION = {
    "take": lambda: link_probe.receive_bursts(LOOPBACK, 1.0),
    "echo": lambda: link_probe.echo(LOOPBACK, 1.0),
    "receive": lambda: link_probe.receive(LOOPBACK, 1, 0.0, 0.2),
}


@pytest.mark.parametrize("what", ONE_CONNECTION)
def test_foreign_connection_ends_wire_probe_cleanly(threads_fail, what):
    """It hears one connection and ends: with a figure or an OSError, which the controller tells as such."""
    rng = random.Random(0)
    for _ in range(NUM_MESSAGES // len(ONE_CONNECTION)):
        listener = ONE_CONNECTION[what]()
        port = next(listener)["port"]
        with socket.create_connection((LOOPBACK, port), WITHIN_S) as one:
            one.sendall(rng.choice([rng.randbytes(rng.randrange(60)), struct.pack("!Q", rng.randrange(40)) * 3]))
            one.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                for _ in listener:
                    pass


@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to CPUs")
def test_spare_cpus_are_those_that_this_process_may_use():
    """A busy machine has fewer, never more."""
    (one,) = random.sample(sorted(os.sched_getaffinity(0)), 1)
    for allowed in (os.sched_getaffinity(0), {one}):
        code = f"import os; os.sched_setaffinity(0, {allowed}); import evener.node.remote.link_probe as probe; " \
               "print(probe.spare_cpus(0.1, 0.2))"  # fmt: skip
        spare = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        assert 0 < spare < 1.01 * len(allowed)
