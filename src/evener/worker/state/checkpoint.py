"""Checkpoint files: save and load a run so that it resumes bit for bit.

A checkpoint does not depend on the number of ranks, nor on whether they shard their weights: replicas are equal, so
rank 0 writes one copy, and sharded tensors are gathered and written one by one, so that no rank holds all of them.
Only the RNG states (dropout) differ between ranks; all of them are saved, and restored if as many ranks resume.

    weights.safetensors   parameters and persistent buffers by name
    state.safetensors     tensors of the states: optimizers, schedulers, scaler, the user's (see state_serialization.py)
    rng.safetensors       "cpu/RANK", "cuda/RANK", … (see rng.py)
    state.json            evener.core.run.rundir.Checkpoint: the states' trees, and the digests of the other files
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from evener.core.base.errors import CheckpointError, RunError, UsageError
from evener.core.base.file_io import create_file, file_digest, open_file, write_atomic, write_folder_atomic
from evener.core.run.roster import NO_SYNC, SyncSpec
from evener.core.run.rundir import Checkpoint, read_checkpoint_unverified
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.sharded_tensors import copy_part, full_tensor, local_part
from evener.worker.state.state_serialization import SAFETENSORS_DTYPES, check_storable, flatten_state, unflatten_state


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

    `weights` are those of `named_weights`, on any device; if they are sharded, all other ranks `gather` the same ones
    meanwhile, whether this succeeds or not. `replica_hashes[rank]` are that rank's hashes of the same
    tensors, in the same order. `states` are state_dicts by name. `num_rank_states` is the number of ranks that have
    saved per-rank state of this step. `sync` and `bucket_bytes` are the strategy whose states these are, which --sync
    auto may be trying. Raise RunError if a weight is not finite, since the run would resume from it, or if the disk
    refuses. Raise UsageError if a state holds an object that cannot be stored.
    """
    if bad := describe_non_finite(weights):
        raise RunError(f"after step {step}: {bad}; it is not saved")
    trees, tensors = _flatten_states(states)
    whole = _gathered(weights, tensors)

    def write(folder: Path) -> None:
        write_safetensors(folder / "weights.safetensors", weights, whole=whole)
        write_safetensors(folder / "state.safetensors", tensors, whole=whole)
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
    finally:
        for _ in whole:  # the other ranks wait
            pass
    return folder


def gather(weights: Mapping[str, Tensor], states: Mapping[str, object]) -> None:
    """Take part in gathering what other ranks `save`, if it is sharded."""
    for _ in _gathered(weights, _flatten_states(states)[1]):
        pass


def _flatten_states(states: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the trees of the states, and the tensors of all of them."""
    trees: dict[str, object] = {}
    tensors: dict[str, Tensor] = {}
    for name, state in states.items():
        trees[name], more = flatten_state(state, name)
        tensors |= more
    return trees, tensors


def _gathered(*tables: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the whole of each tensor, table by table, in the order in which `write_safetensors` writes them."""
    for table in tables:
        for name in _file_order(table):
            yield full_tensor(table[name])


def load(
    folder: Path,
    weights_like: Callable[[str], Tensor | None] = lambda name: None,
    states_like: Callable[[str], Tensor | None] = lambda name: None,
) -> LoadedCheckpoint:
    """Load what `save` wrote, bit for bit: of a tensor that is sharded as another one, by name, this rank's part."""
    tensors = read_safetensors(folder / "state.safetensors", states_like)
    states = {name: unflatten_state(tree, tensors) for name, tree in read_checkpoint_unverified(folder).states.items()}
    return LoadedCheckpoint(weights=read_safetensors(folder / "weights.safetensors", weights_like), states=states)


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


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, *,
                      whole: Iterator[Tensor] | None = None) -> None:  # fmt: skip
    """Write tensors to a safetensors file, one by one, whereas safetensors itself needs all of them in memory.

    They may be on any device, have any strides and share memory. `whole` yields them, gathered.
    [https://github.com/huggingface/safetensors: the length of a JSON header, the header, the bytes of each tensor]
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    names, end = _file_order(tensors), 0
    for name in names:
        tensor = tensors[name]
        check_storable(tensor, name)
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype, shape = SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with create_file(path) as file:  # a link in its place would be followed
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in zip(names, whole or _gathered(tensors), strict=False):  # `whole` goes on in the next file
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which a file has the tensors: wider elements first, so that all are aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def describe_non_finite(weights: Mapping[str, Tensor]) -> str:
    """Describe the first non-finite tensor, or return "". Buffers may hold infinities, as masks do, but no NaN."""
    for name, tensor in weights.items():
        part = local_part(tensor)
        if not (part.is_floating_point() or part.is_complex()):
            continue
        good = part.isfinite() if isinstance(tensor, nn.Parameter) else ~part.isnan()
        if num_bad := int((~good).sum()):
            return f"{name} is not finite: {num_bad} of {part.numel()} values"
    return ""


def read_safetensors(path: Path, like: Callable[[str], Tensor | None] = lambda name: None) -> dict[str, Tensor]:
    """Load a safetensors file into CPU memory. CheckpointError if it is damaged.

    `like(name)`: the tensor as which it is sharded, so that only this rank's part is loaded; None: it is whole. Return
    copies: loaded tensors are memory-mapped, and an optimizer would keep a file mapped that is removed later.
    """
    open_file(path).close()  # a pipe would block
    try:
        return {name: copy_part(tensor, like(name)) for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
