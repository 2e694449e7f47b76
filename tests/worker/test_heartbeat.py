"""Count the bytes that a rank has sent and received, as its heartbeat reports them."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from evener.worker.record.heartbeat import transferred_bytes
from tests.conftest import TIMEOUT_S


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
