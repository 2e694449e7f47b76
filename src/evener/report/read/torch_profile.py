"""Read torch.profiler traces and convert their slices to the rank's own clock.

Only slices of CPU threads and GPU streams are read: flow arrows and counters mean nothing outside the profiler's own
viewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from evener.core.base.errors import CheckpointError
from evener.core.base.json_files import read_json
from evener.core.run.rundir import RunDir
from evener.core.run.step_spans import CLOCK_SYNC_MARK, ProfilerClockSync

MAX_PROFILE_BYTES = 2 << 30
HIDDEN_CATEGORIES = ("Trace", "overhead")  # categories: the whole trace, and the profiler's own overhead


Microseconds = Annotated[float, Meta(ge=-1e17, le=1e17)]


class _ProfilerTraceEvent(msgspec.Struct, frozen=True):
    ph: str
    name: str = ""
    cat: str = ""
    ts: Microseconds = 0.0  # since the profiler's own origin
    dur: Microseconds = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class _ProfileFile(msgspec.Struct, frozen=True):
    evener: ProfilerClockSync
    traceEvents: list[_ProfilerTraceEvent]


@dataclass(frozen=True)
class ProfilerSlice:
    """One slice on a thread or stream, timed by the rank's own clock."""

    track: str
    name: str
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class RankProfile:
    """The profile of one rank."""

    clock_sync: ProfilerClockSync
    events: list[ProfilerSlice]  # by track, then by time; enclosing slices before those inside them


def read_profiles(rundir: RunDir) -> dict[int, RankProfile]:
    """Read the profiles of all ranks that were profiled."""
    profiles = {rank: read_profile(rundir, rank) for rank in rundir.recorded_ranks()}
    return {rank: profile for rank, profile in profiles.items() if profile is not None}


def read_profile(rundir: RunDir, rank: int) -> RankProfile | None:
    """Read a rank's profile; return None if it was not profiled, raise CheckpointError if the file is damaged."""
    path = rundir.profile_path(rank)
    if not path.exists():
        return None
    file = read_json(path, _ProfileFile, MAX_PROFILE_BYTES)
    mark = next((event for event in file.traceEvents if event.ph == "X" and event.name == file.evener.mark), None)
    if mark is None:
        raise CheckpointError(f"{path}: damaged: it has no event {file.evener.mark!r}")
    return RankProfile(
        file.evener, sorted(_profiler_slices(file, mark), key=lambda each: (each.track, each.begin_s, -each.end_s))
    )


def _profiler_slices(file: _ProfileFile, mark: _ProfilerTraceEvent) -> Iterator[ProfilerSlice]:
    names = {(event.pid, event.tid): str(event.args.get("name", "")) for event in file.traceEvents
             if event.ph == "M" and event.name == "thread_name"}  # fmt: skip
    for event in file.traceEvents:
        if event.ph == "X" and event.cat not in HIDDEN_CATEGORIES and not event.name.startswith(CLOCK_SYNC_MARK):
            begin_s = file.evener.at_s + (event.ts - mark.ts) / 1e6
            track = f"torch: {names.get((event.pid, event.tid)) or event.tid}"
            yield ProfilerSlice(track, event.name, event.cat, begin_s, begin_s + event.dur / 1e6)
