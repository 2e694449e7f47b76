"""Compare runs of the same training: hosts alone and together, or different sync strategies.

BENCH/compare.json   the run directories that belong together, and the one that the others are compared with
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from evener.core.base.file_io import write_atomic
from evener.core.base.json_files import read_versioned_json
from evener.core.base.units import format_count
from evener.core.run.rundir import RunDir
from evener.report.draw import run_charts
from evener.report.draw.svg_charts import Figure
from evener.report.explain.run_tables import SETUP_CELLS, penalty_cell, relative_val_loss, speedup_over
from evener.report.explain.speedup_verdict import MIN_SPEEDUP
from evener.report.pages.html_template import render_document
from evener.report.read.run_summary import RunSummary, summarize_run
from evener.report.read.stragglers import fastest_rank

FILE_NAME = "compare.json"
FORMAT = 1
BenchKind = Literal["fleet", "strategies"]
COLUMNS: dict[BenchKind, tuple[str, ...]] = {
    "fleet": ("tokens/s", "×", "step", "predicted", "all-reduce", "exposed", "wait"),
    "strategies": ("tokens/s", "×", "step", "predicted", "sends", "loss", "penalty"),
}
LABEL_TITLES: dict[BenchKind, str] = {"fleet": "hosts", "strategies": "sync strategy"}
MAX_LOSS_PENALTY = 0.01  # relative loss penalty up to which a strategy counts as learning the same


class SetupComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`compare.json`: run directories, relative to the folder, by label."""

    format: int = FORMAT
    kind: BenchKind
    base: str | None  # label of the baseline run; None: it failed
    runs: dict[str, str]
    failed: dict[str, str] = {}  # reasons for missing runs, by label


def is_comparison(folder: Path) -> bool:
    """Return whether this folder holds a comparison of runs."""
    return (folder / FILE_NAME).is_file()


def read_setups(folder: Path) -> SetupComparison:
    """Read `compare.json`; raise CheckpointError if it is damaged."""
    return read_versioned_json(RunDir(folder).inside(FILE_NAME), SetupComparison, FORMAT)


def write_setups(folder: Path, compared: SetupComparison) -> None:
    """Write `compare.json`, which `evener report` reads."""
    write_atomic(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(compared), indent=2))


def summarize_setups(folder: Path, compared: SetupComparison) -> dict[str, RunSummary]:
    """Summarize the runs, by label."""
    return {label: summarize_run(RunDir(RunDir(folder).inside(name))) for label, name in compared.runs.items()}


def setup_rows(kind: BenchKind, runs: Mapping[str, RunSummary], base: RunSummary | None) -> list[tuple[str, ...]]:
    """Return rows of a label and its cells in the order of COLUMNS."""
    return [(label, *(SETUP_CELLS[column](run, base) for column in COLUMNS[kind])) for label, run in runs.items()]


# --- sentences --------------------------------------------------------------------------------------------------------


def explain_setups(kind: BenchKind, runs: Mapping[str, RunSummary], base: str | None) -> list[str]:
    """Return sentences: whether more hosts are worth it, and whether that was predicted, or which strategy is best."""
    measured = {label: run for label, run in runs.items() if run.tokens_per_s and label != base}
    base_run = runs.get(base) if base is not None else None
    if base is None or base_run is None or not base_run.tokens_per_s or not measured:
        return []
    return (
        _explain_fleet(measured, base, base_run) if kind == "fleet" else _explain_strategies(measured, base, base_run)
    )


def _explain_fleet(runs: Mapping[str, RunSummary], base: str, base_run: RunSummary) -> list[str]:
    multi_host = {label: run for label, run in runs.items() if len(run.manifest.hosts) > 1}
    sentences = [_explain_speedup(label, run, base, base_run) for label, run in multi_host.items()]
    if multi_host and all((speedup_over(run, base_run) or 0.0) < MIN_SPEEDUP for run in multi_host.values()):
        sentences.append("evener bench --preset strategies tries other sync strategies.")
    return sentences or [f"The fastest host alone: {base}, {format_count(base_run.tokens_per_s)} tokens/s."]


def _explain_speedup(label: str, run: RunSummary, base: str, base_run: RunSummary) -> str:
    ratio = speedup_over(run, base_run) or 0.0
    sentence = (
        f"{label} {'was' if ratio >= MIN_SPEEDUP else 'was not'} worth it: {format_count(run.tokens_per_s)} tokens/s, "
    )
    sentence += f"{ratio:.2f} times the fastest host alone ({base}, {format_count(base_run.tokens_per_s)})"
    option = run.predicted
    if option is not None and option.speedup_vs_best_host is not None:
        sentence += f"; predicted {option.speedup_vs_best_host:.2f}"
    return f"{sentence}."


def _explain_strategies(runs: Mapping[str, RunSummary], base: str, base_run: RunSummary) -> list[str]:
    def describe(label: str) -> str:
        penalty = penalty_cell(relative_val_loss(runs[label], base_run))
        loss = "the same validation loss" if penalty == "same" else f"validation loss {penalty}"
        return f"{label}, {speedup_over(runs[label], base_run):.2f} times {base}, {loss}"

    fastest = max(runs, key=lambda label: runs[label].tokens_per_s or 0.0)
    same = [
        label
        for label, run in runs.items()
        if (more := relative_val_loss(run, base_run)) is not None and more <= MAX_LOSS_PENALTY
    ]
    sentences = [f"The fastest strategy: {describe(fastest)}."]
    if same and (best := max(same, key=lambda label: runs[label].tokens_per_s or 0.0)) != fastest:
        sentences.append(f"The fastest whose loss is at most {MAX_LOSS_PENALTY:.0%} above: {describe(best)}.")
    if (speedup_over(runs[fastest], base_run) or 0.0) < MIN_SPEEDUP:
        sentences.append(f"No strategy makes these hosts faster than {base}.")
    return sentences


# --- the page ---------------------------------------------------------------------------------------------------------


def setups_page(folder: Path) -> str:
    """Return the HTML report of a comparison."""
    compared = read_setups(folder)
    runs, name = summarize_setups(folder, compared), folder.resolve().name
    base = runs.get(compared.base) if compared.base is not None else None
    drawn: dict[str, Figure] = {
        "speeds": run_charts.throughput_bars(runs) if compared.kind == "fleet" else run_charts.tradeoff_scatter(runs)
    }
    drawn["parts"] = run_charts.breakdown_bars(
        {label: fastest_rank(run).typical for label, run in runs.items() if run.step_p50_s}
    )
    first = next(iter(runs.values()), None)
    what = []
    if first is not None:
        spec = first.manifest.spec
        hosts = dict.fromkeys(host for run in runs.values() for host in run.manifest.roster.hosts)
        what = [spec.model.name, f"{first.tokens_per_step} tokens a step", *hosts]
    return render_document(
        "compare_setups.html",
        title=f"{name}: evener bench",
        figures=drawn,
        name=name,
        what=what,
        story=explain_setups(compared.kind, runs, compared.base),
        head=[LABEL_TITLES[compared.kind], *COLUMNS[compared.kind]],
        rows=setup_rows(compared.kind, runs, base),
        links=[quote(name) + "/report.html" for name in compared.runs.values()],
        failed=compared.failed,
    )
