"""Record the cost of every step on this rank, and exchange step reports between ranks.

Once a step each rank all-gathers a StepReport, a handful of numbers. Reports are sent when a step ends and received
when the next one begins. Drifting replicas receive them one step later, so that no step waits for the slowest rank.
Reports yield the loss of the global batch, the division of blocked time into transfer and waiting, and the decisions
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

from evener.core.base.errors import NonFiniteError
from evener.core.base.file_io import LineFile
from evener.core.run.peer_failure import is_peer_failure
from evener.core.run.roster import Roster
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import (
    BLOCKED,
    PHASES,
    Fidelity,
    GradientNoise,
    StepCost,
    StepRecord,
    gradient_noise,
    split_blocked,
)
from evener.core.run.step_spans import RECORD_EVERY_STEPS, BucketCommEvent
from evener.worker.rank.clock import Clock, LapTimer
from evener.worker.rank.stop_signals import StopRequest
from evener.worker.record.span_recorder import LayerGroup, LayerTracer, SpanRecorder, StepMarks, layer_groups


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report that one rank sends to all others once a step; a row of float64."""

    step: float = -1.0  # the step of the nine figures below; -1: none yet
    loss_sum: float = 0.0  # over this rank's tokens
    tokens: float = 0.0  # of this rank's share
    wall_s: float = 0.0  # all of the step
    blocked_s: float = 0.0  # in the collective at the end of backward
    work_s: float = 0.0  # input, forward and backward of this rank's share
    optimizer_s: float = 0.0  # the optimizer step, independent of the share
    in_flight_s: float = math.nan  # of its collectives; NaN: not measured
    grad_norm: float = 0.0  # gradient norm; 0 where it was not measured, or where overflowed steps are skipped
    share_grad_sq: float = 0.0  # (T_r/T)·|g_r|², as in `gradient_noise`; 0 in a step that is not sampled
    stop_request: StopRequest = StopRequest.NONE
    share_weight: float = math.nan  # requested share of the batch, relative to the others'; NaN: no request

    def to_row(self) -> Tensor:
        """Encode as a tensor (1, columns)."""
        return torch.tensor([msgspec.structs.astuple(self)], dtype=torch.float64)

    @classmethod
    def from_rows(cls, gathered: Tensor) -> list[StepReport]:
        """Decode the reports of all ranks, by rank, from (ranks, columns)."""
        rows = [dict(zip(cls.__struct_fields__, row, strict=True)) for row in gathered.tolist()]
        return [cls(**row | {"stop_request": StopRequest(int(row["stop_request"]))}) for row in rows]

    @classmethod
    def merge(cls, earlier: list[StepReport], later: list[StepReport]) -> list[StepReport]:
        """Return the later reports, with the requests of the earlier ones added; `earlier` may be empty."""
        return (
            [
                msgspec.structs.replace(
                    new,
                    stop_request=max(new.stop_request, old.stop_request),
                    share_weight=old.share_weight if math.isnan(new.share_weight) else new.share_weight,
                )
                for new, old in zip(later, earlier, strict=True)
            ]
            if earlier
            else later
        )


def record_lag_steps(roster: Roster) -> int:
    """Return by how many steps the records lag behind: 1 if any rank uses a GPU, which runs ahead of its host, else 0.

    With a lag, a step's figures are read from the device while the next step runs. All ranks have the same lag, because
    only reports of the same step can be summed.
    """
    return int(any(member.is_gpu for member in roster.members))


def max_lead_steps(roster: Roster) -> int:
    """Return how many steps a rank may lead the slowest: 1 for DiLoCo, else 0, so that jitter is paid once a round
    rather than once a step.
    """
    return int(roster.sync.drifts)


