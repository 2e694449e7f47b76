"""How do a run's checkpoints come home from a fleet, and go out to it again when the run is resumed?

    while it is followed    Carrier   the newest, in a tenth of the time: what the training sends goes first
    at its end              bring     the newest and the best, as fast as it goes; `evener fetch` and `stop` do the same
    when it is resumed      restore   the one to go on from, to every host that does not have it whole

All of it can be cut off anywhere: a checkpoint is here whole or not at all, and what had arrived of it is not sent
again. Where one is damaged on its host, the one before it comes.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.decoding import from_tree
from evener.core.errors import CheckpointError, EvenerError, HostError, UsageError
from evener.core.files import digest_of
from evener.core.plan import HostPlan, Plan
from evener.core.rundir import RunDir, describe_checkpoint, read_checkpoint
from evener.core.runwriter import REMOVED, RunWriter
from evener.core.units import size
from evener.hosts.session import RemoteError, Session, Sessions, for_each, open_session
from evener.launch.mirror import host_failed, tell
from evener.launch.ship import WORK_S, fetch, send_to
from evener.launch.tree import pack

ARRIVED = ".arrived"  # ends the name of a checkpoint that came, and does not have its own yet
JOIN_S = 5.0  # for the piece that is on its way when a run ends
SHARE = 0.1  # of the time in which a checkpoint is under way while its run goes on


class Kept(msgspec.Struct, frozen=True):
    """A checkpoint that lies on a host."""

    step: int
    val_loss: float | None
    folder: str
    files: list[dict[str, Any]]  # as `files.survey` tells them


def bring(rundir: RunDir, plan: Plan, say: Callable[[str], None] = lambda text: None) -> list[int]:
    """Fetch the newest checkpoint and the best from the host that has them, where they are not here yet: the steps that
    came.

    HostError where it cannot be reached, UsageError where this machine cannot keep them.
    """
    if plan.hosts[0].is_here:
        return []
    with alone(rundir, say):
        return _bring(rundir, plan, say)


class Carrier:
    """Brings home what a run saves while it is followed. What goes wrong is left to `bring` at its end."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self._rundir, self._plan = rundir, plan
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Carrier:
        self._thread.start()
        return self

    def look(self) -> None:
        """A checkpoint was saved."""
        self._news.set()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._news.set()
        self._thread.join(JOIN_S)

    def _carry(self) -> None:
        if self._plan.hosts[0].is_here:
            return
        while self._news.wait() and not self._ended.is_set():
            self._news.clear()
            with contextlib.suppress(EvenerError, OSError, _EndedError), alone(self._rundir, None):
                if _bring(self._rundir, self._plan, lambda text: None, self._pause):
                    self._news.set()  # there may be another

    def _pause(self, took_s: float) -> None:
        if self._ended.wait(took_s * (1 / SHARE - 1)):
            raise _EndedError


class _EndedError(Exception):
    """The run has ended: what is left comes faster by `bring`."""


def _bring(rundir: RunDir, plan: Plan, say: Callable[[str], None],
           pause: Callable[[float], None] | None = None) -> list[int]:  # fmt: skip
    """What a run that goes on saves meanwhile comes as well; what goes meanwhile, or is damaged, is passed over. With
    `pause` one checkpoint at most.
    """
    first, came, passed_over = _who_has_the_newest(rundir, plan), list[int](), set[int]()
    assert first.run is not None
    with contextlib.closing(open_session(first.name, first.host)) as session:
        while not (pause and came):
            try:
                kept = from_tree(session.call("runs", "checkpoints", run=first.run), list[Kept])
            except RemoteError as error:
                raise host_failed(error, plan.fleet) from None
            left = [one for one in _wanted([one for one in kept if one.step not in passed_over])
                    if one.step not in came and not _is_whole(rundir, one.step)]  # fmt: skip
            if not left:
                break
            try:
                _take(rundir, session, left[0], say, pause)
                came.append(left[0].step)
                _tidy(rundir, plan)
            except HostError as error:
                if error.check not in ("files.changed", "files.gone", "files.odd"):
                    raise
                passed_over.add(left[0].step)
                shutil.rmtree(_store(rundir.checkpoint_path(left[0].step)), ignore_errors=True)
                if error.check != "files.gone":
                    say(f"{first.name}: {left[0].folder} is damaged; it is left there")
    return came


def _who_has_the_newest(rundir: RunDir, plan: Plan) -> HostPlan:
    """The first host; of a run that outlives its hosts, of those in its newest world that can be reached, the one that
    saved last.
    """
    if not plan.outlives_hosts:
        return plan.hosts[0]

    def newest(name: str) -> int:
        host = plan.host(name)
        try:
            with contextlib.closing(open_session(host.name, host.host)) as session:
                kept = from_tree(session.call("runs", "checkpoints", run=host.run), list[Kept])
        except (HostError, RemoteError):
            return -2
        return kept[-1].step if kept else -1

    members = rundir.manifest().roster.hosts if rundir.is_run() else [host.name for host in plan.hosts]
    steps = for_each(members, newest)
    return plan.host(max(steps, key=lambda name: steps[name]))


