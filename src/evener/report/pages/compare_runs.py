"""Compare runs: settings that differ, outcomes, learning curves and step breakdowns.

compare_runs(["runs/a", "runs/b"])  ─▶  comparison_page(…), comparison_markdown(…), comparison_json(…),
                                        and the chart (png_charts.comparison_png)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.units import format_bytes, format_count, format_seconds
from evener.core.run.prediction import Prediction
from evener.core.run.run_spec import FLAGS
from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import PHASE_NAMES, StepRecord, align_steps, first_rank_record
from evener.report.draw import run_charts
from evener.report.draw.run_charts import SERIES_COLOURS
from evener.report.draw.smoothing import local_linear_fit
from evener.report.draw.svg_charts import ChartLine, ChartSelector, Figure, LineChart
from evener.report.explain.explain_run import explain_measurements
from evener.report.explain.predicted_vs_measured import step_prediction_cells
from evener.report.explain.speedup_verdict import MIN_SPEEDUP
from evener.report.pages.compare_setups import ROUNDING_TOLERANCE
from evener.report.pages.html_template import render_document
from evener.report.read.event_log import evaluations
from evener.report.read.run_summary import RunSummary, read_records, summarize_run, summary_json
from evener.report.read.stragglers import fastest_rank

MAX_RUN_COLUMNS = 6  # show up to this many runs as columns; more as rows
MULTI_RANK_PHASES = ("exposed_sync_s", "wait_s")  # phases that exist only with several ranks
ComparisonRows = list[tuple[str, list[str]]]  # (name, value in each run)
CURVE_AXES = {"tokens": "tokens", "step": "step", "time": "training time"}  # x axes of a learning curve


class LearningCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A run's losses by step, with the tokens read and the training time at the end of each step."""

    steps: list[int]
    tokens: list[float]
    train_time_s: list[float]  # sum of step times, without pauses between starts, evaluations and checkpoints
    losses: list[tuple[int, float]]  # (index into `steps`, loss), if measured
    evaluations: list[tuple[int, float]]  # (steps taken, validation loss)

    def axis_value(self, axis: str, index: int) -> float:
        """Return the position on `axis` at which the step with this index ends."""
        along: dict[str, Sequence[float]] = {"tokens": self.tokens, "step": self.steps, "time": self.train_time_s}
        return along[axis][index]

    def smoothed_losses(self) -> list[tuple[int, float]]:
        """Return the smoothed losses, thinned to at most MAX_POINTS points."""
        indices, losses = run_charts.downsample(self.losses)
        return list(zip(map(int, indices), local_linear_fit(losses), strict=True))


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Runs and their learning curves, by the shortest labels that distinguish them."""

    runs: dict[str, RunSummary]
    curves: dict[str, LearningCurve]

    @property
    def differences(self) -> ComparisonRows:
        """The settings that differ; see `setting_differences`."""
        return setting_differences([run.manifest for run in self.runs.values()])


def compare_runs(paths: Sequence[str | Path]) -> RunComparison:
    """Read and summarize the runs in these directories."""
    labels = distinct_labels([str(path) for path in paths])
    rundirs = {label: RunDir(path) for label, path in zip(labels, paths, strict=True)}
    runs = {label: summarize_run(rundir) for label, rundir in rundirs.items()}
    curves = {label: learning_curve(align_steps(read_records(rundir)), rundir.events(), runs[label])
              for label, rundir in rundirs.items()}  # fmt: skip
    return RunComparison(runs=runs, curves=curves)


def distinct_labels(paths: Sequence[str]) -> list[str]:
    """Return the shortest path suffixes that distinguish the paths.

    >>> distinct_labels(["runs/a", "runs/b"]), distinct_labels(["one/a", "two/a", "two/b"]), distinct_labels(["a", "a"])
    (['a', 'b'], ['one/a', 'two/a', 'two/b'], ['a', 'a (2)'])
    """
    parts = [Path(path).resolve().parts for path in paths]
    different = len(set(parts))
    deepest = max(map(len, parts), default=1)
    length = next((n for n in range(1, deepest) if len({each[-n:] for each in parts}) == different), deepest)
    shown = ["/".join(each[-length:]) for each in parts]
    return [name if name not in shown[:i] else f"{name} ({shown[: i + 1].count(name)})" for i, name in enumerate(shown)]


def learning_curve(
    steps: Sequence[Mapping[int, StepRecord]], events: Sequence[dict[str, Any]], summary: RunSummary
) -> LearningCurve:
    """Build the learning curve of a run from its aligned records."""
    firsts = [first_rank_record(of_step) for of_step in steps]
    evaluated = dict(evaluations(events))
    result = summary.manifest.result
    if result is not None and result.val_loss is not None:
        evaluated[result.steps] = result.val_loss
    return LearningCurve(
        steps=[record.step + 1 for record in firsts],
        tokens=list(accumulate(sum(record.tokens for record in of_step.values()) for of_step in steps)),
        train_time_s=list(accumulate(record.wall_s for record in firsts)),
        losses=[(index, record.loss) for index, record in enumerate(firsts) if record.loss is not None],
        evaluations=sorted(evaluated.items()),
    )


# --- what differs -----------------------------------------------------------------------------------------------------


def setting_differences(manifests: Sequence[Manifest]) -> ComparisonRows:
    """Return the settings, hosts and versions that differ between runs."""
    requested = {
        flag.name: [flag.value(manifest.spec) for manifest in manifests]
        for flag in FLAGS.values()
        if flag.field != "out"
    }
    actual: dict[str, list[Any]] = {
        "sync strategy": [str(manifest.roster.sync) for manifest in manifests],
        "processes": [manifest.world_size for manifest in manifests],
        "hosts": [", ".join(manifest.roster.hosts) for manifest in manifests],
        "devices": [", ".join(dict.fromkeys(rank.device for rank in manifest.ranks)) for manifest in manifests],
        "threads": [", ".join(dict.fromkeys(str(rank.threads) for rank in manifest.ranks)) for manifest in manifests],
        "computes in": [manifest.roster.dtypes_text for manifest in manifests],
        "compiled": [manifest.compiled for manifest in manifests],
        "parameters": [f"{manifest.num_params:,}" for manifest in manifests],
        "corpus hash": [manifest.corpus.content_hash if manifest.corpus else None for manifest in manifests],
        "evener's code": [manifest.code_hash for manifest in manifests],
        **{name: [manifest.versions.get(name) for manifest in manifests] for name in ("evener", "torch", "python")},
    }
    flag_of = {"sync strategy": "--sync", "processes": "--ranks", "threads": "--threads"}
    for name, flag in flag_of.items():
        if list(map(str, actual[name])) == list(map(str, requested[flag])):
            del actual[name]
    rows = requested | actual
    return [
        (name, _format_values(values)) for name, values in rows.items() if any(value != values[0] for value in values)
    ]


def _format_values(values: Sequence[Any]) -> list[str]:
    """Format values as they are typed on the command line; shorten digests."""
    texts = [
        "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values
    ]
    if all(len(text) > 24 and text.isascii() for text in texts):
        return [text.removeprefix("sha256:")[:8] for text in texts]
    return [{"True": "yes", "False": "no"}.get(text, text) for text in texts]


def outcome_rows(comparison: RunComparison) -> ComparisonRows:
    """Return the result rows: losses, throughput, step breakdown, memory, cost."""
    runs, curves = list(comparison.runs.values()), list(comparison.curves.values())
    base = runs[0].tokens_per_s

    def loss(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.4f}"

    def of_several(figure: Callable[[RunSummary], float | None]) -> list[str]:
        return ["–" if run.manifest.world_size == 1 else format_seconds(figure(run)) for run in runs]

    several = len(runs) > 1
    ratios = [run.tokens_per_s / base if run.tokens_per_s and base else None for run in runs]
    rows: ComparisonRows = [
        ("ended", [run.manifest.verdict for run in runs]),
        ("steps", [f"{run.num_steps:,}" for run in runs]),
        ("tokens read", [format_count(curve.tokens[-1]) if curve.tokens else "0" for curve in curves]),
        ("loss", [loss(run.last_loss) for run in runs]),
        ("validation loss", [loss(curve.evaluations[-1][1] if curve.evaluations else None) for curve in curves]),
        ("  the best", [loss(min((value for _, value in curve.evaluations), default=None)) for curve in curves]),
        ("tokens/s", [format_count(run.tokens_per_s) for run in runs]),
        *([("  × the first", ["not measured" if x is None else f"{x:.2f}" for x in ratios])] if several else []),
        ("step", [format_seconds(run.step_p50_s) for run in runs]),
        *(
            [("  predicted", [step_prediction_cells(run)[0] for run in runs])]
            if any(run.predicted for run in runs)
            else []
        ),
        *((f"  {name}", [_phase_cell(run, part) for run in runs]) for part, name in PHASE_NAMES.items()),
        ("all-reduce p50", of_several(lambda run: run.sync_p50_s)),
        ("a rank sends", [_sent_bytes_cell(run) for run in runs]),
        ("peak memory", [_memory_cell(run) for run in runs]),
        ("training time", [format_seconds(curve.train_time_s[-1] if curve.train_time_s else None) for curve in curves]),
    ]
    costs = [
        energy_and_price(
            run.prediction if curve.train_time_s else None,
            run.manifest,
            curve.train_time_s[-1] if curve.train_time_s else 0.0,
        )
        for run, curve in zip(runs, curves, strict=True)
    ]
    if any(kwh is not None for kwh, _ in costs):
        rows.append(("electricity", ["not known" if kwh is None else f"{kwh:.3g} kWh" for kwh, _ in costs]))
    if any(money is not None for _, money in costs):
        rows.append(("price", ["not known" if money is None else f"{money:.2f}" for _, money in costs]))
    return rows


def _phase_cell(run: RunSummary, part: str) -> str:
    """Format one phase of the median step on the rank that waits most."""
    if part in MULTI_RANK_PHASES and run.manifest.world_size == 1:
        return "–"
    return format_seconds(getattr(fastest_rank(run).typical, part)) if run.step_p50_s else "not measured"


def _sent_bytes_cell(run: RunSummary) -> str:
    sent = max((rank.bytes for rank in run.ranks if rank.bytes is not None), default=None)
    return "–" if run.manifest.world_size == 1 else "not measured" if sent is None else f"{format_bytes(sent)} a step"


def _memory_cell(run: RunSummary) -> str:
    result = run.manifest.result
    return format_bytes(max(result.peak_memory_bytes)) if result and result.peak_memory_bytes else "not measured"


def energy_and_price(
    prediction: Prediction | None, manifest: Manifest, train_time_s: float
) -> tuple[float | None, float | None]:
    """Return (kWh, price) of `train_time_s` seconds of training, from the fleet file's watts and prices; None for a
    figure that the file does not give for all hosts.
    """
    if prediction is None:
        return None, None
    hosts = [prediction.cluster.hosts.get(name) for name in manifest.roster.hosts]
    watts = [host.watts for host in hosts if host is not None and host.watts is not None]
    prices = [host.price_per_h for host in hosts if host is not None and host.price_per_h is not None]
    hours = train_time_s / 3600
    return (hours * sum(watts) / 1000 if len(watts) == len(hosts) else None,
            hours * sum(prices) if len(prices) == len(hosts) else None)  # fmt: skip


def explain_comparison(comparison: RunComparison) -> list[str]:
    """Return sentences: which run is the fastest, which has the lowest loss, and whether they are comparable."""
    sentences = []
    rates = {label: run.tokens_per_s for label, run in comparison.runs.items() if run.tokens_per_s}
    if len(rates) > 1:
        fastest, slowest = max(rates, key=lambda label: rates[label]), min(rates, key=lambda label: rates[label])
        ratio = rates[fastest] / rates[slowest]
        if ratio < MIN_SPEEDUP:
            sentences.append(
                f"All train about as fast: {format_count(rates[slowest])} to {format_count(rates[fastest])} tokens/s."
            )
        else:
            sentences.append(
                f"{fastest} trains fastest: {format_count(rates[fastest])} tokens/s, {ratio:.2f} times {slowest}."
            )
    ends = {label: curve.evaluations[-1] for label, curve in comparison.curves.items() if curve.evaluations}
    if len(ends) > 1:
        losses = {label: loss for label, (_, loss) in ends.items()}
        best, worst = min(losses, key=lambda label: losses[label]), max(losses, key=lambda label: losses[label])
        read = {label: comparison.curves[label].tokens[-1] for label in ends if comparison.curves[label].tokens}
        unequal = len(read) > 1 and max(read.values()) > 1.01 * min(read.values())
        after = "; they did not read equally many tokens" if unequal else ""
        if losses[worst] / losses[best] - 1 < ROUNDING_TOLERANCE:
            sentences.append(f"All have learned the same: validation loss {losses[best]:.4f}{after}.")
        else:
            sentences.append(f"{best} has the lowest validation loss, {losses[best]:.4f}; {worst} has "
                             f"{losses[worst]:.4f}, "
                        f"{losses[worst] / losses[best] - 1:.1%} more{after}.")  # fmt: skip
    texts = {run.manifest.corpus.content_hash for run in comparison.runs.values() if run.manifest.corpus}
    if len(texts) > 1:
        sentences.append("They trained on different corpora: their losses cannot be compared.")
    return sentences


# --- tables, pages, Markdown ------------------------------------------------------------------------------------------


def comparison_table(labels: Sequence[str], facts: ComparisonRows) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return (head, rows): figures down and runs across; the transpose for more than MAX_RUN_COLUMNS runs."""
    if len(labels) <= MAX_RUN_COLUMNS:
        return ["", *labels], [(name, *values) for name, values in facts]
    across = [(label, *(values[i] for _, values in facts)) for i, label in enumerate(labels)]
    return ["run", *(name.strip(" ·") for name, _ in facts)], across


