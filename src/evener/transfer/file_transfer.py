"""Transfer code and data by the hash of their content: a host receives only the blobs that it lacks.

    tree = describe_project("project")                # or describe_data("data/verbs"), describe_files({"a.whl": path})
    results = send_to_hosts(sessions, fleet, tree)    # to all hosts concurrently
    results["attic"].path                             # /home/me/.evener/trees/3f…: complete, verified, read-only
    fetch(sessions["attic"], "~/.evener/runs/x/checkpoints/step-000100", "step-000100")

`node/remote/content_store.py` is the host's side. An interrupted copy resumes at the byte where it stopped; a file
gets its name only after its hash is verified. Files of a tree are read-only; one that a program changed all the same
(root may) is detected by its time, so the next `send_to_hosts` builds the tree again. Its folders are writable: Python
writes its `__pycache__` there. Code is copied into its tree; data and wheels are hard links to the blobs, stored once.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import HostError, UsageError
from evener.core.base.file_io import fsync_path
from evener.core.base.units import format_bytes
from evener.core.cluster.fleet_file import Fleet
from evener.ssh.session import RemoteError, Session, Sessions, parallel_map
from evener.transfer.file_tree import DigestCache, FileTree, TreeFile

CHUNK_BYTES = 1 << 20
WINDOW = 4  # requests in flight, to keep a link with a long round trip full
RESERVED_DISK_BYTES = 100_000_000  # kept free on a host's disk
REMOTE_WORK_TIMEOUT_S = 600.0  # a host may hash or copy this long without output

TransferProgress = Callable[[str, int, int], None]  # host, bytes done, bytes in total

_files: Any = importlib.import_module("evener.node.remote.content_store")  # untyped: it runs on python 3.8 too


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of sending a tree to a host, or of fetching from it."""

    path: str  # absolute, on the receiving machine
    sent_bytes: int  # 0: it had everything
    resumed_bytes: int = 0  # kept from an interrupted copy


def send_to_hosts(
    sessions: Sessions, fleet: Fleet, tree: FileTree, progress: TransferProgress | None = None
) -> dict[str, TransferResult]:
    """Send the tree to all hosts of `sessions` concurrently; raise the first HostError after all have ended."""
    return parallel_map(sessions, lambda name: send_to_host(sessions[name], fleet.hosts[name].workdir, tree, progress))


def send_to_host(
    session: Session, workdir: str, tree: FileTree, progress: TransferProgress | None = None
) -> TransferResult:
    """Send the tree to one host.

    Raises:
        HostError: disk.full; files.changed if a file here changed meanwhile; files.send; or the connection was lost.
    """
    sender = _TreeSender(session, workdir, tree, progress)
    for attempt in (1, 2):
        try:
            return sender.send()
        except RemoteError as error:
            if error.kind in ("FileNotFoundError", "ContentError") and attempt == 1:
                continue  # a damaged blob was detected only when the tree was built
            raise _to_transfer_error(session, workdir, error) from error
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from error
    raise AssertionError


def fetch(
    session: Session,
    path: str,
    destination: str | os.PathLike[str],
    progress: TransferProgress | None = None,
    *,
    listing: list[dict[str, Any]] | None = None,
    throttle: Callable[[float], None] | None = None,
) -> TransferResult:
    """Fetch a file or a folder of a host to `destination`, which must not exist.

    It appears completely or not at all. An interrupted call leaves its blobs in `.NAME.arriving`, and the next one
    resumes. `listing` holds the folder's entries, if known. With `throttle`, which is called with the seconds that
    each chunk took, small chunks are fetched one at a time, so that other traffic goes first.
    """
    target = Path(destination)
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target}: is there already", hint="choose another place, or remove it")
    store = target.parent / f".{target.name}.arriving"
    try:
        if listing is None:
            listing = list(session.stream("content_store", "hash_files", path=path, timeout_s=REMOTE_WORK_TIMEOUT_S))
        for entry in listing:
            _check_entry(session, path, entry)
        (store / "blobs").mkdir(parents=True, exist_ok=True)
        fetcher = _FileFetcher(session, path, store, progress, throttle)
        fetched_bytes, resumed_bytes = fetcher.fetch([entry for entry in listing if "digest" in entry])
        _assemble(listing, store, target)
    except RemoteError as error:
        if error.kind == "FileNotFoundError":
            raise HostError(
                f"{session.name}: {path}: no such file or folder there", check="files.gone", host=session.name,
                hint="it was removed, or never written",
            ) from error  # fmt: skip
        raise _to_transfer_error(session, path, error) from error
    except OSError as error:
        raise UsageError(f"{error.filename or target}: {error.strerror or error}") from error
    return TransferResult(path=str(target), sent_bytes=fetched_bytes, resumed_bytes=resumed_bytes)


