"""Feed a run to an experiment logger, live or afterwards, at no cost to the training.

    python -m evener.report.export.logger_feed RUN NAME  # until its standard input ends; `evener train --log` starts it
    feed_logger(RunDir("runs/mine"), "wandb")  # log what is not logged yet: `evener report RUN --log wandb`

The logger is fed from the run's files, not by the ranks. A rank that waited for a logger would hold up all others;
rank 0 may be another process in the next step; hosts would need the logger's package, its credentials and a route to
its server. The files hold all that happened, in order, and are copied here from every host while anyone follows the
run. So a local process reads what was appended. If it fails, the run is not affected, and the next one catches up.

RUN/loggers/NAME.json is the logger's cursor. Every step is logged once, in order, when all ranks that took it have
recorded it; a step that is repeated after a failure or a resume is logged as it was taken first.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.decoding import json_decoder
from evener.core.base.errors import CheckpointError, EvenerError
from evener.core.base.file_io import follow_lines, lock_file, read_file, write_atomic
from evener.core.base.json_files import decode_versioned_json
from evener.core.run.rundir import RunDir, parse_event
from evener.core.run.step_cost import PHASES, StepRecord, noise_scale
from evener.report.export.experiment_loggers import LOGGERS, ExperimentLogger, LoggedRun, hyperparameters_of

FORMAT = 1
POLL_S = 0.5
MAX_LATE_STEPS = 50  # give up an incomplete step once a step so much later is complete: the missing rank is gone
NOISE_STEPS = 100  # measurements averaged for the noise scale, which uses the second half


class LoggerCursor(msgspec.Struct, kw_only=True):
    """How much of a run has been logged."""

    format: int = FORMAT
    id: str | None = None  # the logger's own id of the run; None: not begun
    steps: int = 0
    tokens: float = 0.0  # in these steps
    evaluated: int = 0  # the step of the last evaluation that was logged


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one `log` call."""

    steps: int  # taken so far, including this one
    time: float
    values: dict[str, float]


class LoggedStepReader:
    """Reads the steps and evaluations appended to a run's files, in the order in which they are logged."""

    def __init__(self, rundir: RunDir, cursor: LoggerCursor) -> None:
        self.cursor = cursor
        self._rundir, self._decoder = rundir, json_decoder(StepRecord)
        self._ranks: dict[int, Iterator[list[bytes]]] = {}
        self._events = follow_lines(rundir.events_path)
        self._incomplete_steps: dict[int, dict[int, StepRecord]] = {}  # by step and rank
        self._noise: deque[StepRecord] = deque(maxlen=NOISE_STEPS)
        self._evaluations: dict[int, tuple[float, float]] = {}  # by steps taken: (time, loss)

    def read_new(self, *, is_last: bool) -> Iterator[LoggedStep]:
        """Yield the new complete steps and evaluations; `is_last`: no more records will come, so wait for none."""
        for rank in self._rundir.recorded_ranks():
            follower = self._ranks.setdefault(rank, follow_lines(self._rundir.steps_path(rank)))
            for line in next(follower):
                with contextlib.suppress(msgspec.MsgspecError):  # a damaged line, as left by a full disk
                    self._add_record(rank, self._decoder.decode(line))
        self._read_evaluations()
        incomplete: list[int] = []  # incomplete steps whose records may still come
        for step in sorted(self._incomplete_steps):
            if not _is_complete(self._incomplete_steps[step]):
                incomplete.append(step)
                continue
            if incomplete and incomplete[-1] > step - MAX_LATE_STEPS and not is_last:
                break
            for given_up in incomplete:
                del self._incomplete_steps[given_up]
            incomplete = []
            yield self._log_step(step, self._incomplete_steps.pop(step))
        for steps in sorted(self._evaluations):
            if is_last or steps <= self.cursor.steps:
                unix_s, loss = self._evaluations.pop(steps)
                self.cursor.evaluated = steps
                yield LoggedStep(steps=steps, time=unix_s, values={"val/loss": loss})

    def _add_record(self, rank: int, record: StepRecord) -> None:
        if record.step >= self.cursor.steps:
            by_rank = self._incomplete_steps.setdefault(record.step, {})
            for other in [other for other, earlier in by_rank.items() if earlier.epoch < record.epoch]:
                del by_rank[other]  # taken in an earlier epoch, with ranks that are gone
            by_rank[rank] = record

    def _read_evaluations(self) -> None:
        for line in next(self._events):
            event = parse_event(line) or {}
            step: Any = event.get("step")
            loss = event.get("val_loss")
            is_known = event.get("event") != "evaluation" or not isinstance(step, int) or step <= self.cursor.evaluated
            if not is_known and isinstance(loss, float):
                self._evaluations[step] = event["time"], loss

    def _log_step(self, step: int, by_rank: dict[int, StepRecord]) -> LoggedStep:
        records = [by_rank[rank] for rank in sorted(by_rank)]
        first = records[0]
        tokens = sum(record.tokens for record in records)
        self.cursor.steps, self.cursor.tokens = step + 1, self.cursor.tokens + tokens
        values: dict[str, float | None] = {
            "train/loss": first.loss, "train/tokens": self.cursor.tokens, "train/lr": first.lr,
            "train/grad_norm": first.grad_norm, "speed/tokens_per_s": tokens / first.wall_s if first.wall_s else None,
            "speed/step_s": first.wall_s,
        }  # fmt: skip
        for part in PHASES:
            known = [value for record in records if (value := getattr(record.cost, part)) is not None]
            values[f"speed/{part}"] = sum(known) / len(known) if known else None
        if first.noise is not None:
            self._noise.append(first)
            values["train/noise_scale_tokens"] = noise_scale(list(self._noise))
        if first.fidelity is not None:
            values["train/sync_error"] = first.fidelity.error
        if (evaluation := self._evaluations.pop(step + 1, None)) is not None:
            values["val/loss"], self.cursor.evaluated = evaluation[1], step + 1
        return LoggedStep(steps=step + 1, time=first.ended,
                    values={name: value for name, value in values.items() if value is not None})  # fmt: skip


