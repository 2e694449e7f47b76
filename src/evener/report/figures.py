"""Which pictures does a report show? Figures for plotly.js as plain dicts; the page adds colours of text and grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.step import PARTS, StepCost, StepRecord
from evener.core.units import percentile, seconds
from evener.report.summary import Summary

Figure = dict[str, Any]

ALL_RANKS = "mean of all ranks"
MAX_POINTS = 800  # of one line; more cannot be told apart
PART_NAMES = {
    "compute_s": "forward, backward",
    "exposed_sync_s": "exposed communication",
    "wait_s": "waiting for others",
    "optimizer_s": "update",
    "data_s": "input",
}
# Okabe and Ito's colours, which all kinds of colour vision tell apart, here and there a little lighter for dark pages
PART_COLOURS = {
    "compute_s": "#2a7fc1",
    "exposed_sync_s": "#e69f00",
    "wait_s": "#cc6d9f",
    "optimizer_s": "#0a9e76",
    "data_s": "#8fc7ea",
}
SERIES_COLOURS = ("#2a7fc1", "#d9752b", "#0a9e76", "#cc6d9f", "#e69f00", "#8fc7ea")
assert set(PART_NAMES) == set(PART_COLOURS) == set(PARTS)


@dataclass(frozen=True)
class Entry:
    """A line of a legend."""

    name: str
    colour: str
    dashed: bool


def legend(figure: Figure) -> list[Entry]:
    """What the colours of a figure mean."""
    styles = [(trace["name"], trace.get("line", {}) | trace.get("marker", {})) for trace in figure["data"]]
    return [Entry(name, style["color"], "dash" in style) for name, style in styles]


def loss(losses: Mapping[int, float | None], evaluations: Sequence[tuple[int, float]]) -> Figure:
    """Loss of every step, and of the validation split where it was evaluated."""
    steps, values = thinned([(step, value) for step, value in losses.items() if value is not None])
    training = {
        "type": "scatter",
        "mode": "lines",
        "name": "training",
        "x": steps,
        "y": values,
        "line": {"color": SERIES_COLOURS[0], "width": 1.5},
        "hovertemplate": "%{y:.4f}",
    }
    validation = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "validation",
        "x": [step for step, _ in evaluations],
        "y": [_short(value) for _, value in evaluations],
        "line": {"color": SERIES_COLOURS[1], "width": 2},
        "marker": {"size": 7},
        "hovertemplate": "%{y:.4f}",
    }
    layout = {"height": 320, "xaxis": {"title": "step"}, "yaxis": {"title": "loss"}, "hovermode": "x unified"}
    return {"data": [training, validation] if evaluations else [training], "layout": layout}


def bars(costs: Mapping[str, StepCost]) -> Figure:
    """One bar a label: the parts of a step end to end, in milliseconds."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PART_NAMES[part],
            "y": list(costs),
            "x": [_ms(getattr(cost, part)) for cost in costs.values()],
            "marker": {"color": PART_COLOURS[part]},
            "hovertemplate": f"{PART_NAMES[part]}: %{{x:.4~g}} ms<extra>%{{y}}</extra>",
        }
        for part in PART_NAMES
        if any(getattr(cost, part) for cost in costs.values())
    ]
    layout = {
        "barmode": "stack",
        "height": 80 + 36 * len(costs),
        "bargap": 0.35,
        "xaxis": {"title": "ms of a step", "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False, "type": "category"},
    }
    return {"data": traces, "layout": layout}


def unmeasured(costs: Iterable[StepCost]) -> list[str]:
    """Parts of the step that none of these costs knows."""
    known = list(costs)
    return [part for part in PART_NAMES if all(getattr(cost, part) is None for cost in known)]


def areas(steps: Sequence[Mapping[int, StepRecord]]) -> Figure:
    """The parts of every step stacked, in milliseconds: a layer of traces for the mean of all ranks and one for each.

    `meta` of a trace names its layer; the page shows one at a time.
    """
    ranks = sorted({rank for of_step in steps for rank in of_step})
    layers = {ALL_RANKS: ranks} if len(ranks) > 1 else {}
    layers |= {f"rank {rank}": [rank] for rank in ranks}
    first = next(iter(layers))
    traces = []
    for layer, shown in layers.items():
        for part in PART_NAMES:
            points = []
            for of_step in steps:
                found = [record for rank, record in of_step.items() if rank in shown]
                measured = [cost for record in found if (cost := getattr(record.cost, part)) is not None]
                if measured:
                    points.append((found[0].step, sum(measured) / len(measured) * 1e3))
            x, y = thinned(points)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "stackgroup": layer,
                    "meta": layer,
                    "visible": layer == first,
                    "name": PART_NAMES[part],
                    "x": x,
                    "y": y,
                    "line": {"width": 0},
                    "fillcolor": PART_COLOURS[part],
                    "marker": {"color": PART_COLOURS[part]},
                    "hovertemplate": "%{y:.4~g} ms",
                }
            )
    walls_ms = [record.wall_s * 1e3 for of_step in steps for record in of_step.values()]
    layout = {
        "height": 340,
        "hovermode": "x unified",
        "xaxis": {"title": "step"},
        "yaxis": {"title": "ms", "range": [0, _short(1.25 * percentile(walls_ms, 0.98))]},
    }
    return {"data": traces, "layout": layout}


