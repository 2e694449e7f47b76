"""Transfer a run's checkpoints: fetch them from the fleet, and restore them to it when the run is resumed.

    while a run is followed   CheckpointFetcher   the newest, in a tenth of the time: training traffic goes first
    at the run's end          fetch_checkpoints   the newest and the best, at full rate, as `evener fetch` and `stop` do
    when the run is resumed   restore_to_hosts    the one to resume from, to every host without an intact copy

Every transfer can be interrupted anywhere: a checkpoint is here completely or not at all, and the bytes that arrived
are not sent again. If a checkpoint is damaged on its host, the one before it is fetched.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import CheckpointError, EvenerError, HostError, UsageError
from evener.core.base.file_io import file_digest, lock_file, rename_durably
from evener.core.base.units import format_bytes
from evener.core.run.run_plan import HostPlan, Plan
from evener.core.run.rundir import RunDir, read_checkpoint, read_checkpoint_unverified
from evener.core.run.runwriter import RunWriter
from evener.ssh.session import RemoteError, Session, Sessions, open_run_session, parallel_map
from evener.transfer.file_transfer import REMOTE_WORK_TIMEOUT_S, FileFetcher, send_to_host
from evener.transfer.file_tree import describe_files
from evener.transfer.mirror import record_controller_event, to_host_error

PARTIAL_SUFFIX = ".arriving"  # of the folder in which a checkpoint arrives, until it is complete
JOIN_TIMEOUT_S = 5.0  # for the chunk in flight when a run ends
TRANSFER_DUTY_CYCLE = 0.1  # share of the time spent on transfers while the run is going on


class RemoteCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint on a host."""

    step: int
    val_loss: float | None
    folder: str
    files: list[dict[str, Any]]  # the form of `RemoteFile`


def fetch_checkpoints(rundir: RunDir, plan: Plan, notify: Callable[[str], None] = lambda text: None) -> list[int]:
    """Fetch the newest and the best checkpoint from the host that has them; return the steps that were fetched.

    HostError if it cannot be reached, UsageError if they cannot be written here.
    """
    if plan.hosts[0].is_local_run:
        return []
    with exclusive_lock(rundir, notify):
        return _fetch_missing(rundir, plan, notify)


