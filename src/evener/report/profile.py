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

from evener.core.errors import CheckpointError
from evener.core.rundir import RunDir
from evener.core.spans import MARK, Joint
from evener.core.stored import read_stored

NOT_SHOWN = ("Trace", "overhead")  # categories: the whole trace, and the profiler's own overhead


Microseconds = Annotated[float, Meta(ge=-1e17, le=1e17)]


class _Event(msgspec.Struct, frozen=True):
    ph: str
    name: str = ""
    cat: str = ""
    ts: Microseconds = 0.0  # since the profiler's own origin
    dur: Microseconds = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True):
    evener: Joint
    traceEvents: list[_Event]


@dataclass(frozen=True)
class Profiled:
    """One slice on a thread or stream, timed by the rank's own clock."""

    track: str
    name: str
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Profile:
    """The profile of one rank."""

    joint: Joint
    events: list[Profiled]  # by track, then by time; enclosing slices before those inside them


def read_profiles(rundir: RunDir) -> dict[int, Profile]:
    """Read the profiles of all ranks that were profiled."""
    profiles = {rank: read_profile(rundir, rank) for rank in rundir.recorded_ranks()}
    return {rank: profile for rank, profile in profiles.items() if profile is not None}


def read_profile(rundir: RunDir, rank: int) -> Profile | None:
    """Read a rank's profile; return None if it was not profiled, raise CheckpointError if the file is damaged."""
    path = rundir.profile_path(rank)
    if not path.exists():
        return None
    file = read_stored(path, _File)
    mark = next((event for event in file.traceEvents if event.ph == "X" and event.name == file.evener.mark), None)
    if mark is None:
        raise CheckpointError(f"{path}: damaged: it has no event {file.evener.mark!r}")
    return Profile(file.evener, sorted(_events(file, mark), key=lambda each: (each.track, each.begin_s, -each.end_s)))


def _events(file: _File, mark: _Event) -> Iterator[Profiled]:
    names = {(event.pid, event.tid): str(event.args.get("name", "")) for event in file.traceEvents
             if event.ph == "M" and event.name == "thread_name"}  # fmt: skip
    for event in file.traceEvents:
        if event.ph == "X" and event.cat not in NOT_SHOWN and not event.name.startswith(MARK):
            begin_s = file.evener.at_s + (event.ts - mark.ts) / 1e6
            track = f"torch: {names.get((event.pid, event.tid)) or event.tid}"
            yield Profiled(track, event.name, event.cat, begin_s, begin_s + event.dur / 1e6)
