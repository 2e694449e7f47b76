"""How does a run look in a trace viewer? Chrome's JSON, which ui.perfetto.dev, chrome://tracing and others open.

    process   a rank, by its name and how far its clock may be off; another one for what was predicted
    tracks    step        each step, and within it input, forward, backward, waiting, exposed communication, update
              layers      of every hundredth step, each group of layers' forward and backward
              bucket N    its exchange, with bytes, algbw and busbw as in nccl-tests
              beside      evaluation, checkpoint, comparison
              torch       what its profiler recorded, of the steps of which it did
    arrows    from the rank that came last to a collective to those that waited for it

Times are in microseconds. [Trace Event Format, Google 2016]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec

from evener.core.files import write_atomic
from evener.core.plan import read_prediction
from evener.core.prediction import Option
from evener.core.rundir import RunDir
from evener.core.step import BLOCKED, StepCost
from evener.core.units import plural, seconds
from evener.core.version import __version__
from evener.report.figures import PART_NAMES, UNDIVIDED
from evener.report.profile import Profile
from evener.report.timeline import Collective, RankStep, Stretch, Timeline, gaps, in_ticks, told_ranges

PREDICTED = 1_000_000  # the process of what was predicted; ranks are counted from 1
FIRST_TRACK = 2_000_000  # tracks are counted through all processes, and none has the number of one
STEP, LAYERS, BESIDE, TORCH = (0, 0), (1, 0), (3, 0), (4, 0)  # in which order tracks stand
BUCKET = 2  # the same, before a bucket's number
NAMES = PART_NAMES | {BLOCKED: UNDIVIDED}

Event = dict[str, Any]
Place = tuple[int, int]


def write_trace(rundir: RunDir, timeline: Timeline, path: Path, profiles: Mapping[int, Profile] | None = None) -> int:
    """Write it, with what torch's profiler recorded of ranks; returns the number of events."""
    manifest = rundir.manifest()
    names = {rank: manifest.roster.name_of(rank) for rank in timeline.error_s}
    tracks = _Tracks()
    prediction = read_prediction(rundir)
    option = prediction.of(manifest.roster) if prediction is not None else None
    events = [*_measured(timeline, names, tracks), *_predicted(timeline, option, tracks)]
    for rank, profile in (profiles or {}).items():
        events += _profiled(timeline, rank, profile, tracks)
    events += tracks.names()
    missing = gaps(timeline.recorded, timeline.num_steps)
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": str(rundir),
            "evener": __version__,
            "began_unix_s": timeline.began,
            "steps shown": told_ranges(timeline.shown),
            "steps recorded": told_ranges(timeline.recorded),
            "steps not recorded": told_ranges(missing) or "none",
            "clock error": {names[rank]: told_error(error_s) for rank, error_s in timeline.error_s.items()},
        },
    }
    write_atomic(path, msgspec.json.encode(content))
    return len(events)


def told_error(error_s: float | None) -> str:
    """How far a rank's clock may be off, for a person.

    >>> told_error(0.0), told_error(0.00025)
    ('the same clock', 'off by at most 250 µs')
    """
    if error_s is None:
        return "its host's time of day, nobody knows how far off"
    return f"off by at most {seconds(error_s)}" if error_s else "the same clock"


# --- what was measured ------------------------------------------------------------------------------------------------


def _measured(timeline: Timeline, names: Mapping[int, str], tracks: _Tracks) -> Iterator[Event]:
    errors = timeline.error_s
    for place, rank in enumerate(names):
        told = "" if errors[rank] == 0 else f" (clock: {told_error(errors[rank])})"
        yield from _process(_pid(rank), f"{names[rank]}{told}", place)
    arrows = count(1)
    for stretch in timeline.stretches:
        for step, of_step in stretch.steps.items():
            for one in of_step.values():
                yield from _step(one, tracks)
            for collective in stretch.collectives(step):
                yield from _collective(collective, tracks, names, arrows)
    for before, after in pairwise(timeline.stretches):
        yield from _not_recorded(before, after, tracks)


