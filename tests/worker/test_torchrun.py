"""If anything ends an agent, the agents of all hosts report it, and none ends too early."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from evener.core.run.membership_epoch import make_run_key
from evener.worker import torchrun

from ..conftest import ENV, TIMEOUT_S, wait_until
from ..ranks import free_port
from ..tiers import exhaustive, exhaustively

# The real agent after a change of its constants, or of torch's.
AGENT = """
import sys
from evener.core.run.membership_epoch import make_run_key
from evener.worker import torchrun
exec(sys.argv.pop(1))
torchrun.exit_immediately(torchrun.main())
"""
# A rank that lasts as long as its agent: nothing is left behind when a test kills that.
LASTING = """
import os, time
agent = os.getppid()
print("began", flush=True)
while os.getppid() == agent:
    time.sleep(0.1)
"""


# The same, which sets a key of the store, and reads what the other rank has set.
SHOWS_STORE = """
import os
from torch.distributed import TCPStore
rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
store = TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"by/{rank}", f"set by {rank}")
read = " ".join(store.get(f"by/{i}").decode() for i in range(2))
""" + LASTING.replace('"began"', 'f"began at {address} reads {read}"')


class Agents:
    """Agents of one run, by node rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.key_file = folder / "key"
        self.key_file.write_text(make_run_key())
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, script: str, *, nodes: int = 2, change: str = "", host: str = "", **env: str) -> None:
        name = host or "abcdef"[node]
        path = self.folder / f"{name}.py"
        path.write_text(script)
        argv = [sys.executable, "-c", AGENT, change, f"--nnodes={nodes}", "--rdzv-backend=evener", "--rdzv-id=test",
                f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf=rank={node}", "--local-addr=127.0.0.1",
                "--monitor-interval=0.1", "--shutdown-timeout=2", f"--log-dir={self.folder / 'ranks'}",
                str(path)]  # fmt: skip
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[node] = subprocess.Popen(
                argv, env=ENV | {"EVENER_HOST": name, "EVENER_KEY_FILE": str(self.key_file)} | env,
                stdout=log, stderr=log, start_new_session=True,
                pass_fds=[int(env["EVENER_FAILURES"])] if "EVENER_FAILURES" in env else [],
            )  # fmt: skip

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def is_listening(self) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        return False

    def wait(self, node: int) -> int:
        return self.processes[node].wait(TIMEOUT_S)

    def wait_began(self, *names: str) -> None:
        wait_until(lambda: all("began" in self.said(name) for name in names), lambda: self.said(names[-1]))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for process in agents.processes.values():
        for signum in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(process.pid, signum)
            except ProcessLookupError:
                break
        process.wait()


@exhaustive
def test_first_host_stays_until_all_ranks_finish(agents: Agents) -> None:
    """torchrun's barrier gives up after 300 s, here 1: the first host stays, and nobody is ended."""
    patience = """
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as Agent
begin = Agent.__init__
def init(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    self._exit_barrier_timeout = 1
Agent.__init__ = init
torchrun.REFUSED_TIMEOUT_S = 1
"""
    go_on = agents.folder / "go-on"
    agents.start(0, "", nodes=3, change=patience)
    agents.start(1, "", nodes=3, change=patience)
    waits = f"import os, time; print('began', flush=True)\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.1)"
    agents.start(2, waits, nodes=3, change=patience)
    assert agents.wait(1) == 0
    agents.wait_began("c")
    time.sleep(4)  # longer than all that patience
    assert agents.processes[0].poll() is None, agents.said("a")
    assert agents.processes[2].poll() is None, agents.said("c")
    go_on.touch()
    assert agents.wait(2) == 0, agents.said("c")
    assert agents.wait(0) == 0, agents.said("a")


@exhaustive
def test_first_host_stops_on_signal_while_waiting_for_others(agents: Agents) -> None:
    """Its ranks are done, and it stays for the other's sake."""
    agents.start(0, "")
    agents.start(1, LASTING, change="torchrun.REFUSED_TIMEOUT_S = 2")
    agents.wait_began("b")
    time.sleep(0.5)
    for process in agents.processes.values():
        process.terminate()
    assert agents.wait(1) == 143, agents.said("b")
    assert agents.wait(0) == 143, agents.said("a")