class _TreeSender:
    """The transfer of one tree to one host."""

    def __init__(self, session: Session, workdir: str, tree: FileTree, progress: TransferProgress | None) -> None:
        self._session, self._workdir, self._tree = session, workdir, tree
        self._by_digest = {file.digest: file for file in tree.files.values()}
        self._meter = _TransferMeter(session.name, progress)
        self._resumed = 0

    def send(self) -> TransferResult:
        sizes = {digest: file.size for digest, file in self._by_digest.items()}
        state = self._call("find_missing_blobs", digests=sizes, tree=self._tree.digest)
        if not state["is_there"]:
            files = [self._by_digest[digest] for digest in state["missing"]]
            self._check_room(state, files)
            self._meter.expect(sum(file.size for file in files))
            self._send_small([file for file in files if file.size <= CHUNK_BYTES])
            for file in files:
                if file.size > CHUNK_BYTES:
                    self._send_large(file)
            self._call(
                "build_tree", tree=self._tree.digest, linked=self._tree.is_hard_linked, body=self._tree.canonical_json
            )
        return TransferResult(
            path=state["path"], sent_bytes=self._meter.done - self._resumed, resumed_bytes=self._resumed
        )

    def _call(self, function: str, *, body: bytes = b"", **args: Any) -> Any:
        return self._session.call(
            "content_store", function, body=body, timeout_s=REMOTE_WORK_TIMEOUT_S, workdir=self._workdir, **args
        )

    def _check_room(self, state: dict[str, Any], files: list[TreeFile]) -> None:
        needed = sum(file.size - min(file.size, state["missing"][file.digest]) for file in files)
        needed += 0 if self._tree.is_hard_linked else self._tree.size
        if needed + RESERVED_DISK_BYTES > state["free_bytes"]:
            raise HostError(
                f"{self._session.name}: its disk is full: {format_bytes(needed)} to store in {self._workdir}, "
                f"{format_bytes(state['free_bytes'])} free",
                check="disk.full",
                host=self._session.name,
                hint=f'make room there, or name another disk: [hosts.{self._session.name}] workdir = "…"',
            )

    def _send_small(self, files: list[TreeFile]) -> None:
        def put(batch: list[tuple[TreeFile, bytes]]) -> None:
            blobs = [(file.digest, len(content)) for file, content in batch]
            try:
                self._call("put_small_blobs", blobs=blobs, body=b"".join(content for _, content in batch))
            except RemoteError as error:
                if error.kind != "ContentError":
                    raise
                changed = next((file for file, _ in batch if file.digest == error.message), batch[0][0])
                raise self._changed(changed) from error
            self._meter.add(sum(len(content) for _, content in batch))

        _run_pipelined(_batches(files), put)

    def _send_large(self, file: TreeFile) -> None:
        """Send a file in chunks from where an earlier copy stopped; start over if the earlier part was damaged."""
        resumed = True
        while resumed:
            opened = self._call("open_upload", digest=file.digest, size=file.size)
            part, offset = opened["part"], opened["offset"]
            resumed = offset > 0
            self._resumed += offset
            self._meter.add(offset)
            is_stored = threading.Event()

            def write(chunk: tuple[int, bytes], part: str = part, is_stored: threading.Event = is_stored) -> None:
                at, content = chunk
                if self._session.call(
                    "content_store", "write_upload", part=part, offset=at, body=content, timeout_s=REMOTE_WORK_TIMEOUT_S
                ):
                    self._meter.add(len(content))
                else:
                    is_stored.set()

            try:
                _run_pipelined(_chunks(file, offset, is_stored), write)
            except RemoteError:
                self._session.call("content_store", "abort_upload", part=part)
                raise
            if self._session.call("content_store", "finish_upload", part=part, timeout_s=REMOTE_WORK_TIMEOUT_S):
                return
            self._meter.add(-file.size)
            self._resumed -= offset
        raise self._changed(file)

    def _changed(self, file: TreeFile) -> HostError:
        DigestCache.invalidate(file.source)
        return HostError(
            f"{file.source} changed while it was sent to {self._session.name}",
            check="files.changed",
            host=self._session.name,
            hint="run it again when no program writes to the file",
        )


