"""Compare runs: settings that differ, outcomes, learning curves and step breakdowns.

compare_runs(["runs/a", "runs/b"])  ─▶  comparison_page(…), comparison_markdown(…), comparison_json(…),
                                        and the chart (png_charts.comparison_png)

The live page shows the same for runs that are still training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.core.base.shell import quote_command
from evener.core.base.units import format_bytes, format_count, format_seconds, join_names
from evener.core.run.prediction import Prediction
from evener.core.run.run_spec import FLAGS
from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import PHASE_NAMES
from evener.report.draw import run_charts
from evener.report.draw.svg_charts import BarChart, ChartSelector, Figure
from evener.report.explain import run_tables
from evener.report.explain.explain_run import explain_measurements
from evener.report.explain.run_tables import ROUNDING_TOLERANCE, loss_cell
from evener.report.explain.speedup_verdict import MIN_SPEEDUP
from evener.report.pages.html_template import render_document
from evener.report.read.recorded_run import RecordedRun, read_recorded_run
from evener.report.read.run_summary import RunSummary, summary_json
from evener.report.read.stragglers import fastest_rank

SPEED_NEUTRAL = frozenset({
    "--steps", "--seed", "--lr", "--min-lr", "--warmup", "--weight-decay", "--beta1", "--beta2", "--max-s", "--keep",
    "--sampling", "corpus hash",
})  # fmt: skip  # settings that change what is learned, or for how long, but not how fast
MAX_RUN_COLUMNS = 6  # show up to this many runs as columns; more as rows
ComparisonRows = list[tuple[str, list[str]]]  # (name, value in each run)
Runs = Mapping[str, RecordedRun]  # by the shortest labels that distinguish them


def compare_runs(paths: Sequence[str | Path]) -> dict[str, RecordedRun]:
    """Read the runs in these directories."""
    labels = distinct_labels([str(path) for path in paths])
    return {label: read_recorded_run(RunDir(path)) for label, path in zip(labels, paths, strict=True)}


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


# --- what differs -----------------------------------------------------------------------------------------------------


def setting_differences(manifests: Sequence[Manifest]) -> ComparisonRows:
    """Return the settings, hosts and versions that differ between runs."""
    are_own = any(manifest.program is not None for manifest in manifests)  # of which evener's settings say nothing
    requested = {
        flag.name: [flag.value(manifest.spec) for manifest in manifests]
        for flag in FLAGS.values()
        if flag.field != "out" and not are_own
    }
    if are_own:
        requested["program"] = [quote_command(manifest.argv) for manifest in manifests]
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
        if flag in requested and list(map(str, actual[name])) == list(map(str, requested[flag])):
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


def outcome_rows(runs: Runs) -> ComparisonRows:
    """Return the result rows: losses, throughput, step breakdown, memory, cost."""
    recorded = list(runs.values())
    base = recorded[0].summary
    unit = join_names(list(dict.fromkeys(run.summary.unit for run in recorded)))

    def row(name: str, cell: run_tables.Cell) -> tuple[str, list[str]]:
        return name, [cell(run.summary, base) for run in recorded]

    costs = [energy_and_price(run.summary.prediction, run.summary.manifest, run.curves.train_time_s)
             for run in recorded]  # fmt: skip
    rows: ComparisonRows = [
        ("state", [run.state for run in recorded]),
        ("steps", [f"{run.summary.num_steps:,}" for run in recorded]),
        (f"{unit} read", [format_count(run.summary.tokens_read) for run in recorded]),
        ("loss", [loss_cell(run.summary.last_loss) for run in recorded]),
        ("validation loss", [loss_cell(run.val_losses[-1][1] if run.val_losses else None) for run in recorded]),
        ("  the best", [loss_cell(run.best_val_loss) for run in recorded]),
        row(f"{unit}/s", run_tables.tokens_per_s_cell),
        *([row("  × the first", run_tables.speedup_cell)] if len(recorded) > 1 and are_rates_comparable(runs) else []),
        row("step", run_tables.step_cell),
        *([row("  predicted", run_tables.predicted_cell)] if any(run.summary.predicted for run in recorded) else []),
        *(row(f"  {name}", run_tables.phase_cell(phase)) for phase, name in PHASE_NAMES.items()),
        row("all-reduce p50", run_tables.ALL_REDUCE_P50),
        row("a rank sends in a step", run_tables.of_several(run_tables.sent_bytes)),
        ("peak memory", [_memory_cell(run.summary) for run in recorded]),
        ("training time", [format_seconds(run.curves.train_time_s or None) for run in recorded]),
    ]
    if any(kwh is not None for kwh, _ in costs):
        rows.append(("electricity", ["not known" if kwh is None else f"{kwh:.3g} kWh" for kwh, _ in costs]))
    if any(money is not None for _, money in costs):
        rows.append(("price", ["not known" if money is None else f"{money:.2f}" for _, money in costs]))
    return rows


def _memory_cell(run: RunSummary) -> str:
    result = run.manifest.result
    return format_bytes(max(result.peak_memory_bytes)) if result and result.peak_memory_bytes else "not measured"


def energy_and_price(
    prediction: Prediction | None, manifest: Manifest, train_time_s: float
) -> tuple[float | None, float | None]:
    """Return (kWh, price) of `train_time_s` seconds of training, from the fleet file's watts and prices; None for a
    figure that the file does not give for all hosts.
    """
    if prediction is None or not train_time_s:
        return None, None
    hosts = [prediction.cluster.hosts.get(name) for name in manifest.roster.hosts]
    watts = [host.watts for host in hosts if host is not None and host.watts is not None]
    prices = [host.price_per_h for host in hosts if host is not None and host.price_per_h is not None]
    hours = train_time_s / 3600
    return (hours * sum(watts) / 1000 if len(watts) == len(hosts) else None,
            hours * sum(prices) if len(prices) == len(hosts) else None)  # fmt: skip


def are_rates_comparable(runs: Runs) -> bool:
    """Return whether all runs count the same. A batch, where samples were not seen, is a rank's part of a step, which
    another number of ranks may divide otherwise.
    """
    summaries = [run.summary for run in runs.values()]
    units, sizes = {summary.unit for summary in summaries}, {summary.manifest.world_size for summary in summaries}
    return len(units) == 1 and ("batches" not in units or len(sizes) == 1)


def explain_comparison(runs: Runs) -> list[str]:
    """Return sentences: which run is the fastest, which has the lowest loss, and whether they are comparable."""
    sentences = []
    rates = {label: run.summary.tokens_per_s for label, run in runs.items() if run.summary.tokens_per_s}
    if len(rates) > 1 and are_rates_comparable(runs):
        unit = next(iter(runs.values())).summary.unit
        fastest, slowest = max(rates, key=lambda label: rates[label]), min(rates, key=lambda label: rates[label])
        ratio = rates[fastest] / rates[slowest]
        differ = [name for name, _ in setting_differences(_manifests(runs))]
        is_known = all(m.shape is not None and len(m.roster.hosts) == 1 for m in _manifests(runs))
        if ratio >= MIN_SPEEDUP and is_known and SPEED_NEUTRAL.issuperset(differ):
            between = f"{format_count(rates[slowest])} and {format_count(rates[fastest])} {unit}/s"
            what = f"They differ only in {join_names(differ)}" if differ else "Their settings are the same"
            sentences.append(f"{what}: no run is faster beyond noise; {between} is by how much this machine varies.")
        elif ratio < MIN_SPEEDUP:
            sentences.append(
                f"All train about as fast: {format_count(rates[slowest])} to {format_count(rates[fastest])} {unit}/s."
            )
        else:
            sentences.append(
                f"{fastest} trains fastest: {format_count(rates[fastest])} {unit}/s, {ratio:.2f} times {slowest}."
            )
    losses = {label: run.val_losses[-1][1] for label, run in runs.items() if run.val_losses}
    if len(losses) > 1:
        best, worst = min(losses, key=lambda label: losses[label]), max(losses, key=lambda label: losses[label])
        read = [runs[label].summary.tokens_read for label in losses if runs[label].summary.num_steps]
        unequal = len(read) > 1 and max(read) > 1.01 * min(read)
        after = "; they did not read equally many tokens" if unequal else ""
        if losses[worst] / losses[best] - 1 < ROUNDING_TOLERANCE:
            sentences.append(f"All have learned the same: validation loss {losses[best]:.4f}{after}.")
        else:
            sentences.append(f"{best} has the lowest validation loss, {losses[best]:.4f}; {worst} has "
                             f"{losses[worst]:.4f}, "
                        f"{losses[worst] / losses[best] - 1:.1%} more{after}.")  # fmt: skip
    manifests = _manifests(runs)
    texts = {manifest.corpus.content_hash for manifest in manifests if manifest.corpus}
    if len(texts) > 1:
        sentences.append("They trained on different corpora: their losses cannot be compared.")
    return sentences


# --- tables, pages, Markdown ------------------------------------------------------------------------------------------


def comparison_table(labels: Sequence[str], facts: ComparisonRows) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return (head, rows): figures down and runs across; the transpose for more than MAX_RUN_COLUMNS runs."""
    if len(labels) <= MAX_RUN_COLUMNS:
        return ["", *labels], [(_dotted(name), *values) for name, values in facts]
    across = [(label, *(values[i] for _, values in facts)) for i, label in enumerate(labels)]
    return ["run", *(name.strip() for name, _ in facts)], across


