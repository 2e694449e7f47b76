"""Control the runs on this host: start a run under its supervisor, report its state, stream its files, stop it.

A run's folder is WORKDIR/runs/NAME, or, for a run on the local machine, the run directory. Its supervisor, or the guard
of a killed one, is alive as long as RUN/host/lock is locked. A pid alone is never trusted: a process gets a signal only
if its start time and its arguments are those of this run's supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, Iterator  # noqa: UP035  python 3.8

from evener.node.remote.file_io import (
    MAX_FILE_BYTES,
    absolute_path,
    content_digest,
    copy_durably,
    create_file,
    file_digest,
    fsync_folder,
    make_folder,
    open_own_file,
    open_regular_file,
    path_inside,
    read_bytes,
    read_text,
    remove_entry,
    write_atomic,
)
from evener.node.remote.process_table import (
    HAS_PROC,
    KILL_TIMEOUT_S,
    children,
    kill_processes_with,
    local_rank,
    read_environment,
    read_process,
    runs_program,
    sample_rank,
    send_signal,
)
from evener.node.remote.sockets import agent_ports

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
AGENT_SPEC_FILE = "host/agent.json"  # the same
RUN_FOLDER_VARIABLE = "EVENER_RUN_FOLDER"  # of supervisor.py
_tcp_cache: dict[str, Any] = {}  # what `find_stalled_peers` last read
REPLACED_FILES = ("manifest.json", "tokenizer.json", "meta.pkl", "host/state.json")  # replaced, not appended to

State = Dict[str, Any]  # noqa: UP006  RUN/host/state.json
Item = Dict[str, Any]  # noqa: UP006  what a function yields


def start(
    run: str,
    spec: dict[str, Any],
    supervisor: str,
    files: dict[str, str | None] | None = None,
    passed_env: dict[str, str] | None = None,
) -> State:
    """Start the program that `spec` describes, detached; return its state once it is running.

    `supervisor` is the text of the supervisor's program, with the modules that it needs.
    `files` are {name: text} to write into RUN; a text of None removes the file of an earlier start. `passed_env` are
    variables of the program that may be secrets.
    Processes that an earlier run left in this folder are killed.
    """
    run = absolute_path(run)
    folder = path_inside(run, "host")
    _require_not_running(folder)
    kill_leftover_processes(run)
    make_folder(folder, mode=0o700)
    for name in ("state.json", "failures.json", "joined", STOPPED_FILE):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
    _write_files(run, files or {})
    return _start_supervisor(run, folder, spec, supervisor, passed_env or {})


def leave(run: str, why: str) -> Iterator[Item | None]:
    """Remove this host from the run after its current step; yield its state once it has left or the run has ended."""
    run = absolute_path(run)
    write_atomic(path_inside(run, EXCLUDED_FILE), why.encode())
    while True:
        state = status(run)
        if state is None or state["state"] == "ended":
            yield state
            return
        yield {"waiting": True}
        time.sleep(POLL_S)


def put(run: str, files: dict[str, str]) -> None:
    """Replace files of a run by `files`, {name: text}. RuntimeError if there is no such run, or it was stopped."""
    run = absolute_path(run)
    if not os.path.isdir(path_inside(run, "host")):
        raise RuntimeError(f"no such run on this host: {run}")
    if os.path.exists(path_inside(run, "host", STOPPED_FILE)):
        raise RuntimeError("this run was stopped")
    for name, text in files.items():
        write_atomic(path_inside(run, name), text.encode())


def restart_run(run: str, spec: dict[str, Any], supervisor: str, files: dict[str, str | None]) -> State:
    """Restart a run here after this host went down or left it; return its state once it is running.

    What is started is sent again, as for `start`: the files of the earlier start may be another's by now.
    """
    run = absolute_path(run)
    folder = path_inside(run, "host")
    if not os.path.isdir(folder):
        raise RuntimeError(f"no such run on this host: {run}")
    _require_not_running(folder)
    if os.path.exists(os.path.join(folder, STOPPED_FILE)):
        raise RuntimeError("this run was stopped")
    if os.path.exists(path_inside(run, EXCLUDED_FILE)):
        os.remove(path_inside(run, EXCLUDED_FILE))
    kill_leftover_processes(run)
    if os.path.exists(os.path.join(folder, "state.json")):
        os.remove(os.path.join(folder, "state.json"))
    if files.get(AGENT_SPEC_FILE):
        files = dict(files)
        files[AGENT_SPEC_FILE] = _with_newer_hosts(run, files[AGENT_SPEC_FILE] or "")
    _write_files(run, files)
    return _start_supervisor(run, folder, spec, supervisor, {})


def live_run_ports(workdir: str) -> list[int]:
    """Return the ports of the runs in WORKDIR/runs that are alive here: a program that restarts does not listen now."""
    ports: set[int] = set()
    for folder in glob.iglob(os.path.join(glob.escape(absolute_path(workdir)), "runs", "*", "host")):
        if not is_supervised(folder):
            continue
        with contextlib.suppress(LookupError, TypeError, ValueError):  # a damaged file
            spec = _read_json(os.path.join(folder, "spec.json"), {}) or {}
            ports.update(map(int, re.findall(r"--rdzv-endpoint=\S*:(\d+)", " ".join(spec["argv"]))))
            if spec["has_agent"]:
                agent = _read_json(os.path.join(folder, "agent.json"), {}) or {}
                key = bytes.fromhex(read_text(os.path.join(folder, "key")) or "")
                ports.update(agent_ports(agent["port"], key))
    return sorted(ports)


def _write_files(run: str, files: dict[str, str | None]) -> None:
    """Replace files of a run by these texts; remove those with a text of None."""
    for name, text in files.items():
        path = path_inside(run, name)
        if text is not None:
            write_atomic(path, text.encode())
        elif os.path.exists(path):
            os.remove(path)


def _with_newer_hosts(run: str, sent: str) -> str:
    """Return the text of an agent's spec with the list of hosts that the agent here had, if that is a newer one.

    The agent received it from others, after a host was added from another machine. All else is as sent.
    """
    spec, known = json.loads(sent), _read_json(path_inside(run, AGENT_SPEC_FILE), None)
    with contextlib.suppress(LookupError, TypeError):
        if known is not None and known["edition"] > spec["edition"]:
            spec.update(hosts=known["hosts"], edition=known["edition"])
    return json.dumps(spec)


def _start_supervisor(
    run: str, folder: str, spec: dict[str, Any], supervisor: str, passed_env: dict[str, str]
) -> State:
    """Start the supervisor, whose program inherits the variables in `passed_env`: they are not written to any file."""
    for path in list_partial_checkpoints(run):  # no process of the run is left that writes them
        remove_entry(path)
    program = os.path.join(folder, "supervisor.py")
    write_atomic(os.path.join(folder, "spec.json"), json.dumps(spec).encode())
    write_atomic(program, supervisor.encode())
    log_path = os.path.join(folder, "supervisor.log")
    with create_file(log_path) as log:
        process = subprocess.Popen(
            [sys.executable, "-I", program, run],  # no module is imported from the folder of the program
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=dict(os.environ, **passed_env),
        )  # fmt: skip
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
    printed = (read_text(log_path) or "").strip()[-2000:]
    if printed.startswith("Traceback"):
        printed = printed.splitlines()[-1]
    raise RuntimeError(f"the supervisor did not start: {printed or 'it printed nothing'}")


def status(run: str) -> State | None:
    """Return the state in RUN/host/state.json, corrected if no process could update it; None if the run never started.

    A run whose host went down, or whose supervisor and guard were killed, has "ended". But as long as its program still
    runs, the state is "running", with "unwatched" set.
    """
    folder = path_inside(absolute_path(run), "host")
    state = _read_state(folder)
    if state is not None and state["state"] == "running" and not is_supervised(folder):
        state = _read_state(folder)  # it may have ended meanwhile
        if state is not None and state["state"] == "running":
            if _has_program(folder, state):
                state["unwatched"] = True
            else:
                state.update(state="ended", status=None, lost="the host went down, or its supervisor was killed")
    return state


def stop(run: str, now: bool = False) -> Iterator[Item | None]:
    """Stop a run; yield its state once no process of it is left. With `now` the ranks do not save.

    Processes without a supervisor are killed by the run's folder: an id in its files could be that of another run.
    A supervisor that does not end in time is killed. The state's "left" lists pids that even SIGKILL did not end.
    """
    run = absolute_path(run)
    folder = path_inside(run, "host")
    spec = _read_json(os.path.join(folder, "spec.json"), {}) or {}
    if os.path.isdir(folder):
        with contextlib.suppress(OSError):  # a full disk
            write_atomic(os.path.join(folder, STOPPED_FILE), b"")  # prevents a restart of what is killed meanwhile
    deadline = time.monotonic() + (0 if now else spec.get("grace_s", 0)) + 4 * KILL_TIMEOUT_S
    num_requests = 0
    while is_supervised(folder):
        is_late = time.monotonic() >= deadline
        pid = _supervisor_pid(folder)  # None: it is starting, or its guard kills the rest
        if pid is not None and (is_late or num_requests < (2 if now else 1)):
            num_requests += 1
            send_signal(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        yield {"waiting": True}
        time.sleep(POLL_S)
    surviving_pids = kill_leftover_processes(run)
    state = status(run)
    yield None if state is None else dict(state, left=surviving_pids)


def kill_leftover_processes(run: str) -> list[int]:
    """Kill what a run without a supervisor left in this folder; return the pids that SIGKILL did not end."""
    if is_supervised(path_inside(absolute_path(run), "host")):
        return []
    return kill_processes_with(_folder_variable(run))


def follow(run: str, have: dict[str, list[Any]] | None, until_end: bool = True) -> Iterator[Item | bytes]:
    """Stream what is appended to a run's files: {"path", "offset", "identity", "size"}, then the bytes.

    `have` is {path: [identity, size]} of the reader's copies; None streams no files, as the reader has them itself. A
    file that was replaced is streamed again from offset 0. Also yields {"caught_up": state} after each pass over the
    files and, with `until_end`, every second {"looks": …, "stuck": …} from `sample_processes` and `find_stalled_peers`.
    Ends when the run has ended and all is read; without `until_end`, after the first pass.
    """
    run = absolute_path(run)
    next_sample_at = 0.0
    copied = {path: list(known) for path, known in (have or {}).items()}
    while True:
        state = status(run)
        for path, location in [] if have is None else list_records(run):
            yield from _read_growth(path, location, copied)
        if until_end and time.monotonic() >= next_sample_at:
            next_sample_at = time.monotonic() + SAMPLE_INTERVAL_S
            yield {"looks": sample_processes(run, state), "stuck": find_stalled_peers(), "at": time.monotonic()}
        yield {"caught_up": state}
        if not until_end or state is None or state["state"] == "ended":
            return
        time.sleep(FOLLOW_POLL_S)


def sample_processes(run: str, state: State | None) -> list[list[Any]]:
    """Sample a run's processes on this host: [[rank, {"pid", "state", "cpu_s", "where", "waits", "moved"}], …].

    Rank None is the process that started the ranks. Linux only; elsewhere the list is empty.
    """
    spec = _read_json(path_inside(run, "host", "spec.json"), None)
    if state is None or not state.get("pid") or spec is None or state["state"] != "running" or not HAS_PROC:
        return []
    pid, is_rank, samples = state["pid"], spec.get("is_rank"), []
    if spec.get("has_agent") and spec.get("has_launcher"):
        pid = next(iter(children(pid)), pid)  # the current launcher
    for process in [pid] if is_rank else [pid, *children(pid)]:
        with contextlib.suppress(OSError, ValueError, LookupError):  # it has exited, or is no rank
            rank = None
            if is_rank or process != pid:
                rank = 0 if is_rank else local_rank(process)
            sample = sample_rank(process, path_inside(run, "host", "pulse", str(rank)))
            samples.append([None if rank is None else spec["first_rank"] + rank, sample])
    return samples


def find_stalled_peers() -> list[str]:
    """Return the addresses of peers that do not acknowledge segments despite repeated retransmits. Linux only.

    Reading the kernel's table of connections takes milliseconds. So it is read only if a segment was retransmitted
    since the last read, a peer was stalled then, or `TCP_TABLE_INTERVAL_S` has passed: the kernel does not count a
    retransmit that cannot even be sent.
    """
    sent_again, now = _count_retransmits(), time.monotonic()
    is_known = sent_again is not None and sent_again == _tcp_cache.get("sent_again") and not _tcp_cache["stuck"]
    if is_known and now - _tcp_cache["at"] < TCP_TABLE_INTERVAL_S:
        return []
    stalled: set[str] = set()
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
                packed = fields[2].partition(":")[0]  # in words of 32 bits, in the processor's byte order
                parts = [int(packed[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(packed), 8)]
                stalled.add(socket.inet_ntop(family, b"".join(parts)))
    _tcp_cache.update(sent_again=sent_again, stuck=stalled, at=now)
    return sorted(stalled)


def _count_retransmits() -> int | None:
    """Return how many segments TCP has retransmitted so far, or None where the kernel does not tell.

    The kernel's count of timeouts is not used: before Linux 5.0 it omits repeated timeouts of one connection.
    """
    lines = [line.split() for line in (read_bytes("/proc/net/snmp") or b"").splitlines() if line.startswith(b"Tcp:")]
    if len(lines) != 2:
        return None
    names, counts = lines
    return int(counts[names.index(b"RetransSegs")])


def list_checkpoints(run: str) -> list[Item]:
    """Return the complete, readable checkpoints of a run, newest last: {"step", "val_loss", "folder", "files"}.

    "files" has the form of `content_store.hash_files`, with the digests from state.json: nothing large is read.
    """
    entries = []
    for name in _checkpoint_names(run):
        folder = os.path.join(_resolve_path(absolute_path(run), "checkpoints"), name)
        try:
            state = read_bytes(os.path.join(folder, "state.json")) or b""
            meta = json.loads(state)
            digests = dict(meta["files"], **{"state.json": content_digest(state)})
            files = [{"path": path, "digest": digest, "size": os.path.getsize(os.path.join(folder, path)),
                      "executable": False} for path, digest in sorted(digests.items())]  # fmt: skip
            entries.append({"step": int(name[5:]), "val_loss": meta["val_loss"], "folder": folder, "files": files})
        except (OSError, TypeError, ValueError, LookupError):
            continue  # it is being removed, or is damaged
    return entries


def list_partial_checkpoints(run: str) -> list[str]:
    """Return the folders in which a checkpoint was being written when its writer was killed: .step-N.tmp."""
    with contextlib.suppress(OSError):
        folder = path_inside(run, "checkpoints")
        return [
            os.path.join(folder, name)
            for name in sorted(os.listdir(folder))
            if name.startswith(".step-") and name.endswith(".tmp")
        ]  # fmt: skip  as `write_folder_atomic` names them
    return []


def rollback_to_checkpoint(run: str, checkpoint: str, wanted: str) -> str:
    """Roll back to the named checkpoint before a resume: verify it, and remove everything of later steps.

    `wanted` is the blake2b of the checkpoint's state.json, which holds the digests of its other files. Return "whole"
    if the checkpoint is here with all its files, "damaged" if only state.json matches, else "none". RuntimeError if
    state.json matches and a later checkpoint here is intact. A checkpoint with another state.json is removed with the
    per-rank state of its step: an earlier start left it, and the run continued elsewhere. A damaged one is removed
    without the per-rank state, which belongs to the right step.
    """
    run = absolute_path(run)
    _require_not_running(path_inside(run, "host"))
    folder = path_inside(run, "checkpoints", checkpoint)
    state = read_bytes(os.path.join(folder, "state.json"))
    is_same = state is not None and content_digest(state) == wanted
    is_here = is_same and _is_checkpoint_intact(folder, json.loads(state or b"")["files"])
    saved = _checkpoint_names(run)
    for name in reversed(saved):
        if is_same and int(name[5:]) > int(checkpoint[5:]) and _is_named_checkpoint_intact(run, name):
            raise RuntimeError(
                f"it has saved step {int(name[5:])} since, which the run directory lacks: evener fetch RUN copies it"
            )
    first = int(checkpoint[5:]) + (is_same or checkpoint not in saved)  # the first step to discard
    for name in saved:
        if int(name[5:]) >= first or (name == checkpoint and not is_here):
            removed = path_inside(run, "checkpoints", f".{name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            os.rename(path_inside(run, "checkpoints", name), removed)  # if killed now, no half checkpoint remains
            fsync_folder(path_inside(run, "checkpoints"))  # nor does it come back after a power loss
            shutil.rmtree(removed)
    for root, _, names in os.walk(path_inside(run, "own")):
        for name in names:
            match = re.fullmatch("step-([0-9]+)[.]safetensors", name)
            if match and int(match.group(1)) >= first:
                os.remove(os.path.join(root, name))
                fsync_folder(root)
    return "whole" if is_here else "damaged" if is_same else "none"


def find_differing_files(run: str, files: dict[str, tuple[int, str]]) -> list[str]:
    """Return the paths in `files`, {path: [size, blake2b]}, whose first `size` bytes here have another digest."""
    differing = []
    for path, (size, wanted) in files.items():
        if _digest_file(os.path.join(absolute_path(run), path), size) != wanted:
            differing.append(path)
    return differing


def install_tree(run: str, tree: str) -> None:
    """Before a resume, replace files of the run by those of a tree."""
    run, tree = absolute_path(run), absolute_path(tree)
    for root, _, names in os.walk(tree):
        for name in sorted(names, key="state.json".__eq__):  # last: a checkpoint that has it is complete
            source = os.path.join(root, name)
            target = path_inside(run, os.path.relpath(source, tree))
            make_folder(os.path.dirname(target))
            copy_durably(source, target)


def _checkpoint_names(run: str) -> list[str]:
    """Return the names of the complete checkpoints, ordered by step."""
    folder = _resolve_path(absolute_path(run), "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((name for name in names if re.fullmatch("step-[0-9]{6,12}", name)), key=lambda name: int(name[5:]))


def _is_checkpoint_intact(folder: str, digests: dict[str, str]) -> bool:
    """Return whether every file of a checkpoint has the digest that state.json records."""
    return all(_digest_file(os.path.join(folder, name)) == digest for name, digest in digests.items())


def _is_named_checkpoint_intact(run: str, name: str) -> bool:
    folder = path_inside(run, "checkpoints", name)
    try:
        state = read_bytes(os.path.join(folder, "state.json")) or b""
        return _is_checkpoint_intact(folder, json.loads(state)["files"])
    except (TypeError, ValueError, LookupError):
        return False


def _digest_file(path: str, size: int | None = None) -> str | None:
    """Return the digest of a file, or of its first `size` bytes; None if there is no such file."""
    try:
        with open_regular_file(path) as file:
            return file_digest(file, size)
    except OSError:
        return None


def list_records(run: str) -> Iterator[tuple[str, str]]:
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


def _resolve_path(run: str, path: str) -> str:
    """Return the path of a file of the run: a script's join may name another run directory than `launch`."""
    return _path_in_run(run, _joined_run_folder(run), path)


