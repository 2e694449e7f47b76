"""A supervised run has complete logs, true exit codes and no process left, whatever is killed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.core.cluster.fleet_file import HostConfig
from evener.doctor.context import CheckContext
from evener.node.remote import bundle, process_table, run_control, supervisor
from evener.ssh.session import RemoteError, Session, open_session

from ..tiers import num_examples

DEADLINE_S = 120.0
SUPERVISOR = bundle("supervisor")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    opened = open_session("here", HostConfig(address="local"))
    yield opened
    opened.close()


class Started:
    """A program under a supervisor."""

    def __init__(self, session: Session, run: Path, argv: list[str], *, grace_s: float = 0.0, cwd: Path | None = None,
                 program: str = SUPERVISOR, is_rank: bool = False, attached: str | None = None,
                 **env: str) -> None:  # fmt: skip
        self.session, self.run, self.id = session, run, f"test-{run.name}-{os.getpid()}"
        spec = {"id": self.id, "host": "here", "first_rank": 4, "argv": argv, "cwd": str(cwd or run.parent), "env": env,
                "grace_s": grace_s, "is_rank": is_rank, "attached": attached}  # fmt: skip
        self.state = session.call("run_control", "start", run=str(run), spec=spec, supervisor=program)

    def wait(self) -> dict[str, Any]:
        """Its last state."""
        wait_until(lambda: self.session.call("run_control", "status", run=str(self.run))["state"] == "ended")
        return self.session.call("run_control", "status", run=str(self.run))

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

    def wait_printed(self, text: bytes) -> None:
        """Until the program has said so."""
        wait_until(lambda: (self.run / "logs/here.log").exists() and text in self.printed()["O"])

    def kill(self) -> None:
        """The supervisor and its guard at once: nobody is left who could end the run."""
        supervisor = psutil.Process(self.state["supervisor"])
        guard = [child for child in supervisor.children() if child.pid != self.state["pid"]
                 and child.environ().get("EVENER_RUN") != self.id]  # fmt: skip
        assert len(guard) == 1
        for process in (supervisor, *guard):
            process.suspend()
        for process in (*guard, supervisor):
            process.kill()
        wait_until(lambda: not run_control.is_supervised(str(self.run / "host")))

    def stop(self) -> dict[str, Any]:
        """Its last state."""
        return list(self.session.stream("run_control", "stop", run=str(self.run)))[-1]

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


def test_exit_status_and_complete_output_are_recorded(session: Session, tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); print('unended', end=''); sys.exit(7)"
    started = Started(session, tmp_path / "run", python(code))
    state = started.wait()
    assert (state["state"], state["status"], state["stopped"]) == ("ended", 7, False)
    assert started.printed() == {"O": b"out\nunended", "E": b"err\n"}
    assert started.processes() == []


LEFT_OUT = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1",
    "GROUP_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "old",
    "SLURM_PROCID": "3", "SLURM_JOB_ID": "77", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "PMIX_RANK": "3",
    "EVENER_WORLD": "/old/world", "EVENER_ROSTER": "/old/roster.json", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}  # fmt: skip


def test_variables_of_other_launchers_do_not_reach_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan sets itself does, and so does what is nobody's."""
    for name, value in (LEFT_OUT | {"RANKING": "kept", "TORCH_SHOW_CPP_STACKTRACES": "1"}).items():
        monkeypatch.setenv(name, value)
    opened = open_session("here", HostConfig(address="local"))
    try:
        collected = opened.call("facts", "collect_environment")
        started = Started(
            opened, tmp_path / "run", python("import os, json; print(json.dumps({**os.environ}))"), RANK="0"
        )
        started.wait()
    finally:
        opened.close()
    environment = json.loads(started.printed()["O"])
    assert {name: environment[name] for name in LEFT_OUT if name in environment} == {"RANK": "0"}
    assert (environment["RANKING"], environment["TORCH_SHOW_CPP_STACKTRACES"]) == ("kept", "1")
    assert {*collected["launcher_variables"], *collected["debug_variables"]} == {*LEFT_OUT}


