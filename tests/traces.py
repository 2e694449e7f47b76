"""What must hold of a trace that viewers open? A strict reader of the Trace Event Format, which knows nothing of who
wrote it: only what the format says, and what evener promises of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = {  # of each phase that we write: those that it must have, and those that it may have
    "X": ({"name", "cat", "ph", "ts", "dur", "pid", "tid"}, {"args"}),
    "s": ({"name", "cat", "ph", "ts", "id", "pid", "tid"}, set()),
    "f": ({"name", "cat", "ph", "ts", "id", "pid", "tid", "bp"}, set()),
    "M": ({"name", "ph", "pid", "args"}, {"tid"}),
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name",
            "thread_sort_index": "sort_index"}  # fmt: skip
PARTS = {"input": "data_s", "forward": "compute_s", "backward": "compute_s", "waiting for others": "wait_s",
         "exposed communication": "exposed_sync_s", "update": "optimizer_s"}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    name: str
    cat: str
    begin: float  # ns; while slices are checked also µs
    end: float
    args: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """By (process, track), in words: their slices, ascending, the longer ones first."""

    slices: dict[tuple[str, str], list[Slice]]
    arrows: list[tuple[tuple[str, Slice], tuple[str, Slice]]]  # ((process, slice) from, to)
    other: dict[str, Any]

    def of(self, process: str, track: str) -> list[Slice]:
        return self.slices.get((process, track), [])


def read(path: Path) -> Trace:
    """AssertionError where anything is not as it must be."""
    content = json.loads(path.read_bytes(), parse_constant=lambda word: None)
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    events = content["traceEvents"]
    for event in events:
        _check_event(event)
    processes = _names(events, "process_name")
    threads = _names(events, "thread_name")
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    assert {pid for pid, _ in used} <= {pid for pid, _ in processes}
    assert used == threads.keys(), "a track without a name, or a name without a track"
    assert len({tid for _, tid in threads}) == len(threads), "two processes share a track's number"
    assert len(set(processes.values())) == len(processes), "two processes of one name"
    slices: dict[tuple[str, str], list[Slice]] = {}
    for times in (_as_added, _as_truncated, _as_rounded):
        slices = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                one = Slice(event["name"], event["cat"], *times(event["ts"], event["dur"]), event.get("args", {}))
                slices[processes[event["pid"], None], threads[event["pid"], event["tid"]]].append(one)
        for (_, track), found in slices.items():
            found.sort(key=lambda one: (one.begin, -one.end))
            _check_nesting(found, may_nest=not track.startswith("bucket"))
    arrows = _arrows(events, slices, processes, threads)
    return Trace(dict(slices), arrows, content["otherData"])


def _check_event(event: dict[str, Any]) -> None:
    must, may = KEYS[event["ph"]]
    assert must <= event.keys() <= must | may, event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert isinstance(event["pid"], int)
    assert event["pid"] > 0
    assert isinstance(event.get("tid", 0), int)
    assert isinstance(event.get("args", {}), dict)
    for time in ("ts", "dur"):
        if time in event:
            assert isinstance(event[time], int | float)
            assert math.isfinite(event[time])
            assert event[time] >= 0, event
            _ns(event[time])
    if event["ph"] == "M":
        assert event["args"].keys() == {METADATA[event["name"]]}
        assert ("tid" in event) == event["name"].startswith("thread")
    if event["ph"] == "f":
        assert event["bp"] == "e"  # binds to the slice around it, not to the next one


def _ns(microseconds: float) -> int:
    """Times are whole nanoseconds."""
    assert abs(1e3 * microseconds - round(1e3 * microseconds)) < 0.01, microseconds
    return round(1e3 * microseconds)


# Where a slice ends, viewers work out in ways of their own. By each, slices must nest.


def _as_added(ts: float, dur: float) -> tuple[float, float]:
    """speedscope's: in floating point."""
    return ts, ts + dur


def _as_truncated(ts: float, dur: float) -> tuple[int, int]:
    """Perfetto's: nanoseconds, cut off."""
    return int(ts * 1000), int(ts * 1000) + int(dur * 1000)


def _as_rounded(ts: float, dur: float) -> tuple[int, int]:
    return _ns(ts), _ns(ts) + _ns(dur)


def _names(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int | None], str]:
    found = [((event["pid"], event.get("tid")), event["args"]["name"]) for event in events if event["name"] == kind]
    assert all(num == 1 for num in Counter(place for place, _ in found).values()), f"{kind}: told twice"
    return dict(found)


def _check_nesting(slices: list[Slice], *, may_nest: bool) -> None:
    around: list[Slice] = []
    for one in slices:
        while around and around[-1].end <= one.begin:
            around.pop()
        if around:
            assert may_nest, f"{one} begins while {around[-1]} is under way"
            assert one.end <= around[-1].end, f"{one} ends after {around[-1]}, within which it begins"
        around.append(one)


def _arrows(events: Any, slices: Any, processes: Any, threads: Any) -> Any:
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], "an arrow that begins or ends twice"
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    found = []
    for number, start in ends["s"].items():
        finish = ends["f"][number]
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"]
        both = []
        for event in (start, finish):
            process, at = processes[event["pid"], None], _ns(event["ts"])
            around = [one for one in slices[process, threads[event["pid"], event["tid"]]] if one.begin <= at < one.end]
            assert around, f"{event} binds to no slice"
            both.append((process, around[-1]))
        found.append((both[0], both[1]))
    return found


def step_parts_s(trace: Trace, process: str) -> dict[int, dict[str, float]]:
    """Seconds of the parts of each step that a rank took, by the record's names."""
    found: dict[int, dict[str, float]] = {}
    track = trace.of(process, "step")
    for step in (one for one in track if one.cat == "step"):
        parts: dict[str, float] = dict.fromkeys(PARTS.values(), 0.0)
        inside = [one for one in track if one.cat != "step" and step.begin <= one.begin and one.end <= step.end]
        for one in inside:
            parts[PARTS[one.name]] += (one.end - one.begin) / 1e9
        assert sum(one.end - one.begin for one in inside) == step.end - step.begin, "a gap in a step"
        found[int(step.name.removeprefix("step "))] = parts
    return found
