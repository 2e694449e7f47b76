"""Compare saved weights of replicas or of two runs. `python -m evener.worker.compare_weights RUN [OTHER]` prints JSON.

RUN alone    compares, for every checkpoint, the weights file with the hashes that each rank took of its replica;
             then the whole states that ranks wrote (RUN/replicas, or state-rank-R.pt of examples/ddp_baseline.py)
RUN OTHER    compares the newest weights of two runs, to see what another number of ranks, or a resume, changed
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from evener.core.base.errors import CheckpointError, exit_status_of
from evener.core.base.file_io import open_file
from evener.core.base.units import pluralize
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.worker.state.checkpoint import read_safetensors
from evener.worker.state.replica_hashes import hash_tensors, replica_mismatches


def compare_replicas(path: Path) -> dict[str, Any]:
    """Check every saved replica state and hash in a run directory."""
    rundir = RunDir(path)
    checks = [_check_checkpoint(rundir, step) for step in rundir.checkpoint_steps()]
    files = sorted([*path.glob("state-rank-*.pt"), *(path / "replicas").glob("rank-*.safetensors")], key=_rank_in_name)
    states = {_rank_in_name(file): _read_state(file) for file in files}
    if len(states) > 1:
        first = min(states)
        checks += [
            {"what": f"states of rank {first} and rank {rank}"} | max_abs_difference(states[first], states[rank])
            for rank in sorted(states.keys() - {first})
        ]
    if not checks:
        raise CheckpointError(f"{path}: no checkpoint and no states of ranks to compare")
    measured = [check["largest_difference"] for check in checks if check["largest_difference"] is not None]
    return {
        "run_dir": str(path),
        "agree": all(check["equal"] for check in checks),
        "largest_difference": max(measured, default=None),
        "checks": checks,
    }


def compare_newest_weights(path: Path, other: Path) -> dict[str, Any]:
    """Compare the newest weights of two runs."""
    states = []
    for rundir in (RunDir(path), RunDir(other)):
        folder = rundir.checkpoint_path(rundir.newest_checkpoint_step())
        read_checkpoint(folder)
        states.append((folder, read_safetensors(folder / "weights.safetensors")))
    check = {"what": f"{states[0][0]} and {states[1][0]}"} | max_abs_difference(states[0][1], states[1][1])
    return {
        "run_dir": str(path),
        "other": str(other),
        "agree": check["equal"],
        "largest_difference": check["largest_difference"],
        "checks": [check],
    }


def max_abs_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Any]:
    """Return whether all tensors are equal, and the largest absolute difference with the name of its tensor.

    Raise CheckpointError if names or shapes differ.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            raise CheckpointError(f"the states are of different models: {name} is not in both with the same shape")
    diffs = {
        name: float((ours[name].double() - theirs[name].double()).abs().max()) if ours[name].numel() else 0.0
        for name in ours
    }
    equal = all(torch.equal(ours[name], theirs[name]) for name in ours)
    worst = max(diffs, key=lambda name: diffs[name])
    tensor = None if equal else worst
    return {"equal": equal, "tensors": len(diffs), "largest_difference": diffs[worst], "tensor": tensor}


def _check_checkpoint(rundir: RunDir, step: int) -> dict[str, Any]:
    folder = rundir.checkpoint_path(step)
    checkpoint = read_checkpoint(folder)
    weights = read_safetensors(folder / "weights.safetensors")
    stored = hash_tensors((name, weights[name]) for name in checkpoint.tensor_names)
    mismatches = replica_mismatches(checkpoint.tensor_names, [list(stored.values()), *checkpoint.replica_hashes])
    return {
        "what": f"checkpoint of step {step}: hashes of {pluralize(checkpoint.world_size, 'rank')} and the "
        f"stored weights",
        "equal": not mismatches,
        "tensors": len(stored),
        "largest_difference": None if mismatches else 0.0,  # equal bits
        "tensor": mismatches[0].tensor if mismatches else None,
    }


def _read_state(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return read_safetensors(file)
        with open_file(file) as content:  # a pipe would block
            return cast("dict[str, Tensor]", torch.load(content, weights_only=True))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {error}".splitlines()[0]) from None


def _rank_in_name(file: Path) -> int:
    return int(re.findall(r"\d+", file.stem)[-1])


def main() -> int:
    paths = [Path(arg) for arg in sys.argv[1:]]
    return exit_status_of(
        lambda: print(json.dumps(compare_replicas(*paths) if len(paths) == 1 else compare_newest_weights(*paths)))
    )


if __name__ == "__main__":
    sys.exit(main())
