"""What does measuring cost? Empty steps of the recorder, news between two ranks and all, beside real steps.

python bench/recorder_overhead.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from common import evener_steps, resolve_benchmark_run, torchrun_command

EMPTY_STEPS = 500
REAL_STEPS = 12


def main() -> None:
    if "RANK" in os.environ:
        return measure_overhead()
    sys.exit(subprocess.run(torchrun_command(__file__, [])).returncode)


def measure_overhead() -> None:
    import torch

    from evener.core.run.runwriter import RunWriter
    from evener.core.run.step_cost import BLOCKED
    from evener.worker.rank.clock import HostClock
    from evener.worker.rank.stop_signals import StopRequest
    from evener.worker.record.span_recorder import SpanRecorder
    from evener.worker.record.step_recorder import HostCopy, StepRecorder
    from evener.worker.train.run import join

    what = resolve_benchmark_run("char", 8, REAL_STEPS)
    with join(what.spec, what) as run:
        rundir, clock = RunWriter(tempfile.mkdtemp()), HostClock()
        spans = SpanRecorder(rundir, run.rank, clock)
        recorder = StepRecorder(rundir, run.rank, run.roster, clock, run.group.control_group, spans)
        empty = []
        for step in range(EMPTY_STEPS):
            run.group.barrier()  # as after a real all-reduce the ranks are together
            began = time.perf_counter()
            recorder.begin_step()
            recorder.receive_due_reports()
            for part in ("data_s", "compute_s", BLOCKED, "optimizer_s"):
                recorder.lap(part)
            recorder.stop_timers()
            recorder.end_step(
                stop_request=StopRequest.NONE,
                sync_s=lambda: 0.0,
                step=step,
                epoch=0,
                tokens=1,
                global_tokens=2,
                bytes=0,
                lr=0.0,
                loss_sum=HostCopy(torch.ones((), dtype=torch.float64)),
                grad_norm=HostCopy(torch.ones(())),
            )
            empty.append(time.perf_counter() - began)
        recorder.flush()
        recorder.close()
        real = list(evener_steps(run, what))
        rank = run.rank
    if rank == 0:
        measuring, step_s = statistics.median(empty), statistics.median(real)
        print(f"measuring: {measuring * 1e6:.0f} µs a step; a char step of two ranks: {step_s * 1e3:.0f} ms; "
              f"overhead {measuring / step_s:.3%}")  # fmt: skip


main()
