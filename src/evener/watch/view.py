"""Key figures, curves and tables of one run while it trains, recomputed from its `RunReader`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evener.core.machine import Machine
from evener.core.progress import seconds_left
from evener.core.rundir import Manifest
from evener.core.step import StepCost
from evener.core.units import count, median, percentile, plural, seconds, size
from evener.report.chart import Band, Chart, Line, spread
from evener.report.events import Told, tell
from evener.report.figures import PART_COLOURS, PART_NAMES, SERIES_COLOURS
from evener.report.hosts import host_table
from evener.report.markup import Fact
from evener.report.predicted import percent
from evener.report.smooth import averaged, smoothed
from evener.watch.health import Health, predicted
from evener.watch.reader import Reader
from evener.watch.series import Points

RECENT = 20  # newest steps that rates are averaged over
MAX_EVENTS = 100
MAX_STRIPS = 16
AXES = {"step": "step", "tokens": "tokens", "time": "time spent in steps"}


@dataclass(frozen=True)
class Strip:
    """One rank's newest steps, phase by phase."""

    name: str
    now: StepCost  # their mean
    steps: list[tuple[int, StepCost]]


@dataclass(frozen=True)
class Plot:
    """A chart and the table of its figures."""

    chart: Chart
    head: list[str]
    rows: list[list[str]]
    remark: str = ""


# --- figures ----------------------------------------------------------------------------------------------------------


def tokens_per_step(reader: Reader) -> float | None:
    """Return the tokens of one global batch: from the manifest, else from the newest records; None if unknown."""
    manifest = reader.manifest
    if manifest is not None and manifest.shape is not None:
        return float(manifest.spec.train.batch * manifest.shape.block_size)
    last = reader.curves.last
    if last is None:
        return None
    newest = [records[-1] for records in reader.curves.newest.values() if records]
    return sum(record.tokens for record in newest if record.step >= last.step - 1) or None


def step_s(reader: Reader) -> float | None:
    """Return the typical step time: the median of the newest steps, or their mean if ranks do not exchange in every
    step (DiLoCo). For a run that is over, the median of all steps.
    """
    manifest = reader.manifest
    if reader.is_over and (median_s := reader.typical_step_s()) is not None:
        return median_s
    every = manifest.roster.sync.every if manifest else 1
    walls_s = [record.wall_s for record in reader.curves.leader][-max(RECENT, every) :]
    return sum(walls_s) / len(walls_s) if every > 1 and walls_s else median(walls_s)


def tokens_per_s(reader: Reader) -> float | None:
    """Return the tokens per second of a typical step."""
    tokens, took_s = tokens_per_step(reader), step_s(reader)
    return tokens / took_s if tokens and took_s else None


def cost(reader: Reader, rank: int) -> StepCost:
    """Return a rank's mean step cost over its newest steps, or over all steps of a run that is over."""
    return reader.curves.typical(rank) if reader.is_over else reader.curves.now(rank, RECENT)


def communication(reader: Reader) -> float | None:
    """Return the share of step time, averaged over ranks, spent communicating or waiting; None for a single rank."""
    costs = [cost(reader, rank) for rank in reader.curves.newest]
    total_s = sum(cost.total_s for cost in costs)
    if len(reader.curves.newest) < 2 or not total_s:
        return None
    return sum((cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0) for cost in costs) / total_s


def left_s(reader: Reader) -> float | None:
    """Return the estimated seconds until the run ends; None if unknown or over."""
    manifest, last, each_s = reader.manifest, reader.curves.last, step_s(reader)
    if manifest is None or last is None or each_s is None or reader.is_over:
        return None
    began = [float(event["time"]) for event in reader.events if event.get("event") == "start"]
    spent_s = last.ended - (began[-1] if began else manifest.started)
    train = manifest.spec.train
    return seconds_left(each_s, max(0, train.steps - reader.curves.done), train.max_s, spent_s)


