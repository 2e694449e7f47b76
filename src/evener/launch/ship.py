"""How do code and data travel? By the hash of their content: what a host has already is not sent to it again.

    tree = describe("project")                        # or describe_data("data/verbs"), or pack({"a.whl": path})
    arrived = send(sessions, fleet, tree)             # to all hosts at once
    arrived["attic"].path                             # /home/me/.evener/trees/3f…: complete, verified, read-only
    fetch(sessions["attic"], "~/.evener/runs/x/checkpoints/step-000100", "step-000100")

`hosts/remote/files.py` is the other half. A copy that was interrupted goes on at the byte where it stopped; a file has
its name only after its hash was found right. Files of a tree are read-only, and one that a program changed all the same
(root may) is found by its time, so the next `send` makes the tree anew. Its folders can be written to: Python puts its
`__pycache__` there. Code is copied into its tree; data and wheels are hard links to what was sent, and lie there once.
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

from evener.core.errors import HostError, UsageError
from evener.core.files import sync
from evener.core.fleet import Fleet
from evener.core.units import size
from evener.hosts.session import RemoteError, Session, Sessions, for_each
from evener.launch.tree import DigestCache, File, Tree

CHUNK_BYTES = 1 << 20
WINDOW = 4  # requests on their way at once: a link with a long round trip is kept full
SPARE_BYTES = 100_000_000  # left free on a host's disk
WORK_S = 600.0  # the longest that a host may hash or copy without a word

Progress = Callable[[str, int, int], None]  # host, bytes done, bytes in all

_files: Any = importlib.import_module("evener.hosts.remote.files")  # untyped: it runs on python 3.8 too


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """What came of sending a tree to one host."""

    path: str  # absolute, on that host
    sent_bytes: int  # 0: it had everything
    resumed_bytes: int = 0  # that an interrupted copy had left there


def send(sessions: Sessions, fleet: Fleet, tree: Tree, progress: Progress | None = None) -> dict[str, Arrived]:
    """The tree on every host of `sessions`, all at once; the first HostError is raised after all have ended."""
    return for_each(sessions, lambda name: send_to(sessions[name], fleet.hosts[name].workdir, tree, progress))


def send_to(session: Session, workdir: str, tree: Tree, progress: Progress | None = None) -> Arrived:
    """The tree on one host.

    Raises:
        HostError: disk.full; files.changed when a file here changed meanwhile; files.send; or the connection was lost.
    """
    sender = _Sender(session, workdir, tree, progress)
    for attempt in (1, 2):
        try:
            return sender.send()
        except RemoteError as error:
            if error.kind in ("FileNotFoundError", "ContentError") and attempt == 1:
                continue  # a blob was found to be damaged only when the tree was made of it
            raise _host_error(session, workdir, error) from error
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from error
    raise AssertionError


def fetch(
    session: Session,
    path: str,
    destination: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    surveyed: list[dict[str, Any]] | None = None,
    pause: Callable[[float], None] | None = None,
) -> Arrived:
    """A file or a folder of a host at `destination`, which must not be there yet.

    It appears whole or not at all. What an interrupted call had fetched lies in `.NAME.arriving`, and is not fetched
    again. `surveyed` is what the folder is known to hold. With `pause` the link is left to others: one small piece
    comes after the other, and it is called with the seconds that each took.
    """
    target = Path(destination)
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target}: is there already", hint="name another place, or remove it")
    store = target.parent / f".{target.name}.arriving"
    try:
        if surveyed is None:
            surveyed = list(session.stream("files", "survey", path=path, timeout_s=WORK_S))
        for entry in surveyed:
            _check_entry(session, path, entry)
        (store / "blobs").mkdir(parents=True, exist_ok=True)
        fetcher = _Fetcher(session, path, store, progress, pause)
        fetched_bytes, resumed_bytes = fetcher.fetch([entry for entry in surveyed if "digest" in entry])
        _assemble(surveyed, store, target)
    except RemoteError as error:
        if error.kind == "FileNotFoundError":
            raise HostError(
                f"{session.name}: {path}: no such file or folder there", check="files.gone", host=session.name,
                hint="look there: it was removed, or never written",
            ) from error  # fmt: skip
        raise _host_error(session, path, error) from error
    except OSError as error:
        raise UsageError(f"{error.filename or target}: {error.strerror or error}") from error
    return Arrived(path=str(target), sent_bytes=fetched_bytes, resumed_bytes=resumed_bytes)


class _Sender:
    """One tree on its way to one host."""

    def __init__(self, session: Session, workdir: str, tree: Tree, progress: Progress | None) -> None:
        self._session, self._workdir, self._tree = session, workdir, tree
        self._by_digest = {file.digest: file for file in tree.files.values()}
        self._meter = _Meter(session.name, progress)
        self._resumed = 0

    def send(self) -> Arrived:
        sizes = {digest: file.size for digest, file in self._by_digest.items()}
        state = self._call("missing", digests=sizes, tree=self._tree.digest)
        if not state["is_there"]:
            files = [self._by_digest[digest] for digest in state["missing"]]
            self._check_room(state, files)
            self._meter.expect(sum(file.size for file in files))
            self._send_small([file for file in files if file.size <= CHUNK_BYTES])
            for file in files:
                if file.size > CHUNK_BYTES:
                    self._send_large(file)
            self._call("lay", tree=self._tree.digest, linked=self._tree.linked, body=self._tree.body)
        return Arrived(path=state["path"], sent_bytes=self._meter.done - self._resumed, resumed_bytes=self._resumed)

    def _call(self, function: str, *, body: bytes = b"", **args: Any) -> Any:
        return self._session.call("files", function, body=body, timeout_s=WORK_S, workdir=self._workdir, **args)

    def _check_room(self, state: dict[str, Any], files: list[File]) -> None:
        needed = sum(file.size - min(file.size, state["missing"][file.digest]) for file in files)
        needed += 0 if self._tree.linked else self._tree.size
        if needed + SPARE_BYTES > state["free_bytes"]:
            raise HostError(
                f"{self._session.name}: its disk is full: {size(needed)} to store in {self._workdir}, "
                f"{size(state['free_bytes'])} free",
                check="disk.full",
                host=self._session.name,
                hint=f'make room there, or name another disk: [hosts.{self._session.name}] workdir = "…"',
            )

    def _send_small(self, files: list[File]) -> None:
        def put(pack: list[tuple[File, bytes]]) -> None:
            blobs = [(file.digest, len(content)) for file, content in pack]
            try:
                self._call("put_small", blobs=blobs, body=b"".join(content for _, content in pack))
            except RemoteError as error:
                if error.kind != "ContentError":
                    raise
                changed = next((file for file, _ in pack if file.digest == error.message), pack[0][0])
                raise self._changed(changed) from error
            self._meter.add(sum(len(content) for _, content in pack))

        _pipelined(_packs(files), put)

    def _send_large(self, file: File) -> None:
        """In chunks, from where an earlier copy stopped; once more from the start if what it left was bad."""
        resumed = True
        while resumed:
            begun = self._call("open_part", digest=file.digest, size=file.size)
            part, offset = begun["part"], begun["offset"]
            resumed = offset > 0
            self._resumed += offset
            self._meter.add(offset)
            there = threading.Event()

            def write(chunk: tuple[int, bytes], part: str = part, there: threading.Event = there) -> None:
                at, content = chunk
                if self._session.call("files", "write_part", part=part, offset=at, body=content, timeout_s=WORK_S):
                    self._meter.add(len(content))
                else:
                    there.set()

            try:
                _pipelined(_chunks(file, offset, there), write)
            except RemoteError:
                self._session.call("files", "drop_part", part=part)
                raise
            if self._session.call("files", "close_part", part=part, timeout_s=WORK_S):
                return
            self._meter.add(-file.size)
            self._resumed -= offset
        raise self._changed(file)

    def _changed(self, file: File) -> HostError:
        DigestCache.forget(file.source)
        return HostError(
            f"{file.source} changed while it was sent to {self._session.name}",
            check="files.changed",
            host=self._session.name,
            hint="run it again when nobody writes to the file",
        )


class _Fetcher:
    """Files of a host on their way here, into a store as the hosts have it."""

    def __init__(self, session: Session, path: str, store: Path, progress: Progress | None,
                 pause: Callable[[float], None] | None) -> None:  # fmt: skip
        self._session, self._path, self._store, self._pause = session, path, store, pause
        self._piece = CHUNK_BYTES if pause is None else CHUNK_BYTES // 4
        self._meter = _Meter(session.name, progress)

    def fetch(self, entries: list[dict[str, Any]]) -> tuple[int, int]:
        """Bytes that crossed the link, and that were here of interrupted copies."""
        wanted = {entry["digest"]: entry for entry in entries}
        sizes = {digest: entry["size"] for digest, entry in wanted.items()}
        there = _files.missing(str(self._store), sizes, "none")
        self._meter.expect(sum(wanted[digest]["size"] for digest in there["missing"]))
        resumed = sum(self._fetch_one(wanted[digest]) for digest in there["missing"])
        return self._meter.done - resumed, resumed

    def _fetch_one(self, entry: dict[str, Any]) -> int:
        """Bytes that were here already."""
        resumed = True
        while resumed:
            begun = _files.open_part(str(self._store), entry["digest"], entry["size"])
            part, offset = begun["part"], begun["offset"]
            resumed = offset > 0
            self._meter.add(offset)

            failed: list[BaseException] = []

            def read(start: int, part: str = part, failed: list[BaseException] = failed) -> None:
                length, began = min(self._piece, entry["size"] - start), time.monotonic()
                try:
                    content = self._session.call(
                        "files", "read", path=self._path, name=entry["path"], offset=start, length=length,
                        timeout_s=WORK_S,
                    )  # fmt: skip
                    _files.write_part(part, start, content or b"")
                    if self._pause is not None:
                        self._pause(time.monotonic() - began)
                except BaseException as error:
                    failed.append(error)
                    _files.drop_part(part, error)  # so that no later chunk waits for this one
                    raise failed[0] from None  # the first: others only found the part gone
                self._meter.add(len(content or b""))

            _pipelined(range(offset, entry["size"], self._piece), read, WINDOW if self._pause is None else 1)
            if _files.close_part(part):
                return int(offset)
            self._meter.add(-entry["size"])
        raise HostError(
            f"{self._session.name}: {self._path}/{entry['path']} changed while it was fetched",
            check="files.changed",
            host=self._session.name,
            hint="fetch it again when nobody writes to it",
        )


class _Meter:
    """Bytes done of bytes expected; safe from several threads."""

    def __init__(self, host: str, progress: Progress | None) -> None:
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
    """What a host tells of a file becomes names here: HostError where it would lead elsewhere."""
    try:
        if entry["path"]:
            _files.inside(entry["path"])
        is_good = "to" in entry or (re.fullmatch(r"[0-9a-f]{64}", entry["digest"]) and entry["size"] >= 0)
    except (LookupError, TypeError, ValueError):
        is_good = False
    if not is_good:
        raise HostError(
            f"{session.name}: {path}: what it tells of its files cannot be: {str(entry)[:200]}", check="files.odd",
            host=session.name, hint="is that host what it seems to be?",
        )  # fmt: skip


def _assemble(surveyed: list[dict[str, Any]], store: Path, target: Path) -> None:
    """Make `target` of the store's blobs in one step, and remove the store."""
    making = store / "making"
    _files.remove(making)
    if not surveyed or surveyed[0]["path"]:  # a folder
        making.mkdir()
    links = [entry for entry in surveyed if "to" in entry]
    for entry in surveyed:
        if entry not in links:
            place = _place(making, entry["path"])
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store / "blobs" / entry["digest"], place)
            place.chmod(0o755 if entry["executable"] else 0o644)
            sync(place)
    for entry in links:  # last: nothing is ever written through one
        place = _place(making, entry["path"])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(entry["to"])
    making.rename(target)
    sync(target.parent)
    shutil.rmtree(store)


