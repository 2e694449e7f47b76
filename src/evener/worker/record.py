"""What did every step cost on this rank, and what must the ranks know of each other?

Once a step each rank tells all others its News, a handful of numbers. They go out when a step ends and are heard when
the next one begins; where replicas drift, when the one after it does, so that no step waits for the slowest rank. From
them come the loss of the global batch, the division of blocked time into transfer and waiting, and what only all ranks
together may decide: to stop, that a loss is not finite, who does what from now on.
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

# Wishes, of which the highest counts: a checkpoint now; another world after the next one, or after this step; the end.
SAVE, REGROUP, LEAVE, STOP = 0.5, 1.0, 2.0, 3.0


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells all others once a step; a row of float64."""

    step: float = -1.0  # of which the eight figures below are; -1: of none yet
    loss_sum: float = 0.0  # over this rank's tokens
    tokens: float = 0.0  # of its share
    blocked_s: float = 0.0  # in the collective at the end of backward
    took_s: float = 0.0  # its share of the batch: input, forward, backward
    update_s: float = 0.0  # the optimizer's step, whatever the share
    in_flight_s: float = math.nan  # of its collectives; NaN: not measured
    norm: float = 0.0  # of the gradient; 0 where it was not measured, or where what overflows is skipped
    part_sq: float = 0.0  # (T_r/T)·|g_r|²: see core.step.noise_of; 0 of a step that is not sampled
    wish: float = 0.0  # 0, SAVE, REGROUP, LEAVE or STOP
    weight: float = math.nan  # the part of the batch that it should have, relative to the others'; NaN: as it is

    def row(self) -> Tensor:
        """As it travels: (1, columns)."""
        return torch.tensor([msgspec.structs.astuple(self)], dtype=torch.float64)

    @classmethod
    def rows(cls, gathered: Tensor) -> list[News]:
        """Everybody's, by rank, from (ranks, columns)."""
        return [cls(**dict(zip(cls.__struct_fields__, row, strict=True))) for row in gathered.tolist()]

    @classmethod
    def after(cls, before: list[News], now: list[News]) -> list[News]:
        """Of two that are heard at once: the later, with what the earlier wished and nobody has acted on yet."""
        return [msgspec.structs.replace(new, wish=max(new.wish, old.wish),
                                        weight=old.weight if math.isnan(new.weight) else new.weight)
                for new, old in zip(now, before, strict=True)] if before else now  # fmt: skip


def lag_of(roster: Roster) -> int:
    """Steps by which records are behind: 1 where any rank's device runs ahead of its host, and then on all ranks.

    A step is then read while the next one runs. It must be the same step everywhere: news of one step are added up.
    """
    return int(any(member.is_gpu for member in roster.members))


def slack_of(roster: Roster) -> int:
    """Steps that a rank may be ahead of the slowest: 1 where replicas drift. What each step takes more on one rank, and
    less on the next, is then lost once a round, not once a step.
    """
    return int(roster.sync.kind == "diloco")


class OnHost:
    """Numbers that a device is about to compute: copied behind the work that makes them, read when they are there.

    `float(tensor)` would wait for all that was queued on the device meanwhile, the next step among it.
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
        """None of nothing."""
        return None if tensor is None else cls(tensor)

    def __float__(self) -> float:
        return float(self.tensor())

    def tensor(self) -> Tensor:
        """Once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


class Draft(msgspec.Struct, kw_only=True):
    """A step of this rank as far as this rank alone can know it."""

    step: int
    epoch: int
    tokens: float
    global_tokens: float
    laps: Laps
    wall_s: float
    cpu_s: float
    ended: float
    sync_s: Callable[[], float | None]  # asked when the step is told: it may wait for the device
    in_flight_s: float | None = None  # the answer
    bytes: int
    lr: float
    loss_sum: OnHost  # over this rank's tokens
    of_all: float | None = None  # over all ranks', where these have told it already
    grad_norm: OnHost | None
    mine_sq: OnHost | None = None  # squared norm of what this rank adds to the gradient, in steps that are sampled
    whole_sq: OnHost | None = None  # of the gradient
    fidelity: OnHost | None = None