def newest_loss(reader: Reader) -> tuple[int, str] | None:
    """Return (steps taken, loss) of the last step whose loss was a number."""
    last = reader.curves.last
    if last is not None and last.loss is not None:
        return last.step + 1, f"{last.loss:.4f}"
    points = reader.curves.shared["loss"].points()
    return (points.steps[-1] + 1, f"{points.means[-1]:.4f}") if len(points) else None


def validation(reader: Reader) -> Points:
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
    return Points([step - 1 for step in steps], losses, losses, losses)


def progress(reader: Reader) -> float:
    """Return the share of the run that is done, by steps or by its time limit, whichever is greater."""
    manifest, last = reader.manifest, reader.curves.last
    if manifest is None or last is None:
        return 0.0
    remaining_s = left_s(reader)
    spent_s = sum(reader.curves.shared["wall_s"].sums)
    by_steps = reader.curves.done / manifest.spec.train.steps
    if manifest.spec.train.max_s is None or remaining_s is None:
        return min(1.0, by_steps)
    return min(1.0, max(by_steps, spent_s / (spent_s + remaining_s) if spent_s else 0.0))


def facts(reader: Reader, health: Health) -> list[Fact]:
    """Return the key figures at the top of the page."""
    manifest, option = reader.manifest, predicted(reader)
    if manifest is None:
        return []
    vals, newest = validation(reader), newest_loss(reader)
    rate, each_s, share = tokens_per_s(reader), step_s(reader), communication(reader)
    at, no_plan = "", "not predicted: run evener probe first"
    if len(vals):
        is_best = vals.means[-1] <= min(vals.means)
        at = f"after step {vals.steps[-1] + 1:,}" + (", the best" if is_best else f"; best {min(vals.means):.4f}")
    of_what = "of all steps" if reader.is_over else "of the newest steps"
    shown = [
        Fact("loss", newest[1] if newest else None, f"after {plural(newest[0] if newest else 0, 'step')}"),
        Fact("validation loss", f"{vals.means[-1]:.4f}" if len(vals) else None, at),
        Fact("tokens/s", None if rate is None else count(rate), _beside(rate, option.tokens_per_s, count) if option
             else no_plan),
        Fact("step", None if each_s is None else seconds(each_s), _beside(each_s, option.step_s, seconds) if option
             else f"median {of_what}"),
        Fact("communication", None if share is None else f"{share:.0%}",
             f"{of_what}, waiting included" + _bytes_sent(reader)),
    ]  # fmt: skip
    if health.is_over:
        took = None if manifest.ended is None else seconds(manifest.ended - manifest.started)
        shown.append(Fact("took", took))
    else:
        remaining_s = left_s(reader)
        shown.append(Fact("left", None if remaining_s is None else seconds(remaining_s)))
    return shown if manifest.world_size > 1 else [fact for fact in shown if fact.name != "communication"]


def _beside(measured: float | None, expected: float, told: Callable[[float], str]) -> str:
    return f"predicted {told(expected)}" + ("" if measured is None else f", {percent(measured / expected - 1)}")


def _bytes_sent(reader: Reader) -> str:
    last = reader.curves.last
    return f"; a rank sends {size(last.bytes)}" if last is not None and last.bytes else ""


# --- curves -----------------------------------------------------------------------------------------------------------


class Axis:
    """The x axis of a curve: steps, tokens, or time spent in steps."""

    def __init__(self, reader: Reader, kind: str) -> None:
        tokens = tokens_per_step(reader)
        self.title, self._factor, self._times = "step", 1.0, None
        if kind == "tokens" and tokens:
            self.title, self._factor = "tokens", tokens
        if kind == "time":
            series = reader.curves.shared["wall_s"]
            steps, spent_s = series.points().steps, np.cumsum(series.sums)
            if len(steps):
                unit, factor = ("hours", 3600.0) if spent_s[-1] > 7200 else ("minutes", 60.0)
                if spent_s[-1] < 120:
                    unit, factor = "seconds", 1.0
                self.title = f"{unit} spent in steps"
                self._times = np.array([-1, *steps]), np.array([0.0, *(spent_s / factor)])

    def of(self, steps: Sequence[int]) -> list[float]:
        """Return the positions at which these steps, counted from 0, end."""
        if self._times is not None:
            return [float(at) for at in np.interp(steps, *self._times)]
        return [self._factor * (step + 1) for step in steps]


