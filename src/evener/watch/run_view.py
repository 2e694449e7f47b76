"""Key figures, curves and tables of one run while it trains, recomputed from its `RunReader`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evener.core.base.units import format_bytes, format_count, format_seconds, median, percentile, pluralize
from evener.core.cluster.host_info import HostInfo
from evener.core.run.progress import seconds_left
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import PHASE_NAMES, StepCost
from evener.report.draw.run_charts import PHASE_COLOURS, SERIES_COLOURS
from evener.report.draw.smoothing import kernel_average, local_linear_fit
from evener.report.draw.svg_charts import ChartBand, ChartLine, LineChart, spread_indices
from evener.report.explain.predicted_vs_measured import format_relative_difference
from evener.report.pages.host_vitals_table import host_table
from evener.report.pages.html_template import KeyFigure
from evener.report.read.event_log import EventText, describe_event
from evener.watch.downsampled_series import CurvePoints
from evener.watch.run_health import RunHealth, current_prediction
from evener.watch.run_reader import RunReader

RECENT_STEPS = 20  # newest steps that rates are averaged over
MAX_EVENTS = 100
MAX_STRIPS = 16
CURVE_AXES = {"step": "step", "tokens": "tokens", "time": "time spent in steps"}


@dataclass(frozen=True)
class StepStrip:
    """One rank's newest steps, phase by phase."""

    name: str
    mean_cost: StepCost  # their mean
    steps: list[tuple[int, StepCost]]


@dataclass(frozen=True)
class PlotWithTable:
    """A chart and the table of its figures."""

    chart: LineChart
    head: list[str]
    rows: list[list[str]]
    note: str = ""


# --- figures ----------------------------------------------------------------------------------------------------------


def tokens_per_step(reader: RunReader) -> float | None:
    """Return the tokens of one global batch: from the manifest, else from the newest records; None if unknown."""
    manifest = reader.manifest
    if manifest is not None and manifest.shape is not None:
        return float(manifest.spec.train.batch * manifest.shape.block_size)
    last = reader.curves.last_record
    if last is None:
        return None
    newest = [records[-1] for records in reader.curves.newest.values() if records]
    return sum(record.tokens for record in newest if record.step >= last.step - 1) or None


def typical_step_s(reader: RunReader) -> float | None:
    """Return the typical step time: the median of the newest steps, or their mean if ranks do not exchange in every
    step (DiLoCo). For a run that is over, the median of all steps.
    """
    manifest = reader.manifest
    if reader.is_over and (median_s := reader.median_step_s()) is not None:
        return median_s
    every = manifest.roster.sync.every if manifest else 1
    walls_s = [record.wall_s for record in reader.curves.leader_records][-max(RECENT_STEPS, every) :]
    return sum(walls_s) / len(walls_s) if every > 1 and walls_s else median(walls_s)


def tokens_per_s(reader: RunReader) -> float | None:
    """Return the tokens per second of a typical step."""
    tokens, took_s = tokens_per_step(reader), typical_step_s(reader)
    return tokens / took_s if tokens and took_s else None


def rank_cost(reader: RunReader, rank: int) -> StepCost:
    """Return a rank's mean step cost over its newest steps, or over all steps of a run that is over."""
    return reader.curves.mean_cost(rank) if reader.is_over else reader.curves.recent_cost(rank, RECENT_STEPS)


def communication_share(reader: RunReader) -> float | None:
    """Return the share of step time, averaged over ranks, spent communicating or waiting; None for a single rank."""
    costs = [rank_cost(reader, rank) for rank in reader.curves.newest]
    total_s = sum(cost.total_s for cost in costs)
    if len(reader.curves.newest) < 2 or not total_s:
        return None
    return sum((cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0) for cost in costs) / total_s


def time_left_s(reader: RunReader) -> float | None:
    """Return the estimated seconds until the run ends; None if unknown or over."""
    manifest, last, each_s = reader.manifest, reader.curves.last_record, typical_step_s(reader)
    if manifest is None or last is None or each_s is None or reader.is_over:
        return None
    began = [float(event["time"]) for event in reader.events if event.get("event") == "start"]
    spent_s = last.ended - (began[-1] if began else manifest.started)
    train = manifest.spec.train
    return seconds_left(each_s, max(0, train.steps - reader.curves.steps_done), train.max_s, spent_s)


def newest_loss(reader: RunReader) -> tuple[int, str] | None:
    """Return (steps taken, loss) of the last step whose loss was a number."""
    last = reader.curves.last_record
    if last is not None and last.loss is not None:
        return last.step + 1, f"{last.loss:.4f}"
    points = reader.curves.shared_series["loss"].points()
    return (points.steps[-1] + 1, f"{points.means[-1]:.4f}") if len(points) else None


