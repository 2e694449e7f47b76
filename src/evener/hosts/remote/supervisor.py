"""Who looks after a run on its host when nobody is connected? This program, one for each run and host.

    python3 supervisor.py RUN [N LOCK]   RUN/host/spec.json says what to start, RUN/host/state.json how it goes;
                                         N: so many before it were killed; LOCK: the descriptor that is locked

It is a session of its own, so it outlives ssh, the terminal and the controller. It starts one program, keeps everything
that program and its ranks print, time-stamped and complete, and when the program ends or is told to stop, ends every
process that came of it. A guard beside it does the same should the supervisor itself be killed.
An agent that is killed is started again, and so is the supervisor of one: the run goes on without this host meanwhile.

    RUN/logs/HOST.log        what the program itself printed     each line: time, O or E (stdout, stderr), text
    RUN/logs/HOST.RANK.log   what a rank printed                 o or e: no newline followed; the next O or E goes on
                             (a program that is a rank itself has this log alone)
    RUN/host/lock            locked while the supervisor or its guard lives; the supervisor's pid
    RUN/host/ranks           what the ranks print, until it is in the logs; begun.json says where these stood before

SIGTERM asks for an orderly end: the ranks may finish their step and save, within the spec's grace_s. A second one ends
it at once. A run that is attached to the program that started it (the spec's "attached" is a file that this one keeps
locked) is asked to end when that program is gone, in whatever way.
Standard library only, Python 3.8 or newer, Linux or macOS.
"""

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

POLL_S = 0.05
QUIET_POLL_S = 0.2  # where nobody has printed anything for LOOK_S, nor asked for an end
LOOK_S = 1.0  # between looks for the files of ranks that began late
END_S = 5.0  # from SIGTERM to SIGKILL
AT_ONCE_S = 1.0  # the same for somebody who has asked twice
LOCK_S = 1.0  # that others may hold the lock while they look whether the run is alive
REST_BYTES = 1 << 16  # of a line that has not ended
REST_S = 1.0
ROOM_BYTES = 1 << 20
ALONE_S = 20.0
MAX_AGAIN = 5  # times that an agent, or its supervisor, that was killed is started again
MARK = "EVENER_RUN"

STAMP_BYTES = len("2026-01-01T00:00:00.000Z ")

_guards = set()  # pids: the only child of ours that is not the run's


class Log:
    """Bytes in, time-stamped lines out; nothing is dropped or reordered."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rest = {"O": bytearray(), "E": bytearray()}
        self._since = {"O": 0.0, "E": 0.0}  # when the first byte of the rest came

    def add(self, stream, data):
        """`stream` is O or E."""
        rest = self._rest[stream]
        if not rest:
            self._since[stream] = time.monotonic()
        ended, newline, unended = data.rpartition(b"\n")
        if newline:
            start = _stamp() + stream.encode() + b" "
            self._write(b"".join(start + line + b"\n" for line in (bytes(rest) + ended).split(b"\n")))
            rest.clear()
            self._since[stream] = time.monotonic()
        rest += unended
        if len(rest) > REST_BYTES:
            self._write_rest(stream)

    def look(self):
        """Write what has waited too long for its newline: a progress bar sends none for hours."""
        for stream, rest in self._rest.items():
            if rest and time.monotonic() - self._since[stream] >= REST_S:
                self._write_rest(stream)

    def close(self):
        for stream, rest in self._rest.items():
            if rest:
                self._write_rest(stream)
        os.close(self._file)

    def _write_rest(self, stream):
        self._write(_stamp() + stream.lower().encode() + b" " + self._rest[stream] + b"\n")
        self._rest[stream].clear()

    def _write(self, data):
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # on a full disk what is printed is lost: the run's end, and why, must still be told


class RankLogs:
    """What the ranks print: whoever starts them gives each one's stdout and stderr a file; they are read as they grow.

    `sizes` is given where an earlier start left off: what the logs hold beyond them is in the files, too.
    """

    def __init__(self, folder, logs, host, first_rank, sizes=None):
        self.folder, self._logs_folder = folder, logs
        self._host, self._first_rank, self._sizes = host, first_rank, sizes
        self._open = {}  # path: (file, stream, log)
        self._logs = {}  # local rank: (log, bytes of each stream that it had when it was opened)
        self._look_at = 0.0

    def read(self, last=False):
        """Take over what is new; is there anything?"""
        is_news = False
        if last or time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + (LOOK_S if self._open else POLL_S)
            found = glob.glob(os.path.join(glob.escape(self.folder), "*", "*", "*", "std*.log"))
            for path in sorted(found, key=_in_order):
                if path not in self._open and os.path.basename(os.path.dirname(path)).isdigit():
                    self._begin(path)
        for file, stream, log in self._open.values():
            chunk = file.read(1 << 18)
            while chunk:
                is_news = True
                log.add(stream, chunk)
                chunk = file.read(1 << 18)
            log.look()
        return is_news

    def close(self):
        for log, _ in self._logs.values():
            log.close()
        for file, _, _ in self._open.values():
            file.close()

    def _begin(self, path):
        stream = "O" if os.path.basename(path) == "stdout.log" else "E"
        local_rank = int(os.path.basename(os.path.dirname(path)))
        if local_rank not in self._logs:
            name = log_name(self._host, self._first_rank + local_rank)
            log = os.path.join(self._logs_folder, name)
            had = {"O": 0, "E": 0} if self._sizes is None else held(log, self._sizes.get(name, 0))
            self._logs[local_rank] = Log(log), had
        log, had = self._logs[local_rank]
        file = open(path, "rb")  # noqa: SIM115
        skipped = min(had[stream], os.fstat(file.fileno()).st_size)
        had[stream] -= skipped
        file.seek(skipped)
        self._open[path] = file, stream, log


def _in_order(path):
    """World 10 after world 2."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", path)]


