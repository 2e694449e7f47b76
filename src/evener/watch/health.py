"""Assess the health of a run from its files and the clock: state, message, hint and command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evener.core.prediction import Option
from evener.core.rundir import Manifest
from evener.core.step import StepCost, StepRecord
from evener.core.units import median, plural, seconds
from evener.report.events import CONSEQUENCES, first_failure, tell
from evener.report.figures import PART_NAMES
from evener.report.page import SILENT_S, SILENT_STEPS
from evener.watch.reader import Reader

SLOW = 1.3  # assumption: step time over the expected one; less may be noise or prediction error
SLOW_STEPS = 10  # newest steps over which the ratio is taken
TOLD_S = 8.0  # until a host reports why its rank ended; the rank's peers report the lost connection sooner
KNOWN_STEPS = 50  # fewer steps do not give a reliable average
HANGS = ("run.hang", "run.cut-off")

Word = Literal["starting", "healthy", "slow", "stuck", "no word", "failed", "stopped", "finished"]
MARKS: dict[Word, str] = {
    "starting": "idle", "healthy": "good", "slow": "warn", "stuck": "bad", "no word": "warn", "failed": "bad",
    "stopped": "idle", "finished": "done",
}  # fmt: skip


@dataclass(frozen=True)
class Health:
    """The health of a run at one moment."""

    word: Word
    told: str  # sentences
    hint: str = ""  # what to do about it
    command: str = ""  # that resumes the run

    @property
    def mark(self) -> str:
        """Return the mark that selects colour and symbol."""
        return MARKS[self.word]

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended and will not continue by itself."""
        return self.word in ("failed", "stopped", "finished")


def health(reader: Reader, now: float) -> Health:
    """Return the health of a run at `now`, a Unix time."""
    manifest = reader.manifest
    if manifest is None:
        return _without_manifest(reader)
    done = plural(reader.curves.done, "step")
    is_saved = any(event.get("event") == "checkpoint" for event in reader.events)
    resume = f"evener train --resume {reader.rundir}" if is_saved else ""
    if manifest.verdict == "finished":
        took = f" in {seconds(manifest.ended - manifest.started)}" if manifest.ended else ""
        return Health("finished", f"{plural(manifest.result.steps if manifest.result else 0, 'step')}{took}.")
    if manifest.verdict == "stopped":
        return Health("stopped", f"after {done}.", command=resume)
    failure = first_failure(reader.events)
    if failure is not None and _is_to_be_explained(failure, reader, now):
        return Health("no word", f"{tell(failure, manifest).what}; waiting for its host to report why.")
    if manifest.verdict == "failed" or (failure is not None and _has_ended(reader)):
        event_text = tell(failure, manifest) if failure else None
        why = f": {event_text.what}" if event_text else ": no rank reported a cause; see its logs"
        return Health("failed", f"after {done}{why}", hint=event_text.hint if event_text else "", command=resume)
    if _has_ended(reader):
        return Health("stopped", f"after {done}: its processes have ended.", command=resume)
    return _of_running(reader, manifest, now, resume)


def _of_running(reader: Reader, manifest: Manifest, now: float, resume: str) -> Health:
    curves, last = reader.curves, reader.curves.last
    if (hang := _hang(reader.events, last)) is not None:
        return Health("stuck", f"{hang.get('error')}.", hint=str(hang.get("hint") or ""))
    step_s = median([record.wall_s for record in curves.leader]) or 0.0
    event_times = [event["time"] for event in reader.events if isinstance(event.get("time"), int | float)]
    silence_s = now - max([manifest.started, last.ended if last else 0.0, *event_times])
    if not reader.unread_bytes and silence_s > max(SILENT_S, SILENT_STEPS * step_s):
        message = f"for {seconds(silence_s)}, after {plural(curves.done, 'step')}:"
        return Health(
            "no word",
            f"{message} its processes hang, have exited or cannot be reached.",
            hint=f"evener logs {reader.rundir}",
            command=resume,
        )
    if last is None:
        return Health("starting", "no step has been taken yet.")
    message = f"step {curves.done:,} of {manifest.spec.train.steps:,}."
    slow = _slow(reader, manifest)
    return Health("slow", f"{message} {slow}") if slow else Health("healthy", message)


