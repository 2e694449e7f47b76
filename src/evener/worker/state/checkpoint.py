"""Checkpoint files: save and load a run so that it resumes bit for bit.

A checkpoint does not depend on the number of ranks: replicas are equal, so rank 0 writes one copy. Only the RNG states
(dropout) differ between ranks; all of them are saved, and restored if as many ranks resume.

    weights.safetensors   parameters and persistent buffers by name
    state.safetensors     tensors of the states: optimizers, schedulers, scaler, the user's (see state_serialization.py)
    rng.safetensors       "cpu/RANK", "cuda/RANK", … (see rng.py)
    state.json            evener.core.run.rundir.Checkpoint: the states' trees, and the digests of the other files
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evener.core.base.errors import CheckpointError, RunError, UsageError
from evener.core.base.file_io import create_file, file_digest, open_file, write_atomic, write_folder_atomic
from evener.core.run.roster import NO_SYNC, SyncSpec
from evener.core.run.rundir import Checkpoint, read_checkpoint_unverified
from evener.core.run.runwriter import RunWriter
from evener.worker.state.state_serialization import check_storable, flatten_state, unflatten_state


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The content of a checkpoint, in CPU memory; no tensor is mapped from the files."""

    weights: dict[str, Tensor]
    states: dict[str, Any]


def save(
    rundir: RunWriter,
    weights: Mapping[str, Tensor],
    states: Mapping[str, object],
    *,
    step: int,
    val_loss: float | None,
    rng_states: list[dict[str, Tensor]],
    replica_hashes: list[list[str]],
    num_rank_states: int = 0,
    sync: SyncSpec = NO_SYNC,
    bucket_bytes: int = 0,
    is_strategy_on_trial: bool = False,
) -> Path:
    """Write the checkpoint of `step` atomically; it replaces one of the same step.

    `weights` are those of `named_weights`, on any device. `replica_hashes[rank]` are that rank's hashes of the same
    tensors, in the same order. `states` are state_dicts by name. `num_rank_states` is the number of ranks that have
    saved per-rank state of this step. `sync` and `bucket_bytes` are the strategy whose states these are, which --sync
    auto may be trying. Raise RunError if a weight is not finite, since the run would resume from it, or if the disk
    refuses. Raise UsageError if a state holds an object that cannot be stored.
    """
    if bad := describe_non_finite(weights):
        raise RunError(f"after step {step}: {bad}; it is not saved")
    trees: dict[str, object] = {}
    tensors: dict[str, Tensor] = {}
    for name, state in states.items():
        trees[name], more = flatten_state(state, name)
        tensors |= more

    def write(folder: Path) -> None:
        write_safetensors(folder / "weights.safetensors", weights)
        write_safetensors(folder / "state.safetensors", tensors)
        rng = {f"{kind}/{rank}": state for rank, states in enumerate(rng_states) for kind, state in states.items()}
        write_safetensors(folder / "rng.safetensors", rng)
        checkpoint = Checkpoint(
            step=step,
            world_size=len(rng_states),
            val_loss=val_loss,
            tensor_names=list(weights),
            states=trees,
            replica_hashes=replica_hashes,
            num_own=num_rank_states,
            sync=sync,
            bucket_bytes=bucket_bytes,
            is_strategy_on_trial=is_strategy_on_trial,
            files={file.name: file_digest(file) for file in sorted(folder.iterdir())},
        )
        write_atomic(folder / "state.json", msgspec.json.encode(checkpoint))
        rundir.drop_checkpoint(step)  # from an epoch that broke before all ranks had written it

    folder = rundir.checkpoint_path(step)
    try:
        write_folder_atomic(folder, write)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{folder}: {getattr(error, 'strerror', None) or error}",
            hint="the last complete checkpoint is untouched; --resume continues from it",
        ) from None
    return folder


def load(folder: Path) -> LoadedCheckpoint:
    """Load what `save` wrote, bit for bit."""
    tensors = read_safetensors(folder / "state.safetensors")
    states = {name: unflatten_state(tree, tensors) for name, tree in read_checkpoint_unverified(folder).states.items()}
    return LoadedCheckpoint(weights=read_safetensors(folder / "weights.safetensors"), states=states)


def load_weights(folder: Path, module: nn.Module) -> None:
    """Copy the saved weights into a module of the same shape."""
    copy_weights(read_safetensors(folder / "weights.safetensors"), named_weights(module), folder)


@torch.no_grad()
def copy_weights(saved: Mapping[str, Tensor], targets: Mapping[str, Tensor], folder: Path) -> None:
    """Copy saved tensors into `targets`. If one does not fit, raise CheckpointError for it and change nothing."""
    for name in [*targets, *saved]:
        if name not in saved or name not in targets:
            problem = f"is {'not in it' if name not in saved else 'not in the model'}"
        elif saved[name].shape != targets[name].shape:
            problem = f"is {tuple(saved[name].shape)} there and {tuple(targets[name].shape)} in the model"
        elif saved[name].dtype != targets[name].dtype:
            problem = f"is {saved[name].dtype} there and {targets[name].dtype} in the model"
        else:
            continue
        raise CheckpointError(f"{folder}: weights of another model: {name} {problem}")
    for name, tensor in targets.items():
        tensor.copy_(saved[name])


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and persistent buffers by name; shared ones (a tied head) once."""
    saved = module.state_dict()
    if extra := next((name for name, value in saved.items() if not isinstance(value, Tensor)), None):
        raise UsageError(f"{extra}: not a tensor; a checkpoint of weights cannot hold a module's extra state")
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if name in saved}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file. They may be on any device, have any strides and share memory."""
    storages: set[int] = set()
    dense = {}
    for name, tensor in tensors.items():
        check_storable(tensor, name)
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().data_ptr() in storages:  # the format has no views
            copy = copy.clone()
        storages.add(copy.untyped_storage().data_ptr())
        dense[name] = copy
    create_file(path).close()  # a link in its place would be followed
    save_file(dense, path, metadata)


def describe_non_finite(weights: Mapping[str, Tensor]) -> str:
    """Describe the first non-finite tensor, or return "". Buffers may hold infinities, as masks do, but no NaN."""
    for name, tensor in weights.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        good = tensor.isfinite() if isinstance(tensor, nn.Parameter) else ~tensor.isnan()
        if num_bad := int((~good).sum()):
            return f"{name} is not finite: {num_bad} of {tensor.numel()} values"
    return ""


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Load a safetensors file into CPU memory. CheckpointError if it is damaged.

    Return copies: loaded tensors are memory-mapped, and an optimizer would keep a file mapped that is removed later.
    """
    open_file(path).close()  # a pipe would block
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
