"""Is a run well? One word, why, and what mends it: from what it wrote, and a clock that tells how long it is silent."""

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

SLOW = 1.3  # assumption: times as long as expected; less is noise, or a guess that was not quite right
SLOW_STEPS = 10  # newest ones, over which that is counted
TOLD_S = 8.0  # until a host has told why a rank of it ended, whose peers were quicker
KNOWN_STEPS = 50  # of a run: fewer do not tell how long its steps take
HANGS = ("run.hang", "run.cut-off")

Word = Literal["starting", "healthy", "slow", "stuck", "no word", "failed", "stopped", "finished"]
MARKS: dict[Word, str] = {
    "starting": "idle", "healthy": "good", "slow": "warn", "stuck": "bad", "no word": "warn", "failed": "bad",
    "stopped": "idle", "finished": "done",
}  # fmt: skip


@dataclass(frozen=True)
class Health:
    """How a run is, at one look."""

    word: Word
    told: str  # sentences
    hint: str = ""  # what to do about it
    command: str = ""  # with which it goes on

    @property
    def mark(self) -> str:
        """What colour and sign it has."""
        return MARKS[self.word]

    @property
    def is_over(self) -> bool:
        """Does the run do nothing more by itself?"""
        return self.word in ("failed", "stopped", "finished")


def health(reader: Reader, now: float) -> Health:
    """Of a run at this Unix time."""
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
        return Health("no word", f"{tell(failure, manifest).what}; whose host tells why.")
    if manifest.verdict == "failed" or (failure is not None and _has_ended(reader)):
        told = tell(failure, manifest) if failure else None
        why = f": {told.what}" if told else ": no rank could say why; its logs may"
        return Health("failed", f"after {done}{why}", hint=told.hint if told else "", command=resume)
    if _has_ended(reader):
        return Health("stopped", f"after {done}: its processes have ended.", command=resume)
    return _of_running(reader, manifest, now, resume)


def _of_running(reader: Reader, manifest: Manifest, now: float, resume: str) -> Health:
    curves, last = reader.curves, reader.curves.last
    if (hang := _hang(reader.events, last)) is not None:
        return Health("stuck", f"{hang.get('error')}.", hint=str(hang.get("hint") or ""))
    step_s = median([record.wall_s for record in curves.leader]) or 0.0
    words = [event["time"] for event in reader.events if isinstance(event.get("time"), int | float)]
    silence_s = now - max([manifest.started, last.ended if last else 0.0, *words])
    if not reader.unread_bytes and silence_s > max(SILENT_S, SILENT_STEPS * step_s):
        told = (
            f"for {seconds(silence_s)}, after {plural(curves.done, 'step')}: its processes hang, are gone, or out of "
        )
        return Health("no word", f"{told}reach.", hint=f"evener logs {reader.rundir}", command=resume)
    if last is None:
        return Health("starting", "no step has been taken yet.")
    told = f"step {curves.done:,} of {manifest.spec.train.steps:,}."
    slow = _slow(reader, manifest)
    return Health("slow", f"{told} {slow}") if slow else Health("healthy", told)


def _without_manifest(reader: Reader) -> Health:
    """Of one that is being started, and of a program of the user's own that never joined."""
    failures = [event for event in reader.events if event.get("event") == "failure"]
    if failures and _has_ended(reader):
        return Health("failed", str(failures[-1].get("error")), hint=str(failures[-1].get("hint") or ""))
    if _has_ended(reader):
        statuses = {state.get("status") for state in reader.states.values()}
        stopped = any(state.get("stopped") for state in reader.states.values())
        if stopped:
            return Health("stopped", "on all its hosts.")
        return Health("finished", "on all its hosts.") if statuses == {0} else Health("failed", "see its logs.")
    return Health("starting", "it has not told of itself yet.")


def _has_ended(reader: Reader) -> bool:
    """On all hosts, by what their supervisors said last?"""
    hosts = reader.plan.hosts if reader.plan else []
    return bool(hosts) and all(reader.states.get(host.name, {}).get("state") == "ended" for host in hosts)


def _is_to_be_explained(failure: dict[str, Any], reader: Reader, now: float) -> bool:
    """Has a rank lost its peer just now, and nobody gone on since?"""
    at, last = float(failure["time"]), reader.curves.last
    goes_on = any(event.get("event") == "world" and float(event["time"]) > at for event in reader.events)
    goes_on |= last is not None and last.ended > at
    return failure.get("event") in CONSEQUENCES and abs(now - at) < TOLD_S and not goes_on


def _hang(events: Sequence[dict[str, Any]], last: StepRecord | None) -> dict[str, Any] | None:
    """Who holds the run up, unless it went on since."""
    for event in reversed(events):
        if event.get("event") in ("run.goes-on", "start", "launched", "world"):
            return None
        if event.get("event") in HANGS:
            began = last.ended - last.wall_s if last else 0.0
            return event if began < float(event["time"]) else None
    return None


def predicted(reader: Reader) -> Option | None:
    """What the planner had said of the run as it is now; None where it had not, or the ranks or settings are others."""
    manifest, plan = reader.manifest, reader.plan
    option = plan.prediction.of(manifest.roster) if manifest and plan and plan.prediction else None
    return option if option and manifest and option.roster.sync == manifest.roster.sync else None


def _slow(reader: Reader, manifest: Manifest) -> str:
    """Than what, and where the time goes; "" of a run that is not."""
    curves, num = reader.curves, max(SLOW_STEPS, manifest.roster.sync.every)
    walls_s = [record.wall_s for record in curves.leader][-num:]
    if len(walls_s) < SLOW_STEPS:
        return ""
    now_s = sum(walls_s) / len(walls_s) if manifest.roster.sync.every > 1 else median(walls_s) or 0.0
    before_s, option = curves.shared["wall_s"].mean, predicted(reader)
    if before_s is not None and curves.done >= KNOWN_STEPS and now_s > SLOW * before_s:
        costs = {rank: curves.typical(rank) for rank in curves.parts}
        than = f"as all of this run took on average ({seconds(before_s)})"
        return _why(reader, manifest, costs, now_s / before_s, num, than)
    if option is not None and now_s > SLOW * option.step_s:
        costs = {member.rank: cost.cost for member, cost in zip(option.roster.members, option.ranks, strict=True)}
        return _why(reader, manifest, costs, now_s / option.step_s, num, f"as predicted ({seconds(option.step_s)})")
    return ""


def _why(reader: Reader, manifest: Manifest, expected: dict[int, StepCost], times: float, num: int, than: str) -> str:
    """Which part of whose step grew most; waiting is for somebody else's."""
    told = f"Its newest steps take {times:.1f} times as long {than}"
    grown = [(is_s - was_s, rank, part, is_s, was_s)
             for rank, was in expected.items() if rank in reader.curves.newest
             for part, is_s in ((part, getattr(reader.curves.now(rank, num), part)) for part in PART_NAMES)
             if part != "wait_s" and is_s is not None and (was_s := getattr(was, part)) is not None]  # fmt: skip
    if not grown:
        return f"{told}."
    _, rank, part, is_s, was_s = max(grown)
    return f"{told}: {PART_NAMES[part]} on {manifest.roster.name_of(rank)} {seconds(is_s)} instead of {seconds(was_s)}."