def log_name(host, rank=None):
    """What the program printed, or one of its ranks."""
    return f"{host}.log" if rank is None else f"{host}.{rank}.log"


def held(path, since):
    """Bytes of each stream that a log holds from an offset on; a line that was cut short with its writer is removed."""
    counts = {"O": 0, "E": 0}
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        file.seek(since)
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(since)
                break
            since += len(line)
            kind, text = line[STAMP_BYTES : STAMP_BYTES + 1].decode(errors="replace"), line[STAMP_BYTES + 2 :]
            if kind.upper() in counts:
                counts[kind.upper()] += len(text) - kind.islower()
    return counts


def take_over(run):
    """Put into the logs what the ranks of an earlier start printed and its supervisor, killed, did not come to.

    The logs themselves tell what they hold, so this may be interrupted and repeated: no byte is lost or there twice.
    """
    folder, logs = os.path.join(run, "host", "ranks"), os.path.join(run, "logs")
    try:
        with open(os.path.join(folder, "begun.json")) as file:
            begun = json.load(file)
    except (OSError, ValueError):
        begun = None
    if begun is not None:
        name = begun.pop("log")
        held(os.path.join(logs, name), begun["sizes"].get(name, 0))
        ranks = RankLogs(folder, logs, **begun)
        ranks.read(last=True)
        ranks.close()
    shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """One run on this host."""

    def __init__(self, run):
        self.run = run
        self.folder = os.path.join(run, "host")
        with open(os.path.join(self.folder, "spec.json")) as file:
            self.spec = json.load(file)
        self.state = {"state": "running", "supervisor": os.getpid(), "pid": None, "started": None, "ended": None,
                      "status": None, "signal": None, "stopped": False, "failures": []}  # fmt: skip
        self.asked = 0
        self.asked_at = None
        self.escalation = 0
        self.told = set()  # the ranks that were asked
        self.living_at = None  # when there were any, since that
        self.look_at = 0.0
        self.is_rank = self.spec.get("is_rank", False)  # the program, and not its children
        self.log_name = log_name(self.spec["host"], self.spec["first_rank"] if self.is_rank else None)
        attached = self.spec.get("attached")
        self.launcher = None if attached is None else os.open(attached, os.O_RDONLY)

    def main(self):
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._ask)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        held_lock = lock(os.path.join(self.folder, "lock"), int(sys.argv[3]) if len(sys.argv) > 3 else None)
        _become_subreaper()
        guard = start_guard(self.run, self.spec["id"], held_lock if self.spec.get("has_agent") else None)
        take_over(self.run)
        self.state["started"] = time.time()  # every line that is stamped from now on is this start's
        self.oom_kills, self.oom_at, self.full_at, self.next_look = oom_kills(), None, None, 0.0
        self._keep_room()
        ranks = self._begin()
        log = Log(os.path.join(self.run, "logs", self.log_name))
        env = dict(os.environ, **self.spec["env"])
        env[MARK] = self.spec["id"]
        self.failures, tell_failures = os.pipe()  # no file: a disk may be full
        os.set_blocking(self.failures, False)
        env["EVENER_FAILURES"] = str(tell_failures)
        begins = 0
        while True:
            try:
                child = subprocess.Popen(
                    self.spec["argv"], cwd=self.spec["cwd"], env=env, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=[tell_failures],
                )  # fmt: skip
            except OSError as error:
                log.add("E", f"{error.filename or self.spec['argv'][0]}: {error.strerror}\n".encode())
                status, left = 127, []
                break
            self.state["pid"] = child.pid
            self._save()
            begins, left, status = begins + 1, self._follow(child, log, ranks), child.returncode
            if not self.spec.get("has_agent") or status >= 0 or self.asked or is_stopped(self.run):
                break
            is_last = begins > MAX_AGAIN
            what = f"as {MAX_AGAIN} before it, and no other one is started" if is_last else "it is started again"
            log.add("E", f"evener: the agent was killed by {signal_name(status)}: {what}\n".encode())
            if is_last:
                break
        ranks.read(last=True)
        ranks.close()
        shutil.rmtree(ranks.folder, ignore_errors=True)  # it is all in the logs
        log.close()
        self._end(status, left)
        os.write(guard, b"done")

    def _begin(self):
        """The ranks' files, from now on; begun.json is for who takes over."""
        folder, logs = os.path.join(self.folder, "ranks"), os.path.join(self.run, "logs")
        for path in (folder, logs):
            os.makedirs(path, exist_ok=True)
        begun = {"host": self.spec["host"], "first_rank": self.spec["first_rank"]}
        sizes = {name: os.path.getsize(os.path.join(logs, name)) for name in os.listdir(logs)}
        write_json(os.path.join(folder, "begun.json"), dict(begun, sizes=sizes, log=self.log_name))
        return RankLogs(folder, logs, **begun)

    def _follow(self, child, log, ranks):
        """Until the program has ended, its output read to the end even where a grandchild holds the pipe, and all that
        came of it been killed; the pids that would not go.
        """
        selector = selectors.DefaultSelector()
        for stream, pipe in (("O", child.stdout), ("E", child.stderr)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, stream)
        heard_at = time.monotonic()
        while True:
            status = child.poll()
            is_quiet = not self.asked and time.monotonic() - heard_at >= LOOK_S
            pause_s = 0 if status is not None else QUIET_POLL_S if is_quiet else POLL_S
            for key, _ in selector.select(pause_s):
                heard_at = time.monotonic()
                chunk = _read(key.fd)
                if chunk:
                    log.add(key.data, chunk)
                elif chunk == b"":
                    selector.unregister(key.fileobj)
            log.look()
            if ranks.read():
                heard_at = time.monotonic()
            self._look_around()
            _reap(child.pid)
            if status is not None:
                left = end_all(self.spec["id"], os.getpid())
                for key in list(selector.get_map().values()):
                    chunk = _read(key.fd)
                    while chunk:
                        log.add(key.data, chunk)
                        chunk = _read(key.fd)
                return left
            if self.launcher is not None and not is_locked(self.launcher):
                self.launcher = None
                self.asked += 1
            self._escalate(child)

    def _keep_room(self):
        """A megabyte on the disk that the run writes to, for what must be told once that is full."""
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "room"), "wb") as file:
            file.write(os.urandom(ROOM_BYTES))  # which no file system packs

    def _look_around(self, last=False):
        """When did the kernel last kill a process for want of memory? Whether it was ours the time tells. When was the
        disk last full?
        """
        if not last and time.monotonic() < self.next_look:
            return
        self.next_look, counted = time.monotonic() + LOOK_S, oom_kills()
        if counted > self.oom_kills:
            self.oom_at = self.state["oom_at"] = time.time()
            self._save()
        self.oom_kills = counted
        room = os.path.join(self.folder, "room")
        with contextlib.suppress(OSError):  # a disk that does not answer is not full
            disk = os.statvfs(self.folder)
            free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
            if disk.f_blocks and free + (ROOM_BYTES if os.path.exists(room) else 0) < 2 * ROOM_BYTES:
                self.full_at = time.time()
            if last or self.full_at is not None:
                os.remove(room)

    def _ask(self, signum, frame):
        self.asked += 1

    def _escalate(self, child):
        """Ask the ranks, then the program, then nobody any more."""
        if not self.asked:
            return
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            self.state["stopped"] = True
            self._save()
        waited = now - self.asked_at
        grace = self.spec["grace_s"] if self.asked == 1 else 0
        if self.escalation == 0 and now >= self.look_at:
            self.look_at = now + LOOK_S
            ranks = set() if not grace else {child.pid} if self.is_rank else set(children(child.pid))
            if self.spec.get("has_agent") and self.spec.get("has_launcher"):  # its children are launchers
                ranks = {rank for launcher in ranks for rank in children(launcher)}
            self.living_at = now if ranks or self.living_at is None else self.living_at
            for pid in ranks - self.told:
                _signal(pid, signal.SIGTERM)
            self.told |= ranks
        # Before it has ranks it is asked itself; and an agent that has none any more, for longer than it stays to tell.
        is_idle = self.spec.get("has_agent") and self.living_at is not None and now - self.living_at >= ALONE_S
        if self.escalation == 0 and (waited >= grace or not self.told or is_idle):
            self.escalation = 1
            self.program_told_at = now
            _signal(child.pid, signal.SIGTERM)
        elif self.escalation == 1 and now - self.program_told_at >= (END_S if self.asked == 1 else AT_ONCE_S):
            self.escalation = 2
            end_all(self.spec["id"], os.getpid())
            _signal(child.pid, signal.SIGKILL)

    def _end(self, status, left):
        ended = time.time()
        failures = []
        if self.is_rank and status:
            failures = [{"rank": self.spec["first_rank"], "exitcode": status, "time": ended}]
        with contextlib.suppress(ValueError):
            failures = json.loads(_read(self.failures) or b"")
        self.state["failures"] = [dict(one, signal=signal_name(one["exitcode"])) for one in failures]
        self.state.update(state="ended", ended=ended, status=status, signal=signal_name(status), left=left)
        self._look_around(last=True)
        self.state.update(oom_at=self.oom_at, full_at=self.full_at)
        self._save()

    def _save(self):
        write_json(os.path.join(self.folder, "state.json"), self.state)