def loss(reader: Reader, kind: str = "step") -> Plot | None:
    """Plot the training loss of each step, smoothed, and the validation loss."""
    points, vals, axis = reader.curves.shared["loss"].points(), validation(reader), Axis(reader, kind)
    if not len(points) and not len(vals):
        return None
    smooth, lines, bands = smoothed(points.means), list[Line](), list[Band]()
    if len(points):
        bands, lines = _raw(points, axis, SERIES_COLOURS[0], "each step", reader.curves.shared["loss"].width)
        lines.append(Line("training, smoothed", SERIES_COLOURS[0], axis.of(points.steps), smooth))
    if len(vals):
        lines.append(Line("validation", SERIES_COLOURS[1], axis.of(vals.steps), vals.means, dots=len(vals) < 40))
    rows = [[f"{step + 1:,}", f"{points.means[i]:.4f}", f"{points.lows[i]:.4f}", f"{points.highs[i]:.4f}"]
            for i, step in _some(points.steps)]  # fmt: skip
    rows_of_vals = [[f"{step + 1:,}", f"{vals.means[i]:.4f}", "", ""] for i, step in _some(vals.steps)]
    remark = _each(reader.curves.shared["loss"].width)
    return Plot(Chart(lines, axis.title, "loss", bands=bands), ["after step", "loss", "min", "max"],
                rows + [[f"validation, {cells[0]}", *cells[1:]] for cells in rows_of_vals], remark)  # fmt: skip


def speed(reader: Reader, kind: str = "step") -> Plot | None:
    """Plot the tokens/s of each step and the prediction."""
    points, tokens, axis = reader.curves.shared["wall_s"].points(), tokens_per_step(reader), Axis(reader, kind)
    if not len(points) or not tokens:
        return None
    rates = [tokens / wall_s for wall_s in points.means]
    lows, highs = ([tokens / wall_s for wall_s in walls_s] for walls_s in (points.highs, points.lows))
    colour, width = SERIES_COLOURS[2], reader.curves.shared["wall_s"].width
    raw = Points(points.steps, rates, lows, highs)
    bands, lines = _raw(raw, axis, colour, "each step", width)
    smooth = [tokens / wall_s for wall_s in averaged(points.means)]
    lines.append(Line("smoothed", colour, axis.of(points.steps), smooth))
    option = predicted(reader)
    high = 1.25 * max(percentile(rates, 0.98), option.tokens_per_s if option else 0.0)
    marks = {f"predicted {count(option.tokens_per_s)}": option.tokens_per_s} if option else {}
    rows = [[f"{step + 1:,}", count(rates[i]), count(lows[i]), count(highs[i])] for i, step in _some(points.steps)]
    chart = Chart(lines, axis.title, "tokens/s", y_range=(0.0, high), marks=marks, bands=bands)
    return Plot(chart, ["after step", "tokens/s", "min", "max"], rows)


def curve(reader: Reader, name: str, title: str, colour: str, kind: str, told: str = "{:.4g}") -> Plot | None:
    """Plot a metric that is the same on all ranks."""
    series, axis = reader.curves.shared[name], Axis(reader, kind)
    points = series.points()
    if not len(points):
        return None
    bands = _raw(points, axis, colour, title, series.width)[0]
    lines = [Line(title, colour, axis.of(points.steps), points.means)]
    rows = [[f"{step + 1:,}", told.format(points.means[i])] for i, step in _some(points.steps)]
    return Plot(Chart(lines, axis.title, title, bands=bands), ["after step", title], rows)


