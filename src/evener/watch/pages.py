"""Render a run as a page and as the fragments of it that change: a fragment is HTML under the name of its place.

Text from a run is escaped on entry, as in a report; the page runs no script but ours.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from evener.core.units import percentile, seconds
from evener.report.chart import UNITS, draw
from evener.report.figures import PART_COLOURS, PART_NAMES, SERIES_COLOURS
from evener.report.markup import environment
from evener.report.page import one_step
from evener.watch import view
from evener.watch.health import health
from evener.watch.reader import Reader
from evener.watch.view import Plot, Strip

WORST_FIRST = ("failed", "stuck", "no word", "slow", "healthy", "starting", "stopped", "finished")
SIGNS = {"good": "▶", "warn": "⚠", "bad": "✗", "idle": "■", "done": "✓"}

Pieces = dict[str, str]


@dataclass(frozen=True)
class Status:
    """The title, icon and message of a tab, also while the tab is hidden."""

    title: str
    mark: str
    word: str
    told: str


def status(reader: Reader, name: str, now: float) -> Status:
    """Return the tab status of one run."""
    run_health = health(reader, now)
    share = f" {view.progress(reader):.0%}" if run_health.word in ("healthy", "slow") else ""
    title = f"{SIGNS[run_health.mark]} {run_health.word}{share} · {name}"
    return Status(f"{title} · evener", run_health.mark, run_health.word, f"{name} {run_health.word}: {run_health.told}")


# --- pieces -----------------------------------------------------------------------------------------------------------

PLOTS: dict[str, Callable[[Reader, str], Plot | None]] = {
    "loss": view.loss,
    "speed": view.speed,
    "gradients": lambda reader, axis: view.curve(
        reader, "grad_norm", "gradient norm, before clipping", SERIES_COLOURS[3], axis
    ),
    "schedule": lambda reader, axis: view.curve(reader, "lr", "learning rate", SERIES_COLOURS[2], axis),
    "noise": view.noise,
    "fidelity": lambda reader, axis: view.curve(
        reader, "error", "relative error of the lossy sums", SERIES_COLOURS[4], axis
    ),
    "parts": view.parts,
}


def word_pieces(reader: Reader, now: float) -> Pieces:
    """Render the state and the key figures, in about a millisecond."""
    run_health = health(reader, now)
    return {
        "state": render("state.html", health=run_health, sign=SIGNS[run_health.mark], share=view.progress(reader)),
        "facts": render("facts.html", shown=view.facts(reader, run_health)),
        "read": _read(reader),
    }


def event_pieces(reader: Reader) -> Pieces:
    """Render the newest events."""
    more = len(reader.events) > view.MAX_EVENTS
    return {"events": render("events.html", events=view.events(reader), more=more)}


def rank_pieces(reader: Reader, now: float) -> Pieces:
    """Render the newest steps of each rank and the vitals of each host."""
    hosts = _hosts(view.HOST_HEAD, view.hosts(reader)) + _hosts(*view.machines(reader, now))
    return {"strips": strips(view.strips(reader)), "hosts": hosts}


def moment_pieces(reader: Reader) -> Pieces:
    """Render the Gantt chart of one step on all ranks."""
    moment = one_step(reader.rundir, reader.manifest) if reader.manifest else None
    if moment is None:
        return {"moment": ""}
    return {"moment": render("moment.html", moment=moment, drawn=draw(moment.lanes))}


def sample_pieces(reader: Reader) -> Pieces:
    """Render the generated samples, newest first."""
    samples = [(f"{step:,}", text) for step, text in sorted(reader.samples.items(), reverse=True)]
    return {"samples": render("samples.html", samples=samples) if samples else ""}


def all_pieces(reader: Reader, axis: str, now: float) -> Pieces:
    """Render all fragments of a run's page, as when it is opened."""
    quick = word_pieces(reader, now) | event_pieces(reader) | sample_pieces(reader) | rank_pieces(reader, now)
    return quick | moment_pieces(reader) | plot_pieces(reader, axis)


def plot_pieces(reader: Reader, axis: str) -> Pieces:
    """Render the curves, which is slow for a long run."""
    return {name: plot(name, make(reader, axis)) for name, make in PLOTS.items()}


def plot(name: str, figure: Plot | None) -> str:
    """Render a chart and the table of its figures; "" if nothing was measured."""
    if figure is None:
        return ""
    return render("plot.html", name=name, figure=draw(figure.chart), plot=figure)


