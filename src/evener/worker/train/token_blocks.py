"""Token blocks of a corpus: the samples of each step's global batch.

They are a pure function of (seed, step): any number of ranks reads the same samples, and a resumed run continues with
the next ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from evener.core.model.corpus import Corpus
from evener.core.run.rundir import SAMPLERS
from evener.corpus.sampling import epoch_positions, uniform_indices


class TokenBlocks:
    """Blocks of consecutive tokens of one split of a corpus.

    A sample is a position p: its input is tokens p … p+T-1, its target tokens p+1 … p+T, T = block_size. `sampling` is
    how a step's samples are drawn: in epochs, or uniformly from all positions.
    """

    def __init__(self, corpus: Corpus, split: str, block_size: int, sampling: str = "epochs") -> None:
        assert sampling in SAMPLERS, sampling
        self.block_size, self.sampling = block_size, sampling
        self._tokens = np.memmap(corpus.split_path(split), dtype=corpus.dtype, mode="r")
        self._num_positions = len(self._tokens) - block_size

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Return the positions of a step's global batch: (num_sequences,) int64.

        In epochs no block repeats before all have come, as long as num_sequences does not change.
        """
        if self.sampling == "uniform":
            return uniform_indices(self._num_positions, seed, step, num_sequences)
        first = step * num_sequences
        return epoch_positions(self._num_positions, self.block_size, seed, first, num_sequences)

    def evenly_spaced(self, num_tokens: int) -> np.ndarray:
        """Return positions of disjoint blocks spread over the split: at most num_tokens tokens, at least one block."""
        num_blocks = max(1, min(num_tokens // self.block_size, self._num_positions // self.block_size))
        return np.linspace(0, self._num_positions - 1, num_blocks).astype(np.int64)

    def num_tokens(self, positions: np.ndarray) -> int:
        """Return the number of targets in these samples."""
        return len(positions) * self.block_size

    def load(self, positions: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these samples: two (B, T) int64 tensors on the device."""
        window = np.arange(self.block_size + 1)
        blocks = torch.from_numpy(self._tokens[positions[:, None] + window].astype(np.int64))
        if device.type == "cuda":
            blocks = blocks.pin_memory().to(device, non_blocking=True)
        return blocks[:, :-1], blocks[:, 1:]
