"""Which hosts were lost during a run, which came back, and what did each change cost?

Nobody's clock is compared with another's: of each rank that was there before and after, the time from the end of its
last step in the worlds before to that of its first one in the new world, less a typical step. The least over ranks is
what the run stood still, with all that had to be done again; a rank that was away itself took longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.step import StepRecord
from evener.core.units import median, seconds

MOST_TOLD = 3  # in a sentence


@dataclass(frozen=True, kw_only=True)
class Change:
    """A world that followed another one."""

    time: float  # Unix
    step: int  # with which it began
    hosts: list[str]  # that train from here on
    gone: list[str]
    came: list[str]
    why: str
    cost_s: float | None  # None: not measured


def changes(events: Sequence[Mapping[str, Any]], records: Mapping[int, Sequence[StepRecord]]) -> list[Change]:
    """In order. Events that are damaged are left out, and a start of the run is no change."""
    found: list[Change] = []
    costs = _costs([event["epoch"] for event in events if event.get("event") == "world"
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
            found.append(
                Change(
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
    return found


def _costs(epochs: Sequence[int], records: Mapping[int, Sequence[StepRecord]]) -> dict[int, float]:
    """Of worlds, by the epochs of their first Rosters. Of several without a step between them the last one's."""
    costs: dict[int, float] = {}
    for of_rank in records.values():
        typical = median([record.wall_s for record in of_rank]) or 0.0
        for last, first in itertools.pairwise(of_rank):
            epoch = max((epoch for epoch in epochs if last.epoch < epoch <= first.epoch), default=None)
            if epoch is not None:
                cost_s = max(0.0, first.ended - last.ended - typical)
                costs[epoch] = min(costs.get(epoch, cost_s), cost_s)
    return costs


def told(found: Sequence[Change], took_s: float | None) -> str:
    """A paragraph: how often, what it cost of a run that took so long, and which cost most; "" of none."""
    if not found:
        return ""
    gone, came = (sum(len(getattr(change, what)) for change in found) for what in ("gone", "came"))
    again = sum(not change.gone and not change.came for change in found)
    what = [f"{_times(gone)} a host was lost or left"] * bool(gone)
    what += [f"{_times(came)} one was let in"] * bool(came)
    what += [f"{_times(again)} all began again"] * bool(again)
    text = f"Who takes part changed {_times(len(found))}: {', '.join(what)}."
    costs = [(change.cost_s, change) for change in found if change.cost_s is not None]
    if not costs:
        return f"{text} What that cost was not measured."
    total_s = sum(cost_s for cost_s, _ in costs)
    share = f", {total_s / took_s:.1%} of its time" if took_s else ""
    text += f" That cost {seconds(total_s)} in all{share}"
    worst = sorted(costs, key=lambda one: -one[0])[:MOST_TOLD]
    each = "; ".join(f"{seconds(cost_s)} before step {change.step + 1}" + f" ({change.why})" * bool(change.why)
                     for cost_s, change in worst)  # fmt: skip
    return f"{text}: {each}." if len(costs) <= MOST_TOLD else f"{text}; most of it {each}."


def _times(num: int) -> str:
    return {1: "once", 2: "twice"}.get(num, f"{num} times")
