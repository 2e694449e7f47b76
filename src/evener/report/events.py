"""What happened during a run, in words, and what of it ended the run?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.roster import Roster, shares_text
from evener.core.rundir import Manifest
from evener.core.units import plural, seconds

FAILURES = ("failure", "run.nonfinite", "run.diverged")
CONSEQUENCES = ("run.peer-exit",)  # a rank that lost its peer is loud, and not the one that failed


@dataclass(frozen=True)
class Told:
    """A line of events.jsonl as a person reads it."""

    since_start: str | None  # None: it does not say when
    name: str
    what: str
    hint: str
    is_bad: bool


def tell(event: dict[str, Any], manifest: Manifest) -> Told:
    """An event of a run in words; one that is not known in its own."""
    moment, name = event.get("time"), str(event.get("event"))
    return Told(
        since_start=since(moment - manifest.started) if isinstance(moment, int | float) else None,
        name=name,
        what=_what(event, manifest.roster),
        hint=str(event.get("hint") or ""),
        is_bad=name in FAILURES + CONSEQUENCES and not event.get("goes_back"),
    )


CHANGES = ("rechosen", "remark", "sync.fidelity", "rebalanced")


def change(event: dict[str, Any]) -> str:
    """One of CHANGES in words. Its step is the first of which it holds, counted from 1."""
    step, why = event.get("step"), event.get("why")
    first = step + 1 if isinstance(step, int) else step
    match event.get("event"):
        case "remark":
            return str(event.get("what"))
        case "rechosen":
            return f"step {first}: {event.get('sync')} instead of {event.get('was')}: {why}"
        case "rebalanced":
            return f"step {first}: shares {shares_text(event.get('shares', []))}" + (f": {why}" if why else "")
        case _:
            return f"step {first}: {why}"


def since(value_s: float) -> str:
    """When, counted from the start.

    >>> since(2.5), since(-10.19)
    ('2.50 s', '10.19 s before')
    """
    return seconds(value_s) if value_s >= 0 else f"{seconds(-value_s)} before"


def first_failure(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What ended the run since it was last started: a failure before what merely followed from one, and of several
    that tell of one the first that knows what to do.
    """
    starts = [index for index, event in enumerate(events) if event.get("event") == "start"]
    latest = events[starts[-1] :] if starts else events
    for kinds in (FAILURES, CONSEQUENCES):
        found = [event for event in latest if event.get("event") in kinds and not event.get("goes_back")]
        if found:
            told = found[:1] if found[0].get("event") == "failure" else found
            return next((event for event in told if event.get("hint")), found[0])
    return None


def evaluations(events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Validation loss by step; of a step that a resumed run took again, the later one."""
    found = {}
    for event in events:
        step, val_loss = event.get("step"), event.get("val_loss")
        if event.get("event") == "evaluation" and isinstance(step, int) and isinstance(val_loss, float):
            found[step] = val_loss
    return sorted(found.items())


def _what(event: dict[str, Any], roster: Roster) -> str:
    """In words; as it stands where its facts are not of the types that its kind has."""
    try:
        return _describe(event, roster)
    except (TypeError, ValueError, OverflowError):
        return _as_it_stands(event)


def _describe(event: dict[str, Any], roster: Roster) -> str:
    step = event.get("step")
    match event.get("event"):
        case "launched":
            hosts = ", ".join(map(str, event.get("hosts", [])))
            return f"on {hosts}, {event.get('world_size')} ranks"
        case "start":
            return f"ranks: {event.get('ranks')}, --sync {event.get('sync')}, from step {step}"
        case "world":
            why = f": {event['why']}" if event.get("why") else ""
            return f"from step {step}: {', '.join(map(str, event.get('hosts', [])))}{why}"
        case "evaluation":
            loss = event.get("val_loss")
            return f"step {step}: validation loss " + (f"{loss:.4f}" if isinstance(loss, float) else "not measured")
        case "checkpoint":
            return f"step {step} saved"
        case "replicas.agree":
            return f"step {step}: all {event.get('tensors')} tensors are equal on all ranks, to the bit"
        case "replicas.reconciled":
            return (
                f"step {step}: unlike devices round differently: replicas differed by {event.get('relative', 0.0):.1e} "
                "of a tensor's largest number, and all took rank 0's"
            )
        case "rechosen" | "remark" | "sync.fidelity" | "rebalanced":
            return change(event)
        case (
            "run.hang"
            | "run.cut-off"
            | "run.leaves"
            | "run.no-room"
            | "host.failed"
            | "supervisor.lost"
            | "checkpoint.damaged"
        ):
            return str(event.get("error"))
        case "run.goes-on":
            return f"it goes on, {seconds(event.get('after_s'))} after that was told"
        case "own.dropped":
            return f"step {step}: other ranks or another way than before: they go on from what was agreed on last"
        case "own.missing":
            whose = plural(event.get("num", 0), "rank")
            return f"step {step}: what {whose} had not sent yet was kept where this run is no more"
        case "finished" | "stopped":
            return f"step {step}"
        case "run.nonfinite":
            back = "; all go back to the newest checkpoint" if event.get("goes_back") else ""
            again = ", as before" if event.get("goes_back") is False else ""
            return f"step {step}: loss or gradient is not finite on {_names(event.get('ranks'), roster)}{again}{back}"
        case "run.diverged":
            return f"step {step}: the replicas differ: {_apart(event, roster)}"
        case "run.peer-exit":
            who = "a rank" if event.get("rank") is None else _names(event["rank"], roster)
            return f"{who} lost one that it was exchanging with: {_in_short(str(event.get('error')))}"
        case "failure" | "run.oom":
            who, error = "" if event.get("rank") is None else _names(event["rank"], roster), str(event.get("error"))
            return f"{who}: {error}" if who and not error.startswith(f"rank {event['rank']} ") else error
        case _:
            return _as_it_stands(event)


def _in_short(error: str) -> str:
    """Torch's words without the line of its code, and its advice to read another log.

    >>> _in_short("[/src/pair.cc:553] Connection closed by peer [::1]:9. This is typically caused by a crash. GLHF!")
    'Connection closed by peer [::1]:9'
    """
    return re.sub(r"^\[\S+:\d+\] ", "", error).partition(". This is ")[0]


def _as_it_stands(event: dict[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("event", "time")}
    return ", ".join(f"{key} {_plain(value)}" for key, value in rest.items())


def _apart(event: dict[str, Any], roster: Roster) -> str:
    """Where replicas differ, who is the odd one, and what follows."""
    found = [one for one in event.get("differences") or [] if isinstance(one, dict)]
    text = "where was not told"
    if found:
        more = len(found) - 1
        text = f"{_names(found[0].get('rank'), roster)} in {found[0].get('tensor')}"
        text += f" and {more} more {'tensor' if more == 1 else 'tensors'}" if more else ""
    if "odd" in event:
        odd = " and ".join(map(str, event["odd"]))
        text += f"; {odd} is the odd one" if odd else "; which of them is right nobody can say"
    if event.get("goes_back"):
        text += "; all go back to the newest checkpoint"
    leaves = " and ".join(map(str, event.get("leaves", [])))
    return text + (f", and {leaves} leaves the run" if leaves else "")


def _names(ranks: object, roster: Roster) -> str:
    """Of ranks as an event tells them; whatever else stands there, as it is."""
    known = ranks if isinstance(ranks, list) else [ranks]
    return ", ".join(roster.name_of(rank) if isinstance(rank, int) else f"rank {rank}" for rank in known)


def _plain(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)
