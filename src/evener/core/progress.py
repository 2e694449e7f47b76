"""How far is a run, in one line? And is one of its hosts unlike the others?"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from evener.core.step import StepRecord
from evener.core.units import count, median, seconds

WINDOW = 20  # steps over which the rates are taken
FEWEST = 5  # of which a host's pace can be told
UNLIKE = 0.05  # of the step: by how much the wait of two hosts must differ


class Progress:
    """Feed it rank 0's records; it says loss, rate, share of communication and the time left."""

    def __init__(self, num_steps: int, tokens_per_step: int, max_s: float | None = None, every: int = 1) -> None:
        """`every`: steps from one exchange to the next; one of them costs what the others do not."""
        self._num_steps, self._tokens_per_step, self._max_s, self._every = num_steps, tokens_per_step, max_s, every
        self._recent: deque[StepRecord] = deque(maxlen=max(WINDOW, every))
        self._began: float | None = None  # seen from here: the first step of this start

    def add(self, record: StepRecord) -> None:
        """One more step is done."""
        self._recent.append(record)
        if self._began is None:
            self._began = record.ended - record.wall_s

    @property
    def done(self) -> int:
        """Steps taken."""
        return self._recent[-1].step + 1 if self._recent else 0

    @property
    def share(self) -> float:
        """Of its steps or of its seconds, whichever end first, that is over."""
        by_steps = self.done / self._num_steps
        return by_steps if self._max_s is None else min(1.0, max(by_steps, self._spent_s / self._max_s))

    @property
    def _spent_s(self) -> float:
        return self._recent[-1].ended - self._began if self._recent and self._began is not None else 0.0

    @property
    def is_begun(self) -> bool:
        """Is a step done?"""
        return bool(self._recent)

    @property
    def step(self) -> str:
        """`step 40/200`."""
        return f"step {self.done}/{self._num_steps}"

    @property
    def loss(self) -> str:
        """Of the last step."""
        loss = self._recent[-1].loss
        return "not measured" if loss is None else f"{loss:.4f}"

    @property
    def rate(self) -> str:
        """`12.3k tokens/s`."""
        return f"{count(self._tokens_per_step / self._step_s)} tokens/s"

    @property
    def communication(self) -> float | None:
        """Share of the recent steps in which ranks sent or waited; None of one rank."""
        if self._recent[-1].members < 2:
            return None
        return sum((r.cost.exposed_sync_s or 0) + (r.cost.wait_s or 0) for r in self._recent) / self._busy_s

    @property
    def left_s(self) -> float:
        """Until its last step, or the end of its seconds."""
        return seconds_left(self._step_s, self._num_steps - self.done, self._max_s, self._spent_s)

    @property
    def _busy_s(self) -> float:
        return sum(record.wall_s for record in self._recent)

    @property
    def _step_s(self) -> float:
        if self._every > 1:
            return self._busy_s / len(self._recent)
        return median([record.wall_s for record in self._recent]) or 0.0

    def line(self) -> str:
        """`step 40/200  loss 2.345  12.3k tokens/s  communication 4 %  left 1 min 20 s`."""
        if not self.is_begun:
            return "starting"
        parts = [self.step, f"loss {self.loss}", self.rate]
        if (share := self.communication) is not None:
            parts.append(f"communication {share:.0%}")
        if left_s := self.left_s:
            parts.append(f"left {seconds(left_s)}")
        return "  ".join(parts)


@dataclass(frozen=True)
class Pace:
    """The usual step of a host lately, of its slowest rank: what it does itself, and what it stands still for."""

    host: str
    works_s: float  # input, forward, backward, update
    sends_s: float
    waits_s: float


class Hosts:
    """Feed it every rank's records; it says whether one host is unlike the others."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], deque[StepRecord]] = {}

    def add(self, host: str, rank: int, record: StepRecord) -> None:
        """One more step of a rank."""
        self._recent.setdefault((host, rank), deque(maxlen=WINDOW)).append(record)

    def keep(self, hosts: Collection[str]) -> None:
        """Forget all others: they take no part any more."""
        self._recent = {place: records for place, records in self._recent.items() if place[0] in hosts}

    def unlike(self) -> list[Pace]:
        """The hosts' paces, the slowest first, where the others wait for one or some wait clearly less; else none.

        As the report judges it: the least wait of a host is less than half the most, and by a clear part of the step.
        """
        paces, step_s = [], 0.0
        for host in dict.fromkeys(host for host, _ in self._recent):
            of_ranks = [records for (name, _), records in self._recent.items() if name == host]
            if any(len(records) < FEWEST for records in of_ranks):
                return []
            last = min((_pace(host, records) for records in of_ranks), key=lambda pace: pace.waits_s)
            step_s = max(step_s, last.works_s + last.sends_s + last.waits_s)
            paces.append(last)
        if len(paces) < 2:
            return []
        least_s, most_s = (of(pace.waits_s for pace in paces) for of in (min, max))
        if least_s >= most_s / 2 or most_s - least_s <= UNLIKE * step_s:
            return []
        return sorted(paces, key=lambda pace: pace.waits_s)


def _pace(host: str, records: Collection[StepRecord]) -> Pace:
    def middle(*parts: str) -> float:
        return median([sum(getattr(record.cost, part) or 0.0 for part in parts) for record in records]) or 0.0

    return Pace(host, middle("data_s", "compute_s", "optimizer_s"), middle("exposed_sync_s"), middle("wait_s"))


def seconds_left(step_s: float, num_steps: int, max_s: float | None, spent_s: float) -> float:
    """Until so many steps are taken, or the time of a run is over that has spent so much of it.

    >>> seconds_left(2.0, 10, None, 5.0), seconds_left(2.0, 10, 12.0, 5.0)
    (20.0, 7.0)
    """
    left_s = step_s * num_steps
    return left_s if max_s is None else min(left_s, max(0.0, max_s - spent_s))
