"""Describe the events of a run as text, and find the failure that ended it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.base.units import format_seconds, pluralize
from evener.core.run.roster import Roster, format_shares
from evener.core.run.rundir import Manifest

# not run.oom: a rank whose process was killed for lack of memory reports it when it has restarted with a lower limit
FAILURE_EVENTS = ("failure", "run.nonfinite", "run.diverged")
# secondary: a rank that lost its peer reports loudly, but is not the one that failed
SECONDARY_FAILURE_EVENTS = ("run.peer-exit",)


@dataclass(frozen=True)
class EventText:
    """A line of events.jsonl as text."""

    since_start: str | None  # None: the event has no time
    name: str
    description: str
    hint: str
    is_bad: bool


def describe_event(event: dict[str, Any], manifest: Manifest) -> EventText:
    """Describe an event as text; list the fields of an unknown kind."""
    unix_s, name = event.get("time"), str(event.get("event"))
    return EventText(
        since_start=format_since_start(unix_s - manifest.started) if isinstance(unix_s, int | float) else None,
        name=name,
        description=_describe_or_dump(event, manifest.roster),
        hint=str(event.get("hint") or ""),
        is_bad=name in FAILURE_EVENTS + SECONDARY_FAILURE_EVENTS and not event.get("goes_back"),
    )


NOTICE_EVENTS = ("rechosen", "compared", "remark", "sync.fidelity", "rebalanced")


def describe_notice(event: dict[str, Any]) -> str:
    """Describe a NOTICE_EVENTS event; its step, counted from 1, is the first that it affects."""
    step, why = event.get("step"), event.get("why")
    first = step + 1 if isinstance(step, int) else step
    match event.get("event"):
        case "remark":
            return str(event.get("what"))
        case "rechosen":
            verb = "trying" if event.get("is_trial") else "changing to"
            return f"step {first}: {verb} {event.get('sync')} (before: {event.get('was')}): {why}"
        case "compared":
            return f"step {first}: --sync auto goes on with {event.get('chosen')}; {why}"
        case "rebalanced":
            return f"step {first}: shares {format_shares(event.get('shares', []))}" + (f": {why}" if why else "")
        case _:
            return f"step {first}: {why}"


def format_since_start(value_s: float) -> str:
    """Format a time relative to the start of the run.

    >>> format_since_start(2.5), format_since_start(-10.19)
    ('2.50 s', '10.19 s before')
    """
    return format_seconds(value_s) if value_s >= 0 else f"{format_seconds(-value_s)} before"


def first_failure(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the event that reports why the run failed since its last start; None if it did not fail.

    A failure takes precedence over the secondary failures that follow from it. Of several reports of one failure,
    return the first with a hint.
    """
    starts = [index for index, event in enumerate(events) if event.get("event") == "start"]
    latest = events[starts[-1] :] if starts else events
    for kinds in (FAILURE_EVENTS, SECONDARY_FAILURE_EVENTS):
        failures = [event for event in latest if event.get("event") in kinds and not event.get("goes_back")]
        if failures:
            reports = failures[:1] if failures[0].get("event") == "failure" else failures
            return next((event for event in reports if event.get("hint")), failures[0])
    return None