def _take(rundir: RunDir, session: Session, kept: Kept, say: Callable[[str], None],
          pause: Callable[[float], None] | None) -> None:  # fmt: skip
    """One checkpoint; a damaged one that is here makes way when its successor is whole."""
    here = rundir.checkpoint_path(kept.step)
    arrived = here.with_name(f".{here.name}{ARRIVED}")
    if any("to" in file for file in kept.files):
        raise HostError(
            f"{kept.folder}: holds more than files", check="files.odd", host=session.name, hint="look there"
        )
    say(f"bringing home {here.name} from {session.name}, {size(sum(file['size'] for file in kept.files))}")
    try:
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(arrived, ignore_errors=True)
        fetch(session, kept.folder, arrived, surveyed=kept.files, pause=pause)
        if here.exists():
            here.rename(here.with_name(f".{here.name}{REMOVED}"))
        arrived.rename(here)
    except OSError as error:
        raise UsageError(f"{here}: {error.strerror}", hint="make room, or see who may write there") from None


def _wanted(kept: list[Kept]) -> list[Kept]:
    """The newest and, if it is another one, the best."""
    losses = [(one.val_loss, one.step, one) for one in kept if one.val_loss is not None]
    best = [min(losses)[2]] if losses else []
    return kept[-1:] + [one for one in best if one is not kept[-1]]


def _is_whole(rundir: RunDir, step: int) -> bool:
    """Is it here, as it was written?"""
    try:
        read_checkpoint(rundir.checkpoint_path(step))
    except CheckpointError:
        return False
    return True


def _store(here: Path) -> Path:
    """Where `fetch` keeps what has arrived of it."""
    return here.with_name(f"..{here.name}{ARRIVED}.arriving")


def _tidy(rundir: RunDir, plan: Plan) -> None:
    """Keep here what the run itself would keep, and nothing of what never arrived."""
    losses = []
    for step in rundir.checkpoint_steps():
        with contextlib.suppress(CheckpointError):  # who wants this one hears of it
            losses.append((describe_checkpoint(rundir.checkpoint_path(step)).val_loss, step))
    best = min(((loss, step) for loss, step in losses if loss is not None), default=(None, None))[1]
    if spec := plan.spec or (rundir.manifest().spec if rundir.is_run() else None):
        RunWriter(rundir.path).prune_checkpoints(spec.checkpoint.keep, best)
    for store in rundir.checkpoints_path.glob(f"..*{ARRIVED}.arriving"):
        shutil.rmtree(store, ignore_errors=True)


@contextlib.contextmanager
def alone(rundir: RunDir, say: Callable[[str], None] | None, lock_name: str = "carry.lock") -> Iterator[None]:
    """Of all terminals that look at a run one fetches, and the others wait; None: BlockingIOError instead."""
    path = rundir.path / "hosts" / lock_name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say is None:
                raise
            say("another terminal is bringing it home; waiting until it has what it is at")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def restore(rundir: RunDir, plan: Plan, sessions: Sessions, step: int, say: Callable[[str], None]) -> None:
    """Put on every host of a run that is resumed what it has of it here: a host goes on from nothing of its own.

    Its own files may be those of an earlier start, after which the run went on elsewhere, to checkpoints of the same
    names.
    """
    checkpoint = rundir.checkpoint_path(step)
    parts = ["state.json", *read_checkpoint(checkpoint).files]
    wanted = digest_of(checkpoint / "state.json")

    damaged = list[str]()

    def put(name: str) -> None:
        host, session = plan.host(name), sessions[name]
        run = host.folder(rundir)
        ranks = range(host.first_rank, host.first_rank + host.num_ranks)
        paths = [rundir.manifest_path, rundir.log_path(name, None), rundir.vitals_path(name)]
        for rank in ranks:
            paths += [rundir.steps_path(rank), rundir.spans_path(rank), rundir.log_path(name, rank)]
        files = {path.relative_to(rundir.path).as_posix(): path for path in paths if path.exists()}
        try:
            found = session.call(
                "runs", "go_back", run=run, checkpoint=checkpoint.name, wanted=wanted, timeout_s=WORK_S
            )
            if found == "damaged":
                damaged.append(name)
            ours = {path: [file.size, file.digest] for path, file in pack(files).files.items()}
            lacking = session.call("runs", "lacking", run=run, files=ours, timeout_s=WORK_S)
            files = {path: files[path] for path in lacking}
            if found != "whole":
                files |= {f"checkpoints/{checkpoint.name}/{part}": checkpoint / part for part in parts}
            if files:
                arrived = send_to(session, host.host.workdir, pack(files))
                session.call("runs", "adopt", run=run, tree=arrived.path, timeout_s=WORK_S)
        except RemoteError as error:
            raise host_failed(error, plan.fleet) from None

    try:
        for_each([host.name for host in plan.hosts], put)
    finally:
        for name in damaged:
            error = f"{name}: its checkpoint of step {step} was damaged; the one at home takes its place"
            say(error)
            tell(rundir, plan, "checkpoint.damaged", host=name, step=step, error=error)
