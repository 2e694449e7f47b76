"""Run torch's profiler for a few steps on the selected ranks.

The trace is written in torch's format. A mark in it, and the time at which the mark was made, align the trace's clock
with that of the spans.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from evener.core.base.file_io import create_file
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir
from evener.core.run.step_spans import CLOCK_SYNC_MARK, ProfilerClockSync

NUM_WARMUP_STEPS = 3  # steps before the profiled ones, if there are that many
NUM_CLOCK_MARKS = 3  # the shortest one counts: the first is slow


def make_profiler(spec: RunSpec, rundir: RunDir, rank: int, first_step: int) -> Profiler | None:
    """Return a profiler for a rank whose next step is `first_step`; None if the rank is not profiled."""
    num_steps = spec.machine.profile
    if not spec.machine.is_profiled(rank):
        return None
    return Profiler(
        rundir.profile_path(rank), num_steps, max(0, min(NUM_WARMUP_STEPS, spec.train.steps - first_step - num_steps))
    )


class Profiler:
    """Profiles `num_steps` steps of one rank."""

    def __init__(self, path: Path, num_steps: int, num_warmup_steps: int) -> None:
        """`num_warmup_steps` steps come before the profiled ones."""
        self._path, self._num_steps_left, self._num_warmup_left = path, num_steps, num_warmup_steps
        self._running: Any = None
        self._marks: list[tuple[float, float]] = []  # the host times before and after each mark
        self._profiled_steps: list[int] = []

    def begin_step(self) -> None:
        """Start profiling with this step if the warm-up is over."""
        if self._num_warmup_left or self._running is not None or not self._num_steps_left:
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._running = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._running.start()
        for turn in range(NUM_CLOCK_MARKS):
            before = time.perf_counter()
            with record_function(f"{CLOCK_SYNC_MARK} {turn}"):
                self._marks.append((before, time.perf_counter()))

    def end_step(self, step: int, origin: float) -> bool:
        """End a step; return whether it was profiled. `origin`: the origin of the spans' clock, see StepSpans."""
        self._num_warmup_left = max(0, self._num_warmup_left - 1)
        if self._running is None:
            return False
        self._profiled_steps.append(step)
        self._num_steps_left -= 1
        if not self._num_steps_left:
            self.close(origin)
        return True

    def close(self, origin: float) -> None:
        """Stop profiling and write the trace, if there is one."""
        running, self._running, self._num_steps_left = self._running, None, 0
        if running is None:
            return
        turn = min(range(NUM_CLOCK_MARKS), key=lambda turn: self._marks[turn][1] - self._marks[turn][0])
        before, after = self._marks[turn]
        joint = ProfilerClockSync(
            mark=f"{CLOCK_SYNC_MARK} {turn}",
            clock=origin,
            at_s=(before + after) / 2,
            error_s=(after - before) / 2,
            steps=self._profiled_steps,
        )
        running.add_metadata_json("evener", msgspec.json.encode(joint).decode())
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        hidden = self._path.with_name(f".{self._path.name}")
        create_file(hidden).close()  # a link in its place would be followed
        running.export_chrome_trace(str(hidden))
        hidden.replace(self._path)
