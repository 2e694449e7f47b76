"""What does one rank alone remember, and where is it kept? Where it trains, beside the checkpoints that rank 0 writes.

    RUN/own/rank-1/step-000100.safetensors    tensors by name; the tree of the state in the file's metadata

Rank 0's checkpoint holds all that replicas have in common. What is a rank's own, such as gradients that a code has not
sent yet, is as large as the model: it does not travel, but stays on the rank's machine. A run that goes on with the
same ranks goes on bit for bit. Ranks that are no more, or have another number, leave theirs to the first rank of their
machine: what had not been sent yet of gradients any rank may send.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from evener.core.decoding import from_json
from evener.core.errors import CheckpointError, RunError
from evener.core.files import sync
from evener.core.rundir import RunDir
from evener.worker.checkpoint import write_tensors
from evener.worker.statetree import pack, unpack

KEPT = 2  # newest: one more than is needed, for a rank may die while rank 0 writes its checkpoint


def save_own(rundir: RunDir, rank: int, step: int, state: dict[str, Any]) -> None:
    """Keep this rank's state of a step; RunError where the disk refuses."""
    folder = _folder(rundir, rank)
    tree, tensors = pack(state, "own")
    path = _path(folder, step)
    unfinished = path.with_suffix(".unfinished")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(unfinished, tensors, {"state": msgspec.json.encode(tree).decode()})
        sync(unfinished)
        unfinished.replace(path)
        for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
            old.unlink()
    except (OSError, SafetensorError) as error:  # a full disk is either
        unfinished.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"{folder}: {why}", hint="the last complete checkpoint is untouched; --resume goes on") from None


def load_own(rundir: RunDir, rank: int, step: int) -> dict[str, Any] | None:
    """What a rank remembered after so many steps; None where it left nothing here."""
    path = _path(_folder(rundir, rank), step)
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            state: dict[str, Any] = unpack(from_json(file.metadata()["state"], dict[str, Any]), tensors)
    except (SafetensorError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}", hint="removed, the run goes on without it") from None
    return state


def forget_after(rundir: RunDir, step: int) -> None:
    """What ranks remembered of later steps, which a run that goes back to this one takes again, is not so any more."""
    for path in (rundir.path / "own").glob("*/step-*.safetensors"):
        if path.name > _name(step):
            path.unlink(missing_ok=True)


def ranks_that_kept(rundir: RunDir, step: int) -> list[int]:
    """Ranks whose own state of this step is here."""
    found = (re.fullmatch(r"rank-(\d+)", path.parent.name) for path in (rundir.path / "own").glob(f"*/{_name(step)}"))
    return sorted(int(name[1]) for name in found if name)


def heirs(numbers: Sequence[int], seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Whose own state each rank takes up beside its own, by place: that of ranks that are no more, or have another
    number, goes to the first rank that sees it. `numbers`: the ranks'; `seen`: by ranks_that_kept, what each sees.

    >>> heirs([0, 1], [[0, 1, 2], [0, 1, 2]])  # on one machine: one rank less
    [[2], []]
    >>> heirs([0, 1], [[1], [2]])  # on two of three machines
    [[1], [2]]
    """
    owned = {number for number, one in zip(numbers, seen, strict=True) if number in one}
    found: list[list[int]] = [[] for _ in numbers]
    for number in sorted({number for one in seen for number in one} - owned):
        found[next(rank for rank, one in enumerate(seen) if number in one)].append(number)
    return found


def _folder(rundir: RunDir, rank: int) -> Path:
    return rundir.path / "own" / f"rank-{rank}"


def _path(folder: Path, step: int) -> Path:
    return folder / _name(step)


def _name(step: int) -> str:
    return f"step-{step:06d}.safetensors"
