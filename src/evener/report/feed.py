"""How does a logger hear of a run, live or afterwards, without costing the training anything?

    python -m evener.report.feed RUN NAME     # until its standard input ends; `evener train --log` starts one a logger
    feed(RunDir("runs/mine"), "wandb")        # what it was not told yet: `evener report RUN --log wandb`

It is fed from the run's files, not by the ranks. A rank that waited for a logger would hold up all others; rank 0 may
be another process in the next step; hosts would need its package, its credentials and a way to its server. The files
have all that happened, in order, and come home from every host while anyone follows the run. So a process here reads
what they gained, and whatever befalls it, the run goes on, and what it has not told it tells the next time.

RUN/loggers/NAME.json says how far a logger was told. Every step is told once, in order, when all ranks that took it
have recorded it; of one that is taken again after a failure or a resume, as it was taken first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.decoding import json_decoder
from evener.core.errors import EvenerError
from evener.core.files import follow_lines, read_file, write_atomic
from evener.core.rundir import RunDir, event_of
from evener.core.step import PARTS, StepRecord, noise_scale
from evener.core.stored import from_stored
from evener.report.loggers import LOGGERS, About, Logger, settings_of

FORMAT = 1
POLL_S = 0.5
LATE_STEPS = 50  # so much later than others a step of which a record lacks is given up: the rank that took it is gone
NOISE_STEPS = 100  # measurements of which the noise scale is the mean; it uses the second half


class Told(msgspec.Struct, kw_only=True):
    """How far a logger was told of a run."""

    format: int = FORMAT
    id: str | None = None  # the logger's own name for the run; None: it has not heard of it
    steps: int = 0
    tokens: float = 0.0  # in these steps
    evaluated: int = 0  # after which step it was evaluated last


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What is told at once."""

    steps: int  # taken, with this one
    time: float
    values: dict[str, float]


class Reader:
    """Steps and evaluations that a run's files gained, as loggers hear of them."""

    def __init__(self, rundir: RunDir, told: Told) -> None:
        self.told = told
        self._rundir, self._decoder = rundir, json_decoder(StepRecord)
        self._ranks: dict[int, Iterator[list[bytes]]] = {}
        self._events = follow_lines(rundir.events_path)
        self._waiting: dict[int, dict[int, StepRecord]] = {}  # by step and rank
        self._noise: deque[StepRecord] = deque(maxlen=NOISE_STEPS)
        self._evaluations: dict[int, tuple[float, float]] = {}  # by steps taken: (time, loss)

    def new(self, *, is_last: bool) -> Iterator[Step]:
        """What is there now; `is_last`: nothing more will come, so that nothing is waited for."""
        for rank in self._rundir.recorded_ranks():
            follower = self._ranks.setdefault(rank, follow_lines(self._rundir.steps_path(rank)))
            for line in next(follower):
                with contextlib.suppress(msgspec.MsgspecError):  # damaged, as a full disk leaves it
                    self._take(rank, self._decoder.decode(line))
        self._look_for_evaluations()
        lacking: list[int] = []  # steps of which a record may still come
        for step in sorted(self._waiting):
            if not _is_whole(self._waiting[step]):
                lacking.append(step)
                continue
            if lacking and lacking[-1] > step - LATE_STEPS and not is_last:
                break
            for given_up in lacking:
                del self._waiting[given_up]
            lacking = []
            yield self._step(step, self._waiting.pop(step))
        for steps in sorted(self._evaluations):
            if is_last or steps <= self.told.steps:
                moment, loss = self._evaluations.pop(steps)
                self.told.evaluated = steps
                yield Step(steps=steps, time=moment, values={"val/loss": loss})

    def _take(self, rank: int, record: StepRecord) -> None:
        if record.step >= self.told.steps:
            by_rank = self._waiting.setdefault(record.step, {})
            for other in [other for other, one in by_rank.items() if one.epoch < record.epoch]:
                del by_rank[other]  # they took it with ranks that are gone
            by_rank[rank] = record

    def _look_for_evaluations(self) -> None:
        for line in next(self._events):
            event = event_of(line) or {}
            step: Any = event.get("step")
            loss = event.get("val_loss")
            is_known = event.get("event") != "evaluation" or not isinstance(step, int) or step <= self.told.evaluated
            if not is_known and isinstance(loss, float):
                self._evaluations[step] = event["time"], loss

    def _step(self, step: int, by_rank: dict[int, StepRecord]) -> Step:
        records = [by_rank[rank] for rank in sorted(by_rank)]
        first = records[0]
        tokens = sum(record.tokens for record in records)
        self.told.steps, self.told.tokens = step + 1, self.told.tokens + tokens
        values: dict[str, float | None] = {
            "train/loss": first.loss, "train/tokens": self.told.tokens, "train/lr": first.lr,
            "train/grad_norm": first.grad_norm, "speed/tokens_per_s": tokens / first.wall_s if first.wall_s else None,
            "speed/step_s": first.wall_s,
        }  # fmt: skip
        for part in PARTS:
            known = [value for record in records if (value := getattr(record.cost, part)) is not None]
            values[f"speed/{part}"] = sum(known) / len(known) if known else None
        if first.noise is not None:
            self._noise.append(first)
            values["train/noise_scale_tokens"] = noise_scale(list(self._noise))
        if first.fidelity is not None:
            values["train/sync_error"] = first.fidelity.error
        if (evaluation := self._evaluations.pop(step + 1, None)) is not None:
            values["val/loss"], self.told.evaluated = evaluation[1], step + 1
        return Step(steps=step + 1, time=first.ended,
                    values={name: value for name, value in values.items() if value is not None})  # fmt: skip


