"""Read a run directory incrementally while it grows, each record once.

    reader = RunReader(RunDir("runs/mine"))
    while reader.read_new(0.1):     # for about 0.1 s; True while records remain unread
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

from evener.core.base.decoding import from_json, from_msgpack, json_decoder
from evener.core.base.errors import CheckpointError, EvenerError
from evener.core.base.file_io import LineReader, open_file, read_file, read_lines, write_atomic
from evener.core.base.json_files import read_json_lines
from evener.core.cluster.fleet_file import Fleet
from evener.core.cluster.host_vitals import Vitals
from evener.core.run.run_plan import Plan, fleet_of_run, read_plan_if_present
from evener.core.run.rundir import Manifest, RunDir, parse_event
from evener.core.run.step_cost import StepRecord
from evener.core.run.step_statistics import StepWallTime, median_step_s
from evener.core.run.trust import is_foreign_run
from evener.report.read.run_curves import MAX_RANKS, RunCurves, StoredCurves

T = TypeVar("T")

FORMAT = 1
CACHE_FILE = "watch.summary"
CHUNK_BYTES = 1 << 20
MIN_CACHED_BYTES = 16 << 20  # bytes of records; reading them takes about 0.1 s
CACHE_INTERVAL_S = 60.0
WALL_TIMES_BYTES = 64 << 20  # of one rank's records, for the median of a run that is over: about 100,000 steps
MAX_LINE_BYTES = 1 << 16  # longer than any line of vitals

FileIdentity = tuple[int, int, int]  # inode, size in bytes, mtime in ns


class FilePosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a file has been read."""

    inode: int
    offset: int  # after the last complete line