def _path_in_run(run: str, joined: str, path: str) -> str:
    return os.path.join(run if path.split("/")[0] in ("host", "logs") else joined, path)


def _joined_run_folder(run: str) -> str:
    joined = read_bytes(path_inside(run, "host", "joined"))
    return joined.decode() if joined else run


def _read_growth(path: str, location: str, have: dict[str, list[Any]]) -> Iterator[Item | bytes]:
    known, offset = have.get(path, ["", 0])
    try:
        stat_result = os.stat(location)  # most files are unchanged, and need not be opened
        if known == _file_identity(path, stat_result) and (path in REPLACED_FILES or offset == stat_result.st_size):
            return
        file = open_regular_file(location)
    except OSError:
        return
    with file:
        stat_result = os.fstat(file.fileno())
        if path in REPLACED_FILES and stat_result.st_size > MAX_FILE_BYTES:
            return
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


def _file_identity(path: str, facts: os.stat_result) -> str:
    """Identify a file by its inode; one that is replaced repeatedly also by its time, as inode numbers are reused."""
    return f"{facts.st_ino} {facts.st_mtime_ns if path in REPLACED_FILES else 0}"


def _require_not_running(folder: str) -> None:
    """Raise RuntimeError if the run is running here; first wait for a supervisor that is about to exit."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    state = _read_state(folder)
    if state is not None and state["state"] == "running" and not is_supervised(folder) and _has_program(folder, state):
        raise RuntimeError("this run is running here already, without its supervisor")
    while is_supervised(folder):
        state = _read_state(folder)
        if state is None or state["state"] == "running" or time.monotonic() >= deadline:
            raise RuntimeError("this run is running here already")
        time.sleep(0.02)


def is_supervised(folder: str) -> bool:
    """Return whether a supervisor or guard holds the lock; several programs may check at once."""
    try:
        lock = open_own_file(os.path.join(folder, "lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _supervisor_pid(folder: str) -> int | None:
    """Return the pid in the lock if it is the pid of this run's supervisor, by its start time and its arguments."""
    try:
        with os.fdopen(open_own_file(os.path.join(folder, "lock"), os.O_RDONLY), "rb") as lock:
            words = lock.read(64).decode().split()
        pid = int(words[0])
        is_same = words[1:] in ([], [read_process(pid).start_time])  # []: it is not known where there is no /proc
        return pid if is_same and runs_program(pid, os.path.join(folder, "supervisor.py")) else None
    except (OSError, ValueError, LookupError):
        return None


def _has_program(folder: str, state: State) -> bool:
    """Return whether the program that the supervisor started is still running."""
    try:
        return _folder_variable(os.path.dirname(folder)) in read_environment(state["pid"])
    except (OSError, LookupError):
        return False


def _folder_variable(run: str) -> str:
    """Return NAME=value as all processes of the run in this folder have it in their environment."""
    return f"{RUN_FOLDER_VARIABLE}={os.path.realpath(absolute_path(run))}"


def _read_state(folder: str) -> State | None:
    """Return the run's recorded state: None if it never started, a stand-in if the file is damaged by a crash."""
    lost: State | None = {
        "state": "running", "supervisor": None, "pid": None, "started": None, "ended": None, "status": None,
        "signal": None, "stopped": False, "failures": [],
    }  # fmt: skip
    return _read_json(os.path.join(folder, "state.json"), lost)


def _read_json(path: str, damaged: State | None) -> State | None:
    """Return a file's JSON value: None if there is no file, `damaged` if it is not JSON."""
    content = read_bytes(path)
    if content is None:
        return None
    try:
        value: State = json.loads(content)
    except ValueError:
        return damaged
    return value