def noise(reader: Reader, kind: str = "step") -> Plot | None:
    """Plot the gradient noise scale and mark the batch size."""
    points, axis, tokens = reader.curves.noise(), Axis(reader, kind), tokens_per_step(reader)
    if points is None or not tokens:
        return None
    lines = [Line("noise scale", SERIES_COLOURS[4], axis.of(points.steps), points.means)]
    high = 1.15 * max(tokens, percentile(points.means, 0.95))
    chart = Chart(
        lines, axis.title, "gradient noise scale, tokens", (0.0, high), marks={f"batch {count(tokens)}": tokens}
    )
    rows = [[f"{step + 1:,}", count(points.means[i])] for i, step in _some(points.steps)]
    return Plot(chart, ["after step", "tokens"], rows,
                "Up to about this many tokens, a larger batch improves a step nearly in proportion.")  # fmt: skip


def parts(reader: Reader, kind: str = "step") -> Plot | None:
    """Plot the time of each phase of a step over the whole run: the mean of all ranks."""
    axis, lines, means = Axis(reader, kind), list[Line](), dict[str, dict[int, float]]()
    width = max((series.width for by_phase in reader.curves.parts.values() for series in by_phase.values()), default=1)
    for phase in PART_NAMES:
        buckets: dict[int, tuple[int, list[float]]] = {}  # ranks that joined later have narrower buckets
        for by_phase in reader.curves.parts.values():
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
            lines.append(Line(PART_NAMES[phase], PART_COLOURS[phase], axis.of(list(phase_means)), values))
    high = factor * min(1.05 * max(totals), 1.25 * percentile(totals, 0.98))
    rows = [[f"{step + 1:,}", *(seconds(means[phase].get(step)) for phase in PART_NAMES)] for _, step in _some(steps)]
    return Plot(Chart(lines, axis.title, f"{unit} of a step, mean of all ranks", (0.0, high or 1.0), stacked=True),
                ["after step", *PART_NAMES.values()], rows)  # fmt: skip


def _raw(points: Points, axis: Axis, colour: str, name: str, width: int) -> tuple[list[Band], list[Line]]:
    """Return what a smoothed line hides: the value of each step, or the range of each bucket of several."""
    xs = axis.of(points.steps)
    if width > 1:
        return [Band(colour, xs, points.lows, points.highs)], []
    return [], [Line(name, colour, xs, points.means, faint=True)]


def _each(width: int) -> str:
    return f"Each point stands for {width} steps; the band spans their minimum and maximum." if width > 1 else ""