def _place(folder: Path, name: str) -> Path:
    """A path of the host's, inside `folder` or refused."""
    return Path(os.fsdecode(os.path.join(os.fsencode(folder), _files.inside(name)))) if name else folder


def _pipelined(items: Iterable[Any], work: Callable[[Any], None], window: int = WINDOW) -> None:
    """Call work(item) for each, `window` at a time; items are made when they are needed."""
    with ThreadPoolExecutor(max_workers=window) as pool:
        going: deque[Future[None]] = deque()
        for item in items:
            if len(going) == window:
                going.popleft().result()
            going.append(pool.submit(work, item))
        while going:
            going.popleft().result()


def _packs(files: list[File]) -> Iterator[list[tuple[File, bytes]]]:
    """Small files together, up to one chunk."""
    packed: list[tuple[File, bytes]] = []
    filled = 0
    for file in files:
        content = file.source.read_bytes()
        if packed and filled + len(content) > CHUNK_BYTES:
            yield packed
            packed, filled = [], 0
        packed.append((file, content))
        filled += len(content)
    if packed:
        yield packed


def _chunks(file: File, offset: int, there: threading.Event) -> Iterator[tuple[int, bytes]]:
    with file.source.open("rb") as source:
        source.seek(offset)
        while offset < file.size and not there.is_set():
            content = source.read(min(CHUNK_BYTES, file.size - offset))
            if not content:
                return  # it became shorter: the hash will tell
            yield offset, content
            offset += len(content)


def _host_error(session: Session, where: str, error: RemoteError) -> HostError:
    if "[Errno 28]" in error.message or "[Errno 122]" in error.message:
        return HostError(
            f"{session.name}: its disk is full: {where}",
            check="disk.full",
            host=session.name,
            hint="make room there and run it again: what has arrived is kept",
        )
    return HostError(
        f"{session.name}: {where}: {error.message}",
        check="files.send",
        host=session.name,
        hint=f'can {session.name}\'s user write there? [hosts.{session.name}] workdir = "…" names another place',
        output=error.traceback,
    )
