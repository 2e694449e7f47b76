"""Build the charts of a report: losses, step breakdown, all-reduces, scaling, trade-off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evener.core.base.units import format_count, format_seconds, percentile
from evener.core.run.step_cost import PHASE_NAMES, StepCost, StepRecord
from evener.core.run.step_statistics import min_sync_s
from evener.report.draw.svg_charts import BarChart, ChartLine, ChartSelector, LineChart, ScatterPlot
from evener.report.read.run_summary import RunSummary

ALL_RANKS = "mean of all ranks"
MAX_POINTS = 500  # of one line; more cannot be distinguished
MAX_LAYERS = 8  # ranks with a chart each; of more, show the first and the last
# Okabe and Ito's colours, which all kinds of colour vision tell apart, some a little lighter for dark pages
PHASE_COLOURS = {
    "compute_s": "#2a7fc1",
    "exposed_sync_s": "#e69f00",
    "wait_s": "#cc6d9f",
    "optimizer_s": "#0a9e76",
    "data_s": "#8fc7ea",
}
SERIES_COLOURS = ("#2a7fc1", "#d9752b", "#0a9e76", "#cc6d9f", "#e69f00", "#8fc7ea")
WAIT_OR_SYNC_NAME = "waiting or exposed communication"  # if how much of it is which was not measured
assert PHASE_NAMES.keys() == PHASE_COLOURS.keys()


def loss_chart(losses: Mapping[int, float | None], evaluations: Sequence[tuple[int, float]]) -> LineChart:
    """Return the chart of training and validation losses over steps."""
    steps, values = downsample([(step + 1, value) for step, value in losses.items() if value is not None])
    lines = [ChartLine("training", SERIES_COLOURS[0], steps, values)] if steps else []
    if evaluations:
        lines.append(ChartLine("validation", SERIES_COLOURS[1], *_unzip(evaluations), dots=True))
    return LineChart(lines, "step", "loss")


def learning_rate_chart(steps: Sequence[Mapping[int, StepRecord]]) -> LineChart:
    """Return the chart of the learning rate over steps."""
    points = [(record.step + 1, record.lr) for of_step in steps if (record := next(iter(of_step.values())))]
    return LineChart([ChartLine("learning rate", SERIES_COLOURS[2], *downsample(points))], "step", "learning rate")


def grad_norm_chart(steps: Sequence[Mapping[int, StepRecord]]) -> LineChart | None:
    """Return the chart of the gradient norm over steps; None without clipping, which measures it."""
    records = [next(iter(of_step.values())) for of_step in steps]
    points = [(record.step + 1, record.grad_norm) for record in records if record.grad_norm is not None]
    if not points:
        return None
    return LineChart(
        [ChartLine("gradient norm", SERIES_COLOURS[3], *downsample(points))], "step", "gradient norm, before clipping"
    )


def breakdown_bars(costs: Mapping[str, StepCost]) -> BarChart:
    """Return one bar per label: the phases of a step end to end."""
    parts = {PHASE_NAMES[part]: [getattr(cost, part) for cost in costs.values()]
             for part in PHASE_NAMES if any(getattr(cost, part) for cost in costs.values())}  # fmt: skip
    return BarChart(list(costs), parts, {PHASE_NAMES[part]: colour for part, colour in PHASE_COLOURS.items()})


def unmeasured_phases(costs: Iterable[StepCost]) -> list[str]:
    """Return the phases that none of these costs has measured."""
    known = list(costs)
    return [part for part in PHASE_NAMES if all(getattr(cost, part) is None for cost in known)]


def breakdown_areas(steps: Sequence[Mapping[int, StepRecord]], names: Mapping[int, str]) -> ChartSelector:
    """Return stacked areas of every step's phases: one chart for the mean of all ranks, and one per rank."""
    ranks = sorted({rank for of_step in steps for rank in of_step})
    layers = {ALL_RANKS: ranks} if len(ranks) > 1 else {}
    layers |= {names[rank]: [rank] for rank in (ranks if len(ranks) <= MAX_LAYERS else [ranks[0], ranks[-1]])}
    walls_s = [record.wall_s for of_step in steps for record in of_step.values()]
    unit, factor = _time_unit(percentile(walls_s, 0.98))
    high = factor * min(1.05 * max(walls_s), 1.25 * percentile(walls_s, 0.98))
    return ChartSelector({
        layer: LineChart(
            [ChartLine(PHASE_NAMES[part], PHASE_COLOURS[part], *downsample(points))
             for part in PHASE_NAMES if (points := _mean_points(steps, part, shown, factor))],
            "step", unit, y_range=(0.0, high), stacked=True)
        for layer, shown in layers.items()
    })  # fmt: skip


def _mean_points(steps: Sequence[Mapping[int, StepRecord]], part: str, ranks: Sequence[int], factor: float,
           ) -> list[tuple[int, float]]:  # fmt: skip
    """Return (step, mean of one phase over some ranks) for the steps in which any of them measured it."""
    points = []
    for of_step in steps:
        records = [record for rank, record in of_step.items() if rank in ranks]
        measured = [cost for record in records if (cost := getattr(record.cost, part)) is not None]
        if measured:
            points.append((records[0].step + 1, factor * sum(measured) / len(measured)))
    return points


