"""A run under its supervisor on this machine: complete logs, true exit codes, no process left, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.core.fleet import Host
from evener.hosts.session import REMOTE, Session, open_session

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    opened = open_session("here", Host(address="local"))
    yield opened
    opened.close()


class Started:
    """A program under a supervisor."""

    def __init__(self, session: Session, run: Path, argv: list[str], *, grace_s: float = 0.0, **env: str) -> None:
        self.session, self.run, self.id = session, run, f"test-{run.name}-{os.getpid()}"
        spec = {"id": self.id, "host": "here", "first_rank": 4, "argv": argv, "cwd": str(run.parent), "env": env,
                "grace_s": grace_s}  # fmt: skip
        self.state = session.call(
            "runs", "start", run=str(run), spec=spec, supervisor=(REMOTE / "supervisor.py").read_text()
        )

    def wait(self) -> dict[str, Any]:
        """Its last state."""
        wait_until(lambda: self.session.call("runs", "status", run=str(self.run))["state"] == "ended")
        return self.session.call("runs", "status", run=str(self.run))

    def processes(self) -> list[psutil.Process]:
        """Every live process that carries the run's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("EVENER_RUN") == self.id and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def printed(self, name: str = "here") -> dict[str, bytes]:
        """What was written to stdout and stderr, put together again from the log."""
        return unstamped((self.run / "logs" / f"{name}.log").read_bytes())


LINE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ([OEoe]) (.*)", re.DOTALL)


def unstamped(log: bytes) -> dict[str, bytes]:
    streams: dict[str, list[bytes]] = {"O": [], "E": []}
    for line in log.split(b"\n")[:-1]:
        found = LINE.fullmatch(line)
        assert found, line
        kind = found[1].decode()
        streams[kind.upper()].append(found[2] + (b"\n" if kind.isupper() else b""))
    return {name: b"".join(lines) for name, lines in streams.items()}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def test_status_and_output_come_back(session: Session, tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); print('unended', end=''); sys.exit(7)"
    started = Started(session, tmp_path / "run", python(code))
    state = started.wait()
    assert (state["state"], state["status"], state["stopped"]) == ("ended", 7, False)
    assert started.printed() == {"O": b"out\nunended", "E": b"err\n"}
    assert started.processes() == []


def test_a_program_that_is_not_there_is_named(session: Session, tmp_path: Path) -> None:
    started = Started(session, tmp_path / "run", ["/no/such/program"])
    assert started.wait()["status"] == 127
    assert b"/no/such/program: No such file" in started.printed()["E"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_arguments_and_environment_arrive_unchanged(
    session: Session, tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['GIVEN']]))"
    given_env = "".join(arguments)
    started = Started(session, tmp_path_factory.mktemp("a b'c") / 'r"$n', python(code, *arguments), GIVEN=given_env)
    started.wait()
    assert json.loads(started.printed()["O"]) == [arguments, given_env]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300)), max_size=20))
def test_logs_are_complete_to_the_byte(
    session: Session, tmp_path_factory: pytest.TempPathFactory, chunks: list[tuple[int, bytes]]
) -> None:
    code = "import os, sys\nfor fd, text in eval(sys.argv[1]): os.write(fd, text)"
    started = Started(session, tmp_path_factory.mktemp("logs") / "run", python(code, repr(chunks)))
    started.wait()
    expected = {name: b"".join(text for fd, text in chunks if fd == number) for name, number in (("O", 1), ("E", 2))}
    assert started.printed() == expected


def test_rank_logs_are_taken_over_whole(session: Session, tmp_path: Path) -> None:
    """Ranks write files of their own, as torchrun's --redirects has it; 20 MB of it, and a death without farewell."""
    code = """if True:
        import os, sys
        folder = sys.argv[1] + "/host/ranks/none_x/attempt_0/1"
        os.makedirs(folder)
        with open(folder + "/stdout.log", "wb") as file:
            for i in range(200_000):
                file.write(b"%d %s\\n" % (i, b"x" * 92))
        with open(folder + "/stderr.log", "wb") as file:
            file.write(b"no newline")
        os.kill(os.getpid(), 9)
    """
    started = Started(session, tmp_path / "run", python(code, str(tmp_path / "run")))
    assert started.wait()["status"] == -signal.SIGKILL
    streams = started.printed("here.5")
    assert streams["O"] == b"".join(b"%d %s\n" % (i, b"x" * 92) for i in range(200_000))
    assert streams["E"] == b"no newline"


TREE = """if True:
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        # One that leaves the session, and whose parent dies.
        subprocess.run([sys.executable, "-c",
            "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
            "start_new_session=True)"])
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def tree(session: Session, tmp_path: Path) -> Iterator[Started]:
    started = Started(session, tmp_path / "run", python(TREE))
    wait_until(lambda: (tmp_path / "run/logs/here.log").exists() and b"ready" in started.printed()["O"])
    assert len(started.processes()) == 3
    yield started
    assert started.processes() == []


def test_stop_leaves_no_process(tree: Started) -> None:
    last = list(tree.session.stream("runs", "stop", run=str(tree.run)))[-1]
    assert (last["state"], last["stopped"]) == ("ended", True)


def test_a_killed_program_leaves_no_process(tree: Started) -> None:
    os.kill(tree.state["pid"], signal.SIGKILL)
    assert tree.wait()["status"] == -signal.SIGKILL


def test_a_killed_supervisor_leaves_no_process(tree: Started) -> None:
    os.kill(tree.state["supervisor"], signal.SIGKILL)
    wait_until(lambda: tree.processes() == [])
    assert tree.wait()["lost"] == "the supervisor was killed"


def test_supervisor_and_guard_killed_at_once(tree: Started) -> None:
    """Nobody is left who could end the run: its processes are found by their mark."""
    supervisor = psutil.Process(tree.state["supervisor"])
    guard = [child for child in supervisor.children() if child.pid != tree.state["pid"]
             and child.environ().get("EVENER_RUN") != tree.id]  # fmt: skip
    assert len(guard) == 1
    for process in (supervisor, *guard):
        process.suspend()
    for process in (*guard, supervisor):
        process.kill()
    wait_until(lambda: tree.session.call("runs", "status", run=str(tree.run))["state"] == "ended")
    assert "supervisor was killed" in tree.session.call("runs", "status", run=str(tree.run))["lost"]
    list(tree.session.stream("runs", "stop", run=str(tree.run)))


def test_ranks_are_asked_first_and_may_save(session: Session, tmp_path: Path) -> None:
    """SIGTERM reaches the program's children, which end in order; the program ends by itself."""
    rank = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0))); " \
           "print('ready', flush=True); time.sleep(600)"  # fmt: skip
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {rank!r}]).returncode)"
    started = Started(session, tmp_path / "run", python(code), grace_s=60.0)
    wait_until(lambda: (tmp_path / "run/logs/here.log").exists() and b"ready" in started.printed()["O"])
    began = time.monotonic()
    last = list(session.stream("runs", "stop", run=str(started.run)))[-1]
    assert time.monotonic() - began < DEADLINE_S
    assert (last["status"], last["stopped"]) == (0, True)
    assert started.printed()["O"] == b"ready\nsaved\n"


def test_the_connection_may_go(tmp_path: Path) -> None:
    """The session that started the run is killed; the run is not."""
    first = open_session("here", Host(address="local"))
    started = Started(first, tmp_path / "run", python("import time; print('a', flush=True); time.sleep(1); print('b')"))
    first._process.kill()
    second = open_session("here", Host(address="local"))
    started.session = second
    assert started.wait()["status"] == 0
    assert started.printed()["O"] == b"a\nb\n"
    second.close()