def strips(found: Sequence[Strip]) -> str:
    """Render the newest steps of all ranks, one strip per rank, to one scale."""
    if not found:
        return ""
    walls_s = [cost.total_s for strip in found for _, cost in strip.steps]
    high = min(1.05 * max(walls_s), 1.5 * percentile(walls_s, 0.9)) or 1.0
    phases = [phase for phase in PART_NAMES if any(getattr(cost, phase) for strip in found for _, cost in strip.steps)]
    rows = [(strip.name, _bars(strip, phases, high), seconds(strip.now.total_s)) for strip in found]
    table = [[strip.name, *(seconds(getattr(strip.now, phase)) for phase in PART_NAMES), seconds(strip.now.total_s)]
             for strip in found]  # fmt: skip
    return render("strips.html", rows=rows, legend=[(PART_NAMES[phase], PART_COLOURS[phase]) for phase in phases],
                   high=seconds(high), first=found[0].steps[0][0] + 1, last=found[0].steps[-1][0] + 1,
                   head=["rank", *PART_NAMES.values(), "sum"], rows_in_figures=table)  # fmt: skip


def _bars(strip: Strip, phases: Sequence[str], high: float) -> Markup:
    """Draw one path per phase: a box for each step, stacked on the phases below it."""
    num = len(strip.steps)
    paths: dict[str, list[str]] = {phase: [] for phase in phases}
    for i, (_, cost) in enumerate(strip.steps):
        left, right, below = round(UNITS * i / num), round(UNITS * (i + 0.86) / num), 0.0
        for phase in phases:
            value = getattr(cost, phase) or 0.0
            if value:
                bottom, top = (round(UNITS * (1 - min(1.0, at / high))) for at in (below, below + value))
                paths[phase].append(f"M{left} {bottom}V{top}H{right}V{bottom}z")
                below += value
    drawn = [Markup('<path fill="{}" d="{}"/>').format(PART_COLOURS[phase], "".join(boxes))
             for phase, boxes in paths.items() if boxes]  # fmt: skip
    return Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(
        UNITS, UNITS, Markup().join(drawn)
    )


def _read(reader: Reader) -> str:
    """Render the progress of reading existing records; "" when all are read."""
    if not reader.unread_bytes:
        return ""
    return render("read.html", num=reader.curves.num_records, left=reader.unread_bytes)


# --- pages ------------------------------------------------------------------------------------------------------------


def run_page(reader: Reader, name: str, *, axis: str, links: Mapping[str, str], can_ask: bool,
             can_sample: bool, assets: str) -> str:  # fmt: skip
    """Render the page of a run. `links`: labels and addresses of other pages."""
    now = time.time()
    return render("watch.html", status=status(reader, name, now), name=name, run_dir=str(reader.rundir),
                  what=view.what(reader), pieces=_marked(all_pieces(reader, axis, now)),
                  axis=axis, axes=view.AXES, links=links, can_ask=can_ask, can_sample=can_sample,
                  assets=assets)  # fmt: skip


def list_page(found: Status, pieces: Pieces, *, assets: str) -> str:
    """Render the overview of all runs."""
    return render("overview.html", status=found, pieces=_marked(pieces), assets=assets)


def compare_page(found: Status, names: Sequence[str], pieces: Pieces, *, axis: str, assets: str) -> str:
    """Render the comparison of several runs."""
    return render("compared.html", status=found, names=names, pieces=_marked(pieces), axis=axis, axes=view.AXES,
                  assets=assets)  # fmt: skip


def status_of_all(found: Mapping[str, Status]) -> Status:
    """Return the tab status of several runs: the mark of the worst state, and the number of runs in each state."""
    counts = told_of_all([status.word for status in found.values()])
    worst = min((status.word for status in found.values()), key=WORST_FIRST.index, default=None)
    mark = next((status.mark for status in found.values() if status.word == worst), "idle")
    return Status(f"{SIGNS[mark]} {counts} · evener", mark, counts, counts)


def told_of_all(words: Iterable[str]) -> str:
    """Return the number of runs in each state as text, worst first.

    >>> told_of_all(["finished", "failed", "finished"]), told_of_all([])
    ('1 failed, 2 finished', 'no runs')
    """
    counts = Counter(words)
    return ", ".join(f"{counts[word]} {word}" for word in WORST_FIRST if counts[word]) or "no runs"


def refused_page(why: str) -> str:
    """Render the answer to a request without a valid token."""
    return render("refused.html", why=why)


def _marked(pieces: Pieces) -> dict[str, Markup]:
    """Mark fragments as safe HTML: our own templates rendered them."""
    return {name: Markup(text) for name, text in pieces.items()}  # noqa: S704


def _hosts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render("hosts.html", head=head, rows=rows) if rows else ""


def render(template: str, **facts: object) -> str:
    """Render a template of this package or of the report."""
    return environment("evener.watch", "evener.report").get_template(template).render(**facts)