class _Tracks:
    """Those of all processes: their numbers, and until when each is taken."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Place, str], int] = {}
        self._taken: dict[int, int] = {}
        self._open: dict[int, list[int]] = {}  # ends of the slices that the next may lie within

    def at(self, pid: int, place: Place, name: str) -> tuple[int, int]:
        """(process, track) of this name."""
        return pid, self._found.setdefault((pid, place, name), FIRST_TRACK + len(self._found))

    def free_at(self, pid: int, place: Place, name: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """The same for a slice that shares its track with none at the same time."""
        at, turn = self.at(pid, place, name), 1
        while self._taken.get(at[1], begin_ns) > begin_ns:
            turn += 1
            at = self.at(pid, place, f"{name} ({turn})")
        self._taken[at[1]] = end_ns
        return at

    def nest_at(self, pid: int, place: Place, name: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """The same for a slice that may lie within others that have been placed, of which none began later."""
        at, turn = self.at(pid, place, name), 1
        while not _nests(self._open.setdefault(at[1], []), begin_ns, end_ns):
            turn += 1
            at = self.at(pid, place, f"{name} ({turn})")
        self._open[at[1]].append(end_ns)
        return at

    def names(self) -> Iterator[Event]:
        """What tells a viewer how they are called, and in which order they are to stand."""
        for order, ((pid, _, name), tid) in enumerate(sorted(self._found.items())):
            of_track = {"ph": "M", "pid": pid, "tid": tid}
            yield of_track | {"name": "thread_name", "args": {"name": name}}
            yield of_track | {"name": "thread_sort_index", "args": {"sort_index": order}}


def _nests(ends: list[int], begin_ns: int, end_ns: int) -> bool:
    """Forget what has ended before, and say whether the rest is all around."""
    while ends and ends[-1] <= begin_ns:
        ends.pop()
    return not ends or end_ns <= ends[-1]


def _step(one: RankStep, tracks: _Tracks) -> Iterator[Event]:
    at = tracks.at(_pid(one.rank), STEP, "step")
    yield _slice(f"step {one.spans.step}", "step", at, one.begin_ns, one.end_ns, _facts(one))
    for part in one.parts:
        yield _slice(NAMES.get(part.name, part.name), part.part, at, part.begin_ns, part.end_ns)
    for piece, found in one.passes:
        at = tracks.at(_pid(one.rank), LAYERS, "layers")
        yield _slice(piece.name, "backward" if found.is_backward else "forward", at, piece.begin_ns, piece.end_ns)
    for aside in one.asides:
        at = tracks.at(_pid(one.rank), BESIDE, "beside")
        yield _slice(aside.name, "beside", at, aside.begin_ns, aside.end_ns)


def _facts(one: RankStep) -> Event:
    """What a step's record says of it."""
    if one.record is None:
        return {"recorded": "its end was not told by all ranks"}
    record = one.record
    told = {"loss": record.loss, "tokens": record.tokens, "lr": record.lr, "gradient norm": record.grad_norm,
            "bytes sent": record.bytes, "epoch": record.epoch}  # fmt: skip
    return {name: "not measured" if value is None else value for name, value in told.items()}


def _collective(collective: Collective, tracks: _Tracks, names: Mapping[int, str],
                arrows: Iterator[int]) -> Iterator[Event]:  # fmt: skip
    """Its slices, and arrows from the rank that came last."""
    last, took_s = collective.last, collective.transfer_s
    places = {}
    for rank, one in collective.by_rank.items():
        place = BUCKET, one.bucket
        at = places[rank] = tracks.free_at(_pid(rank), place, one.name, one.begin_ns, one.end_ns)
        facts: Event = {"bytes": one.size_bytes, "bytes sent": one.sent_bytes, "last to begin": names[last],
                        "without waiting (ms)": round(1e3 * took_s, 4)}  # fmt: skip
        if took_s:
            facts |= {"algbw (GB/s)": round(one.size_bytes / took_s / 1e9, 4),
                      "busbw (GB/s)": round(one.sent_bytes / took_s / 1e9, 4)}  # fmt: skip
        yield _slice(one.name, "collective", at, one.begin_ns, one.end_ns, facts)
    begins = collective.by_rank[last]
    for rank, one in collective.by_rank.items():
        at_ns = max(begins.begin_ns, one.begin_ns)
        if rank == last or not at_ns < min(begins.end_ns, one.end_ns):
            continue  # clocks that nothing joins may tell of a collective that some left before others entered it
        arrow = {"name": "waited for", "cat": "collective", "id": next(arrows), "ts": at_ns / 1e3}
        yield arrow | {"ph": "s"} | dict(zip(("pid", "tid"), places[last], strict=True))
        yield arrow | {"ph": "f", "bp": "e"} | dict(zip(("pid", "tid"), places[rank], strict=True))


