"""Control the runs on this host: start a run under its supervisor, report its state, stream its files, stop it.

A run's folder is WORKDIR/runs/NAME, or, for a run on the local machine, the run directory. Its supervisor, or the guard
of a killed one, is alive as long as RUN/host/lock is locked: a pid alone is never trusted.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

POLL_S = 0.1
FOLLOW_POLL_S = 0.25  # between polls of the files: a poll costs up to a third of a millisecond on a slow host
SAMPLE_INTERVAL_S = 1.0
CHUNK_BYTES = 1 << 18
TCP_TABLE_INTERVAL_S = 10.0
# the kernel's state code; retransmits of one segment: 3 s, and longer each time
TCP_ESTABLISHED, STALLED_RETRANSMITS = "01", 4
START_TIMEOUT_S = 20.0
STOPPED_FILE = "stopped"  # of supervisor.py
EXCLUDED_FILE = "host/kept-out"  # of core/run/membership_epoch.py
KILL_TIMEOUT_S = 5.0  # the supervisor's
_local_rank_cache = {}  # pid: (its start time, its local rank)
_tcp_cache = {}  # what `find_stalled_peers` last read
REPLACED_FILES = ("manifest.json", "tokenizer.json", "meta.pkl", "host/state.json")  # replaced, not appended to


def start(run, spec, supervisor, files=None):
    """Start the program that `spec` describes, detached; return its state once it is running.

    `files` are {name: text} to write into RUN; a text of None removes the file of an earlier start.
    """
    run = _absolute_path(run)
    folder = os.path.join(run, "host")
    _require_not_running(folder)
    kill_leftover_processes(run)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for name in ("state.json", "failures.json", "joined", STOPPED_FILE):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
    for name, text in (files or {}).items():
        path = os.path.join(run, name)
        if text is not None:
            _write_atomic(path, text.encode())
        elif os.path.exists(path):
            os.remove(path)
    _write_atomic(os.path.join(folder, "spec.json"), json.dumps(spec).encode())
    _write_atomic(os.path.join(folder, "supervisor.py"), supervisor.encode())
    return _start_supervisor(run, folder)


def leave(run, why):
    """Remove this host from the run after its current step; yield its state once it has left or the run has ended."""
    run = _absolute_path(run)
    _write_atomic(os.path.join(run, EXCLUDED_FILE), why.encode())
    while True:
        state = status(run)
        if state is None or state["state"] == "ended":
            yield state
            return
        yield {"waiting": True}
        time.sleep(POLL_S)


def put(run, files):
    """Replace files of a run by these texts: {name: text}."""
    run = _absolute_path(run)
    if not os.path.isdir(os.path.join(run, "host")):
        raise RuntimeError(f"no such run on this host: {run}")
    if os.path.exists(os.path.join(run, "host", STOPPED_FILE)):
        raise RuntimeError("this run was stopped")
    for name, text in files.items():
        _write_atomic(os.path.join(run, name), text.encode())


def restart_run(run):
    """Restart a run here after this host went down or left it; return its state once it is running."""
    run = _absolute_path(run)
    folder = os.path.join(run, "host")
    _require_not_running(folder)
    if os.path.exists(os.path.join(folder, STOPPED_FILE)):
        raise RuntimeError("this run was stopped")
    if os.path.exists(os.path.join(run, EXCLUDED_FILE)):
        os.remove(os.path.join(run, EXCLUDED_FILE))
    kill_leftover_processes(run)
    if os.path.exists(os.path.join(folder, "state.json")):
        os.remove(os.path.join(folder, "state.json"))
    return _start_supervisor(run, folder)


def _start_supervisor(run, folder):
    program = os.path.join(folder, "supervisor.py")
    log_path = os.path.join(folder, "supervisor.log")
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, program, run], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    is_last_try = False
    while not is_last_try:
        is_last_try = process.poll() is not None or time.monotonic() >= deadline
        state = _read_state(folder)
        if state is not None and "lost" not in state:
            return state
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its guard kills the rest
        process.wait()
    with open(log_path, errors="replace") as log:
        raise RuntimeError("the supervisor did not start: %s" % (log.read().strip()[-2000:] or "it printed nothing"))


def status(run):
    """Return RUN/host/state.json, corrected by what is alive: a run whose host went down has "ended", too.

    A run whose supervisor and guard were killed is running as long as its program is, and is "unwatched".
    """
    folder = os.path.join(_absolute_path(run), "host")
    state = _read_state(folder)
    if state is not None and state["state"] == "running" and not _is_supervised(folder):
        state = _read_state(folder)  # it may have ended meanwhile
        if state is not None and state["state"] == "running":
            if _has_program(folder, state):
                state["unwatched"] = True
            else:
                state.update(state="ended", status=None, lost="the host went down, or its supervisor was killed")
    return state


def stop(run, now=False):
    """Stop a run; yield its state once no process of it is left. With `now` the ranks do not save.

    A supervisor that does not end in time is killed. "left" are pids that even SIGKILL did not end.
    """
    run = _absolute_path(run)
    folder = os.path.join(run, "host")
    spec = _read_json(os.path.join(folder, "spec.json"), {}) or {}
    if os.path.isdir(folder):
        with contextlib.suppress(OSError):  # a full disk
            _write_atomic(os.path.join(folder, STOPPED_FILE), b"")  # prevents a restart of what is killed meanwhile
    deadline = time.monotonic() + (0 if now else spec.get("grace_s", 0)) + 4 * KILL_TIMEOUT_S
    num_requests = 0
    while _is_supervised(folder):
        is_late = time.monotonic() >= deadline
        pid = int(_read_file(os.path.join(folder, "lock")) or 0)  # 0: it is starting, or its guard kills the rest
        if pid and (is_late or num_requests < (2 if now else 1)):
            num_requests += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        yield {"waiting": True}
        time.sleep(POLL_S)
    surviving_pids = kill_leftover_processes(run)
    state = status(run)
    yield None if state is None else dict(state, left=surviving_pids)


def kill_leftover_processes(run):
    """Kill the processes left by a run without a supervisor; return the pids that SIGKILL did not end."""
    folder = os.path.join(_absolute_path(run), "host")
    spec = _read_json(os.path.join(folder, "spec.json"), None)
    program = _read_file(os.path.join(folder, "supervisor.py"))
    if spec is None or program is None or _is_supervised(folder):
        return []
    tools = {"__name__": "supervisor"}
    exec(compile(program, "supervisor.py", "exec"), tools)  # noqa: S102  our own program, as it was sent
    return tools["end_all"](spec["id"])


def follow(run, have, until_end=True):
    """Stream what a run's files gain: {"path", "offset", "identity", "size"}, then the bytes.

    Also yields {"caught_up": state} after each pass over the files, and every second {"looks": …, "stuck": …} from
    `sample_processes` and `find_stalled_peers`. `have` is {path: [identity, size]} of what the reader holds, or None if
    it reads the files itself. A file that was replaced starts again at offset 0. Ends when the run has ended and all is
    read; without `until_end`, as soon as all is read.
    """
    run = _absolute_path(run)
    next_sample_at = 0.0
    have = have and {path: list(known) for path, known in have.items()}
    while True:
        state = status(run)
        for path, location in [] if have is None else _list_followed_files(run):
            yield from _read_growth(path, location, have)
        if until_end and time.monotonic() >= next_sample_at:
            next_sample_at = time.monotonic() + SAMPLE_INTERVAL_S
            yield {"looks": sample_processes(run, state), "stuck": find_stalled_peers(), "at": time.monotonic()}
        yield {"caught_up": state}
        if not until_end or state is None or state["state"] == "ended":
            return
        time.sleep(FOLLOW_POLL_S)


def sample_processes(run, state):
    """Sample a run's processes on this host: [[rank, {"pid", "state", "cpu_s", "where", "waits", "moved"}], …].

    Rank None is the process that started the ranks. Linux only; elsewhere the list is empty.
    """
    spec, pid = _read_json(os.path.join(run, "host", "spec.json"), None), (state or {}).get("pid")
    if not pid or spec is None or state["state"] != "running" or not os.path.isdir("/proc/self"):
        return []
    is_rank, samples = spec.get("is_rank"), []
    if spec.get("has_agent") and spec.get("has_launcher"):
        pid = next(iter(_child_pids(pid)), pid)  # the current launcher
    for process in [pid] if is_rank else [pid, *_child_pids(pid)]:
        try:
            local_rank = 0 if is_rank else None if process == pid else _cached_local_rank(process)
            rank = None if local_rank is None else spec["first_rank"] + local_rank
            state_letter, cpu_s = _read_proc_stat(process)
            heartbeat = _read_json(os.path.join(run, "host", "pulse", str(local_rank)), None) or {}
            is_own = heartbeat.get("pid") == process
            fields = {name: heartbeat[name] for name in ("where", "waits", "moved")} if is_own else {}
            samples.append([rank, dict(fields, pid=process, state=state_letter, cpu_s=cpu_s)])
        except (OSError, ValueError, LookupError):
            continue  # it has exited, or is no rank
    return samples


def find_stalled_peers():
    """Return the addresses of peers that do not acknowledge segments despite repeated retransmits. Linux only.

    Reading the kernel's table of connections takes milliseconds. So it is read only if a segment was retransmitted
    since, or if a peer was stalled at the last read, and at an interval: a retransmit that cannot even be sent is not
    counted.
    """
    sent_again, now = _count_retransmits(), time.monotonic()
    is_known = sent_again is not None and sent_again == _tcp_cache.get("sent_again") and not _tcp_cache["stuck"]
    if is_known and now - _tcp_cache["at"] < TCP_TABLE_INTERVAL_S:
        return []
    stalled = set()
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), open(path) as table:
            for line in table:
                fields = line.split()
                if (
                    fields[3] != TCP_ESTABLISHED
                    or not int(fields[4].partition(":")[0], 16)
                    or int(fields[6], 16) < STALLED_RETRANSMITS
                ):
                    continue
                packed = fields[2].partition(":")[0]  # 32 bits at a time, as the processor has them
                parts = [int(packed[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(packed), 8)]
                stalled.add(socket.inet_ntop(family, b"".join(parts)))
    _tcp_cache.update(sent_again=sent_again, stuck=stalled, at=now)
    return sorted(stalled)


def _count_retransmits():
    """Return how many segments TCP has retransmitted so far, or None where the kernel does not tell.

    Before Linux 5.0 its count of timeouts omits further ones of a connection that has had one.
    """
    lines = [line.split() for line in (_read_file("/proc/net/snmp") or b"").splitlines() if line.startswith(b"Tcp:")]
    if len(lines) != 2:
        return None
    names, counts = lines
    return int(counts[names.index(b"RetransSegs")])


def list_checkpoints(run):
    """Return the complete, readable checkpoints of a run, newest last: {"step", "val_loss", "folder", "files"}.

    "files" has the form of `content_store.hash_files`, with the digests from state.json: nothing large is read.
    """
    entries = []
    for name in _checkpoint_names(run):
        folder = os.path.join(_resolve_path(_absolute_path(run), "checkpoints"), name)
        try:
            state = _read_file(os.path.join(folder, "state.json"))
            meta = json.loads(state)
            digests = dict(meta["files"], **{"state.json": _digest_bytes(state)})
            files = [{"path": path, "digest": digest, "size": os.path.getsize(os.path.join(folder, path)),
                      "executable": False} for path, digest in sorted(digests.items())]  # fmt: skip
            entries.append({"step": int(name[5:]), "val_loss": meta["val_loss"], "folder": folder, "files": files})
        except (OSError, TypeError, ValueError, LookupError):
            continue  # it is being removed, or is damaged
    return entries


def rollback_to_checkpoint(run, checkpoint, wanted):
    """Roll back to the named checkpoint before a resume: verify it, and remove everything of later steps.

    Return "whole", "damaged" or "none": is it here, with a state.json of the blake2b `wanted`, which holds the digests
    of all other files? A checkpoint of other content is removed with the per-rank state of its step: an earlier start
    left it, and the run continued elsewhere. A damaged one is removed without that state, which is of the right step.
    RuntimeError if a later checkpoint here is intact.
    """
    run = _absolute_path(run)
    _require_not_running(os.path.join(run, "host"))
    folder = os.path.join(run, "checkpoints", checkpoint)
    state = _read_file(os.path.join(folder, "state.json"))
    is_same = state is not None and _digest_bytes(state) == wanted
    is_here = is_same and _is_checkpoint_intact(folder, json.loads(state)["files"])
    saved = _checkpoint_names(run)
    for name in reversed(saved):
        if is_same and int(name[5:]) > int(checkpoint[5:]) and _is_named_checkpoint_intact(run, name):
            raise RuntimeError(
                f"it has saved step {int(name[5:])} since, which the run directory lacks: evener fetch copies it"
            )
    first = int(checkpoint[5:]) + (is_same or checkpoint not in saved)  # the first step to discard
    for name in saved:
        if int(name[5:]) >= first or (name == checkpoint and not is_here):
            removed = os.path.join(run, "checkpoints", f".{name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            os.rename(os.path.join(run, "checkpoints", name), removed)  # if killed now, no half checkpoint remains
            shutil.rmtree(removed)
    for root, _, names in os.walk(os.path.join(run, "own")):
        for name in names:
            match = re.fullmatch("step-([0-9]+)[.]safetensors", name)
            if match and int(match.group(1)) >= first:
                os.remove(os.path.join(root, name))
    return "whole" if is_here else "damaged" if is_same else "none"


def find_differing_files(run, files):
    """Return those paths of {path: [size, blake2b]} whose file here does not begin with that content."""
    differing = []
    for path, (size, wanted) in files.items():
        if _digest_file(os.path.join(_absolute_path(run), path), size) != wanted:
            differing.append(path)
    return differing


def install_tree(run, tree):
    """Before a resume, replace files of the run by those of a tree."""
    run, tree = _absolute_path(run), _absolute_path(tree)
    for root, _, names in os.walk(tree):
        for name in sorted(names, key="state.json".__eq__):  # last: a checkpoint that has it is complete
            source = os.path.join(root, name)
            target = os.path.join(run, os.path.relpath(source, tree))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target + ".tmp")
            os.replace(target + ".tmp", target)


def find_free_port(address, wanted, low, high):
    """Return a port free on this address: the wanted one, else one of the range, else None."""
    import random
    import socket

    for port in [wanted, *random.sample(range(low, high), 64)]:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError:
                continue
            return port
    return None


def _checkpoint_names(run):
    """Return the names of the complete checkpoints, ordered by step."""
    folder = _resolve_path(_absolute_path(run), "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((name for name in names if re.fullmatch("step-[0-9]{6,12}", name)), key=lambda name: int(name[5:]))


def _is_checkpoint_intact(folder, digests):
    """Return whether every file of a checkpoint has the digest that state.json records."""
    return all(_digest_file(os.path.join(folder, name)) == digest for name, digest in digests.items())


def _is_named_checkpoint_intact(run, name):
    folder = os.path.join(run, "checkpoints", name)
    try:
        return _is_checkpoint_intact(folder, json.loads(_read_file(os.path.join(folder, "state.json")))["files"])
    except (TypeError, ValueError, LookupError):
        return False


def _digest_bytes(content):
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _digest_file(path, size=None):
    """Return the digest of a file, or of its first `size` bytes; None if there is no such file."""
    digest, remaining = hashlib.blake2b(digest_size=32), size
    try:
        with _open_regular_file(path) as file:
            while remaining is None or remaining:
                chunk = file.read(CHUNK_BYTES if remaining is None else min(CHUNK_BYTES, remaining))
                if not chunk:
                    break
                digest.update(chunk)
                remaining = None if remaining is None else remaining - len(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def _list_followed_files(run):
    """Yield (path, location) of each file that a run writes, whether or not it exists."""
    joined = _joined_run_folder(run)
    for path in (*REPLACED_FILES, "events.jsonl"):
        yield path, _path_in_run(run, joined, path)
    for folder in ("steps", "spans", "vitals", "profile", "logs", "replicas"):
        root = _path_in_run(run, joined, folder)
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(root)):
                if not name.startswith("."):
                    yield folder + "/" + name, os.path.join(root, name)


def _cached_local_rank(pid):
    """Return a process's local rank, read once: the environment of one that hangs in the kernel may be unreadable."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        began = file.read().rpartition(b") ")[2].split()[19]
    if _local_rank_cache.get(pid, (None,))[0] != began:
        _local_rank_cache[pid] = began, _read_local_rank(pid)
    if _local_rank_cache[pid][1] is None:
        raise LookupError(pid)
    return _local_rank_cache[pid][1]


