"""Keep a copy of the user's project on this host: one folder for all runs, synchronized at every start.

A script runs in WORKDIR/projects/NAME. Files sent replace those sent before; files that the script wrote stay for the
next start. WORKDIR/projects/NAME.json records the files sent: {path: [digest, size, mtime, ctime]}.
Python 3.8 or newer, Linux or macOS, standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from typing import Any, Dict, List  # noqa: UP035  python 3.8

from evener.node.remote.file_io import (
    BLOCK_BYTES,
    absolute_path,
    create_file,
    make_folder,
    open_own_file,
    open_regular_file,
    write_atomic,
)
from evener.node.remote.process_table import HAS_PROC, list_processes, read_environment

GENERATED_FOLDERS = ("__pycache__",)  # folders whose content Python regenerates

SentFiles = Dict[str, List[Any]]  # noqa: UP006  path: [digest, size, mtime, ctime]


def sync(tree: str, folder: str) -> list[int]:
    """Synchronize a project's folder with a tree of the content store; return the pids of runs active in it (Linux).

    A file that was sent and is no longer in the tree is removed. One that a program modified stays, unless it has
    changed at the sender, too: then the program's version becomes NAME~, or NAME~2, …
    """
    tree, folder = absolute_path(tree), absolute_path(folder)
    with open_regular_file(tree + ".json") as file:
        content = json.loads(file.read().decode())
    make_folder(folder)
    with os.fdopen(open_own_file(folder + ".lock", os.O_RDWR | os.O_CREAT), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sent = _read_sent_files(folder)
        recorded: SentFiles = {}
        new = {path: (digest + "+x" * executable, executable) for path, digest, _, executable in content["files"]}
        new.update({path: ("-> " + to, False) for path, to in content["links"]})
        for path in sent:
            target_path = _join_path(folder, path)
            if path not in new and _stat_facts(target_path) == sent[path][1:]:
                os.unlink(target_path)
                _remove_empty_folders(os.path.dirname(target_path), folder)
        unchanged = {path: sent[path] for path in sent if path in new and sent[path][0] == new[path][0]}
        _write_sent_files(folder, unchanged)  # if interrupted from here on, replaced files count as not sent
        for path, (digest, executable) in new.items():
            target_path, facts = _join_path(folder, path), _stat_facts(_join_path(folder, path))
            record = sent.get(path, [None])
            if facts is not None and record[0] == digest:
                recorded[path] = record  # as sent, or modified by a program
                continue
            if facts is not None and facts != record[1:]:
                os.replace(target_path, _free_backup_name(target_path))
            _write_entry(tree, path, target_path, digest, executable)
            recorded[path] = [digest, *(_stat_facts(target_path) or [])]
        _write_sent_files(folder, recorded)
    return _runs_working_in(folder)


def list_script_outputs(
    folder: str, since: float, until: float | None = None, run: str | None = None
) -> list[dict[str, Any]]:
    """List the files in a project's folder that programs wrote from Unix time `since` to `until`: [{"path", "size"}].

    The run directory that the script of `run` may have joined is left out: it is copied as the run's records.
    """
    folder = absolute_path(folder)
    sent, entries, joined = _read_sent_files(folder), [], None
    with contextlib.suppress(OSError), open_regular_file(os.path.join(run or "", "host", "joined")) as file:
        joined = os.path.realpath(file.read())
    for root, folders, names in os.walk(os.fsencode(folder)):
        folders[:] = sorted(name for name in folders if os.fsdecode(name) not in GENERATED_FOLDERS
                            and os.path.realpath(os.path.join(root, name)) != joined)  # fmt: skip
        for name in sorted(names):
            file_path = os.path.join(root, name)
            try:
                state = os.lstat(file_path)
            except OSError:
                continue
            path = os.path.relpath(file_path, os.fsencode(folder)).decode("utf-8", "surrogateescape")
            is_unchanged = path in sent and _stat_facts(file_path) == sent[path][1:]
            is_in_time = state.st_ctime >= since and (until is None or state.st_ctime <= until)
            if is_in_time and not is_unchanged and os.path.isfile(file_path) and not os.path.islink(file_path):
                entries.append({"path": path, "size": state.st_size})
    return entries


def _write_entry(tree: str, path: str, place: bytes, digest: str, executable: bool) -> None:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    temporary = os.path.join(os.path.dirname(place), b".evener." + os.path.basename(place) + b".tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    if digest.startswith("-> "):
        os.symlink(digest[3:].encode("utf-8", "surrogateescape"), temporary)
    else:
        with open_regular_file(_join_path(tree, path)) as source, create_file(temporary) as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)
        os.chmod(temporary, 0o755 if executable else 0o644)
    os.replace(temporary, place)


def _free_backup_name(place: bytes) -> bytes:
    """Return an unused backup name for a file."""
    number = 1
    while os.path.lexists(place + (b"~" if number == 1 else b"~%d" % number)):
        number += 1
    return place + (b"~" if number == 1 else b"~%d" % number)


def _runs_working_in(folder: str) -> list[int]:
    """Return the pids of processes of runs whose working directory this is."""
    pids = []
    for pid in list_processes() if HAS_PROC else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == os.path.realpath(folder) and any(
                entry.startswith("EVENER_RUN=") for entry in read_environment(pid)
            ):
                pids.append(pid)
    return pids


def _stat_facts(place: bytes) -> list[int] | None:
    """Return [size, mtime, ctime] of a path, not following a link; None if it does not exist."""
    try:
        state = os.lstat(place)
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _read_sent_files(folder: str) -> SentFiles:
    try:
        with open_regular_file(folder + ".json") as file:
            sent: SentFiles = json.loads(file.read().decode())
            return sent
    except (OSError, ValueError):
        return {}


def _write_sent_files(folder: str, sent: SentFiles) -> None:
    write_atomic(folder + ".json", json.dumps(sent).encode())


def _remove_empty_folders(place: bytes, top: str) -> None:
    while place != os.fsencode(top):
        try:
            os.rmdir(place)
        except OSError:
            return
        place = os.path.dirname(place)


def _join_path(folder: str, path: str) -> bytes:
    """Join a folder and a path as bytes: a file name need not be text."""
    return os.path.join(os.fsencode(folder), path.encode("utf-8", "surrogateescape"))
