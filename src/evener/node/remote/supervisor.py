"""The supervisor: a detached process, one per run and host, that runs the program, keeps its logs and cleans up.

    python3 supervisor.py RUN [N LOCK]   RUN/host/spec.json: what to start; RUN/host/state.json: its state;
                                         N: supervisors that were killed before; LOCK: the descriptor of the held lock

It runs in a session of its own, so it outlives ssh, the terminal and the controller. It starts one program and logs
everything that the program and its ranks print, with timestamps and in full. When the program ends or is asked to stop,
the supervisor kills every process of the run. Should the supervisor itself be killed, its guard process does so.
An agent that is killed is restarted, and so is its supervisor; the run continues without this host meanwhile.

    RUN/logs/HOST.log        output of the program itself        each line: time, O or E (stdout, stderr), text
    RUN/logs/HOST.RANK.log   output of a rank                    o or e: no newline yet; the next O or E continues it
                             (a program that is a rank itself has only this log)
    RUN/host/lock            locked while the supervisor or its guard lives; holds the supervisor's pid and start time
    RUN/host/ranks           output of the ranks not yet in the logs; begun.json: the sizes of the logs at the start

SIGTERM requests an orderly end: the ranks may finish their step and save, within the spec's grace_s. A second one ends
the run at once. A run attached to the program that started it (the spec's "attached" is a file that this program keeps
locked) is asked to end when that program is gone, for whatever reason.
Standard library only, Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, BinaryIO

from evener.node.remote.environment import rank_environment
from evener.node.remote.file_io import create_file, open_own_file, path_inside, read_bytes, write_atomic
from evener.node.remote.process_table import children, kill_processes_with, read_process, send_signal

POLL_S = 0.05
QUIET_POLL_S = 0.2  # after `LOG_SCAN_INTERVAL_S` without output, while no end is requested
LOG_SCAN_INTERVAL_S = 1.0  # between scans for the files of ranks that started late
TERM_TIMEOUT_S = 5.0  # from SIGTERM to SIGKILL
FAST_TERM_TIMEOUT_S = 1.0  # the same after a second request
LOCK_TIMEOUT_S = 1.0  # that other programs may hold the lock while they check whether the run is alive
MAX_PARTIAL_LINE_BYTES = 1 << 16  # of a line without its newline
MAX_PARTIAL_LINE_S = 1.0
RESERVED_DISK_BYTES = 1 << 20
IDLE_AGENT_TIMEOUT_S = 20.0
MAX_RESTARTS = 5  # restarts of an agent, or of its supervisor, that was killed
RUN_ID_VARIABLE = "EVENER_RUN"
RUN_FOLDER_VARIABLE = "EVENER_RUN_FOLDER"

TIMESTAMP_BYTES = len("2026-01-01T00:00:00.000Z ")

_guard_pids: set[int] = set()  # pids: the only children of ours that are not the run's


class TimestampedLog:
    """A log file of timestamped lines, fed with bytes; nothing is dropped or reordered."""

    def __init__(self, path: str) -> None:
        self._file = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._partial_lines = {"O": bytearray(), "E": bytearray()}
        self._partial_since = {"O": 0.0, "E": 0.0}  # when the first byte of the rest arrived

    def add(self, stream: str, data: bytes) -> None:
        """Append output of a stream, O or E."""
        rest = self._partial_lines[stream]
        if not rest:
            self._partial_since[stream] = time.monotonic()
        ended, newline, unended = data.rpartition(b"\n")
        if newline:
            start = _timestamp() + stream.encode() + b" "
            self._write(b"".join(start + line + b"\n" for line in (bytes(rest) + ended).split(b"\n")))
            rest.clear()
            self._partial_since[stream] = time.monotonic()
        rest += unended
        if len(rest) > MAX_PARTIAL_LINE_BYTES:
            self._write_partial(stream)

    def flush_stale(self) -> None:
        """Write partial lines that have waited too long for their newline: a progress bar sends none for hours."""
        for stream, rest in self._partial_lines.items():
            if rest and time.monotonic() - self._partial_since[stream] >= MAX_PARTIAL_LINE_S:
                self._write_partial(stream)

    def close(self) -> None:
        for stream, rest in self._partial_lines.items():
            if rest:
                self._write_partial(stream)
        os.close(self._file)

    def _write_partial(self, stream: str) -> None:
        self._write(_timestamp() + stream.lower().encode() + b" " + self._partial_lines[stream] + b"\n")
        self._partial_lines[stream].clear()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # on a full disk the output is lost, but the run's end and its reason must still be recorded


class RankLogs:
    """The logs of the ranks, read from the stdout and stderr files of each rank as these grow.

    `sizes`: the size of each log when an earlier start began. Output that a log holds beyond it is not copied again.
    """

    def __init__(self, folder: str, logs: str, host: str, first_rank: int, sizes: dict[str, int] | None = None) -> None:
        self.folder, self._logs_folder = folder, logs
        self._host, self._first_rank, self._sizes = host, first_rank, sizes
        self._open: dict[str, tuple[BinaryIO, str, TimestampedLog]] = {}  # path: (file, stream, log)
        # local rank: (log, bytes of each stream it held when opened)
        self._logs: dict[int, tuple[TimestampedLog, dict[str, int]]] = {}
        self._next_scan = 0.0

    def read(self, last: bool = False) -> bool:
        """Copy new output to the logs; return whether there was any."""
        has_new = False
        if last or time.monotonic() >= self._next_scan:
            self._next_scan = time.monotonic() + (LOG_SCAN_INTERVAL_S if self._open else POLL_S)
            paths = glob.glob(os.path.join(glob.escape(self.folder), "*", "*", "*", "std*.log"))
            for path in sorted(paths, key=_natural_sort_key):
                if path not in self._open and os.path.basename(os.path.dirname(path)).isdigit():
                    with contextlib.suppress(OSError):  # no regular file
                        self._open_rank_file(path)
        for file, stream, log in self._open.values():
            chunk = file.read(1 << 18)
            while chunk:
                has_new = True
                log.add(stream, chunk)
                chunk = file.read(1 << 18)
            log.flush_stale()
        return has_new

    def close(self) -> None:
        for log, _ in self._logs.values():
            log.close()
        for file, _, _ in self._open.values():
            file.close()

    def _open_rank_file(self, path: str) -> None:
        stream = "O" if os.path.basename(path) == "stdout.log" else "E"
        rank = int(os.path.basename(os.path.dirname(path)))
        if rank not in self._logs:
            name = log_name(self._host, self._first_rank + rank)
            path_of_log = path_inside(self._logs_folder, name)
            held_bytes = (
                {"O": 0, "E": 0} if self._sizes is None else count_logged_bytes(path_of_log, self._sizes.get(name, 0))
            )
            self._logs[rank] = TimestampedLog(path_of_log), held_bytes
        log, held_bytes = self._logs[rank]
        file = os.fdopen(open_own_file(path, os.O_RDONLY), "rb")
        skipped = min(held_bytes[stream], os.fstat(file.fileno()).st_size)
        held_bytes[stream] -= skipped
        file.seek(skipped)
        self._open[path] = file, stream, log


def _natural_sort_key(path: str) -> list[Any]:
    """Sort numbers by value: epoch 10 after epoch 2."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", path)]