def _read_local_rank(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        environment = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    return int(environment[b"LOCAL_RANK"]) if b"LOCAL_RANK" in environment else None


def _read_proc_stat(pid):
    """Return (the letter of a process's state, CPU seconds of it and all its descendants)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    cpu_s = sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    for child in _child_pids(pid):
        with contextlib.suppress(OSError):
            cpu_s += _read_proc_stat(child)[1]
    return fields[0].decode(), cpu_s


def _child_pids(pid):
    """Return the pids of a process's children. A kernel need not list them; then no hang is detected."""
    pids = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                pids += [int(word) for word in file.read().split()]
    return pids


def _resolve_path(run, path):
    """Return where a run file lies: a script may have joined a run directory other than the one it was launched in."""
    return _path_in_run(run, _joined_run_folder(run), path)


def _path_in_run(run, joined, path):
    return os.path.join(run if path.split("/")[0] in ("host", "logs") else joined, path)


def _joined_run_folder(run):
    joined = _read_file(os.path.join(run, "host", "joined"))
    return joined.decode() if joined else run


def _read_growth(path, location, have):
    known, offset = have.get(path, ["", 0])
    try:
        stat_result = os.stat(location)  # most files are unchanged, and need not be opened
        if known == _file_identity(path, stat_result) and (path in REPLACED_FILES or offset == stat_result.st_size):
            return
        file = _open_regular_file(location)
    except OSError:
        return
    with file:
        stat_result = os.fstat(file.fileno())
        identity = _file_identity(path, stat_result)
        if known != identity or offset > stat_result.st_size:
            offset = 0
        file.seek(offset)
        chunk = None
        while chunk is None or chunk:
            first = chunk is None
            chunk = file.read(-1 if path in REPLACED_FILES else CHUNK_BYTES)
            if chunk or first:
                yield {"path": path, "offset": offset, "identity": identity, "size": len(chunk)}
                if chunk:
                    yield chunk
                offset += len(chunk)
                have[path] = [identity, offset]


def _file_identity(path, facts):
    """Identify a file by its inode; one that is replaced repeatedly also by its time, as inode numbers are reused."""
    return f"{facts.st_ino} {facts.st_mtime_ns if path in REPLACED_FILES else 0}"


def _require_not_running(folder):
    """RuntimeError if the run is running here; wait for a supervisor that has recorded the end but not exited yet."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    state = _read_state(folder)
    if state is not None and state["state"] == "running" and not _is_supervised(folder) and _has_program(folder, state):
        raise RuntimeError("this run is running here already, without its supervisor")
    while _is_supervised(folder):
        state = _read_state(folder)
        if state is None or state["state"] == "running" or time.monotonic() >= deadline:
            raise RuntimeError("this run is running here already")
        time.sleep(0.02)


def _is_supervised(folder):
    """Return whether a supervisor or guard holds the lock; several programs may check at once."""
    try:
        lock = os.open(os.path.join(folder, "lock"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _has_program(folder, state):
    """Return whether the program that the supervisor started is still running."""
    spec = _read_json(os.path.join(folder, "spec.json"), None)
    environment = _read_file(f"/proc/{state['pid']}/environ") or b""
    return spec is not None and f"EVENER_RUN={spec['id']}".encode() in environment.split(b"\0")


def _read_state(folder):
    """Return the run's recorded state: None if it never started, a stand-in if the file is damaged by a crash."""
    lost = {"state": "running", "supervisor": None, "pid": None, "started": None, "ended": None, "status": None,
            "signal": None, "stopped": False, "failures": []}  # fmt: skip
    return _read_json(os.path.join(folder, "state.json"), lost)


def _read_json(path, damaged):
    """Return a file's JSON value: None if there is no file, `damaged` if it is not JSON."""
    content = _read_file(path)
    try:
        return None if content is None else json.loads(content)
    except ValueError:
        return damaged


def _open_regular_file(path):
    """Open a regular file for reading; OSError for a pipe, which would block, or a device, which has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", path)
    return os.fdopen(descriptor, "rb")


def _read_file(path):
    try:
        with _open_regular_file(path) as file:
            return file.read()
    except OSError:
        return None


def _write_atomic(path, content):
    temporary = path + ".tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # intact even after a power failure
    os.replace(temporary, path)


def _absolute_path(path):
    return os.path.abspath(os.path.expanduser(path))