@pytest.mark.parametrize("line", ["export {}", "{}", "  export OTHER=1 {} # old", "declare -x {}"])
def test_fix_of_a_left_out_variable_works_when_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """`line` in ~/.bashrc sets the variable; after the fix a login shell does not."""
    bashrc = tmp_path / ".bashrc"
    bashrc.write_text(f"export KEPT=1\n{line.format('RANK=3')}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    opened = open_session("here", HostConfig(address="local"))
    try:
        collected = opened.call("facts", "collect_environment")
    finally:
        opened.close()
    assert collected["set_in"]["RANK"] == "~/.bashrc"
    context: Any = SimpleNamespace(facts={"b": SimpleNamespace(set_in=collected["set_in"], is_root=True)})
    fix = CheckContext.unset_command(context, "b", "RANK")
    subprocess.run(["bash", "-c", fix.removeprefix("on b: ")], check=True)
    shown = subprocess.run(["bash", "-c", ". ~/.bashrc; echo $KEPT ${RANK-unset}"], capture_output=True, check=True,
                           text=True, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]}).stdout  # fmt: skip
    assert shown.split() == ["1", "unset"]


def test_half_written_checkpoint_is_removed_at_the_next_start(session: Session, tmp_path: Path) -> None:
    for name in (".step-000009.tmp", ".step-000008.arriving", "step-000007"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run/checkpoints" / name / "weights.safetensors").write_bytes(b"x")
    Started(session, tmp_path / "run", python("")).wait()
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {".step-000008.arriving", "step-000007"}


def test_missing_program_is_named(session: Session, tmp_path: Path) -> None:
    started = Started(session, tmp_path / "run", ["/no/such/program"])
    assert started.wait()["status"] == 127
    assert b"/no/such/program: No such file" in started.printed()["E"]


@settings(max_examples=num_examples(8, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_arguments_and_environment_arrive_unchanged(
    session: Session, tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['GIVEN']]))"
    given_env = "".join(arguments)
    started = Started(session, tmp_path_factory.mktemp("a b'c") / 'r"$n', python(code, *arguments), GIVEN=given_env)
    started.wait()
    assert json.loads(started.printed()["O"]) == [arguments, given_env]


@settings(max_examples=num_examples(5, 15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300)), max_size=20))
def test_logs_are_complete_byte_for_byte(
    session: Session, tmp_path_factory: pytest.TempPathFactory, chunks: list[tuple[int, bytes]]
) -> None:
    code = "import os, sys\nfor fd, text in eval(sys.argv[1]): os.write(fd, text)"
    started = Started(session, tmp_path_factory.mktemp("logs") / "run", python(code, repr(chunks)))
    started.wait()
    expected = {name: b"".join(text for fd, text in chunks if fd == number) for name, number in (("O", 1), ("E", 2))}
    assert started.printed() == expected


def test_rank_logs_are_copied_completely(session: Session, tmp_path: Path) -> None:
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
    started.wait_printed(b"ready")
    assert len(started.processes()) == 3
    yield started
    assert started.processes() == []


def test_stop_leaves_no_process(tree: Started) -> None:
    last = tree.stop()
    assert (last["state"], last["stopped"]) == ("ended", True)


def test_a_killed_program_leaves_no_process(tree: Started) -> None:
    os.kill(tree.state["pid"], signal.SIGKILL)
    assert tree.wait()["status"] == -signal.SIGKILL


def test_a_killed_supervisor_leaves_no_process(tree: Started) -> None:
    os.kill(tree.state["supervisor"], signal.SIGKILL)
    wait_until(lambda: tree.processes() == [])
    assert tree.wait()["lost"] == "the supervisor was killed"


def test_run_without_supervisor_and_guard_can_be_stopped(tree: Started) -> None:
    """The run goes on, and nobody is left who could end it: its processes are found by their mark."""
    assert "unwatched" not in tree.session.call("run_control", "status", run=str(tree.run))
    tree.kill()
    state = tree.session.call("run_control", "status", run=str(tree.run))
    assert (state["state"], state["unwatched"]) == ("running", True)
    last = tree.stop()
    assert (last["state"], last["left"]) == ("ended", [])
    assert "supervisor was killed" in last["lost"]
    assert "unwatched" not in last