def log_name(host: str, rank: int | None = None) -> str:
    """Return the file name of a rank's log, or, without a rank, of the log of the program itself."""
    return f"{host}.log" if rank is None else f"{host}.{rank}.log"


def count_logged_bytes(path: str, since: int) -> dict[str, int]:
    """Return {stream: bytes} in a log from offset `since`; cut off a last line that a killed writer left incomplete."""
    counts = {"O": 0, "E": 0}
    with contextlib.suppress(FileNotFoundError), os.fdopen(open_own_file(path, os.O_RDWR), "r+b") as file:
        file.seek(since)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(since)
                break
            since += len(line)
            kind, text = (
                line[TIMESTAMP_BYTES : TIMESTAMP_BYTES + 1].decode(errors="replace"),
                line[TIMESTAMP_BYTES + 2 :],
            )
            if kind.upper() in counts:
                counts[kind.upper()] += len(text) - kind.islower()
    return counts


def recover_rank_logs(run: str) -> None:
    """Copy to the logs the ranks' output that a killed supervisor of an earlier start had not copied yet.

    The bytes already copied are counted in the logs themselves, so this can be interrupted and repeated: no byte is
    lost or duplicated.
    """
    folder, logs = path_inside(run, "host", "ranks"), path_inside(run, "logs")
    try:
        begun = json.loads(read_bytes(os.path.join(folder, "begun.json")) or b"")
    except (OSError, ValueError, RecursionError):
        begun = None
    if _is_valid_record(begun):
        name = begun.pop("log")
        count_logged_bytes(path_inside(logs, name), begun["sizes"].get(name, 0))
        ranks = RankLogs(folder, logs, **begun)
        ranks.read(last=True)
        ranks.close()
    shutil.rmtree(folder, ignore_errors=True)