@exhaustive
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("torchrun.run = lambda args: __import__('absent')", "b failed: ModuleNotFoundError: No module named 'absent'"),
        *exhaustively(
            ("torchrun.run = lambda args: 1 / 0", "b failed: ZeroDivisionError: division by zero"),
            (
                "torchrun.FailureDetectingRendezvous.start = lambda self: 1 / 0",
                "b failed: ZeroDivisionError: division by zero",
            ),
        ),
    ],
)
def test_agent_start_failure_is_reported_to_all_hosts(agents: Agents, change: str, said: str) -> None:
    """All but the store's host learn the reason, too, although that one hears it first and has nobody to wait for."""
    agents.start(0, LASTING, nodes=3)
    agents.start(2, LASTING, nodes=3)
    agents.start(1, LASTING, nodes=3, change=change)
    assert agents.wait(1) == 1, agents.said("b")
    for node, name in ((0, "a"), (2, "c")):
        assert agents.wait(node) == 143, agents.said(name)
        assert f"evener: ending the ranks on {name}: {said}" in agents.said(name)


def test_stranger_reaches_no_store(agents: Agents) -> None:
    """Who has no key cannot read, write, or fill the memory of the store's process; ranks use it through 127.0.0.1."""
    agents.start(0, SHOWS_STORE)
    agents.start(1, SHOWS_STORE)
    agents.wait_began("a", "b")
    process = psutil.Process(agents.processes[0].pid)
    for name in "ab":
        assert "began at 127.0.0.1 reads set by 0 set by 1" in agents.said(name)
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", agents.port, None, False, timedelta(seconds=2), wait_for_workers=False)
    before = process.memory_info().rss
    # what torch's own client sends: VALIDATE with its magic number, and SET with 64 values of 1 MiB
    with socket.create_connection(("127.0.0.1", agents.port), TIMEOUT_S) as stranger, suppress(ConnectionError):
        stranger.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
        for i in range(64):
            stranger.sendall(struct.pack("=BQ2sQ", 1, 2, b"%02d" % i, 1 << 20) + bytes(1 << 20))
        stranger.shutdown(socket.SHUT_WR)
        stranger.recv(1 << 16)
    assert process.memory_info().rss - before < 8 << 20
    assert all(process.poll() is None for process in agents.processes.values())


@exhaustive
def test_launcher_without_key_says_how_to_make_one(agents: Agents) -> None:
    agents.key_file.unlink()
    agents.start(0, LASTING)
    assert agents.wait(0) == 1
    assert f"error: {agents.key_file}: No such file or directory" in agents.said("a")
    assert "openssl rand -hex 32" in agents.said("a")
    assert "Traceback" not in agents.said("a")


def test_rank_failure_is_reported_to_all_hosts(agents: Agents) -> None:
    """b fails, a has the store, c must hear the reason and not only that the store is gone."""
    agents.start(0, LASTING, nodes=3)
    agents.start(2, LASTING, nodes=3)
    failures, told = os.pipe()
    agents.start(1, "print('began'); raise SystemExit(3)", nodes=3, EVENER_FAILURES=str(told))
    os.close(told)
    assert agents.wait(1) == 1
    for node, name in ((0, "a"), (2, "c")):
        assert agents.wait(node) == 143
        assert "b failed: rank 1 ended with exit code 3" in agents.said(name)
    with os.fdopen(failures) as file:
        assert '"exitcode": 3' in file.read()


@pytest.mark.parametrize("told", [b"", b"no json", b"\xff", b"[1]", b"{}", b"7", b"[" * 100_000])
def test_malformed_store_message_is_reported(told: bytes) -> None:
    assert "in an unknown format" in torchrun._parse_failure(told)