def _dotted(name: str) -> str:
    """Mark an indented name, as pages and Markdown do not show leading spaces."""
    return f"· {name.strip()}" if name.startswith("  ") else name


def breakdown(runs: Runs) -> BarChart | None:
    """Return the step breakdown of each run on the rank that waits most; None if none has measured a step."""
    costs = {label: fastest_rank(run.summary).typical for label, run in runs.items() if run.summary.step_p50_s}
    return run_charts.breakdown_bars(costs) if costs else None


def differences(runs: Runs) -> ComparisonRows:
    """Return the settings that differ; see `setting_differences`."""
    return setting_differences(_manifests(runs))


def _manifests(runs: Runs) -> list[Manifest]:
    return [run.summary.manifest for run in runs.values()]


def comparison_page(runs: Runs, title: str) -> str:
    """Return the comparison as one HTML file that opens offline."""
    labels, differ = list(runs), differences(runs)
    by_axis = {f"by {name}": run_charts.comparison_charts(runs, axis) for axis, name in run_charts.CURVE_AXES.items()}
    drawn: dict[str, Figure] = {
        name: ChartSelector({axis: charts[name] for axis, charts in by_axis.items()}) for name in by_axis["by step"]
    }
    if bars := breakdown(runs):
        drawn["parts"] = bars
    return render_document(
        "compare_runs.html",
        title=f"{title}: evener",
        figures=drawn,
        labels=labels,
        story=explain_comparison(runs),
        differ=comparison_table(labels, differ) if differ else None,
        came=comparison_table(labels, outcome_rows(runs)),
    )


