"""List what a host stores of earlier runs, and remove what the launcher chose. A run that is active is never removed.

Standard library only, Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from typing import Any, Dict, Iterator  # noqa: UP035  python 3.8

from evener.node.remote.content_store import STALE_AGE_S, list_stale_parts, remove_path
from evener.node.remote.file_io import absolute_path, content_digest, read_bytes, read_text
from evener.node.remote.run_control import is_supervised, list_checkpoints, list_records, status

TREE_PATH = re.compile(r"/trees/([0-9a-f]{32})\b")
MEASURE_TIMEOUT_S = 0.3
SYNC_STATE_PREFIX = "sync-"  # of a launched program, which resumes without it, too: it goes with the run
SPEC_FILES = ("host/spec.json", "host/agent.json")  # they name the trees that a run reads

DAMAGED = (OSError, LookupError, TypeError, ValueError, AttributeError)  # what files of a damaged run cause

Entry = Dict[str, Any]  # noqa: UP006


def list_stored(workdir: str) -> Entry:
    """Return {"now", "runs", "trees", "rest_bytes"}; the rest: blobs of no tree, uploads and trees left halfway."""
    root = absolute_path(workdir)
    trees = _list_trees(root)
    runs = [_describe_run_or_keep(os.path.join(root, "runs", name)) for name in _entries(root, "runs")]
    rest = _unused_blobs(root, kept=set(trees)) + list_stale_parts(root) + _changed_trees(root)
    return {
        "now": time.time(),
        "runs": runs,
        "trees": [{"tree": tree, "bytes": tree_bytes, "used": used} for tree, (tree_bytes, used) in trees.items()],
        "rest_bytes": sum(map(_path_bytes, rest)),
    }


def remove_stored(workdir: str, runs: list[str], trees: list[str]) -> Entry:
    """Remove runs, trees, and blobs that no other tree has; return {"kept": {name: why}, "freed_bytes"}."""
    root, freed = absolute_path(workdir), 0
    kept: dict[str, str] = {}
    for name in runs:
        folder = os.path.join(root, "runs", os.path.basename(name))
        if _is_active(folder):
            kept[name] = "it has been started again"
            continue
        freed += _remove(folder, first="host")  # without its state it is no run: it cannot be removed by half
    in_use = {tree for name in _entries(root, "runs") for tree in _trees_of_run(os.path.join(root, "runs", name))}
    digests: set[str] = set()
    for tree in trees:
        folder = os.path.join(root, "trees", os.path.basename(tree))
        if tree in in_use:
            kept[tree] = "a run has been started with it"
            continue
        if time.time() - _modified(folder + ".json") <= STALE_AGE_S:
            kept[tree] = "it has been asked for since"
            continue
        digests |= _tree_digests(folder)
        freed += _remove(folder) + _remove(folder + ".json")
    unused = _unused_blobs(root, kept=set(_list_trees(root)), removed=digests)
    for path in unused + list_stale_parts(root) + _changed_trees(root):
        freed += _remove(path)
    return {"kept": kept, "freed_bytes": freed}


def measure_stored(workdir: str) -> int | None:
    """Return the bytes of runs, trees and blobs; None if they are too many files to count in a moment."""
    root, deadline, total = absolute_path(workdir), time.monotonic() + MEASURE_TIMEOUT_S, 0
    seen: set[int] = set()
    for name in ("blobs", "trees", "runs"):
        for facts in _walk_files(os.path.join(root, name)):
            if time.monotonic() > deadline:
                return None
            if facts.st_ino not in seen:  # a tree of data is hard links to blobs
                seen.add(facts.st_ino)
                total += facts.st_size
    return total


def folder_bytes(folder: str) -> int:
    """Return the bytes of the files below a folder, each once."""
    return sum({facts.st_ino: facts.st_size for facts in _walk_files(folder)}.values())


def _describe_run_or_keep(folder: str) -> Entry:
    """Return the entry of a run; a damaged one counts as active, so that it stays."""
    try:
        return _describe_run(folder)
    except DAMAGED:
        return {
            "name": os.path.basename(folder), "folder": folder, "id": None, "host": None, "bytes": folder_bytes(folder),
            "is_active": True, "state": {}, "ended": 0.0, "records": {}, "checkpoints": [], "has_rank_state": False,
            "trees": [],
        }  # fmt: skip


def _describe_run(folder: str) -> Entry:
    spec, state = _read_json(os.path.join(folder, "host", "spec.json")), status(folder) or {}
    return {
        "name": os.path.basename(folder),
        "folder": folder,
        "id": spec.get("id"),
        "host": spec.get("host"),
        "bytes": folder_bytes(folder),
        "is_active": _is_active(folder),
        "state": state,
        "ended": state.get("ended") or _modified(folder),
        "records": {path: os.path.getsize(place) for path, place in list_records(folder) if os.path.isfile(place)},
        "checkpoints": [
            {"step": entry["step"], "val_loss": entry["val_loss"], "digest": _state_digest(entry["folder"])}
            for entry in list_checkpoints(folder)
        ],
        "has_rank_state": any(
            not name.startswith(SYNC_STATE_PREFIX)
            for _, _, names in os.walk(os.path.join(folder, "own"))
            for name in names
        ),
        "trees": sorted(_trees_of_run(folder)),
    }  # fmt: skip


def _state_digest(checkpoint: str) -> str:
    return content_digest(read_bytes(os.path.join(checkpoint, "state.json")) or b"")


def _is_active(folder: str) -> bool:
    """Return whether the run is running, or its processes are being started or ended."""
    try:
        state = status(folder)
        return is_supervised(os.path.join(folder, "host")) or (state is not None and state["state"] == "running")
    except DAMAGED:
        return True


def _trees_of_run(folder: str) -> set[str]:
    return {tree for name in SPEC_FILES for tree in TREE_PATH.findall(read_text(os.path.join(folder, name)) or "")}


def _list_trees(root: str) -> dict[str, tuple[int, float]]:
    """Return {tree: (bytes, when it was last sent or asked for)}."""
    trees = {}
    for name in _entries(root, "trees"):
        if name.endswith(".json"):
            path = os.path.join(root, "trees", name)
            trees[name[: -len(".json")]] = (folder_bytes(path[: -len(".json")]), _modified(path))
    return trees


def _tree_digests(folder: str) -> set[str]:
    return {digest for _, digest, _, _ in _read_json(folder + ".json").get("files", [])}


def _unused_blobs(root: str, kept: set[str], removed: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """Return the blobs that no tree in `kept` has and that are in `removed` or were not touched for a day."""
    used = {digest for tree in kept for digest in _tree_digests(os.path.join(root, "trees", tree))}
    unused = []
    for name in _entries(root, "blobs"):
        path = os.path.join(root, "blobs", name)
        if re.fullmatch("[0-9a-f]{64}", name) and name not in used:
            with contextlib.suppress(OSError):
                if name in removed or time.time() - os.lstat(path).st_ctime > STALE_AGE_S:
                    unused.append(path)
    return unused


def _changed_trees(root: str) -> list[str]:
    """Return the trees into which programs wrote, and which were replaced; none while a run may still work in one."""
    if any(_is_active(os.path.join(root, "runs", name)) for name in _entries(root, "runs")):
        return []
    return [os.path.join(root, "trees", name) for name in _entries(root, "trees") if name.startswith("changed-")]


def _remove(path: str, first: str = "") -> int:
    """Remove a file or folder, `first` in it before the rest; return the bytes that this frees."""
    num_bytes = _path_bytes(path)
    if first:
        remove_path(os.path.join(path, first))
    remove_path(path)
    return num_bytes - _path_bytes(path)


def _path_bytes(path: str) -> int:
    """Return the bytes that removing a path frees: those of its files that have no other name."""
    freed = 0
    paths = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    for file in paths or [path]:
        with contextlib.suppress(OSError):
            facts = os.lstat(file)
            freed += facts.st_size if facts.st_nlink == 1 and not os.path.isdir(file) else 0
    return freed


def _entries(root: str, folder: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(root, folder)))
    except OSError:
        return []


def _walk_files(folder: str) -> Iterator[os.stat_result]:
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(root, name))


def _modified(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _read_json(path: str) -> Entry:
    """Return the JSON object in a file; {} if there is none or it is damaged."""
    try:
        value = json.loads(read_bytes(path) or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
