"""Chart one typical step as a Gantt chart of all ranks, for the HTML report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evener.core.spans import LAST
from evener.core.step import BLOCKED
from evener.core.units import plural, seconds, size
from evener.report.chart import Lanes, Piece
from evener.report.figures import MAX_LAYERS, PART_COLOURS, PART_NAMES, UNDIVIDED
from evener.report.timeline import Collective, RankStep, Stretch, Timeline

MOST_BUCKETS = 4  # show each in its own row; more share one row
FORWARD, BACKWARD = "forward", "backward"
COLOURS = PART_COLOURS | {FORWARD: PART_COLOURS["compute_s"], BACKWARD: "#1e5c91", BLOCKED: "#b08fb5"}
# In the order in which they occur.
NAMES = {"data_s": PART_NAMES["data_s"], FORWARD: FORWARD, BACKWARD: BACKWARD, "wait_s": PART_NAMES["wait_s"],
         "exposed_sync_s": PART_NAMES["exposed_sync_s"], BLOCKED: UNDIVIDED,
         "optimizer_s": PART_NAMES["optimizer_s"]}  # fmt: skip
SENT, SENT_COLOUR = "a bucket in flight", "var(--sent)"


@dataclass(frozen=True)
class Moment:
    """The chart and table of a typical step."""

    lanes: Lanes
    step: int
    took_s: float
    sends: bool  # whether gradients or model changes were exchanged in it
    told: str  # which rank entered the last collective last
    head: list[str]
    rows: list[list[str]]  # the same as figures


def moment(timeline: Timeline, names: Mapping[int, str]) -> Moment | None:
    """Chart the step of median duration among the newest steps with an exchange; None if no spans were recorded."""
    for segment in reversed(timeline.stretches):
        ranks = max(len(of_step) for of_step in segment.steps.values())
        complete = {step: of_step for step, of_step in segment.steps.items() if len(of_step) == ranks}
        step = _typical(complete)
        return _drawn(segment, step, names)
    return None


def _typical(steps: Mapping[int, dict[int, RankStep]]) -> int:
    """Return the median of the last steps, without the very last: at a run's end drifted replicas are synchronized."""
    newest = dict((list(steps.items())[:-1] or list(steps.items()))[-LAST:])
    sends = [step for step, of_step in newest.items() if any(each.sent for each in of_step.values())] or list(newest)
    return sorted(sends, key=lambda step: _took_ns(newest[step]))[len(sends) // 2]


def _took_ns(of_step: Mapping[int, RankStep]) -> int:
    return max(each.end_ns for each in of_step.values()) - min(each.begin_ns for each in of_step.values())


def _drawn(segment: Stretch, step: int, names: Mapping[int, str]) -> Moment:
    of_step = segment.steps[step]
    ranks = list(of_step)
    shown = ranks if len(ranks) <= MAX_LAYERS else [*ranks[: MAX_LAYERS // 2], *ranks[-MAX_LAYERS // 2 :]]
    took_s = _took_ns(of_step) / 1e9
    unit, factor = ("s", 1e-9) if took_s >= 2 else ("ms", 1e-6)
    zero = min(rank_step.begin_ns for rank_step in of_step.values())
    rows: list[tuple[str, bool, list[Piece]]] = []
    for rank in shown:
        rows += _rows(of_step[rank], names[rank], zero, factor)
    used = {part.name for rank in shown for part in of_step[rank].parts}
    legend = {NAMES[name]: COLOURS[name] for name in NAMES if name in used}
    if any(rank_step.sent for rank_step in of_step.values()):
        legend[SENT] = SENT_COLOUR
    parts = [name for name in NAMES if name in used]
    head = ["", *(NAMES[name] for name in parts), "sum"]
    table = []
    for rank in shown:
        sums = {name: sum(part.took_s for part in of_step[rank].parts if part.name == name) for name in parts}
        table.append([names[rank], *(seconds(sums[name]) for name in parts), seconds(sum(sums.values()))])
    lanes = Lanes(rows, f"{unit} since the step began", legend)
    sends = any(rank_step.sent for rank_step in of_step.values())
    return Moment(lanes, step, took_s, sends, _told(segment.collectives(step), segment, names), head, table)


def _rows(rank_step: RankStep, name: str, zero: int, factor: float) -> list[tuple[str, bool, list[Piece]]]:
    """Return a rank's row of phases, and below it the rows of its buckets."""

    def bar(label: str, colour: str, begin_ns: int, end_ns: int, more: str = "") -> Piece:
        title = f"{label}: {seconds((end_ns - begin_ns) / 1e9)}{more}"
        return Piece(label, colour, factor * (begin_ns - zero), factor * (end_ns - zero), title)

    parts = [bar(NAMES[part.name], COLOURS[part.name], part.begin_ns, part.end_ns) for part in rank_step.parts]
    rows = [(name, False, parts)]
    buckets = sorted({sent.bucket for sent in rank_step.sent})
    bucket_rows = [[bucket] for bucket in buckets] if len(buckets) <= MOST_BUCKETS else [buckets]
    for of_row in bucket_rows if buckets else []:
        label = f"bucket {of_row[0]}" if len(of_row) == 1 else plural(len(of_row), "bucket")
        sent = [bar(each.name, SENT_COLOUR, max(each.begin_ns, zero), each.end_ns, f", {size(each.size_bytes)}")
                for each in rank_step.sent if each.bucket in of_row]  # fmt: skip
        rows.append((label, True, sent))
    return rows


def _told(collectives: list[Collective], segment: Stretch, names: Mapping[int, str]) -> str:
    """Say which rank entered the last collective last, and how exact the clocks are."""
    errors = [offset.error_s for offset in segment.offsets.values()]
    if any(error_s is None for error_s in errors):
        clocks = " The hosts’ clocks share no collective: the rows are placed by wall clock."
    elif most_s := max(error_s or 0.0 for error_s in errors):
        clocks = f" The hosts’ clocks are aligned to within {seconds(most_s)}."
    else:
        clocks = ""
    several = [collective for collective in collectives if len(collective.by_rank) > 1]
    if not several:
        return clocks.strip()
    last = several[-1]
    begins = sorted(sent.begin_ns for sent in last.by_rank.values())
    late_s = (begins[-1] - begins[0]) / 1e9
    return f"{names[last.last]} entered the last exchange {seconds(late_s)} after the first rank.{clocks}"
