"""The format of a prepared corpus, its reader and its checks.

    data/NAME/
      train.bin val.bin   token ids one after another: little-endian uint16, or uint32 for a larger vocabulary
      meta.json           tokenizer, counts, hashes, and the recipe that made the corpus
      tokenizer.json      from text to ids and back

Samples to fine-tune on, which `evener train --model hf:FOLDER` prepares, have two more files: `train.flags.bin` and
`val.flags.bin` with a byte for each token (`LOSS`, `BEGIN`, `TEXT`).

nanoGPT's folders are read as they are: train.bin and val.bin of uint16, with `meta.pkl` for characters and without it
for GPT-2's tokens. With the tokenizer.json of another vocabulary beside them, they are of uint16 or uint32.

What is checked, and when:

| check | cost | by |
|---|---|---|
| the files exist and hold whole tokens, as many as meta.json says; its tokenizer | none | `load_corpus` |
| each split is at least one block long | none | `check_block_size`, once the block size is known |
| every id is inside the vocabulary | reads the files | `evener.corpus.token_check.check_token_ids`, before a launch |
| the content is unchanged | reads and hashes the files | a caller who compares `hash_content` with `content_hash` |
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import pickle
import random
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import DataError
from evener.core.base.file_io import open_file, read_file
from evener.core.base.shell import quote_word

CORPUS_FORMAT = 1
# Bits of a token's flags: it carries loss; a sample begins with it; that sample is a text, to be cut, not truncated.
LOSS, BEGIN, TEXT = 1, 2, 4
TOKENIZERS = ("byte", "char", "bpe", "gpt2")
SPLITS = ("train", "val")
TOKENIZER_FILES = ("tokenizer.json", "meta.pkl")  # ours, nanoGPT's; its GPT-2 folders have none
MIN_SPLIT_TOKENS = 2  # one token and the next one, which is predicted
GPT2_VOCAB_SIZE = 50257
PARTIAL_SUFFIX = ".partial"

_ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}
_MAX_PICKLE_BYTES = 64 * 1024 * 1024
_SAMPLED_ABOVE_BYTES = 64 * 1024 * 1024
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 64 * 1024
_DTYPE_SAMPLE_BYTES, _MIN_DTYPE_SAMPLE = 1024 * 1024, 256
_DISTINCT_SAMPLE_BLOCKS = 256
_PREPARE_HINT = "evener train FILE trains on a text of your own; evener data verbs makes an example"


class CorpusMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of meta.json."""

    format: int
    name: str
    tokenizer: Literal["byte", "char", "bpe", "gpt2", "unigram", "wordpiece", "wordlevel"]
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    train_tokens: int
    val_tokens: int
    content_hash: str
    tokenizer_hash: str
    num_documents: int
    text_bytes: int
    recipe: dict[str, str | int]
    is_samples: bool = False
    is_chat: bool = False


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared corpus whose files are complete.

    `content_hash` names its method: `sha256:` over all of train.bin and val.bin, or, for a nanoGPT folder above 64 MiB,
    `sampled-sha256:` over their sizes and evenly spread blocks, so that no start has to read them in full.
    Two corpora with the same `tokenizer_hash` encode every text with the same ids.
    """

    path: str
    name: str
    tokenizer: str
    vocab_size: int
    dtype: str
    train_tokens: int
    val_tokens: int
    content_hash: str
    tokenizer_hash: str
    is_samples: bool = False  # chats and texts to fine-tune on; else one stream of tokens
    is_chat: bool = False  # the samples are chats

    def split_path(self, split: str) -> Path:
        """Return the .bin file of "train" or "val"."""
        return Path(self.path) / f"{split}.bin"

    def flags_path(self, split: str) -> Path:
        """Return the file of a split's token flags, if the corpus has samples."""
        return Path(self.path) / f"{split}.flags.bin"

    def num_tokens(self, split: str) -> int:
        return self.train_tokens if split == "train" else self.val_tokens


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest dtype that holds the ids 0 .. vocab_size - 1.

    >>> token_dtype(65_536), token_dtype(65_537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def describe_tokenizer(kind: str, chars: str = "") -> bytes:
    """Return the tokenizer.json of a byte, char or gpt2 tokenizer; its SHA-256 is the `tokenizer_hash`.

    >>> describe_tokenizer("char", "ab")
    b'{"kind": "char", "chars": "ab"}\\n'
    """
    record = {"kind": kind, "chars": chars} if kind == "char" else {"kind": kind}
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def load_corpus(folder: str | os.PathLike[str]) -> Corpus:
    """Load the corpus in `folder` after all checks that do not read the .bin files.

    Raise DataError, whose one line names the file and what is wrong with it.
    """
    root = Path(folder)
    if root.name.endswith(PARTIAL_SUFFIX):
        raise DataError(f"{root} is unfinished: its preparation was interrupted", hint="run `evener data` again")
    try:
        root.stat()
    except FileNotFoundError:
        raise DataError(f"{root}: no such folder", hint=hint_for_missing(root)) from None
    except (OSError, ValueError) as error:  # a name that is too long, a NUL
        raise DataError(f"{root}: {getattr(error, 'strerror', error)}", hint=_PREPARE_HINT) from None
    if not root.is_dir():
        raise DataError(
            f"{root} is a file, not a prepared corpus", hint=f"prepare it: evener data text {quote_word(root)}"
        )
    corpus = _from_meta(root) if (root / "meta.json").exists() else _from_nanogpt(root)
    for split in SPLITS:
        if corpus.num_tokens(split) < MIN_SPLIT_TOKENS:
            raise DataError(
                f"{corpus.split_path(split)} holds {corpus.num_tokens(split)} tokens: fewer than {MIN_SPLIT_TOKENS}",
                hint="prepare the corpus again from more text",
            )
    return corpus


def hint_for_missing(root: Path) -> str:
    """Return what to do about data that is not there: a similar name beside it, or what else to train on."""
    if re.match(r"https?:/", str(root)):
        return "evener downloads no data: download it, then: evener train FILE"
    try:
        near = difflib.get_close_matches(root.name, os.listdir(root.parent), n=1)
    except OSError:
        near = []
    return f"did you mean {quote_word(root.parent / near[0])}?" if near else _PREPARE_HINT


def check_block_size(corpus: Corpus, block_tokens: int) -> None:
    """Raise DataError if a split is too short for one block and the token after it."""
    for split in SPLITS:
        if corpus.num_tokens(split) < block_tokens + 1:
            raise DataError(
                f"{corpus.split_path(split)} holds {corpus.num_tokens(split)} tokens: "
                f"too short for one block of {block_tokens} and the token after it",
                hint="take a shorter block or more text",
            )


def token_out_of_range_error(corpus: Corpus, split: str, position: int, token_id: int) -> DataError:
    """Return the error for a token id outside the vocabulary; the reader of the tokens raises it."""
    return DataError(
        f"{corpus.split_path(split)} holds token id {token_id} at position {position}, "
        f"beyond the {corpus.tokenizer} vocabulary of {corpus.vocab_size}",
        hint="the file belongs to another tokenizer or is damaged: prepare the corpus again",
    )


def mean_distinct_tokens(corpus: Corpus, block_size: int) -> list[float]:
    """Return the mean number of distinct tokens in 1, 2, 4, … blocks of the training split.

    This is the number of embedding rows that a batch of so many blocks looks up. Measured on at most 256 random blocks;
    empty if the split is shorter than one block.
    """
    num_blocks = corpus.train_tokens // block_size
    if not num_blocks:
        return []
    num = 1 << (min(num_blocks, _DISTINCT_SAMPLE_BLOCKS).bit_length() - 1)
    num_bytes, kind = block_size * _ITEM_BYTES[corpus.dtype], {"uint16": "H", "uint32": "I"}[corpus.dtype]
    groups = []
    with open_file(corpus.split_path("train")) as file:
        for block in random.Random(0).sample(range(num_blocks), num):
            file.seek(block * num_bytes)
            groups.append(set(array(kind, file.read(num_bytes))))
    means = [sum(map(len, groups)) / len(groups)]
    while len(groups) > 1:
        groups = [first | second for first, second in zip(groups[::2], groups[1::2], strict=True)]
        means.append(sum(map(len, groups)) / len(groups))
    return means


def hash_content(folder: Path, *, sampled: bool = False) -> str:
    """Return the `content_hash` of the .bin files in `folder`: a hash over one hash of each split."""
    read = sample_blocks if sampled else _all_blocks
    digests = []
    for split in SPLITS:
        digest, flags = hashlib.sha256(), folder / f"{split}.flags.bin"
        for path in [folder / f"{split}.bin", *([flags] if flags.exists() else [])]:
            for block in read(path):
                digest.update(block)
        digests.append(digest.digest())
    return join_digests(*digests, sampled=sampled)


def join_digests(train_digest: bytes, val_digest: bytes, *, sampled: bool = False) -> str:
    """Return the `content_hash` for the SHA-256 digests of train.bin and val.bin."""
    method = "sampled-sha256" if sampled else "sha256"
    return f"{method}:{hashlib.sha256(train_digest + val_digest).hexdigest()}"


def hash_bytes(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _from_meta(root: Path) -> Corpus:
    path = root / "meta.json"
    try:
        content = read_file(path)
        version = from_json(content, dict[str, Any]).get("format")
        if version != CORPUS_FORMAT:
            raise DataError(
                f"{path} is of format {version}; this evener reads {CORPUS_FORMAT}", hint="prepare the corpus again"
            )
        meta = from_json(content, CorpusMeta)
        tokenizer = read_file(root / "tokenizer.json")
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged: {error}", hint="prepare the corpus again") from None
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}", hint="prepare the corpus again") from None

    if hash_bytes(tokenizer) != meta.tokenizer_hash:
        raise DataError(
            f"{root / 'tokenizer.json'} is not the tokenizer that meta.json records",
            hint="prepare the corpus again",
        )
    if meta.vocab_size < 1 or (meta.dtype == "uint16" and token_dtype(meta.vocab_size) != "uint16"):
        raise DataError(
            f"{path} is damaged: a vocabulary of {meta.vocab_size} in {meta.dtype}", hint="prepare the corpus again"
        )
    for split, num_tokens in (("train", meta.train_tokens), ("val", meta.val_tokens)):
        _check_size(root / f"{split}.bin", num_tokens, meta.dtype)
        if meta.is_samples:
            _check_size(root / f"{split}.flags.bin", num_tokens, "uint8")
    return Corpus(
        path=str(root.absolute()),
        name=meta.name,
        tokenizer=meta.tokenizer,
        vocab_size=meta.vocab_size,
        dtype=meta.dtype,
        train_tokens=meta.train_tokens,
        val_tokens=meta.val_tokens,
        content_hash=meta.content_hash,
        tokenizer_hash=meta.tokenizer_hash,
        is_samples=meta.is_samples,
        is_chat=meta.is_chat,
    )


def _check_size(path: Path, num_tokens: int, dtype: str) -> None:
    actual, expected = _size_of(path), num_tokens * _ITEM_BYTES[dtype]
    if actual != expected:
        state = "truncated" if actual < expected else "too long"
        raise DataError(
            f"{path} is {state}: {actual} bytes where meta.json says {num_tokens} tokens of {dtype} ({expected} bytes)",
            hint="prepare the corpus again, or copy it again from where it came",
        )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing", hint=_PREPARE_HINT) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _from_nanogpt(root: Path) -> Corpus:
    if not any((root / f"{split}.bin").exists() for split in SPLITS):
        prepare = f"to train on the texts in it: evener data text {quote_word(root)}"
        raise DataError(f"{root} holds no corpus: neither meta.json nor train.bin", hint=prepare)
    sizes = {split: _size_of(root / f"{split}.bin") for split in SPLITS}
    kind, vocab_size, tokenizer_hash = _tokenizer_of_nanogpt(root)
    is_known = kind == "char" or vocab_size > 1 << 16
    dtype = token_dtype(vocab_size) if is_known or not _looks_like_uint32(root / "train.bin") else "uint32"
    if dtype == "uint32" and not (root / "tokenizer.json").exists():
        raise DataError(
            f"{root / 'train.bin'} is of uint32, and nothing says which tokenizer made it",
            hint=f"put its tokenizer.json, of the tokenizers library, into {quote_word(root)}",
        )
    for split, size in sizes.items():
        if size % _ITEM_BYTES[dtype]:
            raise DataError(
                f"{root / f'{split}.bin'} is truncated: {size} bytes are not a whole number of {dtype} tokens",
                hint="copy it again from where it came",
            )
    return Corpus(
        path=str(root.absolute()),
        name=root.absolute().name,
        tokenizer=kind,
        vocab_size=vocab_size,
        dtype=dtype,
        train_tokens=sizes["train"] // _ITEM_BYTES[dtype],
        val_tokens=sizes["val"] // _ITEM_BYTES[dtype],
        content_hash=hash_content(root, sampled=sum(sizes.values()) > _SAMPLED_ABOVE_BYTES),
        tokenizer_hash=tokenizer_hash,
    )


def _tokenizer_of_nanogpt(root: Path) -> tuple[str, int, str]:
    """Return (kind, vocabulary size, hash) of the tokenizer of a nanoGPT folder; without any file it is GPT-2's."""
    library, pickled = root / "tokenizer.json", root / "meta.pkl"
    if library.exists():
        content = read_file(library)
        kind, vocab_size = _read_library_vocabulary(library, content)
        return kind, vocab_size, hash_bytes(content)
    chars = read_nanogpt_chars(pickled) if pickled.exists() else ""
    kind = "char" if chars else "gpt2"
    return kind, len(chars) or GPT2_VOCAB_SIZE, hash_bytes(describe_tokenizer(kind, chars))


def _read_library_vocabulary(path: Path, content: bytes) -> tuple[str, int]:
    """Return the kind of model and the vocabulary size in a tokenizer.json of the `tokenizers` library."""
    try:
        record = from_json(content, dict[str, Any])
        model = record["model"]
        vocab = model["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [token["id"] for token in record.get("added_tokens") or ()]
        return str(model.get("type") or "bpe").lower(), 1 + max(map(int, ids))
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged: {error}", hint="copy it again from where it came") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(
            f"{path} is no tokenizer of the tokenizers library, and {path.with_name('meta.json')} is missing",
            hint="prepare the corpus again, or copy it again",
        ) from None


def _looks_like_uint32(path: Path) -> bool:
    """Return whether every second uint16 of a file is the empty upper half of a token id below 2^24.

    Some of them must not be empty: of uint16, every second token would then be one of a few, and one of them rare.
    """
    with open_file(path) as file:
        sample = file.read(_DTYPE_SAMPLE_BYTES)
    halves = array("H", sample[: len(sample) // 4 * 4])
    upper = halves[1::2]
    return len(halves) >= _MIN_DTYPE_SAMPLE and max(upper) < 256 <= max(halves[::2]) and 0 in upper


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles numbers, strings and their containers; refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain dicts of str and int are read")


def read_nanogpt_chars(path: Path) -> str:
    """Return the characters of nanoGPT's meta.pkl in the order of their ids, without executing code in the file."""
    hint = "evener reads the meta.pkl of nanoGPT's character corpora; prepare other text with: evener data text"
    try:
        if path.stat().st_size > _MAX_PICKLE_BYTES:
            raise DataError(f"{path} is no character table: it is larger than {_MAX_PICKLE_BYTES} bytes", hint=hint)
        table = _RestrictedUnpickler(io.BytesIO(read_file(path))).load()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise almost anything
        raise DataError(f"{path} is refused: {error or type(error).__name__}", hint=hint) from None
    itos = table.get("itos") if isinstance(table, dict) else None
    if not isinstance(itos, dict) or not itos or sorted(map(repr, itos)) != sorted(map(repr, range(len(itos)))):
        raise DataError(f"{path} is refused: it has no table `itos` from the ids 0, 1, … to characters", hint=hint)
    chars = [itos[index] for index in range(len(itos))]
    if not all(isinstance(char, str) and len(char) == 1 for char in chars):
        raise DataError(f"{path} is refused: not every entry of `itos` is one character", hint=hint)
    return "".join(chars)


def _all_blocks(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        while block := file.read(1 << 20):
            yield block


def sample_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's size and evenly spread blocks of it: what a `sampled-sha256` is over."""
    size = path.stat().st_size
    yield str(size).encode()
    with open_file(path) as file:
        for index in range(_NUM_SAMPLES):
            file.seek(index * max(0, size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
