"""Start ranks in a membership epoch with the newest checkpoint of all hosts, and collect regroup and checkpoint
requests.

Every host keeps checkpoints, and the newest one may be on any single host: a host that was away, or whose disk is new,
copies the newest from one that has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from evener.core.base.errors import CheckpointError, RunError
from evener.core.base.file_io import create_file, open_file, read_file, write_atomic, write_folder_atomic
from evener.core.run.membership_epoch import CHECKPOINT_REQUEST_FILE, has_waiting_hosts, is_host_excluded
from evener.core.run.roster import Roster
from evener.core.run.rundir import Checkpoint, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.stop_signals import StopRequest
from evener.worker.state.rank_state import delete_rank_states_after

CHUNK_BYTES = 1 << 24


def current_stop_request(group: ProcessGroups, run: Path) -> StopRequest:
    """Return what this rank requests in its StepReport after a step.

    LEAVE if its host is to leave, REGROUP if hosts wait to join, SAVE if the user requests a checkpoint, else NONE.
    """
    if group.has_dynamic_membership and group.local_rank == 0 and is_host_excluded():
        return StopRequest.LEAVE
    if group.has_dynamic_membership and group.rank == 0 and has_waiting_hosts():
        return StopRequest.REGROUP
    is_save_requested = group.local_rank == 0 and (run / CHECKPOINT_REQUEST_FILE).is_file()
    return StopRequest.SAVE if is_save_requested else StopRequest.NONE


def largest_roster(rosters: Sequence[Roster]) -> Roster:
    """Return the Roster with the most ranks, given those that the launchers of all hosts have written.

    While a host is being added some launchers know of it and some do not.
    """
    return max(rosters, key=lambda roster: roster.world_size)


def replicate_newest_checkpoint(rundir: RunWriter, group: ProcessGroups) -> Checkpoint | None:
    """Copy the newest intact checkpoint that any host has to all hosts and return it; None if there is none.

    Two hosts may have saved the same step in different epochs, with different rounding: all hosts then get the
    checkpoint of the first one. All ranks call it together.
    """
    own = _newest_local_checkpoint(rundir) if group.local_rank == 0 else (-1, "")
    newest = group.all_gather(own, tuple[int, str])
    step = max(step for step, _ in newest)
    if step < 0:
        return None
    source = next(rank for rank, entry in enumerate(newest) if entry[0] == step)
    is_missing = group.local_rank == 0 and own != newest[source]
    if group.any_rank(is_missing):
        _broadcast_checkpoint(rundir, group, step, source=source, is_missing=is_missing)
    return group.run_or_raise_on_all(lambda: read_checkpoint(rundir.checkpoint_path(step)))


def _newest_local_checkpoint(rundir: RunWriter) -> tuple[int, str]:
    """Return (step, identity) of the newest local checkpoint; a damaged one is skipped.

    Two are the same if they have the same weights, and ranks that start from them do the same.
    """
    for step in reversed(rundir.checkpoint_steps()):
        try:
            found = read_checkpoint(rundir.checkpoint_path(step))
            digest = found.files["weights.safetensors"]
            return step, f"{digest} {found.sync} {found.bucket_bytes} {found.is_strategy_on_trial}"
        except CheckpointError as error:
            rundir.add_event("checkpoint.damaged", step=step, what=str(error))
    return -1, ""


def _broadcast_checkpoint(rundir: RunWriter, group: ProcessGroups, step: int, *, source: int, is_missing: bool) -> None:
    """Copy a checkpoint and the manifest from the source to all hosts that lack them."""
    folder, is_source = rundir.checkpoint_path(step), group.rank == source
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())} if is_source else {}
    header = (sizes, read_file(rundir.manifest_path).decode() if is_source else "")
    sizes, manifest = group.all_gather(header, tuple[dict[str, int], str])[source]

    has_taken_part = False

    def write(directory: Path | None) -> None:
        """Take part in the broadcast of the files; write them to `directory`, if given."""
        nonlocal has_taken_part
        failure, has_taken_part = None, True
        for name, size in sizes.items():
            path = folder / name if is_source else directory / name if directory is not None else None
            failure = _broadcast_file(path, size, group, source) or failure
        if failure is not None:
            raise failure

    message = ""
    try:
        if is_missing:
            if not rundir.is_run():
                write_atomic(rundir.manifest_path, manifest.encode())
            rundir.drop_checkpoint(step)
            delete_rank_states_after(rundir, step - 1)  # rank states that local ranks saved with it
            write_folder_atomic(folder, write)
        else:
            write(None)
    except OSError as error:
        message = f"{folder}: {error.strerror}"
        if not has_taken_part:
            write(None)
    for rank, text in enumerate(group.all_gather(message, str)):
        if text:
            number = group.member_ranks[rank]
            raise RunError(f"rank {number}: {text}", failed_rank=None if rank == group.rank else number)


def _broadcast_file(path: Path | None, size: int, group: ProcessGroups, source: int) -> OSError | None:
    """Broadcast one file from the source; `path` is None on ranks that do not need it.

    A rank that cannot write it still takes part in the broadcast, or the others would hang, and returns the error.
    """
    file, failure = None, None
    with contextlib.ExitStack() as stack:
        try:
            if path is not None:
                file = stack.enter_context(open_file(path) if group.rank == source else create_file(path))
        except OSError as error:
            failure = error
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if file is not None and group.rank == source:
                chunk = torch.frombuffer(bytearray(file.read(len(chunk))), dtype=torch.uint8)
            dist.broadcast(chunk, src=source, group=group.control_group)
            if file is not None and group.rank != source and failure is None:
                try:
                    file.write(chunk.numpy().tobytes())
                except OSError as error:
                    failure = error
    return failure