def test_agent_ends_on_a_signal_that_arrives_while_it_logs(agents: Agents) -> None:
    """As when another host has failed just now, too: torchrun logs its own failure as it is told to end."""
    change = """
import logging, os, signal
write = logging.StreamHandler.format
def told_to_end_meanwhile(self, record):
    if "failed (exitcode" in str(record.msg):
        os.kill(os.getpid(), signal.SIGTERM)
    return write(self, record)
logging.StreamHandler.format = told_to_end_meanwhile
"""
    agents.start(0, "raise SystemExit(3)", nodes=1, change=change)
    assert agents.wait(0) == 143
    assert "Logging error" not in agents.said("a")
    assert "Traceback" not in agents.said("a")


@exhaustive
def test_port_in_use_is_reported_by_all_hosts(agents: Agents) -> None:
    """The first host cannot bind; the other finds somebody who says nothing."""
    with socket.create_server(("127.0.0.1", agents.port)):
        agents.start(0, LASTING)
        agents.start(1, LASTING, change="torchrun.JOIN_TIMEOUT_S = 8")
        assert agents.wait(0) == 1
        assert f"error: port.in-use: 127.0.0.1:{agents.port}" in agents.said("a")
        assert agents.wait(1) == 1
        silent = f"error: net.no-store: cannot reach the first host's store through 127.0.0.1:{agents.port}: "
        assert f"{silent}no answer" in agents.said("b")


@exhaustive
def test_store_of_another_run_is_refused_and_undisturbed(agents: Agents, tmp_path: Path) -> None:
    agents.start(0, LASTING)
    wait_until(agents.is_listening, lambda: agents.said("a"))
    argv = [word.replace("--rdzv-id=test", "--rdzv-id=other") for word in _argv(agents.processes[0])]
    argv = [word.replace("rank=0", "rank=1") for word in argv]
    argv[3] = "torchrun.JOIN_TIMEOUT_S = 2"
    env = ENV | {"EVENER_KEY_FILE": str(agents.key_file)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert "it belongs to another run, or its store is not up yet" in done.stderr
    agents.start(1, LASTING)
    agents.wait_began("a", "b")


@exhaustive
def test_two_agents_with_same_node_rank_end_the_run(agents: Agents) -> None:
    """Node 2 never comes, so the first host stays a while to tell it."""
    agents.start(0, LASTING, nodes=3, change="torchrun.LATE_NODE_LINGER_S = 6")
    agents.start(1, LASTING, nodes=3)
    first = agents.processes[1]
    agents.start(1, LASTING, nodes=3, host="c")
    assert {first.wait(TIMEOUT_S), agents.wait(1)} == {1, 143}
    assert agents.wait(0) == 143
    assert "rank.duplicate" in agents.said("a")


IMPATIENT = "torchrun.HEARTBEAT_TIMEOUT_S = 6"  # on busy cores a healthy one may not be heard for a second or two


@exhaustive
@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (1, "b failed: nothing was heard of it for 6 s"),
        *exhaustively((0, "nothing was heard of the store on 127.0.0.1")),
    ],
)
def test_silent_host_is_detected(agents: Agents, frozen: int, said: str) -> None:
    """A frozen agent is like a host without power: its kernel takes what is sent, and nobody answers."""
    agents.start(0, LASTING, change=IMPATIENT)
    agents.start(1, LASTING, change=IMPATIENT)
    agents.wait_began("a", "b")
    time.sleep(1.5)  # a look or two
    agents.processes[frozen].send_signal(signal.SIGSTOP)
    assert agents.wait(1 - frozen) == 143
    assert said in agents.said("ab"[1 - frozen])


@exhaustive
def test_killed_first_agent_is_detected(agents: Agents) -> None:
    agents.start(0, LASTING)
    agents.start(1, LASTING, change="torchrun.REFUSED_TIMEOUT_S = 1")
    agents.wait_began("a", "b")
    os.killpg(agents.processes[0].pid, signal.SIGKILL)
    assert agents.wait(1) == 143
    assert f"the store on 127.0.0.1:{agents.port} is gone" in agents.said("b")


def _argv(process: subprocess.Popen[bytes]) -> list[str]:
    return list(process.args)  # type: ignore[arg-type]