def validation_points(reader: RunReader) -> CurvePoints:
    """Return the newest validation loss of each step, thinned to about 512 points.

    Losses of steps that a restart rolled back are dropped.
    """
    losses_by_step: dict[int, float] = {}
    for event in reader.events:
        step, loss = event.get("step"), event.get("val_loss")
        if event.get("event") == "start" and isinstance(step, int):
            losses_by_step = {known: value for known, value in losses_by_step.items() if known <= step}
        if event.get("event") == "evaluation" and isinstance(step, int) and isinstance(loss, float):
            losses_by_step[step] = loss
    steps = sorted(losses_by_step)
    every = -(-len(steps) // 512) or 1
    steps = [step for i, step in enumerate(steps) if i % every == 0 or i == len(steps) - 1]
    losses = [losses_by_step[step] for step in steps]
    return CurvePoints([step - 1 for step in steps], losses, losses, losses)


def progress_share(reader: RunReader) -> float:
    """Return the share of the run that is done, by steps or by its time limit, whichever is greater."""
    manifest, last = reader.manifest, reader.curves.last_record
    if manifest is None or last is None:
        return 0.0
    remaining_s = time_left_s(reader)
    spent_s = sum(reader.curves.shared_series["wall_s"].bucket_sums)
    by_steps = reader.curves.steps_done / manifest.spec.train.steps
    if manifest.spec.train.max_s is None or remaining_s is None:
        return min(1.0, by_steps)
    return min(1.0, max(by_steps, spent_s / (spent_s + remaining_s) if spent_s else 0.0))


def key_figures(reader: RunReader, health: RunHealth) -> list[KeyFigure]:
    """Return the key figures at the top of the page."""
    manifest, option = reader.manifest, current_prediction(reader)
    if manifest is None:
        return []
    vals, newest = validation_points(reader), newest_loss(reader)
    rate, each_s, share = tokens_per_s(reader), typical_step_s(reader), communication_share(reader)
    at, no_plan = "", "not predicted: run evener probe first"
    if len(vals):
        is_best = vals.means[-1] <= min(vals.means)
        at = f"after step {vals.steps[-1] + 1:,}" + (", the best" if is_best else f"; best {min(vals.means):.4f}")
    of_what = "of all steps" if reader.is_over else "of the newest steps"
    shown = [
        KeyFigure("loss", newest[1] if newest else None, f"after {pluralize(newest[0] if newest else 0, 'step')}"),
        KeyFigure("validation loss", f"{vals.means[-1]:.4f}" if len(vals) else None, at),
        KeyFigure(
            "tokens/s",
            None if rate is None else format_count(rate),
            _predicted_note(rate, option.tokens_per_s, format_count) if option else no_plan,
        ),
        KeyFigure(
            "step",
            None if each_s is None else format_seconds(each_s),
            _predicted_note(each_s, option.step_s, format_seconds) if option else f"median {of_what}",
        ),
        KeyFigure(
            "communication",
            None if share is None else f"{share:.0%}",
            f"{of_what}, waiting included" + _bytes_sent(reader),
        ),
    ]
    if health.is_over:
        took = None if manifest.ended is None else format_seconds(manifest.ended - manifest.started)
        shown.append(KeyFigure("took", took))
    else:
        remaining_s = time_left_s(reader)
        shown.append(KeyFigure("left", None if remaining_s is None else format_seconds(remaining_s)))
    return shown if manifest.world_size > 1 else [fact for fact in shown if fact.name != "communication"]


def _predicted_note(measured: float | None, expected: float, format_value: Callable[[float], str]) -> str:
    return f"predicted {format_value(expected)}" + (
        "" if measured is None else f", {format_relative_difference(measured / expected - 1)}"
    )


def _bytes_sent(reader: RunReader) -> str:
    last = reader.curves.last_record
    return f"; a rank sends {format_bytes(last.bytes)}" if last is not None and last.bytes else ""


# --- curves -----------------------------------------------------------------------------------------------------------


class CurveAxis:
    """The x axis of a curve: steps, tokens, or time spent in steps."""

    def __init__(self, reader: RunReader, kind: str) -> None:
        tokens = tokens_per_step(reader)
        self.title, self._factor, self._times = "step", 1.0, None
        if kind == "tokens" and tokens:
            self.title, self._factor = "tokens", tokens
        if kind == "time":
            series = reader.curves.shared_series["wall_s"]
            steps, spent_s = series.points().steps, np.cumsum(series.bucket_sums)
            if len(steps):
                unit, factor = ("hours", 3600.0) if spent_s[-1] > 7200 else ("minutes", 60.0)
                if spent_s[-1] < 120:
                    unit, factor = "seconds", 1.0
                self.title = f"{unit} spent in steps"
                self._times = np.array([-1, *steps]), np.array([0.0, *(spent_s / factor)])

    def positions(self, steps: Sequence[int]) -> list[float]:
        """Return the positions at which these steps, counted from 0, end."""
        if self._times is not None:
            return [float(at) for at in np.interp(steps, *self._times)]
        return [self._factor * (step + 1) for step in steps]


def loss_plot(reader: RunReader, kind: str = "step") -> PlotWithTable | None:
    """Plot the training loss of each step, smoothed, and the validation loss."""
    points, vals, axis = (
        reader.curves.shared_series["loss"].points(),
        validation_points(reader),
        CurveAxis(reader, kind),
    )
    if not len(points) and not len(vals):
        return None
    smooth, lines, bands = local_linear_fit(points.means), list[ChartLine](), list[ChartBand]()
    if len(points):
        bands, lines = _raw_layers(
            points, axis, SERIES_COLOURS[0], "each step", reader.curves.shared_series["loss"].bucket_steps
        )
        lines.append(ChartLine("training, smoothed", SERIES_COLOURS[0], axis.positions(points.steps), smooth))
    if len(vals):
        lines.append(
            ChartLine("validation", SERIES_COLOURS[1], axis.positions(vals.steps), vals.means, dots=len(vals) < 40)
        )
    rows = [[f"{step + 1:,}", f"{points.means[i]:.4f}", f"{points.lows[i]:.4f}", f"{points.highs[i]:.4f}"]
            for i, step in _spread_steps(points.steps)]  # fmt: skip
    rows_of_vals = [[f"{step + 1:,}", f"{vals.means[i]:.4f}", "", ""] for i, step in _spread_steps(vals.steps)]
    remark = _bucket_note(reader.curves.shared_series["loss"].bucket_steps)
    return PlotWithTable(LineChart(lines, axis.title, "loss", bands=bands), ["after step", "loss", "min", "max"],
                rows + [[f"validation, {cells[0]}", *cells[1:]] for cells in rows_of_vals], remark)  # fmt: skip


def throughput_plot(reader: RunReader, kind: str = "step") -> PlotWithTable | None:
    """Plot the tokens/s of each step and the prediction."""
    points, tokens, axis = (
        reader.curves.shared_series["wall_s"].points(),
        tokens_per_step(reader),
        CurveAxis(reader, kind),
    )
    if not len(points) or not tokens:
        return None
    rates = [tokens / wall_s for wall_s in points.means]
    lows, highs = ([tokens / wall_s for wall_s in walls_s] for walls_s in (points.highs, points.lows))
    colour, width = SERIES_COLOURS[2], reader.curves.shared_series["wall_s"].bucket_steps
    raw = CurvePoints(points.steps, rates, lows, highs)
    bands, lines = _raw_layers(raw, axis, colour, "each step", width)
    smooth = [tokens / wall_s for wall_s in kernel_average(points.means)]
    lines.append(ChartLine("smoothed", colour, axis.positions(points.steps), smooth))
    option = current_prediction(reader)
    high = 1.25 * max(percentile(rates, 0.98), option.tokens_per_s if option else 0.0)
    marks = {f"predicted {format_count(option.tokens_per_s)}": option.tokens_per_s} if option else {}
    rows = [
        [f"{step + 1:,}", format_count(rates[i]), format_count(lows[i]), format_count(highs[i])]
        for i, step in _spread_steps(points.steps)
    ]
    chart = LineChart(lines, axis.title, "tokens/s", y_range=(0.0, high), marks=marks, bands=bands)
    return PlotWithTable(chart, ["after step", "tokens/s", "min", "max"], rows)


def metric_plot(
    reader: RunReader, name: str, title: str, colour: str, kind: str, value_format: str = "{:.4g}"
) -> PlotWithTable | None:
    """Plot a metric that is the same on all ranks."""
    series, axis = reader.curves.shared_series[name], CurveAxis(reader, kind)
    points = series.points()
    if not len(points):
        return None
    bands = _raw_layers(points, axis, colour, title, series.bucket_steps)[0]
    lines = [ChartLine(title, colour, axis.positions(points.steps), points.means)]
    rows = [[f"{step + 1:,}", value_format.format(points.means[i])] for i, step in _spread_steps(points.steps)]
    return PlotWithTable(LineChart(lines, axis.title, title, bands=bands), ["after step", title], rows)


def noise_scale_plot(reader: RunReader, kind: str = "step") -> PlotWithTable | None:
    """Plot the gradient noise scale and mark the batch size."""
    points, axis, tokens = reader.curves.noise_scale(), CurveAxis(reader, kind), tokens_per_step(reader)
    if points is None or not tokens:
        return None
    lines = [ChartLine("noise scale", SERIES_COLOURS[4], axis.positions(points.steps), points.means)]
    high = 1.15 * max(tokens, percentile(points.means, 0.95))
    chart = LineChart(
        lines, axis.title, "gradient noise scale, tokens", (0.0, high), marks={f"batch {format_count(tokens)}": tokens}
    )
    rows = [[f"{step + 1:,}", format_count(points.means[i])] for i, step in _spread_steps(points.steps)]
    return PlotWithTable(chart, ["after step", "tokens"], rows,
                "Up to about this many tokens, a larger batch improves a step nearly in proportion.")  # fmt: skip


def breakdown_plot(reader: RunReader, kind: str = "step") -> PlotWithTable | None:
    """Plot the time of each phase of a step over the whole run: the mean of all ranks."""
    axis, lines, means = CurveAxis(reader, kind), list[ChartLine](), dict[str, dict[int, float]]()
    width = max(
        (series.bucket_steps for by_phase in reader.curves.phase_series.values() for series in by_phase.values()),
        default=1,
    )
    for phase in PHASE_NAMES:
        buckets: dict[int, tuple[int, list[float]]] = {}  # ranks that joined later have narrower buckets
        for by_phase in reader.curves.phase_series.values():
            points = by_phase[phase].points()
            for step, mean in zip(points.steps, points.means, strict=True):
                last, values = buckets.get(step // width, (0, []))
                buckets[step // width] = max(last, step), [*values, mean]
        means[phase] = {step: sum(values) / len(values) for step, values in buckets.values()}
    steps = sorted(set(itertools.chain(*means.values())))
    if not steps:
        return None
    totals = [sum(phase_means.get(step, 0.0) for phase_means in means.values()) for step in steps]
    unit, factor = ("s", 1.0) if percentile(totals, 0.98) >= 2 else ("ms", 1e3)
    for phase, phase_means in means.items():
        if any(phase_means.values()):
            values = [factor * value for value in phase_means.values()]
            lines.append(ChartLine(PHASE_NAMES[phase], PHASE_COLOURS[phase], axis.positions(list(phase_means)), values))
    high = factor * min(1.05 * max(totals), 1.25 * percentile(totals, 0.98))
    rows = [
        [f"{step + 1:,}", *(format_seconds(means[phase].get(step)) for phase in PHASE_NAMES)]
        for _, step in _spread_steps(steps)
    ]
    return PlotWithTable(
        LineChart(lines, axis.title, f"{unit} of a step, mean of all ranks", (0.0, high or 1.0), stacked=True),
        ["after step", *PHASE_NAMES.values()],
        rows,
    )


def _raw_layers(
    points: CurvePoints, axis: CurveAxis, colour: str, name: str, width: int
) -> tuple[list[ChartBand], list[ChartLine]]:
    """Return what a smoothed line hides: the value of each step, or the range of each bucket of several."""
    xs = axis.positions(points.steps)
    if width > 1:
        return [ChartBand(colour, xs, points.lows, points.highs)], []
    return [], [ChartLine(name, colour, xs, points.means, faint=True)]


def _bucket_note(width: int) -> str:
    return f"Each point stands for {width} steps; the band spans their minimum and maximum." if width > 1 else ""


def _spread_steps(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return (index, step) of a few steps spread over all, the first and the last included.

    >>> _spread_steps([5, 6, 7])
    [(0, 5), (1, 6), (2, 7)]
    """
    return [(i, steps[i]) for i in spread_indices(len(steps))]


# --- ranks and hosts --------------------------------------------------------------------------------------------------


def rank_strips(reader: RunReader) -> list[StepStrip]:
    """Return the newest steps of each rank, up to MAX_STRIPS ranks."""
    manifest = reader.manifest
    return [
        StepStrip(
            manifest.roster.rank_label(rank) if manifest else f"rank {rank}",
            reader.curves.recent_cost(rank, RECENT_STEPS),
            [(record.step, record.cost) for record in records],
        )
        for rank, records in sorted(reader.curves.newest.items())[:MAX_STRIPS]
        if records
    ]


FRESH_VITALS_S = 60.0  # generous, because host clocks differ
HOST_COLUMNS = ["host", "ranks", "share", "arithmetic", "compute", "machine", "now"]


def host_rows(reader: RunReader) -> list[list[str]]:
    """Return a row per host: its ranks, share of the global batch, dtype, compute time, hardware and membership."""
    manifest = reader.manifest
    if manifest is None:
        return []
    shares, present = _current_shares(reader, manifest), _current_hosts(reader, manifest)
    machines = {machine.host: machine for machine in manifest.hosts}
    rows = []
    for host in dict.fromkeys([*manifest.roster.hosts, *present]):
        members = [(i, member) for i, member in enumerate(manifest.roster.members) if member.host == host]
        share = sum(shares[i] for i, _ in members if i < len(shares))
        compute_times_s = [mean.compute_s for _, member in members if member.rank in reader.curves.newest
                    and (mean := rank_cost(reader, member.rank)).compute_s is not None]  # fmt: skip
        machine = machines.get(host)
        rows.append([
            host,
            ", ".join(str(member.rank) for _, member in members),
            f"{share:g} of {manifest.roster.batch}" if members else "",
            ", ".join(dict.fromkeys(member.dtype for _, member in members)),
            format_seconds(max(compute_times_s)) if compute_times_s else "not measured",
            f"{machine.cpu}, {pluralize(machine.cores, 'core')}, {_memory_text(machine)}" if machine else "",
            "took part" if reader.is_over else "takes part" if host in present else "is away",
        ])  # fmt: skip
    return rows


def host_vitals_table(reader: RunReader, now: float) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the hosts' newest vitals; traffic is shown next to the measured link bandwidth, if any."""
    prediction = reader.plan.prediction if reader.plan else None
    fresh = {host: [vitals] for host, vitals in reader.vitals.items()
             if now - vitals.time < FRESH_VITALS_S and not reader.is_over}  # fmt: skip
    head, rows = host_table(fresh)
    if prediction is not None and "sent" in head:
        bandwidths_Bps = {host: max(wire.bandwidth_Bps for wire in wires.values())
                 for host, wires in prediction.cluster.wires.items() if wires}  # fmt: skip
        column = head.index("sent")
        for row in rows:
            if row[0] in bandwidths_Bps and row[column] != "–":
                row[column] += f" of {format_bytes(bandwidths_Bps[row[0]])}/s"
    return ["host", *head[1:]], rows


def _memory_text(machine: HostInfo) -> str:
    return "memory not measured" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)


def _current_shares(reader: RunReader, manifest: Manifest) -> list[float]:
    """Return each member's sequences per step, from the newest rebalance since the membership last changed."""
    for event in reversed(reader.events):
        shares = event.get("shares")
        if event.get("event") == "rebalanced" and isinstance(shares, list) and len(shares) == manifest.world_size:
            return [float(share) for share in shares if isinstance(share, int | float)]
        if event.get("event") in ("start", "world", "rechosen"):
            break
    return manifest.roster.mean_shares


def _current_hosts(reader: RunReader, manifest: Manifest) -> list[str]:
    """Return the hosts of the newest membership epoch, or all hosts of the roster if there was no change."""
    for event in reversed(reader.events):
        if event.get("event") == "world" and isinstance(event.get("hosts"), list):
            return [str(host) for host in event["hosts"]]
        if event.get("event") == "start":
            break
    return manifest.roster.hosts


def event_texts(reader: RunReader) -> list[EventText]:
    """Return the newest events as text, newest first."""
    manifest = reader.manifest
    if manifest is None:
        return [EventText(None, str(event["event"]), str(event.get("error") or event.get("what") or ""),
                     str(event.get("hint") or ""), is_bad=event["event"] == "failure")
                for event in reversed(reader.events[-MAX_EVENTS:])]  # fmt: skip
    return [describe_event(event, manifest) for event in reversed(reader.events[-MAX_EVENTS:])]


def run_descriptions(reader: RunReader) -> list[str]:
    """Return the model, the corpus, the hosts, the sync strategy and the dtypes, each as a phrase."""
    manifest = reader.manifest
    if manifest is None:
        return []
    roster = manifest.roster
    return [
        f"{manifest.spec.model.model if manifest.shape else 'custom model'} "
        f"({format_count(manifest.num_params)} parameters)",
        manifest.corpus.name if manifest.corpus else manifest.spec.data.data,
        f"{pluralize(manifest.world_size, 'process')} on {', '.join(roster.hosts)}",
        *([f"--sync {roster.sync}"] if manifest.world_size > 1 else []),
        roster.dtypes_text,
    ]