def test_ranks_get_sigterm_first_and_save_before_exit(session: Session, tmp_path: Path) -> None:
    """SIGTERM reaches the program's children, which end in order; the program ends by itself."""
    rank = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0))); " \
           "print('ready', flush=True); time.sleep(600)"  # fmt: skip
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {rank!r}]).returncode)"
    started = Started(session, tmp_path / "run", python(code), grace_s=60.0)
    started.wait_printed(b"ready")
    began = time.monotonic()
    last = started.stop()
    assert time.monotonic() - began < DEADLINE_S
    assert (last["status"], last["stopped"]) == (0, True)
    assert started.printed()["O"] == b"ready\nsaved\n"


RANK_ITSELF = """if True:
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    print("ready", flush=True)
    time.sleep(600)
"""


def test_program_that_is_itself_a_rank_has_rank_log_and_rank_failure(session: Session, tmp_path: Path) -> None:
    """It has a rank's log, is asked like a rank, and its end is a rank's failure."""
    asked = Started(session, tmp_path / "asked", python(RANK_ITSELF), grace_s=600.0, is_rank=True)
    wait_until(lambda: (tmp_path / "asked/logs/here.4.log").exists() and b"ready" in asked.printed("here.4")["O"])
    last = asked.stop()
    assert (last["status"], last["stopped"], last["failures"]) == (0, True, [])
    assert asked.printed("here.4")["O"] == b"ready\nsaved\n"
    assert not (tmp_path / "asked/logs/here.log").exists()
    killed = Started(session, tmp_path / "killed", python("import os; os.kill(os.getpid(), 9)"), is_rank=True)
    (failure,) = killed.wait()["failures"]
    assert (failure["rank"], failure["exitcode"], failure["signal"]) == (4, -signal.SIGKILL, "SIGKILL")


def test_an_attached_run_ends_with_its_launcher(session: Session, tmp_path: Path) -> None:
    """Whose lock goes with it, in whatever way it ends."""
    lock = (tmp_path / "attached").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    attached = str(tmp_path / "attached")
    started = Started(session, tmp_path / "run", python(RANK_ITSELF), grace_s=600.0, is_rank=True, attached=attached)
    wait_until(lambda: (tmp_path / "run/logs/here.4.log").exists() and b"ready" in started.printed("here.4")["O"])
    lock.close()
    last = started.wait()
    assert (last["status"], last["stopped"]) == (0, True)
    assert started.printed("here.4")["O"] == b"ready\nsaved\n"
    assert started.processes() == []


def test_immediate_stop_kills_unresponsive_rank_without_grace_period(session: Session, tmp_path: Path) -> None:
    """A rank that hears nothing, as one that is stuck in the kernel."""
    started = Started(session, tmp_path / "run", python(RANK_ITSELF), grace_s=600.0, is_rank=True)
    wait_until(lambda: (tmp_path / "run/logs/here.4.log").exists() and b"ready" in started.printed("here.4")["O"])
    os.kill(started.state["pid"], signal.SIGSTOP)
    began = time.monotonic()
    last = list(session.stream("run_control", "stop", run=str(started.run), now=True))[-1]
    assert time.monotonic() - began < DEADLINE_S
    assert (last["signal"], last["stopped"], last["left"]) == ("SIGKILL", True, [])


def test_run_survives_loss_of_its_connection(tmp_path: Path) -> None:
    """The session that started the run is killed; the run is not."""
    first = open_session("here", HostConfig(address="local"))
    started = Started(first, tmp_path / "run", python("import time; print('a', flush=True); time.sleep(1); print('b')"))
    first._process.kill()
    second = open_session("here", HostConfig(address="local"))
    started.session = second
    assert started.wait()["status"] == 0
    assert started.printed()["O"] == b"a\nb\n"
    second.close()


SLEEP = "import time; print('ready', flush=True); time.sleep(600)"