def _is_whole(by_rank: dict[int, StepRecord]) -> bool:
    """Have all ranks recorded it that took it?"""
    return bool(by_rank) and all(record.members == len(by_rank) for record in by_rank.values())


def feed(rundir: RunDir, name: str, logger: Logger | None = None,
         goes_on: Callable[[], bool] = lambda: False) -> int | None:  # fmt: skip
    """Tell a logger what it was not told yet, as long as the run `goes_on`; how many steps. None where another process
    is at it.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_alone(rundir, name))
        except BlockingIOError:
            return None
        while not rundir.is_run() and goes_on():
            pass
        if not rundir.is_run():  # it never began
            return 0
        manifest = rundir.manifest()
        told = told_of(rundir, name)
        began, logger = told.steps, logger or LOGGERS[name]()
        about = About(name=rundir.path.resolve().name, folder=rundir.path, settings=settings_of(manifest),
                      started=manifest.started, first_step=told.steps + 1 if told.id else 0, id=told.id)  # fmt: skip
        told.id = logger.begin(about)
        _note(rundir, name, told)
        reader = Reader(rundir, told)
        while True:
            is_last = not goes_on()
            before = told.steps, told.evaluated
            for step in reader.new(is_last=is_last):
                logger.log(step.steps, step.time, step.values)
            if (told.steps, told.evaluated) != before:
                logger.flush()
                _note(rundir, name, told)
            if is_last:
                break
        logger.close(rundir.manifest().verdict)
        return told.steps - began


def told_of(rundir: RunDir, name: str) -> Told:
    """How far a logger was told; CheckpointError where the file that says so is damaged."""
    path = _path(rundir, name)
    try:
        return from_stored(read_file(path), Told, FORMAT, path)
    except FileNotFoundError:
        return Told()


def remember(rundir: RunDir, names: list[str]) -> None:
    """Whoever follows this run tells these loggers of it."""
    for name in names:
        if not _path(rundir, name).exists():
            _note(rundir, name, Told())


def remembered(rundir: RunDir) -> list[str]:
    """The loggers that were told of a run, or were to be."""
    return [name for name in LOGGERS if _path(rundir, name).exists()]


def _path(rundir: RunDir, name: str) -> Path:
    return rundir.path / "loggers" / f"{name}.json"


def _note(rundir: RunDir, name: str, told: Told) -> None:
    write_atomic(_path(rundir, name), msgspec.json.encode(told))


@contextlib.contextmanager
def _alone(rundir: RunDir, name: str) -> Iterator[None]:
    """Of all programs that follow a run one tells a logger; BlockingIOError in the others."""
    path = _path(rundir, name).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def main() -> int:
    """Feed a logger until standard input ends: whoever started this holds the other end."""

    def goes_on() -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        return not (ready and os.read(sys.stdin.fileno(), 1) == b"")

    try:
        feed(RunDir(sys.argv[1]), sys.argv[2], goes_on=goes_on)
    except EvenerError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
