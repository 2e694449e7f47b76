"""The content-addressable store of a host: a file is stored by the hash of its content, whole and verified or absent.

    WORKDIR/blobs/DIGEST           one file's content, read-only; its name is its blake2b
    WORKDIR/blobs/DIGEST.*.part    a partial upload; locked (flock) by its writer
    WORKDIR/trees/TREE/            a folder, built under another name and renamed

No sender writes into another's partial upload: if it is locked, the sender continues from a copy of it. A verified file
gets the modification time `SEALED_NS`, so that one written to since is detected without reading it, and not reused.
Python 3.8 or newer, Linux or macOS, standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import threading
import time
import uuid
from typing import Any, AnyStr, BinaryIO, Iterator  # noqa: UP035  python 3.8

from evener.node.remote.file_io import (
    BLOCK_BYTES,
    absolute_path,
    content_digest,
    create_file,
    file_digest,
    make_folder,
    open_own_file,
    open_regular_file,
    write_atomic,
)

SEALED_NS = 946684800 * 10**9  # 1 January 2000: no write gives a file this time
STALE_AGE_S = 24 * 3600  # a partial upload or half-built tree untouched for this long is removed
WRITE_TURN_TIMEOUT_S = 300
FOLDERS = ("blobs", "trees", "projects", "runs")  # of a WORKDIR
OWN_ENTRIES = frozenset((*FOLDERS, "venv", "setup.lock"))

_uploads: dict[str, _PartialUpload] = {}
_uploads_lock = threading.Lock()


class ContentError(Exception):
    """Content does not match its hash."""


def make_private_workdir(workdir: str) -> str:
    """Make the working directory and its folders, for their owner alone, whatever mode they had; return its path.

    A directory of another name that holds other things as well keeps its mode: others may need them.
    """
    root = absolute_path(workdir)
    for folder in (root, *(os.path.join(root, name) for name in FOLDERS)):
        make_folder(folder, mode=0o700)
    is_own = os.path.basename(root) == ".evener" or OWN_ENTRIES.issuperset(os.listdir(root))
    for folder in [root] * is_own + [os.path.join(root, name) for name in FOLDERS]:
        facts = os.stat(folder)
        if facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) != 0o700:
            os.chmod(folder, 0o700)
    return root


def find_missing_blobs(workdir: str, digests: dict[str, int], tree: str) -> dict[str, Any]:
    """Return whether the tree exists and, if not, the blobs it lacks: {digest: bytes left by an interrupted upload}."""
    root = make_private_workdir(workdir)
    path = os.path.join(root, "trees", tree)
    if _is_tree_intact(path):
        os.utime(path + ".json")  # when it was last used: prune.py keeps it
        return {"path": path, "missing": {}, "is_there": True, "free_bytes": None}
    blobs = os.path.join(root, "blobs")
    partial_bytes: dict[str, int] = {}
    for name in os.listdir(blobs):
        if name.endswith(".part"):
            digest, size = name.split(".")[0], _file_size(os.path.join(blobs, name))
            partial_bytes[digest] = max(partial_bytes.get(digest, 0), size)
    needed = {d: partial_bytes.get(d, 0) for d, size in digests.items() if not _has_blob(blobs, d, size)}
    return {"path": path, "missing": needed, "is_there": False, "free_bytes": shutil.disk_usage(blobs).free}


def put_small_blobs(workdir: str, blobs: list[tuple[str, int]], body: bytes = b"") -> None:
    """Store whole blobs, concatenated in `body`: [[digest, size], …]. ContentError if one does not match its digest."""
    folder = os.path.join(absolute_path(workdir), "blobs")
    position = 0
    for digest, size in blobs:
        content = body[position : position + size]
        position += size
        if content_digest(content) != digest:
            raise ContentError(digest)
        if _has_blob(folder, digest, size):
            continue
        temporary = os.path.join(folder, f"{digest}.{uuid.uuid4().hex}.part")
        with create_file(temporary) as file:
            file.write(content)
        _seal(temporary, 0o444)
        os.replace(temporary, os.path.join(folder, digest))


def open_upload(workdir: str, digest: str, size: int) -> dict[str, Any]:
    """Start or resume the upload of a large blob: {"part": its handle, "offset": the byte to resume from}."""
    folder = os.path.join(absolute_path(workdir), "blobs")
    names = [name for name in os.listdir(folder) if name.startswith(digest + ".") and name.endswith(".part")]
    names.sort(key=lambda name: -_file_size(os.path.join(folder, name)))
    for name in names:
        path = os.path.join(folder, name)
        try:
            file: BinaryIO = os.fdopen(open_own_file(path, os.O_RDWR), "r+b")  # stays open from call to call
        except OSError:
            continue
        if _try_lock(file) and _is_same_file(file, path):
            break
        file.close()
    else:
        path = os.path.join(folder, f"{digest}.{uuid.uuid4().hex}.part")
        file = create_file(path)
        _try_lock(file)
    if (
        names
        and path != os.path.join(folder, names[0])
        and _file_size(path) < _file_size(os.path.join(folder, names[0]))
    ):
        try:
            with open_regular_file(os.path.join(folder, names[0])) as longest:  # another sender's: reuse what it has
                file.truncate(0)
                shutil.copyfileobj(longest, file, BLOCK_BYTES)
        except OSError:
            pass  # it has become the blob meanwhile
    offset = min(file.seek(0, os.SEEK_END), size)
    file.truncate(offset)
    handle = uuid.uuid4().hex
    with _uploads_lock:
        _uploads[handle] = _PartialUpload(file, path, digest, size, offset)
    return {"part": handle, "offset": offset}


def write_upload(part: str, offset: int, body: bytes = b"") -> bool:
    """Write `body` at `offset`, after all bytes before it have arrived. False if another sender finished the blob."""
    with _uploads_lock:
        entry = _uploads[part]
    return entry.write(offset, body)


def finish_upload(part: str) -> bool:
    """Verify the upload and give it its final name. If the content is wrong, remove it and return False."""
    with _uploads_lock:
        entry = _uploads.pop(part)
    return entry.finish()


def abort_upload(part: str) -> None:
    """Abort the upload and keep what has arrived. Writers that wait for their turn raise OSError."""
    with _uploads_lock:
        entry = _uploads.pop(part, None)
    if entry is not None:
        entry.abort(OSError("the upload was aborted"))


class _PartialUpload:
    def __init__(self, file: BinaryIO, path: str, digest: str, size: int, offset: int) -> None:
        self.file, self.path, self.digest, self.size, self.offset = file, path, digest, size, offset
        self.folder = os.path.dirname(path)
        self.write_turn = threading.Condition()
        self.failure: BaseException | None = None

    def write(self, offset: int, body: bytes) -> bool:
        with self.write_turn:
            self.write_turn.wait_for(lambda: self.offset >= offset or self.failure is not None, WRITE_TURN_TIMEOUT_S)
            try:
                if self.failure is not None:
                    raise self.failure
                if self.offset != offset:
                    raise ValueError(f"bytes from {offset} where {self.offset} are there")
                self.file.seek(offset)
                self.file.write(body)
                self.file.flush()
                self.offset += len(body)
            except Exception as error:
                self.abort(error)
                raise
            self.write_turn.notify_all()
        return not _has_blob(self.folder, self.digest, self.size)

    def abort(self, failure: BaseException) -> None:
        with self.write_turn:
            self.failure = self.failure or failure
            self.write_turn.notify_all()
            with contextlib.suppress(OSError):  # the failed write has been reported
                self.file.close()

    def finish(self) -> bool:
        with self.file as file:
            if _has_blob(self.folder, self.digest, self.size):
                os.unlink(self.path)
                return True
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file_digest(file) != self.digest:
                os.unlink(self.path)
                return False
            _seal(self.path, 0o444)
            os.replace(self.path, os.path.join(self.folder, self.digest))
        return True


def build_tree(workdir: str, tree: str, linked: bool, body: bytes = b"") -> str:
    """Build a tree from blobs. `body` is JSON: {"files": [[path, digest, size, executable]], "links": [[path, to]]}.

    With `linked` its files are hard links to the blobs (data, wheels: large, only read), else copies, which are
    verified once more.
    """
    root = absolute_path(workdir)
    trees, blobs = os.path.join(root, "trees"), os.fsencode(os.path.join(root, "blobs"))
    path = os.path.join(trees, tree)
    for stale in list_stale_parts(root):
        with contextlib.suppress(OSError):
            remove_path(stale)
    if _is_tree_intact(path):
        return path
    if os.path.lexists(path):  # a program wrote into it; programs still running in it keep it
        os.rename(path, os.path.join(trees, f"changed-{tree}-{uuid.uuid4().hex}"))
    content = json.loads(body.decode())
    making = os.path.join(trees, "making-" + uuid.uuid4().hex)
    try:
        os.mkdir(making)
        _populate_tree(os.fsencode(making), blobs, content, linked)
        write_atomic(path + ".json", body)
        try:
            os.rename(making, path)
        except OSError:
            if not _is_tree_intact(path):
                raise  # else another sender built it first
    finally:
        remove_path(making)
    return path


def _populate_tree(target: bytes, blobs: bytes, content: dict[str, Any], linked: bool) -> None:
    made_folders = set()
    for name, digest, size, executable in content["files"]:
        target_path = os.path.join(target, checked_relative_path(name))
        if os.path.dirname(target_path) not in made_folders:
            os.makedirs(os.path.dirname(target_path), exist_ok=True)
            made_folders.add(os.path.dirname(target_path))
        blob = os.path.join(blobs, digest.encode())
        if linked and not executable:
            try:
                os.link(blob, target_path)
                continue
            except FileExistsError:
                raise
            except OSError:
                pass  # too many links, or a file system without them
        if size > BLOCK_BYTES or linked:
            shutil.copyfile(blob, target_path)
        else:
            with open_regular_file(blob) as source:
                blob_content = source.read()
            if content_digest(blob_content) != digest:
                os.unlink(blob)
                raise ContentError(name)
            with open(target_path, "xb") as file:  # x: on a case-insensitive disk two names may be one
                file.write(blob_content)
        _seal(target_path, 0o555 if executable else 0o444)
    for name, to in content["links"]:
        target_path = os.path.join(target, checked_relative_path(name))
        os.makedirs(os.path.dirname(target_path), exist_ok=True)
        os.symlink(_encode_path(to), target_path)


def discard_tree(workdir: str, tree: str) -> None:
    """Remove a tree that is no longer needed, and those of its blobs that no other tree links to."""
    root = absolute_path(workdir)
    path = os.path.join(root, "trees", tree)
    try:
        with open_regular_file(path + ".json") as file:
            digests = {digest for _, digest, _, _ in json.loads(file.read().decode())["files"]}
    except (OSError, ValueError):
        return
    os.unlink(path + ".json")
    remove_path(path)
    for digest in digests:
        blob = os.path.join(root, "blobs", digest)
        if os.path.exists(blob) and os.stat(blob).st_nlink == 1:
            os.unlink(blob)


def hash_files(path: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Hash these files of a folder, as far as they still exist: yields {path, digest, size, executable} of each."""
    for name in names:
        place = _place_in(path, name)
        if os.path.isfile(place) and not os.path.islink(place):
            with contextlib.suppress(FileNotFoundError), open_regular_file(place) as file:
                state = os.fstat(file.fileno())
                executable = bool(state.st_mode & 0o100)
                yield {"path": name, "digest": file_digest(file), "size": state.st_size, "executable": executable}


