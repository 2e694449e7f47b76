"""Transfer a run's checkpoints: fetch them from the fleet, and restore them to it when the run is resumed.

    while it is followed    CheckpointFetcher   the newest, in a tenth of the time: training traffic goes first
    at its end              fetch_checkpoints   the newest and the best, at full rate, as `evener fetch` and `stop` do
    when it is resumed      restore_to_hosts    the one to resume from, to every host that lacks it or has it damaged

Every transfer can be interrupted anywhere: a checkpoint is here completely or not at all, and the bytes that arrived
are not sent again. If a checkpoint is damaged on its host, the one before it is fetched.
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

ARRIVED = ".arrived"  # of a fetched checkpoint's folder until it is renamed
JOIN_S = 5.0  # for the chunk in flight when a run ends
SHARE = 0.1  # share of the time spent on transfers while the run is going on


class Kept(msgspec.Struct, frozen=True):
    """A checkpoint on a host."""

    step: int
    val_loss: float | None
    folder: str
    files: list[dict[str, Any]]  # entries of `files.survey`


def bring(rundir: RunDir, plan: Plan, say: Callable[[str], None] = lambda text: None) -> list[int]:
    """Fetch the newest and the best checkpoint from the host that has them; return the steps that were fetched.

    HostError if it cannot be reached, UsageError if they cannot be written here.
    """
    if plan.hosts[0].is_here:
        return []
    with alone(rundir, say):
        return _bring(rundir, plan, say)


class Carrier:
    """Fetches checkpoints while a run is followed. Failures are left to `fetch_checkpoints` at its end."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self._rundir, self._plan = rundir, plan
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Carrier:
        self._thread.start()
        return self

    def look(self) -> None:
        """Wake the fetcher: a checkpoint was saved."""
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
                    self._news.set()  # there may be a newer one

    def _pause(self, took_s: float) -> None:
        if self._ended.wait(took_s * (1 / SHARE - 1)):
            raise _EndedError


class _EndedError(Exception):
    """The run has ended: `fetch_checkpoints` fetches the rest faster."""


def _bring(rundir: RunDir, plan: Plan, notify: Callable[[str], None],
           throttle: Callable[[float], None] | None = None) -> list[int]:  # fmt: skip
    """Fetch checkpoints until none is missing, including those saved meanwhile; skip removed and damaged ones.

    With `throttle`, at most one.
    """
    host, fetched, skipped = _who_has_the_newest(rundir, plan), list[int](), set[int]()
    assert host.run is not None
    with contextlib.closing(open_session(host.name, host.host)) as session:
        while not (throttle and fetched):
            try:
                saved = from_tree(session.call("runs", "checkpoints", run=host.run), list[Kept])
            except RemoteError as error:
                raise host_failed(error, plan.fleet) from None
            wanted = _wanted([one for one in saved if one.step not in skipped])
            pending = [one for one in wanted if one.step not in fetched and not _is_whole(rundir, one.step)]
            if not pending:
                break
            try:
                _take(rundir, session, pending[0], notify, throttle)
                fetched.append(pending[0].step)
                _tidy(rundir, plan)
            except HostError as error:
                if error.check not in ("files.changed", "files.gone", "files.odd"):
                    raise
                skipped.add(pending[0].step)
                shutil.rmtree(_store(rundir.checkpoint_path(pending[0].step)), ignore_errors=True)
                if error.check != "files.gone":
                    notify(f"{host.name}: {pending[0].folder} is damaged; it is not fetched")
    return fetched


def _who_has_the_newest(rundir: RunDir, plan: Plan) -> HostPlan:
    """Return the first host; in a run that outlives its hosts, the reachable host of the newest epoch with the newest
    checkpoint.
    """
    if not plan.outlives_hosts:
        return plan.hosts[0]

    def newest_step(name: str) -> int:
        host = plan.host(name)
        try:
            with contextlib.closing(open_session(host.name, host.host)) as session:
                saved = from_tree(session.call("runs", "checkpoints", run=host.run), list[Kept])
        except (HostError, RemoteError):
            return -2
        return saved[-1].step if saved else -1

    members = rundir.manifest().roster.hosts if rundir.is_run() else [host.name for host in plan.hosts]
    steps = for_each(members, newest_step)
    return plan.host(max(steps, key=lambda name: steps[name]))