def _is_valid_record(begun: Any) -> bool:
    """Return whether the content of begun.json names logs inside the run's folder: the folder may come from elsewhere.

    No name of a host has a slash, or begins with a dot.
    """
    try:
        host, first_rank, sizes = begun["host"], begun["first_rank"], begun["sizes"]
        return (
            set(begun) == {"host", "first_rank", "sizes", "log"}
            and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host) is not None
            and isinstance(first_rank, int)
            and begun["log"] in (log_name(host), log_name(host, first_rank))
            and all(isinstance(size, int) and size >= 0 for size in sizes.values())
        )
    except (AttributeError, LookupError, TypeError):
        return False


class Supervisor:
    """The supervisor of one run on this host."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.folder = path_inside(run, "host")
        self.folder_variable = f"{RUN_FOLDER_VARIABLE}={os.path.realpath(run)}"  # of all that it starts, to kill it by
        spec_path = os.path.join(self.folder, "spec.json")
        # path: content of what was started, for a guard that must start it again
        self.program_files = {path: read_bytes(path) or b"" for path in (spec_path, sys.argv[0])}
        self.spec: dict[str, Any] = json.loads(self.program_files[spec_path])
        self.state: dict[str, Any] = {
            "state": "running", "supervisor": os.getpid(), "pid": None, "started": None, "ended": None,
            "status": None, "signal": None, "stopped": False, "failures": [],
        }  # fmt: skip
        self.num_stop_requests = 0
        self.stop_requested_at: float | None = None
        self.escalation = 0
        self.signalled_pids: set[int] = set()  # pids of the ranks that got SIGTERM
        self.ranks_alive_at: float | None = None  # when ranks were last alive, since the request to stop
        self.next_rank_scan = self.program_signalled_at = 0.0
        self.is_rank = self.spec.get("is_rank", False)  # the program itself is the rank
        self.log_name = log_name(self.spec["host"], self.spec["first_rank"] if self.is_rank else None)
        attached = self.spec.get("attached")
        self.launcher = None if attached is None else open_own_file(attached, os.O_RDONLY)

        self.num_oom_kills, self.next_health_check = count_oom_kills(), 0.0
        self.oom_at: float | None = None
        self.disk_full_at: float | None = None

    def main(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle_stop_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        held_lock = acquire_lock(os.path.join(self.folder, "lock"), int(sys.argv[3]) if len(sys.argv) > 3 else None)
        _become_subreaper()
        restart_lock = held_lock if self.spec.get("has_agent") else None
        guard = start_guard(self.run, self.folder_variable, restart_lock, self.program_files)
        recover_rank_logs(self.run)
        self.state["started"] = time.time()  # every line stamped from now on belongs to this start
        self._reserve_disk()
        ranks = self._open_rank_logs()
        log = TimestampedLog(path_inside(self.run, "logs", self.log_name))
        env = dict(rank_environment(os.environ), **self.spec["env"])
        env[RUN_ID_VARIABLE] = self.spec["id"]
        env[RUN_FOLDER_VARIABLE] = self.folder_variable.partition("=")[2]
        self.failures, tell_failures = os.pipe()  # a pipe, because a disk may be full
        os.set_blocking(self.failures, False)
        env["EVENER_FAILURES"] = str(tell_failures)
        num_starts = 0
        while True:
            try:
                child = subprocess.Popen(
                    self.spec["argv"], cwd=self.spec["cwd"], env=env, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=[tell_failures],
                )  # fmt: skip
            except OSError as error:
                log.add("E", f"{error.filename or self.spec['argv'][0]}: {error.strerror}\n".encode())
                status, surviving_pids = 127, []
                break
            self.state["pid"] = child.pid
            self._save_state()
            num_starts, surviving_pids, status = (
                num_starts + 1,
                self._follow_program(child, log, ranks),
                child.returncode,
            )
            if not self.spec.get("has_agent") or status >= 0 or self.num_stop_requests or is_stop_requested(self.run):
                break
            is_last = num_starts > MAX_RESTARTS
            action = f"as {MAX_RESTARTS} before it, so it is not restarted" if is_last else "it is restarted"
            log.add("E", f"evener: the agent was killed by {signal_name(status)}: {action}\n".encode())
            if is_last:
                break
        ranks.read(last=True)
        ranks.close()
        shutil.rmtree(ranks.folder, ignore_errors=True)  # all of it is in the logs
        log.close()
        self._record_end(status, surviving_pids)
        os.write(guard, b"done")

    def _open_rank_logs(self) -> RankLogs:
        """Prepare the ranks' output files and return their logs; begun.json is for `recover_rank_logs`."""
        folder, logs = path_inside(self.run, "host", "ranks"), path_inside(self.run, "logs")
        for path in (folder, logs):
            os.makedirs(path, exist_ok=True)
        begun: dict[str, Any] = {"host": self.spec["host"], "first_rank": self.spec["first_rank"]}
        sizes = {name: os.lstat(os.path.join(logs, name)).st_size for name in os.listdir(logs)}
        _write_json(os.path.join(folder, "begun.json"), dict(begun, sizes=sizes, log=self.log_name))
        return RankLogs(folder, logs, **begun)

    def _follow_program(self, child: subprocess.Popen[bytes], log: TimestampedLog, ranks: RankLogs) -> list[int]:
        """Follow the program until it exits, then kill all its descendants; return the pids that SIGKILL did not end.

        Its output is read to the end, even if a grandchild still holds the pipe.
        """
        selector = selectors.DefaultSelector()
        assert child.stdout is not None
        assert child.stderr is not None
        for stream, pipe in (("O", child.stdout), ("E", child.stderr)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, stream)
        output_at = time.monotonic()
        while True:
            status = child.poll()
            is_quiet = not self.num_stop_requests and time.monotonic() - output_at >= LOG_SCAN_INTERVAL_S
            pause_s = 0 if status is not None else QUIET_POLL_S if is_quiet else POLL_S
            for key, _ in selector.select(pause_s):
                output_at = time.monotonic()
                chunk = _read_pipe(key.fd)
                if chunk:
                    log.add(key.data, chunk)
                elif chunk == b"":
                    selector.unregister(key.fileobj)
            log.flush_stale()
            if ranks.read():
                output_at = time.monotonic()
            self._check_host_health()
            _reap_orphans(child.pid)
            if status is not None:
                surviving_pids = self._kill_all()
                for key in list(selector.get_map().values()):
                    chunk = _read_pipe(key.fd)
                    while chunk:
                        log.add(key.data, chunk)
                        chunk = _read_pipe(key.fd)
                return surviving_pids
            if self.launcher is not None and not is_locked(self.launcher):
                self.launcher = None
                self.num_stop_requests += 1
            self._escalate_stop(child)

    def _kill_all(self) -> list[int]:
        """SIGKILL all processes of the run; return the pids that it did not end."""
        return kill_processes_with(self.folder_variable, os.getpid(), _guard_pids)

    def _reserve_disk(self) -> None:
        """Reserve 1 MiB on the run's disk, for the state that must be written once the disk is full."""
        with contextlib.suppress(OSError), create_file(os.path.join(self.folder, "room")) as file:
            file.write(os.urandom(RESERVED_DISK_BYTES))  # random, so that no file system compresses it

    def _check_host_health(self, last: bool = False) -> None:
        """Note when the kernel last killed a process for lack of memory, and when the disk was last full.

        The time tells whether the killed process was the run's.
        """
        if not last and time.monotonic() < self.next_health_check:
            return
        self.next_health_check, num_killed = time.monotonic() + LOG_SCAN_INTERVAL_S, count_oom_kills()
        if num_killed > self.num_oom_kills:
            self.oom_at = self.state["oom_at"] = time.time()
            self._save_state()
        self.num_oom_kills = num_killed
        room = os.path.join(self.folder, "room")
        with contextlib.suppress(OSError):  # a disk that does not answer is not full
            disk = os.statvfs(self.folder)
            free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
            if disk.f_blocks and free + (RESERVED_DISK_BYTES if os.path.exists(room) else 0) < 2 * RESERVED_DISK_BYTES:
                self.disk_full_at = time.time()
            if last or self.disk_full_at is not None:
                os.remove(room)

    def _handle_stop_signal(self, signum: int, frame: FrameType | None) -> None:
        self.num_stop_requests += 1

    def _escalate_stop(self, child: subprocess.Popen[bytes]) -> None:
        """Carry out a request to stop: SIGTERM to the ranks, then to the program, then SIGKILL to all."""
        if not self.num_stop_requests:
            return
        now = time.monotonic()
        if self.stop_requested_at is None:
            self.stop_requested_at = now
            self.state["stopped"] = True
            self._save_state()
        waited = now - self.stop_requested_at
        grace = self.spec["grace_s"] if self.num_stop_requests == 1 else 0
        if self.escalation == 0 and now >= self.next_rank_scan:
            self.next_rank_scan = now + LOG_SCAN_INTERVAL_S
            ranks: set[int] = set() if not grace else {child.pid} if self.is_rank else set(children(child.pid))
            if self.spec.get("has_agent") and self.spec.get("has_launcher"):  # its children are launchers
                ranks = {rank for launcher in ranks for rank in children(launcher)}
            self.ranks_alive_at = now if ranks or self.ranks_alive_at is None else self.ranks_alive_at
            for pid in ranks - self.signalled_pids:
                send_signal(pid, signal.SIGTERM)
            self.signalled_pids |= ranks
        # A program without ranks yet gets SIGTERM itself; so does an agent without ranks for longer than it lingers.
        is_idle = (
            self.spec.get("has_agent")
            and self.ranks_alive_at is not None
            and now - self.ranks_alive_at >= IDLE_AGENT_TIMEOUT_S
        )
        if self.escalation == 0 and (waited >= grace or not self.signalled_pids or is_idle):
            self.escalation = 1
            self.program_signalled_at = now
            send_signal(child.pid, signal.SIGTERM)
        elif self.escalation == 1 and now - self.program_signalled_at >= (
            TERM_TIMEOUT_S if self.num_stop_requests == 1 else FAST_TERM_TIMEOUT_S
        ):
            self.escalation = 2
            self._kill_all()
            send_signal(child.pid, signal.SIGKILL)

    def _record_end(self, status: int, left: list[int]) -> None:
        ended = time.time()
        failures = []
        if self.is_rank and status:
            failures = [{"rank": self.spec["first_rank"], "exitcode": status, "time": ended}]
        with contextlib.suppress(ValueError):
            failures = json.loads(_read_pipe(self.failures) or b"")
        self.state["failures"] = [dict(failure, signal=signal_name(failure["exitcode"])) for failure in failures]
        self.state.update(state="ended", ended=ended, status=status, signal=signal_name(status), left=left)
        self._check_host_health(last=True)
        self.state.update(oom_at=self.oom_at, full_at=self.disk_full_at)
        self._save_state()

    def _save_state(self) -> None:
        _write_json(os.path.join(self.folder, "state.json"), self.state)


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory: in our cgroups, or on this machine. Linux."""
    num_killed = 0
    paths = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file.read().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                paths.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                paths.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    for file_path in paths:
        with contextlib.suppress(OSError, ValueError), open(file_path) as file:
            counters = dict(line.split()[:2] for line in file.read().splitlines() if line.count(" ") == 1)
            num_killed += int(counters.get("oom_kill", 0))
    return num_killed


def acquire_lock(path: str, descriptor: int | None = None) -> int:
    """Take the lock that shows others that this program or its guard is alive; return its descriptor.

    With a `descriptor` the lock is held already. BlockingIOError if another program holds it.
    """
    is_held = descriptor is not None
    descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT) if descriptor is None else descriptor
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while not is_held:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
    os.ftruncate(descriptor, 0)
    holder = f"{os.getpid()} {read_process(os.getpid()).start_time}\n"
    os.pwrite(descriptor, holder.encode(), 0)  # not os.write: an inherited one's offset is past the old pid
    os.set_inheritable(descriptor, False)
    return descriptor


def is_locked(descriptor: int) -> bool:
    """Return whether another program holds this file's lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def start_guard(run: str, folder_variable: str, held_lock: int | None, program_files: dict[str, bytes]) -> int:
    """Fork a process that kills the run's processes if the supervisor is killed; return the pipe that dismisses it.

    With `held_lock`, the descriptor of the run's lock, the guard then keeps that lock and restarts the supervisor from
    the same `program_files`, whatever these files are by then.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        _guard_pids.add(pid)
        return write
    os.close(write)
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if os.read(read, 16) != b"done":
        surviving_pids = kill_processes_with(folder_variable)
        folder = path_inside(run, "host")
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, "room"))
        with contextlib.suppress(OSError):
            recover_rank_logs(run)
        state: dict[str, Any] = {"started": None, "failures": [], "stopped": False}
        with contextlib.suppress(TypeError, ValueError):
            state.update(json.loads(read_bytes(os.path.join(folder, "state.json")) or b""))
        begun = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        if held_lock is not None and not state["stopped"] and not is_stop_requested(run) and begun < MAX_RESTARTS:
            os.set_inheritable(held_lock, True)
            argv = [sys.executable, "-I", sys.argv[0], run, str(begun + 1), str(held_lock)]
            with contextlib.suppress(OSError):
                for path, content in program_files.items():
                    if read_bytes(path) != content:
                        write_atomic(path, content)
                os.execv(sys.executable, argv)  # noqa: S606
        state.update(state="ended", ended=time.time(), status=None, signal=None, left=surviving_pids)
        _write_json(os.path.join(folder, "state.json"), dict(state, lost="the supervisor was killed"))
    os._exit(0)


def is_stop_requested(run: str) -> bool:
    """Return whether the end of the run was requested, even if no supervisor received it."""
    return os.path.exists(path_inside(run, "host", "stopped"))


def signal_name(status: int | None) -> str | None:
    """Return the signal name of a negative exit status, else None. Numbers differ by system: call it on the host."""
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _write_json(path: str, value: Any) -> None:
    """Replace a file, without waiting for a disk that may not answer."""
    write_atomic(path, json.dumps(value).encode(), is_durable=False)


def _become_subreaper() -> None:
    """On Linux, adopt the run's orphans as our children, so that none escapes when its parent dies."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _reap_orphans(but: int) -> None:
    """Reap adopted children that have exited, except the one with pid `but`, which is waited for elsewhere."""
    while sys.platform.startswith("linux"):  # elsewhere there are none
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == but or ended.si_pid in _guard_pids:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def _read_pipe(descriptor: int) -> bytes | None:
    """Return what a pipe holds: b"" at its end, None while it is empty."""
    try:
        return os.read(descriptor, 1 << 18)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return None
        return b""


def _timestamp() -> bytes:
    now = time.time()
    return (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z ").encode()


if __name__ == "__main__":
    Supervisor(re.sub(r"/+$", "", sys.argv[1])).main()