def read_range(path: str, name: str, offset: int, length: int) -> bytes:
    """Return bytes of a file in a folder."""
    with open_regular_file(_place_in(path, name)) as file:
        file.seek(offset)
        return file.read(length)


def _place_in(folder: str, name: str) -> bytes:
    return os.path.join(os.fsencode(absolute_path(folder)), checked_relative_path(name))


def _is_tree_intact(path: str) -> bool:
    """Return whether a tree exists with every file unmodified."""
    try:
        with open_regular_file(path + ".json") as file:
            content = json.loads(file.read().decode())
        root = os.fsencode(path)
        if not os.path.isdir(root):
            return False
        for name, _, size, executable in content["files"]:
            state = os.lstat(os.path.join(root, checked_relative_path(name)))
            if state.st_size != size or state.st_mtime_ns != SEALED_NS or bool(state.st_mode & 0o100) != executable:
                return False
        return all(
            os.readlink(os.path.join(root, checked_relative_path(name))) == _encode_path(to)
            for name, to in content["links"]
        )
    except (OSError, ValueError):
        return False


def _has_blob(folder: str, digest: str, size: int) -> bool:
    """Return whether a blob exists, unmodified since it was verified; remove a modified one."""
    path = os.path.join(folder, digest)
    try:
        state = os.lstat(path)
    except OSError:
        return False
    if state.st_size == size and state.st_mtime_ns == SEALED_NS:
        return True
    os.unlink(path)  # trees that link to it keep it, and `_is_tree_intact` detects the change
    return False


