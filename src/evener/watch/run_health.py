"""Assess the health of a run from its files and the clock: state, message, hint and command."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from evener.core.base.shell import quote_word
from evener.core.base.units import format_seconds, median, pluralize
from evener.core.run.prediction import PlanOption
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import PHASE_NAMES, StepCost, StepRecord
from evener.report.read.downsampled_series import Window
from evener.report.read.event_log import SECONDARY_FAILURE_EVENTS, describe_event, first_failure
from evener.report.read.run_curves import RunCurves
from evener.report.read.run_state import ENDED_STATES, STATE_MARKS, RunState, is_unresponsive
from evener.watch.run_reader import RunReader

SLOW_RATIO = 1.3  # assumption: step time over the expected one; less may be noise or prediction error
SLOW_UNTIL = 1.15  # below this ratio a slow run is no longer slow: one between them would flip with every step
SLOW_STEPS = 10  # steps over which the ratio is taken, at least
ROOT_CAUSE_GRACE_S = 8.0  # until a host reports why its rank ended; the rank's peers report the lost connection sooner
MIN_BASELINE_STEPS = 50  # fewer steps do not give a reliable step time to compare with
HANG_EVENTS = ("run.hang", "run.cut-off")


@dataclass(frozen=True)
class RunHealth:
    """The health of a run at one moment."""

    state: RunState
    message: str  # sentences
    hint: str = ""  # what to do about it
    command: str = ""  # that resumes the run

    @property
    def mark(self) -> str:
        """Return the mark that selects colour and symbol."""
        return STATE_MARKS[self.state]

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended and will not continue by itself."""
        return self.state in ENDED_STATES


def assess_health(reader: RunReader, now: float) -> RunHealth:
    """Return the health of a run at `now`, a Unix time."""
    health = _assess_records(reader, now)
    if reader.is_foreign and not health.is_over:
        hint = f"it came from elsewhere, so its hosts are not contacted; evener fetch {quote_word(reader.rundir)} asks"
        return replace(health, hint=hint)
    if not reader.follow_error or health.is_over:
        return health
    why = f"Its records do not arrive: {reader.follow_error}; trying again."
    if health.state == "unresponsive":  # for that reason, as far as is known here
        return replace(health, message=why, hint="", command="")
    return replace(health, message=f"{health.message} {why}")


def _assess_records(reader: RunReader, now: float) -> RunHealth:
    """Return the health of a run as its records tell it."""
    manifest = reader.manifest
    if manifest is None:
        return _assess_without_manifest(reader)
    done = pluralize(reader.curves.steps_done, "step")
    is_saved = any(event.get("event") == "checkpoint" for event in reader.events)
    resume = f"evener train --resume {quote_word(reader.rundir)}" if is_saved else ""
    if manifest.verdict == "finished":
        took = f" in {format_seconds(manifest.ended - manifest.started)}" if manifest.ended else ""
        steps = manifest.result.steps if manifest.result else reader.curves.steps_done
        return RunHealth("finished", f"{pluralize(steps, 'step')}{took}.")
    if manifest.verdict == "stopped":
        return RunHealth("stopped", f"after {done}.", command=resume)
    failure = first_failure(reader.events)
    if failure is not None and _is_awaiting_root_cause(failure, reader, now):
        return RunHealth(
            "unresponsive", f"{describe_event(failure, manifest).description}; waiting for its host to report why."
        )
    if manifest.verdict == "failed" or (failure is not None and _has_ended(reader)):
        event_text = describe_event(failure, manifest) if failure else None
        why = f": {event_text.description}" if event_text else ": no rank reported a cause; see its logs"
        return RunHealth("failed", f"after {done}{why}", hint=event_text.hint if event_text else "", command=resume)
    if _has_ended(reader):
        if manifest.program is not None and {one.get("status") for one in reader.supervisor_states.values()} == {0}:
            return RunHealth("finished", f"{done}.")
        return RunHealth("stopped", f"after {done}: its processes have ended.", command=resume)
    return _assess_running(reader, manifest, now, resume)


