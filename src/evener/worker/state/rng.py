"""RNG states: save and restore a rank's random number generators across restarts.

These are torch's, for the CPU and for the rank's device, and the global ones of numpy and Python, with which users'
programs augment samples. A program's own generator objects are saved by run.state.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evener.worker.state.checkpoint import read_safetensors

RngStates = dict[str, Tensor]


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators from (seed, step, rank), for a rank that restores no states from a checkpoint."""
    draw = np.random.SeedSequence((seed, step, rank)).generate_state(2, np.uint32)
    torch.manual_seed(int(draw[0]) << 32 | int(draw[1]))


def get_states(device: torch.device) -> RngStates:
    """Return the current states of this rank's generators."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    keys, position, has_gauss = numpy_state["state"]["key"], numpy_state["state"]["pos"], numpy_state["has_gauss"]
    by_name = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python-gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy-gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        by_name["cuda"] = torch.cuda.get_rng_state(device)
    return by_name


def set_states(saved: RngStates, device: torch.device) -> None:
    """Set the generators to saved states."""
    torch.set_rng_state(saved["cpu"])
    version, *words = saved["python"].tolist()
    gauss = saved["python-gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = saved["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, saved["numpy-gauss"].item()))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


def load_rank_states(file: Path, rank: int) -> RngStates:
    """Load one rank's states from a checkpoint's file."""
    saved = read_safetensors(file)
    return {name.rpartition("/")[0]: state for name, state in saved.items() if name.rpartition("/")[2] == str(rank)}
