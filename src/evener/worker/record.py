"""Record the cost of every step on this rank, and exchange step reports between ranks.

Once a step each rank all-gathers a StepReport, a handful of numbers. Reports are sent when a step ends and received
when the next one begins; where replicas drift, when the one after it begins, so that no step waits for the slowest
rank. They yield the loss of the global batch, the division of blocked time into transfer and waiting, and the decisions
that ranks must take together: to stop, to report a non-finite loss, to change the Roster.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.core.errors import NonFiniteError
from evener.core.failure import is_consequence
from evener.core.files import LineFile
from evener.core.roster import Roster
from evener.core.runwriter import RunWriter
from evener.core.spans import EVERY
from evener.core.step import BLOCKED, PARTS, Fidelity, Noise, StepCost, StepRecord, noise_of, split_blocked
from evener.worker.clock import Clock, Laps
from evener.worker.spans import Group, Kept, Passes, Spans, layer_groups
from evener.worker.sync import Exchanged

# Requests, the highest wins: checkpoint now; regroup after the next checkpoint; regroup without a leaving host; stop.
SAVE, REGROUP, LEAVE, STOP = 0.5, 1.0, 2.0, 3.0


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sends to all others once a step; a row of float64."""

    step: float = -1.0  # the step of the eight figures below; -1: none yet
    loss_sum: float = 0.0  # over this rank's tokens
    tokens: float = 0.0  # of this rank's share
    blocked_s: float = 0.0  # in the collective at the end of backward
    took_s: float = 0.0  # input, forward and backward of this rank's share
    update_s: float = 0.0  # the optimizer step, independent of the share
    in_flight_s: float = math.nan  # of its collectives; NaN: not measured
    norm: float = 0.0  # gradient norm; 0 where it was not measured, or where overflowed steps are skipped
    part_sq: float = 0.0  # (T_r/T)·|g_r|²: see core.step.noise_of; 0 in a step that is not sampled
    wish: float = 0.0  # 0, SAVE, REGROUP, LEAVE or STOP
    weight: float = math.nan  # requested share of the batch, relative to the others'; NaN: no request

    def row(self) -> Tensor:
        """Encode as a tensor (1, columns)."""
        return torch.tensor([msgspec.structs.astuple(self)], dtype=torch.float64)

    @classmethod
    def rows(cls, gathered: Tensor) -> list[News]:
        """Decode the reports of all ranks, by rank, from (ranks, columns)."""
        return [cls(**dict(zip(cls.__struct_fields__, row, strict=True))) for row in gathered.tolist()]

    @classmethod
    def after(cls, before: list[News], now: list[News]) -> list[News]:
        """Merge two reports received at once: the later one, with requests of the earlier that are still pending."""
        return [msgspec.structs.replace(new, wish=max(new.wish, old.wish),
                                        weight=old.weight if math.isnan(new.weight) else new.weight)
                for new, old in zip(now, before, strict=True)] if before else now  # fmt: skip


def lag_of(roster: Roster) -> int:
    """Return how many steps records lag: 1 on all ranks where any rank's device runs ahead of its host, else 0.

    A step is then read while the next one runs. It must be the same step everywhere, as reports of one step are summed.
    """
    return int(any(member.is_gpu for member in roster.members))


def slack_of(roster: Roster) -> int:
    """Return how many steps a rank may lead the slowest: 1 for DiLoCo, else 0, so that jitter is paid once a round
    rather than once a step.
    """
    return int(roster.sync.kind == "diloco")


