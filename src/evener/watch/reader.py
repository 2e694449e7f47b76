"""How is a run directory read while it grows, so that nothing of it is read twice?

    reader = Reader(RunDir("runs/mine"))
    while reader.look(0.1):     # for a tenth of a second at most; is there more?
        ...
    reader.curves, reader.manifest, reader.events

What was read of many steps is kept in RUN/watch.summary, which nobody needs: it is made again where it is missing,
damaged or of another version, and belongs to no file of the run that was replaced since.
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
WORTH_KEEPING = 16 << 20  # bytes of records that are read in about a tenth of a second
KEEP_EVERY_S = 60.0
WALLS_BYTES = 64 << 20  # of one rank's records, for the median of a run that is over: some 100,000 steps
LINE_BYTES = 1 << 16  # more than any line of vitals has

Identity = tuple[int, int, int]  # inode, bytes, when it was written


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """How far a file was read."""

    inode: int
    offset: int  # behind the last complete line


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """RUN/watch.summary."""

    format: int = FORMAT
    places: dict[int, Place]  # by rank
    curves: KeptCurves


class Reader:
    """What is known of one run. It writes nothing that the run reads, and nobody is asked."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.manifest: Manifest | None = None  # None: none yet, or none that can be read
        self.plan: Plan | None = None
        self.events: list[dict[str, Any]] = []  # by time
        self.vitals: dict[str, Vitals] = {}  # how each host was last
        self.samples: dict[int, str] = {}  # what its checkpoints wrote, as they were asked to, by their steps
        self.states: dict[str, dict[str, Any]] = {}  # what hosts' supervisors said last
        self.curves = Curves()
        self.version = 0  # grows whenever anything of this changes
        self.unread_bytes = 0  # of the records
        self._places: dict[int, Place] = {}
        self._half: dict[int, int] = {}  # by rank: the size at which its file ended in the middle of a line
        self._seen: dict[Path, Identity | None] = {}
        self._decoder = json_decoder(StepRecord)
        self._kept_at, self._unkept_bytes = time.monotonic(), 0
        self._typical: tuple[Any, float | None] = (None, None)  # of which records, and see `typical_step_s`
        self._take_up()

    def look(self, budget_s: float = 0.1) -> bool:
        """Read what is new, of records for as long as this; is there more of them?"""
        until = time.monotonic() + budget_s
        self._read_others()
        files = self._step_files()
        for rank, path in files.items():  # the curves are whole when the first one is
            while time.monotonic() < until and self._read_chunk(rank, path):
                pass
        self.unread_bytes = sum(self._left(rank, path) for rank, path in files.items())
        if not self.unread_bytes and time.monotonic() - self._kept_at > KEEP_EVERY_S:
            self.keep()
        return self.unread_bytes > 0

    def keep(self) -> None:
        """Let who looks at the run next begin where this one is, if that is worth it and the disk has room."""
        if self._unkept_bytes >= WORTH_KEEPING:
            kept = Kept(places=self._places, curves=self.curves.keep())
            with contextlib.suppress(OSError):
                write_atomic(self.rundir.path / KEPT, msgspec.msgpack.encode(kept), mode=0o600)
            self._unkept_bytes = 0
        self._kept_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """By what it says of itself."""
        return self.manifest is not None and self.manifest.verdict != "running"

    def has_not_written(self) -> bool:
        """Is there a checkpoint that is newer than all its samples?"""
        with contextlib.suppress(OSError):
            return max(self.rundir.checkpoint_steps(), default=0) > max(self.samples, default=0)
        return False

    def spans_version(self) -> int:
        """Another number where the ranks have kept more of what ran when."""
        found = []
        for path in sorted((self.rundir.path / "spans").glob("rank-*.jsonl")):
            with contextlib.suppress(OSError):  # it is gone
                found.append((path.stat().st_size, path.stat().st_mtime_ns))
        return hash(tuple(found))

    def typical_step_s(self) -> float | None:
        """Of a run that is over: its median step, as the report has it."""
        manifest = self.manifest
        if manifest is None or self.unread_bytes:
            return None
        of_what = self.curves.num_records, manifest.since, manifest.ended
        if self._typical[0] != of_what:
            self._typical = of_what, None
            with contextlib.suppress(EvenerError):
                walls = stored_lines(self.rundir.steps_path(manifest.roster.members[0].rank), Wall, WALLS_BYTES)
                self._typical = of_what, step_p50_s(walls, manifest)
        return self._typical[1]

    def _take_up(self) -> None:
        try:
            kept = from_msgpack(read_file(self.rundir.path / KEPT), Kept)
            if kept.format != FORMAT or not all(self._is_same(rank, place) for rank, place in kept.places.items()):
                return
            self.curves, self._places = Curves.kept(kept.curves), dict(kept.places)
        except (OSError, msgspec.MsgspecError, ValueError):
            return

    def _is_same(self, rank: int, place: Place) -> bool:
        """Is that still the file, with a line's end there?"""
        with open_file(self.rundir.steps_path(rank)) as file:
            if os.fstat(file.fileno()).st_ino != place.inode or place.offset < 1:
                return False
            file.seek(place.offset - 1)
            return file.read(1) == b"\n"

    # --- records ------------------------------------------------------------------------------------------------------

    def _step_files(self) -> dict[int, Path]:
        """By rank, rank 0 first."""
        return {rank: self.rundir.steps_path(rank) for rank in self.rundir.recorded_ranks()[:MAX_RANKS]}

    def _read_chunk(self, rank: int, path: Path) -> int:
        """Read on in one file; how many bytes of it were read."""
        try:
            with open_file(path) as file:
                facts, place = os.fstat(file.fileno()), self._places.get(rank)
                if place is not None and (place.inode != facts.st_ino or facts.st_size < place.offset):
                    self._forget()  # a start that goes on has dropped what it takes again
                    place = None
                offset = place.offset if place else 0
                if facts.st_size == offset:
                    return 0
                file.seek(offset)
                chunk = file.read(CHUNK_BYTES)
        except OSError:
            return 0
        is_one_line = len(chunk) == CHUNK_BYTES and b"\n" not in chunk  # damaged: no record is as long
        complete = chunk if is_one_line else chunk[: chunk.rfind(b"\n") + 1]
        if not complete:
            self._half[rank] = facts.st_size
            return 0
        self._places[rank] = Place(inode=facts.st_ino, offset=offset + len(complete))
        self.curves.add(rank, self._records(complete))
        self._unkept_bytes += len(complete)
        self.version += 1
        return len(complete)

    def _records(self, lines: bytes) -> list[StepRecord]:
        """Of complete lines; without those that are damaged, as a full disk leaves them."""
        try:
            return self._decoder.decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = []
            for line in lines.split(b"\n"):
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    found.append(self._decoder.decode(line))
            return found

    def _forget(self) -> None:
        self.curves, self._places = Curves(), {}
        self._unkept_bytes = 0
        self.version += 1

    def _left(self, rank: int, path: Path) -> int:
        """Bytes of a file that were not read, but for a line that is being written."""
        try:
            num_bytes = path.stat().st_size
        except OSError:
            return 0
        offset = self._places[rank].offset if rank in self._places else 0
        return 0 if num_bytes == self._half.get(rank) else num_bytes - offset

    # --- all else -----------------------------------------------------------------------------------------------------

    def _read_others(self) -> None:
        """The small files, each when it is another one than before."""
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
            facts = path.stat()
            now: Identity | None = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        except OSError:
            now = None
        if self._seen.get(path) == now:
            return False
        self._seen[path] = now
        self.version += 1
        return now is not None


def _readable(read: Callable[[], T], before: T) -> T:
    """What is there now; if that cannot be read, what was there before."""
    try:
        return read()
    except EvenerError:
        return before


def _last_line(path: Path) -> bytes:
    """The last complete one of a file; nothing of one without."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LINE_BYTES))
            return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    except OSError:
        return b""


def _events_of(paths: list[Path]) -> list[dict[str, Any]]:
    """Of all these files by time, each once: a run's own file may hold what its hosts' files do."""
    found: dict[bytes, dict[str, Any]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            for line in read_file(path).split(b"\n")[:-1]:
                if line not in found and (event := event_of(line)) is not None:
                    found[line] = event
    return sorted(found.values(), key=lambda event: float(event["time"]))
