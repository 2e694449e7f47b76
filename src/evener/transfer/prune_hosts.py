"""Choose what the hosts of a fleet store of earlier runs and need no longer, and remove it.

    runs     ended longer ago than a limit, with all their results here
    trees    code and data that no remaining run reads, not sent or asked for since a day and the limit
    rest     content that no tree has, interrupted uploads

Never removed: a run that is active, that was started from elsewhere, or whose results are not all here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import CheckpointError, EvenerError, HostError
from evener.core.base.file_io import file_digest, lock_file
from evener.core.base.shell import quote_word
from evener.core.base.units import pluralize
from evener.core.run.run_plan import Plan, read_plan_if_present
from evener.core.run.rundir import RESUME_LOCK_FILE, RunDir, read_checkpoint
from evener.core.run.trust import is_foreign_run
from evener.ssh.session import RemoteError, Session
from evener.transfer.checkpoint_transfer import exclusive_lock
from evener.transfer.file_transfer import REMOTE_WORK_TIMEOUT_S
from evener.transfer.mirror import REPLACED_FILES, HostMirror, parse_state
from evener.transfer.script_outputs import unfetched_outputs

DAY_S = 86_400.0
DEFAULT_AGE_DAYS = 7.0  # assumption: a run is looked at, or resumed, within a week

StoredRunId = tuple[str, str, str]  # identifier of the run, name of the host in its plan, folder there


class StoredCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint on a host."""

    step: int
    val_loss: float | None
    digest: str  # of state.json, which holds the digests of the other files


class StoredRun(msgspec.Struct, frozen=True):
    """A run's folder on a host."""

    name: str
    folder: str
    id: str | None
    host: str | None  # the host's name in the run's plan
    bytes: int
    is_active: bool
    state: dict[str, Any]
    ended: float
    records: dict[str, int]  # path: bytes
    checkpoints: list[StoredCheckpoint]  # by step
    has_rank_state: bool
    trees: list[str]  # that it reads


class StoredTree(msgspec.Struct, frozen=True):
    """Code or data on a host."""

    tree: str
    bytes: int
    used: float  # when it was last sent or asked for


class HostStore(msgspec.Struct, frozen=True):
    """The runs, trees and other content that a host stores."""

    now: float  # the host's time
    runs: list[StoredRun]
    trees: list[StoredTree]
    rest_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all entries; content that several trees have counts for each."""
        return sum(run.bytes for run in self.runs) + sum(tree.bytes for tree in self.trees) + self.rest_bytes


_LOCK = threading.Lock()  # hosts are pruned by threads, and flock also conflicts within a process


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A run, a tree or the rest of a host's content, with the reason why it can be removed or must stay."""

    host: str
    kind: Literal["run", "tree", "rest"]
    name: str
    bytes: int
    why: str


class HostPruning(msgspec.Struct, frozen=True):
    """The entries that can be removed from a host, and the runs that must stay."""

    prunable: list[StoredEntry]
    kept: list[StoredEntry]


def known_runs(paths: Sequence[Path]) -> dict[StoredRunId, tuple[RunDir, Plan]]:
    """Return the runs in these run directories by their parts on hosts.

    Skip damaged ones, those that are not this user's, and parts that two run directories claim: one is a copy.
    """
    known: dict[StoredRunId, tuple[RunDir, Plan]] = {}
    claimed = set[StoredRunId]()
    for path in paths:
        rundir = RunDir(path)
        try:
            plan = read_plan_if_present(rundir)
        except EvenerError:  # reported by `evener runs`
            continue
        for host in plan.hosts if plan is not None else []:
            if plan is not None and host.run is not None:
                key = plan.id, host.name, host.run
                if key in claimed:
                    known.pop(key, None)
                elif not is_foreign_run(rundir):
                    known[key] = rundir, plan
                claimed.add(key)
    return known


def plan_pruning(
    session: Session,
    workdir: str,
    known: Mapping[StoredRunId, tuple[RunDir, Plan]],
    *,
    older_than_days: float | None = None,
    max_bytes: int | None = None,
) -> HostPruning:
    """Return what can be removed from a host: the oldest first and, with `max_bytes`, only until so much is left."""
    stored = session.call("prune", "list_stored", workdir=workdir, timeout_s=REMOTE_WORK_TIMEOUT_S)
    try:
        store = from_builtins(stored, HostStore)
    except msgspec.ValidationError as error:
        raise HostError(
            f"{session.name}: {workdir}: it sent an invalid list of runs: {error}",
            check="files.odd", host=session.name, hint="check that it is the host you expect",
        ) from None  # fmt: skip
    age_s = DAY_S * (DEFAULT_AGE_DAYS if older_than_days is None else older_than_days)
    left_bytes = store.total_bytes
    prunable, kept = list[StoredEntry](), list[StoredEntry]()

    def is_enough() -> bool:
        return max_bytes is not None and left_bytes <= max_bytes

    for run in sorted(store.runs, key=lambda run: run.ended):
        entry = StoredEntry(host=session.name, kind="run", name=run.name, bytes=run.bytes, why="")
        reason = None if is_enough() else _reason_to_keep(session, run, known, store.now - age_s)
        if reason is not None:
            kept.append(msgspec.structs.replace(entry, why=reason))
        elif not is_enough():
            why = f"ended {_format_days(store.now - run.ended)} ago, its results are here"
            prunable.append(msgspec.structs.replace(entry, why=why))
            left_bytes -= run.bytes
    pruned = {entry.name for entry in prunable}
    in_use = {tree for run in store.runs if run.name not in pruned for tree in run.trees}
    for tree in sorted(store.trees, key=lambda tree: tree.used):
        unused_s = store.now - tree.used
        if tree.tree in in_use or unused_s <= max(age_s, DAY_S) or is_enough():
            continue
        why = f"code or data that no run reads, unused for {_format_days(unused_s)}"
        prunable.append(StoredEntry(host=session.name, kind="tree", name=tree.tree, bytes=tree.bytes, why=why))
        left_bytes -= tree.bytes
    if store.rest_bytes and not is_enough():
        why = "content that nothing reads, interrupted uploads"
        prunable.append(StoredEntry(host=session.name, kind="rest", name="", bytes=store.rest_bytes, why=why))
    return HostPruning(prunable, kept)


