"""What runs on this host? Start a run under its supervisor, look at it, read its files as they grow, end it.

A run's folder is WORKDIR/runs/NAME, or, on this machine alone, the run directory. Its supervisor, or the guard of one
that was killed, is alive as long as RUN/host/lock is locked: no pid is trusted beyond that.
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
NEWS_S = 0.25  # between looks at files: each takes a slow host as much as a third of a millisecond
LOOK_S = 1.0
CHUNK = 1 << 18
READ_S = 10.0
ESTABLISHED, TRIES = "01", 4  # a state of the kernel's; so often was a segment sent again: 3 s, and longer each time
START_S = 20.0
STOPPED = "stopped"  # of supervisor.py
KEPT_OUT = "host/kept-out"  # of core/world.py
END_S = 5.0  # the supervisor's
_ranks = {}  # pid: (when it began, its rank on this host)
_connections = {}  # as `stuck` saw them last
WHOLE = ("manifest.json", "tokenizer.json", "meta.pkl", "host/state.json")  # replaced, not appended to


def start(run, spec, supervisor, files=None):
    """Start the program that `spec` describes, detached; its state once it is running.

    `files` are texts for RUN by name; None: an earlier start's goes.
    """
    run = _absolute(run)
    folder = os.path.join(run, "host")
    _check_over(folder)
    end_leftovers(run)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for name in ("state.json", "failures.json", "joined", STOPPED):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
    for name, text in (files or {}).items():
        path = os.path.join(run, name)
        if text is not None:
            _write(path, text.encode())
        elif os.path.exists(path):
            os.remove(path)
    _write(os.path.join(folder, "spec.json"), json.dumps(spec).encode())
    _write(os.path.join(folder, "supervisor.py"), supervisor.encode())
    return _begin(run, folder)


def leave(run, why):
    """This host takes part in the run no more, from its next step on; its state once it has left, or ended."""
    run = _absolute(run)
    _write(os.path.join(run, KEPT_OUT), why.encode())
    while True:
        state = status(run)
        if state is None or state["state"] == "ended":
            yield state
            return
        yield {"waiting": True}
        time.sleep(POLL_S)


def put(run, files):
    """Texts take the place of files of a run, by their names."""
    run = _absolute(run)
    if not os.path.isdir(os.path.join(run, "host")):
        raise RuntimeError(f"there is no such run here: {run}")
    if os.path.exists(os.path.join(run, "host", STOPPED)):
        raise RuntimeError("this run was stopped")
    for name, text in files.items():
        _write(os.path.join(run, name), text.encode())


def start_again(run):
    """Start what was started before, after the host went down under it, or left; its state once it is running."""
    run = _absolute(run)
    folder = os.path.join(run, "host")
    _check_over(folder)
    if os.path.exists(os.path.join(folder, STOPPED)):
        raise RuntimeError("this run was stopped")
    if os.path.exists(os.path.join(run, KEPT_OUT)):
        os.remove(os.path.join(run, KEPT_OUT))
    end_leftovers(run)
    if os.path.exists(os.path.join(folder, "state.json")):
        os.remove(os.path.join(folder, "state.json"))
    return _begin(run, folder)


def _begin(run, folder):
    program = os.path.join(folder, "supervisor.py")
    said = os.path.join(folder, "supervisor.log")
    with open(said, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, program, run], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    over = False
    while not over:
        over = process.poll() is not None or time.monotonic() >= deadline
        state = _read_state(folder)
        if state is not None and "lost" not in state:
            return state
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its guard ends the rest
        process.wait()
    with open(said, errors="replace") as log:
        raise RuntimeError("the supervisor did not start: %s" % (log.read().strip()[-2000:] or "it said nothing"))


def status(run):
    """RUN/host/state.json, with what only a look can tell: "ended" also of a run whose host went down under it.

    A run whose supervisor and guard were killed goes on as long as its program does, and is "unwatched".
    """
    folder = os.path.join(_absolute(run), "host")
    state = _read_state(folder)
    if state is not None and state["state"] == "running" and not _is_alive(folder):
        state = _read_state(folder)  # it may have ended meanwhile
        if state is not None and state["state"] == "running":
            if _has_program(folder, state):
                state["unwatched"] = True
            else:
                state.update(state="ended", status=None, lost="the host went down, or its supervisor was killed")
    return state


def stop(run, now=False):
    """End a run and return its state when no process of it is left; `now` does without the ranks' saving.

    A supervisor that does not come to an end is killed. "left" are pids that even SIGKILL did not end.
    """
    run = _absolute(run)
    folder = os.path.join(run, "host")
    spec = _read_json(os.path.join(folder, "spec.json"), {}) or {}
    if os.path.isdir(folder):
        with contextlib.suppress(OSError):  # a full disk
            _write(os.path.join(folder, STOPPED), b"")  # whoever is killed meanwhile does not begin again
    deadline = time.monotonic() + (0 if now else spec.get("grace_s", 0)) + 4 * END_S
    asked = 0
    while _is_alive(folder):
        late = time.monotonic() >= deadline
        pid = int(_read_file(os.path.join(folder, "lock")) or 0)  # none: it begins, or its guard ends the rest
        if pid and (late or asked < (2 if now else 1)):
            asked += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        yield {"waiting": True}
        time.sleep(POLL_S)
    left = end_leftovers(run)
    state = status(run)
    yield None if state is None else dict(state, left=left)


def end_leftovers(run):
    """Kill what is left of a run that has no supervisor any more; the pids that would not go."""
    folder = os.path.join(_absolute(run), "host")
    spec = _read_json(os.path.join(folder, "spec.json"), None)
    program = _read_file(os.path.join(folder, "supervisor.py"))
    if spec is None or program is None or _is_alive(folder):
        return []
    tools = {"__name__": "supervisor"}
    exec(compile(program, "supervisor.py", "exec"), tools)  # noqa: S102  our own program, as it was sent
    return tools["end_all"](spec["id"])


def follow(run, have, until_end=True):
    """What a run's files gain: {"path", "offset", "identity", "size"}, then the bytes; {"caught_up": state} at times,
    and every second {"looks": …, "stuck": …} as `looks` and `stuck` give them.

    `have` is {path: [identity, size]} of what the reader holds, None of one who reads the files here. A file that was
    replaced starts again at offset 0. Ends when the run has ended and all is read; without `until_end`, as soon as all
    is read.
    """
    run = _absolute(run)
    look_at = 0.0
    have = have and {path: list(known) for path, known in have.items()}
    while True:
        state = status(run)
        for path, place in [] if have is None else _files(run):
            yield from _news(path, place, have)
        if until_end and time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_S
            yield {"looks": looks(run, state), "stuck": stuck(), "at": time.monotonic()}
        yield {"caught_up": state}
        if not until_end or state is None or state["state"] == "ended":
            return
        time.sleep(NEWS_S)


def looks(run, state):
    """What a run's processes do on this host: [[rank, {"pid", "state", "cpu_s", "where", "waits", "moved"}], …],
    of rank None what started the ranks. Linux; elsewhere nothing.
    """
    spec, pid = _read_json(os.path.join(run, "host", "spec.json"), None), (state or {}).get("pid")
    if not pid or spec is None or state["state"] != "running" or not os.path.isdir("/proc/self"):
        return []
    is_rank, found = spec.get("is_rank"), []
    if spec.get("has_agent") and spec.get("has_launcher"):
        pid = next(iter(_children(pid)), pid)  # the launcher of now
    for one in [pid] if is_rank else [pid, *_children(pid)]:
        try:
            local_rank = 0 if is_rank else None if one == pid else _local_rank_of(one)
            rank = None if local_rank is None else spec["first_rank"] + local_rank
            kind, cpu_s = _kernel_says(one)
            pulse = _read_json(os.path.join(run, "host", "pulse", str(local_rank)), None) or {}
            told = {name: pulse[name] for name in ("where", "waits", "moved")} if pulse.get("pid") == one else {}
            found.append([rank, dict(told, pid=one, state=kind, cpu_s=cpu_s)])
        except (OSError, ValueError, LookupError):
            continue  # it has ended, or is no rank
    return found


def stuck():
    """Addresses of machines that do not acknowledge what they were sent, however often it is sent again. Linux.

    The kernel's table of connections takes it milliseconds: it is read where anything was sent again since, or one of
    these was found before, and now and then: what could not even be sent again is not counted.
    """
    sent_again, now = _sent_again(), time.monotonic()
    is_known = sent_again is not None and sent_again == _connections.get("sent_again") and not _connections["stuck"]
    if is_known and now - _connections["at"] < READ_S:
        return []
    found = set()
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), open(path) as table:
            for line in table:
                words = line.split()
                if words[3] != ESTABLISHED or not int(words[4].partition(":")[0], 16) or int(words[6], 16) < TRIES:
                    continue
                number = words[2].partition(":")[0]  # 32 bits at a time, as the processor has them
                parts = [int(number[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(number), 8)]
                found.add(socket.inet_ntop(family, b"".join(parts)))
    _connections.update(sent_again=sent_again, stuck=found, at=now)
    return sorted(found)


def _sent_again():
    """How many segments TCP has sent again so far; None where the kernel does not say. Its count of timeouts leaves out
    those of a connection that has had one, before Linux 5.0.
    """
    lines = [line.split() for line in (_read_file("/proc/net/snmp") or b"").splitlines() if line.startswith(b"Tcp:")]
    if len(lines) != 2:
        return None
    names, counts = lines
    return int(counts[names.index(b"RetransSegs")])


def checkpoints(run):
    """The complete checkpoints of a run that can be read, the newest last: {"step", "val_loss", "folder", "files"}.

    "files" is as `files.survey` tells them, by what state.json says of them: nothing large is read.
    """
    found = []
    for name in _checkpoint_names(run):
        folder = os.path.join(_place(_absolute(run), "checkpoints"), name)
        try:
            state = _read_file(os.path.join(folder, "state.json"))
            told = json.loads(state)
            digests = dict(told["files"], **{"state.json": _digest(state)})
            files = [{"path": path, "digest": digest, "size": os.path.getsize(os.path.join(folder, path)),
                      "executable": False} for path, digest in sorted(digests.items())]  # fmt: skip
            found.append({"step": int(name[5:]), "val_loss": told["val_loss"], "folder": folder, "files": files})
        except (OSError, TypeError, ValueError, LookupError):
            continue  # it is being removed, or was damaged
    return found


def go_back(run, checkpoint, wanted):
    """Before a run is resumed from the checkpoint of this name: is it here, with a state.json of this blake2b?

    "whole", "damaged" or "none". state.json holds the digests of all other files. One of another content goes, and with
    it what ranks kept of that step for themselves; so does all that is of later steps. An earlier start left it, and
    the run went on elsewhere. Of one that is damaged, what ranks kept beside it is of that step.
    """
    run = _absolute(run)
    _check_over(os.path.join(run, "host"))
    folder = os.path.join(run, "checkpoints", checkpoint)
    state = _read_file(os.path.join(folder, "state.json"))
    is_same = state is not None and _digest(state) == wanted
    is_here = is_same and _is_whole(folder, json.loads(state)["files"])
    saved = _checkpoint_names(run)
    for name in reversed(saved):
        if is_same and int(name[5:]) > int(checkpoint[5:]) and _is_whole_checkpoint(run, name):
            raise RuntimeError(f"it has saved step {int(name[5:])} since, which is not at home: evener fetch brings it")
    first = int(checkpoint[5:]) + (is_same or checkpoint not in saved)  # step that is not so any more
    for name in saved:
        if int(name[5:]) >= first or (name == checkpoint and not is_here):
            removed = os.path.join(run, "checkpoints", f".{name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            os.rename(os.path.join(run, "checkpoints", name), removed)  # killed here, it is no checkpoint any more
            shutil.rmtree(removed)
    for root, _, names in os.walk(os.path.join(run, "own")):
        for name in names:
            found = re.fullmatch("step-([0-9]+)[.]safetensors", name)
            if found and int(found.group(1)) >= first:
                os.remove(os.path.join(root, name))
    return "whole" if is_here else "damaged" if is_same else "none"


def lacking(run, files):
    """Of {path: [size, blake2b]} the paths whose file here does not begin with that content."""
    found = []
    for path, (size, wanted) in files.items():
        if _digest_of(os.path.join(_absolute(run), path), size) != wanted:
            found.append(path)
    return found


def adopt(run, tree):
    """Before a run is resumed: the files of a tree take the place of the run's own."""
    run, tree = _absolute(run), _absolute(tree)
    for root, _, names in os.walk(tree):
        for name in sorted(names, key="state.json".__eq__):  # last: a checkpoint that has it is complete
            source = os.path.join(root, name)
            target = os.path.join(run, os.path.relpath(source, tree))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target + ".tmp")
            os.replace(target + ".tmp", target)


