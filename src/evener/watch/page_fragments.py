"""Render a run as a page and as the fragments of it that change: a fragment is HTML under the name of its place.

Text from a run is escaped on entry, as in a report; the page runs no script but ours.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from evener.core.base.units import format_seconds, percentile
from evener.core.run.step_cost import PHASE_NAMES
from evener.report.draw.run_charts import (
    CURVE_AXES,
    CURVE_CHARTS,
    PHASE_COLOURS,
    breakdown_chart,
    curve_charts,
)
from evener.report.draw.svg_charts import PATH_UNITS, Figure, LineChart, render_svg
from evener.report.pages.html_report import read_step_gantt
from evener.report.pages.html_template import template_environment
from evener.report.read.run_state import ENDED_STATES, MARK_SYMBOLS, STATE_MARKS
from evener.watch import run_view
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader
from evener.watch.run_view import StepStrip

Fragments = dict[str, str]


@dataclass(frozen=True)
class TabStatus:
    """The title, icon and message of a tab, also while the tab is hidden."""

    title: str
    mark: str
    state: str
    message: str


def tab_status(reader: RunReader, name: str, now: float) -> TabStatus:
    """Return the tab status of one run."""
    run_health = assess_health(reader, now)
    share = run_view.progress_share(reader) if run_health.state in ("healthy", "slow") else None
    progress = "" if share is None else f" {share:.0%}"
    title = f"{MARK_SYMBOLS[run_health.mark]} {run_health.state}{progress} · {name}"
    return TabStatus(
        f"{title} · evener", run_health.mark, run_health.state, f"{name} {run_health.state}: {run_health.message}"
    )


# --- pieces -----------------------------------------------------------------------------------------------------------


def state_fragments(reader: RunReader, now: float) -> Fragments:
    """Render the state and the key figures, in about a millisecond."""
    run_health = assess_health(reader, now)
    return {
        "state": render_template(
            "state.html", health=run_health, sign=MARK_SYMBOLS[run_health.mark], share=run_view.progress_share(reader)
        ),
        "facts": render_template("facts.html", shown=run_view.key_figures(reader, run_health)),
        "read": _reading_progress(reader),
    }


def event_fragments(reader: RunReader) -> Fragments:
    """Render the newest events."""
    more = len(reader.events) > run_view.MAX_EVENTS
    return {"events": render_template("events.html", events=run_view.event_texts(reader), more=more)}


def rank_fragments(reader: RunReader, now: float) -> Fragments:
    """Render the newest steps of each rank and the vitals of each host."""
    hosts = _hosts_fragment(run_view.HOST_COLUMNS, run_view.host_rows(reader)) + _hosts_fragment(
        *run_view.host_vitals_table(reader, now)
    )
    return {"strips": strips_fragment(run_view.rank_strips(reader)), "hosts": hosts}


def gantt_fragments(reader: RunReader) -> Fragments:
    """Render the Gantt chart of one step on all ranks."""
    moment = read_step_gantt(reader.rundir, reader.manifest) if reader.manifest else None
    if moment is None:
        return {"moment": ""}
    return {"moment": render_template("step_gantt.html", moment=moment, drawn=render_svg(moment.chart))}


def sample_fragments(reader: RunReader) -> Fragments:
    """Render the generated samples, newest first."""
    samples = [(f"{step:,}", text) for step, text in sorted(reader.samples.items(), reverse=True)]
    return {"samples": render_template("samples.html", samples=samples) if samples else ""}


def all_fragments(reader: RunReader, axis: str, now: float) -> Fragments:
    """Render all fragments of a run's page, as when it is opened."""
    quick = (
        state_fragments(reader, now) | event_fragments(reader) | sample_fragments(reader) | rank_fragments(reader, now)
    )
    return quick | gantt_fragments(reader) | plot_fragments(reader, axis)


def plot_fragments(reader: RunReader, axis: str) -> Fragments:
    """Render the curves, which is slow for a long run."""
    run = run_view.recorded_run(reader, "")
    charts: dict[str, LineChart] = curve_charts(run, axis) if run is not None else {}
    if run is not None and (areas := breakdown_chart(run, sorted(run.curves.phase_series), axis)) is not None:
        charts["parts"] = areas
    return chart_fragments((*CURVE_CHARTS, "parts"), charts)


def chart_fragments(names: Iterable[str], charts: Mapping[str, Figure]) -> Fragments:
    """Render the charts of these names with their figures; one that is missing is empty."""
    return {name: render_svg(charts[name], with_table=True) if name in charts else "" for name in names}


