"""How far is a run, in one line?"""

from __future__ import annotations

from collections import deque

from evener.core.step import StepRecord
from evener.core.units import count, median, seconds

WINDOW = 20  # steps over which the rates are taken


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

    def line(self) -> str:
        """`step 40/200  loss 2.345  12.3k tokens/s  communication 4 %  left 1 min 20 s`."""
        if not self._recent:
            return "starting"
        last = self._recent[-1]
        busy_s = sum(record.wall_s for record in self._recent)
        step_s = median([record.wall_s for record in self._recent]) or 0.0
        if self._every > 1:
            step_s = busy_s / len(self._recent)
        communication_s = sum((r.cost.exposed_sync_s or 0) + (r.cost.wait_s or 0) for r in self._recent)
        loss = "not measured" if last.loss is None else f"{last.loss:.4f}"
        parts = [
            f"step {self.done}/{self._num_steps}",
            f"loss {loss}",
            f"{count(self._tokens_per_step / step_s)} tokens/s",
        ]
        if last.members > 1:
            parts.append(f"communication {communication_s / busy_s:.0%}")
        left_s = step_s * (self._num_steps - self.done)
        if self._max_s is not None:
            left_s = min(left_s, max(0.0, self._max_s - self._spent_s))
        if left_s:
            parts.append(f"left {seconds(left_s)}")
        return "  ".join(parts)
