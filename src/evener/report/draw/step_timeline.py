"""Chart one typical step as a Gantt chart of all ranks, for the HTML report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evener.core.base.units import format_bytes, format_seconds, pluralize
from evener.core.run.step_cost import BLOCKED, PHASE_NAMES
from evener.core.run.step_spans import RECORD_LAST_STEPS
from evener.report.draw.run_charts import MAX_LAYERS, PHASE_COLOURS, WAIT_OR_SYNC_NAME
from evener.report.draw.svg_charts import GanttBar, GanttChart
from evener.report.read.timeline import RankStep, Timeline, TimelineCollective, TimelineSegment

MAX_BUCKET_ROWS = 4  # up to so many buckets have a row each; more share one
FORWARD, BACKWARD = "forward", "backward"
SLICE_COLOURS = PHASE_COLOURS | {FORWARD: PHASE_COLOURS["compute_s"], BACKWARD: "#1e5c91", BLOCKED: "#b08fb5"}
# In the order in which they occur.
SLICE_NAMES = {"data_s": PHASE_NAMES["data_s"], FORWARD: FORWARD, BACKWARD: BACKWARD, "wait_s": PHASE_NAMES["wait_s"],
         "exposed_sync_s": PHASE_NAMES["exposed_sync_s"], BLOCKED: WAIT_OR_SYNC_NAME,
         "optimizer_s": PHASE_NAMES["optimizer_s"]}  # fmt: skip
IN_FLIGHT_NAME, IN_FLIGHT_COLOUR = "a bucket in flight", "var(--sent)"


@dataclass(frozen=True)
class StepGantt:
    """The chart and table of a typical step."""

    chart: GanttChart
    step: int
    duration_s: float
    has_exchange: bool  # whether gradients or model changes were exchanged in it
    caption: str  # which rank entered the last collective last
    head: list[str]
    rows: list[list[str]]  # the same as figures


def typical_step_gantt(timeline: Timeline, names: Mapping[int, str]) -> StepGantt | None:
    """Chart the step of median duration among the newest steps with an exchange; None if no spans were recorded."""
    for segment in reversed(timeline.segments):
        ranks = max(len(of_step) for of_step in segment.steps.values())
        complete = {step: of_step for step, of_step in segment.steps.items() if len(of_step) == ranks}
        step = _typical_step(complete)
        return _draw_step(segment, step, names)
    return None


def _typical_step(steps: Mapping[int, dict[int, RankStep]]) -> int:
    """Return the step of median duration among the newest steps with an exchange.

    The very last step does not count, because replicas that drifted are synchronized at the end of a run.
    """
    newest = dict((list(steps.items())[:-1] or list(steps.items()))[-RECORD_LAST_STEPS:])
    sends = [
        step for step, of_step in newest.items() if any(each.collective_slices for each in of_step.values())
    ] or list(newest)
    return sorted(sends, key=lambda step: _duration_ns(newest[step]))[len(sends) // 2]


def _duration_ns(of_step: Mapping[int, RankStep]) -> int:
    return max(each.end_ns for each in of_step.values()) - min(each.begin_ns for each in of_step.values())


def _draw_step(segment: TimelineSegment, step: int, names: Mapping[int, str]) -> StepGantt:
    of_step = segment.steps[step]
    ranks = list(of_step)
    shown = ranks if len(ranks) <= MAX_LAYERS else [*ranks[: MAX_LAYERS // 2], *ranks[-MAX_LAYERS // 2 :]]
    took_s = _duration_ns(of_step) / 1e9
    unit, factor = ("s", 1e-9) if took_s >= 2 else ("ms", 1e-6)
    zero = min(rank_step.begin_ns for rank_step in of_step.values())
    rows: list[tuple[str, bool, list[GanttBar]]] = []
    for rank in shown:
        rows += _rank_rows(of_step[rank], names[rank], zero, factor)
    used = {part.name for rank in shown for part in of_step[rank].phase_slices}
    legend = {SLICE_NAMES[name]: SLICE_COLOURS[name] for name in SLICE_NAMES if name in used}
    if any(rank_step.collective_slices for rank_step in of_step.values()):
        legend[IN_FLIGHT_NAME] = IN_FLIGHT_COLOUR
    parts = [name for name in SLICE_NAMES if name in used]
    head = ["", *(SLICE_NAMES[name] for name in parts), "sum"]
    table = []
    for rank in shown:
        sums = {
            name: sum(part.duration_s for part in of_step[rank].phase_slices if part.name == name) for name in parts
        }
        table.append([names[rank], *(format_seconds(sums[name]) for name in parts), format_seconds(sum(sums.values()))])
    lanes = GanttChart(rows, f"{unit} since the step began", legend)
    sends = any(rank_step.collective_slices for rank_step in of_step.values())
    return StepGantt(lanes, step, took_s, sends, _caption(segment.collectives(step), segment, names), head, table)


def _rank_rows(rank_step: RankStep, name: str, zero: int, factor: float) -> list[tuple[str, bool, list[GanttBar]]]:
    """Return a rank's row of phases, and below it the rows of its buckets."""

    def bar(label: str, colour: str, begin_ns: int, end_ns: int, more: str = "") -> GanttBar:
        title = f"{label}: {format_seconds((end_ns - begin_ns) / 1e9)}{more}"
        return GanttBar(label, colour, factor * (begin_ns - zero), factor * (end_ns - zero), title)

    parts = [
        bar(SLICE_NAMES[part.name], SLICE_COLOURS[part.name], part.begin_ns, part.end_ns)
        for part in rank_step.phase_slices
    ]
    rows = [(name, False, parts)]
    buckets = sorted({sent.bucket for sent in rank_step.collective_slices})
    bucket_rows = [[bucket] for bucket in buckets] if len(buckets) <= MAX_BUCKET_ROWS else [buckets]
    for of_row in bucket_rows if buckets else []:
        label = f"bucket {of_row[0]}" if len(of_row) == 1 else pluralize(len(of_row), "bucket")
        sent = [
            bar(
                each.name, IN_FLIGHT_COLOUR, max(each.begin_ns, zero), each.end_ns, f", {format_bytes(each.size_bytes)}"
            )
            for each in rank_step.collective_slices
            if each.bucket in of_row
        ]
        rows.append((label, True, sent))
    return rows


def _caption(collectives: list[TimelineCollective], segment: TimelineSegment, names: Mapping[int, str]) -> str:
    """Say which rank entered the last collective last, and how exact the clocks are."""
    errors = [offset.error_s for offset in segment.offsets.values()]
    if any(error_s is None for error_s in errors):
        clocks = " The hosts’ clocks share no collective: the rows are placed by wall clock."
    elif most_s := max(error_s or 0.0 for error_s in errors):
        clocks = f" The hosts’ clocks are aligned to within {format_seconds(most_s)}."
    else:
        clocks = ""
    several = [collective for collective in collectives if len(collective.by_rank) > 1]
    if not several:
        return clocks.strip()
    last = several[-1]
    begins = sorted(sent.begin_ns for sent in last.by_rank.values())
    late_s = (begins[-1] - begins[0]) / 1e9
    return f"{names[last.last_rank]} entered the last exchange {format_seconds(late_s)} after the first rank.{clocks}"
