"""Which random generators does a rank have, and how are they kept from one start to the next?

torch's, on the processor and on its device, and those of numpy and of Python, by which programs of people's own draw
what they do to a sample. What has its own generator object has its own state: run.state.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

States = dict[str, Tensor]


def begin(seed: int, step: int, rank: int) -> None:
    """As a rank's torch generators begin that goes on with nothing from a checkpoint."""
    draw = np.random.SeedSequence((seed, step, rank)).generate_state(2, np.uint32)
    torch.manual_seed(int(draw[0]) << 32 | int(draw[1]))


def states(device: torch.device) -> States:
    """Of this rank, now."""
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    keys, place, has_gauss = of_numpy["state"]["key"], of_numpy["state"]["pos"], of_numpy["has_gauss"]
    found = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python-gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), place, has_gauss], dtype=torch.int64),
        "numpy-gauss": torch.tensor([of_numpy["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(saved: States, device: torch.device) -> None:
    """Go on drawing from there."""
    torch.set_rng_state(saved["cpu"])
    version, *words = saved["python"].tolist()
    gauss = saved["python-gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, place, has_gauss = saved["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, saved["numpy-gauss"].item()))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


def of_rank(file: Path, rank: int) -> States:
    """What a rank had when a checkpoint was made."""
    found = load_file(file)
    return {name.rpartition("/")[0]: state for name, state in found.items() if name.rpartition("/")[2] == str(rank)}