def loss_chart(comparison: RunComparison) -> ChartSelector:
    """Return the chart of smoothed training losses by tokens, steps or time."""
    return _curve_chart(comparison, lambda curve: curve.smoothed_losses(), "loss, smoothed", dots=False)


def validation_chart(comparison: RunComparison) -> ChartSelector | None:
    """Return the chart of validation losses; None if no run evaluated more than once."""

    def points(curve: LearningCurve) -> list[tuple[int, float]]:
        places = {steps: index for index, steps in enumerate(curve.steps)}
        return [(places[steps], loss) for steps, loss in curve.evaluations if steps in places]

    if not any(len(points(curve)) > 1 for curve in comparison.curves.values()):
        return None
    return _curve_chart(comparison, points, "validation loss", dots=True)


def _curve_chart(
    comparison: RunComparison, points: Callable[[LearningCurve], list[tuple[int, float]]], title: str, *, dots: bool
) -> ChartSelector:
    longest_s = max((curve.train_time_s[-1] for curve in comparison.curves.values() if curve.train_time_s), default=0.0)
    unit, factor = ("h", 1 / 3600) if longest_s >= 7200 else ("min", 1 / 60) if longest_s >= 120 else ("s", 1.0)
    charts = {}
    for axis, name in CURVE_AXES.items():
        scale = factor if axis == "time" else 1.0
        lines = []
        for number, (label, curve) in enumerate(comparison.curves.items()):
            over = [(scale * curve.axis_value(axis, index), loss) for index, loss in points(curve)]
            x, y = run_charts.downsample(over)
            colour, dashed = SERIES_COLOURS[number % len(SERIES_COLOURS)], number >= len(SERIES_COLOURS)
            lines.append(ChartLine(label, colour, x, y, dashed=dashed, dots=dots))
        charts[f"by {name}"] = LineChart(lines, f"{name}, {unit}" if axis == "time" else name, title)
    return ChartSelector(charts)