def prune(session: Session, workdir: str, chosen: Sequence[StoredEntry]) -> tuple[int, dict[str, str]]:
    """Remove what was chosen; return the bytes that this freed, and {name: why} of what had to stay after all."""
    names: dict[str, list[str]] = {"run": [], "tree": [], "rest": []}
    for entry in chosen:
        names[entry.kind].append(entry.name)
    removed = session.call("prune", "remove_stored", workdir=workdir, runs=names["run"], trees=names["tree"],
                           timeout_s=REMOTE_WORK_TIMEOUT_S)  # fmt: skip
    return int(removed["freed_bytes"]), dict(removed["kept"])


def _format_days(seconds: float) -> str:
    return "less than a day" if seconds < DAY_S else pluralize(round(seconds / DAY_S), "day")


def _reason_to_keep(
    session: Session, run: StoredRun, known: Mapping[StoredRunId, tuple[RunDir, Plan]], before: float
) -> str | None:
    """Return why a run must stay on its host; None if it ended before `before` and its results are here."""
    if run.is_active:
        return "it is active"
    if run.ended > before:
        return "it ended recently"
    found = None if run.id is None or run.host is None else known.get((run.id, run.host, run.folder))
    if found is None:
        return "it was started from elsewhere, or its run directory is not here"
    rundir, plan = found
    try:
        with _LOCK, _not_resumed(rundir), exclusive_lock(rundir, None), exclusive_lock(rundir, None, "add.lock"):
            missing = _missing_result(session, run, rundir, plan)
    except BlockingIOError:
        return f"another terminal is fetching from {rundir}, resuming it, or adding a host to it"
    except (EvenerError, RemoteError, OSError) as error:
        return f"{rundir}: {error}"
    return missing


@contextlib.contextmanager
def _not_resumed(rundir: RunDir) -> Iterator[None]:
    """Keep others from resuming the run; raise BlockingIOError if one does."""
    path = rundir.inside(RESUME_LOCK_FILE)
    with lock_file(path, is_blocking=False) if path.exists() else contextlib.nullcontext():
        yield


def _missing_result(session: Session, run: StoredRun, rundir: RunDir, plan: Plan) -> str | None:
    """Return what of a run's results is on the host alone; None if all is here."""
    assert run.host is not None
    mirror, fetch = HostMirror(rundir, plan, run.host), f"evener fetch {quote_word(rundir)}"
    for path, num_bytes in run.records.items():
        local = mirror.local_path(path)  # None: of an earlier start, copied then
        if local is None:
            continue
        if not local.is_file() or (path not in REPLACED_FILES and local.stat().st_size < num_bytes):
            return f"its {path} is not here; {fetch}"
    if run.checkpoints and not _has_checkpoints(rundir, run.checkpoints):
        return f"its newest or best checkpoint is not here; {fetch}"
    if run.has_rank_state and not (rundir.is_run() and rundir.manifest().verdict == "finished"):
        own = quote_word(f"{run.folder}/own")
        return f"the per-rank state for an exact resume is only there; to give it up, on {run.host}: rm -r {own}"
    if files := unfetched_outputs(session, rundir, plan.host(run.host), parse_state(run.state)):
        return f"{files[0]}, which its script wrote, is not here; {fetch}"
    return None


def _has_checkpoints(rundir: RunDir, stored: Sequence[StoredCheckpoint]) -> bool:
    """Return whether the newest and the best checkpoint of a host, or newer and better ones, are here and intact."""
    local = []
    for step in rundir.checkpoint_steps():
        folder = rundir.checkpoint_path(step)
        try:
            val_loss = read_checkpoint(folder).val_loss
        except CheckpointError:
            continue
        local.append(StoredCheckpoint(step, val_loss, file_digest(folder / "state.json")))
    newest = stored[-1]
    if not local or not (local[-1] == newest or local[-1].step > newest.step):
        return False
    losses = [one.val_loss for one in stored if one.val_loss is not None]
    local_losses = [one.val_loss for one in local if one.val_loss is not None]
    return not losses or min(local_losses, default=float("inf")) <= min(losses)