def test_running_run_is_not_started_again(session: Session, tmp_path: Path) -> None:
    first = Started(session, tmp_path / "run", python(SLEEP))
    before = {path: path.read_bytes() for path in (tmp_path / "run/host").iterdir() if path.is_file()}
    with pytest.raises(RemoteError, match="this run is running here already"):
        Started(session, tmp_path / "run", python("print('second')"))
    assert {path: path.read_bytes() for path in (tmp_path / "run/host").iterdir() if path.is_file()} == before
    assert session.call("run_control", "status", run=str(first.run))["state"] == "running"
    first.stop()


def test_stop_needs_no_state_file(session: Session, tmp_path: Path) -> None:
    """The lock itself says who looks after the run."""
    started = Started(session, tmp_path / "run", python(SLEEP))
    (tmp_path / "run/host/state.json").unlink()
    assert started.stop()["stopped"]
    assert started.processes() == []


def test_stalled_supervisor_is_killed(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(session, tmp_path / "run", python(SLEEP), grace_s=0.2)
    os.kill(started.state["supervisor"], signal.SIGSTOP)
    monkeypatch.setattr(run_control, "KILL_TIMEOUT_S", 0.05)
    *waiting, last = run_control.stop(str(started.run))
    assert waiting == [{"waiting": True}] * len(waiting)
    assert (last["state"], last["lost"], last["left"]) == ("ended", "the supervisor was killed", [])
    assert started.processes() == []


def test_supervisor_that_does_not_start_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_control, "START_TIMEOUT_S", 0.3)
    with pytest.raises(RuntimeError, match="did not start"):
        run_control.start(str(tmp_path / "run"), {"id": "never"}, "import time; time.sleep(600)")
    assert not [process for process in psutil.process_iter(["cmdline"])
                if str(tmp_path / "run") in (process.info["cmdline"] or [])]  # fmt: skip


def test_roster_exists_before_program_starts(session: Session, tmp_path: Path) -> None:
    reads = "import sys; sys.exit(open('roster.json').read() != '{}')"
    spec = {"id": "roster", "host": "here", "first_rank": 0, "argv": python(reads), "cwd": str(tmp_path / "run"),
            "env": {}, "grace_s": 0}  # fmt: skip
    session.call(
        "run_control", "start", run=str(tmp_path / "run"), spec=spec, supervisor=SUPERVISOR, files={"roster.json": "{}"}
    )
    wait_until(lambda: session.call("run_control", "status", run=str(tmp_path / "run"))["state"] == "ended")
    assert session.call("run_control", "status", run=str(tmp_path / "run"))["status"] == 0


def test_leftover_processes_of_other_run_are_not_killed(session: Session, tmp_path: Path) -> None:
    """Both supervisors descend from the process that serves the session."""
    other = Started(session, tmp_path / "other", python(SLEEP))
    started = Started(session, tmp_path / "run", python(SLEEP))
    started.kill()
    started.stop()
    assert started.processes() == []
    assert session.call("run_control", "status", run=str(other.run))["state"] == "running"
    assert len(other.processes()) == 1
    other.stop()


def test_stop_of_a_copy_with_the_same_id_kills_nothing(session: Session, tmp_path: Path) -> None:
    """A run directory from somebody else may have any id; this user's own is also stopped through a link to it."""
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    started = Started(session, tmp_path / "linked", python(SLEEP))
    started.wait_printed(b"ready")
    started.kill()
    shutil.copytree(tmp_path / "run/host", tmp_path / "copy/host")
    assert session.call("run_control", "status", run=str(tmp_path / "copy"))["state"] == "ended"
    list(session.stream("run_control", "stop", run=str(tmp_path / "copy")))
    assert len(started.processes()) == 1
    assert session.call("run_control", "status", run=str(tmp_path / "run"))["unwatched"]
    list(session.stream("run_control", "stop", run=str(tmp_path / "run")))
    assert started.processes() == []