class ReaderCache(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of RUN/watch.summary."""

    format: int = FORMAT
    places: dict[int, FilePosition]  # by rank
    curves: StoredCurves


class RunReader:
    """The state of one run, from its files alone. It contacts no host and writes nothing that the run reads."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.manifest: Manifest | None = None  # None: missing or unreadable
        self.plan: Plan | None = None
        self.fleet: Fleet | None = None  # its hosts, and what probing them found
        self.is_foreign = False  # it came from elsewhere, so its hosts are not contacted
        self.events: list[dict[str, Any]] = []  # by time
        self.vitals: dict[str, Vitals] = {}  # by host, the newest
        self.samples: dict[int, str] = {}  # text generated from checkpoints on request, by step
        self.supervisor_states: dict[str, dict[str, Any]] = {}  # by host, the last state its supervisor wrote
        self.follow_error = ""  # why no records arrive from its hosts now, set by whoever copies them here
        self.curves = RunCurves()
        self.version = 0  # grows with every change
        self.unread_bytes = 0  # of step records
        self._step_readers: dict[int, LineReader] = {}  # by rank
        self._identities: dict[Path, FileIdentity | None] = {}
        self._decoder = json_decoder(StepRecord)
        self._cached_at, self._uncached_bytes = time.monotonic(), 0
        self._median_step: tuple[Any, float | None] = (None, None)  # (cache key, value) of `median_step_s`
        self._load_cache()

    def read_new(self, budget_s: float = 0.1) -> bool:
        """Read the small files that changed, then step records for `budget_s`. Return whether records remain unread.

        Nothing is read of a run with a link that leads out of it.
        """
        try:
            return self._read_new(budget_s)
        except CheckpointError:
            return False

    def _read_new(self, budget_s: float) -> bool:
        until = time.monotonic() + budget_s
        self._read_small_files()
        for rank in self.rundir.recorded_ranks()[:MAX_RANKS]:  # rank 0 first: it alone completes the shared curves
            self._step_readers.setdefault(rank, LineReader(self.rundir.steps_path(rank)))
            while time.monotonic() < until and self._read_chunk(rank):
                pass
        self.unread_bytes = sum(reader.unread_bytes() for reader in self._step_readers.values())
        if not self.unread_bytes and time.monotonic() - self._cached_at > CACHE_INTERVAL_S:
            self.save_cache()
        return self.unread_bytes > 0

    def save_cache(self) -> None:
        """Save the cache for the next reader if enough was read since the last time; ignore a full disk."""
        if self._uncached_bytes >= MIN_CACHED_BYTES:
            places = {
                rank: FilePosition(inode=reader.inode, offset=reader.offset)
                for rank, reader in self._step_readers.items()
                if reader.inode is not None
            }
            cache = ReaderCache(places=places, curves=self.curves.to_stored())
            with contextlib.suppress(OSError):
                write_atomic(self.rundir.inside(CACHE_FILE), msgspec.msgpack.encode(cache), mode=0o600)
            self._uncached_bytes = 0
        self._cached_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Return whether the manifest says that the run has ended."""
        return self.manifest is not None and self.manifest.verdict != "running"

    def needs_sample(self) -> bool:
        """Return whether a checkpoint is newer than all samples."""
        with contextlib.suppress(OSError, CheckpointError):
            return max(self.rundir.checkpoint_steps(), default=0) > max(self.samples, default=0)
        return False

    def spans_version(self) -> int:
        """Return a number that changes when the ranks have recorded more spans."""
        stats = []
        for path in self.rundir.glob("spans/rank-*.jsonl"):
            with contextlib.suppress(OSError):  # removed meanwhile
                stats.append((path.stat().st_size, path.stat().st_mtime_ns))
        return hash(tuple(stats))

    def median_step_s(self) -> float | None:
        """Return the median step time of a run that is over, as in its report; None while records are unread."""
        manifest = self.manifest
        if manifest is None or self.unread_bytes:
            return None
        key = self.curves.num_records, manifest.since, manifest.ended
        if self._median_step[0] != key:
            self._median_step = key, None
            with contextlib.suppress(EvenerError):
                walls = read_json_lines(
                    self.rundir.steps_path(manifest.roster.members[0].rank), StepWallTime, WALL_TIMES_BYTES
                )
                current = (wall for wall in walls if wall.step >= manifest.since)
                self._median_step = key, median_step_s(current, manifest.roster.sync.every)
        return self._median_step[1]

    def _load_cache(self) -> None:
        try:
            cache = from_msgpack(read_file(self.rundir.inside(CACHE_FILE)), ReaderCache)
            if cache.format != FORMAT or not all(
                self._is_unchanged(rank, place) for rank, place in cache.places.items()
            ):
                return
            self.curves = RunCurves.from_stored(cache.curves)
            self._step_readers = {
                rank: LineReader(self.rundir.steps_path(rank), place.inode, place.offset)
                for rank, place in cache.places.items()
            }
        except (OSError, msgspec.MsgspecError, ValueError, CheckpointError):
            return

    def _is_unchanged(self, rank: int, place: FilePosition) -> bool:
        """Return whether the file is the same one and still has the end of a line at the saved offset."""
        with open_file(self.rundir.steps_path(rank)) as file:
            if os.fstat(file.fileno()).st_ino != place.inode or place.offset < 1:
                return False
            file.seek(place.offset - 1)
            return file.read(1) == b"\n"

    # --- records ------------------------------------------------------------------------------------------------------

    def _read_chunk(self, rank: int) -> int:
        """Read the next chunk of a rank's file and return the number of bytes consumed."""
        reader = self._step_readers[rank]
        lines = reader.read(CHUNK_BYTES)
        if reader.was_replaced:  # a resumed run has removed the steps that it repeats: read all ranks again
            for other, other_reader in self._step_readers.items():
                if other != rank:
                    self._step_readers[other] = LineReader(other_reader.path)
            self.curves, self._uncached_bytes = RunCurves(), 0
        if lines:
            self.curves.add(rank, self._records(lines))
            self._uncached_bytes += len(lines)
        self.version += bool(lines) or reader.was_replaced
        return len(lines)

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

    # --- other files --------------------------------------------------------------------------------------------------

    def _read_small_files(self) -> None:
        """Read each small file that changed."""
        if self._has_changed(self.rundir.manifest_path):
            self.manifest = _read_or_previous(self.rundir.manifest, self.manifest)
            hosts = self.manifest.roster.hosts if self.manifest else []
            self.fleet = _read_or_previous(lambda: fleet_of_run(self.rundir, hosts), self.fleet)
        if self._has_changed(self.rundir.inside("plan.json")):
            self.plan = _read_or_previous(lambda: read_plan_if_present(self.rundir), self.plan)
            self.is_foreign = _read_or_previous(lambda: is_foreign_run(self.rundir), True)
        for host in self.plan.hosts if self.plan else []:
            path = host.supervisor_state_path(self.rundir)
            if self._has_changed(path):
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    self.supervisor_states[host.name] = from_json(read_file(path), dict[str, Any])
        for path in self.rundir.glob("vitals/*.jsonl"):
            if self._has_changed(path) and (newest := _last_line(path)):
                with contextlib.suppress(msgspec.MsgspecError):
                    self.vitals[path.stem] = from_json(newest, Vitals)
        paths = [self.rundir.events_path, *self.rundir.glob("hosts/*/events.jsonl")]
        are_new = [self._has_changed(path) for path in paths]
        if any(are_new):
            self.events = _merge_events(paths)

    def _has_changed(self, path: Path) -> bool:
        try:
            stat = path.stat()
            now: FileIdentity | None = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except OSError:
            now = None
        if self._identities.get(path) == now:
            return False
        self._identities[path] = now
        self.version += 1
        return now is not None


def _read_or_previous(read: Callable[[], T], previous: T) -> T:
    """Return the current value, or the previous one if that cannot be read."""
    try:
        return read()
    except EvenerError:
        return previous


def _last_line(path: Path) -> bytes:
    """Return the last complete line of a file; empty if it has none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LINE_BYTES))
            return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    except OSError:
        return b""


def _merge_events(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the events of all files by time, each once: a run's own file may repeat those of its hosts' files."""
    events_by_line: dict[bytes, dict[str, Any]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            for line in read_lines(path):
                if line not in events_by_line and (event := parse_event(line)) is not None:
                    events_by_line[line] = event
    return sorted(events_by_line.values(), key=lambda event: float(event["time"]))