class HostCopy:
    """An asynchronous copy to the host of numbers that a device is about to compute.

    `float(tensor)` would wait for all work queued on the device meanwhile, including the next step.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: Any = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._copy = tensor.clone()

    @classmethod
    def from_optional(cls, tensor: Tensor | None) -> HostCopy | None:
        """Copy a tensor; return None for None."""
        return None if tensor is None else cls(tensor)

    def __float__(self) -> float:
        return float(self.tensor())

    def tensor(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


class PendingStepRecord(msgspec.Struct, kw_only=True):
    """The figures of a step on this rank, which wait for the reports of the other ranks to become a StepRecord."""

    step: int
    epoch: int
    tokens: float
    global_tokens: float
    laps: LapTimer
    cpu_s: float
    ended: float
    sync_s: Callable[[], float | None]  # called when the step is reported: it may wait for the device
    in_flight_s: float | None = None  # what `sync_s` returned
    bytes: int
    lr: float
    loss_sum: HostCopy  # over this rank's tokens
    global_loss_sum: float | None = None  # over all ranks' tokens, if `commit_gradients` returned it
    grad_norm: HostCopy | None
    local_grad_sq: HostCopy | None = None  # squared norm of this rank's gradient, in sampled steps
    global_grad_sq: HostCopy | None = None  # squared norm of the global gradient
    fidelity: HostCopy | None = None


class StepRecorder:
    """Writes `steps/rank-R.jsonl` and exchanges step reports."""

    def __init__(
        self, rundir: RunWriter, rank: int, roster: Roster, clock: Clock, group: Any, spans: SpanRecorder
    ) -> None:
        self.clock, self.spans = clock, spans
        self._layer_groups: list[LayerGroup] | None = None  # layer groups, found at first use
        self._layer_tracer: LayerTracer | None = None  # in a step that is traced
        self._layer_spans: list[tuple[str, bool, Any, Any]] = []
        self._set_group(roster, rank, group)
        # the scaler skips steps whose gradients overflow
        self._skips_overflowed_steps = roster.members[rank].dtype == "fp16"
        self._is_in_step = False  # whether a step is in progress
        self._file = LineFile(rundir.steps_path(self._member_ranks[rank]))
        self._pending_steps: deque[PendingStepRecord] = deque()
        self._lag_steps, self._max_lead_steps = record_lag_steps(roster), max_lead_steps(roster)
        # (row sent, time, gathered rows, work)
        self._in_flight: deque[tuple[Tensor, float, Tensor, Any]] = deque()
        self.reports: list[StepReport] = []  # of all ranks, as received after the last step
        self.completed: list[StepRecord] = []  # the steps that those reports completed
        self.last_reported_step = -1  # the newest step that all ranks have reported
        self.last_record: StepRecord | None = None

    def _set_group(self, roster: Roster, rank: int, group: Any) -> None:
        self._rank, self._world_size, self._group = rank, roster.world_size, group
        self._member_ranks = [member.rank for member in roster.members]

    def adopt_strategy(self, roster: Roster) -> None:
        """Continue with another sync strategy, by which ranks may lead each other by more or fewer steps."""
        self._max_lead_steps = max_lead_steps(roster)

    def enter_epoch(self, roster: Roster, rank: int, group: Any, last_reported_step: int) -> None:
        """Continue in another group of ranks: the reports in flight are lost, so send them again.

        Do not send those of steps up to `last_reported_step` again: some rank has received them from all ranks, and has
        recorded the loss of these steps.
        """
        self._set_group(roster, rank, group)
        self._in_flight.clear()
        self.reports, self.last_reported_step = [], last_reported_step
        while self._pending_steps and self._pending_steps[0].step <= last_reported_step:
            draft = self._pending_steps.popleft()
            loss = None if draft.global_loss_sum is None else draft.global_loss_sum / draft.global_tokens
            self._write_record(draft, loss, exposed_and_wait=(None, None))
        self._send_unsent_reports()

    def charge_wait(self) -> None:
        """Charge the time since the last lap to waiting, if a step is in progress."""
        if self._is_in_step:
            self.lap("wait_s")

    def begin_step(self) -> None:
        """Begin a step."""
        self.spans.begin_step()
        self._layer_spans = []
        self._start_timers()

    def _start_timers(self) -> None:
        self._is_in_step = True
        self._cpu_start = time.process_time()  # first, so that it covers the whole step
        self._laps = LapTimer(self.clock)

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to a phase of the step."""
        self._laps.lap(phase)
        if self._layer_tracer is not None:
            self._layer_tracer.end_lap(self._laps.marks[-1][1])

    def trace_layers(self, step: int, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context for a pass of a step; in every hundredth step it traces each group of layers."""
        return contextlib.nullcontext() if step % RECORD_EVERY_STEPS else self._trace_layers(module)

    @contextlib.contextmanager
    def _trace_layers(self, module: nn.Module) -> Iterator[None]:
        self.clock.anchor()
        if self._layer_groups is None:
            self._layer_groups = layer_groups(module)
        with LayerTracer(self._layer_groups, self.clock) as self._layer_tracer:
            try:
                yield
            finally:
                self._layer_spans += self._layer_tracer.spans
                self._layer_tracer = None

    def stop_timers(self) -> None:
        """Stop the step timers, right after a lap: time after this belongs to no step, unless another lap follows."""
        self._cpu_s = time.process_time() - self._cpu_start

    def end_step(
        self,
        *,
        stop_request: StopRequest = StopRequest.NONE,
        share_weight: float = math.nan,
        exchanges: Sequence[BucketCommEvent] = (),
        **facts: Any,
    ) -> None:
        """End the step at the time of the last `stop_timers`, and send its report."""
        self.reports, self.completed, self._is_in_step = [], [], False
        self.spans.end_step(StepMarks(facts["step"], facts["epoch"], self._laps.marks, exchanges, self._layer_spans))
        self._pending_steps.append(PendingStepRecord(laps=self._laps, cpu_s=self._cpu_s, ended=time.time(), **facts))
        try:
            self._send_report(
                self._pending_steps[-1 - self._lag_steps] if len(self._pending_steps) > self._lag_steps else None,
                stop_request,
                share_weight,
            )
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise  # else it is sent again when it is due, or fails there

    def receive_due_reports(self) -> bool:
        """Receive the reports that are due, write the step that they complete; return whether all ranks stop now."""
        return self._receive_reports(self._max_lead_steps)

    def receive_all_reports(self) -> bool:
        """Receive all reports of ended steps, due or not, and return whether all ranks stop now."""
        return self._receive_reports(0)

    def flush(self) -> bool:
        """Write all pending steps, on all ranks together, and return whether all stop now.

        Call it before a checkpoint too: otherwise a rank that dies right after would lack the record of a step that is
        never repeated.
        """
        self._start_timers()
        stops = self._receive_reports(0)
        while self._pending_steps:
            self._send_report(self._pending_steps[0])
            stops = self._receive_reports(0)
        return stops

    @property
    def is_regroup_requested(self) -> bool:
        """Return whether any rank requests a regroup, by reports that all have received."""
        return self._is_requested(StopRequest.REGROUP) or self._is_requested(StopRequest.LEAVE)

    @property
    def is_save_requested(self) -> bool:
        """Return whether any rank was asked for a checkpoint."""
        return self._is_requested(StopRequest.SAVE)

    @property
    def is_leave_requested(self) -> bool:
        """Return whether a host leaves, so that the others restart without it."""
        return self._is_requested(StopRequest.LEAVE)

    def _is_requested(self, request: StopRequest) -> bool:
        return any(report.stop_request == request for report in self.reports)

    def close(self) -> None:
        """Write what this rank knows of steps that the other ranks will not complete."""
        while self._pending_steps:
            self._write_record(self._pending_steps.popleft(), loss=None, exposed_and_wait=(None, None))
        self._file.close()
        self.spans.close()

    def _receive_reports(self, max_in_flight: int) -> bool:
        """Receive reports until at most `max_in_flight` are in flight; return whether all ranks stop now."""
        if not self._lag_steps:
            self._send_unsent_reports()
        while len(self._in_flight) > max_in_flight:
            _, sent_at_s, gathered, work = self._in_flight.popleft()
            if work is not None:
                work.wait()
                self.lap("wait_s")  # a rank whose update took longer sends its report later
            self.reports = StepReport.merge(self.reports, StepReport.from_rows(gathered))
            if self.reports[self._rank].step >= 0:
                if work is not None:
                    self.spans.add_report_exchange(self._pending_steps[0].step, sent_at_s, time.perf_counter())
                self._complete_step(self._pending_steps.popleft())
        return self._is_requested(StopRequest.STOP)

    def _send_unsent_reports(self) -> None:
        """Send the reports of ended steps that could not be sent then."""
        for draft in list(self._pending_steps)[len(self._in_flight) :]:
            self._send_report(draft)

    def _send_report(
        self,
        pending: PendingStepRecord | None,
        stop_request: StopRequest = StopRequest.NONE,
        share_weight: float = math.nan,
    ) -> None:
        """Send the report of a step, or an empty report if none is due yet."""
        report = StepReport(stop_request=stop_request, share_weight=share_weight)
        if pending is not None:
            phases = pending.laps.phase_times_s()
            work_s = phases.get("data_s", 0.0) + phases.get("compute_s", 0.0)
            pending.in_flight_s = pending.sync_s()
            in_flight_s = math.nan if pending.in_flight_s is None else pending.in_flight_s
            report = msgspec.structs.replace(report, step=float(pending.step), loss_sum=float(pending.loss_sum),
                                             tokens=pending.tokens, wall_s=pending.laps.total_s(), work_s=work_s,
                                             blocked_s=phases.get(BLOCKED, 0.0),
                                             optimizer_s=phases.get("optimizer_s", 0.0),
                                             in_flight_s=in_flight_s, grad_norm=self._reported_grad_norm(pending),
                                             share_grad_sq=_share_grad_sq(pending))  # fmt: skip
        sent = report.to_row()
        if self._world_size == 1:
            self._in_flight.append((sent, 0.0, sent, None))
        else:
            gathered, sent_at = torch.empty(self._world_size, sent.shape[1], dtype=torch.float64), time.perf_counter()
            work = dist.all_gather_single(gathered, sent, group=self._group, async_op=True)
            self._in_flight.append((sent, sent_at, gathered, work))

    def _complete_step(self, pending: PendingStepRecord) -> None:
        steps = {int(report.step) for report in self.reports}
        assert steps == {pending.step}, f"reports of steps {steps}, but rank {self._rank} expects step {pending.step}"
        global_loss = (
            sum(report.loss_sum for report in self.reports)
            if pending.global_loss_sum is None
            else pending.global_loss_sum
        )
        # Drifting replicas lose a departed rank's updates in this step: its tokens do not count, and may have been all.
        tokens = sum(report.tokens for report in self.reports) if self._max_lead_steps else pending.global_tokens
        loss = global_loss / tokens if tokens else None
        self.last_reported_step = pending.step
        noise = None
        if pending.global_grad_sq is not None:
            noise = gradient_noise(
                [report.share_grad_sq for report in self.reports], float(pending.global_grad_sq), pending.global_tokens
            )
        self._write_record(
            pending, loss, split_blocked([report.blocked_s for report in self.reports])[self._rank], noise
        )
        for quantity, figures in (("loss", [report.loss_sum for report in self.reports]),
                                  ("gradient norm", [report.grad_norm for report in self.reports])):  # fmt: skip
            bad_ranks = [
                rank for rank, figure in zip(self._member_ranks, figures, strict=True) if not math.isfinite(figure)
            ]
            if bad_ranks:
                names = ", ".join(f"rank {rank}" for rank in bad_ranks)
                raise NonFiniteError(
                    f"step {pending.step}: the {quantity} of {names} is not finite", step=pending.step, ranks=bad_ranks
                )

    def _reported_grad_norm(self, pending: PendingStepRecord) -> float:
        return 0.0 if pending.grad_norm is None or self._skips_overflowed_steps else float(pending.grad_norm)

    def _write_record(
        self,
        pending: PendingStepRecord,
        loss: float | None,
        exposed_and_wait: tuple[float | None, float | None],
        noise: GradientNoise | None = None,
    ) -> None:
        phases: dict[str, float | None] = {**dict.fromkeys(PHASES, 0.0), **pending.laps.phase_times_s()}
        exposed, wait = exposed_and_wait
        if phases.pop(BLOCKED, None) is None:
            exposed, wait = 0.0, 0.0
        phases["exposed_sync_s"] = exposed
        phases["wait_s"] = None if wait is None else wait + (phases["wait_s"] or 0.0)
        self.last_record = StepRecord(
            step=pending.step,
            epoch=pending.epoch,
            tokens=pending.tokens,
            loss=loss if loss is None or math.isfinite(loss) else None,
            wall_s=pending.laps.total_s(),
            cost=StepCost(**phases),
            sync_s=pending.in_flight_s,
            cpu_s=pending.cpu_s,
            bytes=pending.bytes,
            members=self._world_size,
            lr=pending.lr,
            grad_norm=None if pending.grad_norm is None else float(pending.grad_norm),
            noise=noise,
            fidelity=_fidelity(pending),
            ended=pending.ended,
        )
        self.completed.append(self.last_record)
        self._file.write(msgspec.json.encode(self.last_record) + b"\n")


def _fidelity(pending: PendingStepRecord) -> Fidelity | None:
    if pending.fidelity is None:
        return None
    error, cosine = pending.fidelity.tensor().tolist()
    return Fidelity(error=error, cosine=cosine) if math.isfinite(error) and math.isfinite(cosine) else None


def _share_grad_sq(pending: PendingStepRecord) -> float:
    """Return (T_r/T)·|g_r|² of a step: g_r is the mean gradient over this rank's T_r of the batch's T tokens.

    What was measured is |g_r·T_r/T|², since each rank's loss is divided by T.
    """
    if pending.local_grad_sq is None or not pending.tokens:
        return 0.0
    return float(pending.local_grad_sq) * pending.global_tokens / pending.tokens
