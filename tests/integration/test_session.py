"""A session with this machine forgets finished requests and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from evener.core.base.errors import HostError
from evener.core.cluster.fleet_file import HostConfig
from evener.ssh import session as session_module
from evener.ssh.session import RemoteError, Session, open_session
from evener.ssh.transport import LocalTransport

HERE = HostConfig(address="local")


@pytest.fixture
def session() -> Iterator[Session]:
    opened = open_session("here", HERE)
    yield opened
    opened.close()


def test_finished_requests_leave_no_pending_replies(session: Session) -> None:
    session.clock_offset_s(repeats=2)
    assert session.call("project_sync", "list_script_outputs", folder="/nowhere", since=0) == []
    with pytest.raises(RemoteError, match="no such run"):
        session.call("run_control", "put", run="/nowhere", files={})
    assert session._replies == {}


def test_imported_modules_are_sent_once_and_first(session: Session) -> None:
    session.call("run_control", "status", run="/nowhere")
    session.call("project_sync", "list_script_outputs", folder="/nowhere", since=0)
    assert session._loaded_modules == {"run_control", "project_sync", "file_io", "process_table", "sockets"}


def test_python_that_reads_nothing_is_an_error_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that a session sends first is longer than a pipe holds."""
    started: list[subprocess.Popen[bytes]] = []

    class Deaf(LocalTransport):
        def start(self) -> subprocess.Popen[bytes]:
            argv = ["sh", "-c", "exec <&-; echo no room >&2; exit 3"]
            started.append(
                subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
            started[0].wait()
            return started[0]

    with pytest.raises(HostError, match="no room"):
        Session("here", Deaf("here", HERE), 5.0)
    assert started[0].stdin is not None
    assert started[0].stdin.closed


def test_stream_can_be_closed_after_connection_is_closed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in another thread, while the host still runs."""
    monkeypatch.setattr(session_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    items = session.stream("link_probe", "echo", address="127.0.0.1", seconds=60)
    assert next(items)["port"] > 0
    assert session._process.stdin is not None
    still_open = os.dup(session._process.stdin.fileno())
    session._process.stdin.close()
    items.close()  # type: ignore[attr-defined]
    os.close(still_open)