def comparison_markdown(runs: Runs) -> str:
    """Return the comparison as Markdown for an issue, a README or a pull request."""
    labels = list(runs)
    several = len(labels) > 1
    parts = [" ".join(explain_comparison(runs))] if several else explain_measurements(runs[labels[0]].summary)
    facts = (differences(runs) if several else []) + outcome_rows(runs)
    return "\n\n".join([*parts, markdown_table(*comparison_table(labels, facts))]) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with names left and figures right; escape the cells.

    >>> print(markdown_table(["", "a|b"], [("step", "1 s")]))
    |  | a\\|b |
    |---|---:|
    | step | 1 s |
    """

    def cell(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

    lines = ["|---" + "|---:" * (len(head) - 1) + "|"]
    shown = ["| " + " | ".join(map(cell, row)) + " |" for row in (head, *rows)]
    return "\n".join([shown[0], *lines, *shown[1:]])


def comparison_json(runs: Runs) -> dict[str, Any]:
    """Return the comparison as a JSON object."""
    return {
        "runs": {label: summary_json(run.summary) for label, run in runs.items()},
        "differences": [{"name": name, "values": dict(zip(runs, values, strict=True))}
                        for name, values in differences(runs)],
        "explanation": explain_comparison(runs),
    }  # fmt: skip
