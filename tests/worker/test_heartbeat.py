"""A rank's heartbeat: the bytes that it has sent and received, and a disk that refuses its file for a while."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from evener.worker.record import heartbeat
from evener.worker.record.heartbeat import transferred_bytes
from tests.conftest import TIMEOUT_S, wait_until


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it under Linux")
def test_transferred_bytes_are_the_sum_of_sent_and_received() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        before, deadline = transferred_bytes(), time.monotonic() + TIMEOUT_S
        assert before is not None
        one.sendall(bytes(100_000))
        left = 100_000
        while left:
            left -= len(other.recv(left))
        while transferred_bytes() != before + 2 * 100_000:  # acknowledged to one end, received by the other
            assert time.monotonic() < deadline, (before, transferred_bytes())
            time.sleep(0.01)


def test_sockets_of_a_program_with_a_default_timeout_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would make a duplicate non-blocking, and with it the socket: torch's store could not read from it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 30.0)
        assert transferred_bytes() is None
        assert os.get_blocking(listener.fileno())


def test_heartbeat_goes_on_after_its_file_was_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk refuses the file; here a file stands where its folder should be."""
    refused, done = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        refused.set()
        if done.wait(0.01):
            raise SystemExit

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(sleep=sleep))
    folder = tmp_path / "pulse"
    folder.touch()

    def write() -> None:
        with contextlib.suppress(SystemExit):
            heartbeat._write_heartbeats(folder / "0")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert refused.wait(TIMEOUT_S)
    folder.unlink()
    folder.mkdir()
    wait_until((folder / "0").exists)
    assert json.loads((folder / "0").read_text())["pid"] == os.getpid()
    done.set()
    thread.join(TIMEOUT_S)