RANK = """if True:
    import os, sys, time
    folder = sys.argv[1] + "/host/ranks/none_x/attempt_0/0"
    os.makedirs(folder)
    file = open(folder + "/stdout.log", "wb", buffering=0)
    for i in range(int(sys.argv[2])):
        file.write(b"%s %d\\n" % (sys.argv[3].encode(), i))
    file.write(b"unended")
    open(sys.argv[1] + "/wrote", "w").close()
    if sys.argv[4] == "stay":
        time.sleep(600)
"""
EARLIER = b"".join(b"earlier %d\n" % i for i in range(5000)) + b"unended"
LATER = b"".join(b"later %d\n" % i for i in range(3)) + b"unended"


def test_killed_supervisor_loses_no_log_line(session: Session, tmp_path: Path) -> None:
    """Its guard reads on; a start after it does not read the same lines again."""
    run = str(tmp_path / "run")
    started = Started(session, tmp_path / "run", python(RANK, run, "5000", "earlier", "stay"))
    wait_until((tmp_path / "run/wrote").exists)
    os.kill(started.state["supervisor"], signal.SIGKILL)
    assert started.wait()["lost"] == "the supervisor was killed"
    assert started.printed("here.4")["O"] == EARLIER
    Started(session, tmp_path / "run", python(RANK, run, "3", "later", "end")).wait()
    assert started.printed("here.4")["O"] == EARLIER + LATER