def comparison_page(comparison: RunComparison, title: str) -> str:
    """Return the comparison as one HTML file that opens offline."""
    labels = list(comparison.runs)
    drawn: dict[str, Figure] = {}
    if any(curve.losses for curve in comparison.curves.values()):
        drawn["losses"] = loss_chart(comparison)
    if chart := validation_chart(comparison):
        drawn["validation"] = chart
    measured = {label: fastest_rank(run).typical for label, run in comparison.runs.items() if run.step_p50_s}
    if measured:
        drawn["parts"] = run_charts.breakdown_bars(measured)
    differ = comparison.differences

    def shown(facts: ComparisonRows) -> tuple[list[str], list[tuple[str, ...]]]:
        return comparison_table(
            labels, [(f"· {name[2:]}" if name.startswith("  ") else name, values) for name, values in facts]
        )

    return render_document(
        "compare_runs.html",
        title=f"{title}: evener",
        figures=drawn,
        labels=labels,
        story=explain_comparison(comparison),
        differ=shown(differ) if differ else None,
        came=shown(outcome_rows(comparison)),
    )


def comparison_markdown(comparison: RunComparison) -> str:
    """Return the comparison as Markdown for an issue, a README or a pull request."""
    labels = list(comparison.runs)
    parts = (
        [" ".join(explain_comparison(comparison))]
        if len(labels) > 1
        else explain_measurements(comparison.runs[labels[0]])
    )
    facts = (comparison.differences if len(labels) > 1 else []) + outcome_rows(comparison)
    return "\n\n".join([*parts, markdown_table(*comparison_table(labels, facts))]) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with names left and figures right; escape the cells.

    >>> print(markdown_table(["", "a|b"], [("  step", "1 s")]))
    |  | a\\|b |
    |---|---:|
    | · step | 1 s |
    """

    def cell(text: str) -> str:
        shown = f"· {text.strip()}" if text.startswith("  ") else text
        return shown.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

    lines = ["|---" + "|---:" * (len(head) - 1) + "|"]
    shown = ["| " + " | ".join(map(cell, row)) + " |" for row in (head, *rows)]
    return "\n".join([shown[0], *lines, *shown[1:]])


def comparison_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison as a JSON object."""
    return {
        "runs": {label: summary_json(run) for label, run in comparison.runs.items()},
        "differences": [{"name": name, "values": dict(zip(comparison.runs, values, strict=True))}
                        for name, values in comparison.differences],
        "explanation": explain_comparison(comparison),
    }  # fmt: skip
