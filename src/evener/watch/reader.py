"""Read a run directory incrementally while it grows, each record once.

    reader = Reader(RunDir("runs/mine"))
    while reader.look(0.1):     # at most 0.1 s; True while records remain unread
        ...
    reader.curves, reader.manifest, reader.events

The curves of long runs are cached in RUN/watch.summary. The cache is optional: it is rebuilt if it is missing, damaged
or of another format, or if a record file that it covers was replaced since.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evener.core.decoding import from_json, from_msgpack, json_decoder
from evener.core.errors import EvenerError
from evener.core.files import open_file, read_file, write_atomic
from evener.core.plan import Plan, find_plan
from evener.core.rundir import Manifest, RunDir, event_of
from evener.core.step import StepRecord
from evener.core.stored import stored_lines
from evener.core.typical import Wall, step_p50_s
from evener.core.vitals import Vitals
from evener.watch.curves import MAX_RANKS, Curves, KeptCurves

T = TypeVar("T")

FORMAT = 1
KEPT = "watch.summary"
CHUNK_BYTES = 1 << 20
WORTH_KEEPING = 16 << 20  # bytes of records; reading them takes about 0.1 s
KEEP_EVERY_S = 60.0
WALLS_BYTES = 64 << 20  # of one rank's records, for the median of a run that is over: about 100,000 steps
LINE_BYTES = 1 << 16  # longer than any line of vitals

Identity = tuple[int, int, int]  # inode, size in bytes, mtime in ns


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """How far a file has been read."""

    inode: int
    offset: int  # after the last complete line


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of RUN/watch.summary."""

    format: int = FORMAT
    places: dict[int, Place]  # by rank
    curves: KeptCurves