class CheckpointFetcher:
    """Fetches checkpoints while a run is followed. Failures are left to `fetch_checkpoints` at its end."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self._rundir, self._plan = rundir, plan
        self._checkpoint_saved, self._run_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._fetch_loop, daemon=True)

    def __enter__(self) -> CheckpointFetcher:
        self._thread.start()
        return self

    def notify_checkpoint_saved(self) -> None:
        """Wake the fetcher: a checkpoint was saved."""
        self._checkpoint_saved.set()

    def __exit__(self, *_: object) -> None:
        self._run_ended.set()
        self._checkpoint_saved.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _fetch_loop(self) -> None:
        if self._plan.hosts[0].is_local_run:
            return
        while self._checkpoint_saved.wait() and not self._run_ended.is_set():
            self._checkpoint_saved.clear()
            with contextlib.suppress(EvenerError, OSError, _RunEndedError), exclusive_lock(self._rundir, None):
                if _fetch_missing(self._rundir, self._plan, lambda text: None, self._throttle):
                    self._checkpoint_saved.set()  # there may be a newer one

    def _throttle(self, took_s: float) -> None:
        if self._run_ended.wait(took_s * (1 / TRANSFER_DUTY_CYCLE - 1)):
            raise _RunEndedError


class _RunEndedError(Exception):
    """The run has ended: `fetch_checkpoints` fetches the rest faster."""


def _fetch_missing(rundir: RunDir, plan: Plan, notify: Callable[[str], None],
           throttle: Callable[[float], None] | None = None) -> list[int]:  # fmt: skip
    """Fetch checkpoints until none is missing, including those saved meanwhile; skip removed and damaged ones.

    With `throttle`, fetch at most one.
    """
    host, fetched, skipped = _host_with_newest(rundir, plan), list[int](), set[int]()
    with contextlib.closing(open_run_session(rundir, host)) as session:
        while not (throttle and fetched):
            try:
                saved = _list_checkpoints(session, host)
            except RemoteError as error:
                raise to_host_error(error, plan.fleet) from None
            wanted = _newest_and_best([one for one in saved if one.step not in skipped])
            pending = [one for one in wanted if one.step not in fetched and not is_intact(rundir, one.step)]
            if not pending:
                break
            try:
                _fetch_one(rundir, session, pending[0], notify, throttle)
                fetched.append(pending[0].step)
                _prune_local(rundir, plan)
            except HostError as error:
                if error.check not in ("files.changed", "files.gone", "files.odd"):
                    raise
                skipped.add(pending[0].step)
                shutil.rmtree(_partial_path(rundir, pending[0].step), ignore_errors=True)
                if error.check != "files.gone":
                    notify(f"{host.name}: {pending[0].folder} is damaged; it is not fetched")
    return fetched


def _host_with_newest(rundir: RunDir, plan: Plan) -> HostPlan:
    """Return the host to fetch from: the first one or, with dynamic membership, the reachable host of the newest epoch
    that has the newest checkpoint.
    """
    if not plan.has_dynamic_membership:
        return plan.hosts[0]

    def newest_step(name: str) -> int:
        host = plan.host(name)
        try:
            with contextlib.closing(open_run_session(rundir, host)) as session:
                saved = _list_checkpoints(session, host)
        except (HostError, RemoteError):
            return -2
        return saved[-1].step if saved else -1

    members = rundir.manifest().roster.hosts if rundir.is_run() else [host.name for host in plan.hosts]
    steps = parallel_map(members, newest_step)
    return plan.host(max(steps, key=lambda name: steps[name]))


def _list_checkpoints(session: Session, host: HostPlan) -> list[RemoteCheckpoint]:
    return from_builtins(session.call("run_control", "list_checkpoints", run=host.run), list[RemoteCheckpoint])


def _fetch_one(rundir: RunDir, session: Session, checkpoint: RemoteCheckpoint, notify: Callable[[str], None],
          throttle: Callable[[float], None] | None) -> None:  # fmt: skip
    """Fetch one checkpoint; replace a damaged copy here once the new one is complete."""
    target = rundir.checkpoint_path(checkpoint.step)
    partials = _partial_path(rundir, checkpoint.step)
    complete = rundir.inside("checkpoints", partials.name, "complete")
    try:
        fetcher = FileFetcher(session, checkpoint.folder, complete, partials, throttle)
        missing = fetcher.missing(checkpoint.files)
        total = format_bytes(sum(file["size"] for file in checkpoint.files))
        notify(f"fetching {target.name} from {session.name}, {total}")
        for file in missing:
            fetcher.fetch(file)
        RunWriter(rundir.path).drop_checkpoint(checkpoint.step)
        rename_durably(complete, target)
        shutil.rmtree(partials)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}", hint="make room, or see who may write there") from None


def _newest_and_best(saved: list[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
    """Return the newest checkpoint and, if it is another one, the best."""
    losses = [(one.val_loss, one.step, one) for one in saved if one.val_loss is not None]
    best = [min(losses)[2]] if losses else []
    return saved[-1:] + [one for one in best if one is not saved[-1]]


def is_intact(rundir: RunDir, step: int) -> bool:
    """Return whether the checkpoint is here and undamaged."""
    try:
        read_checkpoint(rundir.checkpoint_path(step))
    except CheckpointError:
        return False
    return True


def _partial_path(rundir: RunDir, step: int) -> Path:
    """Return the folder that holds a checkpoint until its transfer is complete."""
    return rundir.inside("checkpoints", f".{rundir.checkpoint_path(step).name}{PARTIAL_SUFFIX}")


def _prune_local(rundir: RunDir, plan: Plan) -> None:
    """Apply the run's own retention to the checkpoints here, and remove partial transfers."""
    losses = []
    for step in rundir.checkpoint_steps():
        with contextlib.suppress(CheckpointError):  # reported when it is used
            losses.append((read_checkpoint_unverified(rundir.checkpoint_path(step)).val_loss, step))
    best = min(((loss, step) for loss, step in losses if loss is not None), default=(None, None))[1]
    if spec := plan.spec or (rundir.manifest().spec if rundir.is_run() else None):
        RunWriter(rundir.path).prune_checkpoints(spec.checkpoint.keep, best)
    for partial in rundir.glob(f"checkpoints/.*{PARTIAL_SUFFIX}"):
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def exclusive_lock(
    rundir: RunDir, notify: Callable[[str], None] | None, lock_name: str = "carry.lock"
) -> Iterator[None]:
    """Hold a lock of a run, for one terminal at a time. With `notify` report and wait; else raise BlockingIOError."""
    path = rundir.inside("hosts", lock_name)
    try:
        lock = lock_file(path, is_blocking=False)
    except BlockingIOError:
        if notify is None:
            raise
        notify("another terminal is fetching from this run; waiting for it")
        lock = lock_file(path, is_blocking=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="see what is in its place, or who may write there") from None
    with lock:
        yield


