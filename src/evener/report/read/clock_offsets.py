"""Estimate the clock offsets between hosts, with error bounds, from the collectives that both took part in.

No rank leaves a collective before the last has entered it. If a rank of host a was in a collective from a₀ to a₁ by its
clock, and a rank of host b from b₀ to b₁ by its own, the offset d to add to b's clock lies within

    a₀ - b₁  ≤  d  ≤  a₁ - b₀

A collective that a's rank enters last bounds d tightly on one side, the more so the shorter its transfer; one that b's
rank enters last does so on the other side. The intersection over many collectives contains the true offset, and half
its width is the error. Clocks drift between collectives: a bound from another time is widened by MAX_DRIFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evener.core.run.step_spans import StepSpans

MAX_DRIFT = 1e-4  # seconds per second by which two clocks may drift. *Assumption*: quartz stays within half of it
SAME_CLOCK_S = 0.5  # processes of one host share a clock if their clocks were at 0 within this of each other


@dataclass(frozen=True)
class ClockOffset:
    """The offset that converts a time by one clock to a time by another."""

    add_s: float
    error_s: float | None  # None: no shared collective, so the offset is that of the hosts' wall clocks


@dataclass(frozen=True)
class OffsetBound:
    """The bounds on an offset from the collectives of one step."""

    at_s: float  # by the first clock
    lower_s: float
    upper_s: float


class RankClocks:
    """The clocks of all ranks of a run; ranks of one host with the same clock share a number."""

    def __init__(self, spans: Mapping[int, Sequence[StepSpans]], host_of: Mapping[int, str]) -> None:
        self._origins: list[tuple[str, float]] = []
        self._clock_by_rank: dict[tuple[int, float], int] = {}
        for rank, of_rank in sorted(spans.items()):
            for origin in dict.fromkeys(step_spans.clock for step_spans in of_rank):
                self._clock_by_rank[rank, origin] = self._clock_number(host_of.get(rank, f"rank {rank}"), origin)
        self._bounds: dict[tuple[int, int], list[OffsetBound]] = {}
        by_step: dict[tuple[int, int], dict[int, StepSpans]] = {}
        for rank, of_rank in spans.items():
            for step_spans in of_rank:
                by_step.setdefault((step_spans.step, step_spans.epoch), {})[rank] = step_spans
        for of_step in by_step.values():
            self._add_bounds(of_step)

    def clock_of(self, rank: int, spans: StepSpans) -> int:
        """Return the number of the clock that timed this rank's spans."""
        return self._clock_by_rank[rank, spans.clock]

    def origin_unix_s(self, clock: int) -> float:
        """Return the Unix time at which the clock was at 0."""
        return self._origins[clock][1]

    def offset(self, first: int, other: int, begin_s: float, end_s: float) -> ClockOffset:
        """Return the offset that converts clock `other` to `first`, between two times by clock `first`."""
        if first == other:
            return ClockOffset(0.0, 0.0)
        bounds = self._bounds.get((first, other))
        if not bounds:
            return ClockOffset(self.origin_unix_s(other) - self.origin_unix_s(first), None)
        middle, half = (begin_s + end_s) / 2, (end_s - begin_s) / 2
        least = max(bound.lower_s - MAX_DRIFT * abs(bound.at_s - middle) for bound in bounds)
        most = min(bound.upper_s + MAX_DRIFT * abs(bound.at_s - middle) for bound in bounds)
        return ClockOffset((least + most) / 2, abs(most - least) / 2 + MAX_DRIFT * half)

    def _clock_number(self, host: str, origin: float) -> int:
        for number, (other, known) in enumerate(self._origins):
            if host == other and abs(origin - known) < SAME_CLOCK_S:
                return number
        self._origins.append((host, origin))
        return len(self._origins) - 1

    def _add_bounds(self, of_step: Mapping[int, StepSpans]) -> None:
        """Add the offset bounds that the collectives of one step give."""
        exchanges = {rank: dict(_collective_times(spans)) for rank, spans in of_step.items()}
        for first_rank, mine in exchanges.items():
            for other_rank, theirs in exchanges.items():
                first, second = (
                    self.clock_of(first_rank, of_step[first_rank]),
                    self.clock_of(other_rank, of_step[other_rank]),
                )
                if first == second:
                    continue
                at, bounds_s = of_step[first_rank].begun_s, []
                for name in mine.keys() & theirs.keys():
                    (begin, end), (their_begin, their_end) = mine[name], theirs[name]
                    drift = MAX_DRIFT * abs(begin - at)
                    bounds_s.append((begin - their_end - drift, end - their_begin + drift))
                if bounds_s:
                    bound = OffsetBound(at, max(least for least, _ in bounds_s), min(most for _, most in bounds_s))
                    self._bounds.setdefault((first, second), []).append(bound)


def _collective_times(spans: StepSpans) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    """Yield ((bucket or -1 for control messages, occurrence), (begin, end) by the rank's clock) of each collective."""
    for exchange, turn in spans.numbered_exchanges():
        yield (exchange.bucket, turn), (spans.begun_s + exchange.begin_s, spans.begun_s + exchange.end_s)
    for turn, (begin_s, end_s) in enumerate(spans.news):
        yield (-1, turn), (spans.begun_s + begin_s, spans.begun_s + end_s)