def strips_fragment(strips: Sequence[StepStrip]) -> str:
    """Render the newest steps of all ranks, one strip per rank, to one scale."""
    if not strips:
        return ""
    walls_s = [cost.total_s for strip in strips for _, cost in strip.steps]
    high = min(1.05 * max(walls_s), 1.5 * percentile(walls_s, 0.9)) or 1.0
    phases = [
        phase for phase in PHASE_NAMES if any(getattr(cost, phase) for strip in strips for _, cost in strip.steps)
    ]
    rows = [(strip.name, _strip_svg(strip, phases, high), format_seconds(strip.mean_cost.total_s)) for strip in strips]
    table = [
        [
            strip.name,
            *(format_seconds(getattr(strip.mean_cost, phase)) for phase in PHASE_NAMES),
            format_seconds(strip.mean_cost.total_s),
        ]
        for strip in strips
    ]
    return render_template(
        "strips.html",
        rows=rows,
        legend=[(PHASE_NAMES[phase], PHASE_COLOURS[phase]) for phase in phases],
        high=format_seconds(high),
        first=strips[0].steps[0][0] + 1,
        last=strips[0].steps[-1][0] + 1,
        head=["rank", *PHASE_NAMES.values(), "sum"],
        rows_in_figures=table,
    )


def _strip_svg(strip: StepStrip, phases: Sequence[str], high: float) -> Markup:
    """Draw one path per phase: a box for each step, stacked on the phases below it."""
    num = len(strip.steps)
    paths: dict[str, list[str]] = {phase: [] for phase in phases}
    for i, (_, cost) in enumerate(strip.steps):
        left, right, below = round(PATH_UNITS * i / num), round(PATH_UNITS * (i + 0.86) / num), 0.0
        for phase in phases:
            value = getattr(cost, phase) or 0.0
            if value:
                bottom, top = (round(PATH_UNITS * (1 - min(1.0, at / high))) for at in (below, below + value))
                paths[phase].append(f"M{left} {bottom}V{top}H{right}V{bottom}z")
                below += value
    drawn = [Markup('<path fill="{}" d="{}"/>').format(PHASE_COLOURS[phase], "".join(boxes))
             for phase, boxes in paths.items() if boxes]  # fmt: skip
    return Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(
        PATH_UNITS, PATH_UNITS, Markup().join(drawn)
    )


def _reading_progress(reader: RunReader) -> str:
    """Render the progress of reading existing records; "" when all are read."""
    if not reader.unread_bytes:
        return ""
    return render_template("read.html", num=reader.curves.num_records, left=reader.unread_bytes)


# --- pages ------------------------------------------------------------------------------------------------------------


def run_page(reader: RunReader, name: str, *, axis: str, links: Mapping[str, str], can_control: bool,
             can_sample: bool, assets: str) -> str:  # fmt: skip
    """Render the page of a run. `links`: labels and addresses of other pages."""
    now = time.time()
    return render_template("watch.html", status=tab_status(reader, name, now), name=name, run_dir=str(reader.rundir),
                  what=run_view.run_descriptions(reader), pieces=_as_markup(all_fragments(reader, axis, now)),
                  axis=axis, axes=CURVE_AXES, links=links, can_ask=can_control, can_sample=can_sample,
                  is_script=reader.manifest is not None and reader.manifest.program is not None,
                  assets=assets)  # fmt: skip


def overview_page(status: TabStatus, pieces: Fragments, *, assets: str) -> str:
    """Render the overview of all runs."""
    return render_template("overview.html", status=status, pieces=_as_markup(pieces), assets=assets)


def comparison_page(status: TabStatus, names: Sequence[str], pieces: Fragments, *, axis: str, assets: str) -> str:
    """Render the comparison of several runs."""
    return render_template(
        "comparison.html",
        status=status,
        names=names,
        pieces=_as_markup(pieces),
        axis=axis,
        axes=CURVE_AXES,
        assets=assets,
    )


def combined_status(statuses: Mapping[str, TabStatus]) -> TabStatus:
    """Return the tab status of several runs.

    Title and mark are of the runs that go on: what failed last week is told on the page. The state, whose changes are
    read aloud, counts all runs.
    """
    states = [status.state for status in statuses.values()]
    current = [state for state in states if state not in ENDED_STATES]
    mark = next((mark for state, mark in STATE_MARKS.items() if state in current), "idle")
    counts = count_states(states)
    title = count_states(current) if current else "no run goes on"
    return TabStatus(f"{MARK_SYMBOLS[mark]} {title} · evener", mark, counts, counts)


def count_states(states: Iterable[str]) -> str:
    """Return the number of runs in each state as text, worst first.

    >>> count_states(["finished", "failed", "finished"]), count_states([])
    ('1 failed, 2 finished', 'no runs')
    """
    counts = Counter(states)
    return ", ".join(f"{counts[word]} {word}" for word in STATE_MARKS if counts[word]) or "no runs"


def unauthorized_page(why: str) -> str:
    """Render the answer to a request without a valid token."""
    return render_template("refused.html", why=why)


def _as_markup(pieces: Fragments) -> dict[str, Markup]:
    """Mark fragments as safe HTML: our own templates rendered them."""
    return {name: Markup(text) for name, text in pieces.items()}  # noqa: S704


def _hosts_fragment(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render_template("hosts.html", head=head, rows=rows) if rows else ""


def render_template(template: str, **facts: object) -> str:
    """Render a template of this package or of the report."""
    return template_environment("evener.watch", "evener.report.pages").get_template(template).render(**facts)
