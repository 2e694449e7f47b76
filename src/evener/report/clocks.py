"""By how much do the clocks of hosts differ, and how well is that known? Their collectives say it, and nobody else.

No rank leaves a collective before the last has entered it. So of an exchange that a rank of host a was in from a₀ to
a₁ by its clock, and one of host b from b₀ to b₁ by its own, what has to be added to b's clock is known to lie within

    a₀ - b₁  ≤  d  ≤  a₁ - b₀

A rank that comes last bounds it on one side as tightly as the transfer was short; another exchange, to which the other
came last, does so on the other side. Over many exchanges that is an interval which holds the truth, and half of its
width is the error. Between exchanges clocks drift: those of another time bound it less by DRIFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evener.core.spans import StepSpans

DRIFT = 1e-4  # seconds a second that two clocks may run apart. *Assumption*: quartz stays within half of it
SAME_S = 0.5  # processes of one host whose clocks stood at 0 within so much of each other have the same clock


@dataclass(frozen=True)
class Offset:
    """What makes of a time by one clock a time by another."""

    add_s: float
    error_s: float | None  # None: no exchange joins them, so it is what the hosts' own time of day says


@dataclass(frozen=True)
class Bound:
    """What the exchanges of one step say."""

    at_s: float  # by the first clock
    least_s: float
    most_s: float


class Clocks:
    """Those of all ranks of a run, which are numbered by the hosts that they belong to."""

    def __init__(self, spans: Mapping[int, Sequence[StepSpans]], host_of: Mapping[int, str]) -> None:
        self._known: list[tuple[str, float]] = []
        self._of: dict[tuple[int, float], int] = {}
        for rank, of_rank in sorted(spans.items()):
            for origin in dict.fromkeys(one.clock for one in of_rank):
                self._of[rank, origin] = self._number(host_of.get(rank, f"rank {rank}"), origin)
        self._bounds: dict[tuple[int, int], list[Bound]] = {}
        by_step: dict[tuple[int, int], dict[int, StepSpans]] = {}
        for rank, of_rank in spans.items():
            for one in of_rank:
                by_step.setdefault((one.step, one.epoch), {})[rank] = one
        for of_step in by_step.values():
            self._learn(of_step)

    def of(self, rank: int, spans: StepSpans) -> int:
        """The number of the clock by which this rank's spans are told."""
        return self._of[rank, spans.clock]

    def origin(self, clock: int) -> float:
        """The Unix time at which it stood at 0."""
        return self._known[clock][1]

    def offset(self, first: int, other: int, begin_s: float, end_s: float) -> Offset:
        """What to add to the other clock between two moments by the first one."""
        if first == other:
            return Offset(0.0, 0.0)
        bounds = self._bounds.get((first, other))
        if not bounds:
            return Offset(self.origin(other) - self.origin(first), None)
        middle, half = (begin_s + end_s) / 2, (end_s - begin_s) / 2
        least = max(bound.least_s - DRIFT * abs(bound.at_s - middle) for bound in bounds)
        most = min(bound.most_s + DRIFT * abs(bound.at_s - middle) for bound in bounds)
        return Offset((least + most) / 2, abs(most - least) / 2 + DRIFT * half)

    def _number(self, host: str, origin: float) -> int:
        for number, (other, known) in enumerate(self._known):
            if host == other and abs(origin - known) < SAME_S:
                return number
        self._known.append((host, origin))
        return len(self._known) - 1

    def _learn(self, of_step: Mapping[int, StepSpans]) -> None:
        """What the exchanges of one step say of the clocks of those who took it."""
        exchanges = {rank: dict(_exchanges(spans)) for rank, spans in of_step.items()}
        for one, mine in exchanges.items():
            for other, theirs in exchanges.items():
                first, second = self.of(one, of_step[one]), self.of(other, of_step[other])
                if first == second:
                    continue
                at, found = of_step[one].begun_s, []
                for name in mine.keys() & theirs.keys():
                    (begin, end), (their_begin, their_end) = mine[name], theirs[name]
                    drift = DRIFT * abs(begin - at)
                    found.append((begin - their_end - drift, end - their_begin + drift))
                if found:
                    bound = Bound(at, max(least for least, _ in found), min(most for _, most in found))
                    self._bounds.setdefault((first, second), []).append(bound)


def _exchanges(spans: StepSpans) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    """((bucket, or -1 of news; how many times before), (begin, end) by the rank's clock) of a step's collectives."""
    for one, turn in spans.in_turns():
        yield (one.bucket, turn), (spans.begun_s + one.begin_s, spans.begun_s + one.end_s)
    for turn, (begin_s, end_s) in enumerate(spans.news):
        yield (-1, turn), (spans.begun_s + begin_s, spans.begun_s + end_s)