def test_unread_log_is_read_at_next_start(session: Session, tmp_path: Path) -> None:
    """The guard is killed, too, some lines are in the log, and the last of them is cut."""
    run = str(tmp_path / "run")
    started = Started(session, tmp_path / "run", python(RANK, run, "5000", "earlier", "stay"))
    log = tmp_path / "run/logs/here.4.log"
    wait_until(lambda: log.exists() and b"earlier 4999" in started.printed("here.4")["O"])
    started.kill()
    os.truncate(log, log.stat().st_size // 2 + 7)
    with pytest.raises(RemoteError, match="running here already, without its supervisor"):
        Started(session, tmp_path / "run", python(RANK, run, "3", "later", "end"))
    started.stop()
    Started(session, tmp_path / "run", python(RANK, run, "3", "later", "end")).wait()
    assert started.processes() == []
    assert started.printed("here.4")["O"] == EARLIER + LATER


@settings(max_examples=num_examples(20, 60), deadline=None)
@given(
    prints=st.lists(st.tuples(st.sampled_from(["stdout.log", "stderr.log"]), st.binary(max_size=40)), max_size=20),
    part=st.floats(0, 1),
)
def test_truncated_log_is_completed(
    tmp_path_factory: pytest.TempPathFactory, prints: list[tuple[str, bytes]], part: float
) -> None:
    """Wherever the supervisor was when it was killed, even within a line."""
    run = tmp_path_factory.mktemp("cut")
    rank = run / "host/ranks/none_x/attempt_0/0"
    log = run / "logs/here.4.log"
    for folder in (rank, log.parent):
        folder.mkdir(parents=True)
    earlier = b"2026-01-01T00:00:00.000Z O of an earlier start\n"
    log.write_bytes(earlier)
    begun = {"host": "here", "first_rank": 4}
    sizes = {"sizes": {log.name: len(earlier)}, "log": "here.log"}
    (run / "host/ranks/begun.json").write_text(json.dumps(begun | sizes))
    ranks = supervisor.RankLogs(str(run / "host/ranks"), str(log.parent), **begun)
    for name, text in prints:
        with (rank / name).open("ab") as file:
            file.write(text)
        ranks.read(last=True)
    ranks.close()
    if log.stat().st_size > len(earlier):
        os.truncate(log, len(earlier) + int(part * (log.stat().st_size - len(earlier))))
    supervisor.recover_rank_logs(str(run))
    supervisor.recover_rank_logs(str(run))
    assert not rank.exists()
    expected = {kind: b"".join(text for one, text in prints if one == name)
                for kind, name in (("O", "stdout.log"), ("E", "stderr.log"))}  # fmt: skip
    assert unstamped(log.read_bytes()[len(earlier) :]) == expected


def test_run_can_restart_as_soon_as_it_ended(session: Session, tmp_path: Path) -> None:
    """Its supervisor keeps the lock a little longer than the state says."""
    Started(session, tmp_path / "run", python("")).wait()
    supervisors = os.open(tmp_path / "run/host/lock", os.O_RDONLY)
    fcntl.flock(supervisors, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [supervisors]).start()
    assert Started(session, tmp_path / "run", python("")).wait()["status"] == 0


def test_stop_terminates_program_without_ranks_at_once(session: Session, tmp_path: Path) -> None:
    """As while it imports torch: there is nobody to wait for."""
    started = Started(session, tmp_path / "run", python(SLEEP), grace_s=600.0)
    started.wait_printed(b"ready")
    began = time.monotonic()
    last = started.stop()
    assert time.monotonic() - began < DEADLINE_S
    assert (last["status"], last["signal"], last["stopped"]) == (-signal.SIGTERM, "SIGTERM", True)


def test_ranks_started_during_stop_are_terminated_too(session: Session, tmp_path: Path) -> None:
    code = f"import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    started = Started(session, tmp_path / "run", python(code), grace_s=600.0)
    started.wait_printed(b"ready")
    began = time.monotonic()
    last = started.stop()
    assert time.monotonic() - began < DEADLINE_S
    assert (last["status"], last["stopped"]) == (0, True)


def test_unkillable_process_is_reported(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_table, "KILL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process_table, "processes_with", lambda *_: [os.getpid(), 4_999_999])
    assert process_table.kill_processes_with("EVENER_RUN_FOLDER=/hangs") == [4_999_999]
    fake = "def kill_processes_with(*_):\n    return [4_999_999]\n\n\nif __name__ =="
    started = Started(session, tmp_path / "run", python(""), program=SUPERVISOR.replace("if __name__ ==", fake))
    assert started.wait()["left"] == [4_999_999]
    assert started.stop()["left"] == []


def test_progress_bar_is_logged_while_it_moves(session: Session, tmp_path: Path) -> None:
    code = "import sys, time; sys.stderr.write('\\r 1%'); print('ready', flush=True); time.sleep(600)"
    started = Started(session, tmp_path / "run", python(code))
    started.wait_printed(b"ready")
    wait_until(lambda: started.printed()["E"] == b"\r 1%")
    started.stop()


def test_endless_line_is_written_in_parts(tmp_path: Path) -> None:
    log = supervisor.TimestampedLog(str(tmp_path / "log"))
    for _ in range(300_000):
        log.add("O", b"\r")
    assert (tmp_path / "log").stat().st_size > 4 * supervisor.MAX_PARTIAL_LINE_BYTES
    log.add("O", b"1\n2")
    log.close()
    content = (tmp_path / "log").read_bytes()
    assert unstamped(content) == {"O": b"\r" * 300_000 + b"1\n2", "E": b""}
    assert [LINE.fullmatch(line)[1] for line in content.split(b"\n")[:-1]] == [b"o"] * 4 + [b"O", b"o"]  # type: ignore[index]


def test_missing_working_directory_is_named(session: Session, tmp_path: Path) -> None:
    started = Started(session, tmp_path / "run", python(""), cwd=tmp_path / "gone")
    assert started.wait()["status"] == 127
    assert f"{tmp_path / 'gone'}: No such file".encode() in started.printed()["E"]


def test_stop_does_not_kill_the_run_that_the_files_name(session: Session, tmp_path: Path) -> None:
    """A directory that came from elsewhere may hold the id of another run of this user."""
    other = Started(session, tmp_path / "other", python(SLEEP))
    started = Started(session, tmp_path / "run", python(""))
    started.wait()
    wait_until(lambda: not run_control.is_supervised(str(started.run / "host")))
    (started.run / "host/spec.json").write_text(json.dumps({"id": other.id, "grace_s": 0}))
    started.stop()
    assert session.call("run_control", "status", run=str(other.run))["state"] == "running"
    Started(session, tmp_path / "run", python("")).wait()
    assert len(other.processes()) == 1
    other.stop()


def test_supervisor_imports_nothing_from_the_folder_of_the_run(session: Session, tmp_path: Path) -> None:
    """A run directory from elsewhere may hold modules with the names of Python's own."""
    started = Started(session, tmp_path / "first", python(""))
    started.wait()
    trap = f"open({str(tmp_path / 'executed')!r}, 'w')"
    (tmp_path / "run/host").mkdir(parents=True)
    for name in ("selectors", "json", "subprocess", "ctypes", "signal", "shutil", "threading"):
        (tmp_path / f"run/host/{name}.py").write_text(trap)
    assert Started(session, tmp_path / "run", python("")).wait()["status"] == 0
    assert not (tmp_path / "executed").exists()


def test_restarted_host_runs_what_is_sent(session: Session, tmp_path: Path) -> None:
    """The files of the earlier start may have been replaced meanwhile."""
    started = Started(session, tmp_path / "run", python(""))
    started.wait()
    wait_until(lambda: not run_control.is_supervised(str(started.run / "host")))
    spec = json.loads((started.run / "host/spec.json").read_text())
    altered = spec | {"argv": python(f"open({str(tmp_path / 'executed')!r}, 'w')")}
    (started.run / "host/spec.json").write_text(json.dumps(altered))
    (started.run / "host/supervisor.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    (started.run / "host/agent.json").write_text('{"edition": 7, "hosts": {"a": 1}, "program": ["altered"]}')
    agent = '{"edition": 3, "hosts": {}, "program": ["sent"]}'
    session.call("run_control", "restart_run", run=str(started.run), spec=spec, supervisor=SUPERVISOR,
                 files={"host/agent.json": agent})  # fmt: skip
    assert started.wait()["status"] == 0
    assert not (tmp_path / "executed").exists()
    restarted = json.loads((started.run / "host/agent.json").read_text())
    assert restarted == {"edition": 7, "hosts": {"a": 1}, "program": ["sent"]}  # it had learned of another host


@pytest.mark.parametrize(
    "altered",
    [
        {"log": "../../outside.log"},
        {"host": "../../outside"},
        {"host": "../../outside", "log": "../../outside.log"},
        {"sizes": {"here.log": "0"}},
        {"first_rank": "../../outside"},
        {"more": 1},
    ],
)
def test_recovered_logs_stay_inside_the_run(tmp_path: Path, altered: dict[str, Any]) -> None:
    """begun.json may come from elsewhere: a log outside the run is neither written nor cut short."""
    run, outside = tmp_path / "a/run", tmp_path / "a/outside.log"
    rank = run / "host/ranks/none_x/attempt_0/0"
    rank.mkdir(parents=True)
    (run / "logs").mkdir()
    outside.write_bytes(b"no newline at its end")
    (rank / "stdout.log").write_bytes(b"text\n")
    begun = {"host": "here", "first_rank": 0, "sizes": {}, "log": "here.log"} | altered
    (run / "host/ranks/begun.json").write_text(json.dumps(begun))
    supervisor.recover_rank_logs(str(run))
    assert outside.read_bytes() == b"no newline at its end"
    assert [path.name for path in (tmp_path / "a").iterdir() if path.is_file()] == ["outside.log"]
    assert list((run / "logs").iterdir()) == []


def test_reading_run_status_does_not_block_start_or_stop(session: Session, tmp_path: Path) -> None:
    """While somebody looks, a run that has ended stays ended, and one can be started."""
    started = Started(session, tmp_path / "run", python(""))
    started.wait()
    look = os.open(tmp_path / "run/host/lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    assert started.stop()["state"] == "ended"
    threading.Timer(0.3, os.close, [look]).start()
    assert Started(session, tmp_path / "run", python("")).wait()["status"] == 0


@pytest.mark.parametrize("content", ["", '{"state": "run', "\0\0\0"])
def test_run_with_damaged_state_file_counts_as_lost(session: Session, tmp_path: Path, content: str) -> None:
    run = tmp_path / "runs/one"
    Started(session, run, python("")).wait()
    wait_until(lambda: not run_control.is_supervised(str(run / "host")))
    (run / "host/state.json").write_text(content)
    state = session.call("run_control", "status", run=str(run))
    assert (state["state"], state["status"]) == ("ended", None)
    assert state["lost"]
    assert session.call("run_control", "status", run=str(tmp_path / "runs/never")) is None


def test_status_is_none_if_run_state_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([{"state": "running"}, None])
    monkeypatch.setattr(run_control, "_read_state", lambda folder: next(states))
    assert run_control.status(str(tmp_path)) is None


def test_failures_name_the_signal_that_ended_the_rank(session: Session, tmp_path: Path) -> None:
    """Their numbers differ between systems."""
    failures = [{"rank": 4, "exitcode": -signal.SIGUSR1}, {"rank": 5, "exitcode": 1}, {"rank": 6, "exitcode": -63}]
    told = "os.write(int(os.environ['EVENER_FAILURES']), sys.argv[1].encode())"
    code = f"import os, sys; {told}; os.kill(os.getpid(), 9)"
    state = Started(session, tmp_path / "run", python(code, json.dumps(failures))).wait()
    assert (state["status"], state["signal"]) == (-signal.SIGKILL, "SIGKILL")
    assert [one["signal"] for one in state["failures"]] == ["SIGUSR1", None, "signal 63"]


def test_complete_checkpoints_are_listed_in_order_of_step(tmp_path: Path) -> None:
    names = ("step-1000000", "step-000100", "step-999999", "step-000200.tmp", "step-x", "step-7", "best", "step-000300")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        state = {"val_loss": 2.5, "files": {"state.json~": "d1"}}
        (tmp_path / "checkpoints" / name / "state.json").write_text(json.dumps(state))
        (tmp_path / "checkpoints" / name / "state.json~").write_text("12345")
    (tmp_path / "checkpoints" / "step-000300" / "state.json").write_text("{")
    found = run_control.list_checkpoints(str(tmp_path))
    assert [(one["step"], one["val_loss"]) for one in found] == [(100, 2.5), (999999, 2.5), (1000000, 2.5)]
    assert [(file["path"], file["size"]) for file in found[0]["files"]][1] == ("state.json~", 5)


def test_connection_table_is_read_only_on_retransmits_or_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or now and then: it takes the kernel milliseconds. Lines as of proc(5): 10.77.0.2 does not acknowledge 256 bytes,
    sent 5 times.
    """
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    line = "   0: 01004D0A:A0F2 02004D0A:7475 01 00000100:00000000 01:00000064 {:08X}     0        0 17\n"
    (tmp_path / "tcp6").write_text(head)
    read = []

    def open_table(path: str) -> Any:
        read.append(path)
        return (tmp_path / Path(path).name).open()

    monkeypatch.setattr(run_control, "open", open_table, raising=False)
    monkeypatch.setattr(run_control, "_tcp_cache", {})
    often, seldom, peer = 0.0, math.inf, "10.77.0.2"
    for sent_again, tries, found, is_read, read_s in (
        (7, 0, [], True, seldom), (7, 5, [], False, seldom), (8, 3, [], True, seldom), (9, 4, [peer], True, seldom),
        (9, 5, [peer], True, seldom), (9, 0, [], True, seldom), (9, 5, [], False, seldom), (9, 5, [peer], True, often),
        (None, 5, [peer], True, seldom), (None, 0, [], True, seldom), (None, 0, [], True, seldom),
    ):  # fmt: skip
        read.clear()
        monkeypatch.setattr(run_control, "TCP_TABLE_INTERVAL_S", read_s)
        monkeypatch.setattr(run_control, "_count_retransmits", lambda told=sent_again: told)
        (tmp_path / "tcp").write_text(head + line.format(tries))
        assert run_control.find_stalled_peers() == found
        assert bool(read) == is_read


def test_retransmit_count_matches_nstat() -> None:
    """As nstat reads it, which belongs to iproute2."""
    if shutil.which("nstat") is None:
        pytest.skip("no nstat")
    before = run_control._count_retransmits()
    said = subprocess.run(["nstat", "-asz", "TcpRetransSegs"], capture_output=True, text=True, check=True).stdout
    [counted] = [int(line.split()[1]) for line in said.splitlines() if line.startswith("TcpRetransSegs")]
    assert before <= counted <= run_control._count_retransmits()