def oom_kills():
    """Processes that the kernel has killed for want of memory: in our control groups, or on this machine. Linux."""
    counted = 0
    places = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file.read().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                places.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                places.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    for place in places:
        with contextlib.suppress(OSError, ValueError), open(place) as file:
            words = dict(line.split()[:2] for line in file.read().splitlines() if line.count(" ") == 1)
            counted += int(words.get("oom_kill", 0))
    return counted


def lock(path, descriptor=None):
    """Held until this program and its guard are gone; that is how others know. With a descriptor it is held already."""
    is_held = descriptor is not None
    descriptor = descriptor if is_held else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_S
    while not is_held:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)  # one that is handed over stands behind what was written
    os.set_inheritable(descriptor, False)
    return descriptor


def is_locked(descriptor):
    """Does another program hold this file's lock?"""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def start_guard(run, run_id, held_lock):
    """A process that ends the run's processes when the supervisor is killed; returns what tells it that all is well.

    With the lock, which nobody else has meanwhile, it begins again: the run goes on without this host.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        _guards.add(pid)
        return write
    os.close(write)
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if os.read(read, 16) != b"done":
        folder = os.path.join(run, "host")
        open(os.path.join(folder, "lock"), "w").close()  # the pid in it may soon be somebody else's
        left = end_all(run_id)
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, "room"))
        with contextlib.suppress(OSError):
            take_over(run)
        state = {"started": None, "failures": [], "stopped": False}
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "state.json")) as file:
            state = json.load(file)
        begun = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        if held_lock is not None and not state["stopped"] and not is_stopped(run) and begun < MAX_AGAIN:
            os.set_inheritable(held_lock, True)
            again = [sys.executable, sys.argv[0], run, str(begun + 1), str(held_lock)]
            os.execv(sys.executable, again)  # noqa: S606
        state.update(state="ended", ended=time.time(), status=None, signal=None, left=left)
        write_json(os.path.join(folder, "state.json"), dict(state, lost="the supervisor was killed"))
    os._exit(0)


def is_stopped(run):
    """Has somebody asked for its end, whoever came to hear of it?"""
    return os.path.exists(os.path.join(run, "host", "stopped"))


def end_all(run_id, ancestor=None):
    """SIGKILL to every process of a run until there is none: those that carry its mark, and the ancestor's descendants.
    The pids that are there still after END_S: they hang in the kernel.
    """
    deadline = time.monotonic() + END_S
    while True:
        found = [pid for pid in processes_of(run_id, ancestor) if pid != os.getpid()]
        if not found or time.monotonic() >= deadline:
            return found
        for pid in found:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes_of(run_id, ancestor=None):
    """Pids that carry the run's mark in their environment or descend from `ancestor`; zombies do not count."""
    if not os.path.isdir("/proc/self"):
        return _processes_by_ps(run_id, ancestor)
    mark = (f"{MARK}={run_id}").encode()
    parents, marked = {}, set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            parents[int(name)] = int(fields[1])
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    marked.add(int(name))
        except OSError:
            continue
    return _with_descendants(parents, marked, ancestor)


