"""Export a run as a Chrome trace (JSON), which ui.perfetto.dev, chrome://tracing and others open.

    process   a rank, with its name and the error of its clock; one more process for the prediction
    tracks    step        each step, and within it input, forward, backward, waiting, exposed communication, update
              layers      of every hundredth step, the forward and backward of each group of layers
              bucket N    the bucket's collective, with bytes, algbw and busbw as in nccl-tests
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

from evener.core.base.file_io import write_atomic
from evener.core.base.units import format_seconds, pluralize
from evener.core.base.version import __version__
from evener.core.run.prediction import PlanOption
from evener.core.run.run_plan import read_prediction
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import BLOCKED, PHASE_NAMES, StepCost
from evener.report.draw.run_charts import WAIT_OR_SYNC_NAME
from evener.report.read.timeline import (
    RankStep,
    Timeline,
    TimelineCollective,
    TimelineSegment,
    format_ranges,
    missing_ranges,
    to_tick_ns,
)
from evener.report.read.torch_profile import RankProfile

PREDICTED_PID = 1_000_000  # pid of the prediction; ranks are counted from 1
FIRST_TID = 2_000_000  # track ids are unique over all processes, and differ from all pids
STEP_TRACK, LAYERS_TRACK, BETWEEN_STEPS_TRACK, TORCH_TRACK = (0, 0), (1, 0), (3, 0), (4, 0)  # the order of tracks
BUCKET_TRACK = 2  # the same: the first element, before the bucket's number
SLICE_NAMES = PHASE_NAMES | {BLOCKED: WAIT_OR_SYNC_NAME}

TraceEvent = dict[str, Any]
TrackOrder = tuple[int, int]


def write_trace(
    rundir: RunDir, timeline: Timeline, path: Path, profiles: Mapping[int, RankProfile] | None = None
) -> int:
    """Write the trace, with the profiles of torch.profiler if given; return the number of events."""
    manifest = rundir.manifest()
    names = {rank: manifest.roster.rank_label(rank) for rank in timeline.clock_error_s}
    tracks = _TraceTracks()
    prediction = read_prediction(rundir)
    option = prediction.option_for(manifest.roster) if prediction is not None else None
    events = [*_measured_events(timeline, names, tracks), *_predicted_events(timeline, option, tracks)]
    for rank, profile in (profiles or {}).items():
        events += _profiler_events(timeline, rank, profile, tracks)
    events += tracks.name_events()
    missing = missing_ranges(timeline.recorded_ranges, timeline.num_steps)
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": str(rundir),
            "evener": __version__,
            "began_unix_s": timeline.begin_unix_s,
            "steps shown": format_ranges(timeline.shown_ranges),
            "steps recorded": format_ranges(timeline.recorded_ranges),
            "steps not recorded": format_ranges(missing) or "none",
            "clock error": {
                names[rank]: format_clock_error(error_s) for rank, error_s in timeline.clock_error_s.items()
            },
        },
    }
    write_atomic(path, msgspec.json.encode(content))
    return len(events)


def format_clock_error(error_s: float | None) -> str:
    """Format the error of a rank's clock.

    >>> format_clock_error(0.0), format_clock_error(0.00025)
    ('the same clock', 'off by at most 250 µs')
    """
    if error_s is None:
        return "its host's wall clock, error unknown"
    return f"off by at most {format_seconds(error_s)}" if error_s else "the same clock"


# --- what was measured ------------------------------------------------------------------------------------------------


def _measured_events(timeline: Timeline, names: Mapping[int, str], tracks: _TraceTracks) -> Iterator[TraceEvent]:
    errors = timeline.clock_error_s
    for place, rank in enumerate(names):
        suffix = "" if errors[rank] == 0 else f" (clock: {format_clock_error(errors[rank])})"
        yield from _process_events(_pid(rank), f"{names[rank]}{suffix}", place)
    arrows = count(1)
    for segment in timeline.segments:
        for step, of_step in segment.steps.items():
            for rank_step in of_step.values():
                yield from _step_events(rank_step, tracks)
            for collective in segment.collectives(step):
                yield from _collective_events(collective, tracks, names, arrows)
    for before, after in pairwise(timeline.segments):
        yield from _missing_step_events(before, after, tracks)


class _TraceTracks:
    """The tracks of all processes: their ids, and until when each is busy."""

    def __init__(self) -> None:
        self._tids: dict[tuple[int, TrackOrder, str], int] = {}
        self._busy_until_ns: dict[int, int] = {}
        # by track: the ends of the open slices that the next one may nest in
        self._open_ends_ns: dict[int, list[int]] = {}

    def track(self, pid: int, place: TrackOrder, name: str) -> tuple[int, int]:
        """Return (process, track) for this name."""
        return pid, self._tids.setdefault((pid, place, name), FIRST_TID + len(self._tids))

    def free_track(self, pid: int, place: TrackOrder, name: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return (process, track) for a slice that must not overlap others: the named track, or a numbered one."""
        at, turn = self.track(pid, place, name), 1
        while self._busy_until_ns.get(at[1], begin_ns) > begin_ns:
            turn += 1
            at = self.track(pid, place, f"{name} ({turn})")
        self._busy_until_ns[at[1]] = end_ns
        return at

    def nested_track(self, pid: int, place: TrackOrder, name: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return (process, track) for a slice that may nest in earlier ones; slices must come in order of begin."""
        at, turn = self.track(pid, place, name), 1
        while not _fits_inside(self._open_ends_ns.setdefault(at[1], []), begin_ns, end_ns):
            turn += 1
            at = self.track(pid, place, f"{name} ({turn})")
        self._open_ends_ns[at[1]].append(end_ns)
        return at

    def name_events(self) -> Iterator[TraceEvent]:
        """Yield the metadata events that name and order the tracks."""
        for order, ((pid, _, name), tid) in enumerate(sorted(self._tids.items())):
            of_track = {"ph": "M", "pid": pid, "tid": tid}
            yield of_track | {"name": "thread_name", "args": {"name": name}}
            yield of_track | {"name": "thread_sort_index", "args": {"sort_index": order}}


def _fits_inside(ends: list[int], begin_ns: int, end_ns: int) -> bool:
    """Drop the slices that have ended, and return whether the new one fits inside the rest."""
    while ends and ends[-1] <= begin_ns:
        ends.pop()
    return not ends or end_ns <= ends[-1]


def _step_events(rank_step: RankStep, tracks: _TraceTracks) -> Iterator[TraceEvent]:
    at = tracks.track(_pid(rank_step.rank), STEP_TRACK, "step")
    yield _slice_event(
        f"step {rank_step.spans.step}", "step", at, rank_step.begin_ns, rank_step.end_ns, _step_args(rank_step)
    )
    for part in rank_step.phase_slices:
        yield _slice_event(SLICE_NAMES.get(part.name, part.name), part.phase, at, part.begin_ns, part.end_ns)
    for layer_slice, layer_pass in rank_step.layer_group_slices:
        at = tracks.track(_pid(rank_step.rank), LAYERS_TRACK, "layers")
        yield _slice_event(
            layer_slice.name,
            "backward" if layer_pass.is_backward else "forward",
            at,
            layer_slice.begin_ns,
            layer_slice.end_ns,
        )
    for aside in rank_step.between_step_slices:
        at = tracks.track(_pid(rank_step.rank), BETWEEN_STEPS_TRACK, "beside")
        yield _slice_event(aside.name, "beside", at, aside.begin_ns, aside.end_ns)


def _step_args(rank_step: RankStep) -> TraceEvent:
    """Return the trace arguments of a step, from its record."""
    if rank_step.record is None:
        return {"recorded": "not all ranks recorded its end"}
    record = rank_step.record
    values = {"loss": record.loss, "tokens": record.tokens, "lr": record.lr, "gradient norm": record.grad_norm,
            "bytes sent": record.bytes, "epoch": record.epoch}  # fmt: skip
    return {name: "not measured" if value is None else value for name, value in values.items()}


def _collective_events(collective: TimelineCollective, tracks: _TraceTracks, names: Mapping[int, str],
                arrows: Iterator[int]) -> Iterator[TraceEvent]:  # fmt: skip
    """Yield a collective's slices, and arrows from the rank that entered it last."""
    last, took_s = collective.last_rank, collective.transfer_s
    places = {}
    for rank, sent in collective.by_rank.items():
        place = BUCKET_TRACK, sent.bucket
        at = places[rank] = tracks.free_track(_pid(rank), place, sent.name, sent.begin_ns, sent.end_ns)
        facts: TraceEvent = {"bytes": sent.size_bytes, "bytes sent": sent.sent_bytes, "last to begin": names[last],
                        "without waiting (ms)": round(1e3 * took_s, 4)}  # fmt: skip
        if took_s:
            facts |= {"algbw (GB/s)": round(sent.size_bytes / took_s / 1e9, 4),
                      "busbw (GB/s)": round(sent.sent_bytes / took_s / 1e9, 4)}  # fmt: skip
        yield _slice_event(sent.name, "collective", at, sent.begin_ns, sent.end_ns, facts)
    begins = collective.by_rank[last]
    for rank, sent in collective.by_rank.items():
        at_ns = max(begins.begin_ns, sent.begin_ns)
        if rank == last or not at_ns < min(begins.end_ns, sent.end_ns):
            continue  # with clocks that share no collective, some ranks may seem to leave before others enter
        arrow = {"name": "waited for", "cat": "collective", "id": next(arrows), "ts": at_ns / 1e3}
        yield arrow | {"ph": "s"} | dict(zip(("pid", "tid"), places[last], strict=True))
        yield arrow | {"ph": "f", "bp": "e"} | dict(zip(("pid", "tid"), places[rank], strict=True))


def _missing_step_events(before: TimelineSegment, after: TimelineSegment, tracks: _TraceTracks) -> Iterator[TraceEvent]:
    first, last = max(before.steps), min(after.steps)
    if last - first < 2:
        return
    name = (
        f"{pluralize(last - first - 1, 'step')} not recorded" if last - first > 2 else f"step {first + 1} not recorded"
    )
    for rank in before.steps[first].keys() & after.steps[last].keys():
        begin_ns, end_ns = before.steps[first][rank].end_ns, after.steps[last][rank].begin_ns
        if begin_ns < end_ns:
            yield _slice_event(name, "not recorded", tracks.track(_pid(rank), STEP_TRACK, "step"), begin_ns, end_ns)


def _profiler_events(timeline: Timeline, rank: int, profile: RankProfile, tracks: _TraceTracks) -> Iterator[TraceEvent]:
    """Yield the profiler slices of the steps in the timeline."""
    steps = [of_step[rank] for segment in timeline.segments for step, of_step in segment.steps.items()
             if step in profile.clock_sync.steps and rank in of_step
             and of_step[rank].spans.clock == profile.clock_sync.clock]  # fmt: skip
    for event in profile.events if steps else []:
        begin_ns, end_ns = (
            steps[0].begin_ns + to_tick_ns(at_s - steps[0].spans.begun_s) for at_s in (event.begin_s, event.end_s)
        )
        if any(step.begin_ns <= begin_ns < step.end_ns for step in steps):
            at = tracks.nested_track(_pid(rank), TORCH_TRACK, event.track, begin_ns, end_ns)
            yield _slice_event(event.name, event.kind, at, begin_ns, end_ns)


# --- what was predicted -----------------------------------------------------------------------------------------------


def _predicted_events(timeline: Timeline, option: PlanOption | None, tracks: _TraceTracks) -> Iterator[TraceEvent]:
    """Yield the predicted step repeatedly, from the start of each measured segment, as often as it has steps."""
    if option is None:
        return
    yield from _process_events(PREDICTED_PID, f"predicted: {option.name}", PREDICTED_PID)
    starts = [min(rank_step.begin_ns for rank_step in next(iter(segment.steps.values())).values())
              for segment in timeline.segments]  # fmt: skip
    for i, (segment, begin_ns) in enumerate(zip(timeline.segments, starts, strict=True)):
        until_ns = starts[i + 1] if i + 1 < len(starts) else None
        edges_ns = [begin_ns + to_tick_ns(turn * option.step_s) for turn in range(len(segment.steps) + 1)]
        for step, (at_ns, end_ns) in zip(segment.steps, pairwise(edges_ns), strict=True):
            if until_ns is not None and end_ns > until_ns:
                break
            for place, (member, rank) in enumerate(zip(option.roster.members, option.ranks, strict=True)):
                at = tracks.track(PREDICTED_PID, (place, 0), option.roster.rank_label(member.rank))
                yield from _predicted_step_events(f"step {step}", rank.cost, at_ns, end_ns, at)


def _predicted_step_events(
    name: str, cost: StepCost, begin_ns: int, end_ns: int, at: tuple[int, int]
) -> Iterator[TraceEvent]:
    yield _slice_event(name, "predicted", at, begin_ns, end_ns)
    reached = begin_ns
    for part in ("data_s", "compute_s", "wait_s", "exposed_sync_s", "optimizer_s"):
        took_ns = to_tick_ns(getattr(cost, part) or 0.0)
        took_ns = min(took_ns, end_ns - reached)
        if took_ns > 0:
            yield _slice_event(SLICE_NAMES[part], part, at, reached, reached + took_ns)
        reached += took_ns


# --- the format -------------------------------------------------------------------------------------------------------


def _pid(rank: int) -> int:
    """Return a rank's pid; viewers do not accept pid 0."""
    return rank + 1


def _slice_event(
    name: str, kind: str, at: tuple[int, int], begin_ns: int, end_ns: int, args: TraceEvent | None = None
) -> TraceEvent:
    event = {"name": name, "cat": kind, "ph": "X", "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3,
             "pid": at[0], "tid": at[1]}  # fmt: skip
    return event | {"args": args} if args else event


def _process_events(pid: int, name: str, place: int) -> Sequence[TraceEvent]:
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": place}},
    ]