def _not_recorded(before: Stretch, after: Stretch, tracks: _Tracks) -> Iterator[Event]:
    first, last = max(before.steps), min(after.steps)
    if last - first < 2:
        return
    name = f"{plural(last - first - 1, 'step')} not recorded" if last - first > 2 else f"step {first + 1} not recorded"
    for rank in before.steps[first].keys() & after.steps[last].keys():
        begin_ns, end_ns = before.steps[first][rank].end_ns, after.steps[last][rank].begin_ns
        if begin_ns < end_ns:
            yield _slice(name, "not recorded", tracks.at(_pid(rank), STEP, "step"), begin_ns, end_ns)


def _profiled(timeline: Timeline, rank: int, profile: Profile, tracks: _Tracks) -> Iterator[Event]:
    """Of the steps that are shown."""
    steps = [of_step[rank] for stretch in timeline.stretches for step, of_step in stretch.steps.items()
             if step in profile.joint.steps and rank in of_step
             and of_step[rank].spans.clock == profile.joint.clock]  # fmt: skip
    for one in profile.events if steps else []:
        begin_ns, end_ns = (
            steps[0].begin_ns + in_ticks(at_s - steps[0].spans.begun_s) for at_s in (one.begin_s, one.end_s)
        )
        if any(step.begin_ns <= begin_ns < step.end_ns for step in steps):
            at = tracks.nest_at(_pid(rank), TORCH, one.track, begin_ns, end_ns)
            yield _slice(one.name, one.kind, at, begin_ns, end_ns)


# --- what was predicted -----------------------------------------------------------------------------------------------


def _predicted(timeline: Timeline, option: Option | None, tracks: _Tracks) -> Iterator[Event]:
    """The predicted step over and over, from where the measured ones of a stretch begin, as many of them."""
    if option is None:
        return
    yield from _process(PREDICTED, f"predicted: {option.name}", PREDICTED)
    starts = [min(one.begin_ns for one in next(iter(stretch.steps.values())).values())
              for stretch in timeline.stretches]  # fmt: skip
    for i, (stretch, begin_ns) in enumerate(zip(timeline.stretches, starts, strict=True)):
        until_ns = starts[i + 1] if i + 1 < len(starts) else None
        edges_ns = [begin_ns + in_ticks(turn * option.step_s) for turn in range(len(stretch.steps) + 1)]
        for step, (at_ns, end_ns) in zip(stretch.steps, pairwise(edges_ns), strict=True):
            if until_ns is not None and end_ns > until_ns:
                break
            for place, (member, rank) in enumerate(zip(option.roster.members, option.ranks, strict=True)):
                at = tracks.at(PREDICTED, (place, 0), option.roster.name_of(member.rank))
                yield from _predicted_step(f"step {step}", rank.cost, at_ns, end_ns, at)


def _predicted_step(name: str, cost: StepCost, begin_ns: int, end_ns: int, at: tuple[int, int]) -> Iterator[Event]:
    yield _slice(name, "predicted", at, begin_ns, end_ns)
    reached = begin_ns
    for part in ("data_s", "compute_s", "wait_s", "exposed_sync_s", "optimizer_s"):
        took_ns = in_ticks(getattr(cost, part) or 0.0)
        took_ns = min(took_ns, end_ns - reached)
        if took_ns > 0:
            yield _slice(NAMES[part], part, at, reached, reached + took_ns)
        reached += took_ns


# --- the format -------------------------------------------------------------------------------------------------------


def _pid(rank: int) -> int:
    """0 is no process to a viewer."""
    return rank + 1


def _slice(name: str, kind: str, at: tuple[int, int], begin_ns: int, end_ns: int, args: Event | None = None) -> Event:
    event = {"name": name, "cat": kind, "ph": "X", "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3,
             "pid": at[0], "tid": at[1]}  # fmt: skip
    return event | {"args": args} if args else event


def _process(pid: int, name: str, place: int) -> Sequence[Event]:
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": place}},
    ]