class OnHost:
    """An asynchronous copy to the host of numbers that a device is about to compute.

    `float(tensor)` would wait for all work queued on the device meanwhile, including the next step.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: Any = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._copy = tensor.clone()

    @classmethod
    def of(cls, tensor: Tensor | None) -> OnHost | None:
        """Copy a tensor; return None for None."""
        return None if tensor is None else cls(tensor)

    def __float__(self) -> float:
        return float(self.tensor())

    def tensor(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


class Draft(msgspec.Struct, kw_only=True):
    """The record of a step with what this rank alone knows, waiting for the reports of the others."""

    step: int
    epoch: int
    tokens: float
    global_tokens: float
    laps: Laps
    wall_s: float
    cpu_s: float
    ended: float
    sync_s: Callable[[], float | None]  # called when the step is reported: it may wait for the device
    in_flight_s: float | None = None  # what `sync_s` returned
    bytes: int
    lr: float
    loss_sum: OnHost  # over this rank's tokens
    of_all: float | None = None  # over all ranks' tokens, if `commit_gradients` returned it
    grad_norm: OnHost | None
    mine_sq: OnHost | None = None  # squared norm of this rank's gradient, in sampled steps
    whole_sq: OnHost | None = None  # squared norm of the global gradient
    fidelity: OnHost | None = None


class Recorder:
    """Writes `steps/rank-R.jsonl` and exchanges step reports."""

    def __init__(self, rundir: RunWriter, rank: int, roster: Roster, clock: Clock, group: Any, spans: Spans) -> None:
        self.clock, self.spans = clock, spans
        self._groups: list[Group] | None = None  # layer groups, found at first use
        self._watched: Passes | None = None  # in a step that is traced
        self._passes: list[tuple[str, bool, Any, Any]] = []
        self._enter(roster, rank, group)
        self._skips = roster.members[rank].dtype == "fp16"  # the scaler skips steps whose gradients overflow
        self._is_open = False  # whether a step is in progress
        self._file = LineFile(rundir.steps_path(self._numbers[rank]))
        self._drafts: deque[Draft] = deque()
        self._lag, self._slack = lag_of(roster), slack_of(roster)
        # (row sent, time, gathered rows, work)
        self._on_way: deque[tuple[Tensor, float, Tensor, Any]] = deque()
        self.news: list[News] = []  # of all ranks, as received after the last step
        self.completed: list[StepRecord] = []  # the steps that those reports completed
        self.heard = -1  # the newest step that all ranks have reported
        self.last: StepRecord | None = None

    def _enter(self, roster: Roster, rank: int, group: Any) -> None:
        self._rank, self._world_size, self._group = rank, roster.world_size, group
        self._numbers = [member.rank for member in roster.members]

    def enter(self, roster: Roster, rank: int, group: Any, heard: int) -> None:
        """Continue in another group of ranks: reports in flight are lost, and are sent again.

        Those of steps up to `last_reported_step`, which some rank has received from all, are not: that rank has
        recorded the loss of these steps.
        """
        self._enter(roster, rank, group)
        self._on_way.clear()
        self.news, self.heard = [], heard
        while self._drafts and self._drafts[0].step <= heard:
            draft = self._drafts.popleft()
            loss = None if draft.of_all is None else draft.of_all / draft.global_tokens
            self._write_line(draft, loss, exposed_and_wait=(None, None))
        self._tell_rest()

    def waited(self) -> None:
        """Charge the time since the last lap to waiting, if a step is in progress."""
        if self._is_open:
            self.lap("wait_s")

    def begin(self) -> None:
        """Begin a step."""
        self.spans.begin()
        self._passes = []
        self._begin()

    def _begin(self) -> None:
        self._is_open = True
        self._wall, self._cpu = time.perf_counter(), time.process_time()  # first, so that they cover the whole step
        self._laps = Laps(self.clock)

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to a phase of the step."""
        self._laps.lap(part)
        if self._watched is not None:
            self._watched.end_lap(self._laps.marks[-1][1])

    def watching(self, step: int, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context for a pass of a step; in every hundredth step it traces each group of layers."""
        return contextlib.nullcontext() if step % EVERY else self._watching(module)

    @contextlib.contextmanager
    def _watching(self, module: nn.Module) -> Iterator[None]:
        self.clock.anchor()
        if self._groups is None:
            self._groups = layer_groups(module)
        with Passes(self._groups, self.clock) as self._watched:
            try:
                yield
            finally:
                self._passes += self._watched.found
                self._watched = None

    def pause(self) -> None:
        """Stop the step timers: time after this belongs to no step, unless another lap follows."""
        self._wall_s, self._cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def end(self, *, wish: float, weight: float = math.nan, exchanges: Sequence[Exchanged] = (), **facts: Any) -> None:
        """End the step at the time of the last `stop_timers`, and send its report."""
        self.news, self.completed, self._is_open = [], [], False
        self.spans.add(Kept(facts["step"], facts["epoch"], self._laps, exchanges, self._passes))
        self._drafts.append(Draft(laps=self._laps, wall_s=self._wall_s, cpu_s=self._cpu_s, ended=time.time(), **facts))
        try:
            self._tell(self._drafts[-1 - self._lag] if len(self._drafts) > self._lag else None, wish, weight)
        except RuntimeError as error:
            if not is_consequence(error):
                raise  # else it is sent again when it is due, or fails there

    def hear(self) -> bool:
        """Receive the reports that are due, write the step that they complete; return whether all ranks stop now."""
        return self._hear(self._slack)

    def catch_up(self) -> bool:
        """Receive all reports of ended steps, due or not, and return whether all ranks stop now."""
        return self._hear(0)

    def flush(self) -> bool:
        """Write all pending steps, on all ranks together, and return whether all stop now.

        Call it before a checkpoint too: otherwise a rank that dies right after would lack the record of a step that is
        never repeated.
        """
        self._begin()
        stops = self._hear(0)
        while self._drafts:
            self._tell(self._drafts[0])
            stops = self._hear(0)
        return stops

    @property
    def regroups(self) -> bool:
        """Whether any rank requests a regroup, by reports that all have received."""
        return any(report.wish in (REGROUP, LEAVE) for report in self.news)

    @property
    def saves(self) -> bool:
        """Whether any rank was asked for a checkpoint."""
        return any(report.wish == SAVE for report in self.news)

    @property
    def leaves(self) -> bool:
        """Whether a host leaves, so that the others restart without it."""
        return any(report.wish == LEAVE for report in self.news)

    def close(self) -> None:
        """Write what this rank knows of steps that the other ranks will not complete."""
        while self._drafts:
            self._write_line(self._drafts.popleft(), loss=None, exposed_and_wait=(None, None))
        self._file.close()
        self.spans.close()

    def _hear(self, left: int) -> bool:
        """Receive reports until at most `max_in_flight` are in flight."""
        if not self._lag:
            self._tell_rest()
        while len(self._on_way) > left:
            _, sent_at_s, gathered, work = self._on_way.popleft()
            if work is not None:
                work.wait()
                self.lap("wait_s")  # a rank whose update took longer sends its report later
            self.news = News.after(self.news, News.rows(gathered))
            if self.news[self._rank].step >= 0:
                if work is not None:
                    self.spans.heard(self._drafts[0].step, sent_at_s, time.perf_counter())
                self._write(self._drafts.popleft())
        return any(report.wish == STOP for report in self.news)

    def _tell_rest(self) -> None:
        """Send the reports of ended steps that could not be sent then."""
        for draft in list(self._drafts)[len(self._on_way) :]:
            self._tell(draft)

    def _tell(self, draft: Draft | None, wish: float = 0.0, weight: float = math.nan) -> None:
        """Send the report of a step, or an empty report if none is due yet."""
        report = News(wish=wish, weight=weight)
        if draft is not None:
            phases = draft.laps.parts_s()
            work_s = phases.get("data_s", 0.0) + phases.get("compute_s", 0.0)
            draft.in_flight_s = draft.sync_s()
            in_flight_s = math.nan if draft.in_flight_s is None else draft.in_flight_s
            report = msgspec.structs.replace(report, step=float(draft.step), loss_sum=float(draft.loss_sum),
                                             tokens=draft.tokens, blocked_s=phases.get(BLOCKED, 0.0), took_s=work_s,
                                             update_s=phases.get("optimizer_s", 0.0),
                                             in_flight_s=in_flight_s, norm=self._norm(draft),
                                             part_sq=_part_sq(draft))  # fmt: skip
        sent = report.row()
        if self._world_size == 1:
            self._on_way.append((sent, 0.0, sent, None))
        else:
            gathered, sent_at = torch.empty(self._world_size, sent.shape[1], dtype=torch.float64), time.perf_counter()
            work = dist.all_gather_single(gathered, sent, group=self._group, async_op=True)
            self._on_way.append((sent, sent_at, gathered, work))

    def _write(self, draft: Draft) -> None:
        steps = {int(report.step) for report in self.news}
        assert steps == {draft.step}, f"reports of steps {steps}, but rank {self._rank} expects step {draft.step}"
        global_loss = sum(report.loss_sum for report in self.news) if draft.of_all is None else draft.of_all
        # Drifting replicas lose the updates of a departed rank in this step, and it may have had the whole share.
        tokens = sum(report.tokens for report in self.news) if self._slack else draft.global_tokens
        loss = global_loss / tokens if tokens else None
        self.heard = draft.step
        noise = None
        if draft.whole_sq is not None:
            noise = noise_of([report.part_sq for report in self.news], float(draft.whole_sq), draft.global_tokens)
        self._write_line(draft, loss, split_blocked([report.blocked_s for report in self.news])[self._rank], noise)
        for quantity, figures in (("loss", [report.loss_sum for report in self.news]),
                                  ("gradient norm", [report.norm for report in self.news])):  # fmt: skip
            bad_ranks = [rank for rank, figure in zip(self._numbers, figures, strict=True) if not math.isfinite(figure)]
            if bad_ranks:
                names = ", ".join(f"rank {rank}" for rank in bad_ranks)
                raise NonFiniteError(
                    f"step {draft.step}: the {quantity} of {names} is not finite", step=draft.step, ranks=bad_ranks
                )

    def _norm(self, draft: Draft) -> float:
        return 0.0 if draft.grad_norm is None or self._skips else float(draft.grad_norm)

    def _write_line(
        self,
        draft: Draft,
        loss: float | None,
        exposed_and_wait: tuple[float | None, float | None],
        noise: Noise | None = None,
    ) -> None:
        phases: dict[str, float | None] = {**dict.fromkeys(PARTS, 0.0), **draft.laps.parts_s()}
        exposed, wait = exposed_and_wait
        if phases.pop(BLOCKED, None) is None:
            exposed, wait = 0.0, 0.0
        phases["exposed_sync_s"] = exposed
        phases["wait_s"] = None if wait is None else wait + (phases["wait_s"] or 0.0)
        self.last = StepRecord(
            step=draft.step,
            epoch=draft.epoch,
            tokens=draft.tokens,
            loss=loss if loss is None or math.isfinite(loss) else None,
            wall_s=draft.wall_s if self._lag == 0 else sum(part or 0.0 for part in phases.values()),
            cost=StepCost(**phases),
            sync_s=draft.in_flight_s,
            cpu_s=draft.cpu_s,
            bytes=draft.bytes,
            members=self._world_size,
            lr=draft.lr,
            grad_norm=None if draft.grad_norm is None else float(draft.grad_norm),
            noise=noise,
            fidelity=_fidelity(draft),
            ended=draft.ended,
        )
        self.completed.append(self.last)
        self._file.write(msgspec.json.encode(self.last) + b"\n")


def _fidelity(draft: Draft) -> Fidelity | None:
    if draft.fidelity is None:
        return None
    error, cosine = draft.fidelity.tensor().tolist()
    return Fidelity(error=error, cosine=cosine) if math.isfinite(error) and math.isfinite(cosine) else None


def _part_sq(draft: Draft) -> float:
    """Return |g_r|²·T/T_r: the rank's gradient is T_r/T of the mean over its own tokens."""
    if draft.mine_sq is None or not draft.tokens:
        return 0.0
    return float(draft.mine_sq) * draft.global_tokens / draft.tokens
