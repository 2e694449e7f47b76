"""Progress of a run as one status line, and straggler detection among its hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from evener.core.base.units import format_count, format_seconds, median
from evener.core.run.step_cost import StepRecord
from evener.core.run.step_statistics import median_step_s

WINDOW_STEPS = 20  # newest steps over which rates are computed while a run trains, at least
MIN_STEPS = 5  # steps needed to judge a host
MIN_WAIT_DIFFERENCE = 0.05  # share of the step by which the waits of two hosts must differ


class RunProgress:
    """Computes loss, throughput, share of communication and remaining time from the records of rank 0."""

    def __init__(self, num_steps: int, step_size: tuple[int, str], max_s: float | None = None) -> None:
        """`step_size` is what a step counts, and its unit: (4096, "tokens")."""
        self._num_steps, self._step_size, self._max_s = num_steps, step_size, max_s
        self._every = 1  # steps from one synchronization to the next; only one of them includes its communication
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        self._num_added = 0
        self._began: float | None = None  # start of the first step that was added: Unix time

    def set_interval(self, every: int) -> None:
        """Set the number of steps from one synchronization of the sync strategy to the next."""
        self._every, self._recent = every, deque(self._recent, maxlen=window_steps(every))

    def add(self, record: StepRecord) -> None:
        """Add the record of a step."""
        self._recent.append(record)
        self._num_added += 1
        if self._began is None:
            self._began = record.ended - record.wall_s

    @property
    def steps_done(self) -> int:
        """Steps taken."""
        return self._recent[-1].step + 1 if self._recent else 0

    @property
    def fraction_done(self) -> float:
        """The fraction done of the run's steps or of its seconds, whichever end first."""
        by_steps = self.steps_done / self._num_steps
        return by_steps if self._max_s is None else min(1.0, max(by_steps, self._spent_s / self._max_s))

    @property
    def _spent_s(self) -> float:
        return self._recent[-1].ended - self._began if self._recent and self._began is not None else 0.0

    @property
    def has_started(self) -> bool:
        """Return whether a step is done."""
        return bool(self._recent)

    @property
    def step_text(self) -> str:
        """`step 40/200`."""
        return f"step {self.steps_done}/{self._num_steps}"

    @property
    def loss_text(self) -> str:
        """The loss of the last step, as text."""
        loss = self._recent[-1].loss
        return "not measured" if loss is None else f"{loss:.4f}"

    @property
    def throughput_text(self) -> str:
        """`12.3k tokens/s`."""
        size, unit = self._step_size
        return f"{format_count(size / self._step_s)} {unit}/s"

    @property
    def communication_share(self) -> float | None:
        """Share of the recent steps in exposed communication and waiting; None with one rank."""
        if self._recent[-1].members < 2:
            return None
        return sum((r.cost.exposed_sync_s or 0) + (r.cost.wait_s or 0) for r in self._recent) / self._busy_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the last step or the time limit, whichever comes first."""
        return seconds_left(self._step_s, self._num_steps - self.steps_done, self._max_s, self._spent_s)

    @property
    def _busy_s(self) -> float:
        return sum(record.wall_s for record in self._recent)

    @property
    def _step_s(self) -> float:
        return median_step_s(self._recent, self._every, self._num_added - len(self._recent)) or 0.0

    def status_line(self) -> str:
        """`step 40/200  loss 2.345  12.3k tokens/s  communication 4 %  left 1 min 20 s`."""
        if not self.has_started:
            return "starting"
        parts = [self.step_text, f"loss {self.loss_text}", self.throughput_text]
        if (share := self.communication_share) is not None:
            parts.append(f"communication {share:.0%}")
        if left_s := self.remaining_s:
            parts.append(f"left {format_seconds(left_s)}")
        return "  ".join(parts)


def window_steps(every: int) -> int:
    """Return the number of newest steps that rates are taken of: one whole round of `every` steps is among them."""
    return max(WINDOW_STEPS, 2 * every - 1)


@dataclass(frozen=True)
class HostStepTime:
    """Median times over the recent steps of a host's slowest rank: work, exposed communication and waiting."""

    host: str
    work_s: float  # input, forward, backward, update
    exposed_sync_s: float
    wait_s: float


class StragglerDetector:
    """Detects from the records of all ranks whether the others wait for one host."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], deque[StepRecord]] = {}

    def add(self, host: str, rank: int, record: StepRecord) -> None:
        """Add the record of a rank's step."""
        self._recent.setdefault((host, rank), deque(maxlen=WINDOW_STEPS)).append(record)

    def retain_hosts(self, hosts: Collection[str]) -> None:
        """Drop the records of all other hosts, which no longer take part."""
        self._recent = {place: records for place, records in self._recent.items() if place[0] in hosts}

    def detect_imbalance(self) -> list[HostStepTime]:
        """Return the hosts' step times, the slowest host first, if the hosts are imbalanced, else [].

        The report has the same rule: the shortest wait of a host is less than half the longest, and the difference is
        more than 5 % of the step.
        """
        step_times, step_s = [], 0.0
        for host in dict.fromkeys(host for host, _ in self._recent):
            records_of_ranks = [records for (name, _), records in self._recent.items() if name == host]
            if any(len(records) < MIN_STEPS for records in records_of_ranks):
                return []
            slowest = min(
                (_host_step_time(host, records) for records in records_of_ranks), key=lambda time: time.wait_s
            )
            step_s = max(step_s, slowest.work_s + slowest.exposed_sync_s + slowest.wait_s)
            step_times.append(slowest)
        if len(step_times) < 2:
            return []
        min_wait_s, max_wait_s = (function(time.wait_s for time in step_times) for function in (min, max))
        if min_wait_s >= max_wait_s / 2 or max_wait_s - min_wait_s <= MIN_WAIT_DIFFERENCE * step_s:
            return []
        return sorted(step_times, key=lambda time: time.wait_s)


def _host_step_time(host: str, records: Collection[StepRecord]) -> HostStepTime:
    def median_s(*phases: str) -> float:
        return median([sum(getattr(record.cost, phase) or 0.0 for phase in phases) for record in records]) or 0.0

    return HostStepTime(
        host, median_s("data_s", "compute_s", "optimizer_s"), median_s("exposed_sync_s"), median_s("wait_s")
    )


def seconds_left(step_s: float, num_steps: int, max_s: float | None, spent_s: float) -> float:
    """Return the seconds until `num_steps` are taken or, if sooner, until `max_s`, of which `spent_s` have passed.

    >>> seconds_left(2.0, 10, None, 5.0), seconds_left(2.0, 10, 12.0, 5.0)
    (20.0, 7.0)
    """
    left_s = step_s * num_steps
    return left_s if max_s is None else min(left_s, max(0.0, max_s - spent_s))
