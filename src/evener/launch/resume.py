"""What a resumed run keeps of its previous start: hosts, order of ranks, spec, sync strategy, buckets and prediction.

A resumed run continues from its newest checkpoint. Its result should be the one that it would have had without the
stop, so everything that decides the order of summation is kept, unless the user asks for other hosts or settings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import msgspec

from evener.core.base.errors import CheckpointError, EvenerError, HostError, NoRoomError, RunError, UsageError
from evener.core.base.file_io import lock_file, open_file
from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import DEFAULT_FLEET, Fleet, load_fleet
from evener.core.cluster.host_info import local_host_info
from evener.core.run.prediction import Prediction
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import NO_SYNC, RankSlot, Roster, SyncSpec, requested_sync
from evener.core.run.run_plan import Plan, read_plan_if_present
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RESUME_LOCK_FILE, RunDir, read_checkpoint_unverified
from evener.launch import launcher
from evener.launch.launcher import Notify
from evener.transfer.checkpoint_transfer import fetch_checkpoints


@contextlib.contextmanager
def lock_resume(rundir: RunDir) -> Iterator[None]:
    """Lock a run while it is being resumed. RunError names the host and process that resume it already."""
    if not rundir.path.is_dir():  # reported by whoever reads it
        yield
        return
    path, holder = rundir.inside(RESUME_LOCK_FILE), "another process"
    try:
        lock = lock_file(path, is_blocking=False)
        while not _is_file_at(path, lock):  # its last holder has just removed it
            lock.close()
            lock = lock_file(path, is_blocking=False)
    except BlockingIOError:
        with contextlib.suppress(OSError), open_file(path) as held:
            holder = held.read(1000).decode(errors="replace").strip() or holder
        raise RunError(
            f"{rundir}: {holder} is resuming it", hint=f"evener logs -f {quote_word(rundir)} follows it"
        ) from None
    except OSError as error:
        raise NoRoomError.from_os_error(error) or UsageError(f"{path}: {error.strerror}") from None
    with lock:
        lock.truncate(0)
        lock.write(f"{local_host_info().host} (pid {os.getpid()})\n".encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_file_at(path: Path, file: FileIO) -> bool:
    """Return whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


class ResumedRun:
    """A run that is resumed, and the plan of its previous start."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self.plan: Plan | None = read_plan_if_present(rundir)  # None: a worker that was started by hand

    def fleet(self) -> Fleet | None:
        """Return the hosts of the previous start, with the measurements in fleet.toml; None: this machine alone."""
        if self.plan is None or self.plan.is_local_run:
            return None
        fleet = self.plan.fleet
        with contextlib.suppress(EvenerError):
            known = load_fleet(DEFAULT_FLEET)
            if fleet.hosts.items() <= known.hosts.items():
                fleet = msgspec.structs.replace(fleet, link=known.link, links=known.links, rates=known.rates)
        return fleet

    def fetch_spec(self, notify: Notify) -> RunSpec:
        """Fetch the run's records and newest checkpoint; return the run's spec. UsageError if the run still runs."""
        rundir, plan = self.rundir, self.plan
        if plan is None:
            return msgspec.structs.replace(rundir.manifest().spec, out=str(rundir))
        if plan.spec is None:
            problem = f"{rundir}: a program of your own, which evener cannot resume"
            raise UsageError(problem, hint="start it anew, with evener launch")
        for name, state in launcher.query_states(rundir, plan).items():
            if not isinstance(state, HostError) and state["state"] == "running":
                pid = f" (pid {state['supervisor']})" if state.get("supervisor") else ""
                raise UsageError(
                    f"{rundir}: still running on {name}{pid}",
                    hint=f"evener logs -f {quote_word(rundir)}, or evener stop {quote_word(rundir)}",
                )
        launcher.mirror_once(rundir, plan)
        try:
            fetch_checkpoints(rundir, plan, notify)
        except HostError as error:
            notify(f"warning: {error}; resuming from the newest checkpoint on this machine")
        return msgspec.structs.replace(plan.spec, out=str(rundir))

    def with_previous_sync(self, resolved: ResolvedRun) -> ResolvedRun:
        """Replace `--sync auto` by the strategy that the newest checkpoint belongs to."""
        train, (had, _) = resolved.spec.train, self._previous_strategy()
        if train.sync != "auto" or had == NO_SYNC:
            return resolved
        spec = msgspec.structs.replace(resolved.spec, train=msgspec.structs.replace(train, sync=str(had)))
        return msgspec.structs.replace(resolved, spec=spec)

    def with_previous_buckets(self, roster: Roster) -> Roster:
        """Return the roster with the run's previous bucket size, as another would change the order of summation."""
        had, bucket_bytes = self._previous_strategy()
        return roster if had != roster.sync else msgspec.structs.replace(roster, bucket_bytes=bucket_bytes)

    def _previous_strategy(self) -> tuple[SyncSpec, int]:
        """Return the sync strategy and bucket size of the newest checkpoint, else those of the run's last roster."""
        for step in self.rundir.checkpoint_steps()[-1:]:
            with contextlib.suppress(CheckpointError):
                checkpoint = read_checkpoint_unverified(self.rundir.checkpoint_path(step))
                if checkpoint.sync != NO_SYNC:
                    return checkpoint.sync, checkpoint.bucket_bytes
        had = self.rundir.manifest().roster
        return had.sync, had.bucket_bytes

    def prediction(self, fleet: Fleet, resolved: ResolvedRun, slots: Sequence[RankSlot]) -> Prediction | None:
        """Return the run's previous prediction if neither the work, the hosts nor their measurements have changed."""
        if self.plan is None or self.plan.prediction is None or fleet.rates:
            return None
        prediction, spec, was = self.plan.prediction, resolved.spec, self.plan.spec
        assert was is not None, "a script of the user's own is not resumed"
        is_same_sync = prediction.option(prediction.chosen).roster.sync in (NO_SYNC, requested_sync(spec))
        is_same_work = (spec.data, spec.model, spec.machine, spec.train.batch, spec.train.micro_batch) == (
            was.data, was.model, was.machine, was.train.batch, was.train.micro_batch
        )  # fmt: skip
        had = [(slot.host, slot.device) for slot in prediction.cluster.slots]
        are_same_slots = had == [(slot.host, slot.device) for slot in slots]
        return prediction if is_same_sync and is_same_work and are_same_slots else None
