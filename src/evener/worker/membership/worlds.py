"""Start ranks in a membership epoch with the newest checkpoint of all hosts, and collect regroup and checkpoint
requests.

Every host keeps checkpoints, and the newest one may be on any single host: a host that was away, or whose disk is new,
copies the newest from one that has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from evener.core.decoding import from_json
from evener.core.errors import CheckpointError, RunError
from evener.core.files import write_atomic, write_folder_atomic
from evener.core.roster import Roster
from evener.core.rundir import Checkpoint, read_checkpoint
from evener.core.runwriter import RunWriter
from evener.core.world import SAVE_FILE, is_kept_out, somebody_waits
from evener.worker import record
from evener.worker.group import Group
from evener.worker.own import forget_after

CHUNK_BYTES = 1 << 24


def wish(group: Group, run: Path) -> float:
    """Return this rank's request after a step, for its StepReport: a regroup, where a host waits to join or is to
    leave, or a checkpoint.
    """
    if group.is_in_world and group.local_rank == 0 and is_kept_out():
        return record.LEAVE
    if group.is_in_world and group.rank == 0 and somebody_waits():
        return record.REGROUP
    return record.SAVE if group.local_rank == 0 and (run / SAVE_FILE).is_file() else 0.0


def largest(told: Sequence[Roster]) -> Roster:
    """Return the Roster with the most ranks, given those that the launchers of all hosts have written.

    While a host is being added some launchers know of it and some do not.
    """
    return max(told, key=lambda roster: roster.world_size)


def newest_anywhere(rundir: RunWriter, group: Group) -> Checkpoint | None:
    """Copy the newest intact checkpoint that any host has to all hosts and return it; None if there is none.

    Two hosts may have taken the same step in epochs without contact, with different rounding: all take the weights of
    the first. All ranks call it together.
    """
    own = _newest_here(rundir) if group.local_rank == 0 else (-1, "")
    newest = [from_json(text, tuple[int, str]) for text in group.gather(msgspec.json.encode(own))]
    step = max(step for step, _ in newest)
    if step < 0:
        return None
    source = next(rank for rank, entry in enumerate(newest) if entry[0] == step)
    is_missing = group.local_rank == 0 and own != newest[source]
    if any(group.gather(b"1" if is_missing else b"")):
        _spread(rundir, group, step, source=source, lacks=is_missing)
    return group.all_or_none(lambda: read_checkpoint(rundir.checkpoint_path(step)))


def _newest_here(rundir: RunWriter) -> tuple[int, str]:
    """Return (step, digest of its weights) of the newest local checkpoint; a damaged one is skipped."""
    for step in reversed(rundir.checkpoint_steps()):
        try:
            return step, read_checkpoint(rundir.checkpoint_path(step)).files["weights.safetensors"]
        except CheckpointError as error:
            rundir.add_event("checkpoint.damaged", step=step, what=str(error))
    return -1, ""


def _spread(rundir: RunWriter, group: Group, step: int, *, source: int, lacks: bool) -> None:
    """Copy a checkpoint and the manifest from the source to all hosts that lack them."""
    folder, is_source = rundir.checkpoint_path(step), group.rank == source
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())} if is_source else {}
    header = group.gather(msgspec.json.encode([sizes, rundir.manifest_path.read_text() if is_source else ""]))[source]
    sizes, manifest = from_json(header, tuple[dict[str, int], str])

    has_taken_part = False

    def write(directory: Path | None) -> None:
        """Take part in the broadcast of the files; write them to `directory`, if given."""
        nonlocal has_taken_part
        failure, has_taken_part = None, True
        for name, size in sizes.items():
            path = folder / name if is_source else directory / name if directory is not None else None
            failure = _broadcast(path, size, group, source) or failure
        if failure is not None:
            raise failure

    message = ""
    try:
        if lacks:
            rundir.checkpoints_path.mkdir(parents=True, exist_ok=True)
            if not rundir.is_run():
                write_atomic(rundir.manifest_path, manifest.encode())
            rundir.drop_checkpoint(step)
            forget_after(rundir, step - 1)  # rank states that local ranks saved with it
            write_folder_atomic(folder, write)
        else:
            write(None)
    except OSError as error:
        message = f"{folder}: {error.strerror}"
        if not has_taken_part:
            write(None)
    for rank, text in enumerate(group.gather(message.encode())):
        if text:
            number = group.numbers[rank]
            raise RunError(f"rank {number}: {text.decode()}", of_rank=None if rank == group.rank else number)


def _broadcast(path: Path | None, size: int, group: Group, source: int) -> OSError | None:
    """Broadcast one file from the source; `path` is None on ranks that do not need it.

    A rank that cannot write it still takes part, for the sake of the others, and returns the error.
    """
    file, failure = None, None
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb" if group.rank == source else "wb")) if path is not None else None
        except OSError as error:
            failure = error
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if file is not None and group.rank == source:
                chunk = torch.frombuffer(bytearray(file.read(len(chunk))), dtype=torch.uint8)
            dist.broadcast(chunk, src=source, group=group.control)
            if file is not None and group.rank != source and failure is None:
                try:
                    file.write(chunk.numpy().tobytes())
                except OSError as error:
                    failure = error
    return failure