def _assess_running(reader: RunReader, manifest: Manifest, now: float, resume: str) -> RunHealth:
    curves, last = reader.curves, reader.curves.last_record
    if (hang := _current_hang(reader.events, last)) is not None:
        return RunHealth("hung", f"{hang.get('error')}.", hint=str(hang.get("hint") or ""))
    step_s = median([record.wall_s for record in curves.leader_records])
    event_times = [event["time"] for event in reader.events if isinstance(event.get("time"), int | float)]
    silence_s = now - max([manifest.started, last.ended if last else 0.0, *event_times])
    # A program of the user's own may evaluate or save between two steps for as long as it likes.
    if not reader.unread_bytes and is_unresponsive(silence_s, step_s) and manifest.program is None:
        message = f"for {format_seconds(silence_s)}, after {pluralize(curves.steps_done, 'step')}:"
        return RunHealth(
            "unresponsive",
            f"{message} its processes hang, have exited or cannot be reached.",
            hint=f"evener logs {quote_word(reader.rundir)}",
            command=resume,
        )
    if last is None:
        return RunHealth("starting", "no step has been taken yet.")
    planned = f" of {manifest.planned_steps:,}" if manifest.planned_steps else ""
    message = f"step {curves.steps_done:,}{planned}."
    slow = _slow_reason(reader, manifest)
    return RunHealth("slow", f"{message} {slow}") if slow else RunHealth("healthy", message)


def _assess_without_manifest(reader: RunReader) -> RunHealth:
    """Assess a run without a manifest: one that is starting, or a user's program that never joined."""
    failures = [event for event in reader.events if event.get("event") == "failure"]
    if failures and _has_ended(reader):
        return RunHealth("failed", str(failures[-1].get("error")), hint=str(failures[-1].get("hint") or ""))
    if _has_ended(reader):
        statuses = {state.get("status") for state in reader.supervisor_states.values()}
        stopped = any(state.get("stopped") for state in reader.supervisor_states.values())
        if stopped:
            return RunHealth("stopped", "on all its hosts.")
        return RunHealth("finished", "on all its hosts.") if statuses == {0} else RunHealth("failed", "see its logs.")
    return RunHealth("starting", "it has not reported anything yet.")


def _has_ended(reader: RunReader) -> bool:
    """Return whether the supervisors of all hosts last reported that the run has ended."""
    hosts = reader.plan.hosts if reader.plan else []
    return bool(hosts) and all(reader.supervisor_states.get(host.name, {}).get("state") == "ended" for host in hosts)


def _is_awaiting_root_cause(failure: dict[str, Any], reader: RunReader, now: float) -> bool:
    """Return whether a rank lost its peer just now and the run has not continued since."""
    at, last = float(failure["time"]), reader.curves.last_record
    has_continued = any(event.get("event") == "world" and float(event["time"]) > at for event in reader.events)
    has_continued |= last is not None and last.ended > at
    return failure.get("event") in SECONDARY_FAILURE_EVENTS and abs(now - at) < ROOT_CAUSE_GRACE_S and not has_continued


def _current_hang(events: Sequence[dict[str, Any]], last: StepRecord | None) -> dict[str, Any] | None:
    """Return the newest hang event, unless the run has continued since."""
    for event in reversed(events):
        if event.get("event") in ("run.goes-on", "start", "launched", "world"):
            return None
        if event.get("event") in HANG_EVENTS:
            began = last.ended - last.wall_s if last else 0.0
            return event if began < float(event["time"]) else None
    return None


def current_prediction(reader: RunReader) -> PlanOption | None:
    """Return the planner's prediction for the current ranks and sync strategy; None if there is none."""
    manifest, plan = reader.manifest, reader.plan
    option = plan.prediction.option_for(manifest.roster) if manifest and plan and plan.prediction else None
    return option if option and manifest and option.roster.sync == manifest.roster.sync else None


def _slow_reason(reader: RunReader, manifest: Manifest) -> str:
    """Return how slow the run is, against its steps before or the prediction, and in which phase; "" if it is not."""
    curves, option, num = reader.curves, current_prediction(reader), max(SLOW_STEPS, manifest.roster.sync.every)
    past, newest = _past_windows(curves, manifest, num), _newest_step_times(curves, manifest, num)
    if not newest:
        return ""
    now_s = newest[-1][1]
    before_s, began = _find_slowdown(past, newest)
    if before_s is not None and began is not None:
        costs = {rank: curves.mean_cost(rank, manifest.since, began) for rank in curves.phase_series}
        than = f"as before step {began + 1:,} ({format_seconds(before_s)})"
        return _slowest_phase_text(reader, manifest, costs, now_s / before_s, num, than)
    if option is not None and _find_slowdown(past, newest, option.step_s)[1] is not None:
        costs = {member.rank: cost.cost for member, cost in zip(option.roster.members, option.ranks, strict=True)}
        return _slowest_phase_text(
            reader, manifest, costs, now_s / option.step_s, num, f"as predicted ({format_seconds(option.step_s)})"
        )
    return ""


