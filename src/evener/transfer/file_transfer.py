"""Transfer code and data by the hash of their content: a host receives only the blobs that it lacks.

    tree = describe_project("project")                # or describe_data("data/verbs"), describe_files({"a.whl": path})
    results = send_to_hosts(sessions, fleet, tree)    # to all hosts concurrently
    results["attic"].path                             # /home/me/.evener/trees/3f…: complete, verified, read-only

    fetcher = FileFetcher(sessions["attic"], "~/.evener/runs/x/out", home / "out", home / ".out.arriving")
    paths = [fetcher.fetch(file) for file in fetcher.missing(entries)]

`node/remote/content_store.py` is the host's side. An interrupted copy resumes at the byte where it stopped; a file
gets its name only after its hash is verified. Files of a tree are read-only; one that a program changed all the same
(root may) is detected by its time, so the next `send_to_hosts` builds the tree again. Its folders are writable: Python
writes its `__pycache__` there. Code is copied into its tree; data and wheels are hard links to the blobs, stored once.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import HostError, UsageError
from evener.core.base.file_io import append_bytes, file_digest, fsync_path, make_folder, open_for_append, rename_durably
from evener.core.base.units import format_bytes
from evener.core.cluster.fleet_file import Fleet
from evener.node.remote import content_store
from evener.ssh.session import RemoteError, Session, Sessions, parallel_map
from evener.transfer.file_tree import DigestCache, FileTree, TreeFile

CHUNK_BYTES = 1 << 20
WINDOW = 4  # requests in flight, to keep a link with a long round trip full
RESERVED_DISK_BYTES = 100_000_000  # kept free on a host's disk
REMOTE_WORK_TIMEOUT_S = 600.0  # a host may hash or copy this long without output

T = TypeVar("T")
R = TypeVar("R")
TransferProgress = Callable[[str, int, int], None]  # host, bytes done, bytes in total


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of sending a tree to a host."""

    path: str  # absolute, on the host
    sent_bytes: int  # 0: it had everything
    resumed_bytes: int = 0  # kept from an interrupted copy


def send_to_hosts(sessions: Sessions, fleet: Fleet, tree: FileTree) -> dict[str, TransferResult]:
    """Send the tree to all hosts of `sessions` concurrently; raise the first HostError after all have ended."""
    return parallel_map(sessions, lambda name: send_to_host(sessions[name], fleet.hosts[name].workdir, tree))


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


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a folder on a host. The host's entry is validated, as it determines names here."""

    path: str  # relative to the folder
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # blake2b of its content
    size: Annotated[int, msgspec.Meta(ge=0)]
    executable: bool