class Reader:
    """The state of one run, from its files alone. It contacts no host and writes nothing that the run reads."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.manifest: Manifest | None = None  # None: missing or unreadable
        self.plan: Plan | None = None
        self.events: list[dict[str, Any]] = []  # by time
        self.vitals: dict[str, Vitals] = {}  # by host, the newest
        self.samples: dict[int, str] = {}  # text generated from checkpoints on request, by step
        self.states: dict[str, dict[str, Any]] = {}  # by host, the last state its supervisor wrote
        self.curves = Curves()
        self.version = 0  # grows with every change
        self.unread_bytes = 0  # of step records
        self._places: dict[int, Place] = {}
        self._half: dict[int, int] = {}  # by rank: the file size at which its last line was incomplete
        self._seen: dict[Path, Identity | None] = {}
        self._decoder = json_decoder(StepRecord)
        self._kept_at, self._unkept_bytes = time.monotonic(), 0
        self._typical: tuple[Any, float | None] = (None, None)  # (cache key, value) of `median_step_s`
        self._take_up()

    def look(self, budget_s: float = 0.1) -> bool:
        """Read the small files that changed, then step records for `budget_s`. Return whether records remain unread."""
        until = time.monotonic() + budget_s
        self._read_others()
        files = self._step_files()
        for rank, path in files.items():  # rank 0 first: its records alone complete the shared curves
            while time.monotonic() < until and self._read_chunk(rank, path):
                pass
        self.unread_bytes = sum(self._left(rank, path) for rank, path in files.items())
        if not self.unread_bytes and time.monotonic() - self._kept_at > KEEP_EVERY_S:
            self.keep()
        return self.unread_bytes > 0

    def keep(self) -> None:
        """Save the cache for the next reader if enough was read since the last time; ignore a full disk."""
        if self._unkept_bytes >= WORTH_KEEPING:
            cache = Kept(places=self._places, curves=self.curves.keep())
            with contextlib.suppress(OSError):
                write_atomic(self.rundir.path / KEPT, msgspec.msgpack.encode(cache), mode=0o600)
            self._unkept_bytes = 0
        self._kept_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Return whether the manifest says that the run has ended."""
        return self.manifest is not None and self.manifest.verdict != "running"

    def has_not_written(self) -> bool:
        """Return whether a checkpoint is newer than all samples."""
        with contextlib.suppress(OSError):
            return max(self.rundir.checkpoint_steps(), default=0) > max(self.samples, default=0)
        return False

    def spans_version(self) -> int:
        """Return a number that changes when the ranks have recorded more spans."""
        stats = []
        for path in sorted((self.rundir.path / "spans").glob("rank-*.jsonl")):
            with contextlib.suppress(OSError):  # removed meanwhile
                stats.append((path.stat().st_size, path.stat().st_mtime_ns))
        return hash(tuple(stats))

    def typical_step_s(self) -> float | None:
        """Return the median step time of a run that is over, as in its report; None while records are unread."""
        manifest = self.manifest
        if manifest is None or self.unread_bytes:
            return None
        key = self.curves.num_records, manifest.since, manifest.ended
        if self._typical[0] != key:
            self._typical = key, None
            with contextlib.suppress(EvenerError):
                walls = stored_lines(self.rundir.steps_path(manifest.roster.members[0].rank), Wall, WALLS_BYTES)
                self._typical = key, step_p50_s(walls, manifest)
        return self._typical[1]

    def _take_up(self) -> None:
        try:
            cache = from_msgpack(read_file(self.rundir.path / KEPT), Kept)
            if cache.format != FORMAT or not all(self._is_same(rank, place) for rank, place in cache.places.items()):
                return
            self.curves, self._places = Curves.kept(cache.curves), dict(cache.places)
        except (OSError, msgspec.MsgspecError, ValueError):
            return

    def _is_same(self, rank: int, place: Place) -> bool:
        """Return whether the file is the same one and still has the end of a line at the saved offset."""
        with open_file(self.rundir.steps_path(rank)) as file:
            if os.fstat(file.fileno()).st_ino != place.inode or place.offset < 1:
                return False
            file.seek(place.offset - 1)
            return file.read(1) == b"\n"

    # --- records ------------------------------------------------------------------------------------------------------

    def _step_files(self) -> dict[int, Path]:
        """Return the record files by rank, rank 0 first."""
        return {rank: self.rundir.steps_path(rank) for rank in self.rundir.recorded_ranks()[:MAX_RANKS]}

    def _read_chunk(self, rank: int, path: Path) -> int:
        """Read the next chunk of a rank's file and return the number of bytes consumed."""
        try:
            with open_file(path) as file:
                stat, place = os.fstat(file.fileno()), self._places.get(rank)
                if place is not None and (place.inode != stat.st_ino or stat.st_size < place.offset):
                    self._forget()  # a resumed run has removed the steps that it repeats
                    place = None
                offset = place.offset if place else 0
                if stat.st_size == offset:
                    return 0
                file.seek(offset)
                chunk = file.read(CHUNK_BYTES)
        except OSError:
            return 0
        is_one_line = len(chunk) == CHUNK_BYTES and b"\n" not in chunk  # damaged: no record is this long
        complete = chunk if is_one_line else chunk[: chunk.rfind(b"\n") + 1]
        if not complete:
            self._half[rank] = stat.st_size
            return 0
        self._places[rank] = Place(inode=stat.st_ino, offset=offset + len(complete))
        self.curves.add(rank, self._records(complete))
        self._unkept_bytes += len(complete)
        self.version += 1
        return len(complete)

    def _records(self, lines: bytes) -> list[StepRecord]:
        """Decode complete lines, without damaged ones, as a full disk leaves them."""
        try:
            return self._decoder.decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            records = []
            for line in lines.split(b"\n"):
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    records.append(self._decoder.decode(line))
            return records

    def _forget(self) -> None:
        self.curves, self._places = Curves(), {}
        self._unkept_bytes = 0
        self.version += 1

    def _left(self, rank: int, path: Path) -> int:
        """Return the unread bytes of a file, not counting an incomplete last line."""
        try:
            num_bytes = path.stat().st_size
        except OSError:
            return 0
        offset = self._places[rank].offset if rank in self._places else 0
        return 0 if num_bytes == self._half.get(rank) else num_bytes - offset

    # --- other files --------------------------------------------------------------------------------------------------

    def _read_others(self) -> None:
        """Read each small file that changed."""
        if self._is_new(self.rundir.manifest_path):
            self.manifest = _readable(self.rundir.manifest, self.manifest)
        if self._is_new(self.rundir.path / "plan.json"):
            self.plan = _readable(lambda: find_plan(self.rundir), self.plan)
        hosts = self.plan.hosts if self.plan else []
        for host in hosts:
            path = host.state_path(self.rundir)
            if self._is_new(path):
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    self.states[host.name] = from_json(read_file(path), dict[str, Any])
        for path in (self.rundir.path / "vitals").glob("*.jsonl"):
            if self._is_new(path) and (newest := _last_line(path)):
                with contextlib.suppress(msgspec.MsgspecError):
                    self.vitals[path.stem] = from_json(newest, Vitals)
        paths = [self.rundir.events_path, *sorted((self.rundir.path / "hosts").glob("*/events.jsonl"))]
        are_new = [self._is_new(path) for path in paths]
        if any(are_new):
            self.events = _events_of(paths)

    def _is_new(self, path: Path) -> bool:
        try:
            stat = path.stat()
            now: Identity | None = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except OSError:
            now = None
        if self._seen.get(path) == now:
            return False
        self._seen[path] = now
        self.version += 1
        return now is not None


def _readable(read: Callable[[], T], previous: T) -> T:
    """Return the current value, or the previous one if that cannot be read."""
    try:
        return read()
    except EvenerError:
        return previous


def _last_line(path: Path) -> bytes:
    """Return the last complete line of a file; empty if it has none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LINE_BYTES))
            return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    except OSError:
        return b""


def _events_of(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the events of all files by time, each once: a run's own file may repeat those of its hosts' files."""
    events_by_line: dict[bytes, dict[str, Any]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            for line in read_file(path).split(b"\n")[:-1]:
                if line not in events_by_line and (event := event_of(line)) is not None:
                    events_by_line[line] = event
    return sorted(events_by_line.values(), key=lambda event: float(event["time"]))