def _without_manifest(reader: Reader) -> Health:
    """Assess a run without a manifest: one that is starting, or a user's program that never joined."""
    failures = [event for event in reader.events if event.get("event") == "failure"]
    if failures and _has_ended(reader):
        return Health("failed", str(failures[-1].get("error")), hint=str(failures[-1].get("hint") or ""))
    if _has_ended(reader):
        statuses = {state.get("status") for state in reader.states.values()}
        stopped = any(state.get("stopped") for state in reader.states.values())
        if stopped:
            return Health("stopped", "on all its hosts.")
        return Health("finished", "on all its hosts.") if statuses == {0} else Health("failed", "see its logs.")
    return Health("starting", "it has not reported anything yet.")


def _has_ended(reader: Reader) -> bool:
    """Return whether the supervisors of all hosts last reported that the run has ended."""
    hosts = reader.plan.hosts if reader.plan else []
    return bool(hosts) and all(reader.states.get(host.name, {}).get("state") == "ended" for host in hosts)


def _is_to_be_explained(failure: dict[str, Any], reader: Reader, now: float) -> bool:
    """Return whether a rank lost its peer just now and the run has not continued since."""
    at, last = float(failure["time"]), reader.curves.last
    has_continued = any(event.get("event") == "world" and float(event["time"]) > at for event in reader.events)
    has_continued |= last is not None and last.ended > at
    return failure.get("event") in CONSEQUENCES and abs(now - at) < TOLD_S and not has_continued


def _hang(events: Sequence[dict[str, Any]], last: StepRecord | None) -> dict[str, Any] | None:
    """Return the newest hang event, unless the run has continued since."""
    for event in reversed(events):
        if event.get("event") in ("run.goes-on", "start", "launched", "world"):
            return None
        if event.get("event") in HANGS:
            began = last.ended - last.wall_s if last else 0.0
            return event if began < float(event["time"]) else None
    return None


def predicted(reader: Reader) -> Option | None:
    """Return the planner's prediction for the current ranks and sync strategy; None if there is none."""
    manifest, plan = reader.manifest, reader.plan
    option = plan.prediction.of(manifest.roster) if manifest and plan and plan.prediction else None
    return option if option and manifest and option.roster.sync == manifest.roster.sync else None


def _slow(reader: Reader, manifest: Manifest) -> str:
    """Return how slow the run is, against its own average or the prediction, and in which phase; "" if it is not."""
    curves, num = reader.curves, max(SLOW_STEPS, manifest.roster.sync.every)
    walls_s = [record.wall_s for record in curves.leader][-num:]
    if len(walls_s) < SLOW_STEPS:
        return ""
    now_s = sum(walls_s) / len(walls_s) if manifest.roster.sync.every > 1 else median(walls_s) or 0.0
    before_s, option = curves.shared["wall_s"].mean, predicted(reader)
    if before_s is not None and curves.done >= KNOWN_STEPS and now_s > SLOW * before_s:
        costs = {rank: curves.typical(rank) for rank in curves.parts}
        than = f"as the run's average ({seconds(before_s)})"
        return _why(reader, manifest, costs, now_s / before_s, num, than)
    if option is not None and now_s > SLOW * option.step_s:
        costs = {member.rank: cost.cost for member, cost in zip(option.roster.members, option.ranks, strict=True)}
        return _why(reader, manifest, costs, now_s / option.step_s, num, f"as predicted ({seconds(option.step_s)})")
    return ""


def _why(reader: Reader, manifest: Manifest, expected: dict[int, StepCost], ratio: float, num: int, than: str) -> str:
    """Name the phase and rank whose time grew most; waiting does not count, because another rank causes it."""
    message = f"Its newest steps take {ratio:.1f} times as long {than}"
    grown = [(is_s - was_s, rank, phase, is_s, was_s)
             for rank, was in expected.items() if rank in reader.curves.newest
             for phase, is_s in ((phase, getattr(reader.curves.now(rank, num), phase)) for phase in PART_NAMES)
             if phase != "wait_s" and is_s is not None and (was_s := getattr(was, phase)) is not None]  # fmt: skip
    if not grown:
        return f"{message}."
    _, rank, phase, is_s, was_s = max(grown)
    where = f"{PART_NAMES[phase]} on {manifest.roster.name_of(rank)}"
    return f"{message}: {where} {seconds(is_s)} instead of {seconds(was_s)}."
