"""Sync states of a launched program: keep them beside the run, and find them when the program resumes by itself.

    RUN/own/rank-1/sync-0-NAME.safetensors    of the program's first DDP model; the newest two of each model

Only the program knows how it saves and resumes. So a state is named by what it belongs to: rank 0's by a digest of its
weights, those of the other ranks by a digest of what the ranks have in common, which rank 0's file contains. A program
that has resumed has the weights that it saved. A state of these, of the same strategy and number of ranks, continues
their training, whichever run on these hosts kept it; with other weights no state is found.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import CheckpointError
from evener.core.base.file_io import open_file
from evener.core.base.units import pluralize
from evener.core.run.roster import SyncSpec
from evener.core.run.rundir import RunDir
from evener.worker.state.rank_state import NUM_SAVED_STATES, rank_folder, read_state_file, write_state_file
from evener.worker.state.replica_hashes import hash_tensors
from evener.worker.state.state_serialization import flatten_state
from evener.worker.sync import RankGroup

NAME_BYTES = 16


class SavedSyncState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file."""

    format: Literal[1] = 1
    sync: str
    num_ranks: int
    common_name: Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * NAME_BYTES}}}\Z")]  # on all ranks
    hashes: dict[str, str]  # of the tensors in `state`
    state: dict[str, Any]


def name_of(tensors: Iterable[Tensor], *numbers: float) -> str:
    """Return a digest of tensors, in this order, and of numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=NAME_BYTES)
    for i, tensor in enumerate(tensors):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} {hash_tensors([(str(i), tensor)])[str(i)]}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class FoundState:
    """The state that belongs to the weights with which a program has begun, on one rank."""

    own: dict[str, Any] | None  # this rank's; None: it has none
    is_of_rank0: bool  # whether rank 0 has its state
    is_of_all: bool  # whether all ranks have theirs
    problem: str  # why this rank's file of these weights cannot be used; "" if it can, or there is none
    has_others: bool  # on rank 0: whether states of other weights are kept here


class ProgramState:
    """The files of one rank's sync states of one DDP model."""

    def __init__(self, rundir: RunDir, group: RankGroup, sync: SyncSpec, model_number: int) -> None:
        self._dir, self._group, self._sync = rundir, group, sync
        self.folder = rank_folder(rundir, group.rank)
        self._prefix = f"sync-{model_number}-"

    def save(self, weights: Iterable[Tensor], common_name: str, state: dict[str, Any]) -> None:
        """Save the state that belongs to these weights; raise OSError or SafetensorError if the disk refuses.

        `common_name`: the name of what all ranks have in common.
        """
        name = name_of(weights) if self._group.rank == 0 else common_name
        saved = SavedSyncState(
            sync=str(self._sync),
            num_ranks=self._group.world_size,
            common_name=common_name,
            hashes=_hash_state(state),
            state=state,
        )
        write_state_file(self.folder / f"{self._prefix}{name}.safetensors", msgspec.structs.asdict(saved))
        kept = sorted(self.folder.glob(f"{self._prefix}*.safetensors"), key=_modified)
        for old in kept[:-NUM_SAVED_STATES]:
            old.unlink()

    def find(self, weights: Iterable[Tensor]) -> FoundState:
        """Find the state that belongs to rank 0's weights. All ranks of the group call it together."""
        group, saved, common_name, problem = self._group, None, "", ""
        has_any = group.rank == 0 and any(self._paths("*"))
        if has_any:
            saved, problem = self._read(name_of(weights))
            common_name = saved.common_name if saved is not None else ""
        device = group.device if group.backend == "nccl" else torch.device("cpu")
        from_rank0 = torch.tensor([*bytes.fromhex(common_name).ljust(NAME_BYTES, b"\0")], device=device)
        dist.broadcast(from_rank0, src=0, group=group.gradient_group)
        is_of_rank0 = bool(from_rank0.any())
        if group.rank > 0 and is_of_rank0:
            saved, problem = self._read(bytes(from_rank0.tolist()).hex())
        num_found = torch.tensor([saved is not None], dtype=torch.int64, device=device)
        dist.all_reduce(num_found, group=group.gradient_group)
        return FoundState(
            own=None if saved is None else saved.state,
            is_of_rank0=is_of_rank0,
            is_of_all=int(num_found) == group.world_size,
            problem=problem,
            has_others=has_any and saved is None,
        )

    def _paths(self, name: str) -> list[Path]:
        """Return the files of this name of all runs beside this one, the newest first."""
        pattern = f"*/own/rank-{self._group.rank}/{self._prefix}{name}.safetensors"
        return sorted(self._dir.path.absolute().parent.glob(pattern), key=_modified, reverse=True)

    def _read(self, name: str) -> tuple[SavedSyncState | None, str]:
        """Return the content of the newest usable file of this name, or None, and why the newest cannot be used."""
        problem = ""
        for path in self._paths(name):
            try:
                saved = _read_checked(RunDir(path.parents[2]).inside("own", path.parent.name, path.name))
            except (CheckpointError, OSError) as error:
                problem = problem or str(error)
                continue
            if (saved.sync, saved.num_ranks) == (str(self._sync), self._group.world_size):
                return saved, ""
            problem = problem or f"{path} is of --sync {saved.sync} on {pluralize(saved.num_ranks, 'rank')}"
        return None, problem


def _read_checked(path: Path) -> SavedSyncState:
    """Read a file. Raise CheckpointError if it does not hold what was written, OSError if it cannot be read."""
    open_file(path).close()  # a pipe would block
    try:
        saved = from_builtins(read_state_file(path), SavedSyncState)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if _hash_state(saved.state) != saved.hashes:
        raise CheckpointError(f"{path}: damaged: its tensors are not those that were written")
    return saved


def _hash_state(state: dict[str, Any]) -> dict[str, str]:
    return hash_tensors(flatten_state(state, "own")[1].items())


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
