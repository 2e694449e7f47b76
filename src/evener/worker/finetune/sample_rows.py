"""The rows of samples that a run fine-tunes on: the samples of each step's global batch.

A row is what the model reads at once: a sample, or with packing several. The rows, and those of a step, are pure
functions of the corpus and (seed, step), so any number of ranks reads the same ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from evener.core.model.corpus import LOSS, Corpus
from evener.corpus.samples import read_samples, rows_of
from evener.corpus.sampling import epoch_indices, uniform_indices

NO_TARGET = -100  # of a token after which nothing carries loss   [torch's ignore_index]


class SampleRows:
    """Rows of one split. A row's inputs are its samples' tokens; its targets, the next tokens that carry loss."""

    def __init__(
        self, corpus: Corpus, split: str, block_size: int, sampling: str = "epochs", *, packing: bool = False
    ) -> None:
        self._tokens = np.memmap(corpus.split_path(split), dtype=corpus.dtype, mode="r")
        self._flags = np.memmap(corpus.flags_path(split), dtype=np.uint8, mode="r")
        self._samples = read_samples(corpus, split, block_size)
        self._rows = rows_of(self._samples, block_size, packing=packing)
        self._num_loss_tokens = np.array([self._samples.loss_tokens[row].sum() for row in self._rows])
        self._sampling = sampling

    def __len__(self) -> int:
        return len(self._rows)

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Return the rows of a step's global batch: (num_sequences,) int64."""
        if self._sampling == "uniform":
            return uniform_indices(len(self), seed, step, num_sequences)
        return epoch_indices(len(self), seed, step * num_sequences, num_sequences)

    def evenly_spaced(self, num_tokens: int) -> np.ndarray:
        """Return rows spread over the split: about num_tokens tokens that carry loss, at least one row."""
        mean = self._num_loss_tokens.mean()
        num_rows = max(1, min(len(self), int(num_tokens / mean)))
        return np.linspace(0, len(self) - 1, num_rows).astype(np.int64)

    def num_tokens(self, rows: np.ndarray) -> int:
        """Return the number of tokens in these rows that carry loss."""
        return int(self._num_loss_tokens[rows].sum())

    def load(self, rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and targets of these rows: three (B, T) int64 tensors; T is the longest row's.

        Positions begin with 0 in each sample. Padding continues the last sample, which does not attend to it.
        """
        lengths = [int(self._samples.lengths[self._rows[row]].sum()) for row in rows]
        tokens = np.zeros((len(rows), max(lengths)), dtype=np.int64)
        positions, targets = tokens.copy(), np.full_like(tokens, NO_TARGET)
        for i, row in enumerate(rows):
            at = 0
            for sample in self._rows[row]:
                start, length = int(self._samples.starts[sample]), int(self._samples.lengths[sample])
                ids = self._tokens[start : start + length].astype(np.int64)
                tokens[i, at : at + length] = ids
                positions[i, at:] = np.arange(tokens.shape[1] - at)
                carries_loss = (self._flags[start + 1 : start + length] & LOSS) > 0
                targets[i, at : at + length - 1] = np.where(carries_loss, ids[1:], NO_TARGET)
                at += length
        parts = (torch.from_numpy(part) for part in (tokens, positions, targets))
        if device.type == "cuda":
            parts = (part.pin_memory().to(device, non_blocking=True) for part in parts)
        inputs, places, expected = parts
        return inputs, places, expected