def list_stale_parts(root: str) -> list[str]:
    """Return the partial uploads and half-built trees that interrupted senders left in a WORKDIR long ago."""
    stale = []
    for folder, prefix, suffix in (("trees", "making-", ""), ("blobs", "", ".part")):
        with contextlib.suppress(OSError):
            for name in os.listdir(os.path.join(root, folder)):
                path = os.path.join(root, folder, name)
                is_part = name.startswith(prefix) and name.endswith(suffix)
                if is_part and time.time() - os.lstat(path).st_mtime > STALE_AGE_S:
                    stale.append(path)
    return stale


def remove_path(place: str | os.PathLike[str]) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place, ignore_errors=True)
    elif os.path.lexists(place):
        os.unlink(place)


def _seal(path: AnyStr, mode: int) -> None:
    os.chmod(path, mode)
    os.utime(path, ns=(SEALED_NS, SEALED_NS))


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        return False
    return True


def _is_same_file(file: BinaryIO, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def checked_relative_path(name: str) -> bytes:
    """Return a relative path as bytes; ValueError if it leads outside its folder. No other path is written or read."""
    parts = _encode_path(name).split(b"/")
    if any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
        raise ValueError(f"not a path inside a folder: {name!r}")
    return b"/".join(parts)


def _encode_path(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
