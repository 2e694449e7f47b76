"""How do a run's figures become a page, and the pieces of it that change? A piece is HTML with the name of its place.

Text of a run is escaped where it enters, as in a report; the page runs no script but ours.
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
    """What a tab tells when nobody looks at it."""

    title: str
    mark: str
    word: str
    told: str


def status(reader: Reader, name: str, now: float) -> Status:
    """Of one run."""
    found = health(reader, now)
    share = f" {view.progress(reader):.0%}" if found.word in ("healthy", "slow") else ""
    title = f"{SIGNS[found.mark]} {found.word}{share} · {name}"
    return Status(f"{title} · evener", found.mark, found.word, f"{name} {found.word}: {found.told}")


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
        reader, "error", "error of what was sent, beside exact sums", SERIES_COLOURS[4], axis
    ),
    "parts": view.parts,
}


def word_pieces(reader: Reader, now: float) -> Pieces:
    """How the run is: a millisecond."""
    found = health(reader, now)
    return {
        "state": render("state.html", health=found, sign=SIGNS[found.mark], share=view.progress(reader)),
        "facts": render("facts.html", shown=view.facts(reader, found)),
        "read": _read(reader),
    }


def event_pieces(reader: Reader) -> Pieces:
    """What happened."""
    more = len(reader.events) > view.MAX_EVENTS
    return {"events": render("events.html", events=view.events(reader), more=more)}


def rank_pieces(reader: Reader, now: float) -> Pieces:
    """What each rank does, and how its machine is."""
    hosts = _hosts(view.HOST_HEAD, view.hosts(reader)) + _hosts(*view.machines(reader, now))
    return {"strips": strips(view.strips(reader)), "hosts": hosts}


def moment_pieces(reader: Reader) -> Pieces:
    """One step, as it went on all ranks."""
    found = one_step(reader.rundir, reader.manifest) if reader.manifest else None
    if found is None:
        return {"moment": ""}
    return {"moment": render("moment.html", moment=found, drawn=draw(found.lanes))}


def sample_pieces(reader: Reader) -> Pieces:
    """What the model wrote, the newest first."""
    found = sorted(reader.samples.items(), reverse=True)
    return {"samples": render("samples.html", samples=[(f"{step:,}", text) for step, text in found]) if found else ""}


def all_pieces(reader: Reader, axis: str, now: float) -> Pieces:
    """Of a page as it is opened."""
    quick = word_pieces(reader, now) | event_pieces(reader) | sample_pieces(reader) | rank_pieces(reader, now)
    return quick | moment_pieces(reader) | plot_pieces(reader, axis)


def plot_pieces(reader: Reader, axis: str) -> Pieces:
    """The curves: what takes a while of a long run."""
    return {name: plot(name, made(reader, axis)) for name, made in PLOTS.items()}


def plot(name: str, figure: Plot | None) -> str:
    """A chart, and its figures beside it; "" of nothing measured."""
    if figure is None:
        return ""
    return render("plot.html", name=name, figure=draw(figure.chart), plot=figure)


def strips(found: Sequence[Strip]) -> str:
    """Each rank's newest steps beside each other, all to one scale."""
    if not found:
        return ""
    walls_s = [cost.total_s for strip in found for _, cost in strip.steps]
    high = min(1.05 * max(walls_s), 1.5 * percentile(walls_s, 0.9)) or 1.0
    parts = [part for part in PART_NAMES if any(getattr(cost, part) for strip in found for _, cost in strip.steps)]
    rows = [(strip.name, _bars(strip, parts, high), seconds(strip.now.total_s)) for strip in found]
    table = [[strip.name, *(seconds(getattr(strip.now, part)) for part in PART_NAMES), seconds(strip.now.total_s)]
             for strip in found]  # fmt: skip
    return render("strips.html", rows=rows, legend=[(PART_NAMES[part], PART_COLOURS[part]) for part in parts],
                   high=seconds(high), first=found[0].steps[0][0] + 1, last=found[0].steps[-1][0] + 1,
                   head=["rank", *PART_NAMES.values(), "sum"], rows_in_figures=table)  # fmt: skip


