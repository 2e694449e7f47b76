"""A fine-tuning as the planner sees it: the pretrained model, and the lengths of the sequences that it reads.

A micro-batch of B sequences, padded to the T tokens of the longest, has logits at the K positions after which any of
them has a token that carries loss. With N parameters in the linear layers of L blocks, A the width of the attention,
and V, C vocabulary and width, a forward takes B·(2·N·T + 4·L·A·T² + 2·V·C·K) FLOPs, and a backward twice that: once for
the gradients of activations, once for those of weights, which frozen weights do not need.   [PaLM, appendix B]

Without torch and numpy: a launcher plans with it, too.
"""

from __future__ import annotations

import bisect
import math
import random
import re
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from evener.core.base.errors import DataError
from evener.core.base.file_io import read_file
from evener.core.model.corpus import BEGIN, LOSS, TEXT, Corpus
from evener.core.model.gradients import GradientTensor, ProgramModel
from evener.core.model.pretrained import Layers, PretrainedModel
from evener.core.model.shape import GPTShape

MAX_SAMPLED = 4096  # samples of which the lengths are taken
SEQUENCES_DRAWN = 1024  # for each size of a micro-batch
MAX_MICRO_BATCH = 256  # of which the padding is measured


class MicroBatchLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Means over random micro-batches of one size; in all of its sequences the same."""

    tokens: float  # T: of a sequence, with padding
    squares: float  # T²
    logits: float  # K: positions with logits
    max_logits: int
    max_loss_tokens: int  # of all its sequences


class SequenceLengths(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of the sequences of a fine-tuning, from a sample of them."""

    loss_tokens: float  # mean of a sequence: tokens that carry loss
    max_tokens: int  # of the longest sequence
    micro_batches: tuple[MicroBatchLengths, ...]  # of 1, 2, 4, … sequences

    @classmethod
    def full(cls, block_size: int) -> SequenceLengths:
        """Return the lengths of sequences that are full, and of which all tokens carry loss."""
        full = MicroBatchLengths(tokens=block_size, squares=block_size * block_size, logits=block_size,
                                 max_logits=block_size, max_loss_tokens=block_size)  # fmt: skip
        return cls(loss_tokens=block_size, max_tokens=block_size, micro_batches=(full,))

    def of_micro_batch(self, sequences: float) -> MicroBatchLengths:
        """Return the measured micro-batch with the nearest number of sequences, by ratio."""
        level = round(math.log2(max(1.0, sequences)))
        return self.micro_batches[min(level, len(self.micro_batches) - 1)]


class FineTuning(msgspec.Struct, frozen=True, kw_only=True, tag="fine_tuning"):
    """A pretrained model to fine-tune, and the lengths of its sequences.

    The planner takes it in the place of a `GPTShape`. Its rates count tokens that carry loss, as a run's records do.
    """

    model: PretrainedModel
    lengths: SequenceLengths

    has_sparse_embeddings: ClassVar[bool] = False  # all gradients are sent whole

    @property
    def name(self) -> str:
        """The name of the model's folder."""
        return self.model.name

    @property
    def rate_name(self) -> str:
        """The name under which a fleet file keeps how fast a device fine-tunes the model: "hf:qwen+lora16"."""
        return rate_name(self.model)

    @property
    def block_size(self) -> float:
        """The mean number of tokens of a sequence that carry loss."""
        return self.lengths.loss_tokens

    @property
    def gradients(self) -> tuple[GradientTensor, ...]:
        return self.model.gradients

    @property
    def layers(self) -> Layers:
        """The sizes of its layers; the model must be of a kind that is known."""
        assert self.model.layers is not None, f"the layers of a {self.model.architecture} are not known"
        return self.model.layers

    def num_params(self) -> int:
        """Return the number of parameters that are trained."""
        return self.model.num_params()

    def flops_per_token(self) -> float:
        """Return the FLOPs of a token that carries loss, in sequences without padding."""
        return self.flops_per_sequence(1) / self.block_size

    def flops_per_sequence(self, micro_batch: float) -> float:
        """Return the FLOPs of one sequence in a micro-batch of so many, forward and backward."""
        return sum(self._flops(micro_batch))

    def padding_factor(self, micro_batch: float) -> float:
        """Return the FLOPs of a sequence in a micro-batch of so many over those of a sequence alone."""
        return self.flops_per_sequence(micro_batch) / self.flops_per_sequence(1)

    @property
    def backward_fraction(self) -> float:
        """The fraction of forward and backward that is backward."""
        forward, backward = self._flops(1)
        return backward / (forward + backward)

    def _flops(self, micro_batch: float) -> tuple[float, float]:
        """Return the FLOPs of one sequence's forward, and of its backward."""
        layers, lengths = self.layers, self.lengths.of_micro_batch(micro_batch)
        linear = 2.0 * self.model.num_linear * lengths.tokens
        attention = 4.0 * layers.num_layers * layers.attention_width * lengths.squares
        head = 2.0 * self.model.vocab_size * layers.width * lengths.logits
        if self.model.lora_rank is None:
            return linear + attention + head, 2 * (linear + attention + head)
        adapters = 2.0 * self.num_params() * lengths.tokens
        # the first layer's queries, keys and values: what they read, frozen embeddings, needs no gradient
        first = 2.0 * layers.width * (layers.attention_width + 2 * layers.kv_width) * lengths.tokens
        return linear + adapters + attention + head, linear - first + 2 * (adapters + attention) + head