def all_reduce(steps: Sequence[Mapping[int, StepRecord]], summary: Summary) -> Figure:
    """All-reduces of every step on the slowest rank: the time they were in flight, and what backward did not hide."""
    in_flight, exposed = [], []
    for of_step in steps:
        records = list(of_step.values())
        total = [record.sync_s for record in records if record.sync_s is not None]
        stood = [record.cost.exposed_sync_s for record in records if record.cost.exposed_sync_s is not None]
        in_flight += [(records[0].step, max(total) * 1e3)] if total else []
        exposed += [(records[0].step, max(stood) * 1e3)] if stood else []
    traces = []
    for name, points, colour in (
        ("in flight", in_flight, SERIES_COLOURS[0]),
        ("exposed", exposed, PART_COLOURS["exposed_sync_s"]),
    ):
        x, y = thinned(points)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": x,
                "y": y,
                "line": {"color": colour, "width": 1.5},
                "hovertemplate": "%{y:.4~g} ms",
            }
        )
    marks = [("p50", summary.sync_p50_s, "dash"), ("p95", summary.sync_p95_s, "dot")]
    shown = [(name, value, dash) for name, value, dash in marks if value is not None]
    highest = max((value for _, value in in_flight + exposed), default=1.0)
    usual = percentile([value for _, value in in_flight + exposed], 0.98) if in_flight + exposed else 1.0
    layout = {
        "height": 320,
        "hovermode": "x unified",
        "xaxis": {"title": "step"},
        "yaxis": {"title": "ms", "range": [0, _short(min(1.05 * highest, 1.5 * usual))]},
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": value * 1e3,
                "y1": value * 1e3,
                "line": {"color": SERIES_COLOURS[0], "width": 1, "dash": dash},
            }
            for _, value, dash in shown
        ],
        "annotations": [
            {
                "xref": "paper",
                "x": 1,
                "xanchor": "right",
                "y": value * 1e3,
                "yanchor": "bottom",
                "showarrow": False,
                "text": f"{name} {seconds(value)}",
            }
            for name, value, _ in shown
        ],
    }
    return {"data": traces, "layout": layout}


