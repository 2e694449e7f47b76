"""Export a run as a Chrome trace (JSON), which ui.perfetto.dev, chrome://tracing and others open.

    process   a rank, with its name and the error of its clock; one more process for the prediction
    tracks    step        each step, and within it input, forward, backward, waiting, exposed communication, update
              layers      of every hundredth step, the forward and backward of each group of layers
              bucket N    its collective, with bytes, algbw and busbw as in nccl-tests
              beside      between steps: evaluation, checkpoint, comparison of replicas
              torch       the slices of torch.profiler, for the steps that it recorded
    arrows    from the last rank to enter a collective to the ranks that waited for it

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

PREDICTED = 1_000_000  # pid of the prediction; ranks are counted from 1
FIRST_TRACK = 2_000_000  # track ids are unique over all processes, and differ from all pids
STEP, LAYERS, BESIDE, TORCH = (0, 0), (1, 0), (3, 0), (4, 0)  # the order of tracks
BUCKET = 2  # the same: the first element, before the bucket's number
NAMES = PART_NAMES | {BLOCKED: UNDIVIDED}

Event = dict[str, Any]
Place = tuple[int, int]


def write_trace(rundir: RunDir, timeline: Timeline, path: Path, profiles: Mapping[int, Profile] | None = None) -> int:
    """Write the trace, with the profiles of torch.profiler if given; return the number of events."""
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
    """Format the error of a rank's clock.

    >>> told_error(0.0), told_error(0.00025)
    ('the same clock', 'off by at most 250 µs')
    """
    if error_s is None:
        return "its host's wall clock, error unknown"
    return f"off by at most {seconds(error_s)}" if error_s else "the same clock"


# --- what was measured ------------------------------------------------------------------------------------------------


def _measured(timeline: Timeline, names: Mapping[int, str], tracks: _Tracks) -> Iterator[Event]:
    errors = timeline.error_s
    for place, rank in enumerate(names):
        suffix = "" if errors[rank] == 0 else f" (clock: {told_error(errors[rank])})"
        yield from _process(_pid(rank), f"{names[rank]}{suffix}", place)
    arrows = count(1)
    for segment in timeline.stretches:
        for step, of_step in segment.steps.items():
            for rank_step in of_step.values():
                yield from _step(rank_step, tracks)
            for collective in segment.collectives(step):
                yield from _collective(collective, tracks, names, arrows)
    for before, after in pairwise(timeline.stretches):
        yield from _not_recorded(before, after, tracks)


class _Tracks:
    """The tracks of all processes: their ids, and until when each is busy."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Place, str], int] = {}
        self._taken: dict[int, int] = {}
        self._open: dict[int, list[int]] = {}  # by track: the ends of the open slices that the next one may nest in

    def at(self, pid: int, place: Place, name: str) -> tuple[int, int]:
        """Return (process, track) for this name."""
        return pid, self._found.setdefault((pid, place, name), FIRST_TRACK + len(self._found))

    def free_at(self, pid: int, place: Place, name: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the same for a slice that must not overlap others on its track."""
        at, turn = self.at(pid, place, name), 1
        while self._taken.get(at[1], begin_ns) > begin_ns:
            turn += 1
            at = self.at(pid, place, f"{name} ({turn})")
        self._taken[at[1]] = end_ns
        return at

    def nest_at(self, pid: int, place: Place, name: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the same for a slice that may nest in earlier ones; slices must come in order of their begin."""
        at, turn = self.at(pid, place, name), 1
        while not _nests(self._open.setdefault(at[1], []), begin_ns, end_ns):
            turn += 1
            at = self.at(pid, place, f"{name} ({turn})")
        self._open[at[1]].append(end_ns)
        return at

    def names(self) -> Iterator[Event]:
        """Yield the metadata events that name and order the tracks."""
        for order, ((pid, _, name), tid) in enumerate(sorted(self._found.items())):
            of_track = {"ph": "M", "pid": pid, "tid": tid}
            yield of_track | {"name": "thread_name", "args": {"name": name}}
            yield of_track | {"name": "thread_sort_index", "args": {"sort_index": order}}


def _nests(ends: list[int], begin_ns: int, end_ns: int) -> bool:
    """Drop the slices that have ended, and return whether the new one fits inside the rest."""
    while ends and ends[-1] <= begin_ns:
        ends.pop()
    return not ends or end_ns <= ends[-1]


def _step(rank_step: RankStep, tracks: _Tracks) -> Iterator[Event]:
    at = tracks.at(_pid(rank_step.rank), STEP, "step")
    yield _slice(f"step {rank_step.spans.step}", "step", at, rank_step.begin_ns, rank_step.end_ns, _facts(rank_step))
    for part in rank_step.parts:
        yield _slice(NAMES.get(part.name, part.name), part.part, at, part.begin_ns, part.end_ns)
    for layer_slice, layer_pass in rank_step.passes:
        at = tracks.at(_pid(rank_step.rank), LAYERS, "layers")
        yield _slice(
            layer_slice.name,
            "backward" if layer_pass.is_backward else "forward",
            at,
            layer_slice.begin_ns,
            layer_slice.end_ns,
        )
    for aside in rank_step.asides:
        at = tracks.at(_pid(rank_step.rank), BESIDE, "beside")
        yield _slice(aside.name, "beside", at, aside.begin_ns, aside.end_ns)


def _facts(rank_step: RankStep) -> Event:
    """Return the trace arguments of a step, from its record."""
    if rank_step.record is None:
        return {"recorded": "not all ranks recorded its end"}
    record = rank_step.record
    values = {"loss": record.loss, "tokens": record.tokens, "lr": record.lr, "gradient norm": record.grad_norm,
            "bytes sent": record.bytes, "epoch": record.epoch}  # fmt: skip
    return {name: "not measured" if value is None else value for name, value in values.items()}


def _collective(collective: Collective, tracks: _Tracks, names: Mapping[int, str],
                arrows: Iterator[int]) -> Iterator[Event]:  # fmt: skip
    """Yield a collective's slices, and arrows from the rank that entered it last."""
    last, took_s = collective.last, collective.transfer_s
    places = {}
    for rank, sent in collective.by_rank.items():
        place = BUCKET, sent.bucket
        at = places[rank] = tracks.free_at(_pid(rank), place, sent.name, sent.begin_ns, sent.end_ns)
        facts: Event = {"bytes": sent.size_bytes, "bytes sent": sent.sent_bytes, "last to begin": names[last],
                        "without waiting (ms)": round(1e3 * took_s, 4)}  # fmt: skip
        if took_s:
            facts |= {"algbw (GB/s)": round(sent.size_bytes / took_s / 1e9, 4),
                      "busbw (GB/s)": round(sent.sent_bytes / took_s / 1e9, 4)}  # fmt: skip
        yield _slice(sent.name, "collective", at, sent.begin_ns, sent.end_ns, facts)
    begins = collective.by_rank[last]
    for rank, sent in collective.by_rank.items():
        at_ns = max(begins.begin_ns, sent.begin_ns)
        if rank == last or not at_ns < min(begins.end_ns, sent.end_ns):
            continue  # with clocks that share no collective, some ranks may seem to leave before others enter
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
    """Yield the profiler slices of the steps in the timeline."""
    steps = [of_step[rank] for segment in timeline.stretches for step, of_step in segment.steps.items()
             if step in profile.joint.steps and rank in of_step
             and of_step[rank].spans.clock == profile.joint.clock]  # fmt: skip
    for event in profile.events if steps else []:
        begin_ns, end_ns = (
            steps[0].begin_ns + in_ticks(at_s - steps[0].spans.begun_s) for at_s in (event.begin_s, event.end_s)
        )
        if any(step.begin_ns <= begin_ns < step.end_ns for step in steps):
            at = tracks.nest_at(_pid(rank), TORCH, event.track, begin_ns, end_ns)
            yield _slice(event.name, event.kind, at, begin_ns, end_ns)


# --- what was predicted -----------------------------------------------------------------------------------------------


def _predicted(timeline: Timeline, option: Option | None, tracks: _Tracks) -> Iterator[Event]:
    """Yield the predicted step repeatedly, from the start of each measured segment, as often as it has steps."""
    if option is None:
        return
    yield from _process(PREDICTED, f"predicted: {option.name}", PREDICTED)
    starts = [min(rank_step.begin_ns for rank_step in next(iter(segment.steps.values())).values())
              for segment in timeline.stretches]  # fmt: skip
    for i, (segment, begin_ns) in enumerate(zip(timeline.stretches, starts, strict=True)):
        until_ns = starts[i + 1] if i + 1 < len(starts) else None
        edges_ns = [begin_ns + in_ticks(turn * option.step_s) for turn in range(len(segment.steps) + 1)]
        for step, (at_ns, end_ns) in zip(segment.steps, pairwise(edges_ns), strict=True):
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
    """Return a rank's pid; viewers do not accept pid 0."""
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