class _FileFetcher:
    """The transfer of a host's files to a blob store here."""

    def __init__(self, session: Session, path: str, store: Path, progress: TransferProgress | None,
                 pause: Callable[[float], None] | None) -> None:  # fmt: skip
        self._session, self._path, self._store, self._throttle = session, path, store, pause
        self._chunk_bytes = CHUNK_BYTES if pause is None else CHUNK_BYTES // 4
        self._meter = _TransferMeter(session.name, progress)

    def fetch(self, entries: list[dict[str, Any]]) -> tuple[int, int]:
        """Fetch the files; return (bytes received, bytes kept from interrupted copies)."""
        wanted = {entry["digest"]: entry for entry in entries}
        sizes = {digest: entry["size"] for digest, entry in wanted.items()}
        stored = _files.find_missing_blobs(str(self._store), sizes, "none")
        self._meter.expect(sum(wanted[digest]["size"] for digest in stored["missing"]))
        resumed = sum(self._fetch_one(wanted[digest]) for digest in stored["missing"])
        return self._meter.done - resumed, resumed

    def _fetch_one(self, entry: dict[str, Any]) -> int:
        """Fetch one file; return the bytes kept from an interrupted copy."""
        resumed = True
        while resumed:
            opened = _files.open_upload(str(self._store), entry["digest"], entry["size"])
            part, offset = opened["part"], opened["offset"]
            resumed = offset > 0
            self._meter.add(offset)

            failed: list[BaseException] = []

            def read(start: int, part: str = part, failed: list[BaseException] = failed) -> None:
                length, started = min(self._chunk_bytes, entry["size"] - start), time.monotonic()
                try:
                    content = self._session.call(
                        "content_store", "read_range", path=self._path, name=entry["path"], offset=start, length=length,
                        timeout_s=REMOTE_WORK_TIMEOUT_S,
                    )  # fmt: skip
                    _files.write_upload(part, start, content or b"")
                    if self._throttle is not None:
                        self._throttle(time.monotonic() - started)
                except BaseException as error:
                    failed.append(error)
                    _files.abort_upload(part, error)  # so that later chunks do not wait for this one
                    raise failed[0] from None  # the first error: later ones only report the part missing
                self._meter.add(len(content or b""))

            _run_pipelined(
                range(offset, entry["size"], self._chunk_bytes), read, WINDOW if self._throttle is None else 1
            )
            if _files.finish_upload(part):
                return int(offset)
            self._meter.add(-entry["size"])
        raise HostError(
            f"{self._session.name}: {self._path}/{entry['path']} changed while it was fetched",
            check="files.changed",
            host=self._session.name,
            hint="fetch it again when no program writes to it",
        )


