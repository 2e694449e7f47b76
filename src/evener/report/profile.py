"""What did torch's profiler record, on the clock of the timeline?

Slices alone, of the processor's threads and of a GPU's streams: its arrows and counters mean nothing without the viewer
that they were made for.
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

NOT_SHOWN = ("Trace", "overhead")  # categories: the whole of it, and what the profiler says of itself


Microseconds = Annotated[float, Meta(ge=-1e17, le=1e17)]


class _Event(msgspec.Struct, frozen=True):
    ph: str
    name: str = ""
    cat: str = ""
    ts: Microseconds = 0.0  # since a moment of its own
    dur: Microseconds = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True):
    evener: Joint
    traceEvents: list[_Event]


@dataclass(frozen=True)
class Profiled:
    """One event: when, by the rank's own clock, and on which thread or stream."""

    track: str
    name: str
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Profile:
    """Of one rank."""

    joint: Joint
    events: list[Profiled]  # by track, then by time; what is around others before them


def read_profiles(rundir: RunDir) -> dict[int, Profile]:
    """Of the ranks that were profiled."""
    found = {rank: read_profile(rundir, rank) for rank in rundir.recorded_ranks()}
    return {rank: profile for rank, profile in found.items() if profile is not None}


def read_profile(rundir: RunDir, rank: int) -> Profile | None:
    """None where the rank was not profiled; CheckpointError where the file is damaged."""
    path = rundir.profile_path(rank)
    if not path.exists():
        return None
    file = read_stored(path, _File)
    mark = next((event for event in file.traceEvents if event.ph == "X" and event.name == file.evener.mark), None)
    if mark is None:
        raise CheckpointError(f"{path}: damaged: it has no event {file.evener.mark!r}")
    return Profile(file.evener, sorted(_events(file, mark), key=lambda one: (one.track, one.begin_s, -one.end_s)))


def _events(file: _File, mark: _Event) -> Iterator[Profiled]:
    names = {(event.pid, event.tid): str(event.args.get("name", "")) for event in file.traceEvents
             if event.ph == "M" and event.name == "thread_name"}  # fmt: skip
    for event in file.traceEvents:
        if event.ph == "X" and event.cat not in NOT_SHOWN and not event.name.startswith(MARK):
            begin_s = file.evener.at_s + (event.ts - mark.ts) / 1e6
            track = f"torch: {names.get((event.pid, event.tid)) or event.tid}"
            yield Profiled(track, event.name, event.cat, begin_s, begin_s + event.dur / 1e6)
