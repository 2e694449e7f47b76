"""What did every step cost on this rank, and what must the ranks know of each other?

Once a step all ranks gather one small vector of news. It starts when a step ends and is read when the next one begins,
so its journey is hidden behind the loading of data. From it come the loss of the global batch, the division of blocked
time into transfer and waiting, and what only all ranks together may decide: to stop, or that a loss is not finite.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.errors import RunError
from evener.core.rundir import RunDir
from evener.core.step import PARTS, StepCost, StepRecord, split_blocked
from evener.worker.clock import Clock, CudaClock, Laps

BLOCKED = "blocked"  # the lap between the last gradient and the end of backward: transfer and waiting together


class Draft(msgspec.Struct, kw_only=True):
    """A step of this rank as far as this rank alone can know it."""

    step: int
    tokens: int
    global_tokens: int
    laps: Laps
    wall_s: float
    cpu_s: float
    sync_s: float | None
    bytes: int
    lr: float
    loss_sum: Tensor  # over this rank's tokens, on the device
    grad_norm: Tensor | None


class Recorder:
    """Writes `steps/rank-R.jsonl`."""

    def __init__(self, rundir: RunDir, rank: int, world_size: int, clock: Clock, group: Any) -> None:
        self._rank, self._world_size, self._clock, self._group = rank, world_size, clock, group
        self._rundir = rundir
        path = rundir.steps_path(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._drafts: deque[Draft] = deque()
        self._lag = 1 if isinstance(clock, CudaClock) else 0  # on a GPU a step is read while the next one runs
        self._news: Tensor | None = None
        self._gathered: Tensor | None = None
        self._work: Any = None
        self._stop_heard = False
        self.last: StepRecord | None = None

    def begin(self) -> None:
        """A step begins now."""
        self._laps = Laps(self._clock)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to a part of the step."""
        self._laps.lap(part)

    def end(self, *, want_stop: bool, sync_s: float | None, **facts: Any) -> None:
        """The step ends now; the news of it go out."""
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._drafts.append(Draft(laps=self._laps, wall_s=wall_s, cpu_s=cpu_s, sync_s=sync_s, **facts))
        self._tell(want_stop, lag=self._lag)

    def hear(self) -> bool:
        """Read the news that went out last, write the step they complete, and say whether all stop now."""
        if self._gathered is None:
            return self._stop_heard
        if self._work is not None:
            self._work.wait()
        if self._world_size > 1:
            self.lap("wait_s")  # a rank whose update took longer sends its news later
        rows, self._gathered = self._gathered.tolist(), None
        if rows[self._rank][0] >= 0:
            self._write(self._drafts.popleft(), rows)
        self._stop_heard = any(row[3] > 0 for row in rows)
        return self._stop_heard

    def flush(self) -> None:
        """Write the steps that are still on their way; all ranks call it together.

        Before a checkpoint too: a rank that dies right after it would have no record of a step that is never repeated.
        """
        self.begin()
        self.hear()
        while self._drafts:
            self._tell(want_stop=self._stop_heard, lag=0)
            self.hear()

    def close(self) -> None:
        """Write what this rank knows of steps that the others will not complete any more."""
        while self._drafts:
            draft = self._drafts.popleft()
            self._write_line(draft, loss=None, exposed_and_wait=(None, None))
        self._file.close()

    def _tell(self, want_stop: bool, lag: int) -> None:
        news = torch.zeros(1, 4, dtype=torch.float64)
        news[0, 0], news[0, 3] = -1, float(want_stop)
        if len(self._drafts) > lag:
            draft = self._drafts[0]
            news[0, 0] = draft.step
            news[0, 1] = float(draft.loss_sum)
            news[0, 2] = draft.laps.parts_s().get(BLOCKED, 0.0)
        self._news = news  # lives until the work is done
        if self._world_size == 1:
            self._gathered = news
        else:
            self._gathered = torch.empty(self._world_size, 4, dtype=torch.float64)
            self._work = dist.all_gather_single(self._gathered, news, group=self._group, async_op=True)

    def _write(self, draft: Draft, rows: list[list[float]]) -> None:
        loss = sum(row[1] for row in rows) / draft.global_tokens
        self._write_line(draft, loss, split_blocked([row[2] for row in rows])[self._rank])
        if not math.isfinite(loss):
            guilty = [rank for rank, row in enumerate(rows) if not math.isfinite(row[1])]
            who = ", ".join(f"rank {rank}" for rank in guilty)
            if self._rank == 0:
                self._rundir.add_event("run.nonfinite", step=draft.step, ranks=guilty)
            raise RunError(
                f"step {draft.step}: the loss of {who} is not finite",
                hint="a smaller --lr, a longer --warmup, or --dtype fp32",
            )

    def _write_line(
        self, draft: Draft, loss: float | None, exposed_and_wait: tuple[float | None, float | None]
    ) -> None:
        parts: dict[str, float | None] = dict.fromkeys(PARTS, 0.0) | draft.laps.parts_s()
        exposed, wait = exposed_and_wait
        if parts.pop(BLOCKED, None) is None:
            exposed, wait = 0.0, 0.0
        parts["exposed_sync_s"] = exposed
        parts["wait_s"] = None if wait is None else wait + (parts["wait_s"] or 0.0)
        self.last = StepRecord(
            step=draft.step,
            tokens=draft.tokens,
            loss=loss if loss is None or math.isfinite(loss) else None,
            wall_s=draft.wall_s if self._lag == 0 else sum(part or 0.0 for part in parts.values()),
            cost=StepCost(**parts),
            sync_s=draft.sync_s,
            cpu_s=draft.cpu_s,
            bytes=draft.bytes,
            members=self._world_size,
            lr=draft.lr,
            grad_norm=None if draft.grad_norm is None else float(draft.grad_norm),
            ended=time.time(),
        )
        self._file.write(msgspec.json.encode(self.last) + b"\n")
