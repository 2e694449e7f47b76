"""What does torch itself see of a few steps? Its profiler's events, on the ranks of which they are wanted.

They are written as torch writes them, with what joins their clock to that of the spans: a mark in them, and when it was
made.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from evener.core.rundir import RunDir
from evener.core.spans import MARK, Joint
from evener.core.spec import RunSpec

SETTLES = 3  # steps of a start that come before the profiled ones, where there are so many
MARKS = 3  # of which the quickest counts: the first one is slow


def profiler(spec: RunSpec, rundir: RunDir, rank: int, first: int) -> Profiler | None:
    """For a rank that begins with step `first`; None where nobody wants to know."""
    wanted = spec.machine.profile
    if not spec.machine.is_profiled(rank):
        return None
    return Profiler(rundir.profile_path(rank), wanted, max(0, min(SETTLES, spec.train.steps - first - wanted)))


class Profiler:
    """Of so many steps of one rank; the others' steps go on as ever."""

    def __init__(self, path: Path, num_steps: int, settles: int) -> None:
        """`settles`: steps that come before."""
        self._path, self._left, self._settles = path, num_steps, settles
        self._running: Any = None
        self._marks: list[tuple[float, float]] = []  # between which moments each was made
        self._steps: list[int] = []

    def begin(self) -> None:
        """A step begins."""
        if self._settles or self._running is not None or not self._left:
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._running = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._running.start()
        for turn in range(MARKS):
            before = time.perf_counter()
            with record_function(f"{MARK} {turn}"):
                self._marks.append((before, time.perf_counter()))

    def end(self, step: int, origin: float) -> bool:
        """It has ended: was it profiled? `origin`: of the clock of the spans, see StepSpans."""
        self._settles = max(0, self._settles - 1)
        if self._running is None:
            return False
        self._steps.append(step)
        self._left -= 1
        if not self._left:
            self.close(origin)
        return True

    def close(self, origin: float) -> None:
        """Write what there is."""
        running, self._running, self._left = self._running, None, 0
        if running is None:
            return
        turn = min(range(MARKS), key=lambda turn: self._marks[turn][1] - self._marks[turn][0])
        before, after = self._marks[turn]
        joint = Joint(mark=f"{MARK} {turn}", clock=origin, at_s=(before + after) / 2, error_s=(after - before) / 2,
                      steps=self._steps)  # fmt: skip
        running.add_metadata_json("evener", msgspec.json.encode(joint).decode())
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        hidden = self._path.with_name(f".{self._path.name}")
        running.export_chrome_trace(str(hidden))
        hidden.replace(self._path)