def rate_name(model: PretrainedModel) -> str:
    adapters = "dora" if model.has_dora else "lora"
    return f"hf:{model.name}" + ("" if model.lora_rank is None else f"+{adapters}{model.lora_rank}")


ModelShape = GPTShape | FineTuning | ProgramModel
"""What the planner knows of a model: the shape of one of evener's own, from which all else follows, what its files and
its data say of a pretrained one, or what a run of a user's program has shown."""


def read_lengths(corpus: Corpus, block_size: int, *, packing: bool) -> SequenceLengths:
    """Read the lengths of the training sequences, which `corpus.samples` finds; of a random sample if they are many."""
    flags = read_file(corpus.flags_path("train"))
    begins = [match.start() for match in re.finditer(_any_flag(BEGIN), flags)]
    pieces: list[tuple[int, int]] = []  # (begin, end) of samples
    for begin, end in zip(begins, [*begins[1:], len(flags)], strict=True):
        if not flags[begin] & TEXT:
            pieces.append((begin, min(end, begin + block_size)))
            continue
        stride = max(1, block_size - 1)  # pieces of a text overlap by one token
        pieces += [(at, min(end, at + block_size)) for at in range(begin, max(begin + 1, end - 1), stride)]
    draw = random.Random(0)
    carries_loss = bytes(ord("01"[byte & LOSS]) for byte in range(256))
    targets = flags.translate(carries_loss)
    pieces = [(begin, end) for begin, end in pieces if targets.find(b"1", begin + 1, end) >= 0]
    if not pieces:
        raise DataError(
            f"{corpus.flags_path('train')}: no sample carries loss within {block_size} tokens",
            hint="a larger --block-size: the prompts fill it",
        )
    if len(pieces) > MAX_SAMPLED:
        pieces = draw.sample(pieces, MAX_SAMPLED)
    # tokens, and a mask with a bit for each position after which a token carries loss
    samples = [(end - begin, int(targets[begin + 1 : end][::-1], 2)) for begin, end in pieces]
    rows = _pack(samples, block_size) if packing else samples
    sizes = [1 << level for level in range(MAX_MICRO_BATCH.bit_length()) if level == 0 or 1 << level <= len(rows)]
    return SequenceLengths(
        loss_tokens=sum(mask.bit_count() for _, mask in rows) / len(rows),
        max_tokens=max(length for length, _ in rows),
        micro_batches=tuple(_draw_micro_batches(rows, size, draw) for size in sizes),
    )


def _any_flag(flag: int) -> bytes:
    """Return a pattern for a byte with this flag."""
    return b"[" + b"".join(b"\\x%02x" % byte for byte in range(256) if byte & flag) + b"]"


def _pack(samples: Sequence[tuple[int, int]], block_size: int) -> list[tuple[int, int]]:
    """Return the tokens and the mask of each packed sequence."""
    rows = []
    for row in pack_rows([length for length, _ in samples], block_size):
        at = mask = 0
        for sample in row:
            length, of_sample = samples[sample]
            mask |= of_sample << at
            at += length
        rows.append((at, mask))
    return rows


def _draw_micro_batches(rows: Sequence[tuple[int, int]], size: int, draw: random.Random) -> MicroBatchLengths:
    """Measure random micro-batches of `size` sequences: of one, all sequences."""
    num = SEQUENCES_DRAWN // size
    drawn = [[row] for row in rows] if size == 1 else [draw.sample(rows, size) for _ in range(num)]
    tokens, logits, loss_tokens = [], [], []
    for micro_batch in drawn:
        union = 0
        for _, mask in micro_batch:
            union |= mask
        tokens.append(max(length for length, _ in micro_batch))
        logits.append(union.bit_count())
        loss_tokens.append(sum(mask.bit_count() for _, mask in micro_batch))
    return MicroBatchLengths(
        tokens=sum(tokens) / len(drawn),
        squares=sum(length * length for length in tokens) / len(drawn),
        logits=sum(logits) / len(drawn),
        max_logits=max(logits),
        max_loss_tokens=max(loss_tokens),
    )


def pack_rows(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Return rows of samples of at most `block_size` tokens: each sample goes where it leaves the least room.

    Best-fit decreasing, which needs at most 11/9 of the fewest rows   [Johnson 1974]; TRL packs in the same way.

    >>> pack_rows([3, 7, 5, 5, 2], 10)
    [[1, 0], [2, 3], [4]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that are free, row), ascending
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        at = bisect.bisect_left(room, (lengths[sample], -1))
        if at == len(room):
            rows.append([sample])
            free, row = block_size, len(rows) - 1
        else:
            free, row = room.pop(at)
            rows[row].append(sample)
        bisect.insort(room, (free - lengths[sample], row))
    return rows
