"""How did one step go, on all ranks beside each other? The picture of a step on a report's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evener.core.spans import LAST
from evener.core.step import BLOCKED
from evener.core.units import plural, seconds, size
from evener.report.chart import Lanes, Piece
from evener.report.figures import MAX_LAYERS, PART_COLOURS, PART_NAMES, UNDIVIDED
from evener.report.timeline import Collective, RankStep, Stretch, Timeline

MOST_BUCKETS = 4  # of which each has a row of its own
FORWARD, BACKWARD = "forward", "backward"
COLOURS = PART_COLOURS | {FORWARD: PART_COLOURS["compute_s"], BACKWARD: "#1e5c91", BLOCKED: "#b08fb5"}
# In the order in which they come.
NAMES = {"data_s": PART_NAMES["data_s"], FORWARD: FORWARD, BACKWARD: BACKWARD, "wait_s": PART_NAMES["wait_s"],
         "exposed_sync_s": PART_NAMES["exposed_sync_s"], BLOCKED: UNDIVIDED,
         "optimizer_s": PART_NAMES["optimizer_s"]}  # fmt: skip
SENT, SENT_COLOUR = "a bucket on its way", "var(--sent)"


@dataclass(frozen=True)
class Moment:
    """A step that stands for the others."""

    lanes: Lanes
    step: int
    took_s: float
    sends: bool  # were gradients, or what was learned, exchanged in it?
    told: str  # who was last
    head: list[str]
    rows: list[list[str]]  # the same in figures


def moment(timeline: Timeline, names: Mapping[int, str]) -> Moment | None:
    """Of the newest steps, of those that sent anything, the median by its time; None where nothing was kept."""
    for stretch in reversed(timeline.stretches):
        ranks = max(len(of_step) for of_step in stretch.steps.values())
        whole = {step: of_step for step, of_step in stretch.steps.items() if len(of_step) == ranks}
        step = _typical(whole)
        return _drawn(stretch, step, names)
    return None


def _typical(steps: Mapping[int, dict[int, RankStep]]) -> int:
    """Of the last ones, but not the very last: at a run's end replicas that drifted become one model."""
    newest = dict((list(steps.items())[:-1] or list(steps.items()))[-LAST:])
    sends = [step for step, of_step in newest.items() if any(one.sent for one in of_step.values())] or list(newest)
    return sorted(sends, key=lambda step: _took_ns(newest[step]))[len(sends) // 2]


def _took_ns(of_step: Mapping[int, RankStep]) -> int:
    return max(one.end_ns for one in of_step.values()) - min(one.begin_ns for one in of_step.values())


def _drawn(stretch: Stretch, step: int, names: Mapping[int, str]) -> Moment:
    of_step = stretch.steps[step]
    ranks = list(of_step)
    shown = ranks if len(ranks) <= MAX_LAYERS else [*ranks[: MAX_LAYERS // 2], *ranks[-MAX_LAYERS // 2 :]]
    took_s = _took_ns(of_step) / 1e9
    unit, factor = ("s", 1e-9) if took_s >= 2 else ("ms", 1e-6)
    zero = min(one.begin_ns for one in of_step.values())
    rows: list[tuple[str, bool, list[Piece]]] = []
    for rank in shown:
        rows += _rows(of_step[rank], names[rank], zero, factor)
    used = {part.name for rank in shown for part in of_step[rank].parts}
    legend = {NAMES[name]: COLOURS[name] for name in NAMES if name in used}
    if any(one.sent for one in of_step.values()):
        legend[SENT] = SENT_COLOUR
    parts = [name for name in NAMES if name in used]
    head = ["", *(NAMES[name] for name in parts), "sum"]
    table = []
    for rank in shown:
        sums = {name: sum(part.took_s for part in of_step[rank].parts if part.name == name) for name in parts}
        table.append([names[rank], *(seconds(sums[name]) for name in parts), seconds(sum(sums.values()))])
    lanes = Lanes(rows, f"{unit} since the step began", legend)
    sends = any(one.sent for one in of_step.values())
    return Moment(lanes, step, took_s, sends, _told(stretch.collectives(step), stretch, names), head, table)


def _rows(one: RankStep, name: str, zero: int, factor: float) -> list[tuple[str, bool, list[Piece]]]:
    """A rank's parts, and below them its buckets."""

    def piece(label: str, colour: str, begin_ns: int, end_ns: int, more: str = "") -> Piece:
        title = f"{label}: {seconds((end_ns - begin_ns) / 1e9)}{more}"
        return Piece(label, colour, factor * (begin_ns - zero), factor * (end_ns - zero), title)

    parts = [piece(NAMES[part.name], COLOURS[part.name], part.begin_ns, part.end_ns) for part in one.parts]
    rows = [(name, False, parts)]
    buckets = sorted({sent.bucket for sent in one.sent})
    each = [[bucket] for bucket in buckets] if len(buckets) <= MOST_BUCKETS else [buckets]
    for of_row in each if buckets else []:
        label = f"bucket {of_row[0]}" if len(of_row) == 1 else plural(len(of_row), "bucket")
        sent = [piece(one.name, SENT_COLOUR, max(one.begin_ns, zero), one.end_ns, f", {size(one.size_bytes)}")
                for one in one.sent if one.bucket in of_row]  # fmt: skip
        rows.append((label, True, sent))
    return rows


def _told(collectives: list[Collective], stretch: Stretch, names: Mapping[int, str]) -> str:
    """Whom the others waited for, and how well that is known."""
    errors = [offset.error_s for offset in stretch.offsets.values()]
    if any(error_s is None for error_s in errors):
        clocks = " Nothing joins the hosts’ clocks: the rows stand by their time of day."
    elif most_s := max(error_s or 0.0 for error_s in errors):
        clocks = f" The hosts’ clocks are joined to within {seconds(most_s)}."
    else:
        clocks = ""
    several = [one for one in collectives if len(one.by_rank) > 1]
    if not several:
        return clocks.strip()
    last = several[-1]
    begins = sorted(one.begin_ns for one in last.by_rank.values())
    late_s = (begins[-1] - begins[0]) / 1e9
    return f"Last to come to its last exchange was {names[last.last]}, {seconds(late_s)} after the first.{clocks}"
