"""Strangers' connections neither stop the live page, nor fill its stderr, nor shut its owner out."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evener.core.run.runwriter import RunWriter

from ..conftest import ENV, TIMEOUT_S, wait_until
from ..ranks import free_port

NUM_IDLE = 1300
OPEN_FILES = 4096  # of this test, which holds the idle connections
# `evener watch` with a shorter time limit for requests, and the open files that a person's shell allows.
PROGRAM = """
import sys
from evener.watch import connection_limits
connection_limits.REQUEST_TIMEOUT_S = float(sys.argv[1])
sys.argv[1:] = sys.argv[2:]
from evener.cli.main import main
sys.exit(main())
"""


class WatchedPage:
    """`evener watch` as a process."""

    def __init__(self, folder: Path, run: Path, open_files: int, request_timeout_s: float) -> None:
        self._out, self._err = folder / "watch.out", folder / "watch.err"
        self.port = free_port()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(request_timeout_s), "watch", str(run), "--port", str(self.port)],
                stdout=out, stderr=err, env=ENV | {"XDG_STATE_HOME": str(folder / "state")}, cwd=folder,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files)),
            )  # fmt: skip
        wait_until(lambda: b"\n" in self._out.read_bytes() or self.process.poll() is not None, self.stderr)
        url = self._out.read_text().split("\n")[0]
        assert url.startswith("http://127.0.0.1:"), self.stderr()
        self.token = url.partition("?token=")[2]

    def stderr(self) -> str:
        return self._err.read_text()

    def cookie(self) -> dict[str, str]:
        return {"cookie": f"evener_watch_{self.port}={self.token}"}

    def request(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()

    def login(self) -> int:
        """Exchange the token, as the owner's browser does first; return the status."""
        return self.request(f"/?token={self.token}", {})[0]

    def open_stream(self, name: str) -> http.client.HTTPResponse:
        """Return an event stream with a valid cookie."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request("GET", f"/stream?page=/runs/{name}", headers=self.cookie())
        response = connection.getresponse()
        assert response.status == 200
        return response

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)

    def end(self) -> int:
        """Return the exit status after Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def run(tmp_path: Path, write_run: Callable[..., RunWriter]) -> RunWriter:
    return write_run(tmp_path / "one", [{}, {}], verdict="running", sync_s=0.02)


@pytest.fixture
def page(tmp_path: Path, run: RunWriter) -> Iterator[Callable[..., WatchedPage]]:
    started: list[WatchedPage] = []

    def page(open_files: int = 4096, request_timeout_s: float = TIMEOUT_S) -> WatchedPage:
        started.append(WatchedPage(tmp_path, run.path, open_files, request_timeout_s))
        return started[-1]

    yield page
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def idle() -> Iterator[contextlib.ExitStack]:
    """Holds connections until the test's end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        pytest.skip(f"needs {OPEN_FILES} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OPEN_FILES), hard))
    with contextlib.ExitStack() as connections:
        yield connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def has_ended(connection: socket.socket) -> bool:
    """Return whether the page has closed a connection; read what it sent before."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def assert_stream_is_alive(stream: http.client.HTTPResponse, run: RunWriter) -> None:
    """Add an event to the run, and return once the stream has shown it."""
    run.add_event("checkpoint", step=len(run.records(0)), took_s=0.1)
    while b"data: {" not in (line := stream.readline()) or b"saved" not in line:  # TimeoutError: nothing comes
        assert line, "the stream has ended"


@pytest.mark.parametrize("open_files", [128, 4096])
def test_page_answers_beside_1300_idle_connections(page, run, idle, open_files):
    one = page(open_files)
    stream = one.open_stream(run.path.name)
    assert stream.readline() == b"retry: 1000\n"
    for _ in range(NUM_IDLE):
        idle.enter_context(one.connect())
    assert one.login() == 303
    status, text = one.request(f"/runs/{run.path.name}", one.cookie())
    assert status == 200
    assert b"</html>" in text
    assert_stream_is_alive(stream, run)
    assert len(one.stderr().splitlines()) <= 2, one.stderr()
    assert "Traceback" not in one.stderr()
    stream.close()
    assert one.end() in (0, 130, -signal.SIGINT)


REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SENT = {  # by strangers: what, and what they send again and again
    "nothing": (b"", b""),
    "half-a-request": (REQUEST, b""),
    "a-byte-at-a-time": (b"GET / HTTP/1.1\r\nX-Slow: ", b"x"),
    "header-after-header": (REQUEST, b"X-More: 1\r\n"),
    "huge-headers": (REQUEST + b"X-Huge: " + b"x" * (1 << 20), b""),
    "no-token": (REQUEST + b"\r\n", b""),
    "no-token-again-and-again": (REQUEST + b"\r\n", REQUEST + b"\r\n"),
    "a-body-without-end": (b"POST /runs/one/stop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999\r\n\r\n", b"x"),
    "a-wrong-host": (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b""),
    "noise": (bytes(range(256)) * 8, b""),
}


def test_connections_without_valid_token_are_closed(page, run):
    """Whatever strangers send, and however slowly; a connection that has sent the token stays."""
    one = page(request_timeout_s=2.0)
    stream = one.open_stream(run.path.name)
    with contextlib.ExitStack() as opened:
        strangers = {what: opened.enter_context(one.connect()) for what in SENT}
        for what, connection in strangers.items():
            with contextlib.suppress(OSError):  # it may be closed already
                connection.sendall(SENT[what][0])

        def are_closed() -> bool:
            for what, connection in strangers.items():
                with contextlib.suppress(OSError):
                    connection.setblocking(False)
                    connection.send(SENT[what][1])
            return all(has_ended(connection) for connection in strangers.values())

        wait_until(are_closed, lambda: str({what: has_ended(strangers[what]) for what in SENT}))
    assert_stream_is_alive(stream, run)
    stream.close()
    assert len(one.stderr().splitlines()) <= 1, one.stderr()


FLOOD = """
import os, socket, sys
held = []
while os.getppid() == int(sys.argv[2]):
    try:
        held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5))
    except OSError:
        pass
    if len(held) > 500:
        held.pop(0).close()
"""


def test_owner_logs_in_during_a_flood_of_connections(page):
    """The oldest connection without a token makes room for a new one, and a request is read before that.

    Where this process is kept from sending its request at once, its connection may be the oldest: it connects again.
    """
    one = page(open_files=128)
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(one.port), str(os.getpid())])
    try:
        wait_until(lambda: "the oldest are closed" in one.stderr(), one.stderr)
        statuses: list[int] = []

        def have_logged_in() -> bool:
            with contextlib.suppress(ConnectionError):
                statuses.append(one.login())
            return len(statuses) == 20

        wait_until(have_logged_in, one.stderr)
    finally:
        flood.kill()
        flood.wait()
    assert statuses == [303] * 20
    assert len(one.stderr().splitlines()) <= 2, one.stderr()
