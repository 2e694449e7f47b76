"""List the membership changes of a run: which hosts were lost or joined, and what each change cost.

No clocks are compared. For each rank that took part before and after a change, the cost is the time from the end of its
last step before the change to the end of its first step after it, minus a typical step. The minimum over ranks is the
run's downtime, including the steps that were repeated; a rank that was itself away took longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.base.units import format_seconds, median
from evener.core.run.step_cost import StepRecord

MAX_LISTED_CHANGES = 3  # changes in a sentence


@dataclass(frozen=True, kw_only=True)
class MembershipChange:
    """A change of the group of hosts that train."""

    time: float  # Unix
    step: int  # the first step of the new group
    hosts: list[str]  # in the new group
    gone: list[str]
    came: list[str]
    why: str
    cost_s: float | None  # None: not measured


def membership_changes(
    events: Sequence[Mapping[str, Any]], records: Mapping[int, Sequence[StepRecord]]
) -> list[MembershipChange]:
    """Return the membership changes in order; skip damaged events and starts of the run."""
    result: list[MembershipChange] = []
    costs = _change_costs([event["epoch"] for event in events if event.get("event") == "world"
                    and isinstance(event.get("epoch"), int)], records)  # fmt: skip
    before: list[str] | None = None
    for event in events:
        if event.get("event") == "launched":
            before = None
        if event.get("event") != "world":
            continue
        hosts, number, step, time = (event.get(name) for name in ("hosts", "number", "step", "time"))
        if not (isinstance(hosts, list) and isinstance(number, int) and isinstance(step, int)
                and isinstance(time, int | float)):  # fmt: skip
            continue
        hosts = [str(host) for host in hosts]
        if number > 0 and before is not None:
            result.append(
                MembershipChange(
                    time=time,
                    step=step,
                    hosts=hosts,
                    gone=[host for host in before if host not in hosts],
                    came=[host for host in hosts if host not in before],
                    why=str(event.get("why") or ""),
                    cost_s=costs.get(event["epoch"]) if isinstance(event.get("epoch"), int) else None,
                )
            )
        before = hosts
    return result


def _change_costs(epochs: Sequence[int], records: Mapping[int, Sequence[StepRecord]]) -> dict[int, float]:
    """Return the cost of each change by the first roster epoch of the new group.

    Of several changes without a step in between, only the last one has a cost.
    """
    costs: dict[int, float] = {}
    for of_rank in records.values():
        typical = median([record.wall_s for record in of_rank]) or 0.0
        for last, first in itertools.pairwise(of_rank):
            epoch = max((epoch for epoch in epochs if last.epoch < epoch <= first.epoch), default=None)
            if epoch is not None:
                cost_s = max(0.0, first.ended - last.ended - typical)
                costs[epoch] = min(costs.get(epoch, cost_s), cost_s)
    return costs


def split_brains(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each membership epoch that was decided twice, as the hosts of the losing side report it.

    Several hosts report one; those that kept their side know less.
    """
    by_number: dict[int, Mapping[str, Any]] = {}
    for event in events:
        number = event.get("number")
        if event.get("event") != "run.split-brain" or not isinstance(number, int):
            continue
        if by_number.get(number, {}).get("kept") is not False:
            by_number[number] = event
    texts = [(str(event.get("error")), str(event.get("hint") or "")) for _, event in sorted(by_number.items())]
    return [f"{error}. {hint[:1].upper()}{hint[1:]}".strip() for error, hint in texts]


def explain_membership_changes(changes: Sequence[MembershipChange], elapsed_s: float | None) -> str:
    """Return a paragraph: how often, the cost as a share of `elapsed_s`, and the costliest changes; "" if none."""
    if not changes:
        return ""
    gone, came = (sum(len(getattr(change, kind)) for change in changes) for kind in ("gone", "came"))
    restarts = sum(not change.gone and not change.came for change in changes)
    parts = [f"{_times_text(gone)} a host was lost or left"] * bool(gone)
    parts += [f"{_times_text(came)} one joined"] * bool(came)
    parts += [f"{_times_text(restarts)} all ranks restarted"] * bool(restarts)
    text = f"The membership changed {_times_text(len(changes))}: {', '.join(parts)}."
    costs = [(change.cost_s, change) for change in changes if change.cost_s is not None]
    if not costs:
        return f"{text} What that cost was not measured."
    total_s = sum(cost_s for cost_s, _ in costs)
    share = f", {total_s / elapsed_s:.1%} of its time" if elapsed_s else ""
    text += f" That cost {format_seconds(total_s)} in all{share}"
    worst = sorted(costs, key=lambda pair: -pair[0])[:MAX_LISTED_CHANGES]
    listed = "; ".join(f"{format_seconds(cost_s)} before step {change.step + 1}" + f" ({change.why})" * bool(change.why)
                     for cost_s, change in worst)  # fmt: skip
    return f"{text}: {listed}." if len(costs) <= MAX_LISTED_CHANGES else f"{text}; most of it {listed}."


def _times_text(num: int) -> str:
    return {1: "once", 2: "twice"}.get(num, f"{num} times")
