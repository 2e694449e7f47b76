"""How do runs compare that trained the same: hosts alone and together, or by each way to agree?

BENCH/compare.json   which run directories belong together, and which of them the others are compared with
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
TITLES: dict[Kind, str] = {"fleet": "who trains", "strategies": "way to agree"}
SAME = 5e-4  # of a loss: what rounding alone does to it
SAME_LOSS = 0.01  # what a way to agree may cost and still count as learning the same


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """`compare.json`: run directories, relative to the folder, by what a person calls them."""

    format: int = FORMAT
    kind: Kind
    base: str | None  # the label of the run with which the others are compared; None: it failed
    runs: dict[str, str]
    failed: dict[str, str] = {}  # why there is no run, by label


def is_comparison(folder: Path) -> bool:
    """Does this folder hold runs that are to be compared?"""
    return (folder / NAME).is_file()


def read(folder: Path) -> Compared:
    """CheckpointError where it is damaged."""
    return from_stored(read_file(folder / NAME), Compared, FORMAT, folder / NAME)


def write(folder: Path, compared: Compared) -> None:
    """Leave it where `evener report` finds it."""
    write_atomic(folder / NAME, msgspec.json.format(msgspec.json.encode(compared), indent=2))


def summaries(folder: Path, compared: Compared) -> dict[str, Summary]:
    """The runs by label."""
    return {label: summarize(RunDir(folder / name)) for label, name in compared.runs.items()}


def rows(kind: Kind, runs: Mapping[str, Summary], base: Summary | None) -> list[tuple[str, ...]]:
    """A label and its cells, as COLUMNS says."""
    return [(label, *_cells(kind, run, base)) for label, run in runs.items()]


def times(run: Summary, base: Summary | None) -> float | None:
    """How many times as fast it trains."""
    return run.tokens_per_s / base.tokens_per_s if base and base.tokens_per_s and run.tokens_per_s else None


def beside(run: Summary, base: Summary | None) -> float | None:
    """Its validation loss relative to another's, less 1."""
    mine, theirs = val_loss(run), val_loss(base) if base else None
    return mine / theirs - 1 if mine is not None and theirs else None


def val_loss(run: Summary) -> float | None:
    """At the end."""
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
    """What a way costs in loss.

    >>> _penalty(0.012), _penalty(-0.05), _penalty(1e-5), _penalty(None)
    ('+1.2%', '−5.0%', 'same', 'not measured')
    """
    if more is None:
        return "not measured"
    return "same" if abs(more) < SAME else f"{more:+.1%}".replace("-", "−")


# --- in words ---------------------------------------------------------------------------------------------------------


def explain(kind: Kind, runs: Mapping[str, Summary], base: str | None) -> list[str]:
    """Sentences: is more than the fastest one worth it, was it foreseen, and which way to agree is best?"""
    measured = {label: run for label, run in runs.items() if run.tokens_per_s and label != base}
    alone = runs.get(base) if base is not None else None
    if base is None or alone is None or not alone.tokens_per_s or not measured:
        return []
    return _of_fleet(measured, base, alone) if kind == "fleet" else _of_strategies(measured, base, alone)


def _of_fleet(runs: Mapping[str, Summary], base: str, alone: Summary) -> list[str]:
    together = {label: run for label, run in runs.items() if len(run.manifest.hosts) > 1}
    told = [_worth(label, run, base, alone) for label, run in together.items()]
    if together and all((times(run, alone) or 0.0) < FASTER for run in together.values()):
        told.append("evener bench --preset strategies tries other ways to agree.")
    return told or [f"The fastest host alone: {base}, {count(alone.tokens_per_s)} tokens/s."]


def _worth(label: str, run: Summary, base: str, alone: Summary) -> str:
    ratio = times(run, alone) or 0.0
    told = f"{label} {'was' if ratio >= FASTER else 'was not'} worth it: {count(run.tokens_per_s)} tokens/s, "
    told += f"{ratio:.2f} times the fastest host alone ({base}, {count(alone.tokens_per_s)})"
    said = run.predicted
    if said is not None and said.speedup_vs_best_host is not None:
        told += f"; predicted {said.speedup_vs_best_host:.2f}"
    return f"{told}."


def _of_strategies(runs: Mapping[str, Summary], base: str, alone: Summary) -> list[str]:
    def told(label: str) -> str:
        penalty = _penalty(beside(runs[label], alone))
        loss = "the same validation loss" if penalty == "same" else f"validation loss {penalty}"
        return f"{label}, {times(runs[label], alone):.2f} times {base}, {loss}"

    fastest = max(runs, key=lambda label: runs[label].tokens_per_s or 0.0)
    same = [label for label, run in runs.items() if (more := beside(run, alone)) is not None and more <= SAME_LOSS]
    sentences = [f"The fastest way: {told(fastest)}."]
    if same and (best := max(same, key=lambda label: runs[label].tokens_per_s or 0.0)) != fastest:
        sentences.append(f"The fastest whose loss is at most {SAME_LOSS:.0%} above: {told(best)}.")
    if (times(runs[fastest], alone) or 0.0) < FASTER:
        sentences.append(f"No way makes these hosts faster than {base}.")
    return sentences


# --- the page ---------------------------------------------------------------------------------------------------------


def page(folder: Path) -> str:
    """The page of a comparison."""
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
