"""The processes of this host: parents, state, CPU time, arguments and environment; kill all processes of a run.

From /proc on Linux, from ps elsewhere. Standard library only, Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from typing import Any, Collection, NamedTuple  # noqa: UP035  python 3.8

from evener.node.remote.file_io import read_bytes

HAS_PROC = os.path.isdir("/proc/self")
# Some kernels are built to list a process's children; elsewhere the whole table is read.
HAS_CHILD_LISTS = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
PS_COLUMNS = "pid=,ppid=,stat=,tty=,time=,command="
KILL_TIMEOUT_S = 5.0  # for the kernel to remove killed processes
KILL_POLL_S = 0.01

_local_ranks: dict[int, tuple[str, int]] = {}  # by pid: (its start time, its local rank)


class Process(NamedTuple):
    """One process, as it was when it was read."""

    parent: int
    state: str  # the letter in /proc/PID/stat, or of ps
    has_terminal: bool
    cpu_s: float  # of it, and of those of its children that have ended
    start_time: str  # clock ticks since the boot, which a later process of the same pid has not; empty without /proc
    command: str = ""  # its arguments as ps prints them; empty where /proc has them

    @property
    def is_zombie(self) -> bool:
        """Return whether it has ended and only waits for its parent."""
        return self.state in ("Z", "X")


def read_process(pid: int) -> Process:
    """Return one process; LookupError or OSError if there is none."""
    if not HAS_PROC:
        return _ps(["-p", str(pid)])[pid]
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].decode().split()
    cpu_s = sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return Process(int(fields[1]), fields[0], fields[4] != "0", cpu_s, fields[19])


def list_processes() -> dict[int, Process]:
    """Return all processes by pid; zombies do not count."""
    if not HAS_PROC:
        processes = _ps(["-ax"])
    else:
        processes = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, LookupError):  # it has ended meanwhile
                    processes[int(name)] = read_process(int(name))
    return {pid: process for pid, process in processes.items() if not process.is_zombie}


def read_environment(pid: int) -> list[str]:
    """Return the environment of a process, NAME=value each; OSError if it has ended or is another user's."""
    if not HAS_PROC:
        return _ps(["-E", "-p", str(pid)])[pid].command.split()
    with open(f"/proc/{pid}/environ", "rb") as file:
        return os.fsdecode(file.read()).split("\0")


def runs_program(pid: int, program: str) -> bool:
    """Return whether the path of a program is among a process's arguments; OSError or LookupError if it has ended."""
    if not HAS_PROC:
        command = f"{_ps(['-p', str(pid)])[pid].command} "
        return any(f" {path} " in command for path in (program, os.path.realpath(program)))
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.path.realpath(program) in map(os.path.realpath, os.fsdecode(file.read()).split("\0"))


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of a process."""
    if not HAS_CHILD_LISTS:
        return [child for child, process in list_processes().items() if process.parent == pid]
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:  # the thread ended
                pids += map(int, file.read().split())
    return pids


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    if HAS_CHILD_LISTS:
        return [pid, *(descendant for child in children(pid) for descendant in process_tree(child))]
    return sorted(_with_descendants(list_processes(), {pid}))


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants."""
    cpu_s = 0.0
    for process in process_tree(pid):
        with contextlib.suppress(OSError, LookupError):  # it has ended
            cpu_s += read_process(process).cpu_s
    return cpu_s


def local_rank(pid: int) -> int:
    """Return a process's LOCAL_RANK; LookupError if it has none, OSError if there is no such process.

    Once found it is not read again: the environment of a process that hangs in the kernel may be unreadable. A process
    that has none may get one: until it calls exec, a new rank has the environment of its parent.
    """
    started = read_process(pid).start_time
    if _local_ranks.get(pid, ("", 0))[0] != started:
        ranks = [int(entry[len("LOCAL_RANK=") :]) for entry in read_environment(pid) if entry.startswith("LOCAL_RANK=")]
        if not ranks:
            raise LookupError(pid)
        _local_ranks[pid] = started, ranks[0]
    return _local_ranks[pid][1]


def sample_rank(pid: int, heartbeat_file: str) -> dict[str, Any]:
    """Sample a rank's process: {"pid", "state", "cpu_s"}, and "where", "waits" and "moved" from its heartbeat file.

    The latter are missing if the process wrote no heartbeat file. OSError or LookupError if there is no such process.
    """
    sample = {"pid": pid, "state": read_process(pid).state, "cpu_s": tree_cpu_s(pid)}
    with contextlib.suppress(ValueError):
        heartbeat = json.loads(read_bytes(heartbeat_file) or b"{}")
        if isinstance(heartbeat, dict) and heartbeat.get("pid") == pid:
            sample.update((name, heartbeat[name]) for name in ("where", "waits", "moved") if name in heartbeat)
    return sample


def processes_with(variable: str, ancestor: int | None = None, spared: Collection[int] = ()) -> list[int]:
    """Return the pids of processes with `variable` (NAME=value) in their environment, and of their descendants.

    Descendants of `ancestor` count, too. Those `spared` do not, unless they have the variable.
    """
    if HAS_PROC:
        table, pids = list_processes(), set()
        for pid in table:
            with contextlib.suppress(OSError):
                if variable in read_environment(pid):
                    pids.add(pid)
    else:
        table = {pid: process for pid, process in _ps(["-axE"]).items() if not process.is_zombie}
        pids = {pid for pid, process in table.items() if f" {variable} " in f"{process.command} "}
    roots = pids if ancestor is None else {*pids, ancestor}
    return sorted(_with_descendants(table, roots, spared) - (roots - pids))


def kill_processes_with(variable: str, ancestor: int | None = None, spared: Collection[int] = ()) -> list[int]:
    """SIGKILL all processes of `processes_with` but this one, until there are none.

    Return the pids that are still alive after `KILL_TIMEOUT_S`: they hang in the kernel.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while True:
        pids = [pid for pid in processes_with(variable, ancestor, spared) if pid != os.getpid()]
        if not pids or time.monotonic() >= deadline:
            return pids
        for pid in pids:
            send_signal(pid, signal.SIGKILL)
        time.sleep(KILL_POLL_S)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal, if there is such a process and it is ours."""
    with contextlib.suppress(OSError):
        os.kill(pid, signum)


def _with_descendants(table: dict[int, Process], roots: set[int], spared: Collection[int] = ()) -> set[int]:
    pids, grew = set(roots), True
    while grew:
        more = {pid for pid, process in table.items() if process.parent in pids} - pids - {*spared}
        pids, grew = pids | more, bool(more)
    return pids


def _ps(options: list[str]) -> dict[int, Process]:
    argv = ["ps", *options, "-ww", "-o", PS_COLUMNS]
    text = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    table = {}
    for line in text.decode(errors="replace").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6:
            pid, parent, state, terminal, cpu, command = fields
            cpu_s = 0.0
            for part in cpu.split(":"):  # [[hours:]minutes:]seconds
                cpu_s = 60 * cpu_s + float(part)
            table[int(pid)] = Process(int(parent), state[0], terminal not in ("?", "??"), cpu_s, "", command)
    return table