def all_reduce_chart(steps: Sequence[Mapping[int, StepRecord]], summary: RunSummary) -> LineChart:
    """Return the chart of the all-reduce time of every step as the last rank saw it: in flight, and exposed."""
    in_flight, exposed = [], []
    for of_step in steps:
        step = next(iter(of_step))
        blocked_s = [
            record.cost.exposed_sync_s for record in of_step.values() if record.cost.exposed_sync_s is not None
        ]
        in_flight += [(of_step[step].step + 1, least)] if (least := min_sync_s(dict(of_step))) is not None else []
        exposed += [(of_step[step].step + 1, min(blocked_s))] if blocked_s else []
    values_s = [value for _, value in in_flight + exposed]
    unit, factor = _time_unit(percentile(values_s, 0.98))
    lines = [
        ChartLine(name, colour, *downsample([(step, factor * value) for step, value in points]))
        for name, points, colour in (
            ("in flight", in_flight, SERIES_COLOURS[0]),
            ("exposed", exposed, PHASE_COLOURS["exposed_sync_s"]),
        )
        if points
    ]
    high = min(1.05 * max(values_s), 1.5 * percentile(values_s, 0.98))
    marks = {f"{name} {format_seconds(value)}": factor * value
             for name, value in (("p50", summary.sync_p50_s), ("p95", summary.sync_p95_s)) if value}  # fmt: skip
    return LineChart(lines, "step", unit, y_range=(0.0, factor * high or 1.0), marks=marks)


def scaling_chart(series: Mapping[str, Sequence[RunSummary]]) -> LineChart:
    """Return the chart of tokens/s over processes: a line per corpus, and ideal scaling from the first run, dashed."""
    lines = []
    for index, (corpus, runs) in enumerate(series.items()):
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        lines.append(ChartLine(corpus, colour, *_unzip(measured_points(runs)), dots=True))
        if ideal := ideal_points(runs):
            lines.append(ChartLine(f"{corpus}, nothing lost", colour, *_unzip(ideal), dashed=True))
    counts = sorted({num for runs in series.values() for num, _ in measured_points(runs)})
    high = max((y for line in lines for y in line.y), default=1.0)
    return LineChart(lines, "processes", "tokens/s", y_range=(0.0, 1.08 * high), x_ticks=[float(num) for num in counts])


def throughput_bars(runs: Mapping[str, RunSummary]) -> BarChart:
    """Return one bar of tokens/s per run, with a mark at the planner's prediction."""
    shown = {label: run for label, run in runs.items() if run.tokens_per_s}
    predicted = [option.tokens_per_s if (option := run.predicted) else None for run in shown.values()]
    rates, colours = [run.tokens_per_s for run in shown.values()], {"tokens/s": SERIES_COLOURS[0]}
    marks = predicted if any(predicted) else None
    return BarChart(list(shown), {"tokens/s": rates}, colours, format_value=format_count, predicted=marks)


def tradeoff_scatter(runs: Mapping[str, RunSummary]) -> ScatterPlot:
    """Return a dot per run, tokens/s against validation loss: right is faster, low is better."""
    return ScatterPlot(tradeoff_points(runs), SERIES_COLOURS[0], "tokens/s", "validation loss")


def tradeoff_points(runs: Mapping[str, RunSummary]) -> list[tuple[str, float, float]]:
    """Return (label, tokens/s, validation loss) of the runs that have both."""
    return [(label, run.tokens_per_s, result.val_loss) for label, run in runs.items()
            if run.tokens_per_s and (result := run.manifest.result) and result.val_loss is not None]  # fmt: skip


def measured_points(runs: Sequence[RunSummary]) -> list[tuple[int, float]]:
    """Return (processes, tokens/s) of the measured runs, ascending."""
    return sorted((run.manifest.world_size, run.tokens_per_s) for run in runs if run.tokens_per_s)


def ideal_points(runs: Sequence[RunSummary]) -> list[tuple[int, float]]:
    """Return the line of ideal scaling, from the run with the fewest processes up to the number of cores."""
    points = measured_points(runs)
    if not points:
        return []
    num, rate = points[0]
    last = min(max(run.cores for run in runs), points[-1][0])
    return [(num, rate), (last, rate / num * last)] if last > num else []


def downsample(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Downsample a line to at most MAX_POINTS points by averaging groups of neighbours.

    >>> downsample([(0, 1.0), (1, 2.0)])
    ([0, 1], [1.0, 2.0])
    """
    size = -(-len(points) // MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [group[0][0] for group in groups], [sum(v for _, v in group) / len(group) for group in groups]


def _unzip(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _time_unit(value_s: float) -> tuple[str, float]:
    """Return (unit for durations of this size, units per second).

    >>> _time_unit(0.3), _time_unit(36.0)
    (('ms', 1000.0), ('s', 1.0))
    """
    return ("s", 1.0) if value_s >= 2 else ("ms", 1e3)
