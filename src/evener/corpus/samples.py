"""The samples of a corpus to fine-tune on: where they lie, how long they are, and which are packed into one row.

A sample is a chat, a prompt with its completion, or a piece of a text. A row is what the model reads at once: a sample,
or with packing several. All are pure functions of the corpus and the block size, so every rank finds the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evener.core.base.errors import DataError
from evener.core.model.corpus import BEGIN, LOSS, TEXT, Corpus
from evener.core.model.fine_tuning import pack_rows


@dataclass(frozen=True)
class SampleTable:
    """The samples of a split that carry loss, cut to the block size."""

    starts: np.ndarray  # (num_samples,) int64: the position of the first token in the split
    lengths: np.ndarray  # (num_samples,) int64: tokens, at most the block size
    loss_tokens: np.ndarray  # (num_samples,) int64: how many of them carry loss, at least 1
    num_truncated: int  # chats and completions whose end is cut off
    num_empty: int  # those of which nothing that is left carries loss


def read_samples(corpus: Corpus, split: str, block_size: int) -> SampleTable:
    """Find the samples of a split. Raise DataError if none carries loss.

    A longer chat or completion is truncated at its end; a longer text is cut into samples that overlap by one token, so
    that each of its tokens but the first is predicted once.
    """
    flags = np.fromfile(corpus.flags_path(split), dtype=np.uint8)
    begins = np.flatnonzero(flags & BEGIN)
    lengths = np.diff(begins, append=len(flags))
    is_text = (flags[begins] & TEXT) > 0
    num_pieces = np.where(is_text, np.maximum(1, -(-(lengths - 1) // max(1, block_size - 1))), 1)
    which = np.repeat(np.arange(len(begins)), num_pieces)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offsets = piece * (block_size - 1)
    starts, kept = begins[which] + offsets, np.minimum(lengths[which] - offsets, block_size)
    before = np.concatenate([[0], np.cumsum(flags & LOSS, dtype=np.int64)])  # loss tokens before a position
    loss_tokens = before[starts + kept] - before[starts + 1]  # a sample's first token is predicted from nothing
    carries = loss_tokens > 0
    if not carries.any():
        raise DataError(
            f"{corpus.split_path(split)}: no sample carries loss within {block_size} tokens",
            hint="a larger --block-size: the prompts fill it",
        )
    return SampleTable(
        starts=starts[carries],
        lengths=kept[carries],
        loss_tokens=loss_tokens[carries],
        num_truncated=int(np.sum((lengths > block_size) & ~is_text)),
        num_empty=int(np.sum(~carries)),
    )


def rows_of(table: SampleTable, block_size: int, *, packing: bool) -> list[np.ndarray]:
    """Return the samples of each row: one, or with packing as many as fit."""
    if not packing:
        return [np.array([i]) for i in range(len(table.lengths))]
    return [np.array(row) for row in pack_rows(table.lengths.tolist(), block_size)]