def _host_records(rundir: RunDir, host: HostPlan) -> dict[str, Path]:
    """Return the copies here of the records and logs of a host's part of the run, by their path on the host."""
    paths = [rundir.manifest_path, rundir.log_path(host.name, None), rundir.vitals_path(host.name)]
    for rank in range(host.first_rank, host.first_rank + host.num_ranks):
        paths += [rundir.steps_path(rank), rundir.spans_path(rank), rundir.log_path(host.name, rank)]
    return {path.relative_to(rundir.path).as_posix(): path for path in paths if path.exists()}


def _install_files(session: Session, host: HostPlan, run: str, files: dict[str, Path]) -> None:
    """Send files, by their path in the run's folder on a host, and install them there."""
    if files:
        sent = send_to_host(session, host.host.workdir, describe_files(files))
        session.call("run_control", "install_tree", run=run, tree=sent.path, timeout_s=REMOTE_WORK_TIMEOUT_S)


def restore_records(rundir: RunDir, host: HostPlan, session: Session) -> None:
    """Send a host that lost its disk the copies of its records that are here, as it will append to them.

    Otherwise the mirror would replace the copies by the shorter files there.
    """
    files = _host_records(rundir, host)
    if host.events_path(rundir).exists():
        files["events.jsonl"] = host.events_path(rundir)
    _install_files(session, host, host.run_folder(rundir), files)


def restore_to_hosts(rundir: RunDir, plan: Plan, sessions: Sessions, step: int, notify: Callable[[str], None]) -> None:
    """Restore every host's part of a resumed run from the files here.

    A host's own files are not trusted: they may be of an earlier start, after which the run continued on other hosts
    and wrote checkpoints of the same names.
    """
    checkpoint = rundir.checkpoint_path(step)
    parts = ["state.json", *read_checkpoint(checkpoint).files]
    state_digest = file_digest(checkpoint / "state.json")

    damaged = list[str]()

    def put(name: str) -> None:
        host, session = plan.host(name), sessions[name]
        run = host.run_folder(rundir)
        files = _host_records(rundir, host)
        try:
            rollback = session.call(
                "run_control",
                "rollback_to_checkpoint",
                run=run,
                checkpoint=checkpoint.name,
                wanted=state_digest,
                timeout_s=REMOTE_WORK_TIMEOUT_S,
            )
            if rollback == "damaged":
                damaged.append(name)
            local_files = {path: [file.size, file.digest] for path, file in describe_files(files).files.items()}
            missing = session.call(
                "run_control", "find_differing_files", run=run, files=local_files, timeout_s=REMOTE_WORK_TIMEOUT_S
            )
            files = {path: files[path] for path in missing}
            if rollback != "whole":
                names = [f"checkpoints/{checkpoint.name}/{part}" for part in parts]
                files |= {name: rundir.inside(name) for name in names}
            _install_files(session, host, run, files)
        except RemoteError as error:
            raise to_host_error(error, plan.fleet) from None

    try:
        parallel_map([host.name for host in plan.hosts], put)
    finally:
        for name in damaged:
            error = f"{name}: its checkpoint of step {step} was damaged; the local copy replaces it"
            notify(error)
            record_controller_event(rundir, plan, "checkpoint.damaged", host=name, step=step, error=error)