def _is_complete(by_rank: dict[int, StepRecord]) -> bool:
    """Return whether all ranks that took the step have recorded it."""
    return bool(by_rank) and all(record.members == len(by_rank) for record in by_rank.values())


def feed_logger(rundir: RunDir, name: str, logger: ExperimentLogger | None = None,
         is_running: Callable[[], bool] = lambda: False) -> int | None:  # fmt: skip
    """Log what is not logged yet, while `is_running()`; return the number of steps logged, or None if another process
    already feeds this logger.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_exclusive_lock(rundir, name))
        except BlockingIOError:
            return None
        while not rundir.is_run() and is_running():
            pass
        if not rundir.is_run():  # it never started
            return 0
        manifest = rundir.manifest()
        cursor = read_cursor(rundir, name)
        first_steps, logger = cursor.steps, logger or LOGGERS[name]()
        logged_run = LoggedRun(
            name=rundir.path.resolve().name,
            run_dir=rundir.path,
            hyperparameters=hyperparameters_of(manifest),
            started=manifest.started,
            first_step=cursor.steps + 1 if cursor.id else 0,
            id=cursor.id,
        )
        cursor.id = logger.begin(logged_run)
        _write_cursor(rundir, name, cursor)
        reader = LoggedStepReader(rundir, cursor)
        while True:
            is_last = not is_running()
            before = cursor.steps, cursor.evaluated
            for step in reader.read_new(is_last=is_last):
                logger.log(step.steps, step.time, step.values)
            if (cursor.steps, cursor.evaluated) != before:
                logger.flush()
                _write_cursor(rundir, name, cursor)
            if is_last:
                break
        logger.close(rundir.manifest().verdict)
        return cursor.steps - first_steps


def read_cursor(rundir: RunDir, name: str) -> LoggerCursor:
    """Read a logger's cursor; raise CheckpointError if the file is damaged."""
    path = _cursor_path(rundir, name)
    try:
        return decode_versioned_json(read_file(path), LoggerCursor, FORMAT, path)
    except FileNotFoundError:
        return LoggerCursor()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def register_loggers(rundir: RunDir, names: list[str]) -> None:
    """Register loggers, so that whoever follows this run feeds them."""
    for name in names:
        if not _cursor_path(rundir, name).exists():
            _write_cursor(rundir, name, LoggerCursor())


def registered_loggers(rundir: RunDir) -> list[str]:
    """Return the loggers registered for a run."""
    return [name for name in LOGGERS if _cursor_path(rundir, name).exists()]


def _cursor_path(rundir: RunDir, name: str) -> Path:
    return rundir.inside("loggers", f"{name}.json")


def _write_cursor(rundir: RunDir, name: str, cursor: LoggerCursor) -> None:
    write_atomic(_cursor_path(rundir, name), msgspec.json.encode(cursor))


@contextlib.contextmanager
def _exclusive_lock(rundir: RunDir, name: str) -> Iterator[None]:
    """Hold the lock that lets one process feed a logger; raise BlockingIOError if another holds it."""
    with lock_file(rundir.inside("loggers", f"{name}.lock"), is_blocking=False):
        yield


def main() -> int:
    """Feed a logger until standard input, whose other end the parent process holds, is closed."""

    def goes_on() -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        return not (ready and os.read(sys.stdin.fileno(), 1) == b"")

    try:
        feed_logger(RunDir(sys.argv[1]), sys.argv[2], is_running=goes_on)
    except EvenerError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