def _past_windows(curves: RunCurves, manifest: Manifest, num: int) -> list[Window]:
    """Return the step times of the whole run since its ranks or settings last changed, in windows of `num` or more."""
    series, every = curves.shared_series["wall_s"], manifest.roster.sync.every
    return series.windows(num, manifest.since, without_largest=every == 1)


def _newest_step_times(curves: RunCurves, manifest: Manifest, num: int) -> list[tuple[int, float]]:
    """Return (first step, step time) of each `num` consecutive ones of the newest records, or of all if fewer.

    With an exchange every few steps a step time is their mean, else their median.
    """
    records = [record for record in curves.leader_records if record.step >= manifest.since]
    if len(records) < SLOW_STEPS:
        return []
    starts = range(max(1, len(records) - num + 1))
    walls_s = [[record.wall_s for record in records[start : start + num]] for start in starts]
    typical = statistics.fmean if manifest.roster.sync.every > 1 else statistics.median
    return [(records[start].step, typical(walls)) for start, walls in zip(starts, walls_s, strict=True)]


def _find_slowdown(
    past: Sequence[Window], newest: Sequence[tuple[int, float]], expected_s: float | None = None
) -> tuple[float | None, int | None]:
    """Return (step time to compare with, first step since which the run is slow); None: not known; it is not slow.

    The run becomes slow above SLOW_RATIO, and is slow until it is below SLOW_UNTIL. Without `expected_s` it is compared
    with its own median while it was not slow: however long a run is slow, it does not become the measure of itself.
    The result follows from the records alone, so that a page that is opened late shows what an open one would.

    >>> past = [Window(10 * i, 10, 1.0 if i < 6 else 1.4 if i < 9 else 1.2) for i in range(500)]
    >>> _find_slowdown(past, [(4995, 1.2)]), _find_slowdown(past[:6], [(55, 1.2)]), _find_slowdown(past, [(4995, 1.1)])
    ((1.0, 60), (1.0, None), (1.0, None))
    """
    not_slow_s: list[float] = []  # ascending
    num_not_slow, began = 0, None

    def is_slow(step_s: float) -> bool:
        return expected_s is not None and step_s > (SLOW_RATIO if began is None else SLOW_UNTIL) * expected_s

    has_expected = expected_s is not None
    for window in past:
        if is_slow(window.mean):
            began = window.first_step if began is None else began
            continue
        began = None
        if not has_expected:
            bisect.insort(not_slow_s, window.mean)
            num_not_slow += window.num_values
            expected_s = not_slow_s[len(not_slow_s) // 2] if num_not_slow >= MIN_BASELINE_STEPS else None
    for first_step, step_s in newest:
        if not past or first_step > past[-1].first_step:
            began = (first_step if began is None else began) if is_slow(step_s) else None
    return expected_s, began


def _slowest_phase_text(
    reader: RunReader, manifest: Manifest, expected: dict[int, StepCost], ratio: float, num: int, than: str
) -> str:
    """Name the phase and rank whose time grew most; waiting does not count, because another rank causes it."""
    message = f"Its newest steps take {ratio:.1f} times as long {than}"
    grown = [(is_s - was_s, rank, phase, is_s, was_s)
             for rank, was in expected.items() if rank in reader.curves.newest
             for phase, is_s in ((phase, getattr(reader.curves.recent_cost(rank, num), phase)) for phase in PHASE_NAMES)
             if phase != "wait_s" and is_s is not None and (was_s := getattr(was, phase)) is not None]  # fmt: skip
    if not grown:
        return f"{message}."
    _, rank, phase, is_s, was_s = max(grown)
    where = f"{PHASE_NAMES[phase]} on {manifest.roster.rank_label(rank)}"
    return f"{message}: {where} {format_seconds(is_s)} instead of {format_seconds(was_s)}."
