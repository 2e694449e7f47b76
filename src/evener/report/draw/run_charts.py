"""Build the charts of one run, running or ended, and of several runs: losses, throughput, step breakdown, all-reduces,
scaling, trade-off.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from evener.core.base.units import format_count, format_seconds, percentile
from evener.core.run.step_cost import PHASE_NAMES, StepCost, StepRecord
from evener.core.run.step_statistics import min_sync_s
from evener.report.draw.smoothing import kernel_average, local_linear_fit, without_spikes
from evener.report.draw.svg_charts import BarChart, ChartBand, ChartLine, ChartSelector, LineChart, ScatterPlot
from evener.report.read.downsampled_series import CurvePoints
from evener.report.read.recorded_run import RecordedRun
from evener.report.read.run_summary import RunSummary

ALL_RANKS = "mean of all ranks"
MAX_POINTS = 500  # of one line; more cannot be distinguished
MAX_LAYERS = 8  # ranks with a chart each; of more, show the first and the last
MAX_DOTS = 40  # of a line
MIN_NOISE_POINTS = 5
NOISE_SPAN = 0.1  # share of the points to average over: for one step, either term of the noise may be negative
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

CURVE_AXES = {"tokens": "tokens", "step": "step", "time": "training time"}  # training time counts steps alone
CURVE_CHARTS = ("loss", "speed", "gradients", "schedule", "noise", "fidelity")
COMPARISON_CHARTS = ("loss", "validation", "speed")


# --- curves -----------------------------------------------------------------------------------------------------------


class CurveAxis:
    """The x axis of the curves of some runs: steps, tokens, or the time spent in steps."""

    def __init__(self, kind: str, runs: Iterable[RecordedRun]) -> None:
        longest_s = max((run.curves.train_time_s for run in runs), default=0.0)
        unit, self._unit_s = ("h", 3600.0) if longest_s >= 7200 else ("min", 60.0) if longest_s >= 120 else ("s", 1.0)
        self._kind, self.title = kind, CURVE_AXES[kind] + (f", {unit}" if kind == "time" else "")

    def positions(self, run: RecordedRun, steps: Sequence[int]) -> list[float]:
        """Return the positions at which these steps of a run, counted from 0, end."""
        if self._kind == "time":
            series = run.curves.shared_series["wall_s"]
            ends_s = np.cumsum([0.0, *series.bucket_sums]) / self._unit_s
            return [float(at) for at in np.interp(steps, [-1, *series.points().steps], ends_s)]
        return [(run.tokens_per_step if self._kind == "tokens" else 1.0) * (step + 1) for step in steps]


def curve_charts(run: RecordedRun, axis: str = "step") -> dict[str, LineChart]:
    """Return the charts of a run's metrics over its steps, by name (see CURVE_CHARTS), without unmeasured metrics."""
    charts = {
        "loss": loss_chart(run, axis),
        "speed": throughput_chart(run, axis),
        "gradients": metric_chart(run, "grad_norm", "gradient norm, before clipping", SERIES_COLOURS[3], axis),
        "schedule": metric_chart(run, "lr", "learning rate", SERIES_COLOURS[2], axis),
        "noise": noise_scale_chart(run, axis),
        "fidelity": metric_chart(run, "error", "relative error of the lossy sums", SERIES_COLOURS[4], axis),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def loss_chart(run: RecordedRun, axis: str = "step") -> LineChart | None:
    """Return the chart of the training loss of each step, smoothed, and of the validation loss."""
    x, points = CurveAxis(axis, [run]), run.curves.shared_series["loss"].points()
    bands, lines = _raw_layers(run, "loss", points, x, SERIES_COLOURS[0])
    if len(points):
        smooth = local_linear_fit(without_spikes(points.means))
        lines.append(ChartLine("training, smoothed", SERIES_COLOURS[0], x.positions(run, points.steps), smooth))
    if run.val_losses:
        lines.append(_validation_line("validation", SERIES_COLOURS[1], run, x))
    width = run.curves.shared_series["loss"].bucket_steps
    note = f"Each point stands for {width} steps; the band spans their minimum and maximum." if width > 1 else ""
    return LineChart(lines, x.title, "loss", bands=bands, note=note) if lines else None


def throughput_chart(run: RecordedRun, axis: str = "step") -> LineChart | None:
    """Return the chart of the tokens/s of each step, smoothed, and of the prediction."""
    x, walls_s, rates = CurveAxis(axis, [run]), run.curves.shared_series["wall_s"].points(), _throughputs(run)
    if not rates:
        return None
    lows, highs = ([run.tokens_per_step / wall_s for wall_s in series] for series in (walls_s.highs, walls_s.lows))
    means = [run.tokens_per_step / wall_s for wall_s in walls_s.means]
    bands, lines = _raw_layers(run, "wall_s", CurvePoints(walls_s.steps, means, lows, highs), x, SERIES_COLOURS[2])
    lines.append(ChartLine("smoothed", SERIES_COLOURS[2], x.positions(run, walls_s.steps), rates))
    option, sync = run.summary.predicted, run.summary.manifest.roster.sync
    predicted = [option.tokens_per_s] if option is not None and option.roster.sync == sync else []
    marks = {f"predicted {format_count(rate)}": rate for rate in predicted}
    high = 1.25 * max([percentile(means, 0.98), *marks.values()])
    return LineChart(lines, x.title, f"{run.summary.unit}/s", y_range=(0.0, high), marks=marks, bands=bands)


def _throughputs(run: RecordedRun) -> list[float]:
    """Return the smoothed tokens/s at each point of the step times; none if the batch is unknown."""
    means = run.curves.shared_series["wall_s"].points().means
    return [run.tokens_per_step / wall_s for wall_s in kernel_average(means)] if run.tokens_per_step and means else []


def metric_chart(run: RecordedRun, name: str, title: str, colour: str, axis: str = "step") -> LineChart | None:
    """Return the chart of a metric that is the same on all ranks; None if it was not measured."""
    x, points = CurveAxis(axis, [run]), run.curves.shared_series[name].points()
    if not len(points):
        return None
    bands, _ = _raw_layers(run, name, points, x, colour)
    line = ChartLine(title, colour, x.positions(run, points.steps), points.means)
    return LineChart([line], x.title, title, bands=bands)


def noise_scale_chart(run: RecordedRun, axis: str = "step") -> LineChart | None:
    """Return the chart of the gradient noise scale, with a mark at the batch size; None if too little was measured.

    Both terms are averaged before the division, as in core.run.step_cost.noise_scale.
    """
    norm_sq, trace = (run.curves.shared_series[name].points() for name in ("norm_sq", "trace"))
    if len(norm_sq) < MIN_NOISE_POINTS or len(norm_sq) != len(trace) or not run.tokens_per_step:
        return None
    span = max(2.0, NOISE_SPAN * len(norm_sq))
    means = zip(norm_sq.steps, kernel_average(trace.means, span), kernel_average(norm_sq.means, span), strict=True)
    steps, scales = _unzip([(step, above / below) for step, above, below in means if above > 0 < below])
    if not steps:
        return None
    x = CurveAxis(axis, [run])
    return LineChart(
        [ChartLine("noise scale", SERIES_COLOURS[4], x.positions(run, steps), scales)],
        x.title,
        "gradient noise scale, tokens",
        (0.0, 1.15 * max(run.tokens_per_step, percentile(scales, 0.95))),
        marks={f"batch {format_count(run.tokens_per_step)}": run.tokens_per_step},
        note="Up to about this many tokens, a larger batch improves a step nearly in proportion.",
    )


def _raw_layers(
    run: RecordedRun, name: str, points: CurvePoints, x: CurveAxis, colour: str
) -> tuple[list[ChartBand], list[ChartLine]]:
    """Return what a smoothed line hides: the value of each step, or the range of each bucket of several."""
    xs = x.positions(run, points.steps)
    if run.curves.shared_series[name].bucket_steps > 1:
        return [ChartBand(colour, xs, points.lows, points.highs)], []
    return [], [ChartLine("each step", colour, xs, points.means, faint=True)] if xs else []


def _validation_line(name: str, colour: str, run: RecordedRun, x: CurveAxis, *, dashed: bool = False) -> ChartLine:
    steps, losses = downsample(run.val_losses)
    positions = x.positions(run, [int(step) - 1 for step in steps])
    return ChartLine(name, colour, positions, losses, dashed=dashed, dots=len(steps) < MAX_DOTS)


def breakdown_chart(run: RecordedRun, ranks: Sequence[int], axis: str = "step") -> LineChart | None:
    """Return the chart of the phases over the steps, stacked, as means of these ranks; None if nothing was measured."""
    x, by_rank = CurveAxis(axis, [run]), [run.curves.phase_series[rank] for rank in ranks]
    width = max((series.bucket_steps for phases in by_rank for series in phases.values()), default=1)
    means: dict[str, dict[int, float]] = {}
    for phase in PHASE_NAMES:
        buckets: dict[int, tuple[int, list[float]]] = {}  # ranks that joined later have narrower buckets
        for phases in by_rank:
            points = phases[phase].points()
            for step, mean in zip(points.steps, points.means, strict=True):
                last, values = buckets.get(step // width, (0, []))
                buckets[step // width] = max(last, step), [*values, mean]
        means[phase] = {step: sum(values) / len(values) for step, values in buckets.values()}
    steps = sorted(set(itertools.chain(*means.values())))
    if not steps:
        return None
    totals_s = [sum(of_phase.get(step, 0.0) for of_phase in means.values()) for step in steps]
    unit, factor = _time_unit(percentile(totals_s, 0.98))
    lines = [
        ChartLine(PHASE_NAMES[phase], PHASE_COLOURS[phase], x.positions(run, [*of_phase]),
                  [factor * mean for mean in of_phase.values()])
        for phase, of_phase in means.items() if of_phase
    ]  # fmt: skip
    high = factor * min(1.05 * max(totals_s), 1.25 * percentile(totals_s, 0.98)) or 1.0
    title = f"{unit} of a step" + (f", {ALL_RANKS}" if len(ranks) > 1 else "")
    return LineChart(lines, x.title, title, y_range=(0.0, high), stacked=True)


def breakdown_areas(run: RecordedRun) -> ChartSelector:
    """Return the `breakdown_chart` of the mean of all ranks and of each rank (if many, of the first and the last)."""
    ranks = sorted(run.curves.phase_series)
    layers = {ALL_RANKS: ranks} if len(ranks) > 1 else {}
    shown = ranks if len(ranks) <= MAX_LAYERS else [ranks[0], ranks[-1]]
    layers |= {run.summary.manifest.roster.rank_label(rank): [rank] for rank in shown}
    charts = {layer: breakdown_chart(run, of_layer) for layer, of_layer in layers.items()}
    return ChartSelector({layer: chart for layer, chart in charts.items() if chart is not None})


def breakdown_bars(costs: Mapping[str, StepCost]) -> BarChart:
    """Return one bar per label: the phases of a step end to end."""
    parts = {PHASE_NAMES[part]: [getattr(cost, part) for cost in costs.values()]
             for part in PHASE_NAMES if any(getattr(cost, part) for cost in costs.values())}  # fmt: skip
    return BarChart(list(costs), parts, {PHASE_NAMES[part]: colour for part, colour in PHASE_COLOURS.items()})


def unmeasured_phases(costs: Iterable[StepCost]) -> list[str]:
    """Return the phases for which none of these costs holds a measured time."""
    known = list(costs)
    return [part for part in PHASE_NAMES if all(getattr(cost, part) is None for cost in known)]


# --- curves of several runs -------------------------------------------------------------------------------------------


def comparison_charts(runs: Mapping[str, RecordedRun], axis: str) -> dict[str, LineChart]:
    """Return the charts of loss, validation loss and tokens/s, each with a line per run in which it was measured."""
    x = CurveAxis(axis, runs.values())
    lines: dict[str, list[ChartLine]] = {"loss": [], "validation": [], "speed": []}
    for number, (label, run) in enumerate(runs.items()):
        colour, dashed = SERIES_COLOURS[number % len(SERIES_COLOURS)], number >= len(SERIES_COLOURS)
        if len(points := run.curves.shared_series["loss"].points()):
            smooth = local_linear_fit(without_spikes(points.means))
            lines["loss"].append(ChartLine(label, colour, x.positions(run, points.steps), smooth, dashed=dashed))
        if run.val_losses:
            lines["validation"].append(_validation_line(label, colour, run, x, dashed=dashed))
        if rates := _throughputs(run):
            steps = run.curves.shared_series["wall_s"].points().steps
            lines["speed"].append(ChartLine(label, colour, x.positions(run, steps), rates, dashed=dashed))
    titles = {"loss": "loss, smoothed", "validation": "validation loss", "speed": "tokens/s, smoothed"}
    fastest = max((rate for line in lines["speed"] for rate in line.y), default=1.0)
    ranges = {"speed": (0.0, 1.15 * fastest)}
    return {
        name: LineChart(of_runs, x.title, titles[name], y_range=ranges.get(name))
        for name, of_runs in lines.items()
        if of_runs
    }


# --- steps, benches ---------------------------------------------------------------------------------------------------


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