def _some(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return (index, step) of a few steps spread over all, the first and the last included.

    >>> _some([5, 6, 7])
    [(0, 5), (1, 6), (2, 7)]
    """
    return [(i, steps[i]) for i in spread(len(steps))]


# --- ranks and hosts --------------------------------------------------------------------------------------------------


def strips(reader: Reader) -> list[Strip]:
    """Return the newest steps of each rank, up to MAX_STRIPS ranks."""
    manifest = reader.manifest
    return [
        Strip(manifest.roster.name_of(rank) if manifest else f"rank {rank}", reader.curves.now(rank, RECENT),
              [(record.step, record.cost) for record in records])
        for rank, records in sorted(reader.curves.newest.items())[:MAX_STRIPS]
        if records
    ]  # fmt: skip


FRESH_S = 60.0  # generous, because host clocks differ
HOST_HEAD = ["host", "ranks", "share", "arithmetic", "compute", "machine", "now"]


def hosts(reader: Reader) -> list[list[str]]:
    """Return a row per host: its ranks, share of the global batch, dtype, compute time, hardware and membership."""
    manifest = reader.manifest
    if manifest is None:
        return []
    shares, present = _shares(reader, manifest), _there(reader, manifest)
    machines = {machine.host: machine for machine in manifest.hosts}
    rows = []
    for host in dict.fromkeys([*manifest.roster.hosts, *present]):
        members = [(i, member) for i, member in enumerate(manifest.roster.members) if member.host == host]
        share = sum(shares[i] for i, _ in members if i < len(shares))
        compute_times_s = [mean.compute_s for _, member in members if member.rank in reader.curves.newest
                    and (mean := cost(reader, member.rank)).compute_s is not None]  # fmt: skip
        machine = machines.get(host)
        rows.append([
            host,
            ", ".join(str(member.rank) for _, member in members),
            f"{share:g} of {manifest.roster.batch}" if members else "",
            ", ".join(dict.fromkeys(member.dtype for _, member in members)),
            seconds(max(compute_times_s)) if compute_times_s else "not measured",
            f"{machine.cpu}, {plural(machine.cores, 'core')}, {_memory(machine)}" if machine else "",
            "took part" if reader.is_over else "takes part" if host in present else "is away",
        ])  # fmt: skip
    return rows


def machines(reader: Reader, now: float) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the hosts' newest vitals; traffic is shown next to the measured link bandwidth, if any."""
    prediction = reader.plan.prediction if reader.plan else None
    fresh = {host: [vitals] for host, vitals in reader.vitals.items()
             if now - vitals.time < FRESH_S and not reader.is_over}  # fmt: skip
    head, rows = host_table(fresh)
    if prediction is not None and "sent" in head:
        bandwidths_Bps = {host: max(wire.bandwidth_Bps for wire in wires.values())
                 for host, wires in prediction.cluster.wires.items() if wires}  # fmt: skip
        column = head.index("sent")
        for row in rows:
            if row[0] in bandwidths_Bps and row[column] != "–":
                row[column] += f" of {size(bandwidths_Bps[row[0]])}/s"
    return ["host", *head[1:]], rows


def _memory(machine: Machine) -> str:
    return "memory not measured" if machine.memory_bytes is None else size(machine.memory_bytes)


def _shares(reader: Reader, manifest: Manifest) -> list[float]:
    """Return each member's sequences per step, from the newest rebalance since the membership last changed."""
    for event in reversed(reader.events):
        shares = event.get("shares")
        if event.get("event") == "rebalanced" and isinstance(shares, list) and len(shares) == manifest.world_size:
            return [float(share) for share in shares if isinstance(share, int | float)]
        if event.get("event") in ("start", "world", "rechosen"):
            break
    return manifest.roster.mean_shares


def _there(reader: Reader, manifest: Manifest) -> list[str]:
    """Return the hosts of the newest membership epoch, or all hosts of the roster if there was no change."""
    for event in reversed(reader.events):
        if event.get("event") == "world" and isinstance(event.get("hosts"), list):
            return [str(host) for host in event["hosts"]]
        if event.get("event") == "start":
            break
    return manifest.roster.hosts


def events(reader: Reader) -> list[Told]:
    """Return the newest events as text, newest first."""
    manifest = reader.manifest
    if manifest is None:
        return [Told(None, str(event["event"]), str(event.get("error") or event.get("what") or ""),
                     str(event.get("hint") or ""), is_bad=event["event"] == "failure")
                for event in reversed(reader.events[-MAX_EVENTS:])]  # fmt: skip
    return [tell(event, manifest) for event in reversed(reader.events[-MAX_EVENTS:])]


def what(reader: Reader) -> list[str]:
    """Return the model, the corpus, the hosts, the sync strategy and the dtypes, each as a phrase."""
    manifest = reader.manifest
    if manifest is None:
        return []
    roster = manifest.roster
    return [
        f"{manifest.spec.model.model if manifest.shape else 'custom model'} ({count(manifest.num_params)} parameters)",
        manifest.corpus.name if manifest.corpus else manifest.spec.data.data,
        f"{plural(manifest.world_size, 'process')} on {', '.join(roster.hosts)}",
        *([f"--sync {roster.sync}"] if manifest.world_size > 1 else []),
        roster.dtypes,
    ]