def _bars(strip: Strip, parts: Sequence[str], high: float) -> Markup:
    """A path for each part: a box of it on those below, step after step."""
    num = len(strip.steps)
    paths: dict[str, list[str]] = {part: [] for part in parts}
    for i, (_, cost) in enumerate(strip.steps):
        left, right, below = round(UNITS * i / num), round(UNITS * (i + 0.86) / num), 0.0
        for part in parts:
            value = getattr(cost, part) or 0.0
            if value:
                bottom, top = (round(UNITS * (1 - min(1.0, at / high))) for at in (below, below + value))
                paths[part].append(f"M{left} {bottom}V{top}H{right}V{bottom}z")
                below += value
    drawn = [Markup('<path fill="{}" d="{}"/>').format(PART_COLOURS[part], "".join(boxes))
             for part, boxes in paths.items() if boxes]  # fmt: skip
    return Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(
        UNITS, UNITS, Markup().join(drawn)
    )


def _read(reader: Reader) -> str:
    """While what is there is still being read."""
    if not reader.unread_bytes:
        return ""
    return render("read.html", num=reader.curves.num_records, left=reader.unread_bytes)


# --- pages ------------------------------------------------------------------------------------------------------------


def run_page(reader: Reader, name: str, *, axis: str, links: Mapping[str, str], can_ask: bool,
             can_sample: bool, assets: str) -> str:  # fmt: skip
    """All of it as it is now. `links`: other pages."""
    now = time.time()
    return render("watch.html", status=status(reader, name, now), name=name, run_dir=str(reader.rundir),
                  what=view.what(reader), pieces=_marked(all_pieces(reader, axis, now)),
                  axis=axis, axes=view.AXES, links=links, can_ask=can_ask, can_sample=can_sample,
                  assets=assets)  # fmt: skip


def list_page(found: Status, pieces: Pieces, *, assets: str) -> str:
    """All runs."""
    return render("overview.html", status=found, pieces=_marked(pieces), assets=assets)


def compare_page(found: Status, names: Sequence[str], pieces: Pieces, *, axis: str, assets: str) -> str:
    """Some beside each other."""
    return render("compared.html", status=found, names=names, pieces=_marked(pieces), axis=axis, axes=view.AXES,
                  assets=assets)  # fmt: skip


def status_of_all(found: Mapping[str, Status]) -> Status:
    """Of several runs: the worst of those that go on, and how many there are of each kind."""
    told = told_of_all([one.word for one in found.values()])
    first = min((one.word for one in found.values()), key=WORST_FIRST.index, default=None)
    mark = next((one.mark for one in found.values() if one.word == first), "idle")
    return Status(f"{SIGNS[mark]} {told} · evener", mark, told, told)


def told_of_all(words: Iterable[str]) -> str:
    """How many runs there are of each kind, the worst first.

    >>> told_of_all(["finished", "failed", "finished"]), told_of_all([])
    ('1 failed, 2 finished', 'no runs')
    """
    nums = Counter(words)
    return ", ".join(f"{nums[word]} {word}" for word in WORST_FIRST if nums[word]) or "no runs"


def refused_page(why: str) -> str:
    """To somebody who has no token."""
    return render("refused.html", why=why)


def _marked(pieces: Pieces) -> dict[str, Markup]:
    """They are HTML, which our templates have made."""
    return {name: Markup(text) for name, text in pieces.items()}  # noqa: S704


def _hosts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render("hosts.html", head=head, rows=rows) if rows else ""


def render(template: str, **facts: object) -> str:
    """A template of ours, or of a report's."""
    return environment("evener.watch", "evener.report").get_template(template).render(**facts)
