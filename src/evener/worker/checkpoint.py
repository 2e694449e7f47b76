"""How is a run saved so that it can go on bit for bit?

A checkpoint does not depend on the number of ranks: replicas are equal, so rank 0 writes one copy. What differs between
ranks is the state of their random generators (dropout); it is kept for each and used again by the same number of ranks.

    weights.safetensors     parameters and buffers by name
    optimizer.safetensors   "exp_avg/PARAMETER", … of every tensor in the optimizer's state
    rng.safetensors         "cpu/RANK", "cuda/RANK"
    state.json              evener.core.rundir.Checkpoint
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evener.core.errors import CheckpointError
from evener.core.rundir import Checkpoint, RunDir, digest_of, write_atomic, write_folder_atomic

REMOVED = ".removed"  # ends the name of a checkpoint that is on its way out


def save(
    rundir: RunDir,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    val_loss: float | None,
    rng_states: list[dict[str, Tensor]],
    replica_hashes: list[list[str]],
    scaler: dict[str, float] | None,
) -> Path:
    """Write the checkpoint of `step`, or leave everything as it was."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    moments = {
        f"{key}/{names[parameter]}": value.detach().cpu().contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }

    def write(folder: Path) -> None:
        save_file(weights_of(module), folder / "weights.safetensors")
        save_file(moments, folder / "optimizer.safetensors")
        rng = {f"{kind}/{rank}": state for rank, states in enumerate(rng_states) for kind, state in states.items()}
        save_file(rng, folder / "rng.safetensors")
        checkpoint = Checkpoint(
            step=step,
            world_size=len(rng_states),
            val_loss=val_loss,
            param_names=list(names.values()),
            scaler=scaler,
            replica_hashes=replica_hashes,
            files={file.name: digest_of(file) for file in sorted(folder.iterdir())},
        )
        write_atomic(folder / "state.json", msgspec.json.encode(checkpoint))

    folder = rundir.checkpoint_path(step)
    try:
        write_folder_atomic(folder, write)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: {error.strerror or error}", hint="the last complete checkpoint is untouched; --resume goes on"
        ) from None
    return folder


def load(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the weights and the optimizer's state back, exactly as they were saved."""
    load_weights(folder, module)
    tensors = load_file(folder / "optimizer.safetensors")
    parameters = dict(module.named_parameters())
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        if name not in parameters:
            raise CheckpointError(f"{folder}: state of a parameter {name}, which this model does not have")
        parameter = parameters[name]
        device = "cpu" if value.ndim == 0 and not optimizer.defaults.get("fused") else parameter.device
        optimizer.state[parameter][key] = value.to(device)


def load_weights(folder: Path, module: nn.Module) -> None:
    """Copy the saved weights into a module of the same shape."""
    saved = load_file(folder / "weights.safetensors")
    ours = dict(module.named_parameters()) | dict(module.named_buffers())
    if saved.keys() != ours.keys() or any(saved[name].shape != ours[name].shape for name in saved):
        odd = sorted(saved.keys() ^ ours.keys()) or [name for name in saved if saved[name].shape != ours[name].shape]
        raise CheckpointError(f"{folder}: weights of another model: {odd[0]} does not fit")
    with torch.no_grad():
        for name, value in saved.items():
            ours[name].copy_(value)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, once each (a tied head has no copy), on the CPU."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named}


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """States of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Set this rank's random generators."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def load_rng(folder: Path, rank: int) -> dict[str, Tensor]:
    """The states that a rank had."""
    states = load_file(folder / "rng.safetensors")
    return {kind: states[f"{kind}/{rank}"] for kind in ("cpu", "cuda") if f"{kind}/{rank}" in states}


def prune(rundir: RunDir, keep: int, best: int | None) -> None:
    """Remove all complete checkpoints but the newest `keep` and the best one.

    Each gets another name first: killed in the middle, a removal leaves nothing that looks like a checkpoint.
    """
    steps = rundir.checkpoint_steps()
    for step in steps[:-keep]:
        if step != best:
            with contextlib.suppress(OSError):
                path = rundir.checkpoint_path(step)
                path.rename(path.with_name(f".{path.name}{REMOVED}"))
    for path in rundir.checkpoints_path.glob(f".*{REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