class FileFetcher:
    """Fetches files of a host's folder `source` to the folder `target` here. Not for two callers at a time.

    A file gets its name only when it is complete and verified. An interrupted call leaves what arrived in the folder
    `partials`, and the next one resumes. With `throttle`, which is called with the seconds that each chunk took, small
    chunks are fetched one at a time, so that other traffic goes first.
    """

    def __init__(self, session: Session, source: str, target: Path, partials: Path,
                 throttle: Callable[[float], None] | None = None) -> None:  # fmt: skip
        self._session, self._source, self._target, self._partials = session, source, target, partials
        self._throttle = throttle
        self._chunk_bytes, self._window = (CHUNK_BYTES, WINDOW) if throttle is None else (CHUNK_BYTES // 4, 1)

    def missing(self, entries: Sequence[Any]) -> list[RemoteFile]:
        """Return the files of the host's entries that are not here with the same content.

        HostError (files.odd) if an entry is invalid or its path leads out of the folder.
        """
        missing = []
        for entry in entries:
            try:
                file = from_builtins(entry, RemoteFile)
                path = self._local_path(file)
            except (ValueError, msgspec.ValidationError):
                raise HostError(
                    f"{self._session.name}: {self._source}: it sent an invalid file entry: {str(entry)[:200]}",
                    check="files.odd", host=self._session.name, hint="check that it is the host you expect",
                ) from None  # fmt: skip
            if not (path.is_file() and path.stat().st_size == file.size and file_digest(path) == file.digest):
                missing.append(file)
        return missing

    def fetch(self, file: RemoteFile) -> Path:
        """Fetch a file, replace the one of its name here, and return its path.

        HostError: files.gone; files.changed if a program writes to it; or the connection was lost. OSError if this
        machine cannot store it.
        """
        partial, path = self._partials / file.digest, self._local_path(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        arrived_bytes = min(partial.stat().st_size, file.size) if partial.exists() else 0
        try:
            for offset in dict.fromkeys((arrived_bytes, 0)):  # from the start if the earlier part was damaged
                self._fetch_from(offset, file, partial)
                if is_complete := file_digest(partial) == file.digest:
                    break
        except RemoteError as error:
            if error.kind == "FileNotFoundError":
                raise HostError(
                    f"{self._session.name}: {self._source}/{file.path}: no such file there", check="files.gone",
                    host=self._session.name, hint="it was removed, or never written",
                ) from error  # fmt: skip
            raise _to_transfer_error(self._session, self._source, error) from error
        if not is_complete:
            partial.unlink()
            raise HostError(
                f"{self._session.name}: {self._source}/{file.path} changed while it was fetched",
                check="files.changed", host=self._session.name, hint="fetch it again when no program writes to it",
            )  # fmt: skip
        partial.chmod(0o755 if file.executable else 0o644)
        fsync_path(partial)
        make_folder(path.parent)
        rename_durably(partial, path)
        return path

    def _fetch_from(self, offset: int, file: RemoteFile, partial: Path) -> None:
        """Append what lies beyond `offset` to the partial file."""

        def read(start: int) -> bytes:
            content = self._session.call(
                "content_store", "read_range", path=self._source, name=file.path, offset=start,
                length=min(self._chunk_bytes, file.size - start), timeout_s=REMOTE_WORK_TIMEOUT_S,
            )  # fmt: skip
            return content or b""

        with open_for_append(partial) as target:
            target.truncate(offset)
        began = time.monotonic()
        for content in _pipelined(read, range(offset, file.size, self._chunk_bytes), self._window):
            append_bytes(partial, content)
            if self._throttle is not None:
                self._throttle(time.monotonic() - began)
                began = time.monotonic()

    def _local_path(self, file: RemoteFile) -> Path:
        """Return where a file is written here. ValueError if that is outside the target folder."""
        path = self._target / os.fsdecode(content_store.checked_relative_path(file.path))
        if not path.parent.resolve().is_relative_to(self._target.resolve()):  # through a link
            raise ValueError(f"{path} leads out of {self._target}")
        return path


class _TreeSender:
    """The transfer of one tree to one host."""

    def __init__(self, session: Session, workdir: str, tree: FileTree, progress: TransferProgress | None) -> None:
        self._session, self._workdir, self._tree, self._progress = session, workdir, tree, progress
        self._by_digest = {file.digest: file for file in tree.files.values()}
        self._done_bytes, self._total_bytes, self._resumed_bytes = 0, 0, 0

    def send(self) -> TransferResult:
        sizes = {digest: file.size for digest, file in self._by_digest.items()}
        state = self._call("find_missing_blobs", workdir=self._workdir, digests=sizes, tree=self._tree.digest)
        if not state["is_there"]:
            files = [self._by_digest[digest] for digest in state["missing"]]
            self._check_room(state, files)
            self._total_bytes = self._done_bytes + sum(file.size for file in files)
            for sent_bytes in _pipelined(self._put, _batches([file for file in files if file.size <= CHUNK_BYTES])):
                self._count(sent_bytes)
            for file in files:
                if file.size > CHUNK_BYTES:
                    self._send_large(file)
            self._call(
                "build_tree", workdir=self._workdir, tree=self._tree.digest, linked=self._tree.is_hard_linked,
                body=self._tree.canonical_json,
            )  # fmt: skip
        return TransferResult(
            path=state["path"], sent_bytes=self._done_bytes - self._resumed_bytes, resumed_bytes=self._resumed_bytes
        )

    def _call(self, function: str, *, body: bytes = b"", **args: Any) -> Any:
        return self._session.call("content_store", function, body=body, timeout_s=REMOTE_WORK_TIMEOUT_S, **args)

    def _count(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._session.name, self._done_bytes, max(self._done_bytes, self._total_bytes))

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

    def _put(self, batch: list[tuple[TreeFile, bytes]]) -> int:
        """Send small files in one request; return their bytes."""
        blobs = [(file.digest, len(content)) for file, content in batch]
        body = b"".join(content for _, content in batch)
        try:
            self._call("put_small_blobs", workdir=self._workdir, blobs=blobs, body=body)
        except RemoteError as error:
            if error.kind != "ContentError":
                raise
            changed = next((file for file, _ in batch if file.digest == error.message), batch[0][0])
            raise self._changed(changed) from error
        return len(body)

    def _send_large(self, file: TreeFile) -> None:
        """Send a file in chunks from where an earlier copy stopped; start over if the earlier part was damaged."""
        opened = self._call("open_upload", workdir=self._workdir, digest=file.digest, size=file.size)
        part, offset = opened["part"], opened["offset"]
        self._resumed_bytes += offset
        self._count(offset)

        def write(chunk: tuple[int, bytes]) -> tuple[int, bool]:
            at, content = chunk
            return len(content), self._call("write_upload", part=part, offset=at, body=content)

        try:
            for sent_bytes, is_wanted in _pipelined(write, _chunks(file, offset)):
                if not is_wanted:
                    break  # another sender has finished the file
                self._count(sent_bytes)
        except RemoteError:
            self._call("abort_upload", part=part)
            raise
        if self._call("finish_upload", part=part):
            return
        if not offset:
            raise self._changed(file)
        self._resumed_bytes -= offset
        self._count(-file.size)
        self._send_large(file)

    def _changed(self, file: TreeFile) -> HostError:
        DigestCache.invalidate(file.source)
        return HostError(
            f"{file.source} changed while it was sent to {self._session.name}",
            check="files.changed",
            host=self._session.name,
            hint="run it again when no program writes to the file",
        )


def _pipelined(work: Callable[[T], R], items: Iterable[T], window: int = WINDOW) -> Iterator[R]:
    """Yield work(item) for each item, in order; `window` calls run at a time, and items are consumed lazily."""
    with ThreadPoolExecutor(max_workers=window) as pool:
        running: deque[Future[R]] = deque()
        for item in items:
            if len(running) == window:
                yield running.popleft().result()
            running.append(pool.submit(work, item))
        while running:
            yield running.popleft().result()


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


def _chunks(file: TreeFile, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, content) of each chunk from `offset`; fewer if the file became shorter, which its hash detects."""
    with file.source.open("rb") as source:
        source.seek(offset)
        while offset < file.size and (content := source.read(min(CHUNK_BYTES, file.size - offset))):
            yield offset, content
            offset += len(content)


def is_disk_full(text: str) -> bool:
    """Return whether an error of a host says that its disk or the user's quota is full."""
    return any(sign in text for sign in ("[Errno 28]", "[Errno 122]", "No space left on device"))


def _to_transfer_error(session: Session, where: str, error: RemoteError) -> HostError:
    if is_disk_full(error.message):
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