def free_port(address, wanted, low, high):
    """A port that can be bound on this address: the wanted one, else one of the range; None if none is free."""
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
    """Of the complete checkpoints, by step."""
    folder = _place(_absolute(run), "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((name for name in names if re.fullmatch("step-[0-9]{6,12}", name)), key=lambda name: int(name[5:]))


def _is_whole(folder, digests):
    """Is every file of a checkpoint what state.json says?"""
    return all(_digest_of(os.path.join(folder, name)) == digest for name, digest in digests.items())


def _is_whole_checkpoint(run, name):
    folder = os.path.join(run, "checkpoints", name)
    try:
        return _is_whole(folder, json.loads(_read_file(os.path.join(folder, "state.json")))["files"])
    except (TypeError, ValueError, LookupError):
        return False


def _digest(content):
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _digest_of(path, size=None):
    """Of a file's content, or of its first `size` bytes; None where there is no such file."""
    digest, left = hashlib.blake2b(digest_size=32), size
    try:
        with _open(path) as file:
            while left is None or left:
                chunk = file.read(CHUNK if left is None else min(CHUNK, left))
                if not chunk:
                    break
                digest.update(chunk)
                left = None if left is None else left - len(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def _files(run):
    """(path, where it lies) of what a run writes; nothing need be there."""
    joined = _joined(run)
    for path in (*WHOLE, "events.jsonl"):
        yield path, _in(run, joined, path)
    for folder in ("steps", "spans", "vitals", "profile", "logs", "replicas"):
        root = _in(run, joined, folder)
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(root)):
                if not name.startswith("."):
                    yield folder + "/" + name, os.path.join(root, name)


def _local_rank_of(pid):
    """Asked once: a process that hangs in the kernel may not let anybody read its environment."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        began = file.read().rpartition(b") ")[2].split()[19]
    if _ranks.get(pid, (None,))[0] != began:
        _ranks[pid] = began, _told_local_rank(pid)
    if _ranks[pid][1] is None:
        raise LookupError(pid)
    return _ranks[pid][1]


def _told_local_rank(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        told = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    return int(told[b"LOCAL_RANK"]) if b"LOCAL_RANK" in told else None


def _kernel_says(pid):
    """(the letter of its state, processor seconds of it and of all that came of it)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    cpu_s = sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    for child in _children(pid):
        with contextlib.suppress(OSError):
            cpu_s += _kernel_says(child)[1]
    return fields[0].decode(), cpu_s


def _children(pid):
    """A kernel need not tell them; then nobody has any, and nobody is said to hang."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def _place(run, path):
    """Where a file of a run lies: a script may have joined another run directory than the one it was launched into."""
    return _in(run, _joined(run), path)


def _in(run, joined, path):
    return os.path.join(run if path.split("/")[0] in ("host", "logs") else joined, path)


def _joined(run):
    joined = _read_file(os.path.join(run, "host", "joined"))
    return joined.decode() if joined else run


def _news(path, place, have):
    known, offset = have.get(path, ["", 0])
    try:
        facts = os.stat(place)  # most files are as they were, and not even opened
        if known == _identity(path, facts) and (path in WHOLE or offset == facts.st_size):
            return
        file = _open(place)
    except OSError:
        return
    with file:
        facts = os.fstat(file.fileno())
        identity = _identity(path, facts)
        if known != identity or offset > facts.st_size:
            offset = 0
        file.seek(offset)
        chunk = None
        while chunk is None or chunk:
            first = chunk is None
            chunk = file.read(-1 if path in WHOLE else CHUNK)
            if chunk or first:
                yield {"path": path, "offset": offset, "identity": identity, "size": len(chunk)}
                if chunk:
                    yield chunk
                offset += len(chunk)
                have[path] = [identity, offset]


def _identity(path, facts):
    """Inode numbers are used again; a file that is replaced time and again is told by its time as well."""
    return f"{facts.st_ino} {facts.st_mtime_ns if path in WHOLE else 0}"


def _check_over(folder):
    """RuntimeError where the run is running here; one that has told its end may take a while to go."""
    deadline = time.monotonic() + END_S
    state = _read_state(folder)
    if state is not None and state["state"] == "running" and not _is_alive(folder) and _has_program(folder, state):
        raise RuntimeError("this run is running here already, without its supervisor")
    while _is_alive(folder):
        state = _read_state(folder)
        if state is None or state["state"] == "running" or time.monotonic() >= deadline:
            raise RuntimeError("this run is running here already")
        time.sleep(0.02)


def _is_alive(folder):
    """Is the lock held? Several may look at once."""
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
    """Does what a supervisor started run without it?"""
    spec = _read_json(os.path.join(folder, "spec.json"), None)
    environment = _read_file(f"/proc/{state['pid']}/environ") or b""
    return spec is not None and f"EVENER_RUN={spec['id']}".encode() in environment.split(b"\0")


def _read_state(folder):
    """None of a run that was never started; one that nobody can read is that of a host that went down."""
    lost = {"state": "running", "supervisor": None, "pid": None, "started": None, "ended": None, "status": None,
            "signal": None, "stopped": False, "failures": []}  # fmt: skip
    return _read_json(os.path.join(folder, "state.json"), lost)


def _read_json(path, damaged):
    """What a file says, None where there is none, `damaged` when it is not JSON."""
    content = _read_file(path)
    try:
        return None if content is None else json.loads(content)
    except ValueError:
        return damaged


def _open(path):
    """To read; OSError of what is no file: nobody waits for a pipe's other end, or reads a device to its end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", path)
    return os.fdopen(descriptor, "rb")


def _read_file(path):
    try:
        with _open(path) as file:
            return file.read()
    except OSError:
        return None


def _write(path, content):
    temporary = path + ".tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # whole even where the power goes
    os.replace(temporary, path)


def _absolute(path):
    return os.path.abspath(os.path.expanduser(path))