def scaling(series: Mapping[str, Sequence[Summary]]) -> Figure:
    """Tokens/s over processes, a line a corpus, and dashed what the first run promises if nothing were lost."""
    traces: list[Figure] = []
    for index, (corpus, runs) in enumerate(series.items()):
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        points = measured_points(runs)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": corpus,
                "x": [num for num, _ in points],
                "y": [_short(rate) for _, rate in points],
                "line": {"color": colour, "width": 2.5},
                "marker": {"size": 9},
                "hovertemplate": "%{y:.4~s} tokens/s",
            }
        )
        ideal = ideal_points(runs)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{corpus}, nothing lost",
                "x": [num for num, _ in ideal],
                "y": [_short(rate) for _, rate in ideal],
                "line": {"color": colour, "width": 1.5, "dash": "dash"},
                "hoverinfo": "skip",
            }
        )
    counts = sorted({num for runs in series.values() for num, _ in measured_points(runs)})
    layout = {
        "height": 380,
        "xaxis": {"title": "processes", "tickvals": counts},
        "yaxis": {"title": "tokens/s", "rangemode": "tozero"},
    }
    return {"data": traces, "layout": layout}


def speeds(runs: Mapping[str, Summary]) -> Figure:
    """Tokens/s of every run, a bar each."""
    labels = [label for label, run in runs.items() if run.tokens_per_s]
    bar = {
        "type": "bar",
        "orientation": "h",
        "name": "tokens/s",
        "y": labels,
        "x": [_short(runs[label].tokens_per_s or 0.0) for label in labels],
        "marker": {"color": SERIES_COLOURS[0]},
        "hovertemplate": "%{x:.4~s} tokens/s<extra>%{y}</extra>",
    }
    layout = {
        "height": 80 + 36 * len(labels),
        "bargap": 0.35,
        "xaxis": {"title": "tokens/s", "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "showgrid": False, "type": "category"},
    }
    return {"data": [bar], "layout": layout}


def tradeoff(runs: Mapping[str, Summary]) -> Figure:
    """Tokens/s against validation loss, a dot a run: further right is faster, lower has learned more."""
    points = sorted(tradeoff_points(runs), key=lambda point: point[2])
    around = ("bottom center", "middle right", "top center", "middle left")  # names of dots that lie close together
    dots = {
        "type": "scatter",
        "mode": "markers+text",
        "name": "runs",
        "x": [_short(rate) for _, rate, _ in points],
        "y": [_short(loss) for _, _, loss in points],
        "text": [label for label, _, _ in points],
        "textposition": [around[i % len(around)] for i in range(len(points))],
        "cliponaxis": False,
        "marker": {"color": SERIES_COLOURS[0], "size": 11},
        "hovertemplate": "%{text}: %{x:.4~s} tokens/s, loss %{y:.4f}<extra></extra>",
    }
    layout = {
        "height": 420,
        "xaxis": {"title": "tokens/s", "rangemode": "tozero"},
        "yaxis": {"title": "validation loss"},
    }
    return {"data": [dots], "layout": layout}


def tradeoff_points(runs: Mapping[str, Summary]) -> list[tuple[str, float, float]]:
    """(label, tokens/s, validation loss) of the runs that have both."""
    return [(label, run.tokens_per_s, result.val_loss) for label, run in runs.items()
            if run.tokens_per_s and (result := run.manifest.result) and result.val_loss is not None]  # fmt: skip


def measured_points(runs: Sequence[Summary]) -> list[tuple[int, float]]:
    """(processes, tokens/s) of the runs that have both, ascending."""
    return sorted((run.manifest.world_size, run.tokens_per_s) for run in runs if run.tokens_per_s)


def ideal_points(runs: Sequence[Summary]) -> list[tuple[int, float]]:
    """The line from the run with the fewest processes up to the cores, each process as fast as there."""
    points = measured_points(runs)
    if not points:
        return []
    num, rate = points[0]
    last = min(max(run.cores for run in runs), points[-1][0])
    return [(num, rate), (last, rate / num * last)] if last > num else []


def thinned(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """At most MAX_POINTS of a line: each the mean of as many neighbours as that takes.

    >>> thinned([(0, 1.0), (1, 2.0)])
    ([0, 1], [1.0, 2.0])
    """
    size = -(-len(points) // MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [group[0][0] for group in groups], [_short(sum(v for _, v in group) / len(group)) for group in groups]


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else _short(value_s * 1e3)


def _short(value: float) -> float:
    """Five significant digits: what a picture can show."""
    return float(f"{value:.5g}")