class Recorder:
    """Writes `steps/rank-R.jsonl`."""

    def __init__(self, rundir: RunWriter, rank: int, roster: Roster, clock: Clock, group: Any, spans: Spans) -> None:
        self.clock, self.spans = clock, spans
        self._groups: list[Group] | None = None  # of layers, once they have been looked for
        self._watched: Passes | None = None  # in a step in which they are marked
        self._passes: list[tuple[str, bool, Any, Any]] = []
        self._enter(roster, rank, group)
        self._skips = roster.members[rank].dtype == "fp16"  # its scaler, steps whose gradients overflow
        self._is_open = False  # a step has begun, and not ended
        self._file = LineFile(rundir.steps_path(self._numbers[rank]))
        self._drafts: deque[Draft] = deque()
        self._lag, self._slack = lag_of(roster), slack_of(roster)
        # What was sent, when, what will be gathered, and by what.
        self._on_way: deque[tuple[Tensor, float, Tensor, Any]] = deque()
        self.news: list[News] = []  # what all ranks told, as it was heard after the last step
        self.completed: list[StepRecord] = []  # the steps of which it was
        self.heard = -1  # the newest step of which all ranks told
        self.last: StepRecord | None = None

    def _enter(self, roster: Roster, rank: int, group: Any) -> None:
        self._rank, self._world_size, self._group = rank, roster.world_size, group
        self._numbers = [member.rank for member in roster.members]

    def enter(self, roster: Roster, rank: int, group: Any, heard: int) -> None:
        """The ranks are others from here on: news that were on their way are lost, and are told again. Those of steps
        that any of the ranks has `heard` of are not: it has written down what the steps came to.
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
        """The time since the last lap, of a step that is under way, was waiting."""
        if self._is_open:
            self.lap("wait_s")

    def begin(self) -> None:
        """A step begins now."""
        self.spans.begin()
        self._passes = []
        self._begin()

    def _begin(self) -> None:
        self._is_open = True
        self._wall, self._cpu = time.perf_counter(), time.process_time()  # first: no part of a step lies outside it
        self._laps = Laps(self.clock)

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to a part of the step."""
        self._laps.lap(part)
        if self._watched is not None:
            self._watched.end_lap(self._laps.marks[-1][1])

    def watching(self, step: int, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A pass of a step: of every hundredth, mark when each group of layers begins and ends."""
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
        """What follows belongs to no step, unless there is another lap: so far it took this long."""
        self._wall_s, self._cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def end(self, *, wish: float, weight: float = math.nan, exchanges: Sequence[Exchanged] = (), **facts: Any) -> None:
        """The step ended when `pause` was called last; the news of it go out."""
        self.news, self.completed, self._is_open = [], [], False
        self.spans.add(Kept(facts["step"], facts["epoch"], self._laps, exchanges, self._passes))
        self._drafts.append(Draft(laps=self._laps, wall_s=self._wall_s, cpu_s=self._cpu_s, ended=time.time(), **facts))
        try:
            self._tell(self._drafts[-1 - self._lag] if len(self._drafts) > self._lag else None, wish, weight)
        except RuntimeError as error:
            if not is_consequence(error):
                raise  # else it is told again when it is due, or fails there

    def hear(self) -> bool:
        """Read the news that are due, write the step they complete, and say whether all stop now."""
        return self._hear(self._slack)

    def catch_up(self) -> bool:
        """Read all news of steps that have ended, whether they are due or not. Do all stop now?"""
        return self._hear(0)

    def flush(self) -> bool:
        """Write the steps that are still on their way; all ranks call it together. Do all stop now?

        Before a checkpoint too: a rank that dies right after it would have no record of a step that is never repeated.
        """
        self._begin()
        stops = self._hear(0)
        while self._drafts:
            self._tell(self._drafts[0])
            stops = self._hear(0)
        return stops

    @property
    def regroups(self) -> bool:
        """Does any rank want another world, by the news that all have heard?"""
        return any(news.wish in (REGROUP, LEAVE) for news in self.news)

    @property
    def saves(self) -> bool:
        """Was any rank asked for a checkpoint?"""
        return any(news.wish == SAVE for news in self.news)

    @property
    def leaves(self) -> bool:
        """Does a host leave, so that the others begin again without it?"""
        return any(news.wish == LEAVE for news in self.news)

    def close(self) -> None:
        """Write what this rank knows of steps that the others will not complete any more."""
        while self._drafts:
            self._write_line(self._drafts.popleft(), loss=None, exposed_and_wait=(None, None))
        self._file.close()
        self.spans.close()

    def _hear(self, left: int) -> bool:
        """Until only so many are on their way."""
        if not self._lag:
            self._tell_rest()
        while len(self._on_way) > left:
            _, sent_at, gathered, work = self._on_way.popleft()
            if work is not None:
                work.wait()
                self.lap("wait_s")  # a rank whose update took longer sends its news later
            self.news = News.after(self.news, News.rows(gathered))
            if self.news[self._rank].step >= 0:
                if work is not None:
                    self.spans.heard(self._drafts[0].step, sent_at, time.perf_counter())
                self._write(self._drafts.popleft())
        return any(news.wish == STOP for news in self.news)

    def _tell_rest(self) -> None:
        """Of steps that have ended, what could not be told then."""
        for draft in list(self._drafts)[len(self._on_way) :]:
            self._tell(draft)

    def _tell(self, draft: Draft | None, wish: float = 0.0, weight: float = math.nan) -> None:
        """The news of a step go out, or that there are none yet."""
        news = News(wish=wish, weight=weight)
        if draft is not None:
            parts = draft.laps.parts_s()
            took_s = parts.get("data_s", 0.0) + parts.get("compute_s", 0.0)
            draft.in_flight_s = draft.sync_s()
            in_flight_s = math.nan if draft.in_flight_s is None else draft.in_flight_s
            news = msgspec.structs.replace(news, step=float(draft.step), loss_sum=float(draft.loss_sum),
                                           tokens=draft.tokens, blocked_s=parts.get(BLOCKED, 0.0), took_s=took_s,
                                           update_s=parts.get("optimizer_s", 0.0),
                                           in_flight_s=in_flight_s, norm=self._norm(draft),
                                           part_sq=_part_sq(draft))  # fmt: skip
        sent = news.row()
        if self._world_size == 1:
            self._on_way.append((sent, 0.0, sent, None))
        else:
            gathered, sent_at = torch.empty(self._world_size, sent.shape[1], dtype=torch.float64), time.perf_counter()
            work = dist.all_gather_single(gathered, sent, group=self._group, async_op=True)
            self._on_way.append((sent, sent_at, gathered, work))

    def _write(self, draft: Draft) -> None:
        told = {int(news.step) for news in self.news}
        assert told == {draft.step}, f"news of steps {told} beside rank {self._rank}'s step {draft.step}"
        of_all = sum(news.loss_sum for news in self.news) if draft.of_all is None else draft.of_all
        # Replicas that drift do not take up what a rank that is gone learned in this step; it may have had all of it.
        tokens = sum(news.tokens for news in self.news) if self._slack else draft.global_tokens
        loss = of_all / tokens if tokens else None
        self.heard = draft.step
        noise = None
        if draft.whole_sq is not None:
            noise = noise_of([news.part_sq for news in self.news], float(draft.whole_sq), draft.global_tokens)
        self._write_line(draft, loss, split_blocked([news.blocked_s for news in self.news])[self._rank], noise)
        for what, figures in (("loss", [news.loss_sum for news in self.news]),
                              ("gradient norm", [news.norm for news in self.news])):  # fmt: skip
            guilty = [rank for rank, figure in zip(self._numbers, figures, strict=True) if not math.isfinite(figure)]
            if guilty:
                whose = ", ".join(f"rank {rank}" for rank in guilty)
                raise NonFiniteError(
                    f"step {draft.step}: the {what} of {whose} is not finite", step=draft.step, ranks=guilty
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
        parts: dict[str, float | None] = {**dict.fromkeys(PARTS, 0.0), **draft.laps.parts_s()}
        exposed, wait = exposed_and_wait
        if parts.pop(BLOCKED, None) is None:
            exposed, wait = 0.0, 0.0
        parts["exposed_sync_s"] = exposed
        parts["wait_s"] = None if wait is None else wait + (parts["wait_s"] or 0.0)
        self.last = StepRecord(
            step=draft.step,
            epoch=draft.epoch,
            tokens=draft.tokens,
            loss=loss if loss is None or math.isfinite(loss) else None,
            wall_s=draft.wall_s if self._lag == 0 else sum(part or 0.0 for part in parts.values()),
            cost=StepCost(**parts),
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
    """What a rank adds to the gradient is T_r/T of its own tokens' gradient."""
    if draft.mine_sq is None or not draft.tokens:
        return 0.0
    return float(draft.mine_sq) * draft.global_tokens / draft.tokens