class _TransferMeter:
    """Counts bytes done of bytes expected; thread-safe."""

    def __init__(self, host: str, progress: TransferProgress | None) -> None:
        self._host, self._progress, self._lock = host, progress, threading.Lock()
        self.done, self._total = 0, 0

    def expect(self, num_bytes: int) -> None:
        self._total = self.done + num_bytes

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            if self._progress is not None:
                self._progress(self._host, self.done, max(self.done, self._total))


def _check_entry(session: Session, path: str, entry: dict[str, Any]) -> None:
    """Validate an entry received from a host, as it determines names here. HostError if its path leads elsewhere."""
    try:
        if entry["path"]:
            _files.checked_relative_path(entry["path"])
        is_good = "to" in entry or (re.fullmatch(r"[0-9a-f]{64}", entry["digest"]) and entry["size"] >= 0)
    except (LookupError, TypeError, ValueError):
        is_good = False
    if not is_good:
        raise HostError(
            f"{session.name}: {path}: it sent an invalid file entry: {str(entry)[:200]}", check="files.odd",
            host=session.name, hint="check that it is the host you expect",
        )  # fmt: skip


def _assemble(listing: list[dict[str, Any]], store: Path, target: Path) -> None:
    """Build `target` from the store's blobs, rename it into place, and remove the store."""
    making = store / "making"
    _files.remove_path(making)
    if not listing or listing[0]["path"]:  # a folder
        making.mkdir()
    links = [entry for entry in listing if "to" in entry]
    for entry in listing:
        if entry not in links:
            path = _path_inside(making, entry["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store / "blobs" / entry["digest"], path)
            path.chmod(0o755 if entry["executable"] else 0o644)
            fsync_path(path)
    for entry in links:  # last, so that nothing is written through a link
        path = _path_inside(making, entry["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(entry["to"])
    making.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(store)


def _path_inside(folder: Path, name: str) -> Path:
    """Return a host's path below `folder`. ValueError if it leads out."""
    return Path(os.fsdecode(os.path.join(os.fsencode(folder), _files.checked_relative_path(name)))) if name else folder


def _run_pipelined(items: Iterable[Any], work: Callable[[Any], None], window: int = WINDOW) -> None:
    """Call work(item) for each item, `window` at a time; items are consumed lazily."""
    with ThreadPoolExecutor(max_workers=window) as pool:
        running: deque[Future[None]] = deque()
        for item in items:
            if len(running) == window:
                running.popleft().result()
            running.append(pool.submit(work, item))
        while running:
            running.popleft().result()


def _batches(files: list[TreeFile]) -> Iterator[list[tuple[TreeFile, bytes]]]:
    """Yield batches of small files of up to one chunk."""
    batch: list[tuple[TreeFile, bytes]] = []
    batch_bytes = 0
    for file in files:
        content = file.source.read_bytes()
        if batch and batch_bytes + len(content) > CHUNK_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append((file, content))
        batch_bytes += len(content)
    if batch:
        yield batch


def _chunks(file: TreeFile, offset: int, is_stored: threading.Event) -> Iterator[tuple[int, bytes]]:
    with file.source.open("rb") as source:
        source.seek(offset)
        while offset < file.size and not is_stored.is_set():
            content = source.read(min(CHUNK_BYTES, file.size - offset))
            if not content:
                return  # it became shorter: the hash check detects it
            yield offset, content
            offset += len(content)


def _to_transfer_error(session: Session, where: str, error: RemoteError) -> HostError:
    if "[Errno 28]" in error.message or "[Errno 122]" in error.message:
        return HostError(
            f"{session.name}: its disk is full: {where}",
            check="disk.full",
            host=session.name,
            hint="make room there and run it again: the transferred part is kept",
        )
    return HostError(
        f"{session.name}: {where}: {error.message}",
        check="files.send",
        host=session.name,
        hint=f'can {session.name}\'s user write there? [hosts.{session.name}] workdir = "…" sets another place',
        output=error.traceback,
    )
