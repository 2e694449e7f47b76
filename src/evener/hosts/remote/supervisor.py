"""Who looks after a run on its host when nobody is connected? This program, one for each run and host.

    python3 supervisor.py RUN      RUN/host/spec.json says what to start; RUN/host/state.json says how it goes

It is a session of its own, so it outlives ssh, the terminal and the controller. It starts one program, keeps everything
that program and its ranks print, time-stamped and complete, and when the program ends or is told to stop, ends every
process that came of it. A guard beside it does the same should the supervisor itself be killed.

    RUN/logs/HOST.log        what the program itself printed     each line: time, O or E (stdout, stderr), text
    RUN/logs/HOST.RANK.log   what a rank printed                 o or e: the line was not ended by a newline

SIGTERM asks for an orderly end: the ranks may finish their step and save, within the spec's grace_s. A second one ends
it at once.
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
LOOK_S = 1.0  # between looks for the files of ranks that began late
END_S = 5.0  # from SIGTERM to SIGKILL
MARK = "EVENER_RUN"

_guards = set()  # pids: the only child of ours that is not the run's


class Log:
    """Bytes in, time-stamped lines out; nothing is dropped or reordered."""

    def __init__(self, path):
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rest = {"O": b"", "E": b""}

    def add(self, stream, data):
        """`stream` is O or E."""
        lines = (self._rest[stream] + data).split(b"\n")
        self._rest[stream] = lines.pop()
        if lines:
            stamp = _stamp()
            self._write(b"".join(stamp + stream.encode() + b" " + line + b"\n" for line in lines))

    def close(self):
        for stream, rest in self._rest.items():
            if rest:
                self._write(_stamp() + stream.lower().encode() + b" " + rest + b"\n")
        os.close(self._file)

    def _write(self, data):
        while data:
            data = data[os.write(self._file, data) :]


class RankLogs:
    """What the ranks print: torchrun gives each rank's stdout and stderr a file; they are read as they grow."""

    def __init__(self, folder, name_of):
        self.folder, self._name_of = folder, name_of
        self._open = {}
        self._look_at = 0.0

    def read(self, last=False):
        """Take over what is new."""
        if last or time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + (LOOK_S if self._open else POLL_S)
            for path in glob.glob(os.path.join(glob.escape(self.folder), "*", "*", "*", "std*.log")):
                local_rank = os.path.basename(os.path.dirname(path))
                if path not in self._open and local_rank.isdigit():
                    self._open[path] = (open(path, "rb"), self._log(int(local_rank)))  # noqa: SIM115
        for path, (file, log) in self._open.items():
            while True:
                chunk = file.read(1 << 18)
                if not chunk:
                    break
                log.add("O" if os.path.basename(path) == "stdout.log" else "E", chunk)

    def close(self):
        for log in {id(log): log for _, log in self._open.values()}.values():
            log.close()

    def _log(self, local_rank):
        path = self._name_of(local_rank)
        for _, log in self._open.values():
            if log.path == path:
                return log
        return Log(path)


class Supervisor:
    """One run on this host."""

    def __init__(self, run):
        self.run = run
        self.folder = os.path.join(run, "host")
        with open(os.path.join(self.folder, "spec.json")) as file:
            self.spec = json.load(file)
        self.state = {"state": "running", "supervisor": os.getpid(), "pid": None, "started": time.time(), "ended": None,
                      "status": None, "stopped": False, "failures": []}  # fmt: skip
        self.asked = 0
        self.asked_at = None
        self.escalation = 0

    def main(self):
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._ask)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        _become_subreaper()
        os.makedirs(os.path.join(self.run, "logs"), exist_ok=True)
        guard = start_guard(self.folder, self.spec["id"])
        log = Log(self._log_path())
        env = dict(os.environ, **self.spec["env"])
        env[MARK] = self.spec["id"]
        env["EVENER_FAILURES"] = os.path.join(self.folder, "failures.json")
        try:
            child = subprocess.Popen(
                self.spec["argv"], cwd=self.spec["cwd"], env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            log.add("E", f"{self.spec['argv'][0]}: {error.strerror}\n".encode())
            log.close()
            self._end(127)
            os.write(guard, b"done")
            return
        self.state["pid"] = child.pid
        self._save()
        ranks = RankLogs(os.path.join(self.folder, "ranks"), self._log_path)
        self._follow(child, log, ranks)
        end_all(self.spec["id"], os.getpid())
        ranks.read(last=True)
        ranks.close()
        shutil.rmtree(ranks.folder, ignore_errors=True)  # it is all in the logs
        log.close()
        self._end(child.returncode)
        os.write(guard, b"done")

    def _follow(self, child, log, ranks):
        """Until the program has ended; its output is read to the end even where a grandchild holds the pipe."""
        selector = selectors.DefaultSelector()
        for stream, pipe in (("O", child.stdout), ("E", child.stderr)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, stream)
        while True:
            status = child.poll()
            for key, _ in selector.select(POLL_S if status is None else 0):
                chunk = _read(key.fd)
                if chunk:
                    log.add(key.data, chunk)
                elif chunk == b"":
                    selector.unregister(key.fileobj)
            ranks.read()
            _reap(child.pid)
            if status is not None:
                end_all(self.spec["id"], os.getpid())
                for key in list(selector.get_map().values()):
                    chunk = _read(key.fd)
                    while chunk:
                        log.add(key.data, chunk)
                        chunk = _read(key.fd)
                return
            self._escalate(child)

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
        if self.escalation == 0 and grace:
            self.escalation = 1
            for pid in children(child.pid):
                _signal(pid, signal.SIGTERM)
        elif self.escalation < 2 and waited >= grace:
            self.escalation = 2
            self.told_at = now
            _signal(child.pid, signal.SIGTERM)
        elif self.escalation == 2 and now - self.told_at >= END_S:
            self.escalation = 3
            end_all(self.spec["id"], os.getpid())
            _signal(child.pid, signal.SIGKILL)

    def _end(self, status):
        try:
            with open(os.path.join(self.folder, "failures.json")) as file:
                self.state["failures"] = json.load(file)
        except (OSError, ValueError):
            pass
        self.state.update(state="ended", ended=time.time(), status=status)
        self._save()

    def _save(self):
        write_state(self.folder, self.state)

    def _log_path(self, local_rank=None):
        name = self.spec["host"]
        if local_rank is not None:
            name += f".{self.spec['first_rank'] + local_rank}"
        return os.path.join(self.run, "logs", name + ".log")


def start_guard(folder, run_id):
    """A process that ends the run's processes when the supervisor is killed; returns what tells it that all is well."""
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
        end_all(run_id, os.getpid())
        try:
            with open(os.path.join(folder, "state.json")) as file:
                state = json.load(file)
        except (OSError, ValueError):
            state = {"started": None, "failures": [], "stopped": False}
        state.update(state="ended", ended=time.time(), status=None, lost="the supervisor was killed")
        write_state(folder, state)
    os._exit(0)


def end_all(run_id, me):
    """SIGKILL to every process of a run until there is none: those that carry its mark, and our own descendants."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        found = [pid for pid in processes_of(run_id, me) if pid != me]
        if not found:
            return
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


def write_state(folder, state):
    """Replace state.json in one step."""
    path = os.path.join(folder, "state.json")
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as file:
        json.dump(state, file)
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


def _main(run):
    folder = os.path.join(run, "host")
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held as long as this program lives; that is how others know
    Supervisor(run).main()


if __name__ == "__main__":
    _main(re.sub(r"/+$", "", sys.argv[1]))
