"""Compare runs of the same training: hosts alone and together, or different sync strategies.

BENCH/compare.json   the run directories that belong together, and the one that the others are compared with
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from evener.core.files import read_file, write_atomic
from evener.core.rundir import RunDir
from evener.core.stored import from_stored
from evener.core.units import count, seconds, size
from evener.report import figures
from evener.report.chart import Figure
from evener.report.markup import document
from evener.report.predicted import against
from evener.report.ranks import first_done
from evener.report.summary import Summary, summarize
from evener.report.worth import FASTER

NAME = "compare.json"
FORMAT = 1
Kind = Literal["fleet", "strategies"]
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "fleet": ("tokens/s", "×", "step", "predicted", "all-reduce", "exposed", "wait"),
    "strategies": ("tokens/s", "×", "step", "predicted", "sends", "loss", "penalty"),
}
TITLES: dict[Kind, str] = {"fleet": "hosts", "strategies": "sync strategy"}
SAME = 5e-4  # relative difference of losses that rounding alone explains
SAME_LOSS = 0.01  # relative loss penalty up to which a strategy counts as learning the same


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """`compare.json`: run directories, relative to the folder, by label."""

    format: int = FORMAT
    kind: Kind
    base: str | None  # label of the baseline run; None: it failed
    runs: dict[str, str]
    failed: dict[str, str] = {}  # reasons for missing runs, by label


def is_comparison(folder: Path) -> bool:
    """Return whether this folder holds a comparison of runs."""
    return (folder / NAME).is_file()


def read(folder: Path) -> Compared:
    """Read `compare.json`; raise CheckpointError if it is damaged."""
    return from_stored(read_file(folder / NAME), Compared, FORMAT, folder / NAME)


def write(folder: Path, compared: Compared) -> None:
    """Write `compare.json`, which `evener report` reads."""
    write_atomic(folder / NAME, msgspec.json.format(msgspec.json.encode(compared), indent=2))


def summaries(folder: Path, compared: Compared) -> dict[str, Summary]:
    """Summarize the runs, by label."""
    return {label: summarize(RunDir(folder / name)) for label, name in compared.runs.items()}


def rows(kind: Kind, runs: Mapping[str, Summary], base: Summary | None) -> list[tuple[str, ...]]:
    """Return rows of a label and its cells in the order of COLUMNS."""
    return [(label, *_cells(kind, run, base)) for label, run in runs.items()]


def times(run: Summary, base: Summary | None) -> float | None:
    """Return the throughput relative to `base`; None if either was not measured."""
    return run.tokens_per_s / base.tokens_per_s if base and base.tokens_per_s and run.tokens_per_s else None


def beside(run: Summary, base: Summary | None) -> float | None:
    """Return the validation loss relative to that of `base`, minus 1; None if either was not measured."""
    mine, theirs = val_loss(run), val_loss(base) if base else None
    return mine / theirs - 1 if mine is not None and theirs else None


def val_loss(run: Summary) -> float | None:
    """Return the validation loss at the end of the run."""
    return run.manifest.result.val_loss if run.manifest.result else None


def _cells(kind: Kind, run: Summary, base: Summary | None) -> list[str]:
    ratio, loss = times(run, base), val_loss(run)
    several, cost = run.manifest.world_size > 1, first_done(run).typical
    sent = max((rank.bytes for rank in run.ranks if rank.bytes is not None), default=None)
    of_several = {
        "all-reduce": seconds(run.sync_p50_s),
        "exposed": seconds(cost.exposed_sync_s),
        "wait": seconds(cost.wait_s),
        "sends": "not measured" if sent is None else size(sent),
    }
    of_all = {
        "tokens/s": count(run.tokens_per_s),
        "×": "–" if ratio is None else f"{ratio:.2f}",
        "step": seconds(run.step_p50_s),
        "predicted": against(run)[0],
        "loss": "not measured" if loss is None else f"{loss:.4f}",
        "penalty": "–" if run is base else _penalty(beside(run, base)),
    }
    shown = of_all | (of_several if several else dict.fromkeys(of_several, "–"))
    return [shown[column] for column in COLUMNS[kind]]


def _penalty(more: float | None) -> str:
    """Format a relative loss penalty.

    >>> _penalty(0.012), _penalty(-0.05), _penalty(1e-5), _penalty(None)
    ('+1.2%', '−5.0%', 'same', 'not measured')
    """
    if more is None:
        return "not measured"
    return "same" if abs(more) < SAME else f"{more:+.1%}".replace("-", "−")


# --- sentences --------------------------------------------------------------------------------------------------------


def explain(kind: Kind, runs: Mapping[str, Summary], base: str | None) -> list[str]:
    """Return sentences: whether more hosts are worth it, and whether that was predicted, or which strategy is best."""
    measured = {label: run for label, run in runs.items() if run.tokens_per_s and label != base}
    base_run = runs.get(base) if base is not None else None
    if base is None or base_run is None or not base_run.tokens_per_s or not measured:
        return []
    return _of_fleet(measured, base, base_run) if kind == "fleet" else _of_strategies(measured, base, base_run)


def _of_fleet(runs: Mapping[str, Summary], base: str, base_run: Summary) -> list[str]:
    multi_host = {label: run for label, run in runs.items() if len(run.manifest.hosts) > 1}
    sentences = [_worth(label, run, base, base_run) for label, run in multi_host.items()]
    if multi_host and all((times(run, base_run) or 0.0) < FASTER for run in multi_host.values()):
        sentences.append("evener bench --preset strategies tries other sync strategies.")
    return sentences or [f"The fastest host alone: {base}, {count(base_run.tokens_per_s)} tokens/s."]


def _worth(label: str, run: Summary, base: str, base_run: Summary) -> str:
    ratio = times(run, base_run) or 0.0
    sentence = f"{label} {'was' if ratio >= FASTER else 'was not'} worth it: {count(run.tokens_per_s)} tokens/s, "
    sentence += f"{ratio:.2f} times the fastest host alone ({base}, {count(base_run.tokens_per_s)})"
    option = run.predicted
    if option is not None and option.speedup_vs_best_host is not None:
        sentence += f"; predicted {option.speedup_vs_best_host:.2f}"
    return f"{sentence}."


def _of_strategies(runs: Mapping[str, Summary], base: str, base_run: Summary) -> list[str]:
    def describe(label: str) -> str:
        penalty = _penalty(beside(runs[label], base_run))
        loss = "the same validation loss" if penalty == "same" else f"validation loss {penalty}"
        return f"{label}, {times(runs[label], base_run):.2f} times {base}, {loss}"

    fastest = max(runs, key=lambda label: runs[label].tokens_per_s or 0.0)
    same = [label for label, run in runs.items() if (more := beside(run, base_run)) is not None and more <= SAME_LOSS]
    sentences = [f"The fastest strategy: {describe(fastest)}."]
    if same and (best := max(same, key=lambda label: runs[label].tokens_per_s or 0.0)) != fastest:
        sentences.append(f"The fastest whose loss is at most {SAME_LOSS:.0%} above: {describe(best)}.")
    if (times(runs[fastest], base_run) or 0.0) < FASTER:
        sentences.append(f"No strategy makes these hosts faster than {base}.")
    return sentences


# --- the page ---------------------------------------------------------------------------------------------------------


def page(folder: Path) -> str:
    """Return the HTML report of a comparison."""
    compared = read(folder)
    runs, name = summaries(folder, compared), folder.resolve().name
    base = runs.get(compared.base) if compared.base is not None else None
    drawn: dict[str, Figure] = {"speeds": figures.speeds(runs) if compared.kind == "fleet" else figures.tradeoff(runs)}
    drawn["parts"] = figures.bars({label: first_done(run).typical for label, run in runs.items() if run.step_p50_s})
    first = next(iter(runs.values()), None)
    what = []
    if first is not None:
        spec = first.manifest.spec
        hosts = dict.fromkeys(host for run in runs.values() for host in run.manifest.roster.hosts)
        what = [spec.model.model, f"{first.tokens_per_step} tokens a step", *hosts]
    return document(
        "compare.html",
        title=f"{name}: evener bench",
        figures=drawn,
        name=name,
        what=what,
        story=explain(compared.kind, runs, compared.base),
        head=[TITLES[compared.kind], *COLUMNS[compared.kind]],
        rows=rows(compared.kind, runs, base),
        links=[quote(name) + "/report.html" for name in compared.runs.values()],
        failed=compared.failed,
    )
