"""Per-rank state: save and load, on each rank's own host, what one rank alone must keep to resume bit for bit.

    RUN/own/rank-1/step-000100.safetensors    tensors by name; the tree of the state in the file's metadata

Rank 0's checkpoint contains everything that replicas have in common. Per-rank state, such as the residuals of a codec,
is as large as the model: it is not sent, but stays on the rank's host. A run that resumes with the same ranks resumes
bit for bit. The state of a rank that has left, or has another number, goes to the first rank of its host: any rank may
send the residuals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from evener.core.base.decoding import from_json
from evener.core.base.errors import CheckpointError, RunError
from evener.core.base.file_io import fsync_path, make_folder, rename_durably
from evener.core.run.rundir import RunDir
from evener.worker.state.checkpoint import write_safetensors
from evener.worker.state.state_serialization import flatten_state, unflatten_state

NUM_SAVED_STATES = 2  # the newest ones: one more than needed, since a rank may die while rank 0 writes its checkpoint


def save_rank_state(rundir: RunDir, rank: int, step: int, state: dict[str, Any]) -> None:
    """Save this rank's state of a step; raise RunError if the disk refuses."""
    folder = rank_folder(rundir, rank)
    try:
        write_state_file(_path(folder, step), state)
        for old in sorted(folder.glob("step-*.safetensors"))[:-NUM_SAVED_STATES]:
            old.unlink()
    except (OSError, SafetensorError) as error:  # a full disk raises either
        why = error.strerror if isinstance(error, OSError) else str(error)
        hint = "the last complete checkpoint is untouched; --resume continues from it"
        raise RunError(f"{folder}: {why}", hint=hint) from None


def write_state_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically and durably. Raise OSError or SafetensorError if the disk refuses."""
    tree, tensors = flatten_state(state, "own")
    unfinished = path.with_suffix(".unfinished")
    make_folder(path.parent)
    try:
        write_safetensors(unfinished, tensors, {"state": msgspec.json.encode(tree).decode()})
        fsync_path(unfinished)
        rename_durably(unfinished, path)
    except (OSError, SafetensorError):
        unfinished.unlink(missing_ok=True)
        raise


def load_rank_state(rundir: RunDir, rank: int, step: int) -> dict[str, Any] | None:
    """Load a rank's state after `step` steps; return None if this host has none."""
    path = _path(rank_folder(rundir, rank), step)
    return read_state_file(path) if path.is_file() else None


def read_state_file(path: Path) -> dict[str, Any]:
    """Read what `write_state_file` wrote. CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            state: dict[str, Any] = unflatten_state(from_json(file.metadata()["state"], dict[str, Any]), tensors)
    except (SafetensorError, msgspec.MsgspecError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{path}: damaged: {error}", hint="delete it, and the run resumes without it") from None
    return state


def delete_rank_states_after(rundir: RunDir, step: int) -> None:
    """Delete per-rank states of steps after `step`: a run that rolls back to it takes these steps again."""
    for path in rundir.glob("own/*/step-*.safetensors"):
        if path.name > _name(step):
            path.unlink(missing_ok=True)


def ranks_with_state(rundir: RunDir, step: int) -> list[int]:
    """Return the ranks whose state of this step is on this host."""
    matches = (re.fullmatch(r"rank-(\d+)", path.parent.name) for path in rundir.glob(f"own/*/{_name(step)}"))
    return sorted(int(match[1]) for match in matches if match)


def assign_orphaned_states(member_ranks: Sequence[int], available: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each rank, the numbers whose orphaned states it loads besides its own state.

    A state is orphaned if the rank with its number has left, or no longer has it on its host. The first rank that has
    it on its host gets it. `member_ranks`: the number of each rank; `available`: for each rank, `ranks_with_state` on
    its host.

    >>> assign_orphaned_states([0, 1], [[0, 1, 2], [0, 1, 2]])  # on one machine: one rank less
    [[2], []]
    >>> assign_orphaned_states([0, 1], [[1], [2]])  # on two of three machines
    [[1], [2]]
    """
    owned = {number for number, on_host in zip(member_ranks, available, strict=True) if number in on_host}
    assigned: list[list[int]] = [[] for _ in member_ranks]
    for number in sorted({number for on_host in available for number in on_host} - owned):
        assigned[next(rank for rank, on_host in enumerate(available) if number in on_host)].append(number)
    return assigned


def rank_folder(rundir: RunDir, rank: int) -> Path:
    """Return the folder of a rank's own state."""
    return rundir.inside("own", f"rank-{rank}")


def _path(folder: Path, step: int) -> Path:
    return folder / _name(step)


def _name(step: int) -> str:
    return f"step-{step:06d}.safetensors"
