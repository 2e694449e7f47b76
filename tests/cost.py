"""How dear is a computation, whatever the machine and what else it does? Beside a known one, by processor time."""

from __future__ import annotations

import time
from collections.abc import Callable


def in_loops(work: Callable[[], object]) -> float:
    """Return the processor time of `work` in that of an empty loop of 100,000 turns (2 ms): the least of three each."""
    return _least_s(work) / _least_s(_loop)


def _least_s(work: Callable[[], object]) -> float:
    took_s = []
    for _ in range(3):
        began = time.process_time()
        work()
        took_s.append(time.process_time() - began)
    return min(took_s)


def _loop() -> None:
    for _ in range(100_000):
        pass