def _take(rundir: RunDir, session: Session, checkpoint: Kept, notify: Callable[[str], None],
          throttle: Callable[[float], None] | None) -> None:  # fmt: skip
    """Fetch one checkpoint; replace a damaged copy here once the new one is complete."""
    target = rundir.checkpoint_path(checkpoint.step)
    staged = target.with_name(f".{target.name}{ARRIVED}")
    if any("to" in file for file in checkpoint.files):
        raise HostError(
            f"{checkpoint.folder}: contains links", check="files.odd", host=session.name, hint="look at it there"
        )
    notify(f"fetching {target.name} from {session.name}, {size(sum(file['size'] for file in checkpoint.files))}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        fetch(session, checkpoint.folder, staged, surveyed=checkpoint.files, pause=throttle)
        if target.exists():
            target.rename(target.with_name(f".{target.name}{REMOVED}"))
        staged.rename(target)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}", hint="make room, or see who may write there") from None


def _wanted(saved: list[Kept]) -> list[Kept]:
    """Return the newest checkpoint and, if it is another one, the best."""
    losses = [(one.val_loss, one.step, one) for one in saved if one.val_loss is not None]
    best = [min(losses)[2]] if losses else []
    return saved[-1:] + [one for one in best if one is not saved[-1]]


def _is_whole(rundir: RunDir, step: int) -> bool:
    """Return whether the checkpoint is here and undamaged."""
    try:
        read_checkpoint(rundir.checkpoint_path(step))
    except CheckpointError:
        return False
    return True


def _store(target: Path) -> Path:
    """Return where `fetch` keeps a partial transfer of a checkpoint."""
    return target.with_name(f"..{target.name}{ARRIVED}.arriving")


def _tidy(rundir: RunDir, plan: Plan) -> None:
    """Apply the run's own retention to the checkpoints here, and remove partial transfers."""
    losses = []
    for step in rundir.checkpoint_steps():
        with contextlib.suppress(CheckpointError):  # reported when it is used
            losses.append((describe_checkpoint(rundir.checkpoint_path(step)).val_loss, step))
    best = min(((loss, step) for loss, step in losses if loss is not None), default=(None, None))[1]
    if spec := plan.spec or (rundir.manifest().spec if rundir.is_run() else None):
        RunWriter(rundir.path).prune_checkpoints(spec.checkpoint.keep, best)
    for partial in rundir.checkpoints_path.glob(f"..*{ARRIVED}.arriving"):
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def alone(rundir: RunDir, say: Callable[[str], None] | None, lock_name: str = "carry.lock") -> Iterator[None]:
    """Hold a lock of a run, so that one terminal at a time fetches. `notify` None: do not wait (BlockingIOError)."""
    path = rundir.path / "hosts" / lock_name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say is None:
                raise
            say("another terminal is fetching from this run; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def restore(rundir: RunDir, plan: Plan, sessions: Sessions, step: int, say: Callable[[str], None]) -> None:
    """Restore every host's part of a resumed run from the files here.

    A host's own files are not trusted: they may be of an earlier start, after which the run continued on other hosts
    and wrote checkpoints of the same names.
    """
    checkpoint = rundir.checkpoint_path(step)
    parts = ["state.json", *read_checkpoint(checkpoint).files]
    state_digest = digest_of(checkpoint / "state.json")

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
            rollback = session.call(
                "runs", "go_back", run=run, checkpoint=checkpoint.name, wanted=state_digest, timeout_s=WORK_S
            )
            if rollback == "damaged":
                damaged.append(name)
            local_files = {path: [file.size, file.digest] for path, file in pack(files).files.items()}
            missing = session.call("runs", "lacking", run=run, files=local_files, timeout_s=WORK_S)
            files = {path: files[path] for path in missing}
            if rollback != "whole":
                files |= {f"checkpoints/{checkpoint.name}/{part}": checkpoint / part for part in parts}
            if files:
                sent = send_to(session, host.host.workdir, pack(files))
                session.call("runs", "adopt", run=run, tree=sent.path, timeout_s=WORK_S)
        except RemoteError as error:
            raise host_failed(error, plan.fleet) from None

    try:
        for_each([host.name for host in plan.hosts], put)
    finally:
        for name in damaged:
            error = f"{name}: its checkpoint of step {step} was damaged; the local copy replaces it"
            say(error)
            tell(rundir, plan, "checkpoint.damaged", host=name, step=step, error=error)
