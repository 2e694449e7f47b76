"""How do ranks begin in a world that their hosts have agreed on, and how do they leave it for another?

Every host keeps the checkpoints, and what was saved last any of them may have alone: a host that was away, or whose
disk is new, takes the newest one from who has it.
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
    """What a rank wishes after a step, for its News: another world, where a host waits to be let in or is to leave; or
    a checkpoint, which somebody asked for.
    """
    if group.is_in_world and group.local_rank == 0 and is_kept_out():
        return record.LEAVE
    if group.is_in_world and group.rank == 0 and somebody_waits():
        return record.REGROUP
    return record.SAVE if group.local_rank == 0 and (run / SAVE_FILE).is_file() else 0.0


def largest(told: Sequence[Roster]) -> Roster:
    """Of the Rosters of all hosts of a run, as ranks' launchers told them: that of most ranks. While a host is being
    added some have heard of it, and some have not.
    """
    return max(told, key=lambda roster: roster.world_size)


def newest_anywhere(rundir: RunWriter, group: Group) -> Checkpoint | None:
    """The newest whole checkpoint that any host has, which all have afterwards; None where there is none at all.

    Two hosts may have taken the same step in worlds that knew nothing of each other, and it rounded otherwise: all take
    the weights of the first. All ranks call it together.
    """
    mine = _newest_here(rundir) if group.local_rank == 0 else (-1, "")
    told = [from_json(text, tuple[int, str]) for text in group.gather(msgspec.json.encode(mine))]
    step = max(step for step, _ in told)
    if step < 0:
        return None
    source = next(rank for rank, one in enumerate(told) if one[0] == step)
    lacks = group.local_rank == 0 and mine != told[source]
    if any(group.gather(b"1" if lacks else b"")):
        _spread(rundir, group, step, source=source, lacks=lacks)
    return group.all_or_none(lambda: read_checkpoint(rundir.checkpoint_path(step)))


def _newest_here(rundir: RunWriter) -> tuple[int, str]:
    """(its step, the digest of its weights); a damaged one counts as none."""
    for step in reversed(rundir.checkpoint_steps()):
        try:
            return step, read_checkpoint(rundir.checkpoint_path(step)).files["weights.safetensors"]
        except CheckpointError as error:
            rundir.add_event("checkpoint.damaged", step=step, what=str(error))
    return -1, ""


def _spread(rundir: RunWriter, group: Group, step: int, *, source: int, lacks: bool) -> None:
    """Whoever lacks a checkpoint takes it from the rank that has it, and the manifest with it."""
    folder, is_source = rundir.checkpoint_path(step), group.rank == source
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())} if is_source else {}
    told = group.gather(msgspec.json.encode([sizes, rundir.manifest_path.read_text() if is_source else ""]))[source]
    sizes, manifest = from_json(told, tuple[dict[str, int], str])

    has_taken_part = False

    def write(place: Path | None) -> None:
        """Take part in handing it out; where there is a place, keep it there."""
        nonlocal has_taken_part
        refused, has_taken_part = None, True
        for name, size in sizes.items():
            path = folder / name if is_source else place / name if place is not None else None
            refused = _broadcast(path, size, group, source) or refused
        if refused is not None:
            raise refused

    failed = ""
    try:
        if lacks:
            rundir.checkpoints_path.mkdir(parents=True, exist_ok=True)
            if not rundir.is_run():
                write_atomic(rundir.manifest_path, manifest.encode())
            rundir.drop_checkpoint(step)
            forget_after(rundir, step - 1)  # what ranks here kept beside it
            write_folder_atomic(folder, write)
        else:
            write(None)
    except OSError as error:
        failed = f"{folder}: {error.strerror}"
        if not has_taken_part:
            write(None)
    for rank, text in enumerate(group.gather(failed.encode())):
        if text:
            number = group.numbers[rank]
            raise RunError(f"rank {number}: {text.decode()}", of_rank=None if rank == group.rank else number)


def _broadcast(path: Path | None, size: int, group: Group, source: int) -> OSError | None:
    """One file, from the source's to everybody's; None: it has it, or has no use for it. Whoever can't write it goes on
    all the same, for the others' sake, and returns why.
    """
    file, refused = None, None
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb" if group.rank == source else "wb")) if path is not None else None
        except OSError as error:
            refused = error
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            if file is not None and group.rank == source:
                chunk = torch.frombuffer(bytearray(file.read(len(chunk))), dtype=torch.uint8)
            dist.broadcast(chunk, src=source, group=group.control)
            if file is not None and group.rank != source and refused is None:
                try:
                    file.write(chunk.numpy().tobytes())
                except OSError as error:
                    refused = error
    return refused