def _processes_by_ps(run_id, ancestor):
    text = subprocess.run(["ps", "-axwwE", "-o", "pid=,ppid=,stat=,command="], capture_output=True, check=False).stdout
    parents, marked = {}, set()
    for line in text.decode(errors="replace").splitlines():
        fields = line.split(None, 3)
        if len(fields) < 4 or fields[2].startswith("Z"):
            continue
        parents[int(fields[0])] = int(fields[1])
        if f"{MARK}={run_id}" in fields[3].split():
            marked.add(int(fields[0]))
    return _with_descendants(parents, marked, ancestor)


def _with_descendants(parents, marked, ancestor):
    found = set(marked)
    grew = True
    while grew:
        grew = False
        for pid, parent in parents.items():
            if pid not in found and pid not in _guards and (parent in found or (ancestor and parent == ancestor)):
                found.add(pid)
                grew = True
    return sorted(found)


def children(pid):
    """Direct children of a process."""
    if os.path.isdir("/proc/self"):
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        if int(file.read().rpartition(b") ")[2].split()[1]) == pid:
                            found.append(int(name))
                except OSError:
                    continue
        return found
    text = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, check=False).stdout.decode()
    return [int(line.split()[0]) for line in text.splitlines() if int(line.split()[1]) == pid]


def signal_name(status):
    """Of a negative exit status, while it is known what this system's numbers mean."""
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def write_json(path, value):
    """Replace a file in one step."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def _become_subreaper():
    """Linux: orphans of the run become our children, so none can hide behind a parent that died."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _reap(but):
    """Take leave of adopted children that have ended; `but` is waited for elsewhere."""
    while sys.platform.startswith("linux"):  # elsewhere there are none
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == but or ended.si_pid in _guards:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def _read(descriptor):
    """What a pipe holds; b"" at its end, None while it is empty."""
    try:
        return os.read(descriptor, 1 << 18)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return None
        return b""


def _signal(pid, signum):
    with contextlib.suppress(OSError):
        os.kill(pid, signum)


def _stamp():
    now = time.time()
    return (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z ").encode()


if __name__ == "__main__":
    Supervisor(re.sub(r"/+$", "", sys.argv[1])).main()