def evaluations(events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation loss) pairs, without those of steps that a restart rolled back."""
    by_step: dict[int, float] = {}
    for event in events:
        step, val_loss = event.get("step"), event.get("val_loss")
        if event.get("event") == "start" and isinstance(step, int):
            by_step = {known: loss for known, loss in by_step.items() if known <= step}
        if event.get("event") == "evaluation" and isinstance(step, int) and isinstance(val_loss, float):
            by_step[step] = val_loss
    return sorted(by_step.items())


def _describe_or_dump(event: dict[str, Any], roster: Roster) -> str:
    """Describe an event; list its fields if their types do not match its kind."""
    try:
        return _describe(event, roster)
    except (TypeError, ValueError, OverflowError):
        return _dump_fields(event)


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
        case "rechosen" | "compared" | "remark" | "sync.fidelity" | "rebalanced":
            return describe_notice(event)
        case (
            "run.hang"
            | "run.cut-off"
            | "run.leaves"
            | "run.no-room"
            | "run.split-brain"
            | "host.failed"
            | "supervisor.lost"
            | "program.warning"
            | "checkpoint.damaged"
        ):
            return str(event.get("error"))
        case "run.goes-on":
            return f"recovered {format_seconds(event.get('after_s'))} after the hang was reported"
        case "program.waiting":
            return f"the others wait for rank {event.get('rank')}, which is in {event.get('where')}"
        case "program.note":
            return str(event.get("text"))
        case "collectives":
            return "the newest collectives of its ranks, before the run failed"
        case "own.dropped":
            return f"step {step}: the ranks or the sync strategy changed: all resume from the last synchronized model"
        case "own.missing":
            owners = pluralize(event.get("num", 0), "rank")
            return f"step {step}: unsent gradients of {owners} are missing: a host that saved them left the run"
        case "finished" | "stopped":
            return f"step {step}"
        case "run.nonfinite":
            rollback = "; all roll back to the newest checkpoint" if event.get("goes_back") else ""
            as_before = ", as before" if event.get("goes_back") is False else ""
            where = _rank_labels(event.get("ranks"), roster)
            return f"step {step}: loss or gradient is not finite on {where}{as_before}{rollback}"
        case "run.diverged":
            return f"step {step}: the replicas differ: {_describe_divergence(event, roster)}"
        case "run.peer-exit":
            who = "a rank" if event.get("rank") is None else _rank_labels(event["rank"], roster)
            return f"{who} lost the connection to its peer: {_shorten_torch_error(str(event.get('error')))}"
        case "failure" | "run.oom":
            who, error = (
                "" if event.get("rank") is None else _rank_labels(event["rank"], roster),
                str(event.get("error")),
            )
            return f"{who}: {error}" if who and not error.startswith(f"rank {event['rank']} ") else error
        case _:
            return _dump_fields(event)


def _shorten_torch_error(error: str) -> str:
    """Shorten torch's error: drop the source line, and the advice to read another log.

    >>> _shorten_torch_error("[/src/pair.cc:553] Connection closed by peer [::1]:9. This is typical.")
    'Connection closed by peer [::1]:9'
    """
    return re.sub(r"^\[\S+:\d+\] ", "", error).partition(". This is ")[0]


def _dump_fields(event: dict[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("event", "time")}
    return ", ".join(f"{key} {_format_value(value)}" for key, value in rest.items())


def _describe_divergence(event: dict[str, Any], roster: Roster) -> str:
    """Say where replicas differ, which one is the odd one out, and what follows."""
    differences = [entry for entry in event.get("differences") or [] if isinstance(entry, dict)]
    text = "where was not reported"
    if differences:
        more = len(differences) - 1
        text = f"{_rank_labels(differences[0].get('rank'), roster)} in {differences[0].get('tensor')}"
        text += f" and {more} more {'tensor' if more == 1 else 'tensors'}" if more else ""
    if "odd" in event:
        odd = " and ".join(map(str, event["odd"]))
        text += f"; {odd} is the odd one" if odd else "; which of them is right is not known"
    if event.get("goes_back"):
        text += "; all roll back to the newest checkpoint"
    leaves = " and ".join(map(str, event.get("leaves", [])))
    return text + (f", and {leaves} leaves the run" if leaves else "")


def _rank_labels(ranks: object, roster: Roster) -> str:
    """Return the labels of an event's ranks; an entry that is no rank number stays as it is."""
    known = ranks if isinstance(ranks, list) else [ranks]
    return ", ".join(roster.rank_label(rank) if isinstance(rank, int) else f"rank {rank}" for rank in known)


def _format_value(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)
