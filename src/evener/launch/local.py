"""How is a run on this machine started, followed and ended, so that no process stays behind?

The run is a session of its own: Ctrl-C in the terminal reaches the launcher alone, which asks the workers to save and
leave at the end of the step. If the launcher itself is killed, the kernel tells the run (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import psutil

from evener.core import errors
from evener.core.errors import EvenerError, RunError
from evener.core.files import follow_lines
from evener.core.plan import Plan, write_plan
from evener.core.prediction import Prediction
from evener.core.rundir import Manifest, RunDir
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.launch.torchrun import worker_argv, worker_env

POLL_S = 0.1
LAST_LINES = 15

Observer = Callable[[StepRecord | dict[str, Any]], None]


def run(spec: RunSpec, observe: Observer, *, resume: bool = False, prediction: Prediction | None = None) -> Manifest:
    """Run to the end and return the manifest. `observe` gets rank 0's records and all events as they come.

    Raises RunError (or the worker's own EvenerError) when the run failed; a run that never began leaves no directory.
    """
    assert spec.out is not None, "the launcher's caller names the run directory"
    rundir = RunDir(spec.out)
    created = not rundir.path.exists()
    (rundir.path / "logs").mkdir(parents=True, exist_ok=True)
    log_path = rundir.path / "logs" / "launcher.log"
    before = len(rundir.events())
    logged = {path: path.stat().st_size for path in log_path.parent.glob("*.log")}  # by earlier starts
    write_plan(rundir, Plan(kind="train", spec=spec, prediction=prediction))
    with session(worker_argv(spec, resume=resume), worker_env(spec), log_path) as process:
        status = _follow(process, rundir, before, observe)
    shutil.rmtree(rundir.path / "logs" / "torchrun", ignore_errors=True)  # empty folders: the ranks keep their own logs
    if status != 0:
        error = _failure(rundir, before, logged, status, log_path)
        if created and not rundir.is_run():
            shutil.rmtree(rundir.path)
        elif rundir.is_run() and rundir.manifest().verdict == "running":
            manifest = rundir.manifest()
            rundir.write_manifest(msgspec.structs.replace(manifest, verdict="failed", ended=time.time()))
        raise error
    return rundir.manifest()


@contextlib.contextmanager
def session(
    argv: list[str], env: dict[str, str], log_path: Path, *, saves: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs in a session of its own; when the block is left, nothing of that session is alive.

    Ctrl-C asks workers to save and leave; of a program that has nothing to save, it ends the block.
    """
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            argv,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        with _forwarding_signals(process) if saves else contextlib.nullcontext():
            yield process
    finally:
        _end_all(process)


def _follow(process: subprocess.Popen[bytes], rundir: RunDir, before: int, observe: Observer) -> int:
    decoder = msgspec.json.Decoder(StepRecord)
    steps, events = follow_lines(rundir.steps_path(0)), follow_lines(rundir.events_path)
    next_step, num_events = -1, 0
    while True:
        status = process.poll()
        for line in next(steps):
            record = decoder.decode(line)
            if record.step > next_step:
                next_step = record.step
                observe(record)
        for line in next(events):
            num_events += 1
            if num_events > before:
                observe(msgspec.json.decode(line))
        if status is not None:
            return status
        time.sleep(POLL_S)


@contextlib.contextmanager
def _forwarding_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the workers to save and leave; a second one ends them at once."""
    asked = 0

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            print("stopping: the step is finished and saved first; once more ends it at once", file=sys.stderr)
            for worker in _workers(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGTERM)
        else:
            _end_all(process)

    previous = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The workers: torchrun's children, or the process itself where there is no torchrun."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return root.children() or [root]
    return []


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the run's session, and of the sessions that torchrun gave its workers."""
    descendants = []
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.poll() is None:
            descendants = psutil.Process(process.pid).children(recursive=True)
    for candidate in (*descendants, *psutil.process_iter()):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if candidate in descendants or os.getsid(candidate.pid) == process.pid:
                candidate.kill()
    process.wait()


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _failure(rundir: RunDir, before: int, logged: dict[Path, int], status: int, log_path: Path) -> EvenerError:
    """The first failure, as its rank told it; else as torchrun or the kernel did."""
    failures = [event for event in rundir.events()[before:] if event["event"] == "failure"]
    if failures:
        first = failures[0]
        kind = getattr(errors, first["kind"], None)
        if isinstance(kind, type) and issubclass(kind, EvenerError):
            return kind(first["error"], hint=first["hint"])
        return RunError(
            f"rank {first['rank']}: {first['kind']}: {first['error']}", hint=_logs_hint(rundir, first["rank"])
        )
    logs = sorted(log_path.parent.glob("*.log"))  # a rank's own, and what came before it had one
    log = b"".join(path.read_bytes()[logged.get(path, 0) :] for path in logs).decode(errors="replace")
    told = re.search(r"^error: (.*)\n(?:hint:  (.*))?", log, re.MULTILINE)
    if told:
        return errors.UsageError(told[1], hint=told[2] or "")
    killed = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)
    code, rank = (int(killed[1]), int(killed[2])) if killed else (status, 0)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    rundir.add_event("failure", rank=rank, error=how, kind="exit", hint="")
    last = "\n".join(log.splitlines()[-LAST_LINES:]) if code > 0 else ""
    return RunError(f"rank {rank} {how}", hint=_logs_hint(rundir, rank), output=last)


def _logs_hint(rundir: RunDir, rank: int) -> str:
    paths = sorted((rundir.path / "logs").glob(f"*.{rank}.log"))
    place = f"its output is in {paths[0]}; " if paths else ""
    steps = rundir.checkpoint_steps()
    return place + (
        f"evener train --resume {rundir} goes on from step {steps[-1]}" if steps else "nothing was saved yet"
    )
